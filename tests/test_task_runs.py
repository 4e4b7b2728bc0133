"""Tasks in runs: every built-in one, those that docs/tasks.md prints, and prompts that are too long."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from short_runs import FLAGS, SCRIPTS, small_model

from utils.tasks.task import BUILT_IN

PAGE = (Path(__file__).resolve().parent.parent / "docs/tasks.md").read_text()
FIVE_SCRIPTS = [pytest.param(name, marks=[] if name == "ippo" else pytest.mark.rest) for name in SCRIPTS]
every_script = pytest.mark.parametrize("script", FIVE_SCRIPTS)


def train(script, folder, task=None, train_dataset=None, **flags):
    flags = {"num_train_epochs": 1, "train_size": 4, "eval_interval": 1, "eval_size": 2} | flags
    args = SCRIPTS[script].Args(**(FLAGS[script] | flags), output_dir=str(folder))
    return SCRIPTS[script].main(args, task, *small_model(), train_dataset=train_dataset)[1]


def write_task(name, folder):
    """The file of the page, and its path."""
    source = re.search(rf"```python\n(# {name}: .*?)```", PAGE, flags=re.S)[1]
    (folder / name).write_text(source)
    return str(folder / name)


# --- Runs -------------------------------------------------------------------------------------------------------------


@every_script
@pytest.mark.parametrize("task", BUILT_IN)
def test_every_task_trains_in_every_script(tmp_path, script, task):
    if task == "reasoning":
        pytest.importorskip("reasoning_gym")
    turns = 1 + hasattr(importlib.import_module(f"utils.tasks.{task}"), "external_transition")
    run = train(script, tmp_path / "run", **{"task": task, "num_turns": turns, "max_new_tokens": 8})
    least = -3 * turns if task == "build" else 0
    for name in ("reward_mean", "eval/reward_mean"):
        assert least <= run.rows[0][name] <= (run.log_files.optimum or 3 * turns)


@every_script
def test_writers_of_the_page_read_each_others_text(tmp_path, script):
    run = train(script, tmp_path / "run", task=write_task("meet.py", tmp_path), num_turns=2)
    for sample in run.log_files.samples:
        assert [len(own) for own in sample["prompts"]] == [2, 2]
        assert all(sample["item"]["prompt"] in own[1] for own in sample["prompts"])
    assert 0 <= run.rows[0]["reward_mean"] <= 2


# --- Long prompts -----------------------------------------------------------------------------------------------------

ROWS = [{"prompt": "Guess it. " * (40 if k == 3 else k % 3 + 1)} for k in range(9)]


def task_of(**functions):
    return SimpleNamespace(reward_func=lambda first, second: [float(len(text)) for text in first], **functions)


@every_script
def test_items_with_long_prompts_are_left_out_and_change_nothing_else(tmp_path, capsys, script):
    flags = {"max_prompt_length": 30, "train_size": None, "max_episodes": 8}
    run = train(script, tmp_path / "some", task_of(), ROWS, **flags)
    assert "1 of 9 items are left out: a prompt has more than 30 tokens\n" in capsys.readouterr().out
    other = train(script, tmp_path / "none", task_of(), ROWS[:3] + ROWS[4:], **flags)
    assert "left out" not in capsys.readouterr().out
    assert [row["reward_mean"] for row in run.rows] == [row["reward_mean"] for row in other.rows]


def test_truncated_prompts_lose_tokens_on_the_left(tmp_path, tokenizer):
    read = []
    rows = [{"prompt": "one two three four five six"}] * 4
    flags = {"max_prompt_length": 5, "long_prompts": "truncate", "num_turns": 2}

    def reward_func(first, second, prompts):
        read.append(prompts)
        return [1.0] * len(first)

    task = SimpleNamespace(reward_func=reward_func, external_transition=lambda item: ["and on"] * 2)
    run = train("ippo", tmp_path / "run", task, rows, **flags)
    assert read[0][0] == [row["prompt"] for row in rows]  # the task is told what it gave
    ids = tokenizer("one two three four five six", add_special_tokens=False).input_ids
    assert len(ids) > 5 and run.log_files.samples[0]["prompts"][0][0] == tokenizer.decode(ids[-5:])
