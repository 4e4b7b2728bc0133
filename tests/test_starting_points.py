"""What a run takes from the run that it starts from, and what it leaves to the next."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import TINY_IDS, change_adapters, make_team, make_team_args, randomise_value_head, tiny_base, tiny_logits
from short_runs import ADAPTERS, assert_same_run, small_model, train
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_llm
from utils.cli import UserError
from utils.models import adapters
from utils.models.weights import fingerprint, read_tensors


@pytest.fixture
def stage(base, tokenizer, tmp_path):
    """(folder, agents) of a team that is saved after three updates."""
    agents = make_team(base, tokenizer)
    change_adapters(agents[0].model)
    for i, agent in enumerate(agents):
        randomise_value_head(agent, i)
        adapters.forward(agent.model, agent.actor, input_ids=TINY_IDS).logits.square().mean().backward()
        hidden_states = adapters.hidden_states(agent.model, agent.critic, input_ids=TINY_IDS)
        agent.value_head(hidden_states).square().mean().backward()
        for _ in range(3):
            agent.optimizers[0].step()
            agent.schedules[0].step()
    adapters.save_agents(tmp_path / "stage", agents)
    return str(tmp_path / "stage"), agents


def same_policy(after, name, before, source):
    return torch.equal(tiny_logits(after.model, name), tiny_logits(before.model, source))


# --- --keep-reference, --fresh-critic ---------------------------------------------------------------------------------


def test_references_stay_with_the_flag(base, stage, tokenizer):
    folder, old = stage
    agents = make_team(base, tokenizer, load_checkpoint=folder, keep_reference=True)
    for before, after in zip(old, agents):
        assert same_policy(after, after.reference, before, before.reference)
        assert same_policy(after, after.actor, before, before.actor)
        assert not same_policy(after, after.reference, before, before.actor)


def test_a_checkpoint_without_references_can_not_keep_them(base, stage):
    shutil.rmtree(f"{stage[0]}/agent_1/reference")
    with pytest.raises(UserError, match="^--keep-reference takes a checkpoint with references, and .*agent_1 has"):
        make_team_args(base, load_checkpoint=stage[0], keep_reference=True)


def test_a_reference_that_is_kept_has_to_be_whole(base, stage):
    (Path(stage[0]) / "agent_1/reference/adapter_model.safetensors").unlink()
    make_team_args(base, load_checkpoint=stage[0])
    with pytest.raises(UserError, match="agent_1 is incomplete: there is no .*reference/adapter_model.safetensors"):
        make_team_args(base, load_checkpoint=stage[0], keep_reference=True)


def test_critics_and_heads_are_new_with_the_flag(base, stage, tokenizer):
    folder, old = stage
    agents = make_team(base, tokenizer, load_checkpoint=folder, fresh_critic=True)
    for before, after in zip(old, agents):
        assert torch.equal(tiny_logits(after.model, after.critic), tiny_logits(base))
        assert not after.value_head.weight.any() and not after.value_head.bias.any()
        assert same_policy(after, after.actor, before, before.actor)


def test_fresh_critics_have_no_moments(base, stage, tokenizer):
    folder, old = stage
    agents = make_team(base, tokenizer, load_checkpoint=folder, fresh_critic=True, load_optimizer=True)
    for before, after in zip(old, agents):
        state = after.optimizers[0].state_dict()["state"]
        expected = before.optimizers[0].state_dict()["state"]
        assert len(expected) == 58 and [*state] == [*range(28)]  # of the actor
        assert all(torch.equal(state[k]["exp_avg"], expected[k]["exp_avg"]) for k in state)


def test_a_damaged_critic_is_not_read_where_it_is_to_be_new(base, stage, tokenizer):
    (Path(stage[0]) / "agent_1/critic/adapter_model.safetensors").write_bytes(b"")
    (Path(stage[0]) / "agent_1/value_head.safetensors").write_bytes(b"")
    assert len(make_team(base, tokenizer, load_checkpoint=stage[0], fresh_critic=True)) == 2


# --- --load-optimizer: the schedule goes on ---------------------------------------------------------------------------


def rates(agent, updates):
    """The actor's learning rate of each of so many updates."""
    found = []
    for _ in range(updates):
        found.append(agent.optimizers[0].param_groups[0]["lr"])
        agent.optimizers[0].step()
        agent.schedules[0].step()
    return found


