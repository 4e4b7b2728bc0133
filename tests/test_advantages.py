"""Advantages and the critic's targets against a loop in float64, along chains with holes."""

import pytest
import torch
from helpers import seeded

import iac_llm
import ippo_llm

GAMMA = 0.9
LAMBDA = 0.8
SHAPES = [(5, 12), (5, 3, 4)]  # chains of actions; turns of tokens
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


def assert_equals_the_loop(estimate, gae_lambda, shape):
    """Compare `estimate` of float32 with the loop, for many random chains."""
    for seed in SEEDS:
        generator = seeded(seed)
        rewards, values = torch.randn(2, *shape, generator=generator)
        mask = (torch.rand(shape, generator=generator) < 0.5).float()
        estimates = estimate(rewards, values, mask)
        for x, y in zip(estimates, expected(rewards, values, mask, GAMMA, gae_lambda)):
            torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_gae_equals_a_loop_in_float64_over_the_chain_without_its_holes(shape):
    def estimate(rewards, values, mask):
        return ippo_llm.gae(rewards, values, mask, GAMMA, LAMBDA)

    assert_equals_the_loop(estimate, LAMBDA, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_td_errors_equal_a_loop_in_float64_over_the_chain_without_its_holes(shape):
    def estimate(rewards, values, mask):
        return iac_llm.td_error(rewards, values, mask, GAMMA)

    assert_equals_the_loop(estimate, 0.0, shape)
