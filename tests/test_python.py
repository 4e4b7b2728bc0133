"""The scripts from Python: the page's examples, rows and environments as objects, threads, runs that go on."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from processes import ROOT
from short_runs import FLAGS, SCRIPTS, make_task, reward_length, small_model

from utils.cli import UserError
from utils.same import compare

pytestmark = pytest.mark.usefixtures("in_tmp_path")
RUN, LOOP, TRANSCRIPTS, ANSWER = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), flags=re.S)

every_script = pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.rest] if name in ("iac", "maac") else []) for name in SCRIPTS]
)


class Env:
    """Two turns of counting, for 1 each."""

    def reset(self, seed):
        return "Count.", {}

    def step(self, answer):
        return "And on.", 1.0, False, False, {}


ROWS = [{"share": k / 12, "k": k} for k in range(12)]


def train(script, task=None, rows=None, **flags):
    """Agents and Run of a short run on the game of numbers, or on another task."""
    script_flags = FLAGS[script] | {"train_size": None, "output_dir": "run"}
    script_flags |= {"rollout_buffer_size": 16} if script == "magrpo" else {}  # of four items, as in the others
    args = SCRIPTS[script].Args(**(script_flags | flags))
    return SCRIPTS[script].main(args, task or make_task(reward_length), *small_model(), train_dataset=rows)


# --- The page's examples ----------------------------------------------------------------------------------------------


@pytest.fixture
def names():
    """What an example leaves; it runs where the scripts' folder lies beside it."""
    Path("utils").symlink_to(ROOT / "utils")
    return {}


OTHERS = [pytest.param(f"{name}_llm", marks=pytest.mark.rest) for name in ("iac", "maac", "magrpo", "ppo")]


@pytest.mark.parametrize("script", ["ippo_llm", *OTHERS])
def test_a_run_of_the_page_is_loaded_with_all_that_it_learned(names, script):
    code = RUN.replace("ippo_llm", script).replace("size=16, max_episodes=32", "size=4, max_episodes=8")
    if script == "magrpo_llm":
        code = code.replace("num_agents=2,", "num_agents=2, num_generations=2,")
    if script == "ppo_llm":  # whose default is a game
        code = code.replace("num_agents=2,", "num_agents=2, task='tldr',")
    before, after = code.split("agents, args = load")
    exec(before, names)
    trained = names["agents"]
    exec(f"agents, args = load{after}", names)
    assert len(names["run"].rows) == 2 and len(trained) == len(names["agents"]) == 2 + (script == "maac_llm")
    for one, other in zip(trained, names["agents"]):
        learned, loaded = (each.actor if hasattr(each, "actor") else each.critic for each in (one, other))
        assert all(torch.equal(x, y) for x, y in zip(learned.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize("block", [LOOP, TRANSCRIPTS, ANSWER], ids=["loop", "transcripts", "answer"])
def test_the_other_examples_run_as_printed(names, capsys, block):
    """But for the episodes of the loop."""
    exec(block.replace("16", "4"), names)
    assert capsys.readouterr().out.count("\n") >= (2 if block is LOOP else 1)


def test_the_transcripts_of_the_page_are_what_is_learned_from(names):
    exec(TRANSCRIPTS, names)
    rollout = names["rollout"]
    assert rollout.rewards.sum(1).tolist() == [1.0, 0.0] and rollout.answers == [["8", "12"], ["4", "2"]]
    for row, answers in enumerate(rollout.answers):
        for turn, text in enumerate(answers, 1):
            assert names["agent"].tokenizer.decode(rollout.ids[row][rollout.turns[row] == turn]) == text


# --- Objects in place of what flags name ------------------------------------------------------------------------------


@every_script
@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list])
def test_rows_are_the_items(script, make):
    _, run = train(script, rows=make(ROWS))
    numbers = {sample["item"]["k"] for sample in run.log_files.samples}
    assert run.rows and numbers <= set(range(12))


BAD_ROWS = {
    "a tuple": ((), r"train_dataset= takes a datasets.Dataset or a list of dicts, got \(\)"),
    "no dicts": (["a"], r"train_dataset= takes a datasets.Dataset or a list of dicts, got \['a'\]"),
    "too few": (ROWS[:3], r"train_dataset= has 3 items; an update takes 4 \(--rollout-buffer-size\)"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_one_line(case):
    rows, message = BAD_ROWS[case]
    with pytest.raises(UserError, match=f"^{message}$"):
        train("ippo", rows=rows)
    assert not Path("run").exists()


def test_rows_beside_a_dataset_or_a_game_are_refused():
    with pytest.raises(UserError, match="are both data; give one of them$"):
        train("ippo", rows=ROWS, dataset="rows.jsonl")
    with pytest.raises(UserError, match="are the data of a task, and this is a game$"):
        train("ppo", Env, ROWS, num_agents=1, num_turns=2)


@pytest.mark.parametrize("make", [lambda: Env, lambda: SimpleNamespace(Env=Env), lambda: lambda: Env()])
def test_an_environment_is_a_class_a_module_or_a_function(make):
    _, run = train("ppo", make(), num_agents=1, num_turns=2, train_size=8)
    assert run.rows[0]["reward_mean"] == 2.0


def test_a_run_is_made_in_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(train("ippo", rows=ROWS)))
    thread.start()
    thread.join()
    assert len(results[0][1].rows) == 3


def test_a_timeout_takes_the_main_thread():
    errors = []

    def work():
        try:
            train("ippo", rows=ROWS, reward_timeout=1.0)
        except UserError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == ["--reward-timeout takes the main thread: its alarm is a signal"]


def test_a_fork_that_is_given_rows_reads_them_from_the_first_on():
    args = {"num_train_epochs": 4, "train_size": len(ROWS)}
    train("ippo", pause_at=1, **args)
    args |= {"fork": "run", "pause_at": 2}
    _, same = train("ippo", output_dir="same", **args)
    _, other = train("ippo", rows=ROWS, output_dir="other", **args)
    assert (same.batches.first, other.batches.first) == (0, 1)
    assert other.fork["changed"].keys() >= {"task"} and "task" not in same.fork["changed"]


@every_script
def test_a_run_on_rows_goes_on_from_python(script):
    args = {"rows": ROWS, "num_train_epochs": 2}
    _, whole = train(script, output_dir="whole", **args)
    train(script, pause_at=1, **args)
    _, run = train(script, output_dir=None, resume="run", **args)
    assert len(run.rows) > 1 and all(compare(run.folder, whole.folder).values())
