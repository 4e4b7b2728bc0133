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
    turns_of,
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
    """A function of a kind of episodes and flags: (agent, args, episodes, rollout)."""

    def build(kind, **flags):
        task = "number" if kind == "task" else None
        args = ppo_llm.resolve_args(make_ppo_args(task=task, micro_batch_size_per_gpu=3, **flags))
        (agent,) = make_ppo_agents(loaded_model, tokenizer, args)
        episodes = make_episodes(kind)
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


@KIND
def test_values_are_those_of_each_transcript_alone(make, kind):
    agent, args, episodes, rollout = make(kind)
    B, L = rollout.turn_of_token.shape
    values = ppo_llm.compute_values(agent, rollout, args)
    assert values.shape == (B, L + 1)
    with torch.no_grad():
        for b, transcript in enumerate(episodes):
            alone = values_of(agent, transcript).float()
            torch.testing.assert_close(values[b, : len(alone)], alone, atol=1e-5, rtol=0)


@KIND
@ACTIONS
def test_advantages_equal_sums(make, kind, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, rollout = make(kind, gamma=0.9, gae_lambda=0.8, adv_whitening=False, **flags)
    batch = make_ppo_batch(agent, rollout, args)
    targets = exact_targets(agent, episodes, args)
    torch.testing.assert_close(batch.advantages, dense(targets, batch.advantages.shape, 1), atol=2e-5, rtol=0)


@KIND
@ACTIONS
def test_returns_equal_sums(make, kind, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, rollout = make(kind, gamma=0.9, gae_lambda=0.8, **flags)
    batch = make_ppo_batch(agent, rollout, args)
    targets = exact_targets(agent, episodes, args)
    torch.testing.assert_close(batch.returns, dense(targets, batch.returns.shape, 2), atol=2e-5, rtol=0)


@KIND
@ACTIONS
def test_the_mask_is_one_on_actions(make, kind, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, rollout = make(kind, **flags)
    batch = make_ppo_batch(agent, rollout, args)
    expected = torch.zeros(batch.action_mask.shape)
    for index, _, _ in exact_targets(agent, episodes, args):
        expected[index] = 1
    assert torch.equal(batch.action_mask, expected)


@KIND
@ACTIONS
def test_advantages_are_standardised_over_actions(make, kind, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, rollout = make(kind, gamma=0.9, gae_lambda=0.8, **flags)
    batch = make_ppo_batch(agent, rollout, args)
    targets = exact_targets(agent, episodes, args)
    advantages = torch.tensor([advantage for _, advantage, _ in targets], dtype=torch.float64)
    white = (advantages - advantages.mean()) / advantages.std(correction=0)
    standardised = [(target[0], x) for target, x in zip(targets, white.tolist())]
    torch.testing.assert_close(batch.advantages, dense(standardised, batch.advantages.shape, 1), atol=5e-5, rtol=0)


@KIND
def test_rewards_of_tokens_lie_on_the_last_token_of_their_turn(make, kind):
    agent, args, episodes, rollout = make(kind, gamma=0.0, action_granularity="token")  # an end is worth nothing
    expected = torch.zeros_like(rollout.logprobs)
    for b, transcript in enumerate(episodes):
        for turn, columns in turns_of(transcript).items():
            expected[b, columns[-1]] = transcript.rewards[turn]
    torch.testing.assert_close(action_rewards(agent, rollout, args), expected)


def action_rewards(agent, rollout, args):
    """The rewards of actions, as `learn` has them."""
    values = ppo_llm.compute_values(agent, rollout, args)
    rewards = ppo_llm.bootstrap_rewards(rollout, values, args)
    return ppo_llm.to_actions(rewards, values, rollout, args)[0]


@pytest.mark.parametrize("granularity", ["turn", "token"])
def test_the_last_action_of_a_truncated_episode_gets_gamma_times_the_value_of_its_end(make, granularity):
    agent, args, episodes, rollout = make("game", gamma=0.9, action_granularity=granularity)
    rewards = action_rewards(agent, rollout, args)
    for b, transcript in enumerate(episodes):
        with torch.no_grad():
            values = values_of(agent, transcript)
        actions = actions_of(transcript, values, args)
        expected = torch.zeros_like(rewards[b])
        for action in actions:
            expected[action.index(b, args)[1]] = action.reward
        if b in TRUNCATED_GAMES:
            expected[actions[-1].index(b, args)[1]] += 0.9 * float(values[-1])
        torch.testing.assert_close(rewards[b], expected, atol=1e-5, rtol=0)
