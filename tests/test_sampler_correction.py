"""A token weighs as much as the policy and another sampler differ, at most 2. These tests take no vLLM."""

import importlib.util
import math

import pytest
import torch
from helpers import (
    make_agent,
    make_args,
    make_episodes,
    make_ppo_agents,
    make_ppo_args,
    make_ppo_batch,
    make_ppo_rollout,
    seeded,
)

import iac_llm
import ippo_llm
import ppo_llm
from utils import engine
from utils.cli import UserError
from utils.metrics import sampler_metrics

LOSSES = {ippo_llm: ippo_llm.ippo_loss, iac_llm: iac_llm.iac_loss}
TEAM = pytest.mark.parametrize("script", LOSSES, ids=["ippo", "iac"])
GRANULARITY = pytest.mark.parametrize("action_granularity", ["token", "turn"])


def make_batch(script, model, tokenizer, prompts, **flags):
    """An agent, a mini-batch of what it sampled, whose sampler made up its log-probabilities, and the flags."""
    args = make_args(script=script, max_new_tokens=12, **flags)
    agent = make_agent(args, model, tokenizer, script=script)
    rollout = script.sample(agent, prompts, args, seeded())
    rollout.sampler_logprobs = rollout.logprobs + torch.randn(rollout.mask.shape, generator=seeded(1)) * rollout.mask
    rewards = torch.randn(rollout.mask.shape, generator=seeded(2))
    rewards, values, action_mask = script.group_actions(rewards, rollout.values, rollout.mask, args)
    batch = script.Batch(rollout, values, rewards * action_mask, rewards, action_mask)
    batch.num_tokens = rollout.mask.sum()
    batch.num_actions = action_mask.sum()
    args.use_vllm = True
    return agent, batch, args


@TEAM
@GRANULARITY
def test_each_token_of_a_team_weighs_its_ratio(script, action_granularity, model, tokenizer, prompts):
    agent, batch, args = make_batch(script, model, tokenizer, prompts, action_granularity=action_granularity)
    _, metrics = LOSSES[script](agent, batch, args)
    rollout = batch.rollout
    total = 0.0
    for b in range(len(prompts)):
        for t in range(int(rollout.mask[b, 0].sum())):
            logprob = rollout.logprobs[b, 0, t].double().item()
            weight = min(2.0, math.exp(logprob - rollout.sampler_logprobs[b, 0, t].item()))
            column = t if action_granularity == "token" else 0
            total -= weight * logprob * batch.advantages[b, 0, column].item()
    assert metrics["policy_loss"].item() == pytest.approx(total / batch.num_actions.item(), rel=1e-4)


@TEAM
def test_the_gradient_of_a_token_is_weighed_and_the_weight_has_none(script, model, tokenizer, prompts):
    agent, batch, args = make_batch(script, model, tokenizer, prompts, value_loss_coef=0.0, action_granularity="token")
    weights = script.sampler_weights(batch.rollout, args)
    assert 1 < weights.max() == 2 and weights.min() < 1
    loss, _ = LOSSES[script](agent, batch, args)
    loss.backward()
    with_weights = [x.grad.clone() for x in agent.actor.parameters()]
    agent.actor.zero_grad()
    args.sampler_correction = False
    batch.advantages = batch.advantages * weights
    loss, _ = LOSSES[script](agent, batch, args)
    loss.backward()
    for x, gradient in zip(agent.actor.parameters(), with_weights, strict=True):
        torch.testing.assert_close(x.grad, gradient, atol=1e-6, rtol=1e-4)


@TEAM
@pytest.mark.parametrize("flag", ["use_vllm", "sampler_correction", "do_sample"])
def test_all_tokens_weigh_the_same_without(flag, script, model, tokenizer, prompts):
    _, batch, args = make_batch(script, model, tokenizer, prompts)
    setattr(args, flag, False)
    assert (script.sampler_weights(batch.rollout, args) == 1).all()


@pytest.fixture
def ppo(model, tokenizer):
    """Makes an agent of ppo_llm, and its flags."""

    def make(**flags):
        args = ppo_llm.resolve_args(make_ppo_args(**flags))
        return make_ppo_agents(model, tokenizer, args)[0], args

    return make


