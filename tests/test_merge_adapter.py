"""utils.merge_adapter: an actor merged into its base opens like any other model."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_llm
from utils.cli import UserError, command_line
from utils.merge_adapter import Args, main
from utils.models.loading import locate

ROOT = Path(__file__).resolve().parent.parent
IDS = torch.arange(5, 25).reshape(2, 10)


def train(folder, **flags):
    """The agents of a run of one large update."""
    small = {"train_size": 8, "rollout_buffer_size": 8, "mini_batch_size": 8, "num_train_epochs": 1, "lora_rank": 4}
    small |= {"task": "number", "num_turns": 1, "max_new_tokens": 4, "eval_interval": 0, "actor_learning_rate": 0.05}
    return ppo_llm.main(ppo_llm.Args(**small, output_dir=str(folder), **flags))[0]


@torch.no_grad()
def logits_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A folder with a run, and an ordinary model."""
    folder = tmp_path_factory.mktemp("stage")
    train(folder / "run")
    AutoModelForCausalLM.from_pretrained(ROOT / "benchmark/central/model").save_pretrained(folder / "other")
    return folder


@pytest.mark.parametrize("targets", [(), ("lm_head", "q_proj")], ids=["all layers", "the tied head"])
def test_a_merged_model_is_the_actor_with_its_tokenizer(targets, tmp_path, capsys):
    (agent,) = train(tmp_path / "run", lora_target_modules=targets)
    main(Args(str(tmp_path / "run/agent_0"), str(tmp_path / "out")))
    with torch.no_grad(), agent.actor.active():
        expected = agent.actor.base(IDS).logits
    assert torch.allclose(logits_of(tmp_path / "out"), expected, atol=1e-4)
    assert not torch.allclose(logits_of(locate("utils/tiny_lm")), expected, atol=1e-2)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("Guess it.") == agent.tokenizer.encode("Guess it.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert "out" in capsys.readouterr().out


def test_the_command_takes_another_name_of_the_base(stage, tmp_path, monkeypatch, capfd, recwarn):
    argv = [str(stage / "run/agent_0"), str(tmp_path / "out"), "--model", "utils/tiny_lm"]
    monkeypatch.setattr(sys, "argv", ["merge_adapter.py", *argv])
    command_line(main, Args, "Merge.")
    assert (tmp_path / "out" / "model.safetensors").is_file() and "Warning" not in capfd.readouterr().err
    unseen = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)  # as in any command
    assert [warning for warning in recwarn if not issubclass(warning.category, unseen)] == []


REFUSED = {  # agent, folder to write, base, and the reason
    "no folders": ("", "", None, "two folders are needed"),
    "no agent": ("nowhere", "out", None, "is no agent's folder .* there is no .*base.json"),
    "a run's folder": ("run", "out", None, "is no agent's folder"),
    "a folder that is there": ("run/agent_0", "other", None, "is there already"),
    "below a file": ("run/agent_0", "other/config.json/out", None, "config.json/out can't be written"),
    "no base": ("run/agent_0", "out", "no_base", "can't be loaded"),
    "another base": ("run/agent_0", "out", "other", "of the base .*tiny_lm, not of .*hidden_size 160 there, 64 here"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_merged_is_refused(stage, case):
    *names, message = REFUSED[case]
    agent, out, model = [name and str(stage / name) for name in names]
    with pytest.raises(UserError, match=message):
        main(Args(agent, out, model))
    assert not (stage / "out").exists()
