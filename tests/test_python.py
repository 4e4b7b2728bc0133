"""The scripts from Python: the page's examples, rows and environments as objects, threads, runs that go on."""

import functools
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from helpers import make_args, state_of
from processes import ROOT
from short_runs import (
    FLAGS,
    FOUR_ITEMS,
    IN_ENV,
    SCRIPTS,
    Env,
    Faulty,
    assert_same_run,
    every_script,
    make_task,
    return_none,
    reward_length,
    small_model,
)
from transformers import AutoModelForCausalLM

import ippo_llm
import maac_llm
import ppo_llm
from utils.cli import TaskError, UserError
from utils.models.prompts import render
from utils.tasks import load_items, number

pytestmark = pytest.mark.usefixtures("in_tmp_path")

PAGE = (ROOT / "docs/python.md").read_text()
TEAM, LEARNER, LEARNERS, PLAYER, TRANSCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
ROWS = [{"share": k / 12, "k": k} for k in range(12)]


def train(script, reward_func=reward_length, objects=None, **flags):
    """Agents and Run of a short run with objects for main: a task, if there is no other, rows, an environment."""
    objects = {"task": make_task(reward_func)} | (objects or {})
    if "resume" not in flags:
        flags["output_dir"] = "run"
    model, tokenizer = small_model()
    args = SCRIPTS[script].Args(**(FLAGS[script] | FOUR_ITEMS.get(script, {}) | {"train_size": None} | flags))
    return SCRIPTS[script].main(args, model=model, tokenizer=tokenizer, **objects)


# --- The page's examples ----------------------------------------------------------------------------------------------


@pytest.fixture
def names():
    """What an example leaves; it runs where the scripts' folder lies beside it."""
    Path("utils").symlink_to(ROOT / "utils")
    return {}


@pytest.mark.parametrize("block", [TEAM, PLAYER])
def test_an_example_shows_all_in_about_a_dozen_lines(block):
    assert len([line for line in block.splitlines() if line.strip()]) <= 18
    comments = " ".join(re.findall(r"# (.*)", block))
    for step in ("construct", "act", "train", "evaluate", "save", "load"):
        assert step in comments


def test_the_example_of_a_team_runs_as_printed(names):
    exec(TEAM, names)
    assert len(names["run"].rows) == 2
    for i, agent in enumerate(names["agents"]):
        learned = AutoModelForCausalLM.from_pretrained(names["run"].folder / f"agent_{i}").state_dict()
        assert all(torch.equal(x, learned[name]) for name, x in agent.actor.state_dict().items())


@pytest.mark.parametrize("script", ["iac_llm", "magrpo_llm"])
def test_the_example_of_a_team_runs_in_other_scripts(script, names):
    exec(TEAM.replace("ippo_llm", script), names)
    assert len(names["run"].rows) == 2 and len(names["agents"]) == 2


def test_the_example_of_a_team_runs_where_the_last_is_the_critic(names):
    (line,) = re.findall(r"`(\(\*agents, critic\), run = maac_llm.main\(args)\)`", PAGE)
    code = TEAM.replace("ippo_llm", "maac_llm")
    assert code.count("agents, run = maac_llm.main(args") == 1
    exec(code.replace("agents, run = maac_llm.main(args", line), names)
    assert len(names["run"].rows) == 2 and len(names["agents"]) == 3
    assert hasattr(names["agents"][-1], "critic") and hasattr(names["critic"], "critic")


def test_the_example_of_an_environment_runs_as_printed(names):
    exec(PLAYER, names)
    assert len(names["run"].rows) == 2
    tokenizer = names["agents"][0].tokenizer
    prompt = tokenizer(render(names["chat"], tokenizer), add_special_tokens=False, return_tensors="pt")
    limits = {"max_new_tokens": names["run"].args.max_output_tokens, "do_sample": False}
    ids = names["model"].generate(**prompt, **limits)[0, prompt.input_ids.shape[1] :]
    answer = tokenizer.decode(ids, skip_special_tokens=True)
    assert ppo_llm.act(names["agents"][0], [names["chat"]], names["run"].args, greedy=True) == [answer]


@pytest.mark.parametrize("block", [LEARNER, TRANSCRIPTS])
def test_the_examples_of_learn_run_as_printed(block, names, capsys):
    exec(block, names)
    agent = names["agent"]
    assert capsys.readouterr().out.count("\n") == (5 if block is LEARNER else 1)
    assert agent.schedules[0].last_epoch == (5 if block is LEARNER else 1)  # a step for each call of learn
    assert agent.optimizers[0].state


@pytest.mark.parametrize("script", ["iac_llm", "magrpo_llm"])
def test_the_example_of_learn_runs_in_other_scripts(script, names):
    exec(LEARNER.replace("ippo_llm", script), names)
    agent = names["agent"]
    assert agent.schedules[0].last_epoch == 5
    weights = agent.reference.state_dict()
    assert not all(torch.equal(x, weights[name]) for name, x in agent.actor.state_dict().items())


def test_the_example_of_a_team_with_one_critic_runs_as_printed(names):
    before = [state_of(agent) for agent in maac_llm.build_agents(maac_llm.Args(num_agents=2), "cpu", updates=1)]
    exec(LEARNERS, names)
    for agent, weights in zip([*names["agents"], names["critic"]], before, strict=True):
        assert not all(torch.equal(x, y) for x, y in zip(weights, state_of(agent), strict=True))


def test_the_transcripts_of_the_example_are_what_is_learned_from(names):
    exec(TRANSCRIPTS, names)
    rollout = names["rollout"]
    assert rollout.rewards.tolist() == [[0.0, 1.0], [0.0, 0.0]] and rollout.played.all()
    for row, (first, second) in enumerate((("8", "12"), ("4", "2"))):
        for turn, text in enumerate((first, second)):
            ids = rollout.response_ids[row][rollout.turn_of_token[row] == turn]
            assert names["agent"].tokenizer.decode(ids) == text


