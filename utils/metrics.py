"""Metrics of a team's rollouts, of a critic, and means over optimiser steps."""

import torch

from utils import distributed


def team_metrics(rollouts):
    """The reward of an episode and its deviation, and, where episodes may have several turns, of each turn.

    An episode's reward is the sum over its turns of the mean over the agents. An episode without a turn does not
    count. Scalars: reward_mean and reward_std are of all processes, the others of this one, such that their means over
    the processes are those of all episodes.
    """
    rewards = torch.stack([rollout.rewards for rollout in rollouts]).mean(0)  # [B, T]
    played = rollouts[0].played
    episodes = played[:, 0]
    episode_rewards = distributed.gather(sum(rewards.unbind(1))[episodes])
    metrics = {"reward_mean": episode_rewards.mean(), "reward_std": episode_rewards.std(correction=0)}
    num_turns = rewards.shape[1]
    if num_turns > 1:
        metrics["turns"] = played.sum() / distributed.mean(episodes.sum())
        for t in range(num_turns):
            count = distributed.mean(played[:, t].sum().float())
            metrics[f"turn_{t + 1}/reward_mean"] = (rewards[:, t] * played[:, t]).sum() / count
    return metrics


def explained_variance(returns, values, mask):
    """1 - Var(returns - values) / Var(returns) over the mask's ones in all processes.

    It is 1 for a perfect critic, and 0 for a constant one.
    """
    returns = distributed.gather(returns[mask > 0])
    values = distributed.gather(values[mask > 0])
    return 1 - (returns - values).var(correction=0) / returns.var(correction=0)


def sampler_metrics(rollout, most):
    """The ratio of a token's probability to that which it was sampled with, over the sampled tokens of all processes.

    Its mean, its largest, and the share of tokens where it is above `most`.
    """
    log_ratio = rollout.logprobs - rollout.sampler_logprobs
    ratio = distributed.gather(log_ratio[rollout.mask > 0]).exp()
    largest = ratio.max() if len(ratio) else ratio.sum()
    share = (ratio > most).float().mean()
    return {"sampler_ratio": ratio.mean(), "sampler_ratio_max": largest, "sampler_ratio_truncated": share}


def average(metrics):
    """The means, by name, of a list of dicts {name: scalar tensor} that have the same names; {} of none."""
    if not metrics:
        return {}
    return {name: torch.stack([each[name] for each in metrics]).mean() for name in metrics[0]}
