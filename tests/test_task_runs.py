"""Every task trains in every script, and so does a dataset of yours."""

import importlib
import json

import pytest
from helpers import make_args

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
from utils.cli import UserError
from utils.tasks import BUILT_IN


def write_posts(path, count):
    path.write_text("\n".join(json.dumps({"prompt": f"post {k}"}) for k in range(count)))
    return str(path)


@pytest.mark.parametrize("task", BUILT_IN)
@pytest.mark.parametrize("script", [ippo_llm, iac_llm, maac_llm, magrpo_llm], ids=lambda script: script.__name__)
def test_every_task_runs_offline_in_every_script(tmp_path, script, task):
    if task == "reasoning":
        pytest.importorskip("reasoning_gym")
    turns = 1 + hasattr(importlib.import_module(f"utils.tasks.{task}"), "external_transition")
    flags = {"task": task, "num_turns": turns, "train_size": 8, "max_new_tokens": 8}
    if script is magrpo_llm:
        flags |= {"num_generations": 2, "train_size": 8 // 2**turns}
    _, run = script.main(make_args(tmp_path, script, **flags))
    least = -3 * turns if task == "build" else 0
    assert len(run.rows) == 1 and least <= run.rows[0]["reward_mean"] <= (run.optimum or 3)
    assert run.rows[0]["eval/reward_mean"] is not None


def test_a_run_on_a_dataset_of_yours(tmp_path):
    name = write_posts(tmp_path / "posts.jsonl", 21)
    args = make_args(tmp_path, dataset=name, train_size=None, max_new_tokens=4, eval_interval=1)
    _, run = ippo_llm.main(args)
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert all(sample["item"]["prompt"].startswith("post ") for sample in samples)
    assert len(run.rows) == 2 and run.rows[0]["eval/reward_mean"] >= 0  # 17 rows to train on


def test_a_dataset_that_does_not_fit_leaves_no_folder(tmp_path):
    name = write_posts(tmp_path / "posts.jsonl", 5)
    with pytest.raises(UserError, match="posts.jsonl has 4 items; an update takes 8"):
        ippo_llm.main(make_args(tmp_path, dataset=name, train_size=None))
    assert not (tmp_path / "run").exists()
