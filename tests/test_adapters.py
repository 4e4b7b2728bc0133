"""Adapters on one base: what they leave alone, saved and loaded, merged, exported; one line for every bad input."""

import copy
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from utils.adapters import (
    adapter_parameters,
    add_adapters,
    check_checkpoint,
    copy_adapter,
    fingerprint,
    load_adapters,
    load_optimizers,
    lora_config,
    save_adapters,
    stage_config,
)
from utils.cli import UserError, command_line
from utils.merge_adapter import Args as MergeArgs
from utils.merge_adapter import main as merge

ROOT = Path(__file__).resolve().parent.parent
IDS = torch.arange(5, 25).reshape(2, 10)
ROLES = ("actor", "critic", "reference")


def flags(**given):
    defaults = {"lora_rank": 4, "lora_alpha": 8.0, "lora_dropout": 0.0, "lora_target_modules": (), "num_agents": 2}
    return SimpleNamespace(**defaults | {"merge_lora_configs": False, "load_optimizer": False} | given)


def tiny_base(seed=0, **given):
    """A Llama of some thousand parameters."""
    torch.manual_seed(seed)
    shape = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**shape | given)).eval()


def make(base=None, args=None, config=None, roles=ROLES):
    """(model, value heads) of args.num_agents agents, on a copy of the base."""
    args, base = args or flags(), copy.deepcopy(base or tiny_base())
    torch.manual_seed(1)
    names = [f"agent_{i}_{role}" for i in range(args.num_agents) for role in roles]
    model = add_adapters(base, config or lora_config(args, base), names)
    return model, [nn.Linear(base.config.hidden_size, 1) for _ in range(args.num_agents)]


def randomise(model, seed=2):
    """Adapters as if they had learned."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model, adapter=None):
    if adapter:
        model.set_adapter(adapter)
    return model(IDS).logits


def bits(parameters):
    return [parameter.detach().clone() for parameter in parameters]


def same(first, second):
    return len(first) == len(second) and all(torch.equal(x, y) for x, y in zip(first, second))


def optimizer_of(model, head, i):
    valued = [*adapter_parameters(model, f"agent_{i}_critic"), *head.parameters()]
    groups = [{"params": adapter_parameters(model, f"agent_{i}_actor"), "lr": 1e-2}, {"params": valued, "lr": 2e-2}]
    return torch.optim.AdamW(groups, weight_decay=0.0)


def step(model, head, optimizer, i):
    """A step of agent i's actor, critic and head."""
    model.set_adapter(f"agent_{i}_actor")
    model(IDS, labels=IDS).loss.backward()
    model.set_adapter(f"agent_{i}_critic")
    (head(model(IDS, output_hidden_states=True).hidden_states[-1]) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def stage(base, tokenizer, tmp_path):
    """(folder, model, heads) of a saved stage."""
    model, heads = make(base)
    save_adapters(tmp_path / "run", randomise(model), heads, tokenizer, "some/base")
    return tmp_path / "run", model, heads


# --- On a model -------------------------------------------------------------------------------------------------------


def test_config_has_all_linear_layers_but_the_head(base):
    config = lora_config(flags(), base)
    assert config.target_modules == set("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())
    assert (config.r, config.lora_alpha, config.lora_dropout, config.bias) == (4, 8.0, 0.0, "none")
    every = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules="all-linear"))
    model = make(base, flags(num_agents=1), roles=("actor",))[0]
    assert len(adapter_parameters(model, "agent_0_actor")) == len(adapter_parameters(every, "default"))


@pytest.mark.parametrize("target", ["nothing", "embed_tokens", "proj", "norm"])
def test_a_target_that_is_no_linear_layer(base, target):
    with pytest.raises(UserError, match=rf"down_proj, gate_proj.*v_proj.* has no {target}"):
        lora_config(flags(lora_target_modules=("q_proj", target)), base)


def test_new_adapters_change_nothing_and_differ(base):
    model = make(base)[0]
    for name in model.peft_config:
        assert torch.equal(logits(model, name), logits(base))
    first, second = ([p for p in adapter_parameters(model, f"agent_{i}_actor")] for i in (0, 1))
    assert not same(first, second)
    assert same(first, adapter_parameters(model, "agent_0_reference"))
    assert all(not p.requires_grad for p in adapter_parameters(make(base)[0], "agent_0_reference"))
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".lora_" not in n)


