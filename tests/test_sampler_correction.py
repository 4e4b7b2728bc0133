"""A token weighs as much as the policy and another sampler differ, at most 2. These tests take no vLLM."""

import importlib.util
import math

import pytest
import torch
from helpers import (
    learning_targets,
    make_agent,
    make_args,
    make_episodes,
    make_ppo_agents,
    make_ppo_args,
    make_ppo_batch,
    make_ppo_rollout,
    seeded,
    set_rewards,
    whole_minibatch,
)

import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils.cli import UserError
from utils.models import engine
from utils.run import Run
from utils.run.metrics import sampler_metrics

GRANULARITY = pytest.mark.parametrize("action_granularity", ["token", "turn"])


def make_batch(model, tokenizer, prompts, **flags):
    """An agent, a mini-batch of what it sampled, whose sampler made up its log-probabilities, and the flags."""
    args = make_args(max_new_tokens=12, **flags)
    agent = make_agent(args, model, tokenizer)
    rollout = ippo_llm.sample(agent, prompts, args, seeded())
    noise = torch.randn(rollout.logprobs.shape, generator=seeded(1))
    rollout.sampler_logprobs = rollout.logprobs + noise * rollout.response_mask
    set_rewards(rollout, torch.randn(len(prompts), generator=seeded(2)))
    batch = whole_minibatch(rollout, learning_targets(agent, rollout, args))
    args.use_vllm = True
    batch.weights = ippo_llm.sampler_weights(batch, args)
    return agent, batch, args


def weighed_loss(batch, args):
    """The policy's loss, token by token, of which none weighs more than 2."""
    total = 0.0
    for b in range(len(batch.ids)):
        for t in range(int(batch.response_mask[b, 0].sum())):
            logprob = batch.logprobs[b, 0, t].double().item()
            weight = min(2.0, math.exp(logprob - batch.sampler_logprobs[b, 0, t].item()))
            column = t if args.action_granularity == "token" else 0
            total -= weight * logprob * batch.advantages[b, 0, column].item()
    return total / batch.num_actions.item()


@GRANULARITY
def test_each_token_of_a_team_weighs_its_ratio(action_granularity, model, tokenizer, prompts):
    agent, batch, args = make_batch(model, tokenizer, prompts, action_granularity=action_granularity)
    _, metrics = ippo_llm.ippo_loss(agent, batch, args)
    assert metrics["policy_loss"].item() == pytest.approx(weighed_loss(batch, args), rel=1e-4)


