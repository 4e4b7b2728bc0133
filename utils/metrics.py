"""Metrics of a team's rollouts and of an agent's update. Averaged over the processes, each is that of all episodes."""

import torch

from utils import distributed

MOST_WEIGHT = 2.0  # at which the weights of sampled tokens are truncated
OF_TEAM = ("kl", "reference_logprob")  # metrics of agents that are written once, as means over the agents


def team_metrics(rollouts):
    """The reward of an episode and its deviation; of several turns also each one's, and prompts that were too long.

    An episode's reward is the sum over its turns of the mean over the agents. An episode without a turn does not
    count. Scalars: reward_mean and reward_std are of all processes, the others of this one, such that their means over
    the processes are those of all episodes.
    """
    rewards = torch.stack([rollout.raw_rewards for rollout in rollouts]).mean(0)  # [B, T]
    played = rollouts[0].played
    episodes = played[:, 0]
    episode_rewards = distributed.gather(sum(rewards.unbind(1))[episodes])
    metrics = {"reward_mean": episode_rewards.mean(), "reward_std": episode_rewards.std(correction=0)}
    num_turns = rewards.shape[1]
    if num_turns > 1:
        if hasattr(rollouts[0], "num_long_prompts"):
            metrics["long_prompts"] = rollouts[0].num_long_prompts / distributed.mean(episodes.sum())
        metrics["turns"] = played.sum() / distributed.mean(episodes.sum())
        for t in range(num_turns):
            count = distributed.mean(played[:, t].sum().float())
            metrics[f"turn_{t + 1}/reward_mean"] = (rewards[:, t] * played[:, t]).sum() / count
    return metrics


def count_new_tokens(rollouts):
    """How many tokens this process sampled, a scalar: those of a turn that the paths through a tree share, once."""
    of_paths = sum(rollout.response_mask.sum() for rollout in rollouts)
    counted = getattr(rollouts[0], "num_new_tokens", None)
    return of_paths if counted is None else torch.full_like(of_paths, counted)


def mean_reward(rollouts, count=True):
    """The mean reward of the episodes of all processes; those of a process do not count without `count`."""
    rewards = torch.stack([rollout.raw_rewards for rollout in rollouts]).mean(0)  # [B, T]
    episodes = rollouts[0].played[:, 0] & count
    return distributed.gather(sum(rewards.unbind(1))[episodes]).mean()


def explained_variance(returns, values, mask):
    """1 - Var(returns - values) / Var(returns) over the mask's ones in all processes.

    It is 1 for a perfect critic, and 0 for a constant one.
    """
    returns = distributed.gather(returns[mask > 0])
    values = distributed.gather(values[mask > 0])
    return 1 - (returns - values).var(correction=0) / returns.var(correction=0)


def sampler_metrics(rollout):
    """The ratio of a token's probability to that which it was sampled with, over the sampled tokens of all processes.

    Its mean, its largest, and the share of tokens where it is above MOST_WEIGHT.
    """
    log_ratio = rollout.logprobs - rollout.sampler_logprobs
    ratio = distributed.gather(log_ratio[rollout.response_mask > 0]).exp()
    largest = ratio.max() if len(ratio) else ratio.sum()
    share = (ratio > MOST_WEIGHT).float().mean()
    return {"sampler_ratio": ratio.mean(), "sampler_ratio_max": largest, "sampler_ratio_truncated": share}


def update_metrics(batch, losses, steps, with_sampler=False):
    """What an agent's update was like: metrics of its rollout, its critic, and means over its optimiser steps.

    `losses` has the metrics of all micro-batches, {name: scalar tensor}, which add up to those of a step; `steps` those
    of the steps. Without a reference, or without values, there are no metrics of these.
    """
    metrics = {}
    mask = batch.response_mask
    if batch.reference_logprobs is not None:
        num_tokens = distributed.mean(mask.sum())
        metrics["kl"] = ((batch.logprobs - batch.reference_logprobs) * mask).sum() / num_tokens
        metrics["reference_logprob"] = (batch.reference_logprobs * mask).sum() / num_tokens
    metrics["response_length"] = mask.sum() / distributed.mean(batch.played.sum())
    for name in losses[0]:
        metrics[name] = torch.stack([each[name] for each in losses]).sum() / len(steps)
    metrics |= average(steps)
    if getattr(batch, "old_values", None) is not None:
        metrics["explained_variance"] = explained_variance(batch.returns, batch.old_values, batch.action_mask)
    if with_sampler and batch.sampler_logprobs is not None:  # of a central critic there are none
        metrics |= sampler_metrics(batch)
    return metrics


def by_agent(agents):
    """The metrics of N agents, dicts, as one: agent_<i>/<name>, but for those that are a team's, which are means."""
    metrics = {}
    for name in OF_TEAM:
        if name in agents[0]:
            metrics[name] = torch.stack([each[name] for each in agents]).mean()
    for i, each in enumerate(agents):
        metrics |= {f"agent_{i}/{name}": x for name, x in each.items() if name not in OF_TEAM}
    return metrics


def by_critic(metrics):
    """The metrics of a central critic: critic/<name>; what it reads has no response."""
    return {f"critic/{name}": x for name, x in metrics.items() if name != "response_length"}


def average(metrics):
    """The means, by name, of a list of dicts {name: scalar tensor} that have the same names; {} of none."""
    if not metrics:
        return {}
    return {name: torch.stack([each[name] for each in metrics]).mean() for name in metrics[0]}
