"""Advantages where there is little to learn: noise is not made large, and what episodes earn keeps its sense."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import all_parameters, same_tensors
from short_runs import SCRIPTS, every_script, small_model, train

import iac_llm
import ippo_llm

BOTH = pytest.mark.parametrize("script", [ippo_llm, iac_llm])
pytestmark = pytest.mark.usefixtures("in_tmp_path")


def earn_the_same(*completions, items):
    return [0.3] * len(items)


@every_script
def test_a_rollout_in_which_all_earn_the_same_moves_no_actor(script):
    sizes = {"batch_size": 2, "beta": 0.0} if script == "ppo" else {"mini_batch_size": 2, "kl_coef": 0.0}
    learned, _ = train(script, earn_the_same, **sizes)
    module = SCRIPTS[script]
    shape = {"task": "number", "lora_rank": 4, "lora_alpha": 8.0} if script == "ppo" else {}
    untrained = module.build_agents(module.Args(num_agents=2, **shape), "cpu", 1, *small_model())
    for agent, other in zip(learned[:2], untrained):  # not their critic
        if script == "ppo":
            assert not any(x.any() for x in adapter_weights(agent, "lora_B"))
        else:
            assert same_tensors([*agent.actor.parameters()], [*other.actor.parameters()])
    rewarded, _ = train(script, folder="other", **sizes)
    assert not same_tensors(all_parameters(rewarded[0]), all_parameters(learned[0]))


def adapter_weights(agent, part):
    names = agent.model.named_parameters()
    return [x for name, x in names if part in name and f".{agent.actor}." in name]


@pytest.mark.parametrize("script", ["ippo", pytest.param("iac", marks=pytest.mark.slow), "maac", "ppo"])
def test_the_deviation_falls_slowly_and_is_restored(script):
    rewards = iter([10.0, 0.001, 0.001])

    def fade(*completions, items):
        scale = next(rewards)
        return [scale * (k % 2) for k in range(len(items))]

    flags = {"save_interval": 1, "keep_checkpoints": 3}
    off = {"reward_normalization": False} if script != "ppo" else {}
    _, run = train(script, fade, **flags, **off)
    saved = []
    for step in (1, 2, 3):
        state = json.loads(Path(run.folder, f"checkpoints/update_{step:06}/state.json").read_text())
        learners = state["agents"][-1:] if script == "maac" else state["agents"]  # where the critic has it
        saved.append([agent["deviation"] for agent in learners])
    for first, second, third in zip(*saved):
        assert first > 1 and second == pytest.approx(0.98 * first) and third == pytest.approx(0.98 * second)
    rewards = iter([0.001] * 3)
    agents, _ = train(script, fade, resume="run", num_train_epochs=2, **flags, **off)
    expected = [0.98**3 * third for _, _, third in zip(*saved)]
    learners = agents[-1:] if script == "maac" else agents
    assert [agent.deviation for agent in learners] == pytest.approx(expected)


# --- What episodes of several turns earn ------------------------------------------------------------------------------


@BOTH
def test_what_episodes_earn_is_standardised_and_a_turn_is_worth_what_it_pays(script):
    played = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0]])
    rewards = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0]])
    standardised = script.standardise_returns(rewards, played, 1e-3)
    deviation = (2 / 3) ** 0.5  # of 3, 1, 2
    expected = torch.tensor([[0, 1 / 3, 2 / 3], [-1, 0, 0], [0, 0, 0]]) / deviation  # means of turns: 1, 2 / 3, 1 / 3
    torch.testing.assert_close(standardised, expected)
    torch.testing.assert_close(standardised.sum(1), torch.tensor([1.0, -1, 0]) / deviation)


@BOTH
def test_standardised_returns_order_episodes_of_any_length_as_their_rewards_do(script):
    """What an episode earns changes by the same amount in all, and in turns that all play each mean is 0."""
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(16, 4, generator=generator).double()
    played = (torch.arange(4) < torch.randint(1, 5, (16, 1), generator=generator)).double()
    rewards *= played
    deviation = rewards.sum(1).std(correction=0)
    change = script.standardise_returns(rewards, played, 1e-3).sum(1) * deviation - rewards.sum(1)
    torch.testing.assert_close(change, -rewards.sum(1).mean().expand(16))
    of_whole = script.standardise_returns(rewards + 1, torch.ones_like(played), 1e-3)
    torch.testing.assert_close(of_whole.mean(0), torch.zeros(4).double())


@BOTH
def test_of_one_turn_rewards_are_standardised_to_the_bit_as_numbers_are(script):
    rewards = torch.randn(64, 1, generator=torch.Generator().manual_seed(1))
    ones = torch.ones(64, 1)
    assert torch.equal(script.standardise_returns(rewards, ones, 1e-3), script.standardise(rewards, ones, 1e-3))


@BOTH
@pytest.mark.parametrize("reward", [0.0, 0.3, -7.0])
def test_turns_that_all_earn_the_same_in_all_episodes_teach_nothing(script, reward):
    rollout = SimpleNamespace(rewards=torch.full((4, 3), reward), played=torch.ones(4, 3))
    assert not script.standardise_returns(rollout.rewards, rollout.played, 1e-3).any()