def test_the_gradient_of_a_token_is_weighed_and_the_weight_has_none(model, tokenizer, prompts):
    agent, batch, args = make_batch(model, tokenizer, prompts, value_loss_coef=0.0, action_granularity="token")
    weights = batch.weights
    assert 1 < weights.max() == 2 and weights.min() < 1
    loss, _ = ippo_llm.ippo_loss(agent, batch, args)
    loss.backward()
    with_weights = [x.grad.clone() for x in agent.actor.parameters()]
    agent.actor.zero_grad()
    batch.weights = torch.ones_like(weights)
    batch.advantages = batch.advantages * weights
    loss, _ = ippo_llm.ippo_loss(agent, batch, args)
    loss.backward()
    for x, gradient in zip(agent.actor.parameters(), with_weights, strict=True):
        torch.testing.assert_close(x.grad, gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("flag", ["use_vllm", "sampler_correction", "do_sample"])
def test_all_tokens_weigh_the_same_without(flag, model, tokenizer, prompts):
    _, batch, args = make_batch(model, tokenizer, prompts)
    setattr(args, flag, False)
    assert (ippo_llm.sampler_weights(batch, args) == 1).all()


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
    rollout = make_ppo_rollout(make_episodes("game"), agent, args)
    noise = torch.randn(rollout.logprobs.shape, generator=seeded(1))
    rollout.sampler_logprobs = rollout.logprobs + noise
    batch = make_ppo_batch(agent, rollout, args)
    args.use_vllm = True
    _, metrics = ppo_llm.ppo_loss(agent, batch, args)
    total = 0.0
    unweighed_total = 0.0
    count = 0
    for b, turn_of_token in enumerate(rollout.turn_of_token.tolist()):
        turns = {}
        for t, turn in enumerate(turn_of_token):
            if turn >= 0:
                turns.setdefault(turn, []).append(noise[b, t].item())
        for turn, ratios in turns.items():  # pi is pi_old here: the clipped ratio is 1
            exponents = [sum(ratios)] if turn_level_clip else ratios
            weights = [min(2.0, math.exp(-exponent)) for exponent in exponents]
            total -= sum(weights) * batch.advantages[b, turn].item()
            unweighed_total -= len(weights) * batch.advantages[b, turn].item()
            count += len(weights)
    assert metrics["policy_loss"].item() == pytest.approx(total / count, rel=1e-3, abs=1e-5)
    args.sampler_correction = False
    _, metrics = ppo_llm.ppo_loss(agent, batch, args)
    assert metrics["policy_loss"].item() == pytest.approx(unweighed_total / count, rel=1e-3, abs=1e-5)


def test_metrics_have_mean_largest_and_share(model, tokenizer, prompts):
    _, batch, args = make_batch(model, tokenizer, prompts)
    sampled = batch.response_mask > 0
    batch.sampler_logprobs[~sampled] = -9.0  # padding does not count
    ratios = []
    for logprob, there in zip(batch.logprobs[sampled], batch.sampler_logprobs[sampled]):
        ratios.append(math.exp(logprob.double() - there.double()))
    metrics = sampler_metrics(batch)
    assert metrics["sampler_ratio"].item() == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
    assert metrics["sampler_ratio_max"].item() == pytest.approx(max(ratios), rel=1e-5)
    assert metrics["sampler_ratio_truncated"].item() == pytest.approx(sum(x > 2 for x in ratios) / len(ratios))
    assert 0 < metrics["sampler_ratio_truncated"] < 1


# --- What is computed anew, where another sampled ---------------------------------------------------------------------

RESPONSES = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14], [15, 16]]


class OtherSampler(engine.Engine):
    """An engine without vLLM: it samples RESPONSES, whatever it is asked, each token with the log-probability -1."""

    def __init__(self):
        self.greedy = []  # of each call

    def hand_over(self, model):
        pass

    def hand_over_adapters(self, agents):
        pass

    def sample(self, prompts, max_tokens, end_ids, args, generator, greedy=False, adapters=None):
        self.greedy.append(greedy)
        return RESPONSES, [[-1.0] * len(ids) for ids in RESPONSES]


def make_sampled(model, tokenizer, prompts, greedy=False, **flags):
    """An agent, a rollout of what OtherSampler sampled for it, and the flags."""
    args = make_args(temperature=0.7, mini_batch_size=2, **flags)
    agent = make_agent(args, model, tokenizer)
    args.use_vllm = True
    agent.engine = OtherSampler()
    return agent, ippo_llm.sample(agent, prompts, args, seeded(), greedy), args


@torch.no_grad()
def logprobs_and_values(agent, tokenizer, prompt, response, policy=None):
    """At temperature 0.7, of the tokens of one response, without any padding; `policy`: None is the agent's actor."""
    prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
    out = (policy or agent.actor)(torch.tensor([prompt_ids + response]), output_hidden_states=True)
    before = slice(len(prompt_ids) - 1, -1)
    log_pi = (out.logits[0, before] / 0.7).log_softmax(-1)
    values = agent.value_head(out.hidden_states[-1][0, before]) if policy is None else None
    return log_pi[range(len(response)), response], values


def test_a_team_keeps_what_another_sampled(model, tokenizer, prompts):
    _, rollout, _ = make_sampled(model, tokenizer, prompts)
    for b, response in enumerate(RESPONSES):
        L = len(response)
        assert rollout.response_ids[b, 0, :L].tolist() == response
        assert rollout.response_mask[b, 0].tolist() == [1.0] * L + [0.0] * (4 - L)
        assert rollout.sampler_logprobs[b, 0].tolist() == [-1.0] * L + [0.0] * (4 - L)
        assert rollout.responses[b] == [tokenizer.decode(response)]


