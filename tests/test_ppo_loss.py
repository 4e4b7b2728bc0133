"""The losses of ppo_llm, their metrics and gradients against loops in float64 over single transcripts."""

import math

import pytest
import torch
from helpers import (
    actions_of,
    gradients,
    make_episodes,
    make_ppo_agents,
    make_ppo_args,
    make_ppo_batch,
    make_ppo_rollout,
    seeded,
    turns_of,
    values_of,
)

import ppo_llm

EPS = 0.2
BETA = 0.3
ENT_COEF = 0.2
VF_COEF = 0.7
TEMPERATURE = 0.8
ACTIONS = pytest.mark.parametrize(
    "granularity, reduction",
    [("turn", "first_value"), ("turn", "mean"), ("turn", "final_value"), ("token", "first_value")],
)
RATIOS = pytest.mark.parametrize(
    "granularity, turn_level_clip",
    [("turn", True), ("turn", False), ("token", False)],
    ids=["ratios of turns", "ratios of tokens, actions are turns", "ratios of tokens, actions are tokens"],
)


@pytest.fixture
def make(loaded_model, tokenizer):
    """A function of flags: (agent, args, episodes, mini-batch).

    The mini-batch is as if the policies and the critic had made some steps since the rollout.
    """

    def build(**flags):
        coefficients = {"beta": BETA, "ent_coef": ENT_COEF, "vf_coef": VF_COEF, "temperature": TEMPERATURE}
        args = ppo_llm.resolve_args(make_ppo_args(**(coefficients | flags)))
        (agent,) = make_ppo_agents(loaded_model, tokenizer, args)
        episodes = make_episodes("game")
        batch = make_ppo_batch(agent, make_ppo_rollout(episodes, agent, args), args)
        generator = seeded(5)
        noise = 0.2 * torch.randn(2, *batch.logprobs.shape, generator=generator)
        batch.logprobs += noise[0]
        if batch.reference_logprobs is not None:
            batch.reference_logprobs += noise[1]
        batch.old_values += torch.randn(batch.old_values.shape, generator=generator) * batch.action_mask
        return agent, args, episodes, batch

    return build


def policy(agent, transcript):
    """Of each response token log pi, and the entropy before it, [L] each, without any padding."""
    agent.model.set_adapter(agent.actor)
    ids = torch.tensor([transcript.ids])
    L = len(transcript.response_ids)
    log_pi = (agent.model(ids).logits[0, -L - 1 : -1].double() / TEMPERATURE).log_softmax(-1)
    return log_pi[range(L), ids[0, -L:]], -(log_pi.exp() * log_pi).sum(-1)


def exact_ppo_loss(agent, episodes, batch, args):
    """The actor's loss and its metrics."""
    surrogate = k3 = approx_kl = entropy = 0.0
    num_clipped = num_tokens = num_ratios = 0
    for b, transcript in enumerate(episodes):
        logprobs, entropies = policy(agent, transcript)
        for turn, columns in turns_of(transcript).items():
            ratios = []
            for column in columns:
                log_ratio = logprobs[column] - batch.logprobs[b, column].double()
                ratios.append(log_ratio.exp())
                approx_kl = approx_kl + log_ratio.exp() - 1 - log_ratio
                d = batch.reference_logprobs[b, column].double() - logprobs[column]
                k3 = k3 + d.exp() - d - 1
                entropy = entropy + entropies[column]
                num_tokens += 1
            if args.action_granularity == "turn":
                advantages = [batch.advantages[b, turn].double()] * len(columns)
            else:
                advantages = [batch.advantages[b, column].double() for column in columns]
            if args.turn_level_clip:
                ratios = [math.prod(ratios)]
                advantages = advantages[:1]
            for ratio, advantage in zip(ratios, advantages):
                clipped = min(max(ratio, 1 - EPS), 1 + EPS)
                surrogate = surrogate + min(advantage * ratio, advantage * clipped)
                num_clipped += abs(ratio.item() - 1) > EPS
                num_ratios += 1
    metrics = {
        "policy_loss": -surrogate / num_ratios,
        "k3": k3 / num_tokens,
        "approx_kl": approx_kl / num_tokens,
        "entropy": entropy / num_tokens,
        "clip_fraction": torch.tensor(num_clipped / num_ratios),
    }
    loss = metrics["policy_loss"] + BETA * metrics["k3"] - args.ent_coef * metrics["entropy"]
    return loss, metrics


