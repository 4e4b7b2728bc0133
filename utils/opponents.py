"""Who sits in the seats that the agent that learns does not take: earlier copies of it, or the agents of a run.

An agent that meets only itself as it is now can forget how it won against what it was. So it takes one seat, and the
others are played by copies of its actor (--opponents): of the newest K that were taken, of which the oldest leaves for
a new one. With --opponent-run a run's agents play there, as they were in the end, which do not change, or with `random`
whoever draws legal answers.
"""

import copy
import random
import sys
from pathlib import Path

import torch
from pydantic import NonNegativeInt, PositiveInt

from utils import distributed, models
from utils.cli import UserError, flags, needs, not_with, one_line
from utils.distributed import say
from utils.envs import game_seeds
from utils.envs.seats import RANDOM, has_random_player
from utils.run.checkpoint import MANIFEST, digest, newest_whole
from utils.run.metrics import earned_by_seats, seat_metrics

OF_LEARNING = ("optimizers", "schedules", "critic", "value_head", "reference")  # which a player does not need


@flags
class OpponentArgs:
    """Self-play, and whom the agent meets in it."""

    self_play: bool = not_with("num_agents=1", default=False)  # one agent in every seat; with opponents, in one of them
    # earlier copies to keep; in each update one seat, in rotation, is the learner's, and random copies take the others
    opponents: NonNegativeInt = needs("self_play", default=0)
    opponent_interval: PositiveInt = needs("opponents", default=10)  # updates until the next copy replaces the oldest
    opponent_run: str | None = needs("self_play")  # opponents: a run's final agents (its folder), or `random`


def make_opponents(agent, initial, task, args):
    """The Opponents of the flags, or None. Raises UserError."""
    if not args.opponents and args.opponent_run is None:
        return None
    if args.opponent_run is None:
        return Opponents(agent, initial, args)
    if args.opponents:
        raise UserError("--opponent-run has no effect with --opponents")
    if args.opponent_run == RANDOM:
        return RandomOpponents(agent, task.given, args)
    return RunOpponents(agent, args)


class Opponents:
    """K earlier copies of an agent's actor, its `opponents`, which checkpoints have too: adapters, or whole models.

    A copy is taken before every --opponent-interval updates, the first before update 0. Which copies there are, who
    sits where and who is drawn follows from the number of the update and the seed alone, in all processes alike.
    """

    def __init__(self, agent, initial, args):
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
        return self.with_agent(seats, update)

    def with_agent(self, seats, update):
        """Those seats, but the agent that learns in its own: each seat in turn."""
        seats[update % self.args.num_agents] = self.agent
        return seats

    def metrics(self, update, rollouts):
        """What the agent earned in its seat in an update, with half of its interval, and how often it won there."""
        seat = update % self.args.num_agents
        earned = earned_by_seats(rollouts)[:, seat]
        deviation = float(earned.std(correction=int(len(earned) > 1)))
        half_width = 1.96 * deviation / max(1, len(earned)) ** 0.5  # of the 95 % interval
        won = seat_metrics(rollouts)[f"agent_{seat}/win_rate"]
        metrics = {"reward_against_opponents": float(earned.mean()), "win_rate_against_opponents": won}
        return metrics | {"reward_half_width_against_opponents": half_width}


class RunOpponents(Opponents):
    """The agents of a run of the same game, each in the seat in which it learned. Their models may be of another base.

    They sample as the agent that learns does (--temperature and so on), and checkpoints do not have them, but the name
    of the checkpoint that they are of.
    """

    def __init__(self, agent, args):
        if args.use_vllm:
            raise UserError("--opponent-run has no effect with --use-vllm")
        self.agent = agent
        self.args = args
        side = load_side(args.opponent_run, "--opponent-run", args)
        checkpoint, _ = newest_whole(Path(args.opponent_run) / "checkpoints", tell=lambda _: None)
        self.met = {"run": args.opponent_run, "checkpoint": checkpoint.name, **digest(checkpoint / MANIFEST)}
        self.players = side.seats
        for player in dict.fromkeys(self.players):  # they sample as many tokens as the learner does
            player.longest_prompt += side.args.max_new_tokens - args.max_new_tokens

    def seats(self, update):
        met = self.agent.state.get("opponent", self.met)
        if met["run"] == self.met["run"] and met != self.met:  # a fork may take another run
            since = f"has learned since, from {met['checkpoint']} to {self.met['checkpoint']}"
            say(f"--opponent-run {met['run']} {since}: it plays otherwise now")
        self.agent.state["opponent"] = self.met
        return self.with_agent([*self.players], update)


