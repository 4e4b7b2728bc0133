"""What a user or a task does wrong is one line, before anything is loaded or made, or with the agents saved."""

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from helpers import PLACE, make_args, read_metrics, task_of
from transformers import AutoModelForCausalLM

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
from utils.cli import TaskError, UserError, parse

ROOT = Path(__file__).resolve().parent.parent
ALL = [ippo_llm, iac_llm, maac_llm, magrpo_llm]
SCRIPTS = pytest.mark.parametrize("script", ALL, ids=lambda script: script.__name__)


def assert_refused(monkeypatch, folder, message, script, args):
    """main ends with one line before it loads a model or makes a folder; `args` makes its argument."""
    monkeypatch.setattr(script, "build_agents", None)
    with pytest.raises(UserError, match=message) as error:
        script.main(args())
    assert "\n" not in str(error.value) and error.value.exit_code == 2
    assert not folder.exists()


# --- Flags ------------------------------------------------------------------------------------------------------------

BAD_FLAGS = {
    "--num-agents 0": "--num-agents: Input should be greater than 0, got 0",
    "--mini-batch-size 0": "--mini-batch-size: Input should be greater than 0, got 0",
    "--temperature 0": "--temperature: Input should be greater than 0, got 0.0",
    "--gamma 1.5": "--gamma: Input should be less than or equal to 1, got 1.5",
    "--kl-coef -0.1": "--kl-coef: Input should be greater than or equal to 0, got -0.1",
    "--top-p 0": "--top-p: Input should be greater than 0, got 0.0",
    "--top-k -1": "--top-k: Input should be greater than or equal to 0, got -1",
    "--per-device-train-batch-size 0": "--per-device-train-batch-size: Input should be greater than 0, got 0",
    "--reward-norm-eps 0": "--reward-norm-eps: Input should be greater than 0, got 0.0",
    "--num-turns 2": "the task in .*_llm.py has no external_transition, which 2 turns take",
    "--num-turns 2 --task tldr": "--task tldr has no external_transition, which 2 turns take",
    "--num-generations 3": "--rollout-buffer-size takes a multiple of generations .*x processes, 3.*, got (64|32)",
    "--rollout-buffer-size 1": "--rollout-buffer-size (1: a reward less its own mean is 0|takes a multiple)",
    "--max-steps 0": "--max-steps: Input should be greater than 0, got 0",
    "--max-prompt-length 0": "--max-prompt-length: Input should be greater than 0, got 0",
    "--train-size 10": r"train_dataset of the task in .*_llm.py has 10 items; an update takes (64|32|16) ",
    "--task nosuch": "--task takes arxiv, .*tldr or a FILE.py, got nosuch",
    "--task nosuch.py": "--task takes arxiv, .*tldr or a FILE.py, and there is no file nosuch.py",
    "--model tests": "--model takes a model's folder or a hub name, and .*tests has no config.json",
    "--use-separate-critic --critic-model-name-or-path tests": "--critic-model-name-or-path takes a model's folder .*",
}
NO_EFFECT = {
    "--critic-model-name-or-path x": "--critic-model-name-or-path has no effect without --use-separate-critic",
    "--critic-value-head-hidden-dim 7": "--critic-value-head-hidden-dim has no effect without --use-separate-critic",
    "--value-head-hidden-dim 7 --use-separate-critic": (
        "--value-head-hidden-dim has no effect with --use-separate-critic"
    ),
    "--reward-norm-eps 0.5 --no-reward-normalization": "--reward-norm-eps has no effect without --reward-normalization",
    "--top-p 0.5 --no-do-sample": "--top-p has no effect without --do-sample",
    "--top-k 5 --no-do-sample": "--top-k has no effect without --do-sample",
    "--early-termination-threshold 0.5": "--early-termination-threshold has no effect with --num-turns 1",
    "--early-termination-threshold 0": "--early-termination-threshold has no effect with --num-turns 1",
}


def with_its_scripts():
    """Each of the flags above with the scripts that have them all."""
    for flags in (*BAD_FLAGS, *NO_EFFECT):
        names = {word[2:].replace("-", "_").removeprefix("no_") for word in flags.split() if word.startswith("--")}
        for script in ALL:
            has_them = names <= vars(script.Args()).keys()
            of_own_critics = "--use-separate-critic" in NO_EFFECT.get(flags, "")
            if has_them and not (of_own_critics and script is maac_llm):
                yield pytest.param(script, flags, id=f"{script.__name__} {flags}")


