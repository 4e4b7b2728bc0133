"""What an agent learns from: dense formulas without masks, padding or batches, sequence by sequence."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    all_parameters,
    gradients,
    learning_targets,
    make_agent,
    make_args,
    same_tensors,
    seeded,
    set_rewards,
    state_of,
    whole_minibatch,
)

import ippo_llm
from ippo_llm import ippo_loss, learn, minibatches, optimizer_step, sample, standardise, token_rewards
from utils.run.metrics import explained_variance

CRITICS = pytest.mark.parametrize("critic", ["separate", "head"])
PLAIN = {"reward_normalization": False, "advantage_normalization": False, "value_clip_range": None, "kl_coef": 0.0}


def sequences(rollout):
    """Each row of a rollout of one turn by itself, without padding: token ids [1, P + L], and L."""
    for row in range(len(rollout.ids)):
        ids = rollout.ids[row][rollout.attention_mask[row] == 1]
        yield ids[None], int(rollout.response_mask[row].sum())


def dense(agent, ids, length, temperature):
    """log pi of the response's tokens, the entropies and the values before them, of one sequence without padding."""
    out = agent.actor(ids, output_hidden_states=True)
    log_pi = torch.log_softmax(out.logits[0, :-1] / temperature, -1)[-length:]
    hidden_states = agent.critic(ids).last_hidden_state if agent.critic else out.hidden_states[-1]
    values = agent.value_head(hidden_states)[0, :-1][-length:]
    return log_pi[range(length), ids[0, -length:]], -(log_pi.exp() * log_pi).sum(-1), values


def zero_gradients(agent):
    for optimizer in agent.optimizers:
        optimizer.zero_grad()


def assert_same_gradients(actual, expected):
    assert sum(gradient.abs().sum() for gradient in expected) > 0
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


# --- Passes through models --------------------------------------------------------------------------------------------


def watch_passes(model):
    """The options of all passes through a model from now on."""
    passes = []
    model.register_forward_pre_hook(lambda module, values, options: passes.append(options), with_kwargs=True)
    return passes


@CRITICS
def test_hidden_states_are_asked_for_where_a_value_head_reads_them_alone(model, tokenizer, prompts, critic):
    args = make_args()
    agent = make_agent(args, model, tokenizer, critic)
    actor_passes = watch_passes(agent.actor)
    reference_passes = watch_passes(agent.reference)
    update(agent, prompts, args)
    assert len(actor_passes) > 3 and len(reference_passes) == 2  # 5 episodes in mini-batches of 4
    hidden_states = [options.get("output_hidden_states", False) for options in actor_passes]
    assert hidden_states == [critic == "head"] * len(actor_passes)
    assert not any("output_hidden_states" in options for options in reference_passes)


def test_without_a_kl_penalty_the_reference_makes_no_pass(model, tokenizer, prompts):
    for kl_coef, num_passes in ((0.1, 2), (0.0, 0)):
        args = make_args(kl_coef=kl_coef)
        agent = make_agent(args, model, tokenizer)
        passes = watch_passes(agent.reference)
        metrics = update(agent, prompts, args)
        assert len(passes) == num_passes
        assert ({"kl", "reference_logprob"} & metrics.keys() != set()) == (num_passes > 0)


# --- Rewards ----------------------------------------------------------------------------------------------------------


