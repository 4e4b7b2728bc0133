"""Earlier copies of the agent that learns, in the seats that it does not take (--opponents).

An agent that meets only itself as it is now can forget how it won against what it was. So it takes one seat, and the
others are played by copies of its actor: of the newest K that were taken, of which the oldest leaves for a new one.
"""

import copy
import random

from utils.cli import UserError
from utils.run.metrics import seat_metrics, team_metrics


class Opponents:
    """K earlier copies of an agent's actor, its `opponents`, which checkpoints have too: adapters, or whole models.

    A copy is taken before every --opponent-interval updates, the first before update 0. Which copies there are, who
    sits where and who is drawn follows from the number of the update and the seed alone, in all processes alike.
    """

    def __init__(self, agent, initial, args):
        if args.num_agents == 1:
            raise UserError("--opponents takes seats for them: --num-agents 2 or more")
        self.agent = agent
        self.args = args
        agent.opponents = [initial.frozen_copy(f"agent_0_opponent_{k}") for k in range(args.opponents)]
        self.players = [copy.copy(agent) for _ in agent.opponents]  # they read as the agent does
        for player, policy in zip(self.players, agent.opponents):
            player.actor = policy

    def seats(self, update):
        """Who plays in each of the N seats in an update: in one the agent, in the others earlier copies of it."""
        num_taken, since = divmod(update, self.args.opponent_interval)
        if since == 0:  # the same again where an update is begun again
            self.agent.opponents[num_taken % len(self.players)].copy_from(self.agent.actor)
        there = self.players[: num_taken + 1]
        rng = random.Random(f"opponents {self.args.seed} {update}")
        seats = [rng.choice(there) for _ in range(self.args.num_agents)]
        seats[update % self.args.num_agents] = self.agent
        return seats

    def metrics(self, update, rollouts):
        """What the agent earned in its seat in an update, and how often it won there, {name: float}."""
        seat = update % self.args.num_agents
        earned = team_metrics([rollouts[seat]], several_turns=False)["reward_mean"]
        won = seat_metrics(rollouts)[f"agent_{seat}/win_rate"]
        return {"reward_against_opponents": earned, "win_rate_against_opponents": won}