@pytest.mark.parametrize("script, flags", [*with_its_scripts()])
def test_a_bad_flag_is_one_line_before_anything_is_loaded_or_made(tmp_path, monkeypatch, script, flags):
    argv = [*flags.split(), "--output-dir", str(tmp_path / "run")]
    message = (BAD_FLAGS | NO_EFFECT)[flags]
    assert_refused(monkeypatch, tmp_path / "run", f"^{message}", script, lambda: parse(script.Args, argv))


def test_a_model_out_of_reach_is_one_line(tmp_path, monkeypatch):
    def model_info(*_, **__):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    message = "^--model takes .* no/such is no folder and can't be reached: no network$"
    args = make_args(tmp_path, model="no/such")
    assert_refused(monkeypatch, tmp_path / "run", message, ippo_llm, lambda: args)


@pytest.mark.parametrize("name", ["./model", "a/b/c"])
def test_a_path_that_is_no_folder_is_no_name_of_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.delattr(huggingface_hub.HfApi, "model_info")
    message = f"^--model takes a model's folder or a hub name, and there is no folder {name}$"
    args = make_args(tmp_path, model=name)
    assert_refused(monkeypatch, tmp_path / "run", message, ippo_llm, lambda: args)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run can't be written: .*Not a directory"):
        ippo_llm.main(make_args(tmp_path, train_size=8, output_dir=str(tmp_path / "file/run")))


def test_the_command_ends_with_one_line_and_exit_code_2():
    command = [sys.executable, "ppo_llm.py", "--num-agents", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ppo_llm.py: error: --num-agents: Input should be greater than 0, got 0\n"


# --- Tasks ------------------------------------------------------------------------------------------------------------

TASK = """
import datasets
def train_dataset(size, seed): return datasets.Dataset.from_list([{"q": str(k)} for k in range(size)])
def formatters(item): return "Guess " + item["q"]
def reward_func(first, second): return [len(a + b) / 1000 for a, b in zip(first, second)]
"""
BAD_TASKS = {
    "def f(:": r"--task .*mine.py can't be loaded: SyntaxError",
    TASK.replace("def reward_func", "def reward"): r"--task .*mine.py has no reward_func",
    TASK + "formatters = [formatters] * 3": r"--task .*mine.py has 3 formatters for 2 agents",
    TASK + "formatters = 'Guess'": r"--task .*mine.py: each of its formatters is to be a function",
    TASK + "optimum = 3": r"--task .*mine.py: optimum is not a function but 3",
    TASK.replace("range(size)", "range(2)"): r"train_dataset of --task .*mine.py has 2 items; an update takes 8",
    TASK.replace("return datasets", "return nothing"): r"train_dataset of --task .*mine.py failed: NameError",
}


@pytest.mark.parametrize("code", BAD_TASKS)
def test_a_bad_task_is_one_line_before_anything_is_loaded_or_made(tmp_path, monkeypatch, code):
    (tmp_path / "mine.py").write_text(code)
    args = make_args(tmp_path, task=str(tmp_path / "mine.py"))
    assert_refused(monkeypatch, tmp_path / "run", f"^{BAD_TASKS[code]}", ippo_llm, lambda: args)


def test_a_reward_that_fails_later_is_one_line_and_the_agents_are_saved(tmp_path, model):
    calls = []

    def reward_func(first, second):
        calls.append(first)
        if len(calls) == 1 or len(first) == 1:
            return [k / 10 for k in range(len(first))]
        raise ZeroDivisionError("division by zero")

    message = rf"^reward_func raised ZeroDivisionError: division by zero{PLACE} on the batch of 8 items$"
    with pytest.raises(TaskError, match=message) as error:
        ippo_llm.main(make_args(tmp_path, eval_interval=0), task_of(reward_func=reward_func))
    assert error.value.exit_code == 1
    assert len(read_metrics(tmp_path / "run")) == 1
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run/agent_1", dtype=torch.float32)
    assert not torch.equal(saved.lm_head.weight, model.lm_head.weight)  # what the first update taught


def test_a_formatter_that_raises_is_one_line(tmp_path):
    with pytest.raises(TaskError, match=rf"^formatter of agent 0 failed on item 0, .*: KeyError: 'nothing'{PLACE}$"):
        ippo_llm.main(make_args(tmp_path), task_of(formatters=lambda item: item["nothing"]))


@SCRIPTS
def test_a_model_without_room_for_a_prompt_is_one_line(tmp_path, monkeypatch, script):
    message = "^--max-new-tokens 512 after a prompt of 1 exceeds the model's 512 positions$"
    assert_refused(
        monkeypatch, tmp_path / "run", message, script, lambda: make_args(tmp_path, script, max_new_tokens=512)
    )
