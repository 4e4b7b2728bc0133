"""The default task's rule, against numbers worked out by hand; loading a task; batches of its items."""

import math
from types import ModuleType, SimpleNamespace

import pytest

from utils import tasks
from utils.cli import UserError
from utils.models.prompts import render
from utils.tasks import Episodes, TaskArgs, batches, load_items, load_task, optimum, tldr
from utils.tasks.tldr import eval_dataset, formatters, pair_reward, reward_func, train_dataset


def text(words, letters=4, start=0):
    """So many different words of so many letters, none a stop word or a transition."""
    return " ".join(f"{start + k:0{letters}d}" for k in range(words))


def test_a_text_outside_8_to_256_words_earns_nothing():
    assert pair_reward(text(7), text(16)) == 0.0
    assert pair_reward(text(8), text(257)) == 0.0
    assert pair_reward("", text(20)) == 0.0


@pytest.mark.parametrize(
    "long, points",
    [
        (text(8), 0.5),  # ratio 1: stop
        (text(50), 0.5),  # ratio 6.4: stop
        (text(10, 4), 0.5 + (49 / 39 - 1.1) / 0.5),  # ratio 1.256; unique ratio 1.25 is below 1.3: stop
        (text(12, 4), 0.5 + (59 / 39 - 1.1) / 0.5 + 0.5 * (1.5 - 1.3) / 0.7 + 0.6 * 8 / 12),
        (text(20, 4), 0.5 + 1 + 0.5 + 0.6 * 8 / 20),  # ratio 2.54, unique ratio 2.5
        (text(20, 4, start=100), 0.5 + 1 + 0.5),  # no word in common
        (text(32, 4), 0.5 + (5 - 159 / 39) / 1.8 + 0.5 + 0.6 * 8 / 32),
        (text(19) + " however", 0.5 + 1 + 0.5 + 0.4 * 0.4 + 0.6 * 8 / 20),  # one category of transitions
        (text(18) + " however so", 0.5 + 1 + 0.5 + 0.4 * 0.45 + 0.6 * 8 / 19),  # two; `so` is a stop word
        (text(19) + " soviet", 0.5 + 1 + 0.5 + 0.6 * 8 / 20),  # a part of a word is no transition
    ],
)
def test_each_level_of_the_rule(long, points):
    assert pair_reward(text(8), long) == pytest.approx(points)


def test_one_writer_is_held_against_the_post_and_many_form_a_chain():
    items = [{"prompt": text(20)}]
    assert reward_func([text(8)], items=items) == [pytest.approx(pair_reward(text(8), text(20)))]
    pairs = pair_reward(text(8), text(20)), pair_reward(text(20), text(40))
    assert reward_func([text(8)], [text(20)], [text(40)], items=items) == [pytest.approx(sum(pairs) / 2)]


def test_posts_come_from_the_seed_and_are_not_shared_between_training_and_evaluation():
    assert train_dataset(50, 1)[:] == train_dataset(50, 1)[:] != train_dataset(50, 2)[:]
    train, held_out = (set(data["prompt"]) for data in (train_dataset(1000, 1), eval_dataset(64, 1)))
    assert len(train & held_out) <= 1
    assert "about 64 words" in formatters(train_dataset(1, 1)[0], 2)[0]["content"]


def test_batches_pass_over_the_data_as_often_as_there_are_epochs(monkeypatch):
    lines = []
    monkeypatch.setattr(tasks, "say", lines.append)
    items = list(range(10))
    order = [item for batch in batches(items, 4, 3, seed=0) for item in batch]
    assert len(order) == 28 and lines == ["the last 2 items of the last epoch are left out: an update takes 4"]
    assert sorted(order[:10]) == sorted(order[10:20]) == items and order[:10] != order[10:20]
    assert order == [item for batch in batches(items, 4, 3, seed=0) for item in batch]
    assert list(batches(items, 5, 2, seed=0, first=15)) == list(batches(items, 5, 2, seed=0))[3:]
    assert len(lines) == 2  # of 5 none is left out


@pytest.mark.parametrize("attributes", [{}, {"formatters": None}], ids=str)
def test_without_formatters_every_agent_reads_the_items_prompt(attributes, tokenizer):
    task = load_task(SimpleNamespace(train_dataset=train_dataset, reward_func=reward_func, **attributes), 2)
    rows = [{"prompt": "Say a number."}, {"prompt": [{"role": "user", "content": "Say it."}]}]
    items, _ = load_items(task, TaskArgs(), 1, 1, rows)
    episodes = Episodes(task, items, 2)
    for agent in range(2):
        assert episodes.prompts(agent, [0, 1], tokenizer) == [render(row["prompt"], tokenizer) for row in rows]
    with pytest.raises(UserError, match="^train_dataset= has a row without prompt, which the task .* reads: {'k': 3}$"):
        load_items(task, TaskArgs(), 1, 1, [*rows, {"k": 3}])


def test_a_task_is_a_name_a_file_or_a_module(tmp_path):
    assert load_task("tldr", 2) is load_task(tldr, 2) is tldr
    path = tmp_path / "mine.py"
    path.write_text("from neighbour import *\n")
    (tmp_path / "neighbour.py").write_text("from utils.tasks.tldr import *\n")
    assert load_task(str(path), 2).reward_func is reward_func
    takes = "--task takes arxiv, build, code, number, probe, reasoning, tldr or a FILE.py"
    with pytest.raises(UserError, match=f"^{takes}, got sandbox$"):
        load_task("sandbox", 2)
    with pytest.raises(UserError, match=f"^{takes}, and there is no file gone.py$"):
        load_task("gone.py", 2)
    empty = ModuleType("__main__")
    empty.__file__ = "folder/ippo_llm.py"
    with pytest.raises(UserError, match="^the task in ippo_llm.py has no reward_func$"):
        load_task(empty, 2)
    empty.reward_func, empty.optimum = reward_func, 3
    with pytest.raises(UserError, match="^the task in ippo_llm.py: optimum is not a function but 3$"):
        load_task(empty, 2)


@pytest.mark.parametrize("value, reason", [("all", "failed: ValueError: could not"), (math.nan, "returned nan;")])
def test_an_optimum_that_is_no_number_is_one_line(value, reason):
    with pytest.raises(UserError, match=f"^optimum of the task mine {reason}"):
        optimum(SimpleNamespace(__name__="mine", optimum=lambda: value), [], 2, 1)
    assert optimum(SimpleNamespace(optimum=lambda: None), [], 2, 1) is None


def test_a_check_that_fails_is_one_line():
    def check(num_agents, num_turns):
        assert num_agents == 3, "three play"

    task = SimpleNamespace(__name__="mine", check=check, formatters=tldr.formatters, reward_func=reward_func)
    with pytest.raises(UserError, match="^the task mine: check failed: AssertionError: three play"):
        load_task(task, 2)
