"""The losses of ppo_llm, their metrics and gradients against loops in float64 over single transcripts."""

import math

import pytest
import torch
from helpers import (
    actions_of,
    all_parameters,
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
KIND = pytest.mark.parametrize("kind", ["game", "task"])
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
    """A function of a kind of episodes and flags: (agent, args, episodes, mini-batch).

    The mini-batch is as if the policies and the critic had made some steps since the rollout.
    """

    def build(kind, **flags):
        coefficients = {"beta": BETA, "ent_coef": ENT_COEF, "vf_coef": VF_COEF, "temperature": TEMPERATURE}
        task = "number" if kind == "task" else None
        args = ppo_llm.resolve_args(make_ppo_args(task=task, **(coefficients | flags)))
        (agent,) = make_ppo_agents(loaded_model, tokenizer, args)
        episodes = make_episodes(kind)
        batch = make_ppo_batch(agent, make_ppo_rollout(episodes, agent, args), args)
        generator = seeded(5)
        noise = 0.2 * torch.randn(2, *batch.logprobs.shape, generator=generator)
        batch.logprobs += noise[0]
        if batch.reference_logprobs is not None:
            batch.reference_logprobs += noise[1]
        batch.old_values += torch.randn(batch.old_values.shape, generator=generator) * batch.action_mask
        return agent, args, episodes, batch

    return build


@pytest.fixture
def make_learner(loaded_model, tokenizer):
    """A function of a kind of episodes and flags: what the optimiser holds after an update from them, and metrics."""

    def build(kind, **flags):
        task = "number" if kind == "task" else None
        args = ppo_llm.resolve_args(make_ppo_args(task=task, batch_size=4, lr_actor=1e-3, **flags))
        (agent,) = make_ppo_agents(loaded_model, tokenizer, args)
        rollout = make_ppo_rollout(make_episodes(kind), agent, args)
        metrics = ppo_llm.learn(agent, rollout, args, seeded())
        return [parameter.detach() for parameter in all_parameters(agent)], metrics

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


@KIND
@RATIOS
def test_the_actors_loss_equals_a_loop(make, kind, granularity, turn_level_clip):
    agent, args, episodes, batch = make(kind, action_granularity=granularity, turn_level_clip=turn_level_clip)
    with torch.no_grad():
        loss, metrics = ppo_llm.ppo_loss(agent, batch, args)
        exact_loss, exact_metrics = exact_ppo_loss(agent, episodes, batch, args)
    assert 0 < exact_metrics["clip_fraction"] < 1
    assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-5, abs=2e-5)
    for name, expected in exact_metrics.items():
        assert metrics[name].item() == pytest.approx(expected.item(), rel=1e-5, abs=2e-5), name


@KIND
@RATIOS
def test_the_gradient_of_the_actors_loss_equals_a_loops(make, kind, granularity, turn_level_clip):
    agent, args, episodes, batch = make(kind, action_granularity=granularity, turn_level_clip=turn_level_clip)
    ours = gradient_of(agent, ppo_llm.ppo_loss(agent, batch, args)[0])
    assert_same_gradients(ours, gradient_of(agent, exact_ppo_loss(agent, episodes, batch, args)[0]))


def test_without_its_weight_the_entropy_is_a_metric_only(make):
    agent, args, episodes, batch = make("game", ent_coef=0.0)
    loss, metrics = ppo_llm.ppo_loss(agent, batch, args)
    exact_loss, exact_metrics = exact_ppo_loss(agent, episodes, batch, args)
    assert not metrics["entropy"].requires_grad
    assert metrics["entropy"].item() == pytest.approx(exact_metrics["entropy"].item(), abs=2e-5)
    assert_same_gradients(gradient_of(agent, loss), gradient_of(agent, exact_loss))


def test_without_a_penalty_the_reference_is_not_read(make):
    agent, args, _, batch = make("game", beta=0.0)
    assert batch.reference_logprobs is None
    loss, metrics = ppo_llm.ppo_loss(agent, batch, args)
    assert loss.isfinite() and metrics["k3"] == 0


