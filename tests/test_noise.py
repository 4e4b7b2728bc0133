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
import maac_llm

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


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_standardised_returns_order_episodes_of_any_length_as_their_rewards_do(gamma):
    """What an episode earns, discounted, changes by the same amount in all."""
    rewards, played = episodes_of_any_length()
    earned = discounted(rewards, gamma)
    standardised, potential = ippo_llm.standardise_returns(rewards, played, gamma, 1e-3)
    change = discounted(standardised, gamma) * earned.std(correction=0) - earned
    torch.testing.assert_close(change, -rewards.mean(0) @ gamma ** torch.arange(4.0).double().expand(16, 4).T)
    torch.testing.assert_close(potential[:, 0] * earned.std(correction=0), -change)
    for module in (iac_llm, maac_llm):
        torch.testing.assert_close(module.standardise_returns(rewards, played, gamma, 1e-3)[0], standardised)


def test_of_standardised_returns_each_turn_that_all_play_has_mean_0():
    rewards, played = episodes_of_any_length()
    of_whole, _ = ippo_llm.standardise_returns(rewards + 1, torch.ones_like(played), 1.0, 1e-3)
    torch.testing.assert_close(of_whole.mean(0), torch.zeros(4).double())


@pytest.mark.parametrize("script", ["ippo", "iac"])
@pytest.mark.parametrize("granularity", ["token", "turn"])
def test_the_rewards_of_tokens_order_responses_of_any_length_as_the_task_does(script, granularity):
    """With gamma below 1, too: what actions earn, discounted from the first on, changes by the same amount in all."""
    rewards, played = episodes_of_any_length()
    sizes = torch.randint(1, 6, (16, 4), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(5) < sizes[..., None]).double() * played[..., None]
    rollout = SimpleNamespace(rewards=rewards, played=played, response_mask=mask)
    flags = {"gamma": 0.9, "reward_norm_eps": 1e-3, "action_granularity": granularity}
    both = [
        SCRIPTS[script].token_rewards(rollout, None, SimpleNamespace(**flags, reward_normalization=normalise))
        for normalise in (False, True)
    ]
    if granularity == "turn":
        earned, standardised = (discounted(x.sum(-1), 0.9) for x in both)
    else:
        earned, standardised = (torch.stack([along(x[k], mask[k], 0.9) for k in range(16)]) for x in both)
    change = standardised * discounted(rewards, 0.9).std(correction=0) - earned
    torch.testing.assert_close(change, change.mean().expand(16), atol=1e-6, rtol=0)  # played.float() is single
    assert change.abs().mean() > 0.01


def episodes_of_any_length():
    """Rewards [16, 4] of turns, and which were played."""
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(16, 4, generator=generator).double() + 0.5
    played = (torch.arange(4) < torch.randint(1, 5, (16, 1), generator=generator)).double()
    return rewards * played, played


def discounted(rewards, gamma):
    return sum(gamma**t * rewards[:, t] for t in range(rewards.shape[1]))


def along(rewards, mask, gamma):
    """The discounted sum over the actions of an episode, [T, L]."""
    return sum(gamma**k * reward for k, reward in enumerate(rewards[mask > 0]))
