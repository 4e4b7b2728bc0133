"""Items: the task's own, or with --dataset rows from a file or a folder, as they would come from the hub."""

import json
from types import SimpleNamespace

import pandas
import pytest
from helpers import PLACE

from utils.cli import UserError
from utils.tasks import TaskArgs, load_items, load_task, tldr


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def posts(split, count):
    return [{"prompt": f"{split} post {k}", "completion": "short"} for k in range(count)]


def load(seed=1, least=8, task="tldr", **flags):
    args = TaskArgs(task=task, **({"eval_size": 4} | flags))
    train_items, held_out = load_items(load_task(task, 2), args, seed, least)
    return list(train_items), list(held_out)


def test_a_task_makes_1536_items_or_as_many_as_are_asked_for():
    train_items, held_out = load()
    assert train_items == list(tldr.train_dataset(1536, 1)) and held_out == list(tldr.eval_dataset(4, 1))
    assert load(train_size=16)[0] == list(tldr.train_dataset(16, 1))


def test_a_file_has_one_split_of_which_some_rows_are_held_out(tmp_path):
    name = write(tmp_path / "posts.jsonl", posts("all", 30))
    for train_size, expected in ((16, 16), (None, 26), (100, 26)):
        train_items, held_out = load(dataset=name, train_size=train_size)
        assert (len(train_items), len(held_out)) == (expected, 4)
        assert len({item["prompt"] for item in [*train_items, *held_out]}) == expected + 4
    assert len(load(dataset=name, eval_size=64)[1]) == 6  # at most a fifth


def test_a_folder_has_files_of_several_splits(tmp_path):
    for split, count in (("train", 12), ("test", 6)):
        write(tmp_path / f"folder/{split}.jsonl", posts(split, count))
    name = str(tmp_path / "folder")
    train_items, held_out = load(dataset=name, train_size=16)
    assert {item["prompt"].split()[0] for item in train_items} == {"train"} and len(train_items) == 12
    assert {item["prompt"].split()[0] for item in held_out} == {"test"} and len(held_out) == 4
    reordered = load(dataset=name, seed=2)[0]
    assert sorted(map(str, train_items)) == sorted(map(str, reordered)) and train_items != reordered
    assert len(load(dataset=name, eval_size=64)[1]) == 6


def test_a_task_without_held_out_items_has_none():
    task = SimpleNamespace(**{name: getattr(tldr, name) for name in ("train_dataset", "formatters", "reward_func")})
    train_items, held_out = load_items(load_task(task, 2), TaskArgs(train_size=8), 1, 8)
    assert len(train_items) == 8 and len(held_out) == 0
    task.train_dataset = lambda size, seed: {}[seed]
    with pytest.raises(UserError, match=f"^train_dataset of the task SimpleNamespace failed: KeyError: 1{PLACE}$"):
        load_items(task, TaskArgs(), 1, 8)


@pytest.mark.parametrize("rows", [{"a": 1}, {1, 2}, pandas.DataFrame([{"a": 1}])], ids=["dict", "set", "DataFrame"])
def test_items_that_have_no_numbers_are_one_line(rows):
    returned = f"train_dataset of the task SimpleNamespace returned a {type(rows).__name__}"
    task = SimpleNamespace(train_dataset=lambda size, seed: rows)
    with pytest.raises(UserError, match=f"^{returned}; it takes a list of items, or a datasets.Dataset$"):
        load_items(task, TaskArgs(), 1, 1)


def test_a_dataset_that_does_not_fit_is_one_line(tmp_path):
    wrong = write(tmp_path / "wrong.jsonl", [{"text": "a"}] * 20)
    few = write(tmp_path / "few.jsonl", posts("all", 5))
    fewer = write(tmp_path / "fewer.jsonl", posts("all", 4))  # of which none is held out
    (tmp_path / "broken.jsonl").write_text("{not json")
    (tmp_path / "rows.txt").write_text("a row")
    for name, message in (
        (wrong, "--dataset .*wrong.jsonl has the columns text; --task tldr reads prompt"),
        (few, "--dataset .*few.jsonl has 4 items; an update takes 8 .--rollout-buffer-size.$"),
        (fewer, "--dataset .*fewer.jsonl has 4 items; an update takes 8 .--rollout-buffer-size.$"),
        (str(tmp_path / "broken.jsonl"), "--dataset .*broken.jsonl can't be loaded: .*JSON parse error: .* in row 0"),
        (
            str(tmp_path / "rows.txt"),
            "--dataset takes a file of the formats .json .jsonl .csv .parquet, got .*rows.txt",
        ),
        (
            str(tmp_path / "none.jsonl"),
            "--dataset takes a hub dataset's name, a folder or a file, and there is no file .*none.jsonl",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load(dataset=name)
    with pytest.raises(UserError, match="^train_dataset of --task tldr has 4 items; an update takes 8 .--train-size.$"):
        load(train_size=4)
    rows = write(tmp_path / "rows.jsonl", [{"abstract_text": None}] * 20)
    with pytest.raises(UserError, match="rows.jsonl has a row that --task arxiv can't use: TypeError: "):
        load(dataset=rows, task="arxiv")
