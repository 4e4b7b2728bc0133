"""--dataset: rows from a file or a folder in place of the task's own, as they would come from the hub."""

import importlib
import json

import pytest
from conftest import make_args

import iac_llm
import ippo_llm
from utils.cli import UserError
from utils.tasks import BUILT_IN

TINY_RUN = {"train_size": 16, "eval_size": 4, "max_new_tokens": 4, "eval_interval": 1}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def posts(split, count):
    return [{"prompt": f"{split} post {k}", "completion": "short"} for k in range(count)]


def test_a_dataset_of_yours(tmp_path):
    """A file has one split, of which some rows are held out; a folder has files of several."""
    name = write(tmp_path / "posts.jsonl", posts("all", 30))
    train, held_out = ippo_llm.load_datasets(ippo_llm.load_task("tldr", 2), make_args(dataset=name, **TINY_RUN), 8)
    assert len(train) == 16 and len(held_out) == 4
    assert len({item["prompt"] for item in [*train, *held_out]}) == 20

    for split, count in (("train", 12), ("test", 6)):
        write(tmp_path / f"folder/{split}.jsonl", posts(split, count))
    args = make_args(tmp_path, dataset=str(tmp_path / "folder"), **TINY_RUN)
    train, held_out = ippo_llm.load_datasets(ippo_llm.load_task("tldr", 2), args, 8)
    assert {item["prompt"].split()[0] for item in train} == {"train"} and len(train) == 12
    assert {item["prompt"].split()[0] for item in held_out} == {"test"} and len(held_out) == 4
    other = ippo_llm.load_datasets(
        ippo_llm.load_task("tldr", 2), make_args(dataset=args.dataset, seed=2, **TINY_RUN), 8
    )
    assert sorted(map(str, train)) == sorted(map(str, other[0])) and train != other[0]

    _, run = ippo_llm.main(args)
    assert {sample["item"]["prompt"].split()[0] for sample in run.samples} == {"train"}
    assert run.rows[0]["eval/reward_mean"] >= 0


def test_a_dataset_that_does_not_fit_is_one_line(tmp_path):
    wrong = write(tmp_path / "wrong.jsonl", [{"text": "a"}] * 20)
    few = write(tmp_path / "few.jsonl", posts("all", 5))
    (tmp_path / "broken.jsonl").write_text("{not json")
    for name, message in (
        (wrong, "--dataset .*wrong.jsonl has the columns text; --task tldr reads prompt"),
        (few, "--dataset .*few.jsonl has 4 items; an update takes 8"),
        (str(tmp_path / "broken.jsonl"), "--dataset .*broken.jsonl can't be loaded: "),
        (
            str(tmp_path / "none.jsonl"),
            "--dataset takes a hub dataset's name, a folder or a file, and there is no file .*none.jsonl",
        ),
    ):
        with pytest.raises(UserError, match=message):
            ippo_llm.main(make_args(tmp_path, dataset=name, **TINY_RUN))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", BUILT_IN)
@pytest.mark.parametrize("script", [ippo_llm, iac_llm], ids=["ippo", "iac"])
def test_every_task_runs_offline_in_every_script(tmp_path, script, task):
    if task == "reasoning":
        pytest.importorskip("reasoning_gym")
    turns = 1 + hasattr(importlib.import_module(f"utils.tasks.{task}"), "external_transition")
    args = make_args(tmp_path, script, task=task, num_turns=turns, train_size=8, max_new_tokens=8)
    _, run = script.main(args)
    assert len(run.rows) == 1 and 0 <= run.rows[0]["reward_mean"] <= (run.optimum or 3)
    assert run.rows[0]["eval/reward_mean"] is not None
