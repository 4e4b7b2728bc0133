"""What an update of ppo_llm changes: mini-batches, an agent's own weights, dropout, the reference."""

import copy
import itertools

import pytest
import torch
from helpers import (
    gradients,
    make_episodes,
    make_ppo_agents,
    make_ppo_args,
    make_ppo_batch,
    make_ppo_rollout,
    make_team,
    seeded,
    tiny_base,
    watch_passes,
)

import ppo_llm
from utils.models import adapters

IDS = torch.arange(5, 45).reshape(2, 20)


@pytest.fixture
def make(loaded_model, tokenizer):
    """A function of flags: (agents, args, rollout), the rollout of agent 0 from made-up episodes."""

    def build(**flags):
        args = ppo_llm.resolve_args(make_ppo_args(**flags))
        agents = make_ppo_agents(loaded_model, tokenizer, args)
        return agents, args, make_ppo_rollout(make_episodes("game"), agents[0], args)

    return build


@pytest.fixture
def make_batch(make):
    """A function of flags: (agents, args, batch), the rollout of `make` as a batch."""

    def build(**flags):
        agents, args, rollout = make(**flags)
        return agents, args, make_ppo_batch(agents[0], rollout, args)

    return build


# --- Mini-batches -----------------------------------------------------------------------------------------------------


def rows_of(minibatch, batch):
    """The rows of the batch that a mini-batch has, found by the rewards of the first turns, which differ."""
    rewards = batch.rewards[:, 0].tolist()
    return [rewards.index(reward) for reward in minibatch.rewards[:, 0].tolist()]


def test_mini_batches_have_each_episode_once(make_batch):
    _, args, batch = make_batch(batch_size=3)
    drawn = [rows_of(minibatch, batch) for minibatch in ppo_llm.minibatches(batch, args, seeded())]
    assert [len(rows) for rows in drawn] == [3, 3, 2]
    assert sorted(sum(drawn, [])) == list(range(8))


def test_an_update_draws_the_members_of_mini_batches_anew_in_each_epoch(make, monkeypatch):
    (agent,), args, rollout = make(batch_size=4, update_epochs=3)
    epochs = []
    minibatches = ppo_llm.minibatches

    def watch(*values):
        epochs.append(set())
        for minibatch in minibatches(*values):
            epochs[-1].add(frozenset(rows_of(minibatch, rollout)))
            yield minibatch

    monkeypatch.setattr(ppo_llm, "minibatches", watch)
    ppo_llm.learn(agent, rollout, args, seeded())
    first, second, third = epochs
    assert [len(rows) for rows in first] == [4, 4]
    assert first != second != third


@pytest.mark.parametrize("granularity", ["turn", "token"])
def test_a_mini_batch_has_the_rows_of_its_episodes(make_batch, granularity):
    _, args, batch = make_batch(batch_size=3, action_granularity=granularity)
    for minibatch in ppo_llm.minibatches(batch, args, seeded()):
        rows = rows_of(minibatch, batch)
        K = minibatch.action_mask.shape[-1]
        for name in ("old_values", "advantages", "returns", "action_mask"):
            assert torch.equal(getattr(minibatch, name), getattr(batch, name)[rows, :K]), name
        assert minibatch.num_actions == batch.action_mask[rows].sum()
        assert minibatch.num_tokens == batch.response_mask[rows].sum()


# --- Weights ----------------------------------------------------------------------------------------------------------


def test_an_update_changes_the_agents_own_actor_and_critic(make):
    agents, args, rollout = make(task="number", num_agents=2, batch_size=4, lora_dropout=0.1)
    model = agents[0].model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    heads = [copy.deepcopy(agent.value_head.state_dict()) for agent in agents]
    ppo_llm.learn(agents[0], rollout, args, seeded())
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    assert changed == {name for name in before if ".agent_0_actor." in name or ".agent_0_critic." in name}
    for agent, head, is_learner in zip(agents, heads, (True, False)):
        for name, weight in agent.value_head.state_dict().items():
            assert torch.equal(head[name], weight) != is_learner


def gradients_of(agents, args, batch, joint=False):
    """Those of the losses of an agent, of their sum or one after the other."""
    agent = agents[0]
    agent.optimizers[0].zero_grad()
    with adapters.training(agent.model):
        if joint:
            policy_loss, _ = ppo_llm.ppo_loss(agent, batch, args)
            value_loss, _ = ppo_llm.value_loss(agent, batch, args)
            (policy_loss + value_loss).backward()
        else:
            for loss_of in (ppo_llm.ppo_loss, ppo_llm.value_loss):
                loss_of(agent, batch, args)[0].backward()
    return gradients(agent)


