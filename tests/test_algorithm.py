"""Numbers against independent calculations: Python loops in float64, and dense formulas without masks or batches."""

import copy

import pytest
import torch
from conftest import estimate, make_args, randomise_value_head

import ippo_llm
from ippo_llm import Agent, evaluate_critic, evaluate_policy, gae, losses, sample, update

CRITICS = pytest.mark.parametrize("critic", ["separate", "head"])


def make_agent(args, model, tokenizer, critic, seed=0):
    return randomise_value_head(Agent(args, model, tokenizer, model.base_model if critic == "separate" else None), seed)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sequences(rollout):
    """Each row of a rollout by itself, without padding: its token ids, and how many of them are the response."""
    for row in range(len(rollout.mask)):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row] == 1]
        response = rollout.response_ids[row][rollout.mask[row] == 1]
        yield torch.cat([prompt, response])[None], len(response)


def dense(agent, ids, length, temperature):
    """log pi of the response's tokens, the entropies and the values before them, of one sequence without padding."""
    out = agent.actor(ids, output_hidden_states=True)
    log_pi = torch.log_softmax(out.logits[0, :-1] / temperature, -1)[-length:]
    hidden = agent.critic(ids).last_hidden_state if agent.critic else out.hidden_states[-1]
    values = agent.value_head(hidden)[0, :-1, 0][-length:]
    return log_pi[range(length), ids[0, -length:]], -(log_pi.exp() * log_pi).sum(-1), values


def gradients(agent):
    return {name: p.grad.clone() for name, p in agent.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert sum(g.abs().sum() for g in theirs.values()) > 0
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-4, msg=name)


def test_gae_equals_a_loop_in_float64():
    gamma, lam, lengths, L = 0.9, 0.7, [6, 1, 4, 3], 6
    rewards, values = torch.randn(2, 4, L, generator=generator(), dtype=torch.float64)
    mask = (torch.arange(L) < torch.tensor(lengths)[:, None]).double()
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for row, length in enumerate(lengths):
        for t in range(L):
            expected = 0.0
            for step in range(t, length):
                following = values[row, step + 1].item() if step + 1 < length else 0.0
                delta = rewards[row, step].item() + gamma * following - values[row, step].item()
                expected += (gamma * lam) ** (step - t) * delta
            assert advantages[row, t].item() == pytest.approx(expected, abs=1e-12)
            assert returns[row, t].item() == pytest.approx((expected + values[row, t].item()) * (t < length), abs=1e-12)


def test_gae_with_lambda_one_is_the_return_less_the_value_and_with_zero_the_td_error():
    rewards, values = torch.randn(2, 3, 5, generator=generator())
    ones = torch.ones(3, 5)
    advantages, returns = gae(rewards, values, ones, 1.0, 1.0)
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))
    advantages, _ = gae(rewards, values, ones, 0.5, 0.0)
    torch.testing.assert_close(advantages[:, :-1], rewards[:, :-1] + 0.5 * values[:, 1:] - values[:, :-1])


@CRITICS
def test_gradients_equal_those_of_a_dense_formula(model, tokenizer, prompts, accelerator, critic):
    args = make_args(entropy_coef=0.3, value_loss_coef=0.7, temperature=0.8, gamma=0.9, gae_lambda=0.8)
    agent = make_agent(args, model, tokenizer, critic)
    rollout = sample(agent, prompts, args, generator())
    estimate(agent, model, rollout, torch.randn(5, generator=generator()), args, accelerator)
    with torch.no_grad():  # so that some values are clipped, and some are not
        rollout.values += 0.5 * torch.randn(rollout.values.shape, generator=generator())
    batch = rollout.select(torch.arange(5))
    parts = losses(agent, batch, batch.mask.sum(), batch.action_mask.sum(), args)
    parts["loss"].backward()
    ours = gradients(agent)

    agent.zero_grad()
    policy = value = entropy = clipped = 0.0
    for row, (ids, length) in enumerate(sequences(rollout)):
        logprobs, entropies, values = dense(agent, ids, length, args.temperature)
        for t in range(length):
            old, target = rollout.values[row, t], rollout.returns[row, t]
            near = torch.minimum(torch.maximum(values[t], old - 0.2), old + 0.2)
            clipped += int((near - target) ** 2 > (values[t] - target) ** 2)
            policy = policy - logprobs[t] * rollout.advantages[row, t]
            value = value + max((values[t] - target) ** 2, (near - target) ** 2)
            entropy = entropy + entropies[t]
    count = rollout.mask.sum()
    assert 0 < clipped < count
    ((policy - 0.3 * entropy + 0.7 * value) / count).backward()
    assert_same_gradients(ours, gradients(agent))
    for name, expected in (("policy_loss", policy), ("value_loss", value), ("entropy", entropy)):
        torch.testing.assert_close(parts[name], expected / count, atol=1e-5, rtol=1e-4)