def test_the_seed_decides_the_adapters_and_references_draw_nothing(base):
    model, heads = make(base)
    for roles in (ROLES, ("actor", "critic")):
        again, again_heads = make(base, roles=roles)
        for name in again.peft_config:
            assert same(adapter_parameters(model, name), adapter_parameters(again, name))
        assert same([*heads[1].parameters()], [*again_heads[1].parameters()])  # drawn after the adapters


def test_dropout_is_off_in_a_model_in_eval_mode(base):
    model = randomise(make(base, flags(lora_dropout=0.5))[0])
    assert torch.equal(logits(model, "agent_0_actor"), logits(model, "agent_0_actor"))


def test_a_step_of_one_adapter_leaves_all_else_alone(base):
    model, heads = make(base)
    randomise(model)
    frozen, before = (
        bits(base.parameters()),
        {name: bits(adapter_parameters(model, name)) for name in model.peft_config},
    )
    other = bits(heads[1].parameters())
    step(model, heads[0], optimizer_of(model, heads[0], 0), 0)
    changed = {name for name in before if not same(before[name], adapter_parameters(model, name))}
    assert changed == {"agent_0_actor", "agent_0_critic"}
    assert same(frozen, [p for n, p in model.named_parameters() if ".lora_" not in n])
    assert same(other, [*heads[1].parameters()])
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(base))
    assert not torch.equal(logits(model, "agent_0_actor"), logits(base))


def test_copy(base):
    model = randomise(make(base)[0])
    copy_adapter(model, "agent_1_actor", "agent_1_reference")
    assert torch.equal(logits(model, "agent_1_actor"), logits(model, "agent_1_reference"))
    assert not torch.equal(logits(model, "agent_1_actor"), logits(model, "agent_0_actor"))


def test_fingerprint_knows_the_base_in_any_type(base):
    known = fingerprint(base)
    assert known == fingerprint(make(base)[0]) == fingerprint(copy.deepcopy(base).bfloat16())
    other = copy.deepcopy(base)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 4] += 0.01
    assert known != fingerprint(other)


# --- Out and in -------------------------------------------------------------------------------------------------------


def test_round_trip(base, stage):
    folder, old, old_heads = stage
    model, heads = make(base)
    load_adapters(folder, model, heads, flags(), "some/base")
    for i in range(2):
        actor = logits(old, f"agent_{i}_actor")
        assert torch.equal(logits(model, f"agent_{i}_actor"), actor)
        assert torch.equal(logits(model, f"agent_{i}_reference"), actor)
        assert torch.equal(logits(model, f"agent_{i}_critic"), logits(old, f"agent_{i}_critic"))
        assert same([*heads[i].parameters()], [*old_heads[i].parameters()])
    assert same([*base.parameters()], [p for n, p in model.named_parameters() if ".lora_" not in n])


def test_peft_opens_a_saved_adapter(base, stage):
    folder, model, _ = stage
    files = {path.name for path in folder.rglob("*") if path.is_file()}
    assert not [name for name in files if not name.endswith((".safetensors", ".json", ".jinja"))]
    for role in ROLES:
        opened = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder / "agent_1" / role)
        assert torch.allclose(logits(opened), logits(model, f"agent_1_{role}"), atol=1e-6)
    assert json.loads((folder / "agent_1" / "actor" / "adapter_config.json").read_text())["inference_mode"]


def test_a_saved_agent_has_no_weights_of_the_base(stage):
    for file in stage[0].rglob("adapter_model.safetensors"):
        assert all("lora_" in name for name in load_file(file))


def test_a_folder_is_replaced_whole(stage, tokenizer, monkeypatch):
    folder, model, heads = stage
    old = load_file(folder / "agent_0" / "actor" / "adapter_model.safetensors")

    def fail(path):
        raise OSError("disk full")

    monkeypatch.setattr(tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError):
        save_adapters(folder, randomise(model, 9), heads, tokenizer, "some/base")
    new = load_file(folder / "agent_0" / "actor" / "adapter_model.safetensors")
    assert same([*old.values()], [*new.values()]) and len(check_checkpoint(folder, 2)) == 2