def exact_value_loss(agent, episodes, batch, args):
    """The critic's loss without its weight, and the share of values that are clipped."""
    total = 0.0
    num_clipped = num_actions = 0
    for b, transcript in enumerate(episodes):
        for action in actions_of(transcript, values_of(agent, transcript), args):
            old_value = batch.old_values[action.index(b, args)].double()
            target = batch.returns[action.index(b, args)].double()
            near = min(max(action.value, old_value - EPS), old_value + EPS)
            total = total + max((action.value - target) ** 2, (near - target) ** 2)
            num_clipped += bool((near - target) ** 2 > (action.value - target) ** 2)
            num_actions += 1
    return total / num_actions / 2, num_clipped / num_actions


def gradient_of(agent, loss):
    agent.optimizers[0].zero_grad()
    loss.backward()
    return gradients(agent)


def assert_same_gradients(ours, theirs):
    largest = max(gradient.abs().max().item() for gradient in theirs)
    assert largest > 0.01
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5 * largest, rtol=1e-4)


# --- The actor's ------------------------------------------------------------------------------------------------------


@RATIOS
def test_the_actors_loss_and_its_gradient_equal_a_loops(make, granularity, turn_level_clip):
    agent, args, episodes, batch = make(action_granularity=granularity, turn_level_clip=turn_level_clip)
    loss, metrics = ppo_llm.ppo_loss(agent, batch, args)
    exact_loss, exact_metrics = exact_ppo_loss(agent, episodes, batch, args)
    assert 0 < exact_metrics["clip_fraction"] < 1
    assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-5, abs=2e-5)
    for name, expected in exact_metrics.items():
        assert metrics[name].item() == pytest.approx(expected.item(), rel=1e-5, abs=2e-5), name
    assert_same_gradients(gradient_of(agent, loss), gradient_of(agent, exact_loss))


def test_without_its_weight_the_entropy_is_a_metric_only(make):
    agent, args, episodes, batch = make(ent_coef=0.0)
    loss, metrics = ppo_llm.ppo_loss(agent, batch, args)
    exact_loss, exact_metrics = exact_ppo_loss(agent, episodes, batch, args)
    assert not metrics["entropy"].requires_grad
    assert metrics["entropy"].item() == pytest.approx(exact_metrics["entropy"].item(), abs=2e-5)
    assert_same_gradients(gradient_of(agent, loss), gradient_of(agent, exact_loss))


def test_the_gradient_of_the_actors_loss_is_the_actors_alone(make):
    agent, args, _, batch = make()
    gradient_of(agent, ppo_llm.ppo_loss(agent, batch, args)[0])
    with_gradient = {name.split(".")[-2] for name, p in agent.model.named_parameters() if p.grad is not None}
    assert with_gradient == {agent.actor}
    assert agent.value_head.weight.grad is None


# --- The critic's -----------------------------------------------------------------------------------------------------


@ACTIONS
def test_the_critics_loss_and_its_gradient_equal_a_loops(make, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, batch = make(**flags)
    loss, metrics = ppo_llm.value_loss(agent, batch, args)
    exact_loss, share_clipped = exact_value_loss(agent, episodes, batch, args)
    assert 0 < share_clipped < 1
    assert metrics["value_loss"].item() == pytest.approx(exact_loss.item(), abs=1e-5)
    assert loss.item() == pytest.approx(VF_COEF * exact_loss.item(), abs=1e-5)
    assert_same_gradients(gradient_of(agent, loss), gradient_of(agent, VF_COEF * exact_loss))


def test_the_gradient_of_the_critics_loss_is_the_critics_alone(make):
    agent, args, _, batch = make()
    gradient_of(agent, ppo_llm.value_loss(agent, batch, args)[0])
    with_gradient = {name.split(".")[-2] for name, p in agent.model.named_parameters() if p.grad is not None}
    assert with_gradient == {agent.critic}
    assert agent.value_head.weight.grad is not None


# --- Micro-batches ----------------------------------------------------------------------------------------------------


def gradients_of_parts(agent, batch, args):
    """Those of a batch, a micro-batch at a time."""
    agent.optimizers[0].zero_grad()
    for part in batch.split(ppo_llm.forward_size(args)):
        for loss_of in (ppo_llm.ppo_loss, ppo_llm.value_loss):
            loss_of(agent, part, args)[0].backward()
    return gradients(agent)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("flags", [{}, {"action_granularity": "turn"}, {"turn_level_clip": True}], ids=str)
def test_micro_batches_add_up_to_the_gradient_of_their_mini_batch(make, size, flags):
    agent, args, _, batch = make(**flags)
    whole = gradients_of_parts(agent, batch, args)
    args.micro_batch_size_per_gpu = size
    assert_same_gradients(gradients_of_parts(agent, batch, args), whole)
