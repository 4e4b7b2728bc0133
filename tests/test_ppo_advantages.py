"""Values, advantages and returns of ppo_llm against sums in float64 over single transcripts, without padding."""

import pytest
import torch
from helpers import (
    actions_of,
    make_episodes,
    make_ppo_agents,
    make_ppo_args,
    make_ppo_batch,
    make_ppo_rollout,
    values_of,
)

import ppo_llm

ACTIONS = pytest.mark.parametrize(
    "granularity, reduction",
    [("turn", "first_value"), ("turn", "mean"), ("turn", "final_value"), ("token", "first_value")],
)


@pytest.fixture
def make(loaded_model, tokenizer):
    """A function of flags: (agent, args, episodes, rollout)."""

    def build(**flags):
        args = ppo_llm.resolve_args(make_ppo_args(micro_batch_size_per_gpu=3, **flags))
        (agent,) = make_ppo_agents(loaded_model, tokenizer, args)
        episodes = make_episodes("game")
        return agent, args, episodes, make_ppo_rollout(episodes, agent, args)

    return build


def exact_targets(agent, episodes, args):
    """Of each action its index, A, and the critic's target: sums over what comes after it."""
    targets = []
    for b, transcript in enumerate(episodes):
        with torch.no_grad():
            values = values_of(agent, transcript)
        actions = actions_of(transcript, values, args)
        chain = [float(action.value) for action in actions]
        chain.append(float(values[-1]) if transcript.truncated else 0.0)
        for t, action in enumerate(actions):
            advantage = 0.0
            for k in range(t, len(actions)):
                delta = actions[k].reward + args.gamma * chain[k + 1] - chain[k]
                advantage += (args.gamma * args.gae_lambda) ** (k - t) * delta
            targets.append((action.index(b, args), advantage, advantage + chain[t]))
    return targets


def dense(targets, shape, column):
    """One number of each target where it belongs, 0 elsewhere."""
    x = torch.zeros(shape)
    for target in targets:
        x[target[0]] = target[column]
    return x


@ACTIONS
def test_advantages_and_returns_equal_sums(make, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, rollout = make(gamma=0.9, gae_lambda=0.8, adv_whitening=False, **flags)
    batch = make_ppo_batch(agent, rollout, args)
    targets = exact_targets(agent, episodes, args)
    shape = batch.advantages.shape
    torch.testing.assert_close(batch.advantages, dense(targets, shape, 1), atol=2e-5, rtol=0)
    torch.testing.assert_close(batch.returns, dense(targets, shape, 2), atol=2e-5, rtol=0)
    assert torch.equal(batch.action_mask, dense([(index, 1.0) for index, _, _ in targets], shape, 1))


@ACTIONS
def test_advantages_are_standardised_over_actions(make, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, rollout = make(gamma=0.9, gae_lambda=0.8, **flags)
    batch = make_ppo_batch(agent, rollout, args)
    targets = exact_targets(agent, episodes, args)
    advantages = torch.tensor([advantage for _, advantage, _ in targets], dtype=torch.float64)
    white = (advantages - advantages.mean()) / advantages.std(correction=0)
    standardised = [(target[0], x) for target, x in zip(targets, white.tolist())]
    torch.testing.assert_close(batch.advantages, dense(standardised, batch.advantages.shape, 1), atol=5e-5, rtol=0)