def expected_rates(total, warmup, constant):
    """Of a run of so many updates, by transformers alone."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    if constant:
        schedule = transformers.get_constant_schedule_with_warmup(optimizer, warmup)
    else:
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, total)
    return rates(SimpleNamespace(optimizers=[optimizer], schedules=[schedule]), total)


@pytest.mark.parametrize("cosine", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_update_k_has_the_rate_of_step_n_plus_k_of_n_plus_u(base, stage, tokenizer, cosine, share):
    """Here n = 3 before and u = 10 now (make_team's)."""
    flags = {"lr_actor": 0.01, "cosine_lr_schedule": cosine, "warmup_proportion": share}
    agents = make_team(base, tokenizer, load_checkpoint=stage[0], load_optimizer=True, **flags)
    wanted = expected_rates(13, round(share * 13), not cosine)[3:]
    assert rates(agents[1], 10) == pytest.approx(wanted, rel=1e-12)


def test_without_the_flag_the_schedule_is_new(base, stage, tokenizer):
    agents = make_team(base, tokenizer, load_checkpoint=stage[0], lr_actor=0.01)
    assert rates(agents[0], 10) == pytest.approx(expected_rates(10, 0, False), rel=1e-12)


def test_without_a_saved_state_optimizers_and_schedule_are_new(base, stage, tokenizer):
    (Path(stage[0]) / "agent_1/optimizer.safetensors").unlink()
    with pytest.warns(UserWarning, match="agent_1 has no optimizer's state: the optimizers are new"):
        agents = make_team(base, tokenizer, load_checkpoint=stage[0], load_optimizer=True, lr_actor=0.01)
    assert not agents[0].optimizers[0].state and not agents[1].optimizers[0].state
    assert rates(agents[0], 10) == pytest.approx(expected_rates(10, 0, False), rel=1e-12)


@pytest.mark.parametrize("updates", [-1, "3", 10**12])
def test_a_number_of_updates_that_is_none_is_refused(base, stage, tokenizer, updates):
    path = Path(stage[0]) / "agent_0/optimizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"updates": updates}))
    with pytest.raises(UserError, match=f"optimizer.json: updates takes a number of updates, got {updates}$"):
        make_team(base, tokenizer, load_checkpoint=stage[0], load_optimizer=True)


def test_a_run_that_went_on_is_resumed_to_the_bit_without_what_it_began_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train("ppo", folder="first")
    flags = {"load_checkpoint": "first", "load_optimizer": True, "save_interval": 1, "keep_checkpoints": 9}
    agents, _ = train("ppo", folder="whole", **flags)
    assert agents[0].schedules[0].last_epoch == 6
    train("ppo", folder="run", **flags)
    for step in (2, 3):
        shutil.rmtree(f"run/checkpoints/update_{step:06d}")
    shutil.rmtree("first")
    train("ppo", resume="run", **flags)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    saved = json.loads((tmp_path / "run/agent_0/optimizer.json").read_text())
    assert saved["updates"] == 6


# --- --save-optimizer, --save-base ------------------------------------------------------------------------------------


def optimizer_files(folder):
    return sorted(path.name for path in folder.glob("agent_0/optimizer*"))


@pytest.mark.parametrize("keep", [True, False])
def test_optimizers_are_beside_the_agents_unless_the_flag_is_off(tmp_path, keep):
    _, run = train("ppo", folder=tmp_path / "run", save_optimizer=keep)
    files = ["optimizer.json", "optimizer.safetensors"]
    assert optimizer_files(run.folder) == (files if keep else [])
    assert optimizer_files(run.folder / "checkpoints/update_000003") == files


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("modules", [None, ["lm_head"], ["embed_tokens"]], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_the_base_is_saved_as_it_is_without_adapters(tokenizer, tmp_path, dtype, modules, tied):
    base = tiny_base(tie_word_embeddings=tied).to(getattr(torch, dtype))
    (tmp_path / "lora.json").write_text(json.dumps({"modules_to_save": modules}))
    flags = {"lora_config": str(tmp_path / "lora.json"), "lora_rank": 16, "lora_alpha": 32.0, "dtype": dtype}
    agents = make_team(base, tokenizer, **flags)
    change_adapters(agents[0].model)
    adapters.save_agents(tmp_path / "run", agents, with_base=True)
    base.save_pretrained(tmp_path / "expected")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "run/base").eval()
    expected = read_tensors(tmp_path / "expected/model.safetensors")
    tensors = read_tensors(tmp_path / "run/base/model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert opened.dtype == base.dtype and fingerprint(opened) == fingerprint(base)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "expected").eval()
    assert torch.equal(tiny_logits(opened), tiny_logits(alone))
    assert AutoTokenizer.from_pretrained(tmp_path / "run/base").get_vocab() == tokenizer.get_vocab()


def test_a_run_leaves_its_base_once_where_the_flag_says_so(tmp_path):
    train("ppo", folder=tmp_path / "run")
    assert not (tmp_path / "run/base").exists()
    train("ppo", folder=tmp_path / "run", overwrite=True, save_base=True, save_interval=1)
    assert [path.parent for path in (tmp_path / "run").rglob("base")] == [tmp_path / "run"]
    train("ppo", folder=tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run/base").exists()


def test_the_base_comes_without_optimizers_too(tmp_path):
    _, run = train("ppo", folder=tmp_path / "run", save_base=True, save_optimizer=False)
    assert (run.folder / "base/model.safetensors").is_file() and not optimizer_files(run.folder)


@pytest.mark.parametrize("load_optimizer", [True, False])
def test_a_run_starts_from_its_own_folder_alone(tmp_path, load_optimizer):
    agents, _ = train("ppo", folder=tmp_path / "run", save_base=True)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "run/base").eval()
    assert fingerprint(opened) == fingerprint(agents[0].model) == fingerprint(small_model()[0])
    flags = ADAPTERS | {"task": "number", "model": str(tmp_path / "run/base"), "load_checkpoint": str(tmp_path / "run")}
    flags |= {"load_optimizer": load_optimizer, "lr_actor": 0.0, "output_dir": str(tmp_path / "next")}
    again, _ = ppo_llm.main(ppo_llm.Args(**flags))
    assert again[0].schedules[0].last_epoch == (6 if load_optimizer else 3)
    for before, after in zip(agents, again):
        assert same_policy(after, after.actor, before, before.actor)
