"""What an update of ppo_llm changes: mini-batches, an agent's own weights, dropout, the reference."""

import copy

import pytest
import torch
from helpers import (
    make_episodes,
    make_ppo_agents,
    make_ppo_args,
    make_ppo_batch,
    make_ppo_rollout,
    seeded,
    watch_passes,
)

import ppo_llm
import utils.run
from utils import adapters

IDS = torch.arange(5, 45).reshape(2, 20)
LOSSES = (ppo_llm.ppo_loss, ppo_llm.value_loss)


@pytest.fixture
def make(loaded_model, tokenizer):
    """A function of flags: (agents, args, batch), the batch of agent 0 from made-up episodes."""

    def build(kind="game", **flags):
        task = "number" if kind == "task" or "num_agents" in flags else None
        args = ppo_llm.resolve_args(make_ppo_args(task=task, **flags))
        agents = make_ppo_agents(loaded_model, tokenizer, args)
        rollout = make_ppo_rollout(*make_episodes("task" if task else "game"), agents[0], args)
        return agents, args, make_ppo_batch(agents[0], rollout, args)

    return build


def learn(agent, batch, args, generator):
    """The passes over a rollout, as main makes them."""
    adapters.set_training(agent.model, True)
    for _ in range(args.update_epochs):
        for minibatch in ppo_llm.minibatches(batch, args, generator):
            agent.faults.backward(agent, minibatch, args, *LOSSES)
            ppo_llm.optimizer_step(agent, args)
    adapters.set_training(agent.model, False)


# --- Mini-batches -----------------------------------------------------------------------------------------------------


def members(batch, args, generator):
    """The items of each mini-batch, by number."""
    minibatches = ppo_llm.minibatches(batch, args, generator)
    return [[item["item"] for item in minibatch.rollout.items] for minibatch in minibatches]


@pytest.mark.parametrize("kind, batch_size, sizes", [("game", 3, [3, 3, 2]), ("task", 3, [3, 1])])
def test_mini_batches_have_each_episode_once(make, kind, batch_size, sizes):
    _, args, batch = make(kind, batch_size=batch_size)
    drawn = members(batch, args, seeded())
    assert [len(items) for items in drawn] == sizes
    assert sorted(sum(drawn, [])) == list(range(sum(sizes)))


def test_members_of_mini_batches_are_drawn_anew_in_each_epoch(make):
    _, args, batch = make(batch_size=4)
    generator = seeded()
    epochs = [{frozenset(items) for items in members(batch, args, generator)} for _ in range(4)]
    assert len({frozenset(epoch) for epoch in epochs}) > 1


def test_a_run_draws_the_members_of_mini_batches_anew_in_each_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(utils.run, "draw_curves", lambda *_: None)
    epochs = []
    minibatches = ppo_llm.minibatches

    def watch(*values):
        epochs.append(set())
        for minibatch in minibatches(*values):
            epochs[-1].add(frozenset(item["seed"] for item in minibatch.rollout.items))
            yield minibatch

    monkeypatch.setattr(ppo_llm, "minibatches", watch)
    ppo_llm.main(make_ppo_args(tmp_path, batch_size=4, update_epochs=3, train_size=8, evaluation_interval=0))
    first, second, third = epochs
    assert first != second != third


@pytest.mark.parametrize("kind, granularity", [("game", "turn"), ("task", "turn"), ("task", "token")])
def test_a_mini_batch_has_the_rows_of_its_episodes(make, kind, granularity):
    _, args, batch = make(kind, batch_size=3, action_granularity=granularity)
    for minibatch in ppo_llm.minibatches(batch, args, seeded()):
        rows = [item["item"] for item in minibatch.rollout.items]
        K = minibatch.action_mask.shape[-1]
        for name in ("old_values", "advantages", "returns", "action_mask"):
            assert torch.equal(getattr(minibatch, name), getattr(batch, name)[rows, :, :K]), name
        assert minibatch.num_actions == batch.action_mask[rows].sum()
        assert minibatch.num_tokens == batch.rollout.mask[rows].sum()


# --- Weights ----------------------------------------------------------------------------------------------------------


def test_an_update_changes_the_agents_own_actor_and_critic(make):
    agents, args, batch = make(num_agents=2, batch_size=4, lora_dropout=0.1)
    model = agents[0].model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    learn(agents[0], batch, args, seeded())
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    assert changed == {name for name in before if ".agent_0_actor." in name or ".agent_0_critic." in name}


