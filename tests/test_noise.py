"""Advantages where there is little to learn: noise is not made large, and what episodes earn keeps its sense."""

import json
from pathlib import Path

import pytest
import torch
from helpers import all_parameters, same_tensors
from short_runs import SCRIPTS, every_script, small_model, train

import ippo_llm

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


def test_standardised_returns_order_episodes_of_any_length_as_their_rewards_do():
    """What an episode earns changes by the same amount in all, and in turns that all play each mean is 0."""
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(16, 4, generator=generator).double()
    played = (torch.arange(4) < torch.randint(1, 5, (16, 1), generator=generator)).double()
    rewards *= played
    deviation = rewards.sum(1).std(correction=0)
    change = ippo_llm.standardise_returns(rewards, played, 1e-3).sum(1) * deviation - rewards.sum(1)
    torch.testing.assert_close(change, -rewards.sum(1).mean().expand(16))
    of_whole = ippo_llm.standardise_returns(rewards + 1, torch.ones_like(played), 1e-3)
    torch.testing.assert_close(of_whole.mean(0), torch.zeros(4).double())
