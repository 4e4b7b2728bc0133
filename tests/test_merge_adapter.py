"""utils.merge_adapter: an actor merged into its base opens like any other model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import TINY, make_team, randomise_adapters, tiny_base, tiny_logits
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils.cli import UserError
from utils.merge_adapter import Args, main
from utils.models import adapters

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
def test_a_merged_model_is_the_actor_with_its_tokenizer(loaded_model, tokenizer, tmp_path, capsys, targets):
    model = save(loaded_model, tokenizer, tmp_path, model=TINY, num_agents=1, lora_target_modules=targets)
    main(Args(str(tmp_path / "agent_0"), str(tmp_path / "out")))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert torch.allclose(tiny_logits(opened), tiny_logits(model, "agent_0_actor"), atol=1e-4)
    assert not torch.allclose(tiny_logits(opened), tiny_logits(loaded_model), atol=1e-2)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("Guess it.") == tokenizer.encode("Guess it.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent_0", "out"]
    assert "out" in capsys.readouterr().out


def test_the_command_takes_another_name_of_the_base(loaded_model, tokenizer, tmp_path):
    save(loaded_model, tokenizer, tmp_path, model="of/nowhere", num_agents=1)
    argv = [str(tmp_path / "agent_0"), str(tmp_path / "out"), "--model", "utils/tiny_lm"]
    command = [sys.executable, "-m", "utils.merge_adapter", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out" / "model.safetensors").is_file(), done.stderr
    assert "Warning" not in done.stderr


REFUSED = {  # agent, folder to write, base, and the reason
    "no folders": ("", "", None, "two folders are needed"),
    "no agent": ("nowhere", "out", None, "is no agent's folder .* there is no .*base.json"),
    "a run's folder": ("run", "out", None, "is no agent's folder"),
    "a folder that is there": ("run/agent_0", "base", None, "is there already"),
    "below a file": ("run/agent_0", "other/config.json/out", "base", "config.json/out can't be written"),
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
