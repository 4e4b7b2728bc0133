"""utils.merge_adapter: an actor merged into its base opens like any other model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import TINY, make_team, randomise_adapters, tiny_base, tiny_logits
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils import adapters
from utils.cli import UserError, command_line
from utils.merge_adapter import Args, main

ROOT = Path(__file__).resolve().parent.parent


def save(base, tokenizer, folder, **flags):
    """Agents, as if they had learned, saved in a folder; the model."""
    agents = make_team(base, tokenizer, **flags)
    randomise_adapters(agents[0].model)
    adapters.save_agents(folder, agents)
    return agents[0].model


@pytest.fixture(scope="module")
def stage(tokenizer, tmp_path_factory):
    """A folder with agents of some/base, that base, and another one."""
    folder = tmp_path_factory.mktemp("stage")
    save(tiny_base(), tokenizer, folder / "run")
    tiny_base().save_pretrained(folder / "base")
    tiny_base(3).save_pretrained(folder / "other")
    return folder


@pytest.mark.parametrize("targets", [(), ("lm_head", "q_proj")], ids=["all layers", "the tied head"])
def test_a_merged_model_is_the_actor(loaded_model, tokenizer, tmp_path, targets):
    model = save(loaded_model, tokenizer, tmp_path, model=TINY, num_agents=1, lora_target_modules=targets)
    main(Args(str(tmp_path / "agent_0"), str(tmp_path / "out")))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert torch.allclose(tiny_logits(opened), tiny_logits(model, "agent_0_actor"), atol=1e-4)
    assert not torch.allclose(tiny_logits(opened), tiny_logits(loaded_model), atol=1e-2)


def test_a_merged_folder_has_the_tokenizer_and_nothing_stands_beside_it(loaded_model, tokenizer, tmp_path, capsys):
    save(loaded_model, tokenizer, tmp_path, model=TINY, num_agents=1)
    main(Args(str(tmp_path / "agent_0"), str(tmp_path / "out")))
    text = "Guess it."
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode(text) == tokenizer.encode(text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent_0", "out"]
    assert "out" in capsys.readouterr().out


def test_the_command_takes_another_name_of_the_base(loaded_model, tokenizer, tmp_path):
    save(loaded_model, tokenizer, tmp_path, model="of/nowhere", num_agents=1)
    argv = [str(tmp_path / "agent_0"), str(tmp_path / "out"), "--model", "utils/tiny_lm"]
    command = [sys.executable, "-m", "utils.merge_adapter", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out" / "model.safetensors").is_file(), done.stderr
    assert "Warning" not in done.stderr


def test_the_command_ends_with_one_line_where_it_can_not(stage, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["merge_adapter.py", str(stage / "run/agent_0"), str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        command_line(main, Args, "")
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"merge_adapter.py: error: {tmp_path} is there already: name a new folder\n"


REFUSED = {  # agent, folder to write, base, and the reason
    "no folders": ("", "", None, "two folders are needed"),
    "no agent": ("nowhere", "out", None, "is no agent's folder .* there is no .*base.json"),
    "a run's folder": ("run", "out", None, "is no agent's folder"),
    "a folder that is there": ("run/agent_0", "base", None, "is there already"),
    "no base": ("run/agent_0", "out", "no_base", "can't be loaded"),
    "another base": ("run/agent_0", "out", "other", "of the base some/base, not of .*weights differ"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_merged_is_refused(stage, case):
    *names, message = REFUSED[case]
    agent, out, model = [name and str(stage / name) for name in names]
    with pytest.raises(UserError, match=message):
        main(Args(agent, out, model))
    assert not (stage / "out").exists()


def test_a_damaged_adapter_is_refused(tokenizer, stage, tmp_path):
    save(tiny_base(), tokenizer, tmp_path)
    path = tmp_path / "agent_0" / "actor" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="is no whole safetensors file"):
        main(Args(str(tmp_path / "agent_0"), str(tmp_path / "out"), str(stage / "base")))
    assert not (tmp_path / "out").exists()
