"""Adapters in files: what a run writes, what is read back to the bit, and a stage that begins with another's."""

import copy
import json
import shutil
from types import SimpleNamespace

import peft
import pytest
import torch
from helpers import (
    TINY_IDS,
    make_team,
    make_team_args,
    randomise_adapters,
    randomise_value_head,
    same_tensors,
    tiny_logits,
)
from safetensors.torch import load_file, save_file

from utils.cli import UserError
from utils.models import adapters, stages
from utils.run import checkpoint

ROLES = ("actor", "critic", "reference")
FILES = """actor/adapter_config.json actor/adapter_model.safetensors critic/adapter_config.json
critic/adapter_model.safetensors reference/adapter_config.json reference/adapter_model.safetensors base.json
chat_template.jinja optimizer.json optimizer.safetensors tokenizer.json tokenizer_config.json value_head.safetensors"""


@pytest.fixture
def team(base, tokenizer):
    """A function of flags: two agents, as if they had learned."""

    def build(seed=2, steps=2, own_base=None, **flags):
        agents = make_team(own_base or base, tokenizer, **flags)
        randomise_adapters(agents[0].model, seed=seed)
        for i, agent in enumerate(agents):
            randomise_value_head(agent, i)
            for _ in range(steps + i):
                step(agent)
        return agents

    return build


@pytest.fixture
def stage(team, tmp_path):
    """(folder, agents) of a stage that was saved."""
    agents = team()
    adapters.save_agents(tmp_path / "stage", agents)
    return tmp_path / "stage", agents


def step(agent):
    """A step of an agent's actor, critic and head."""
    adapters.forward(agent.model, agent.actor, input_ids=TINY_IDS).logits.square().mean().backward()
    hidden_states = adapters.hidden_states(agent.model, agent.critic, input_ids=TINY_IDS)
    agent.value_head(hidden_states.float()).square().mean().backward()
    agent.optimizers[0].step()
    agent.optimizers[0].zero_grad()


def weights_of(agent):
    """Of actor, critic and head."""
    names = (agent.actor, agent.critic)
    weights = [weight for name in names for weight in adapters.parameters(agent.model, name)]
    return [weight.detach().clone() for weight in [*weights, *agent.value_head.parameters()]]


def moments_of(agent):
    state = agent.optimizers[0].state_dict()["state"]
    return {(k, name): x for k, moments in state.items() for name, x in moments.items()}


# --- What is written --------------------------------------------------------------------------------------------------


def test_an_agents_folder_has_these_files(stage):
    folder, _ = stage
    for i in range(2):
        agent = folder / f"agent_{i}"
        assert {path.relative_to(agent).as_posix() for path in agent.rglob("*") if path.is_file()} == {*FILES.split()}


def test_a_reference_that_is_the_base_is_not_written(team, tmp_path):
    adapters.save_agents(tmp_path, team(use_separate_reference_adapter=False))
    assert sorted(path.name for path in (tmp_path / "agent_0").iterdir() if path.is_dir()) == ["actor", "critic"]


def test_a_folder_is_replaced_whole(stage, team, monkeypatch):
    folder, old = stage
    saved = load_file(folder / "agent_0" / "actor" / "adapter_model.safetensors")
    agents = team(seed=9)

    def fail(path):
        raise OSError("disk full")

    monkeypatch.setattr(agents[0].tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError):
        adapters.save_agents(folder, agents)
    tensors = load_file(folder / "agent_0" / "actor" / "adapter_model.safetensors")
    assert same_tensors([*saved.values()], [*tensors.values()])
    assert len(stages.find_agents(folder, 2)) == 2


# --- A checkpoint -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_gives_the_agents_back_to_the_bit(stage, team):
    folder, old = stage
    agents = team(seed=7, steps=1)
    adapters.load_agents(folder, agents)
    for before, after in zip(old, agents):
        assert same_tensors(weights_of(before), weights_of(after))
        references = [adapters.parameters(agent.model, agent.reference) for agent in (before, after)]
        assert same_tensors(*references)


