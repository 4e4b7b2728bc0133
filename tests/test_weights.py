"""Agents in folders: what is there, how transformers and peft open it, and how agents are given back."""

import copy
import json
import shutil

import peft
import pytest
import torch
from helpers import tiny_base
from safetensors.torch import load_file
from teams import IDS, logits_of, make_team, roles_of, same_policy, shake
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils.cli import UserError, parse
from utils.models import weights
from utils.models.tensors import fingerprint
from utils.models.weights import optimizers_of

SCRIPTS = {"ippo": ippo_llm, "iac": iac_llm, "maac": maac_llm, "magrpo": magrpo_llm, "ppo": ppo_llm}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
WHOLE = {"lora_rank": 0}
CONFIGS = {
    "all": {"lora_rank": 4},
    "dora": {"lora_config": '{"use_dora": true, "rank_pattern": {"q_proj": 2}}'},
    "modules": {"lora_config": '{"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "model.norm"]}'},
    "embeddings": {"lora_config": '{"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]}'},
}


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# --- What is there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_folders_open_with_transformers_and_peft(base, tokenizer, tmp_path, kind):
    flags = WHOLE if kind == "whole" else {}
    agents = shake(make_team(base, tokenizer, **flags))
    weights.save_agents(tmp_path, agents)
    agent = agents[1]
    folder = tmp_path / "agent_1"
    if kind == "whole":
        actor = AutoModelForCausalLM.from_pretrained(folder)
        critic = AutoModel.from_pretrained(folder / "critic")
        reference = AutoModelForCausalLM.from_pretrained(folder / "reference")
    else:
        actor, critic, reference = (
            peft.PeftModel.from_pretrained(copy.deepcopy(base), folder / role)
            for role in ("actor", "critic", "reference")
        )
        assert files(folder / "actor") == ADAPTER
        critic = critic.get_base_model().base_model
    torch.testing.assert_close(actor.eval()(IDS).logits, logits_of(agent.actor), atol=1e-6, rtol=0)
    torch.testing.assert_close(reference.eval()(IDS).logits, logits_of(agent.reference), atol=1e-6, rtol=0)
    ones = torch.ones(2, 11, dtype=torch.long)
    hidden_states = agent.critic.read(torch.nn.functional.pad(IDS, (0, 1)), ones > 0).hidden_states
    found = critic.eval()(IDS).last_hidden_state.flatten(0, 1)
    torch.testing.assert_close(found, hidden_states, atol=1e-6, rtol=0)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()
    assert not [name for name in files(folder) if name.endswith((".bin", ".pt", ".pkl", ".py"))]


def test_a_reference_that_is_the_base_is_not_written(base, tokenizer, tmp_path):
    weights.save_agents(tmp_path, make_team(base, tokenizer, ippo_llm, use_separate_critic=False))
    assert {path.name for path in (tmp_path / "agent_0").iterdir() if path.is_dir()} == {"actor"}


def test_a_folder_is_replaced_whole(base, tokenizer, tmp_path, monkeypatch):
    agents = make_team(base, tokenizer)
    weights.save_agents(tmp_path, agents)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    shake(agents)

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(weights, "save_tensors", fail)
    with pytest.raises(OSError):
        weights.save_agents(tmp_path, agents)
    shutil.rmtree(tmp_path / "agent_0.writing")
    assert before == {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}


# --- Given back -------------------------------------------------------------------------------------------------------


def learn(agents):
    for agent in agents:
        for policy in (agent.actor, agent.critic):
            if policy is not None:
                ones = torch.ones(2, 10, dtype=torch.long)
                agent.value_head(policy.read(IDS, ones > 0).hidden_states).square().sum().backward()
        for optimizer in optimizers_of(agent):
            optimizer.step()
            optimizer.zero_grad()
    return agents


def tensors_of(agent):
    tensors = [x for policy in roles_of(agent).values() for x in policy.parameters()]
    tensors += agent.value_head.parameters()
    for optimizer in optimizers_of(agent):
        tensors += [x for moments in optimizer.state_dict()["state"].values() for x in moments.values()]
    return tensors


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", ["whole", *CONFIGS])
def test_a_checkpoint_gives_agents_back_to_the_bit_and_they_go_on_so(tokenizer, tmp_path, case, tied):
    base = tiny_base(tie_word_embeddings=tied)
    flags = WHOLE if case == "whole" else CONFIGS[case]
    old = learn(shake(make_team(base, tokenizer, **flags)))
    with torch.no_grad():
        logits_of(old[0].actor)  # leaves it merged
    weights.save_agents(tmp_path, old, checkpoint=True)
    new = make_team(base, tokenizer, **flags)
    weights.load_agents(tmp_path, new)
    for _ in range(2):
        for before, after in zip(old, new):
            assert len(tensors_of(before)) == len(tensors_of(after)) > 20
            assert all(map(torch.equal, tensors_of(before), tensors_of(after)))
            assert same_policy(before.reference, after.reference)
        learn(old), learn(new)


