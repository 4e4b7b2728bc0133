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
from utils import adapters

IDS = torch.arange(5, 45).reshape(2, 20)


@pytest.fixture
def make(loaded_model, tokenizer):
    """A function of flags: (agents, args, rollout), the rollout of agent 0 from made-up episodes."""

    def build(kind="game", **flags):
        task = "number" if kind == "task" or "num_agents" in flags else None
        args = ppo_llm.resolve_args(make_ppo_args(task=task, **flags))
        agents = make_ppo_agents(loaded_model, tokenizer, args)
        episodes = make_episodes("task" if task else "game")
        return agents, args, make_ppo_rollout(episodes, agents[0], args)

    return build


@pytest.fixture
def make_batch(make):
    """A function of flags: (agents, args, batch), the rollout of `make` as a batch."""

    def build(*kind, **flags):
        agents, args, rollout = make(*kind, **flags)
        return agents, args, make_ppo_batch(agents[0], rollout, args)

    return build


# --- Mini-batches -----------------------------------------------------------------------------------------------------


def rows_of(minibatch, batch):
    """The rows of the batch that a mini-batch has, found by the rewards of the first turns, which differ."""
    rewards = batch.rewards[:, 0].tolist()
    return [rewards.index(reward) for reward in minibatch.rewards[:, 0].tolist()]


def members(batch, args, generator):
    """The rows of each mini-batch."""
    return [rows_of(minibatch, batch) for minibatch in ppo_llm.minibatches(batch, args, generator)]


@pytest.mark.parametrize("kind, batch_size, sizes", [("game", 3, [3, 3, 2]), ("task", 3, [3, 1])])
def test_mini_batches_have_each_episode_once(make_batch, kind, batch_size, sizes):
    _, args, batch = make_batch(kind, batch_size=batch_size)
    drawn = members(batch, args, seeded())
    assert [len(rows) for rows in drawn] == sizes
    assert sorted(sum(drawn, [])) == list(range(sum(sizes)))


def test_members_of_mini_batches_are_drawn_anew_in_each_epoch(make_batch):
    _, args, batch = make_batch(batch_size=4)
    generator = seeded()
    epochs = [{frozenset(rows) for rows in members(batch, args, generator)} for _ in range(4)]
    assert len({frozenset(epoch) for epoch in epochs}) > 1


class Env:
    """A game of one turn, whose prompt names its seed."""

    def reset(self, seed):
        return f"game {seed}", {}

    def step(self, response):
        return "over", 1.0, True, False, {}


def test_a_run_draws_the_members_of_mini_batches_anew_in_each_epoch(tmp_path, monkeypatch):
    epochs = []
    minibatches = ppo_llm.minibatches

    def watch(*values):
        epochs.append(set())
        for minibatch in minibatches(*values):
            epochs[-1].add(frozenset(prompts[0] for prompts in minibatch.prompts))
            yield minibatch

    monkeypatch.setattr(ppo_llm, "minibatches", watch)
    flags = {"batch_size": 4, "update_epochs": 3, "train_size": 8, "evaluation_interval": 0}
    ppo_llm.main(make_ppo_args(tmp_path, **flags), env=Env)
    first, second, third = epochs
    assert [len(prompts) for prompts in first] == [4, 4]
    assert first != second != third


@pytest.mark.parametrize("kind, granularity", [("game", "turn"), ("task", "turn"), ("task", "token")])
def test_a_mini_batch_has_the_rows_of_its_episodes(make_batch, kind, granularity):
    _, args, batch = make_batch(kind, batch_size=3, action_granularity=granularity)
    for minibatch in ppo_llm.minibatches(batch, args, seeded()):
        rows = rows_of(minibatch, batch)
        K = minibatch.action_mask.shape[-1]
        for name in ("old_values", "advantages", "returns", "action_mask"):
            assert torch.equal(getattr(minibatch, name), getattr(batch, name)[rows, :K]), name
        assert minibatch.num_actions == batch.action_mask[rows].sum()
        assert minibatch.num_tokens == batch.response_mask[rows].sum()


# --- Weights ----------------------------------------------------------------------------------------------------------


def test_an_update_changes_the_agents_own_actor_and_critic(make):
    agents, args, rollout = make(num_agents=2, batch_size=4, lora_dropout=0.1)
    model = agents[0].model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ppo_llm.learn(agents[0], rollout, args, seeded())
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    assert changed == {name for name in before if ".agent_0_actor." in name or ".agent_0_critic." in name}