def test_a_stage_without_critic_reference_or_head(base, tokenizer, tmp_path):
    old, old_heads = make(base, roles=("actor",))
    save_adapters(tmp_path, randomise(old), old_heads, tokenizer, "b")
    for i in range(2):
        (tmp_path / f"agent_{i}" / "value_head.safetensors").unlink()
    model, heads = make(base)
    before = bits(heads[0].parameters())
    load_adapters(tmp_path, model, heads, flags(), "b")
    assert torch.equal(logits(model, "agent_1_critic"), logits(old, "agent_1_actor"))
    assert torch.equal(logits(model, "agent_1_reference"), logits(old, "agent_1_actor"))
    assert same(before, [*heads[0].parameters()])


def test_optimizers_go_on_with_the_same_bits(base, tokenizer, tmp_path):
    model, heads = make(base)
    optimizers = [optimizer_of(model, head, i) for i, head in enumerate(heads)]
    for i in (0, 1, 1):
        step(model, heads[i], optimizers[i], i)
    save_adapters(tmp_path, model, heads, tokenizer, "b", optimizers)
    again, again_heads = make(base)
    load_adapters(tmp_path, again, again_heads, flags(), "b")
    restored = [optimizer_of(again, head, i) for i, head in enumerate(again_heads)]
    load_optimizers(tmp_path, restored)
    for i in range(2):
        step(model, heads[i], optimizers[i], i)
        step(again, again_heads[i], restored[i], i)
        for role in ("actor", "critic"):
            name = f"agent_{i}_{role}"
            assert same(adapter_parameters(model, name), adapter_parameters(again, name))
        assert same([*heads[i].parameters()], [*again_heads[i].parameters()])
    assert str(optimizers[1].state_dict()) == str(restored[1].state_dict())


def test_optimizers_without_a_saved_state_are_new(stage):
    folder, model, heads = stage
    optimizers = [optimizer_of(model, head, i) for i, head in enumerate(heads)]
    with pytest.warns(UserWarning, match="agent_0 has no optimizer's state"):
        load_optimizers(folder, optimizers)
    assert not optimizers[0].state


def test_an_optimizer_that_does_not_fit(base, tokenizer, tmp_path):
    model, heads = make(base)
    optimizers = [optimizer_of(model, head, i) for i, head in enumerate(heads)]
    step(model, heads[0], optimizers[0], 0)
    save_adapters(tmp_path, model, heads, tokenizer, "b", optimizers)
    for wider, message in (
        ({"lora_rank": 6}, r"0\.exp_avg is \[4, 32\] there, \[6, 32\] here"),
        ({"lora_target_modules": ("q_proj",)}, r"\[28, 30\] parameters there, \[4, 6\] here"),
    ):
        other, other_heads = make(base, flags(**wider))
        with pytest.raises(UserError, match=message):
            load_optimizers(tmp_path, [optimizer_of(other, head, i) for i, head in enumerate(other_heads)])
    file = tmp_path / "agent_0" / "optimizer.safetensors"
    save_file({name: x for name, x in load_file(file).items() if name != "3.exp_avg_sq"}, file)
    with pytest.raises(UserError, match=r"3\.exp_avg_sq is not there"):
        load_optimizers(tmp_path, optimizers)


# --- Another LoRA configuration ---------------------------------------------------------------------------------------