def test_an_update_changes_the_agents_own_value_head(make):
    agents, args, batch = make(num_agents=2)
    before = [copy.deepcopy(agent.value_head.state_dict()) for agent in agents]
    learn(agents[0], batch, args, seeded())
    for agent, head, is_learner in zip(agents, before, (True, False)):
        for name, weight in agent.value_head.state_dict().items():
            assert torch.equal(head[name], weight) != is_learner


def test_an_update_leaves_the_base_as_it_was(make, loaded_model):
    agents, args, batch = make()
    learn(agents[0], batch, args, seeded())
    with torch.no_grad(), agents[0].model.disable_adapter():
        assert torch.equal(agents[0].model(IDS).logits, loaded_model(IDS).logits)


def test_gradient_checkpointing_gives_the_gradients_without_it(make):
    found = []
    for flag in (False, True):
        agents, args, batch = make(gradient_checkpointing=flag)
        adapters.set_training(agents[0].model, True)
        agents[0].faults.backward(agents[0], batch, args, *LOSSES)
        found.append([p.grad for group in agents[0].optimizers[0].param_groups for p in group["params"]])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(checkpointed, plain, atol=1e-6, rtol=1e-5)


# --- Dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["sample", "compute_logprobs", "compute_values"])
def test_dropout_is_off_outside_learning(tmp_path, monkeypatch, function):
    assert modes_of_dropout(tmp_path, monkeypatch)[function] == {False}


@pytest.mark.parametrize("function", ["ppo_loss", "value_loss"])
def test_dropout_is_on_while_learning(tmp_path, monkeypatch, function):
    assert modes_of_dropout(tmp_path, monkeypatch)[function] == {True}


def modes_of_dropout(tmp_path, monkeypatch):
    """Whether LoRA's dropout was on in the forward passes of a run, by the function that made them."""
    monkeypatch.setattr(utils.run, "draw_curves", lambda *_: None)
    watched = watch_passes(monkeypatch)
    modes = {}
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
    args = make_ppo_args(tmp_path, lora_dropout=0.3, use_separate_reference_adapter=True, evaluation_interval=1)
    ppo_llm.main(args)
    return modes


def test_the_base_stays_in_eval_mode_while_learning(make):
    agents, _, _ = make(lora_dropout=0.3, gradient_checkpointing=True)
    adapters.set_training(agents[0].model, True)
    training = {type(module).__name__ for module in agents[0].model.modules() if module.training}
    assert training == {"ModuleDict", "Dropout", "LlamaDecoderLayer"}
    adapters.set_training(agents[0].model, False)
    assert not any(module.training for module in agents[0].model.modules())


# --- The reference ----------------------------------------------------------------------------------------------------


def updates_of_the_reference(make, monkeypatch, rollout_buffer_size, num_items, interval, num_updates):
    """The updates after which the actor is copied to the reference."""
    (agent,), args, _ = make()
    args.rollout_buffer_size = rollout_buffer_size
    args.reference_update_interval = interval
    copied = []
    for step in range(1, num_updates + 1):
        monkeypatch.setattr(adapters, "copy_adapter", lambda model, source, target: copied.append(step))
        ppo_llm.update_reference(agent, step, num_items, args)
    return copied


@pytest.mark.parametrize(
    "rollout_buffer_size, num_items, interval, expected",
    [
        (8, 16, 0, []),
        (8, 16, 1, [2, 4, 6]),
        (8, 16, 2, [4]),
        (12, 16, 1, [2, 3, 4, 6]),  # an epoch ends within an update
        (16, 16, 1, [1, 2, 3, 4, 5, 6]),
        (40, 16, 1, [1, 2, 3, 4, 5, 6]),  # an update spans two epochs and a half
        (40, 16, 4, [2, 4, 5]),  # epochs 4, 8 and 12 end in updates 2, 4 and 5
        (40, 16, 7, [3, 6]),
    ],
)
def test_the_reference_is_updated_after_so_many_epochs(
    make, monkeypatch, rollout_buffer_size, num_items, interval, expected
):
    found = updates_of_the_reference(make, monkeypatch, rollout_buffer_size, num_items, interval, num_updates=6)
    assert found == expected


def test_an_updated_reference_is_the_actor(make):
    (agent,), args, _ = make()
    args.reference_update_interval = 1
    other = adapters.forward(agent.model, agent.reference, input_ids=IDS).logits
    with torch.no_grad():
        for parameter in adapters.parameters(agent.model, agent.actor):
            parameter += 0.1
    ppo_llm.update_reference(agent, 1, args.rollout_buffer_size, args)
    reference = adapters.forward(agent.model, agent.reference, input_ids=IDS).logits
    assert torch.equal(reference, adapters.forward(agent.model, agent.actor, input_ids=IDS).logits)
    assert not torch.equal(reference, other)