def test_agents_of_a_checkpoint_go_on_with_the_same_bits(stage, team):
    folder, old = stage
    agents = team(seed=7, steps=1)
    adapters.load_agents(folder, agents)
    for before, after in zip(old, agents):
        step(before)
        step(after)
        assert same_tensors(weights_of(before), weights_of(after))


def test_a_checkpoint_leaves_the_base_as_it_was(base, stage, team):
    agents = team()
    adapters.load_agents(stage[0], agents)
    assert torch.equal(adapters.forward(agents[0].model, None, input_ids=TINY_IDS).logits, tiny_logits(base))


# --- A stage that begins with another's -------------------------------------------------------------------------------


def test_the_actor_is_the_stages(base, stage, tokenizer):
    folder, old = stage
    model = make_team(base, tokenizer, load_checkpoint=str(folder))[0].model
    for agent in old:
        assert torch.equal(tiny_logits(model, agent.actor), tiny_logits(agent.model, agent.actor))


def test_the_reference_is_the_stages_actor(base, stage, tokenizer):
    folder, old = stage
    model = make_team(base, tokenizer, load_checkpoint=str(folder))[0].model
    for agent in old:
        assert torch.equal(tiny_logits(model, agent.reference), tiny_logits(agent.model, agent.actor))
        assert not torch.equal(tiny_logits(agent.model, agent.reference), tiny_logits(agent.model, agent.actor))


def test_the_critic_and_its_head_are_the_stages(base, stage, tokenizer):
    folder, old = stage
    agents = make_team(base, tokenizer, load_checkpoint=str(folder))
    for before, after in zip(old, agents):
        assert torch.equal(tiny_logits(after.model, after.critic), tiny_logits(before.model, before.critic))
        assert same_tensors([*after.value_head.parameters()], [*before.value_head.parameters()])


def test_optimizers_are_the_stages_where_the_flag_says_so(base, stage, tokenizer):
    folder, old = stage
    agents = make_team(base, tokenizer, load_checkpoint=str(folder), load_optimizer=True)
    for before, after in zip(old, agents):
        expected = moments_of(before)
        tensors = moments_of(after)
        assert tensors.keys() == expected.keys() and len(expected) == 3 * 58
        assert all(torch.equal(tensors[key], expected[key]) for key in expected)


def test_learning_rates_are_the_flags(base, stage, tokenizer):
    flags = {"load_checkpoint": str(stage[0]), "load_optimizer": True, "lr_actor": 0.01, "lr_critic": 0.02}
    agents = make_team(base, tokenizer, **flags)
    assert [group["lr"] for group in agents[0].optimizers[0].param_groups] == [0.01, 0.02]


def test_a_schedule_goes_on_where_the_agent_stands_that_has_learned_from_fewer_updates(tmp_path):
    path = tmp_path / "checkpoints" / "update_000001"
    for i, updates in enumerate((5, 4)):  # it was saved while agent 1 learned
        (path / f"agent_{i}").mkdir(parents=True)
        (path / f"agent_{i}/optimizer.json").write_text(json.dumps({"updates": updates}))
    (path / "state.json").write_text(json.dumps({"step": 1}))
    args = SimpleNamespace(load_optimizer=True, resume=str(tmp_path), fork=None)
    assert stages.updates_before(args) == 3


def test_a_stage_without_critics_gives_copies_of_its_actors(base, stage, tokenizer):
    folder, old = stage
    for i in range(2):
        shutil.rmtree(folder / f"agent_{i}" / "critic")
        (folder / f"agent_{i}" / "value_head.safetensors").unlink()
    agents = make_team(base, tokenizer, load_checkpoint=str(folder))
    for before, after in zip(old, agents):
        assert torch.equal(tiny_logits(after.model, after.critic), tiny_logits(before.model, before.actor))
        assert not after.value_head.weight.any()


