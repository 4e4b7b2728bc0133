"""The task `reasoning`: questions of reasoning-gym, scored by reasoning-gym."""

import sys

import datasets
import pytest

from utils.cli import UserError
from utils.tasks import load_task, reasoning

TASK = load_task(reasoning, 2)


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning.source.cache_clear()
    with pytest.raises(UserError, match=r"takes the package reasoning-gym: pip install reasoning-gym==0\.1\.25$"):
        reasoning.named_dataset("gcd", 3, 1, "train")


def test_an_unknown_name_is_answered_with_close_ones(gym):
    with pytest.raises(UserError, match="^--dataset leg_count is not in reasoning-gym; the closest.* leg_counting"):
        reasoning.named_dataset("leg_count", 3, 1, "train")


def test_scorers_that_run_the_answer_are_refused(gym):
    from reasoning_gym.factory import DATASETS

    assert reasoning.UNSAFE <= set(DATASETS)
    with pytest.raises(UserError, match="--dataset spiral_matrix is refused"):
        reasoning.named_dataset("spiral_matrix", 3, 1, "train")


@pytest.mark.parametrize("name", ["gcd", "leg_counting", "chain_sum", "rearc", "number_sorting", "time_intervals"])
def test_items_go_through_a_dataset_and_the_scorer_pays_the_right_answer(gym, name, tmp_path):
    items = reasoning.named_dataset(name, 6, 1, "train")
    items.to_json(tmp_path / "items.jsonl")
    reasoning.entry.cache_clear()
    items = list(
        datasets.load_dataset("json", data_files=str(tmp_path / "items.jsonl"), split="train", cache_dir=tmp_path)
    )
    right = [item["answer"] for item in items]
    assert TASK.reward_func(["no"] * 6, right, items=items) == [1.0] * 6
    assert max(TASK.reward_func(right, ["no"] * 6, items=items)) < 0.1  # only the last agent's answer counts


def test_scores_are_those_of_the_package(gym):
    items = list(reasoning.train_dataset(20, 3))
    own = gym.create_dataset("gcd", size=20, seed=items[0]["seed"])
    answers = ["1", "2", "12", "", "no"] * 4
    assert [item["question"] for item in items] == [entry["question"] for entry in own]
    expected = [own.score_answer(answer, entry) for answer, entry in zip(answers, own)]
    assert TASK.reward_func(answers, items=items) == expected and len(set(expected)) > 2


def test_an_answer_that_the_scorer_fails_on_earns_nothing(gym):
    items = list(reasoning.named_dataset("prime_factorization", 2, 1, "train"))
    own = gym.create_dataset("prime_factorization", size=2, seed=items[0]["seed"])
    with pytest.raises(ValueError):
        own.score_answer("I do not know", own[0])
    assert TASK.reward_func(["I do not know"] * 2, items=items) == [0.0, 0.0]


def test_questions_come_from_the_seed_and_differ_between_training_and_evaluation(gym):
    train, again, other = (
        reasoning.named_dataset("leg_counting", 200, seed, "train")["question"] for seed in (1, 1, 2)
    )
    held_out = reasoning.named_dataset("leg_counting", 200, 1, "eval")["question"]
    assert list(train) == list(again)
    assert not set(train) & set(held_out) and not set(train) & set(other)
    assert len(reasoning.eval_dataset(5, 1)) == 5


@pytest.mark.parametrize(
    "text, answer",
    [
        (" 12\n", "12"),
        ("It is <answer> 7 </answer>, I think.", "7"),
        ("<answer>1</answer> no, <answer>a\nb</answer>", "a\nb"),
        ("<answer>7", "<answer>7"),
    ],
)
def test_the_answer_stands_in_tags_or_is_all(text, answer):
    assert reasoning.answer_in(text) == answer


def test_in_a_later_turn_each_agent_reads_what_all_said():
    item = {"question": "What is 2 + 2?"}
    first, last = reasoning.external_transition(["three", " 4\n"], 2, item)
    assert first[0]["content"].startswith("What is 2 + 2?\n\nYou said: three\nAgent 1 said: 4\n\n")
    assert last[0]["content"].startswith("What is 2 + 2?\n\nAgent 0 said: three\nYou said: 4\n\n")
    assert last[0]["content"].endswith(TASK.formatters(item)[0]["content"].removeprefix("What is 2 + 2?\n\n"))


def test_a_single_agent_has_one_turn():
    assert load_task("reasoning", 1).reward_func.__name__ == "reward_fn"
    assert load_task("reasoning", 3, num_turns=2).external_transition is reasoning.external_transition
    with pytest.raises(UserError, match="^--task reasoning: 2 turns take 2 or more agents"):
        load_task("reasoning", 1, num_turns=2)
