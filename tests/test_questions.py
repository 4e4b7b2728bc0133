"""Questions with answers: a conversation_template and a reward_fn in place of formatters and reward_func."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import make_args, make_ppo_args

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils.cli import TaskError, UserError
from utils.tasks import TaskArgs, load_items, load_task
from utils.tasks.episodes import Episodes
from utils.tasks.questions import fill

ROOT = Path(__file__).resolve().parent.parent
QUIZ = re.search(r"```python\n(# quiz\.py: .*?)```", (ROOT / "docs/tasks.md").read_text(), flags=re.S)[1]
ROWS = [{"question": f"{k} + {k}?", "answer": str(2 * k), "level": k} for k in range(20)]
TEMPLATE = [{"role": "user", "content": "Q: {question}\nA:"}]


def contains(completion, answer, question):
    return float(answer in completion)


def task_of(**attributes):
    return SimpleNamespace(**({"conversation_template": TEMPLATE, "reward_fn": contains} | attributes))


def load(rows, **attributes):
    return load_items(load_task(task_of(**attributes), 2), TaskArgs(), 1, 1, rows)[0]


# --- In a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [ippo_llm, iac_llm, maac_llm, magrpo_llm, ppo_llm])
def test_the_file_of_the_page_runs_as_printed(tmp_path, script):
    assert len(QUIZ.splitlines()) <= 10
    (tmp_path / "quiz.py").write_text(QUIZ)
    data = tmp_path / "quiz.jsonl"
    rows = [{"question": f"What is {k}?", "answer": "E1"[k % 2]} for k in range(20)]  # texts have e, numbers have 1
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"task": str(tmp_path / "quiz.py"), "dataset": str(data), "train_size": 16, "num_agents": 2}
    if script is ppo_llm:
        args = make_ppo_args(tmp_path, max_turns=1, **flags)
    else:
        if script is magrpo_llm:
            flags |= {"num_generations": 4, "train_size": 4}
        args = make_args(tmp_path, script, **flags)
    _, run = script.main(args)
    assert len(run.rows) == 2 and len(run.samples) == 4
    for sample in run.samples:
        assert sample["item"] in rows
        assert sample["reward"] == float(sample["item"]["answer"].lower() in sample["completions"][-1].lower())
    assert 0 < sum(row["reward_mean"] for row in run.rows) < 2


# --- The template -----------------------------------------------------------------------------------------------------


def test_a_template_has_the_columns_of_the_item_once_and_other_braces_as_they_are():
    item = {"question": "What is {answer}?", "answer": "4", "two words": 7}
    assert fill("{question} {x} {two words} {{}} {", item) == "What is {answer}? {x} 7 {{}} {"


def test_a_template_is_the_prompt_of_every_agent():
    template = [{"role": "system", "content": "Level {level}."}, *TEMPLATE]
    episodes = Episodes(load_task(task_of(conversation_template=template), 2), ROWS[1:3], 2, 1)
    first = [{"role": "system", "content": "Level 1."}, {"role": "user", "content": "Q: 1 + 1?\nA:"}]
    assert episodes.prompt_history[0] == [[first], [first]]
    assert episodes.prompt_history[1][0][0][1]["content"] == "Q: 2 + 2?\nA:"
    assert template[1] == TEMPLATE[0]  # is as it was


# --- The score --------------------------------------------------------------------------------------------------------


def test_the_last_agents_completions_are_scored_one_by_one():
    calls = []

    def reward_fn(text, answer, question, level, other="none", **more):
        calls.append((text, answer, question, level, other, more))
        return level / 2

    rewards = load_task(task_of(reward_fn=reward_fn), 2).reward_func(["a", "b"], ["c", "d"], items=ROWS[1:3])
    assert rewards == [0.5, 1.0]
    assert calls == [("c", "2", "1 + 1?", 1, "none", {}), ("d", "4", "2 + 2?", 2, "none", {})]


def test_each_form_goes_with_the_other_of_the_other():
    formatted = load_task(SimpleNamespace(formatters=lambda item: "Hi", reward_fn=contains), 1)
    assert Episodes(formatted, ROWS[:1], 1, 1).prompt_history == [[["Hi"]]]
    scored = load_task(SimpleNamespace(conversation_template=TEMPLATE, reward_func=lambda texts: [3.0]), 1)
    assert scored.reward_func(["a"]) == [3.0]


def test_a_loaded_task_loads_again():
    task = load_task(task_of(), 2)
    assert load_task(task, 2) is task


def test_a_score_that_is_no_number_is_one_line():
    episodes = Episodes(load_task(task_of(reward_fn=lambda *_: "1"), 2), ROWS[:1], 2, 1)
    with pytest.raises(TaskError, match="^reward_fn returned '1' for item 0, .*; it takes a number up to 1e30$"):
        episodes.reward_func([0], [["p"], ["p"]], [["a"], ["b"]])


# --- What is wrong with it --------------------------------------------------------------------------------------------

WRONG = {
    "both prompts": (
        {"formatters": lambda item: "Hi"},
        "has both formatters and conversation_template; it takes one of them",
    ),
    "both scores": ({"reward_func": lambda texts: [0]}, "has both reward_func and reward_fn; it takes one of them"),
    "a text": (
        {"conversation_template": "Q: {question}"},
        ": conversation_template takes a list of messages, each with role and content, got 'Q: {question}'",
    ),
    "no role": (
        {"conversation_template": [{"content": "Q"}]},
        ": conversation_template takes a list of messages, each with role and content, got .*",
    ),
    "a number": ({"reward_fn": 3}, ": reward_fn is not a function but 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case):
    attributes, message = WRONG[case]
    with pytest.raises(UserError, match=f"^the task SimpleNamespace ?{message}$"):
        load_task(task_of(**attributes), 2)


def test_a_row_without_a_column_is_one_line(tmp_path):
    message = (
        "^train_dataset= has a row without answer, which the task SimpleNamespace reads: {'question': 'Why[?]'.*}$"
    )
    for row in ({"question": "Why?"}, {"question": "Why?", "answer": None}):
        with pytest.raises(UserError, match=message):
            load([*ROWS, row])
    with pytest.raises(UserError, match="^train_dataset= has a row without unit, which "):
        load(ROWS, reward_fn=lambda completion, answer, question, unit: 0.0)
    with pytest.raises(
        UserError, match="^train_dataset of the task SimpleNamespace has a row without question, which "
    ):
        load(None, train_dataset=lambda size, seed: [{"answer": "4"}] * size)
    assert load(ROWS, reward_fn=lambda completion, answer, question, unit="m": 0.0) == ROWS


def test_a_template_alone_reads_what_it_names():
    parts = {"reward_func": lambda texts: [0.0]}
    task = load_task(SimpleNamespace(conversation_template=TEMPLATE, **parts), 1)
    with pytest.raises(UserError, match="^train_dataset= has a row without question, which "):
        load_items(task, TaskArgs(), 1, 1, [{"problem": "2 + 2"}])
    template = [{"role": "user", "content": "{problem}"}]
    task = load_task(SimpleNamespace(conversation_template=template, **parts), 1)
    assert load_items(task, TaskArgs(), 1, 1, [{"problem": "2 + 2"}])[0] == [{"problem": "2 + 2"}]


def test_a_task_without_data_takes_data_from_elsewhere():
    with pytest.raises(UserError, match="^the task SimpleNamespace has no train_dataset$"):
        load(None)
    assert load(ROWS) == ROWS