def test_a_team_learns_from_logprobs_and_values_of_its_own(model, tokenizer, prompts, monkeypatch):
    agent, rollout, args = make_sampled(model, tokenizer, prompts)
    right = [logprobs_and_values(agent, tokenizer, *pair) for pair in zip(prompts, RESPONSES)]
    batches = []
    minibatches = ippo_llm.minibatches
    monkeypatch.setattr(
        ippo_llm, "minibatches", lambda batch, *more: batches.append(batch) or minibatches(batch, *more)
    )
    metrics = ippo_llm.learn(agent, set_rewards(rollout, torch.arange(5.0)), args, seeded())
    for b, (logprobs, _) in enumerate(right):
        L = len(logprobs)
        torch.testing.assert_close(batches[0].logprobs[b, 0, :L], logprobs, atol=1e-5, rtol=0)
        weights = (logprobs + 1).exp().clamp(max=2.0)
        torch.testing.assert_close(batches[0].weights[b, 0, :L], weights, atol=1e-5, rtol=0)
    ratios = torch.cat([logprobs + 1 for logprobs, _ in right]).exp()
    assert metrics["sampler_ratio"].item() == pytest.approx(ratios.mean().item(), rel=1e-4)
    assert metrics["sampler_ratio_max"].item() == pytest.approx(ratios.max().item(), rel=1e-4)
    assert metrics["kl"].item() == pytest.approx(0.0, abs=1e-5)  # the actor is still the reference


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("script", [maac_llm, magrpo_llm], ids=["maac", "magrpo"])
def test_a_joint_sample_weighs_what_another_sampled(script, corrected, model, tokenizer, prompts, monkeypatch):
    flags = {"num_generations": 5, "temperature": 0.7, "sampler_correction": corrected}
    args = make_args(script=script, mini_batch_size=5, rollout_buffer_size=5, **flags)
    team = script.build_agents(args, torch.device("cpu"), 1, model, tokenizer)
    args.use_vllm = True
    agents = team[: args.num_agents]
    rollouts = []
    for agent in agents:
        agent.engine = OtherSampler()
        rollouts.append(set_rewards(script.sample(agent, prompts, args, seeded()), torch.arange(5.0)))
    batches = []
    minibatches = script.minibatches
    monkeypatch.setattr(script, "minibatches", lambda batch, *more: batches.append(batch) or minibatches(batch, *more))
    if script is maac_llm:
        metrics, critic_metrics = script.learn(agents, team[-1], rollouts, args, seeded())
        batch = batches[0][0]
        assert not any(name.startswith("sampler") for name in critic_metrics)
    else:
        metrics = [script.learn(agent, rollout, args, seeded()) for agent, rollout in zip(agents, rollouts)]
        batch = batches[0]
    total = 0.0
    for b, pair in enumerate(zip(prompts, RESPONSES)):
        logprobs, _ = logprobs_and_values(agents[0], tokenizer, *pair, policy=agents[0].reference)
        weights = (logprobs + 1).exp().clamp(max=2.0) if corrected else torch.ones_like(logprobs)
        torch.testing.assert_close(batch.weights[b, 0, : len(weights)], weights, atol=1e-5, rtol=0)
        total -= float((weights * logprobs).sum() * batch.advantages[b, 0].sum())
    assert metrics[0]["policy_loss"].item() == pytest.approx(total / 5, rel=1e-3, abs=1e-5)
    assert metrics[0]["sampler_ratio_max"] > 0


