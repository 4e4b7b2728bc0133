"""Metrics of a team's rollouts, and of its agents' updates, by their names in metrics.csv."""

import torch

from utils import distributed
from utils.models import earned_by_turn, episode_rewards

OF_TEAM = ("kl", "reference_logprob")  # metrics of agents that are written once, as means over the agents


def team_metrics(rollouts, several_turns):
    """Rewards and lengths of the episodes of all processes, {name: float}.

    What the team earns in an episode is the mean over its agents; what one earned before it first acted counts too. An
    episode in which no agent acted does not count.
    """
    has_acted = torch.stack([(rollout.turns > 0).any(1) for rollout in rollouts]).any(0)  # [B]
    earned = torch.stack([episode_rewards(rollout, torch.float64) for rollout in rollouts], 1)  # [B, N]
    earned = distributed.gather(earned[has_acted])  # of all processes
    of_team = earned.mean(1)
    metrics = {"reward_mean": of_team.mean(), "reward_std": of_team.std(correction=0)}
    if several_turns:
        metrics |= turn_metrics(rollouts, num_episodes=len(earned))
    if len(earned) and (earned - of_team[:, None]).abs().max() > 1e-6:  # agents earn differently
        metrics |= {f"agent_{i}/reward_mean": mean for i, mean in enumerate(earned.mean(0))}
    for i, rollout in enumerate(rollouts):
        num_tokens, num_turns = distributed.sum(torch.stack([count_tokens(rollout), count_turns(rollout)]))
        if num_turns:
            metrics[f"agent_{i}/response_length"] = num_tokens / num_turns
    return {name: float(x) for name, x in metrics.items()}


def say_what_cancels(metrics, is_zero_sum, has_critic):
    """Say so where what the agents earn adds up to 0 in every episode, of which a critic of the team learns nothing.

    Of a game that is known to be so (`is_zero_sum`) also where illegal answers cost something beside.
    """
    cancels = "agent_0/reward_mean" in metrics and metrics["reward_mean"] == metrics["reward_std"] == 0
    if cancels or is_zero_sum and has_critic:
        idle = "; the critic, which values their mean, teaches them nothing: take iac_llm.py" if has_critic else ""
        distributed.say(f"what the agents earn adds up to 0 in each episode, so look at agent_<i>/reward_mean{idle}")


def earned_by_seats(rollouts):
    """What each seat earns in the matches of all processes, [B, N]; those in which nobody acted are left out."""
    has_acted = torch.stack([(rollout.turns > 0).any(1) for rollout in rollouts]).any(0)  # [B]
    earned = [[sum(own.values()) for own in rollout.earned] for rollout in rollouts]
    return distributed.gather(torch.tensor(earned, dtype=torch.float64).T[has_acted.cpu()])


def seat_metrics(rollouts):
    """How often each seat wins, {name: float}: the share of matches in which it earned more than all others."""
    earned = earned_by_seats(rollouts)
    best, winners = earned.max(1)
    is_won = (earned > best[:, None] - 1e-6).sum(1) == 1  # no draw
    return {f"agent_{i}/win_rate": float((is_won & (winners == i)).double().mean()) for i in range(len(rollouts))}


def turn_metrics(rollouts, num_episodes):
    """How many turns an episode has, and what the team earns in each of them."""
    metrics = {"turns": 0.0}
    num_turns = max(distributed.max(rollout.turns) for rollout in rollouts)
    earned = torch.stack([earned_by_turn(rollout, num_turns).double() for rollout in rollouts]).mean(0)  # [B, T + 1]
    for turn in range(1, num_turns + 1):
        is_played = torch.stack([(rollout.turns == turn).any(1) for rollout in rollouts]).any(0)
        count, reward = distributed.sum(torch.stack([is_played.sum(), (earned[:, turn] * is_played).sum()]))
        metrics["turns"] += count / num_episodes
        metrics[f"turn_{turn}/reward_mean"] = reward / count
    return metrics


def count_tokens(rollout):
    """How many tokens this process sampled."""
    return (rollout.turns > 0).sum()


def count_turns(rollout):
    """In how many turns an agent acted, of all episodes of this process."""
    before = torch.nn.functional.pad(rollout.turns, (1, 0))[:, :-1]
    return ((rollout.turns > 0) & (rollout.turns != before)).sum()


def agent_metrics(metrics, critic_metrics=None):
    """The metrics of N agents, dicts, and of a critic of the team: agent_<i>/<name>, critic/<name>, and means."""
    named = {}
    acting = [each for each in metrics if float(each.get("reference_logprob", 1.0))]  # 0: nothing sampled
    for name in OF_TEAM:
        own = [float(each[name]) for each in acting if name in each]
        if own:
            named[name] = sum(own) / len(own)
    for i, each in enumerate(metrics):
        named |= {f"agent_{i}/{name}": x for name, x in each.items() if name not in OF_TEAM}
    return named | {f"critic/{name}": x for name, x in (critic_metrics or {}).items()}