def test_turns_as_actions_give_the_gradient_of_the_plain_formula(model, tokenizer, prompts, accelerator):
    flags = {"reward_normalization": False, "advantage_normalization": False, "value_clip_range": None, "kl_coef": 0.0}
    args = make_args(action_granularity="turn", value_loss_coef=0.4, **flags)
    agent = make_agent(args, model, tokenizer, "head")
    rollout = sample(agent, prompts, args, generator())
    rewards = torch.randn(5, generator=generator())
    estimate(agent, model, rollout, rewards, args, accelerator)
    assert rollout.advantages.shape == (5, 1)
    batch = rollout.select(torch.arange(5))
    losses(agent, batch, batch.mask.sum(), batch.action_mask.sum(), args)["loss"].backward()
    ours = gradients(agent)

    agent.zero_grad()
    loss = 0.0
    for reward, (ids, length) in zip(rewards, sequences(rollout)):
        logprobs, _, values = dense(agent, ids, length, args.temperature)
        loss = loss - logprobs.sum() * (reward - values[0].detach()) + 0.4 * (reward - values[0]) ** 2
    (loss / 5).backward()
    assert_same_gradients(ours, gradients(agent))


@CRITICS
def test_padding_changes_nothing(model, tokenizer, prompts, accelerator, critic):
    args = make_args()
    agent = make_agent(args, model, tokenizer, critic)
    rollout = sample(agent, prompts, args, generator())
    with torch.no_grad():
        together = rollout.select(torch.arange(5))
        logprobs, entropy, hidden = evaluate_policy(agent.actor, together, 1.0)
        values = evaluate_critic(agent, together) if agent.critic else agent.values(hidden)
        for row, (ids, length) in enumerate(sequences(rollout)):
            for ours, alone in zip((logprobs, entropy, values), dense(agent, ids, length, 1.0)):
                torch.testing.assert_close(ours[row, :length], alone, atol=1e-5, rtol=0)


def test_sampled_logprobs_and_values_equal_evaluated_ones(model, tokenizer, prompts):
    args = make_args(temperature=0.7, max_new_tokens=40)
    agent = make_agent(args, model, tokenizer, "head")
    rollout = sample(agent, prompts, args, generator())
    with torch.no_grad():
        logprobs, _, hidden = evaluate_policy(agent.actor, rollout, 0.7)
    assert len(set(rollout.mask.sum(1).tolist())) > 1  # rows end at different times, and are dropped then
    torch.testing.assert_close(rollout.logprobs, logprobs * rollout.mask, atol=1e-5, rtol=0)
    torch.testing.assert_close(rollout.values, agent.values(hidden).detach() * rollout.mask, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [None, 2])
def test_greedy_sampling_equals_generate(model, tokenizer, prompts, chunk):
    args = make_args(do_sample=False, max_new_tokens=40, per_device_train_batch_size=chunk)
    rollout = sample(Agent(args, model, tokenizer), prompts, args, generator())
    encoded = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    expected = model.generate(**encoded, do_sample=False, max_new_tokens=40)[:, encoded.input_ids.shape[1] :]
    torch.testing.assert_close(rollout.response_ids, expected)
    lengths = [(row != tokenizer.pad_token_id).sum().item() for row in expected]
    assert rollout.mask.sum(1).tolist() == lengths


def test_top_k_and_top_p_leave_only_the_likeliest_tokens():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]]).expand(2000, 5)  # 0.64, 0.23, 0.09, 0.03, 0.01
    for flags, kept in (
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.8}, {0, 1}),
        ({"top_p": 0.9}, {0, 1, 2}),
        ({}, {*range(5)}),
    ):
        assert set(ippo_llm.choose(logits, make_args(**flags), generator()).tolist()) == kept
    assert set(ippo_llm.choose(logits, make_args(do_sample=False), generator()).tolist()) == {0}


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([[1.0, 0.0, -1.0]]).expand(20_000, 3)
    counts = torch.bincount(ippo_llm.choose(logits, make_args(), generator()), minlength=3) / 20_000
    torch.testing.assert_close(counts, logits[0].softmax(-1), atol=0.015, rtol=0)


def test_the_kl_penalty_is_paid_by_the_token(model, tokenizer, prompts, accelerator):
    flags = {"reward_normalization": False, "advantage_normalization": False, "gamma": 1.0, "gae_lambda": 1.0}
    args = make_args(kl_coef=0.1, **flags)
    agent = Agent(args, model, tokenizer, model.base_model)
    with torch.no_grad():
        agent.actor.lm_head.weight.mul_(1.05)
    rollout = sample(agent, prompts, args, generator())
    estimate(agent, model, rollout, torch.arange(5.0), args, accelerator)
    initial = copy.deepcopy(agent)
    initial.actor = model
    for row, (ids, length) in enumerate(sequences(rollout)):
        log_ratio = (dense(agent, ids, length, 1.0)[0] - dense(initial, ids, length, 1.0)[0]).detach()
        for t in range(length):
            expected = row - 0.1 * log_ratio[t:].sum()  # values are 0, so the return is the sum of what is to come
            torch.testing.assert_close(rollout.returns[row, t], expected, atol=1e-4, rtol=0)