def test_standardised_numbers_have_mean_zero_and_deviation_one():
    x = torch.tensor([[1.0, 5.0, 99.0], [3.0, 99.0, 99.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    deviation = (8 / 3) ** 0.5  # of 1, 5, 3
    torch.testing.assert_close(standardise(x, mask), torch.tensor([[-2.0, 2, 0], [0, 0, 0]]) / deviation)


def test_numbers_are_centred_and_divided_by_eps_at_least():
    assert standardise(torch.tensor([2.0, 4.0]), torch.ones(2), 4.0).tolist() == [-0.25, 0.25]  # deviation 1


def rollout_of_rewards(rewards, mask):
    """A rollout of nothing but rewards [B, T] and a mask [B, T, L]."""
    mask = torch.tensor(mask)
    logprobs = torch.zeros_like(mask)
    return SimpleNamespace(rewards=torch.tensor(rewards), response_mask=mask, played=mask.any(-1), logprobs=logprobs)


@pytest.mark.parametrize(
    "rewards, flags, expected",
    [
        ([[1.0, 3.0], [2.0, 0.0]], {"reward_norm_eps": 0.1}, [-0.5, 1.5, -1.0]),  # turns' means: 1.5
        ([[1.0, 3.0], [2.0, 0.0]], {"reward_norm_eps": 2.0}, [-0.25, 0.75, -0.5]),
        ([[4.0, 4.0], [4.0, 0.0]], {}, [0.0, 1.0, -1.0]),  # 4 and 2; deviation 2
        ([[1.0, 3.0], [4.0, 0.0]], {}, [0.0, 0.0, 0.0]),
    ],
)
def test_what_episodes_earn_is_standardised_and_each_turns_mean_is_off_it(rewards, flags, expected):
    rollout = rollout_of_rewards(rewards, [[[1.0], [1.0]], [[1.0], [0.0]]])
    standardised = token_rewards(rollout, rollout.logprobs, make_args(**flags)).flatten().tolist()
    assert standardised == pytest.approx([*expected, 0.0], abs=1e-6)


def test_the_kl_penalty_is_paid_by_the_token(model, tokenizer, prompts):
    args = make_args(**(PLAIN | {"kl_coef": 0.1}), gamma=1.0, gae_lambda=1.0)
    agent = ippo_llm.Agent(0, model, tokenizer, 10, args)
    with torch.no_grad():
        agent.actor.lm_head.weight.mul_(1.05)
    rollout = set_rewards(sample(agent, prompts, args, seeded()), torch.arange(5.0))
    _, _, returns, _ = learning_targets(agent, rollout, args)
    initial = SimpleNamespace(actor=model, critic=agent.critic, value_head=agent.value_head)
    for row, (ids, length) in enumerate(sequences(rollout)):
        log_ratio = (dense(agent, ids, length, 1.0)[0] - dense(initial, ids, length, 1.0)[0]).detach()
        for t in range(length):
            expected = row - 0.1 * log_ratio[t:].sum()  # values are 0, so the return is the sum of what is to come
            torch.testing.assert_close(returns[row, 0, t], expected, atol=1e-4, rtol=0)


def test_a_turns_reward_is_the_sum_over_its_tokens_and_its_value_that_of_its_prompt(model, tokenizer, prompts):
    args = make_args(action_granularity="turn", kl_coef=0.1, gamma=0.0)
    agent = make_agent(args, model, tokenizer)
    with torch.no_grad():
        agent.actor.lm_head.weight.mul_(1.05)  # a penalty on every token
    rollout = set_rewards(sample(agent, prompts, args, seeded()), torch.arange(5.0))
    rewards = token_rewards(rollout, ippo_llm.compute_logprobs(agent.reference, rollout, args), args)
    assert (rewards != 0).sum() > 20
    values, _, returns, action_mask = learning_targets(agent, rollout, args)
    torch.testing.assert_close(returns[..., 0], rewards.sum(-1), atol=1e-5, rtol=0)  # with gamma 0
    assert torch.equal(values, rollout.values[..., :1]) and torch.equal(action_mask, torch.ones(5, 1, 1))


# --- The loss ---------------------------------------------------------------------------------------------------------


@CRITICS
def test_gradients_equal_those_of_a_dense_formula(model, tokenizer, prompts, critic):
    args = make_args(entropy_coef=0.3, value_loss_coef=0.7, temperature=0.8, gamma=0.9, gae_lambda=0.8)
    agent = make_agent(args, model, tokenizer, critic)
    rollout = set_rewards(sample(agent, prompts, args, seeded()), torch.randn(5, generator=seeded()))
    old_values, *targets = learning_targets(agent, rollout, args)
    old_values += 0.5 * torch.randn(old_values.shape, generator=seeded())  # some values are clipped, and some are not
    minibatch = whole_minibatch(rollout, [old_values, *targets])
    loss, metrics = ippo_loss(agent, minibatch, args)
    loss.backward()
    actual = gradients(agent)

    zero_gradients(agent)
    policy_loss = value_loss = entropy = num_clipped = 0.0
    for row, (ids, length) in enumerate(sequences(rollout)):
        logprobs, entropies, values = dense(agent, ids, length, args.temperature)
        for t in range(length):
            old_value = old_values[row, 0, t]
            target = minibatch.returns[row, 0, t]
            clipped_value = torch.minimum(torch.maximum(values[t], old_value - 0.2), old_value + 0.2)
            num_clipped += int((clipped_value - target) ** 2 > (values[t] - target) ** 2)
            policy_loss = policy_loss - logprobs[t] * minibatch.advantages[row, 0, t]
            value_loss = value_loss + max((values[t] - target) ** 2, (clipped_value - target) ** 2)
            entropy = entropy + entropies[t]
    count = rollout.response_mask.sum()
    assert 0 < num_clipped < count
    ((policy_loss - 0.3 * entropy + 0.7 * value_loss) / count).backward()
    assert_same_gradients(actual, gradients(agent))
    for name, expected in (("policy_loss", policy_loss), ("value_loss", value_loss), ("entropy", entropy)):
        torch.testing.assert_close(metrics[name], expected / count, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("critic, coef", [("head", 0.5), ("separate", 0.02)])
def test_the_value_loss_is_weighed_by_default(model, tokenizer, prompts, critic, coef):
    args = make_args(use_separate_critic=critic == "separate")
    agent = make_agent(args, model, tokenizer, critic)
    minibatch = make_batch(agent, prompts, args)
    with torch.no_grad():
        loss, metrics = ippo_loss(agent, minibatch, args)
        args.value_loss_coef = 0.0
        rest, _ = ippo_loss(agent, minibatch, args)
    assert float(loss - rest) == pytest.approx(coef * float(metrics["value_loss"]), rel=1e-3)


def test_turns_as_actions_give_the_gradient_of_the_plain_formula(model, tokenizer, prompts):
    args = make_args(action_granularity="turn", value_loss_coef=0.4, **PLAIN)
    agent = make_agent(args, model, tokenizer)
    rewards = torch.randn(5, generator=seeded())
    rollout = set_rewards(sample(agent, prompts, args, seeded()), rewards)
    targets = learning_targets(agent, rollout, args)
    assert all(x.shape == (5, 1, 1) for x in targets)
    loss, _ = ippo_loss(agent, whole_minibatch(rollout, targets), args)
    loss.backward()
    actual = gradients(agent)

    zero_gradients(agent)
    loss = 0.0
    for reward, (ids, length) in zip(rewards, sequences(rollout)):
        logprobs, _, values = dense(agent, ids, length, args.temperature)
        loss = loss - logprobs.sum() * (reward - values[0].detach()) + 0.4 * (reward - values[0]) ** 2
    (loss / 5).backward()
    assert_same_gradients(actual, gradients(agent))


# --- Mini-batches and steps -------------------------------------------------------------------------------------------


def make_batch(agent, prompts, args):
    """A batch of one answer to each prompt, with rewards 0, 1, 2, ..."""
    rollout = set_rewards(sample(agent, prompts, args, seeded()), torch.arange(float(len(prompts))))
    return whole_minibatch(rollout, learning_targets(agent, rollout, args))


def update(agent, prompts, args):
    """One update from an answer to each prompt, with rewards 0, 1, 2, ..."""
    rollout = set_rewards(sample(agent, prompts, args, seeded()), torch.arange(float(len(prompts))))
    return learn(agent, rollout, args, seeded())


def test_mini_batches_have_each_episode_once_and_count_their_own_actions(model, tokenizer, prompts):
    args = make_args(mini_batch_size=2)
    batch = make_batch(make_agent(args, model, tokenizer), prompts, args)
    rewards = []
    for minibatch in minibatches(batch, args, seeded()):
        rewards += minibatch.rewards.flatten().tolist()
        assert minibatch.num_actions == minibatch.num_tokens == minibatch.action_mask.sum()
        assert len(minibatch.action_mask) <= 2
    assert sorted(rewards) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_mini_batches_are_drawn_anew_each_time(model, tokenizer, prompts):
    args = make_args(mini_batch_size=2)
    batch = make_batch(make_agent(args, model, tokenizer), prompts, args)
    generator = seeded()
    members = []
    for _ in range(4):
        passes = [sorted(each.rewards.flatten().tolist()) for each in minibatches(batch, args, generator)]
        members.append(str(passes))
    assert len(set(members)) > 1


@CRITICS
def test_an_update_changes_all_of_an_agent_and_no_bit_of_another(model, tokenizer, prompts, critic):
    args = make_args()
    agent, other = (make_agent(args, model, tokenizer, critic, seed) for seed in range(2))
    modules = [agent.actor, agent.value_head, *([agent.critic] if agent.critic else [])]
    before = copy.deepcopy([module.state_dict() for module in modules])
    initial = [parameter.clone() for parameter in model.parameters()]
    others = state_of(other)
    update(agent, prompts, args)
    for module, state in zip(modules, before):
        assert not all(torch.equal(state[name], x) for name, x in module.state_dict().items())
    assert same_tensors(others, state_of(other))
    assert same_tensors(initial, [*model.parameters()])


def test_the_gradient_of_each_optimiser_is_clipped_by_itself(model, tokenizer, monkeypatch):
    args = make_args(max_grad_norm=0.5)
    agent = make_agent(args, model, tokenizer, "separate")
    norms = []
    for optimizer in agent.optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

        def step(parameters=parameters):
            norms.append(torch.cat([parameter.grad.flatten() for parameter in parameters]).norm().item())

        monkeypatch.setattr(optimizer, "step", step)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
    count = sum(p.numel() for group in agent.optimizers[0].param_groups for p in group["params"])
    assert optimizer_step(agent, args)["grad_norm"].item() == pytest.approx(count**0.5, rel=1e-5)
    assert norms == [pytest.approx(0.5, rel=1e-3)] * len(agent.optimizers)
    assert all(parameter.grad is None for parameter in all_parameters(agent))


def test_explained_variance_is_one_less_the_share_that_is_left():
    returns = torch.tensor([[1.0, 2.0, 3.0, 99.0]])
    values = torch.tensor([[1.0, 2.0, 5.0, -99.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert explained_variance(returns, values, mask).item() == pytest.approx(1 - (8 / 9) / (2 / 3))