def test_adapters_of_a_base_of_bfloat16_are_read_back(base, team, tokenizer, tmp_path):
    coarse = copy.deepcopy(base).bfloat16()
    old = team(own_base=coarse, steps=0)
    adapters.save_agents(tmp_path, old)
    model = make_team(coarse, tokenizer, load_checkpoint=str(tmp_path), dtype="bfloat16")[0].model
    assert torch.equal(tiny_logits(model, "agent_1_actor"), tiny_logits(old[1].model, "agent_1_actor"))


# --- Files of the first version ---------------------------------------------------------------------------------------


def write_first_version(folder, base, agents):
    """An agent's folder as the first version of ppo_llm wrote it, by peft and safetensors alone."""
    for i, agent in enumerate(agents):
        path = folder / f"agent_{i}"
        for role in ROLES:
            weights = {}
            for key, weight in agent.model.named_parameters():
                if f".agent_{i}_{role}." in key:
                    weights[key.replace(f".agent_{i}_{role}.", ".")] = weight.detach().clone()
            config = peft.LoraConfig(
                r=4,
                lora_alpha=8.0,
                lora_dropout=0.0,
                bias="none",
                task_type="CAUSAL_LM",
                inference_mode=True,
                base_model_name_or_path="some/base",
                target_modules="down_proj gate_proj k_proj o_proj q_proj up_proj v_proj".split(),
            )
            config.target_modules = sorted(config.target_modules)
            config.save_pretrained(path / role)
            save_file(weights, path / role / "adapter_model.safetensors", metadata={"format": "pt"})
        save_file({**agent.value_head.state_dict()}, path / "value_head.safetensors")
        moments = agent.optimizers[0].state_dict()["state"]
        tensors = {f"{k}.{name}": x for k, each in moments.items() for name, x in each.items()}
        save_file(tensors, path / "optimizer.safetensors")
        (path / "optimizer.json").write_text('{"groups": [28, 30]}')  # today with the number of updates
        fingerprint = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 48}
        fingerprint["sha256"] = checkpoint.fingerprint(base)["sha256"]
        (path / "base.json").write_text(json.dumps({"base": "some/base", "fingerprint": fingerprint}))
        agent.tokenizer.save_pretrained(path)


def test_a_stage_of_the_first_version_is_read(base, team, tokenizer, tmp_path):
    old = team()
    write_first_version(tmp_path, base, old)
    agents = make_team(base, tokenizer, load_checkpoint=str(tmp_path), load_optimizer=True)
    for before, after in zip(old, agents):
        assert same_tensors(weights_of(before), weights_of(after))
        assert all(torch.equal(x, moments_of(after)[key]) for key, x in moments_of(before).items())


def test_files_are_those_of_the_first_version(base, stage, tmp_path):
    folder, agents = stage
    write_first_version(tmp_path / "first", base, agents)
    for path in (tmp_path / "first").rglob("*.safetensors"):
        expected = load_file(path)
        tensors = load_file(folder / path.relative_to(tmp_path / "first"))
        assert expected.keys() == tensors.keys(), path
        assert all(torch.equal(expected[name], tensors[name]) for name in expected), path
    for path in (tmp_path / "first").rglob("*.json"):
        expected = json.loads(path.read_text())
        content = json.loads((folder / path.relative_to(tmp_path / "first")).read_text())
        assert {name: content[name] for name in expected} == expected, path
        assert content.keys() - expected.keys() == ({"updates"} if path.name == "optimizer.json" else set())


# --- An optimiser that does not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"lora_rank": 6}, r"0\.exp_avg is \[4, 32\] there, \[6, 32\] here"),
        ({"lora_target_modules": ("q_proj",)}, r"\[28, 30\] parameters there, \[4, 6\] here"),
    ],
    ids=["rank", "targets"],
)
def test_an_optimizer_of_other_adapters_is_refused(base, stage, tokenizer, flags, message):
    agents = make_team(base, tokenizer, **flags)
    with pytest.raises(UserError, match=message):
        stages.load_optimizers([stage[0] / "agent_0", stage[0] / "agent_1"], agents)


