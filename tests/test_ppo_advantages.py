"""Values, advantages and returns of ppo_llm against sums in float64 over single transcripts, without padding."""

import pytest
import torch
from helpers import (
    TRUNCATED_GAMES,
    actions_of,
    make_episodes,
    make_ppo_agents,
    make_ppo_args,
    make_ppo_batch,
    make_ppo_rollout,
    values_of,
)

import ppo_llm

KIND = pytest.mark.parametrize("kind", ["game", "task"])
ACTIONS = pytest.mark.parametrize(
    "granularity, reduction",
    [("turn", "first_value"), ("turn", "mean"), ("turn", "final_value"), ("token", "first_value")],
)


@pytest.fixture
def make(loaded_model, tokenizer):
    """A function of a kind of episodes and flags: (agent, args, episodes, rewards, rollout)."""

    def build(kind, **flags):
        task = "number" if kind == "task" else None
        args = ppo_llm.resolve_args(make_ppo_args(task=task, micro_batch_size_per_gpu=3, **flags))
        (agent,) = make_ppo_agents(loaded_model, tokenizer, args)
        episodes, rewards = make_episodes(kind)
        return agent, args, episodes, rewards, make_ppo_rollout(episodes, rewards, agent, args)

    return build


def exact_targets(agent, episodes, rewards, args):
    """Of each action its index, A, and the critic's target: sums over what comes after it."""
    targets = []
    for b, episode in enumerate(episodes):
        with torch.no_grad():
            values = [values_of(agent, transcript) for transcript in episode]
        actions = actions_of(episode, rewards[b], values, args)
        chain = [float(action.value) for action in actions]
        chain.append(float(values[-1][-1]) if episode[-1].truncated else 0.0)
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


@KIND
def test_values_are_those_of_each_transcript_alone(make, kind):
    agent, args, episodes, _, rollout = make(kind)
    values = ppo_llm.compute_values(agent, rollout, args)
    expected = torch.zeros(*rollout.mask.shape[:-1], rollout.mask.shape[-1] + 1)
    with torch.no_grad():
        for b, episode in enumerate(episodes):
            for r, transcript in enumerate(episode):
                alone = values_of(agent, transcript)
                expected[b, r, : len(alone)] = alone
    read = torch.nn.functional.pad(rollout.response_mask, (1, 0), value=1) * rollout.has_tokens[..., None]
    torch.testing.assert_close(values * read, expected, atol=1e-5, rtol=0)


@KIND
@ACTIONS
def test_advantages_equal_sums(make, kind, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, rewards, rollout = make(kind, gamma=0.9, gae_lambda=0.8, adv_whitening=False, **flags)
    batch = make_ppo_batch(agent, rollout, args)
    targets = exact_targets(agent, episodes, rewards, args)
    torch.testing.assert_close(batch.advantages, dense(targets, batch.advantages.shape, 1), atol=2e-5, rtol=0)


@KIND
@ACTIONS
def test_returns_equal_sums(make, kind, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, rewards, rollout = make(kind, gamma=0.9, gae_lambda=0.8, **flags)
    batch = make_ppo_batch(agent, rollout, args)
    targets = exact_targets(agent, episodes, rewards, args)
    torch.testing.assert_close(batch.returns, dense(targets, batch.returns.shape, 2), atol=2e-5, rtol=0)


@KIND
@ACTIONS
def test_the_mask_is_one_on_actions(make, kind, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, rewards, rollout = make(kind, **flags)
    batch = make_ppo_batch(agent, rollout, args)
    expected = torch.zeros(batch.action_mask.shape)
    for index, _, _ in exact_targets(agent, episodes, rewards, args):
        expected[index] = 1
    assert torch.equal(batch.action_mask, expected)


@KIND
@ACTIONS
def test_advantages_are_standardised_over_actions(make, kind, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, rewards, rollout = make(kind, gamma=0.9, gae_lambda=0.8, **flags)
    batch = make_ppo_batch(agent, rollout, args)
    targets = exact_targets(agent, episodes, rewards, args)
    advantages = torch.tensor([advantage for _, advantage, _ in targets], dtype=torch.float64)
    white = (advantages - advantages.mean()) / advantages.std(correction=0)
    standardised = [(target[0], x) for target, x in zip(targets, white.tolist())]
    torch.testing.assert_close(batch.advantages, dense(standardised, batch.advantages.shape, 1), atol=5e-5, rtol=0)


@pytest.mark.parametrize("granularity", ["turn", "token"])
def test_a_truncated_episode_gets_gamma_times_the_value_of_its_end(make, granularity):
    agent, args, episodes, rewards, rollout = make("game", gamma=0.9, action_granularity=granularity)
    values = ppo_llm.compute_values(agent, rollout, args)
    bootstrapped = ppo_llm.bootstrap_rewards(rollout, values, args)
    for b, (transcript,) in enumerate(episodes):
        expected = list(rewards[b])
        if b in TRUNCATED_GAMES:
            with torch.no_grad():
                expected[-1] += 0.9 * float(values_of(agent, transcript)[-1])
        assert bootstrapped[b].tolist() == pytest.approx(expected + [0.0] * (3 - len(expected)), abs=1e-5)


def test_rewards_of_tokens_lie_on_the_last_token_of_their_turn(make):
    agent, args, episodes, rewards, rollout = make("task", action_granularity="token")
    values = ppo_llm.compute_values(agent, rollout, args)
    token_rewards, _, _ = ppo_llm.prepare_actions(rollout, values, args)
    expected = torch.zeros_like(token_rewards)
    for b, episode in enumerate(episodes):
        for r, transcript in enumerate(episode):
            expected[b, r, len(transcript.response_ids) - 1] = rewards[b][r]
    torch.testing.assert_close(token_rewards, expected)