@pytest.mark.parametrize("flags", [{}, WHOLE], ids=str)
def test_a_run_is_not_resumed_with_another_model(base, tokenizer, tmp_path, flags):
    flags = flags | {"use_separate_reference_adapter": False}
    weights.save_agents(tmp_path, make_team(base, tokenizer, **flags), checkpoint=True)
    with pytest.raises(UserError, match="^the run of .* began with another model than agent 0 has here$"):
        weights.load_agents(tmp_path, make_team(tiny_base(seed=1), tokenizer, **flags))


# --- The base ---------------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_weights_whatever_their_type(base):
    assert fingerprint(base) == fingerprint(copy.deepcopy(base).bfloat16())
    other = copy.deepcopy(base)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 4] += 0.01
    assert fingerprint(base) != fingerprint(other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["all", "modules", "embeddings"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_base_is_saved_as_it_is_without_adapters(tokenizer, tmp_path, dtype, case, tied):
    base = tiny_base(tie_word_embeddings=tied).to(getattr(torch, dtype))
    agents = shake(make_team(base, tokenizer, dtype=dtype, **CONFIGS[case]))
    with torch.no_grad():
        logits_of(agents[0].actor)
    weights.save_agents(tmp_path, agents, with_base=True)
    base.save_pretrained(tmp_path / "expected")
    found = load_file(tmp_path / "base/model.safetensors")
    expected = load_file(tmp_path / "expected/model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    opened, alone = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("base", "expected"))
    assert opened.dtype == base.dtype and torch.equal(opened(IDS).logits, alone(IDS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "base").get_vocab() == tokenizer.get_vocab()


# --- Runs -------------------------------------------------------------------------------------------------------------


def reward_func(*completions):
    return [float(sum(map(len, texts))) for texts in zip(*completions)]


def train(script, folder, **flags):
    """A run of two updates on the game of numbers, with adapters."""
    small = {
        "train_size": 8,
        "rollout_buffer_size": 4,
        "num_train_epochs": 1,
        "num_agents": 2,
        "mini_batch_size": 4,
        "micro_batch_size": 4,
        "max_new_tokens": 3,
        "eval_interval": 0,
        "num_turns": 1,
        "lora_rank": 4,
        "model": "utils/tiny_lm",
        "task": "number",
        "output_dir": str(folder),
    }
    if script is magrpo_llm:
        small |= {"num_generations": 2}
    return script.main(script.Args(**(small | flags)))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_begins_from_another_and_is_resumed_without_it(script, tmp_path):
    script = SCRIPTS[script]
    first, _ = train(script, tmp_path / "first")
    flags = {"load_checkpoint": str(tmp_path / "first"), "load_optimizer": True, "save_interval": 1}
    begun, _ = train(script, tmp_path / "begun", **(flags | {"actor_learning_rate": 0.0}))
    assert same_policy(begun[0].actor, first[0].actor) and same_policy(begun[1].reference, first[1].actor)
    whole, _ = train(script, tmp_path / "whole", **flags)
    train(script, tmp_path / "run", pause_at=1, **flags)
    shutil.rmtree(tmp_path / "first")
    agents, run = script.main(parse(script.Args, ["--resume", str(tmp_path / "run")]))
    assert run.step == run.num_updates
    for one, other in zip(agents[:2], whole):
        assert same_policy(one.actor, other.actor) and same_policy(one.reference, other.reference)
        assert not same_policy(one.actor, one.reference)


def test_what_a_run_leaves_by_its_flags(small_model, tmp_path):
    train(ippo_llm, tmp_path / "run", model=small_model)
    optimizers = {f"optimizer_{k}.{kind}" for k in (0, 1) for kind in ("json", "safetensors")}
    assert optimizers <= files(tmp_path / "run/agent_0") and not (tmp_path / "run/base").exists()
    train(ippo_llm, tmp_path / "run", model=small_model, overwrite=True, save_base=True, save_optimizer=False)
    assert not optimizers & files(tmp_path / "run/agent_0")
    assert optimizers <= files(tmp_path / "run/checkpoints/update_000002/agent_0")
    assert [path.parent for path in (tmp_path / "run").rglob("base")] == [tmp_path / "run"]
    there = json.loads((tmp_path / "run/agent_0/base.json").read_text())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "run/base", dtype=torch.float32)
    assert there["fingerprint"] == fingerprint(opened)
    flags = {"model": str(tmp_path / "run/base"), "load_checkpoint": str(tmp_path / "run")}
    assert train(ippo_llm, tmp_path / "next", **flags)[1].step == 2