OTHERS = {
    "larger rank": {"lora_rank": 6},
    "smaller rank": {"lora_rank": 2},
    "alpha": {"lora_alpha": 32.0},
    "rank and alpha": {"lora_rank": 7, "lora_alpha": 3.0},
    "fewer targets": {"lora_target_modules": ("q_proj", "v_proj")},
    "dropout": {"lora_dropout": 0.1},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_merged_policy_is_the_old_one(base, stage, other):
    folder, old, _ = stage
    args = flags(**OTHERS[other], merge_lora_configs=True)
    with pytest.warns(UserWarning, match="the LoRA configuration of .* differs: ") as said:
        config = stage_config(folder, lora_config(args, base), args)
    assert len(said) == 1 and "\n" not in str(said[0].message)
    assert config.r == max(4, args.lora_rank)
    assert (config.lora_alpha, config.lora_dropout) == (args.lora_alpha, args.lora_dropout)
    model, heads = make(base, args, config)
    load_adapters(folder, model, heads, args, "some/base")
    for i in range(2):
        for role, source in (("actor", "actor"), ("reference", "actor"), ("critic", "critic")):
            new, expected = logits(model, f"agent_{i}_{role}"), logits(old, f"agent_{i}_{source}")
            assert torch.allclose(new, expected, atol=1e-5)


def test_a_merged_policy_may_have_been_scaled_by_the_root_of_its_rank(base, stage):
    for path in stage[0].rglob("adapter_config.json"):
        damage(path, {"use_rslora": True})
    old = peft.PeftModel.from_pretrained(copy.deepcopy(base), stage[0] / "agent_0" / "actor")
    args = flags(merge_lora_configs=True)
    with pytest.warns(UserWarning, match="use_rslora True there, False here"):
        model, heads = make(base, args, stage_config(stage[0], lora_config(args, base), args))
    load_adapters(stage[0], model, heads, args, "some/base")
    assert torch.allclose(logits(model, "agent_0_actor"), logits(old), atol=1e-5)
    assert not torch.allclose(logits(model, "agent_0_actor"), logits(stage[1], "agent_0_actor"), atol=1e-3)


def test_adapters_are_float32_on_a_base_of_bfloat16(base, tokenizer, tmp_path):
    old, heads = make(copy.deepcopy(base).bfloat16())
    save_adapters(tmp_path, randomise(old), heads, tokenizer, "b")
    model, heads = make(copy.deepcopy(base).bfloat16())
    load_adapters(tmp_path, model, heads, flags(), "b")
    assert {p.dtype for p in adapter_parameters(model, "agent_0_actor")} == {torch.float32}
    assert torch.equal(logits(model, "agent_1_actor"), logits(old, "agent_1_actor"))


def test_weights_are_padded_with_zeros(base, stage):
    args = flags(lora_rank=6, merge_lora_configs=True)
    model, heads = make(base, args)
    load_adapters(stage[0], model, heads, args, "some/base")
    for new, old in zip(adapter_parameters(model, "agent_0_actor"), adapter_parameters(stage[1], "agent_0_actor")):
        rows, columns = old.shape
        ratio = (8 / 4) / (8 / 6) if columns == 4 else 1
        assert torch.allclose(new[:rows, :columns], old * ratio)
        assert not new[rows:].any() and not new[:, columns:].any()


def test_targets_are_joined_and_a_new_one_starts_at_nothing(base, tokenizer, tmp_path):
    old_args, args = (flags(lora_target_modules=t) for t in (("q_proj", "v_proj"), ("v_proj", "up_proj")))
    args.merge_lora_configs = True
    old, heads = make(base, old_args)
    save_adapters(tmp_path, randomise(old), heads, tokenizer, "b")
    with pytest.warns(UserWarning, match="target_modules q_proj,v_proj there, up_proj,v_proj here; now r 4"):
        config = stage_config(tmp_path, lora_config(args, base), args)
    assert config.target_modules == {"q_proj", "v_proj", "up_proj"}
    model, heads = make(base, args, config)
    load_adapters(tmp_path, randomise(model), heads, args, "b")
    weights = dict(model.named_parameters())
    prefix = "base_model.model.model.layers.0.mlp.up_proj"
    assert not weights[f"{prefix}.lora_B.agent_0_actor.weight"].any()
    assert weights[f"{prefix}.lora_A.agent_0_actor.weight"].any()
    assert torch.allclose(logits(model, "agent_0_actor"), logits(old, "agent_0_actor"), atol=1e-5)


def test_another_configuration_is_shown_side_by_side(base, stage):
    args = flags(lora_rank=8, lora_alpha=2.0, lora_target_modules=("q_proj",))
    model, heads = make(base, args)
    for attempt in (
        lambda: stage_config(stage[0], lora_config(args, base), args),
        lambda: load_adapters(stage[0], model, heads, args, "some/base"),
    ):
        with pytest.raises(UserError) as error:
            attempt()
        message = str(error.value)
        assert "r 4 there, 8 here" in message and "lora_alpha 8.0 there, 2.0 here" in message
        assert "v_proj there, q_proj here" in message and "--merge-lora-configs" in message and "\n" not in message


def test_the_same_configuration_says_nothing(base, stage):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = stage_config(stage[0], lora_config(flags(), base), flags())
    assert config.to_dict() == lora_config(flags(), base).to_dict()


def test_no_optimizer_for_merged_ranks(base, stage):
    args = flags(lora_rank=8, merge_lora_configs=True, load_optimizer=True)
    with pytest.raises(UserError, match="--load-optimizer takes the LoRA configuration of .*: r 4 there, 8 here"):
        stage_config(stage[0], lora_config(args, base), args)


# --- Bad input --------------------------------------------------------------------------------------------------------


def damage(path, how):
    """Damage a file in one of some ways."""
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "garbage":
        path.write_bytes(b"\x80\x04 no such thing" * 20)
    elif how == "list":
        path.write_text("[1]")
    elif isinstance(how, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | how))
    else:
        tensors = load_file(path)
        how(tensors)
        save_file(tensors, path)