@CRITICS
def test_an_update_of_one_agent_leaves_the_others_bits_alone(model, tokenizer, prompts, accelerator, critic):
    args = make_args()
    agents = [make_agent(args, model, tokenizer, critic, seed) for seed in range(2)]
    pointers = [{p.data_ptr() for p in agent.parameters()} for agent in (*agents, model)]
    assert not (pointers[0] & pointers[1] or pointers[0] & pointers[2] or pointers[1] & pointers[2])
    before = [copy.deepcopy(agent.state_dict()) for agent in (*agents, model)]
    rollout = sample(agents[0], prompts, args, generator())
    estimate(agents[0], model, rollout, torch.arange(5.0), args, accelerator)
    update(agents[0], rollout, args.ppo_epochs, args, accelerator, generator())
    changed = [k for k in before[0] if not torch.equal(before[0][k], agents[0].state_dict()[k])]
    assert any("actor" in name for name in changed) and any("value_head" in name for name in changed)
    assert (critic == "separate") == any("critic" in name for name in changed)
    for state, untouched in zip(before[1:], (agents[1], model)):
        assert all(torch.equal(state[k], v) for k, v in untouched.state_dict().items())


def test_a_gradient_that_is_not_finite_changes_nothing_and_three_end_the_run(model, tokenizer, prompts, accelerator):
    args = make_args(mini_batch_size=5)
    agent = Agent(args, model, tokenizer)
    rollout = sample(agent, prompts, args, generator())
    estimate(agent, model, rollout, torch.arange(5.0), args, accelerator)
    before = copy.deepcopy(agent.state_dict())
    rollout.advantages[0, 0] = torch.nan
    for _ in range(2):
        assert update(agent, rollout, args.ppo_epochs, args, accelerator, generator())["skipped"] == 1
    with pytest.raises(ippo_llm.UserError, match="not finite"):
        update(agent, rollout, args.ppo_epochs, args, accelerator, generator())
    assert all(torch.equal(before[k], v) for k, v in agent.state_dict().items())


def test_epochs_and_mini_batches_make_optimiser_steps(model, tokenizer, prompts, accelerator):
    args = make_args(
        ppo_epochs=3, mini_batch_size=2, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-7, weight_decay=0.2
    )
    agent = Agent(args, model, tokenizer, model.base_model)
    rollout = sample(agent, prompts, args, generator())
    estimate(agent, model, rollout, torch.arange(5.0), args, accelerator)
    update(agent, rollout, args.ppo_epochs, args, accelerator, generator())
    for optimizer in agent.optimizers:  # 5 rows in twos are 3 mini-batches
        assert {int(state["step"]) for state in optimizer.state.values()} == {9}
        group = optimizer.param_groups[0]
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.95), 1e-7, 0.2)


def test_learning_rates_and_heads_go_where_the_flags_say(model, tokenizer):
    args = make_args(actor_learning_rate=1e-3, critic_learning_rate=2e-3, value_head_hidden_dim=7)
    agent = Agent(args, model, tokenizer)
    assert [group["lr"] for group in agent.optimizers[0].param_groups] == [1e-3, 2e-3]
    assert agent.value_head[0].out_features == 7
    agent = Agent(
        make_args(critic_learning_rate=2e-3, critic_value_head_hidden_dim=9), model, tokenizer, model.base_model
    )
    assert [optimizer.param_groups[0]["lr"] for optimizer in agent.optimizers] == [5e-4, 2e-3]
    assert agent.value_head[0].out_features == 9


def test_gradients_are_clipped_to_the_norm(model, tokenizer, accelerator):
    from utils.stats import clip_gradients

    agent = Agent(make_args(), model, tokenizer)
    for parameter in agent.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(p.numel() for p in agent.parameters())
    assert clip_gradients(agent.optimizers[0], 0.5, accelerator).item() == pytest.approx(count**0.5, rel=1e-5)
    assert torch.cat([p.grad.flatten() for p in agent.parameters()]).norm().item() == pytest.approx(0.5, rel=1e-3)


def test_standardised_numbers_have_mean_zero_and_deviation_one(accelerator):
    from utils.stats import explained_variance, standardise

    x = torch.tensor([[1.0, 5.0, 99.0], [3.0, 99.0, 99.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    expected = (8 / 3) ** 0.5  # deviation of 1, 5, 3
    torch.testing.assert_close(standardise(x, mask, accelerator), torch.tensor([[-2.0, 2, 0], [0, 0, 0]]) / expected)
    same = torch.full((4,), 2.0)
    assert torch.equal(standardise(same, torch.ones(4), accelerator, 1e-3), same)
    returns, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, 5.0]])
    assert explained_variance(returns, values, torch.ones(1, 3)).item() == pytest.approx(1 - (8 / 9) / (2 / 3))