def test_an_update_changes_the_agents_own_value_head(make):
    agents, args, rollout = make(num_agents=2)
    before = [copy.deepcopy(agent.value_head.state_dict()) for agent in agents]
    ppo_llm.learn(agents[0], rollout, args, seeded())
    for agent, head, is_learner in zip(agents, before, (True, False)):
        for name, weight in agent.value_head.state_dict().items():
            assert torch.equal(head[name], weight) != is_learner


def test_an_update_leaves_the_base_as_it_was(make, loaded_model):
    agents, args, rollout = make()
    ppo_llm.learn(agents[0], rollout, args, seeded())
    with torch.no_grad(), agents[0].model.disable_adapter():
        assert torch.equal(agents[0].model(IDS).logits, loaded_model(IDS).logits)


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


def test_gradient_checkpointing_gives_the_gradients_without_it(make_batch):
    plain = gradients_of(*make_batch())
    assert_same_gradients(gradients_of(*make_batch(gradient_checkpointing=True)), plain)


@pytest.mark.parametrize("flag", [False, True])
def test_the_sum_of_the_losses_gives_the_gradients_of_each(make_batch, flag):
    agents, args, batch = make_batch(gradient_checkpointing=flag)
    each = gradients_of(agents, args, batch)
    assert all(gradient.any() for gradient in each)
    assert_same_gradients(gradients_of(agents, args, batch, joint=True), each)


# --- Which adapter is on ----------------------------------------------------------------------------------------------


def learning(model):
    """The adapters whose parameters require gradients, and parts of the base if any do."""
    return {name.split(".")[-2] for name, parameter in model.named_parameters() if parameter.requires_grad}


def of_role(agents, *roles):
    return {f"agent_{i}_{role}" for i in range(len(agents)) for role in roles}


def test_actors_and_critics_can_learn_whichever_adapters_were_on(tokenizer):
    agents = make_team(tiny_base(), tokenizer)
    model = agents[0].model
    names = [*sorted(of_role(agents, "actor", "critic", "reference")), ""]
    assert learning(model) == of_role(agents, "actor", "critic")
    for order in itertools.product(names, repeat=3):
        for name in order:
            with adapters.active(model, name):
                pass
            assert learning(model) == of_role(agents, "actor", "critic"), order


def test_all_parameters_of_actors_and_critics_can_learn(tokenizer):
    agents = make_team(tiny_base(), tokenizer)
    model = agents[0].model
    for name in ("agent_1_reference", "agent_0_critic", "", "agent_1_actor"):
        with adapters.active(model, name):
            pass
    for agent in agents:
        for adapter, learns in ((agent.actor, True), (agent.critic, True), (agent.reference, False)):
            assert {parameter.requires_grad for parameter in adapters.parameters(model, adapter)} == {learns}


def test_the_adapter_that_is_on_is_what_the_base_computes(make):
    agents, _, _ = make()
    (agent,) = agents
    for first, second in itertools.permutations((agent.actor, agent.critic, agent.reference, ""), 2):
        outputs = [adapters.forward(agent.model, name, input_ids=IDS).logits for name in (first, second, first)]
        assert torch.equal(outputs[0], outputs[2])
        assert not torch.equal(outputs[0], outputs[1])


# --- Dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["respond", "compute_logprobs", "compute_values"])
def test_dropout_is_off_outside_learning(tmp_path, monkeypatch, function):
    assert modes_of_dropout(tmp_path, monkeypatch, merge_adapters=False)[function] == {False}


@pytest.mark.parametrize("function", ["ppo_loss", "value_loss"])
def test_dropout_is_on_while_learning(tmp_path, monkeypatch, function):
    assert modes_of_dropout(tmp_path, monkeypatch)[function] == {True}


def modes_of_dropout(tmp_path, monkeypatch, **flags):
    """Whether LoRA's dropout was on in the forward passes of a run, by the function that made them."""
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
    args = make_ppo_args(
        tmp_path, lora_dropout=0.3, use_separate_reference_adapter=True, evaluation_interval=1, **flags
    )
    ppo_llm.main(args)
    return modes


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
        (16, 16, 1, [1, 2, 3, 4, 5, 6]),
        (40, 16, 1, [1, 2, 3, 4, 5, 6]),  # an update spans two epochs and a half
        (40, 16, 4, [2, 4, 5]),  # epochs 4, 8 and 12 end in updates 2, 4 and 5
        (40, 16, 7, [3, 6]),
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