def assert_same_gradients(ours, theirs):
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("flag", [False, True])
def test_the_sum_of_the_losses_gives_the_gradients_of_each(make_batch, flag):
    agents, args, batch = make_batch(gradient_checkpointing=flag)
    each = gradients_of(agents, args, batch)
    assert all(gradient.any() for gradient in each)
    assert_same_gradients(gradients_of(agents, args, batch, joint=True), each)


# --- Which adapter is on ----------------------------------------------------------------------------------------------


def test_actors_and_critics_can_learn_whichever_adapters_were_on(tokenizer):
    agents = make_team(tiny_base(), tokenizer)
    model = agents[0].model
    learners = [f".{name}." for agent in agents for name in (agent.actor, agent.critic)]
    for order in itertools.product([*model.peft_config, ""], repeat=3):
        for adapter in order:
            for name, parameter in model.named_parameters():
                assert parameter.requires_grad == any(part in name for part in learners), (name, order)
            with adapters.active(model, adapter):
                pass


# --- Dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_is_on_while_learning_alone(tmp_path, monkeypatch):
    watched = watch_passes(monkeypatch)
    modes = {}  # whether it was on in the passes of a function
    build_agents = ppo_llm.build_agents

    def build_and_watch(*values):
        agents = build_agents(*values)
        for name, module in agents[0].model.named_modules():
            if "lora_dropout" in name and isinstance(module, torch.nn.Dropout):
                module.register_forward_hook(
                    lambda module, *_: modes.setdefault(watched.functions[-1], set()).add(module.training)
                )
        return agents

    monkeypatch.setattr(ppo_llm, "build_agents", build_and_watch)
    ppo_llm.main(make_ppo_args(tmp_path, lora_dropout=0.3, evaluation_interval=1, merge_adapters=False))
    off = dict.fromkeys(("respond", "compute_logprobs", "compute_values"), {False})
    assert modes == off | {"ppo_loss": {True}, "value_loss": {True}}


def test_the_base_stays_in_eval_mode_while_learning(make):
    agents, _, _ = make(lora_dropout=0.3, gradient_checkpointing=True)
    with adapters.training(agents[0].model):
        training = {type(module).__name__ for module in agents[0].model.modules() if module.training}
    assert training == {"ModuleDict", "Dropout", "LlamaDecoderLayer"}
    assert not any(module.training for module in agents[0].model.modules())


# --- The reference ----------------------------------------------------------------------------------------------------


def updates_of_the_reference(make, monkeypatch, size, num_items, interval, num_updates):
    """The updates after which the actor is copied to the reference."""
    (agent,), args, _ = make()
    args.reference_update_interval = interval
    copied = []
    for step in range(1, num_updates + 1):
        monkeypatch.setattr(adapters, "copy_adapter", lambda model, source, target: copied.append(step))
        ppo_llm.update_reference(agent, step * size, size, num_items, args)
    return copied


@pytest.mark.parametrize(
    "size, num_items, interval, expected",
    [
        (8, 16, 0, []),
        (8, 16, 1, [2, 4, 6]),
        (8, 16, 2, [4]),
        (12, 16, 1, [2, 3, 4, 6]),  # an epoch ends within an update
        (3, 5, 1, [2, 4, 5]),  # and with one, which 5 / 3 updates in floating-point numbers would not show
        (40, 16, 1, [1, 2, 3, 4, 5, 6]),  # an update spans two epochs and a half
        (40, 16, 4, [2, 4, 5]),  # epochs 4, 8 and 12 end in updates 2, 4 and 5
    ],
)
def test_the_reference_is_updated_after_so_many_epochs(make, monkeypatch, size, num_items, interval, expected):
    updates = updates_of_the_reference(make, monkeypatch, size, num_items, interval, num_updates=6)
    assert updates == expected


def test_an_updated_reference_is_the_actor(make):
    (agent,), args, _ = make()
    args.reference_update_interval = 1
    other = adapters.forward(agent.model, agent.reference, input_ids=IDS).logits
    with torch.no_grad():
        for parameter in adapters.parameters(agent.model, agent.actor):
            parameter += 0.1
    ppo_llm.update_reference(agent, 8, 8, 8, args)
    reference = adapters.forward(agent.model, agent.reference, input_ids=IDS).logits
    assert torch.equal(reference, adapters.forward(agent.model, agent.actor, input_ids=IDS).logits)
    assert not torch.equal(reference, other)