@pytest.mark.parametrize("turn_level_clip", [False, True])
def test_each_ratio_of_ppo_weighs_that_of_the_sampler(ppo, turn_level_clip):
    agent, args = ppo(turn_level_clip=turn_level_clip, action_granularity="turn", beta=0.0)
    rollout = make_ppo_rollout(*make_episodes("game"), agent, args)
    noise = torch.randn(rollout.mask.shape, generator=seeded(1))
    rollout.sampler_logprobs = rollout.logprobs + noise
    batch = make_ppo_batch(agent, rollout, args)
    args.use_vllm = True
    _, metrics = ppo_llm.ppo_loss(agent, batch, args)
    total = 0.0
    count = 0
    for b in range(len(rollout.mask)):
        turns = {}
        for t, turn in enumerate(rollout.turn_of_token[b, 0].tolist()):
            if turn >= 0:
                turns.setdefault(turn, []).append(noise[b, 0, t].item())
        for turn, ratios in turns.items():  # pi is pi_old here: the clipped ratio is 1
            exponents = [sum(ratios)] if turn_level_clip else ratios
            weights = [min(2.0, math.exp(-exponent)) for exponent in exponents]
            total -= sum(weights) * batch.advantages[b, turn, 0].item()
            count += len(weights)
    assert metrics["policy_loss"].item() == pytest.approx(total / count, rel=1e-3, abs=1e-5)
    args.sampler_correction = False
    assert (ppo_llm.sampler_weights(rollout, args) == 1).all()


@TEAM
def test_metrics_have_mean_largest_and_share(script, model, tokenizer, prompts):
    _, batch, args = make_batch(script, model, tokenizer, prompts)
    rollout = batch.rollout
    rollout.sampler_logprobs[rollout.mask == 0] = -9.0  # padding does not count
    ratios = []
    for logprob, there in zip(rollout.logprobs[rollout.mask > 0], rollout.sampler_logprobs[rollout.mask > 0]):
        ratios.append(math.exp(logprob.double() - there.double()))
    metrics = sampler_metrics(rollout, 2.0)
    assert metrics["sampler_ratio"].item() == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
    assert metrics["sampler_ratio_max"].item() == pytest.approx(max(ratios), rel=1e-5)
    assert metrics["sampler_ratio_truncated"].item() == pytest.approx(sum(x > 2 for x in ratios) / len(ratios))
    assert 0 < metrics["sampler_ratio_truncated"] < 1


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [ippo_llm, iac_llm, ppo_llm])
@pytest.mark.parametrize(
    "flags, message",
    [
        ({"use_vllm": True}, "^--use-vllm takes vLLM, which is not installed: docs/many_devices.md says how$"),
        ({"vllm_config": {"max_num_seqs": 8}}, "^--vllm-config has no effect without --use-vllm$"),
        ({"sampler_correction": False}, "^--sampler-correction has no effect without --use-vllm$"),
    ],
)
def test_flags_without_vllm_are_one_line(script, flags, message, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=message):
        script.main(script.Args(output_dir=str(tmp_path / "run"), **flags))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "script, flags, message",
    [
        (ippo_llm, {"per_device_train_batch_size": 4}, "^--per-device-train-batch-size has no effect with --use-vllm"),
        (iac_llm, {"per_device_train_batch_size": 4}, "^--per-device-train-batch-size has no effect with --use-vllm"),
        (ppo_llm, {"hf_generate_chunk_size": 4}, "^--hf-generate-chunk-size has no effect with --use-vllm"),
        (ppo_llm, {"calc_position_embeddings": False}, "^--no-calc-position-embeddings has no effect with --use-vllm"),
        (ppo_llm, {"model_config": {"quantization_config": {}}}, "^--use-vllm takes a base that is not quantized$"),
    ],
)
def test_flags_that_vllm_makes_void_are_one_line(script, flags, message, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "check_vllm_args", lambda args: None)  # as if it were installed
    with pytest.raises(UserError, match=message):
        script.main(script.Args(use_vllm=True, output_dir=str(tmp_path / "run"), **flags))
    assert not (tmp_path / "run").exists()


def test_prompts_leave_room_for_vllm_too(model):
    args = make_args(vllm_config={"max_model_len": 100})
    assert engine.max_length(model.config, args) == 100
    assert engine.max_length(model.config, make_args(vllm_config={"max_model_len": 1000})) == 512
    assert engine.max_length(model.config, make_args(vllm_config={"max_model_len": "auto"})) == 512