def test_values_of_a_head_are_read_after_another_sampled(model, tokenizer, prompts):
    agent, rollout, args = make_sampled(model, tokenizer, prompts)
    values = ippo_llm.compute_values(agent, rollout, args)
    for b, pair in enumerate(zip(prompts, RESPONSES)):
        _, right = logprobs_and_values(agent, tokenizer, *pair)
        torch.testing.assert_close(values[b, 0, : len(right)], right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("flags, greedy", [({}, False), ({"greedy": True}, True), ({"do_sample": False}, True)])
def test_another_sampler_is_asked_for_the_likeliest_tokens(flags, greedy, model, tokenizer, prompts):
    agent, _, _ = make_sampled(model, tokenizer, prompts, **flags)
    assert agent.engine.greedy == [greedy]


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_sampler_is_measured_where_it_samples(do_sample, model, tokenizer, prompts):
    agent, rollout, args = make_sampled(model, tokenizer, prompts, do_sample=do_sample)
    metrics = ippo_llm.learn(agent, set_rewards(rollout, torch.arange(5.0)), args, seeded())
    assert ("sampler_ratio" in metrics) == do_sample


def test_ppo_learns_from_logprobs_of_its_own(ppo, tokenizer, prompts):
    agent, args = ppo(task="tldr", temperature=0.7, max_model_len=400, batch_size=2)
    args.use_vllm = True
    agent.engine = OtherSampler()
    rollout = ppo_llm.sample(agent, prompts, args, seeded())
    assert torch.equal(rollout.logprobs, -rollout.response_mask)
    ratios = []
    for prompt, response in zip(prompts, RESPONSES):
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        agent.model.set_adapter(agent.actor)
        logits = agent.model(torch.tensor([prompt_ids + response])).logits[0, len(prompt_ids) - 1 : -1]
        logprobs = (logits / 0.7).log_softmax(-1)[range(len(response)), response]
        ratios += (logprobs + 1).exp().tolist()
    rollout.rewards[:, 0] = torch.arange(5.0)
    metrics = ppo_llm.learn(agent, rollout, args, seeded())
    assert metrics["sampler_ratio"].item() == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)
    assert metrics["sampler_ratio_max"].item() == pytest.approx(max(ratios), rel=1e-4)


@pytest.mark.parametrize("flags, longest", [({}, None), ({"max_prompt_length": 100}, 124)])
def test_an_engine_has_room_for_prompt_and_response(flags, longest, model, tokenizer, monkeypatch):
    rooms = []
    monkeypatch.setattr(engine, "find_engine", lambda model, args, longest: rooms.append(longest))
    make_agent(make_args(use_vllm=True, max_new_tokens=24, **flags), model, tokenizer)
    assert rooms == [longest]


def test_an_engine_of_ppo_has_room_for_a_transcript(ppo, monkeypatch):
    rooms = []
    monkeypatch.setattr(engine, "check_vllm_args", lambda args: None)  # as if it were installed
    monkeypatch.setattr(engine, "find_engine", lambda model, args, longest, *more: rooms.append(longest))
    ppo(use_vllm=True, max_model_len=200)
    ppo(use_vllm=True, max_model_len=None)
    assert rooms == [200, 512]  # the model's


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [ippo_llm, ppo_llm])
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
        (ppo_llm, {"hf_generate_chunk_size": 4}, "^--hf-generate-chunk-size has no effect with --use-vllm"),
        (ppo_llm, {"calc_position_embeddings": False}, "^--calc-position-embeddings has no effect with --use-vllm"),
        (ppo_llm, {"model_config": {"quantization_config": {}}}, "^--use-vllm takes a base that is not quantized$"),
    ],
)
def test_flags_that_vllm_makes_void_are_one_line(script, flags, message, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "check_vllm_args", lambda args: None)  # as if it were installed
    with pytest.raises(UserError, match=message):
        script.main(script.Args(use_vllm=True, output_dir=str(tmp_path / "run"), **flags))
    assert not (tmp_path / "run").exists()


def test_a_run_out_of_memory_is_not_told_to_take_a_flag_that_is_void(tmp_path):
    args = make_args(tmp_path, use_vllm=True)
    memory_flags = {"sample": ("per_device_train_batch_size", 8), "learn": ("micro_batch_size", 4)}
    run = Run(args, ippo_llm.__file__, None, 40, 8, memory_flags=memory_flags)
    assert "lower gpu_memory_utilization in --vllm-config" in run.out_of_memory("sample")
    assert "--micro-batch-size 2" in run.out_of_memory("learn")


def test_prompts_leave_room_for_vllm_too(model):
    args = make_args(vllm_config={"max_model_len": 100})
    assert engine.max_length(model.config, args) == 100
    assert engine.max_length(model.config, make_args(vllm_config={"max_model_len": 1000})) == 512
    assert engine.max_length(model.config, make_args(vllm_config={"max_model_len": "auto"})) == 512