def test_agents_act_on_chats_and_on_texts(model, tokenizer):
    args = make_args(do_sample=False)
    agent = ippo_llm.Agent(0, model, tokenizer, 10, args)
    chat = [{"role": "user", "content": "Guess it."}]
    text = render(chat, tokenizer)
    expected = ippo_llm.sample(agent, [text], args, None).responses[0]
    assert ippo_llm.act(agent, [chat, text], args) == expected * 2


# --- Objects in place of what flags name ------------------------------------------------------------------------------


@every_script
@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list])
def test_rows_are_the_items(script, make):
    _, run = train(script, objects={"train_dataset": make(ROWS), "eval_dataset": make(ROWS[:2])})
    numbers = [sample["item"]["k"] for sample in run.samples]
    assert len(run.rows) == 3 and len(numbers) == 6 and set(numbers) < set(range(12))
    assert len(set(numbers)) == (3 if script == "magrpo" else 6)  # which writes two answers to an item


def test_sizes_cut_rows_and_a_task_makes_the_rest():
    args = make_args(train_size=5, eval_size=2)
    assert load_items(number, args, 1, 1, ROWS, ROWS) == [ROWS[:5], ROWS[:2]]
    train_items, held_out = load_items(number, args, 1, 1, ROWS)
    assert train_items == ROWS[:5] and list(held_out) == list(number.eval_dataset(2, 1))


BAD_ROWS = {
    "a tuple": ({"train_dataset": ()}, r"train_dataset= takes a datasets.Dataset or a list of dicts, got \(\)"),
    "no dicts": ({"eval_dataset": ["a"]}, r"eval_dataset= takes a datasets.Dataset or a list of dicts, got \['a'\]"),
    "too few": (
        {"train_dataset": ROWS[:3]},
        r"train_dataset= has 3 items; an update takes 4 \(--rollout-buffer-size\)",
    ),
    "columns": (
        {
            "train_dataset": [*ROWS, {"k": 0}],
            "task": SimpleNamespace(**vars(make_task(reward_length)), columns=["share"]),
        },
        "train_dataset= has the columns k; (the task|--task) .* reads share",
    ),
}


@every_script
@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_do_not_serve_are_one_line(script, case):
    objects, message = BAD_ROWS[case]
    with pytest.raises(UserError, match=f"^{message}$"):
        train(script, objects=objects)
    assert not Path("run").exists()


def test_data_from_two_places_is_one_line():
    message = "^--dataset x.jsonl and train_dataset= or eval_dataset= are both data; give one of them$"
    with pytest.raises(UserError, match=message):
        train("ippo", objects={"train_dataset": ROWS}, dataset="x.jsonl")


@pytest.mark.parametrize("env", [Env, lambda: Env(), SimpleNamespace(Env=Env)], ids=["class", "function", "module"])
def test_an_environment_is_an_object(env):
    _, run = train("ppo", objects={"task": None, "env": env}, **(IN_ENV | {"env": None, "train_size": 12}))
    assert [row["reward_mean"] for row in run.rows] == [2.0] * 3


def test_an_environment_beside_data_or_a_task_is_one_line():
    flags = IN_ENV | {"env": None, "train_size": 12}
    with pytest.raises(
        UserError, match="^train_dataset= and eval_dataset= are the data of a task; give task= or --task$"
    ):
        train("ppo", objects={"task": None, "env": Env, "train_dataset": ROWS}, **flags)
    with pytest.raises(UserError, match="^--env Env and --task task are two things to train on; give one$"):
        train("ppo", objects={"env": Env}, **flags)
    with pytest.raises(
        UserError, match=r"^the environment dict: dict\(\) gives an object of type dict, without a reset"
    ):
        train("ppo", objects={"task": None, "env": dict}, **flags)


# --- In a notebook ----------------------------------------------------------------------------------------------------


@every_script
def test_flags_may_be_left_out(script, monkeypatch):
    module = SCRIPTS[script]
    flags = FLAGS[script] | {"output_dir": "run", "task": "number"}
    monkeypatch.setattr(module, "Args", functools.partial(module.Args, **flags))
    model, tokenizer = small_model()
    _, run = module.main(model=model, tokenizer=tokenizer)
    assert len(run.rows) == 3


def in_thread(function, *values, **named):
    """What a function returns or raises in a thread of its own."""
    outcome = []

    def call():
        try:
            outcome.append(function(*values, **named))
        except UserError as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return outcome[0]


@every_script
def test_a_run_in_another_thread_is_the_same(script):
    _, run = in_thread(train, script, objects={"train_dataset": ROWS})
    run.folder.rename("other")
    train(script, objects={"train_dataset": ROWS})
    assert_same_run("run", "other")


@pytest.mark.parametrize("script, flags", [("ippo", {}), ("ppo", IN_ENV | {"env": None, "train_size": 12})])
def test_a_time_limit_in_another_thread_is_one_line(script, flags):
    objects = {"task": None, "env": Env} if flags else {"train_dataset": ROWS}
    error = in_thread(train, script, objects=objects, reward_timeout=1.0, **flags)
    assert str(error) == "--reward-timeout takes the main thread: its alarm is a signal"


@every_script
def test_a_run_on_rows_goes_on_from_python(script):
    with pytest.raises(TaskError):
        train(script, Faulty(return_none, 2), {"train_dataset": ROWS})
    train(script, objects={"train_dataset": ROWS}, resume="run")
    Path("run").rename("resumed")
    train(script, objects={"train_dataset": ROWS})
    assert_same_run("resumed", "run")
