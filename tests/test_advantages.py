"""Advantages and the critic's targets against a loop in float64, by hand, and along chains with holes."""

import pytest
import torch
from helpers import seeded

import iac_llm
import ippo_llm
import ppo_llm

GAMMA = 0.9
LAMBDA = 0.8
SHAPES = [(5, 12), (5, 3, 4), (5, 12, 1)]  # chains of actions; turns of tokens; turns that are actions
SEEDS = range(30)


def loop(rewards, values, gamma, gae_lambda):
    """Advantages and targets of one chain of actions, lists of floats: the sum over TD errors that defines them."""
    advantages = []
    targets = []
    for t in range(len(rewards)):
        advantage = 0.0
        for k in range(t, len(rewards)):
            next_value = values[k + 1] if k + 1 < len(values) else 0.0
            delta = rewards[k] + gamma * next_value - values[k]
            advantage += (gamma * gae_lambda) ** (k - t) * delta
        advantages.append(advantage)
        targets.append(advantage + values[t])
    return advantages, targets


def expected(rewards, values, mask, gamma, gae_lambda):
    """What the loop gives for the masked positions of each row, in their order; 0 elsewhere."""
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    targets = torch.zeros_like(rewards, dtype=torch.float64)
    for b in range(len(rewards)):
        there = mask[b] > 0
        chain = loop(rewards[b][there].tolist(), values[b][there].tolist(), gamma, gae_lambda)
        advantages[b][there] = torch.tensor(chain[0], dtype=torch.float64)
        targets[b][there] = torch.tensor(chain[1], dtype=torch.float64)
    return advantages, targets


def prefix_mask(shape, generator):
    """Ones up to a random length, in each of the last dimension's rows; some are empty."""
    lengths = torch.randint(0, shape[-1] + 1, shape[:-1], generator=generator)
    return (torch.arange(shape[-1]) < lengths[..., None]).float()


def mask_with_holes(shape, generator):
    return (torch.rand(shape, generator=generator) < 0.5).float()


def assert_equals_the_loop(estimate, gae_lambda, make_mask, shape):
    """Compare `estimate` of float32 with the loop, for many random chains."""
    for seed in SEEDS:
        generator = seeded(seed)
        rewards, values = torch.randn(2, *shape, generator=generator)
        mask = make_mask(shape, generator)
        estimates = estimate(rewards, values, mask)
        for x, y in zip(estimates, expected(rewards, values, mask, GAMMA, gae_lambda)):
            torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=0)


MASKS = pytest.mark.parametrize("make_mask", [prefix_mask, mask_with_holes])


@MASKS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("script", [ippo_llm, ppo_llm])
def test_gae_equals_a_loop_in_float64_over_the_chain_without_its_holes(script, shape, make_mask):
    def estimate(rewards, values, mask):
        return script.gae(rewards, values, mask, GAMMA, LAMBDA)

    assert_equals_the_loop(estimate, LAMBDA, make_mask, shape)


@MASKS
@pytest.mark.parametrize("shape", SHAPES)
def test_td_errors_equal_a_loop_in_float64_over_the_chain_without_its_holes(shape, make_mask):
    def estimate(rewards, values, mask):
        return iac_llm.td_error(rewards, values, mask, GAMMA)

    assert_equals_the_loop(estimate, 0.0, make_mask, shape)


def test_what_stands_in_a_hole_does_not_matter():
    rewards, values = torch.randn(2, 4, 3, 5, generator=seeded())
    mask = mask_with_holes((4, 3, 5), seeded(1))
    noise = 100 * (1 - mask) * torch.randn(4, 3, 5, generator=seeded(2))
    for estimate in (
        lambda *chain: ippo_llm.gae(*chain, GAMMA, LAMBDA),
        lambda *chain: iac_llm.td_error(*chain, GAMMA),
    ):
        with_noise = estimate(rewards + noise, values + noise, mask)
        for x, y in zip(with_noise, estimate(rewards, values, mask)):
            torch.testing.assert_close(x, y, atol=0, rtol=0)
            assert not x[mask == 0].any()