class RandomOpponents(Opponents):
    """A player that draws legal answers at random. It moves within the environment: nobody has its transcripts."""

    def __init__(self, agent, game, args):
        if not has_random_player(game):
            raise UserError("--opponent-run random takes a game that says what is legal: open_spiel, pettingzoo")
        if args.num_turns < args.num_agents:  # in the last seat the agent would not move in any match
            takes = f"a move of each seat, --num-turns {args.num_agents} or more"
            raise UserError(f"--opponent-run random takes {takes}, got {args.num_turns}")
        self.agent = agent
        self.args = args
        self.game = game
        self.idle = copy.copy(agent)  # sits where nothing is observed

    def seats(self, update):
        seats = self.with_agent([self.idle] * self.args.num_agents, update)
        self.game.random_seats = {k for k, player in enumerate(seats) if player is self.idle}
        return seats

    def metrics(self, update, rollouts):
        self.game.random_seats = ()  # an evaluation has the agent in all seats
        return super().metrics(update, rollouts)


class EvalOpponents:
    """Whom the agents meet in evaluations (--eval-against): runs of the same game, and a player that plays at random.

    The agents sit in one seat after the other, and whom they meet in all others. A run's agents play with its newest
    weights of when this run starts, and its own sampling. Raises UserError.
    """

    def __init__(self, game, args):
        self.game = game
        self.args = args
        self.sides = {}  # by name; None: who plays at random
        for player in args.eval_against:
            name = one_line(Path(player).resolve().name, 80)
            if name in self.sides or name == RANDOM and player != RANDOM:
                raise UserError(f"--eval-against takes players of different names, and {player} is another {name}")
            if player == RANDOM and not has_random_player(game):
                raise UserError(f"--eval-against random: --env {args.env} does not say which answers are legal")
            self.sides[name] = None if player == RANDOM else load_side(player, "--eval-against", args)

    def scores(self, agents):
        """What each seat earns in the held-out matches on average, and half of the 95 % interval: {name: float}."""
        from utils.league import Side, play_sides, result_of, seats_of

        _, items = game_seeds(self.args, 1)
        own = Side("", seats_of(agents, self.args.num_agents), self.args, script_of(self.args), is_sampling=True)
        scores = {}
        with models.sampling(own.seats, self.args):
            for name, side in self.sides.items():
                for seat in range(self.args.num_agents):
                    seating = [side] * self.args.num_agents
                    seating[seat] = own
                    earned = play_sides(seating, self.game, distributed.share(items), self.args, self.args.seed)
                    result = result_of(distributed.gather(torch.from_numpy(earned[:, seat])).numpy())
                    scores[f"eval/agent_{seat}/reward_against_{name}"] = result.mean
                    scores[f"eval/agent_{seat}/reward_half_width_against_{name}"] = result.half
        return scores


def script_of(args):
    """The module of the script whose flags these are, or a class that inherits from them."""
    modules = [sys.modules[each.__module__] for each in type(args).__mro__]
    return next(module for module in modules if hasattr(module, "generate"))


def load_side(run, flag, args):
    """A run of this game, which the flag names, as a Side: of a script of the project, or the one that runs.

    Raises UserError.
    """
    from utils.enjoy import import_script, read_config  # they and the league import scripts
    from utils.league import load_sides

    script = script_of(args).__file__
    try:
        config = read_config(run)
        try:
            import_script(run, config)
            script = None
        except UserError as error:
            if Path(str(config.get("script"))).name != Path(script).name:
                raise UserError(f"{run} is of another script, which is not run for it") from error
        side = load_sides([run], script)[0]
    except UserError as error:
        raise UserError(f"{flag}: {error}") from error
    game, own_game = (f"--env {each.env} --num-agents {each.num_agents}" for each in (side.args, args))
    if game != own_game:
        raise UserError(f"{flag} {run} is a run of {game}, and this is one of {own_game}")
    for player in side.seats:
        for name in OF_LEARNING:
            vars(player).pop(name, None)
    return side