def lose(tensors):
    tensors.pop(next(iter(tensors)))


def reshape(tensors):
    tensors[next(iter(tensors))] = torch.zeros(3, 3)


def add(tensors):
    tensors["something.else"] = torch.zeros(3)


BAD = [
    ("actor/adapter_config.json", "gone", "is incomplete: there is no .*agent_1/actor/adapter_config.json"),
    ("actor/adapter_model.safetensors", "gone", "is incomplete: there is no .*actor/adapter_model.safetensors"),
    ("critic/adapter_model.safetensors", "gone", "is incomplete: there is no .*critic/adapter_model.safetensors"),
    ("base.json", "gone", "is incomplete: there is no .*base.json"),
    ("base.json", "garbage", "agent_1/base.json can't be read as JSON"),
    ("base.json", {"base": "x", "fingerprint": 3}, "is of the base x, not of some/base: model_type None there"),
    ("actor/adapter_config.json", "garbage", "adapter_config.json can't be read as JSON"),
    ("actor/adapter_config.json", "empty", "adapter_config.json can't be read as JSON"),
    ("actor/adapter_config.json", "list", r"adapter_config.json is to hold a JSON object, and holds \[1\]"),
    ("actor/adapter_config.json", {"peft_type": "IA3"}, "is no LoRA configuration: peft_type is IA3"),
    ("actor/adapter_config.json", {"r": "four"}, "is no LoRA configuration: r is four"),
    ("actor/adapter_config.json", {"target_modules": "q.*"}, r"is no LoRA configuration: target_modules is q"),
    (
        "actor/adapter_config.json",
        {"alpha_pattern": {"q_proj": 3}},
        "adapter_config.json has the alpha_pattern",
    ),
    ("actor/adapter_config.json", {"use_dora": True}, "use_dora True there, False here"),
    ("actor/adapter_model.safetensors", "cut", "agent_1/actor/adapter_model.safetensors is no whole safetensors file"),
    ("actor/adapter_model.safetensors", "empty", "adapter_model.safetensors is no whole safetensors file"),
    ("critic/adapter_model.safetensors", "garbage", "critic/adapter_model.safetensors is no whole safetensors file"),
    ("actor/adapter_model.safetensors", lose, r"does not fit: .*lora_.* is not there, \[.*\] here"),
    ("actor/adapter_model.safetensors", reshape, r"does not fit: .*lora_.* is \[3, 3\] there, \[.*\] here"),
    ("actor/adapter_model.safetensors", add, r"does not fit: something.else is \[3\] there, not here"),
    ("value_head.safetensors", "cut", "value_head.safetensors is no whole safetensors file"),
    ("value_head.safetensors", reshape, r"value_head.safetensors does not fit: .* is \[3, 3\] there"),
]


@pytest.mark.parametrize("merging", [False, True])
@pytest.mark.parametrize("file, how, message", BAD, ids=lambda x: getattr(x, "__name__", None) or str(x)[:40])
def test_a_damaged_checkpoint(base, stage, file, how, message, merging):
    damage(stage[0] / "agent_1" / file, how)
    args = flags(merge_lora_configs=merging)
    model, heads = make(base)
    if merging and how == {"use_dora": True}:
        with pytest.warns(UserWarning, match=message):
            stage_config(stage[0], lora_config(args, base), args)
        return
    with pytest.raises(UserError, match=message) as error:
        stage_config(stage[0], lora_config(args, base), args)
        load_adapters(stage[0], model, heads, args, "some/base")
    assert "\n" not in str(error.value)