def test_the_gradient_of_the_actors_loss_is_the_actors_alone(make):
    agent, args, _, batch = make("game")
    gradient_of(agent, ppo_llm.ppo_loss(agent, batch, args)[0])
    with_gradient = {name.split(".")[-2] for name, p in agent.model.named_parameters() if p.grad is not None}
    assert with_gradient == {agent.actor}
    assert agent.value_head.weight.grad is None


# --- The critic's -----------------------------------------------------------------------------------------------------


@KIND
@ACTIONS
def test_the_critics_loss_equals_a_loop(make, kind, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, batch = make(kind, **flags)
    with torch.no_grad():
        loss, metrics = ppo_llm.value_loss(agent, batch, args)
        exact_loss, share_clipped = exact_value_loss(agent, episodes, batch, args)
    assert 0 < share_clipped < 1
    assert metrics["value_loss"].item() == pytest.approx(exact_loss.item(), abs=1e-5)
    assert loss.item() == pytest.approx(VF_COEF * exact_loss.item(), abs=1e-5)


@KIND
@ACTIONS
def test_the_gradient_of_the_critics_loss_equals_a_loops(make, kind, granularity, reduction):
    flags = {"action_granularity": granularity, "turn_value_reduction": reduction}
    agent, args, episodes, batch = make(kind, **flags)
    ours = gradient_of(agent, ppo_llm.value_loss(agent, batch, args)[0])
    exact_loss, _ = exact_value_loss(agent, episodes, batch, args)
    assert_same_gradients(ours, gradient_of(agent, VF_COEF * exact_loss))


def test_the_gradient_of_the_critics_loss_is_the_critics_alone(make):
    agent, args, _, batch = make("game")
    gradient_of(agent, ppo_llm.value_loss(agent, batch, args)[0])
    with_gradient = {name.split(".")[-2] for name, p in agent.model.named_parameters() if p.grad is not None}
    assert with_gradient == {agent.critic}
    assert agent.value_head.weight.grad is not None


# --- Micro-batches ----------------------------------------------------------------------------------------------------


def backward(agent, batch, args):
    """The metrics of the batch, a micro-batch at a time, whose gradients add up: {name: sum}."""
    sums = {}
    for part in batch.split(ppo_llm.forward_size(args)):
        for loss_of in (ppo_llm.ppo_loss, ppo_llm.value_loss):
            loss, metrics = loss_of(agent, part, args)
            loss.backward()
            for name, x in metrics.items():
                sums[name] = sums.get(name, 0.0) + x
    return sums


@KIND
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("flags", [{}, {"action_granularity": "turn"}, {"turn_level_clip": True}], ids=str)
def test_micro_batches_add_up_to_the_gradient_of_their_mini_batch(make, kind, size, flags):
    agent, args, _, batch = make(kind, **flags)
    backward(agent, batch, args)
    whole = gradients(agent)
    agent.optimizers[0].zero_grad()
    args.micro_batch_size_per_gpu = size
    backward(agent, batch, args)
    assert_same_gradients(gradients(agent), whole)


@KIND
def test_metrics_of_micro_batches_add_up(make, kind):
    agent, args, _, batch = make(kind)
    whole = backward(agent, batch, args)
    args.micro_batch_size_per_gpu = 3
    in_parts = backward(agent, batch, args)
    for name, value in whole.items():
        torch.testing.assert_close(in_parts[name], value, atol=1e-5, rtol=1e-4, msg=name)


@KIND
def test_an_update_in_micro_batches_is_that_of_whole_mini_batches(make_learner, kind):
    whole, whole_metrics = make_learner(kind)
    in_parts, metrics = make_learner(kind, micro_batch_size_per_gpu=1)
    for x, y in zip(in_parts, whole, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)  # of steps of 1e-3
    for name in whole_metrics:
        torch.testing.assert_close(metrics[name], whole_metrics[name], atol=1e-4, rtol=1e-3, msg=name)


def test_micro_batches_have_no_more_episodes_than_the_flag_says(make):
    _, _, _, batch = make("game")
    assert [len(part.action_mask) for part in batch.split(3)] == [3, 3, 2]
    assert [len(part.action_mask) for part in batch.split(8)] == [8]