def test_with_lambda_one_the_targets_are_the_sums_of_the_rewards_to_come():
    rewards, values = torch.randn(2, 3, 5, generator=seeded())
    advantages, returns = ippo_llm.gae(rewards, values, torch.ones(3, 5), 1.0, 1.0)
    rewards_to_come = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns, rewards_to_come)
    torch.testing.assert_close(advantages, rewards_to_come - values)


def test_with_lambda_zero_gae_is_the_td_error():
    rewards, values = torch.randn(2, 3, 4, 5, generator=seeded())
    mask = mask_with_holes((3, 4, 5), seeded(1))
    td_errors = iac_llm.td_error(rewards, values, mask, GAMMA)
    for x, y in zip(ippo_llm.gae(rewards, values, mask, GAMMA, 0.0), td_errors):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=0)


# --- By hand ----------------------------------------------------------------------------------------------------------

# Two episodes: turns with rewards 1 and 2, and one turn with reward 1; gamma 0.9, lambda 0.8, gamma lambda = 0.72.
# Turns: V = 0.5, 0.25 and 0.1. delta_2 = 2 - 0.25 = 1.75; delta_1 = 1 + 0.9 * 0.25 - 0.5 = 0.725; the other's is 0.9.
TURNS = {
    "rewards": [[[1.0], [2.0]], [[1.0], [9.0]]],
    "values": [[[0.5], [0.25]], [[0.1], [9.0]]],
    "mask": [[[1.0], [1.0]], [[1.0], [0.0]]],
}
# Tokens: two in the first turn (V = 0.5, 0.4), one in the second (0.25); two in the other episode (0.1, 0.2).
# delta = 0 + 0.9 * 0.4 - 0.5 = -0.14; 1 + 0.9 * 0.25 - 0.4 = 0.825; 1.75; and 0.9 * 0.2 - 0.1 = 0.08; 1 - 0.2 = 0.8.
TOKENS = {
    "rewards": [[[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]], [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]],
    "values": [[[0.5, 0.4, 9.0], [0.25, 9.0, 9.0]], [[0.1, 0.2, 9.0], [9.0, 9.0, 9.0]]],
    "mask": [[[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]],
}
GAE_OF_TURNS = [[[0.725 + 0.72 * 1.75], [1.75]], [[0.9], [0.0]]]
TD_OF_TURNS = [[[0.725], [1.75]], [[0.9], [0.0]]]
GAE_OF_TOKENS = [
    [[-0.14 + 0.72 * 2.085, 0.825 + 0.72 * 1.75, 0.0], [1.75, 0.0, 0.0]],
    [[0.08 + 0.72 * 0.8, 0.8, 0.0], [0.0, 0.0, 0.0]],
]
TD_OF_TOKENS = [[[-0.14, 0.825, 0.0], [1.75, 0.0, 0.0]], [[0.08, 0.8, 0.0], [0.0, 0.0, 0.0]]]


@pytest.mark.parametrize(
    "actions, gae, td_error", [(TURNS, GAE_OF_TURNS, TD_OF_TURNS), (TOKENS, GAE_OF_TOKENS, TD_OF_TOKENS)]
)
def test_an_episode_of_two_turns_beside_one_of_one_by_hand(actions, gae, td_error):
    chain = [torch.tensor(actions[name]) for name in ("rewards", "values", "mask")]
    _, values, mask = chain
    estimates = {"gae": ippo_llm.gae(*chain, GAMMA, LAMBDA), "td_error": iac_llm.td_error(*chain, GAMMA)}
    for name, by_hand in (("gae", gae), ("td_error", td_error)):
        advantages, returns = estimates[name]
        torch.testing.assert_close(advantages, torch.tensor(by_hand))
        torch.testing.assert_close(returns, (torch.tensor(by_hand) + values) * mask)