def test_no_checkpoint(stage, tmp_path):
    with pytest.raises(UserError, match="got .*nowhere: there is no such folder"):
        check_checkpoint(tmp_path / "nowhere", 2)
    with pytest.raises(UserError, match="it has no agent_0"):
        check_checkpoint(stage[0] / "agent_0", 2)
    for asked in (1, 3):
        with pytest.raises(UserError, match=f"has 2 agents, and --num-agents is {asked}"):
            check_checkpoint(stage[0], asked)


def test_another_base(stage):
    for other, why in (
        (tiny_base(1), "the weights differ"),
        (tiny_base(hidden_size=16, intermediate_size=32), "hidden_size 32 there, 16 here"),
    ):
        model, heads = make(other)
        with pytest.raises(UserError, match=f"agent_0 is of the base some/base, not of other/base: {why}"):
            load_adapters(stage[0], model, heads, flags(), "other/base")


def test_no_pickle_is_read_or_written(base, stage, tokenizer, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a pickle")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    folder = stage[0] / "agent_0" / "actor"
    shutil.copy(folder / "adapter_model.safetensors", folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    model, heads = make(base)
    with pytest.raises(UserError, match="there is no .*adapter_model.safetensors"):
        load_adapters(stage[0], model, heads, flags(), "some/base")
    save_adapters(stage[0], model, heads, tokenizer, "some/base")
    load_adapters(stage[0], model, heads, flags(), "some/base")


# --- Export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [(), ("lm_head", "q_proj")])
def test_export(loaded_model, tokenizer, tmp_path, targets, capsys):
    model, heads = make(loaded_model, flags(num_agents=1, lora_target_modules=targets))
    save_adapters(tmp_path, randomise(model), heads, tokenizer, "utils/tiny_lm")
    merge(MergeArgs(str(tmp_path / "agent_0"), str(tmp_path / "out")))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert torch.allclose(logits(opened), logits(model, "agent_0_actor"), atol=1e-4)
    assert not torch.allclose(logits(opened), logits(loaded_model), atol=1e-2)
    text = "Guess it."
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode(text) == tokenizer.encode(text)
    assert not [path for path in tmp_path.iterdir() if path.name not in ("agent_0", "out")]
    assert "out" in capsys.readouterr().out


def test_export_from_the_command_line(loaded_model, tokenizer, tmp_path, monkeypatch, capsys):
    model, heads = make(loaded_model, flags(num_agents=1))
    save_adapters(tmp_path, randomise(model), heads, tokenizer, "of/nowhere")
    argv = [str(tmp_path / "agent_0"), str(tmp_path / "out"), "--model", "utils/tiny_lm"]
    command = [sys.executable, "-m", "utils.merge_adapter", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out" / "model.safetensors").is_file(), done.stderr
    assert "Warning" not in done.stderr

    monkeypatch.setattr(sys, "argv", ["merge_adapter.py", *argv])
    with pytest.raises(SystemExit) as stop:
        command_line(merge, MergeArgs, "")
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"merge_adapter.py: error: {argv[1]} is there already: name a new folder\n"


def test_bad_exports(base, stage, tmp_path):
    base.save_pretrained(tmp_path / "base")
    tiny_base(3).save_pretrained(tmp_path / "other")
    for agent, out, model, message in (
        ("", "", None, "two folders are needed"),
        (tmp_path / "nowhere", tmp_path / "out", None, "is no agent's folder .* there is no .*base.json"),
        (stage[0], tmp_path / "out", None, "is no agent's folder"),
        (stage[0] / "agent_0", tmp_path / "base", None, "is there already"),
        (stage[0] / "agent_0", tmp_path / "out", tmp_path / "no_base", "can't be loaded"),
        (stage[0] / "agent_0", tmp_path / "out", tmp_path / "other", "of the base some/base, not of .*weights differ"),
    ):
        with pytest.raises(UserError, match=message):
            merge(MergeArgs(str(agent), str(out), model and str(model)))
    damage(stage[0] / "agent_0" / "actor" / "adapter_model.safetensors", "cut")
    with pytest.raises(UserError, match="is no whole safetensors file"):
        merge(MergeArgs(str(stage[0] / "agent_0"), str(tmp_path / "out"), str(tmp_path / "base")))
    assert not (tmp_path / "out").exists()