def test_an_optimizer_that_lost_a_moment_is_refused(base, stage, tokenizer):
    folder, _ = stage
    file = folder / "agent_0" / "optimizer.safetensors"
    save_file({name: x for name, x in load_file(file).items() if name != "3.exp_avg_sq"}, file)
    with pytest.raises(UserError, match=r"3\.exp_avg_sq is not there"):
        make_team(base, tokenizer, load_checkpoint=str(folder), load_optimizer=True)


# --- Another LoRA configuration ---------------------------------------------------------------------------------------

OTHERS = {
    "smaller rank": {"lora_rank": 2},
    "rank and alpha": {"lora_rank": 7, "lora_alpha": 3.0},
    "fewer targets": {"lora_target_modules": ("q_proj", "v_proj")},
    "dropout": {"lora_dropout": 0.1},
}


@pytest.fixture
def merge(base, tokenizer):
    """A function of a folder and flags: agents that begin with that stage, merged, and the warnings."""

    def build(folder, **flags):
        with pytest.warns(UserWarning, match="the LoRA configuration of .* differs: ") as warnings:
            agents = make_team(base, tokenizer, load_checkpoint=str(folder), merge_lora_configs=True, **flags)
        return agents, [str(warning.message) for warning in warnings]

    return build


@pytest.mark.parametrize("other", OTHERS)
def test_a_merged_policy_is_the_stages(stage, merge, other):
    folder, old = stage
    agents, _ = merge(folder, **OTHERS[other])
    for before, after in zip(old, agents):
        for role, source in (("actor", "actor"), ("reference", "actor"), ("critic", "critic")):
            logits = tiny_logits(after.model, getattr(after, role))
            assert torch.allclose(logits, tiny_logits(before.model, getattr(before, source)), atol=1e-5)


@pytest.mark.parametrize("other", OTHERS)
def test_a_merged_configuration_has_the_larger_rank_and_else_the_flags(stage, merge, other):
    flags = OTHERS[other]
    agents, _ = merge(stage[0], **flags)
    config = agents[0].model.peft_config["agent_0_actor"]
    assert config.r == max(4, flags.get("lora_rank", 4))
    expected = (flags.get("lora_alpha", 8.0), flags.get("lora_dropout", 0.0))
    assert (config.lora_alpha, config.lora_dropout) == expected


def test_targets_are_joined_and_a_new_one_starts_at_nothing(team, merge, tmp_path):
    old = team(lora_target_modules=("q_proj", "v_proj"))
    adapters.save_agents(tmp_path, old)
    agents, warnings = merge(tmp_path, lora_target_modules=("v_proj", "up_proj"))
    assert "target_modules q_proj,v_proj there, up_proj,v_proj here; now r 4" in warnings[0]
    model = agents[0].model
    assert model.peft_config["agent_0_actor"].target_modules == {"q_proj", "v_proj", "up_proj"}
    weights = dict(model.named_parameters())
    prefix = "base_model.model.model.layers.0.mlp.up_proj"
    assert not weights[f"{prefix}.lora_B.agent_0_actor.weight"].any()
    assert weights[f"{prefix}.lora_A.agent_0_actor.weight"].any()
    tensors = tiny_logits(model, "agent_0_actor")
    assert torch.allclose(tensors, tiny_logits(old[0].model, "agent_0_actor"), atol=1e-5)


def test_another_configuration_is_refused_with_both_side_by_side(base, stage):
    args = make_team_args(base, lora_rank=8, lora_alpha=2.0, lora_target_modules=("q_proj",))
    args.load_checkpoint = str(stage[0])
    with pytest.raises(UserError) as error:
        stages.build_config(base, args)
    message = str(error.value)
    for words in ("r 4 there, 8 here", "lora_alpha 8.0 there, 2.0 here", "v_proj there, q_proj here"):
        assert words in message
    assert "--merge-lora-configs" in message and "\n" not in message
