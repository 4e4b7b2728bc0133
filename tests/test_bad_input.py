"""What a user can get wrong ends with one line that names it, before anything is written."""

import io
import itertools
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from helpers import build_model
from pandas import DataFrame, Series
from transformers import AutoTokenizer

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils import tasks
from utils.cli import UserError, command_line, parse
from utils.models.loading import locate

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = (ippo_llm, iac_llm, maac_llm, magrpo_llm, ppo_llm)
SMALL = {"rollout_buffer_size": 4, "mini_batch_size": 4, "train_size": 8, "max_new_tokens": 3, "eval_size": 2}


@pytest.fixture(scope="module")
def small():
    tokenizer = AutoTokenizer.from_pretrained(locate("utils/tiny_lm"))
    return {"model": build_model(tokenizer), "tokenizer": tokenizer}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_of_a_size_refuses_a_text_and_a_negative_number(script):
    for flag in ("--rollout-buffer-size", "--max-new-tokens", "--mini-batch-size", "--seed"):
        for value in ("many", "-1"):
            with pytest.raises(UserError, match=flag):
                parse(script.Args, [flag, value])


WRONG = {
    "--gamma": ({"gamma": 1.5}, "--gamma: Input should be less than or equal to 1, got 1.5"),
    "--temperature": ({"temperature": 0.0}, "--temperature: Input should be greater than 0, got 0.0"),
    "inf": ({"entropy_coef": float("inf")}, "--entropy-coef"),
    "unknown": ({"no_such_flag": 1}, "no-such-flag"),
    "both names": ({"num_turns": 2, "max_turns": 3}, "max-turns"),
    "--top-p": ({"do_sample": False, "top_p": 0.5}, "--top-p has no effect without --do-sample"),
}


def test_raw_returns_are_not_divided_by_a_deviation_that_may_be_0():
    with pytest.raises(UserError, match="^--advantage-normalization has no effect with --advantage-mode raw$"):
        magrpo_llm.main(magrpo_llm.Args(advantage_mode="raw", advantage_normalization=True))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_refused(case):
    flags, message = WRONG[case]
    with pytest.raises(UserError, match=message):
        args = ippo_llm.Args(**flags)
        ippo_llm.main(args)


TOGETHER = {
    "critic": ({"critic_value_head_hidden_dim": 7}, "--critic-value-head-hidden-dim has no effect without --use-sep"),
    "head": ({"value_head_hidden_dim": 7, "use_separate_critic": True}, "--value-head-hidden-dim has no effect where"),
    "shortest": ({"min_output_tokens": 4}, "--min-output-tokens takes at most --max-new-tokens, 3, got 4"),
    "--overwrite": ({"overwrite": True, "output_dir": None}, "--overwrite has no effect without --output-dir"),
    "alpha": ({"lora_alpha": 3.0}, "--lora-alpha has no effect without --lora-rank"),
    "task and env": ({"task": "number", "env": "guess"}, "--env guess and --task number are two things to train on"),
    "no task": ({"task": "nothing"}, "--task takes arxiv, build"),
    "no file": ({"task": "nothing.py"}, "there is no file nothing.py"),
    "no env": ({"env": "nothing"}, "--env nothing: there is none"),
    "players": ({"env": "guess"}, "--num-agents 2: --env guess is a game of one player"),
    "shard": ({"shard": True}, "--shard takes several processes"),
    "generations": (
        {"num_generations": 3},
        "takes a multiple of generations x processes, 3, got 4",
    ),
    "one episode": (
        {"rollout_buffer_size": 1, "reward_normalization": False, "advantage_normalization": False},
        "--rollout-buffer-size 1: what an episode earns is compared with what others do",
    ),
    "vllm": ({"use_vllm": True}, "--use-vllm"),
    "adapters": ({"load_checkpoint": "x"}, "--load-checkpoint"),
    "room": ({"max_new_tokens": 600}, "--max-new-tokens 600 after a prompt of 1 exceeds"),
    "dataset": ({"dataset": "nothing.jsonl"}, "there is no file nothing.jsonl"),
    "dataset's folder": ({"dataset": "nothing/"}, "there is no folder nothing/"),
    "too few": ({"train_size": 2}, "--train-size"),
    "model": ({"model": ("nowhere/at/all",)}, "--model takes a model's folder or a hub name"),
    "models": ({"model": ("a", "b", "c")}, "--model takes one name, or one for each of the 2 agents, got 3"),
    "resume": ({"resume": "nowhere"}, "--resume takes a run's folder"),
    "fork": ({"fork": "nowhere"}, "--fork takes a run's folder"),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_flags_that_can_not_be_followed_are_refused_before_anything_is_written(tmp_path, case):
    flags, message = TOGETHER[case]
    args = ippo_llm.Args(**(SMALL | {"output_dir": str(tmp_path / "run")} | flags))
    with pytest.raises(UserError, match=message):
        ippo_llm.main(args)
    assert not (tmp_path / "run").exists()


def item_task(**functions):
    own = {"train_dataset": lambda size, seed: [{"prompt": f"post {k}"} for k in range(size)]}
    own |= {"formatters": lambda item: item["prompt"], "reward_func": lambda *texts, items: [1.0] * len(items)}
    return SimpleNamespace(**(own | functions))


QUIZ = re.search(r"```python\n(# quiz\.py: .*?)```", (ROOT / "docs/tasks.md").read_text(), flags=re.S)[1]


def fail(*_, **__):
    raise ValueError("what happened")


def fail_late(*_):
    yield 1.0
    raise ValueError("what happened")


TASKS = {
    "raises": ({"reward_func": fail}, "raised ValueError: what happened"),
    "too few": ({"reward_func": lambda *texts: [1.0]}, "returned 1 values for 4 items"),
    "lists": ({"reward_func": lambda *texts: [[1.0] * 4] * 3}, "returned 3 lists for 2 agents; it takes one for each"),
    "text": ({"reward_func": lambda *texts: ["a"] * 4}, "returned 'a' for item 0"),
    "nan": ({"reward_func": lambda *texts: [float("nan")] * 4}, "returned nan for item 0"),
    "none": ({"reward_func": lambda *texts: None}, "returned None"),
    "dict": (
        {"reward_func": lambda *texts: {k: 1.0 + k for k in range(4)}},
        "returned {0: 1.0, .*; it takes a list of 4",
    ),
    "set": ({"reward_func": lambda *texts: {1.0, 2.0, 3.0, 4.0}}, "returned {1.0, .*; it takes a list of 4 numbers"),
    "keys": ({"reward_func": lambda *texts: dict.fromkeys(range(4)).keys()}, "returned dict_keys.*takes a list of 4"),
    "table": ({"reward_func": lambda *texts: DataFrame([[1.0] * 4])}, "returned .*; it takes a list of 4 numbers"),
    "bytes": ({"reward_func": lambda *texts: b"1234"}, "returned b'1234'; it takes a list of 4 numbers"),
    "dicts": ({"reward_func": lambda *texts: [{k: 1.0 for k in range(4)}] * 2}, "returned 2 values for 4 items"),
    "items": (
        {"train_dataset": lambda size, seed: {k: {"prompt": "p"} for k in range(size)}},
        "it returned a dict, and",
    ),
    "too large": ({"reward_func": lambda *texts: [1.0, 2.0, -1e20, 3.0]}, r"returned -1e\+20 for item 2, {'prompt': "),
    "outlier": (
        {"reward_func": lambda *texts: [1.0, 2.0, -1e10, 3.0]},
        r"returned -1e\+10 for item 2, {'prompt': .*; beside it float32 does not tell 1 from 3, which others earn$",
    ),
    "times": (
        {"reward_func": lambda *texts: [1.7e9 + k for k in range(4)]},
        r"returned 1.7e\+09 for item 3, .*; beside it float32 does not tell 1700000000 from 1700000003, which",
    ),
    "one agent's": ({"reward_func": lambda *texts: [[1.0] * 4, [0.0, 1.0, 1e9, 0.5]]}, r"returned 1e\+09 for item 2, "),
    "processed": ({"reward_processor": lambda reward: 1e20}, r"reward_processor returned 1e\+20 for item 0, "),
    "formatter": ({"formatters": fail}, "formatter of agent 0 failed"),
    "no prompt": ({"formatters": lambda item: 5}, "formatter of agent 0"),
    "formatters": ({"formatters": [len]}, "has 1 formatters for 2 agents"),
    "no function": ({"reward_func": 5}, "reward_func is not a function but 5"),
    "transition": (
        {"external_transition": lambda item: ["a"]},
        "for item {'prompt': .*; it takes a list of 2 prom",
    ),
    "metrics": ({"metrics_callback": fail}, "^metrics_callback raised ValueError: what happened"),
    "no metrics": ({"metrics_callback": lambda rollouts: None}, "returned None; it takes a dict of numbers$"),
    "a metric": (
        {"metrics_callback": lambda rollouts: {"a": "b"}},
        "returned 'b' as a; it takes a number$",
    ),
    "generator": ({"reward_func": fail_late}, "^fail_late raised ValueError: what happened .* on item 0, {'prompt': "),
    "endless": ({"reward_func": lambda *texts: itertools.count()}, "returned 5 values for 4 items; it takes one for e"),
    "of one": ({"reward_func": lambda *texts: [[1.0] * 4, [1.0]]}, "returned 1 values of agent 1 for 4 items"),
    "a name of ours": ({"metrics_callback": lambda rollouts: {"kl": 1}}, "returned kl, which a run has of its own"),
    "data": ({"train_dataset": fail}, "train_dataset of .* failed: ValueError: what happened"),
    "slow": ({"reward_func": lambda *texts: __import__("time").sleep(9)}, "no answer within --reward-timeout"),
}


@pytest.mark.parametrize("case", TASKS)
def test_what_a_task_does_wrong_is_said_in_a_line(tmp_path, small, case):
    functions, message = TASKS[case]
    args = ippo_llm.Args(
        **SMALL, num_turns=2, output_dir=str(tmp_path / "run"), reward_timeout=0.3 if case == "slow" else None
    )
    with pytest.raises(UserError, match=message) as failure:
        ippo_llm.main(args, task=item_task(**functions), **small)
    assert "\n" not in str(failure.value)


def test_long_prompts_are_left_out_and_counted(tmp_path, small, capsys):
    items = [{"prompt": "word " * (3 if k % 2 else 60)} for k in range(16)]
    args = ippo_llm.Args(**SMALL, output_dir=str(tmp_path / "run"), max_prompt_length=20, num_train_epochs=1)
    task = item_task()
    _, run = ippo_llm.main(args, task=task, train_dataset=items, **small)
    assert "are left out: a prompt has more than 20 tokens" in capsys.readouterr().out
    assert run.num_updates == 1  # of the first 8 items 4 fit


def test_transformers_warns_of_no_long_prompt(tmp_path, small, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = AutoTokenizer.from_pretrained(locate("utils/tiny_lm"))  # it warns once in its life
    items = [{"prompt": "word " * (3 if k % 2 else 600)} for k in range(16)]
    args = ippo_llm.Args(**SMALL, output_dir=str(tmp_path / "run"), num_train_epochs=1)
    ippo_llm.main(args, task=item_task(), train_dataset=items, **small | {"tokenizer": tokenizer})
    assert not [text for text in caplog.messages if "sequence length" in text]
    tokenizer.deprecation_warnings.clear()
    tokenizer("word " * 600)
    assert [text for text in caplog.messages if "sequence length" in text]


def test_rows_without_a_column_are_refused(small):
    with pytest.raises(UserError, match="train_dataset= has the columns text"):
        ippo_llm.main(ippo_llm.Args(**SMALL, task="tldr"), train_dataset=[{"text": "a"}] * 8, **small)


class Game:
    """A game whose step does what a test says."""

    step = staticmethod(fail)

    def reset(self, seed=None):
        return "Begin.", {}


GAMES = {
    "raises": (fail, "the environment failed in all 4 episodes, at first with ValueError: what happened"),
    "too few": (lambda answer: ("over", 1.0), "step of Broken returned 2 values; it takes 5"),
    "no text": (lambda answer: (5, 1.0, True, False, {}), "an observation of type int; it takes text"),
    "no reward": (lambda answer: ("over", "a", True, False, {}), "returned the reward 'a'"),
    "no bool": (lambda answer: ("over", 1.0, "yes", False, {}), "returned terminated = 'yes'"),
}


@pytest.mark.parametrize("case", GAMES)
def test_what_a_game_does_wrong_is_said_in_a_line(tmp_path, small, case):
    step, message = GAMES[case]
    broken = type("Broken", (Game,), {"step": staticmethod(step)})
    args = ppo_llm.Args(**SMALL, output_dir=str(tmp_path / "run"), lora_rank=2)
    with pytest.raises(UserError, match=message):
        ppo_llm.main(args, task=broken, **small)


def test_a_game_that_leaves_no_room_for_an_answer_is_said_in_a_line(tmp_path, small):
    args = ppo_llm.Args(**SMALL, output_dir=str(tmp_path / "run"), lora_rank=2, max_model_len=8)
    with pytest.raises(UserError, match=r"^nobody acted in update 1: .*, or no room behind it for an answer"):
        ppo_llm.main(args, task=Game, **small)


class Players:
    """Two players, of whom the first moves; `returned` is what step returns in place of something right."""

    returned = {}

    def __init__(self, task, items, args):
        self.first = {b: "Begin." for b in range(len(items))}

    def reset(self):
        return self.returned.get("reset", [self.first, {}])

    def step(self, actions):
        observations, rewards, truncated = [{}, {}], [{b: 1.0 for b in actions[0]}, {}], set()
        return (
            self.returned.get("observations", observations),
            self.returned.get("rewards", rewards),
            self.returned.get("truncated", truncated),
        )


PLAYERS = {
    "one dict": ({"reset": [{}]}, "reset of .* returned observations .*; it takes a dict for each of 2 agents"),
    "no chat": ({"reset": [{0: 5}, {}]}, "agent 0 observes episode 0, of .* a prompt is a string, or a list of mess"),
    "an episode": ({"observations": [{4: "a"}, {}]}, "returned observations of 4; it takes one of 4 episodes, from 0"),
    "a reward of none": ({"rewards": [{"a": 1.0}, {}]}, "returned rewards of 'a'; it takes one of 4 episodes, from 0"),
    "a text": ({"rewards": [{0: "a"}, {}]}, "returned the reward 'a' of agent 0 in episode 0; it takes a number"),
    "flags": ({"truncated": [False] * 4}, r"truncated, .*, is \[False, .*; it takes a set of episodes"),
    "flags by name": ({"truncated": {0: False}}, r"truncated, .*, is {0: False}; it takes a set of episodes"),
    "flags of numpy": ({"truncated": numpy.zeros(4, bool)}, "truncated, .*, is .*; it takes a set of episodes"),
    "a flag": ({"truncated": False}, "truncated, .*, is False; it takes a set of episodes"),
    "nothing": ({"truncated": None}, "truncated, .*, is None; it takes a set of episodes"),
    "a tuple": ({"reset": ([{0: "a"}, {}], {})}, "it takes a dict for each of 2 agents$"),
    "three": ({"reset": [{0: "a"}, {}, {}]}, "it takes a dict for each of 2 agents: give --num-agents 3$"),
    "cut": ({"truncated": {9}}, "returned truncated of 9; it takes one of 4 episodes, from 0"),
}


@pytest.mark.parametrize("case", PLAYERS)
def test_what_an_environment_of_players_does_wrong_is_said_in_a_line(tmp_path, small, case):
    returned, message = PLAYERS[case]
    module = SimpleNamespace(TeamEnv=type("Broken", (Players,), {"returned": returned}))
    args = ippo_llm.Args(**SMALL, output_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=message):
        ippo_llm.main(args, task=module, **small)


def test_a_reward_processor_beside_an_environment_is_refused(tmp_path, small):
    module = SimpleNamespace(TeamEnv=Players, reward_processor=lambda reward: 100 * reward)
    args = ippo_llm.Args(**SMALL, output_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match="reward_processor has no effect without reward_func"):
        ippo_llm.main(args, task=module, **small)


def test_what_stands_beside_a_game_is_asked_for_metrics(tmp_path, small):
    Env = type("Env", (Game,), {"step": lambda self, answer: ("", 1.0, True, False, {})})
    module = SimpleNamespace(Env=Env, metrics_callback=lambda rollouts, items: {"items": len(items), "agents": 1})
    _, run = ppo_llm.main(ppo_llm.Args(**SMALL, output_dir=str(tmp_path / "run")), task=module, **small)
    assert [(row["items"], row["agents"]) for row in run.rows] == [(4, 1)] * 6


def test_an_environment_of_a_task_takes_rows_and_is_not_made_for_none(tmp_path, small):
    sizes = []

    class Reader(Players):
        def __init__(self, task, items, args):
            sizes.append(len(items))
            self.first = {b: items[0]["prompt"] + item["prompt"] for b, item in enumerate(items)}

    args = ippo_llm.Args(**SMALL | {"train_size": None}, output_dir=str(tmp_path / "run"), num_train_epochs=1)
    task = SimpleNamespace(TeamEnv=Reader)
    args.task = "mine.py"  # whose module this is
    _, run = ippo_llm.main(args, task=task, train_dataset=[{"prompt": f"Begin {k}."} for k in range(8)], **small)
    assert sizes == [4, 4] and run.rows[0]["eval/reward_mean"] is None


@pytest.mark.parametrize(
    "failed, message",
    [
        ([False] * 4, r"is \[False, False, False, False\]; it takes a set of episodes"),
        (numpy.zeros(4, bool), "it takes a set of episodes"),
        ({9}, "returned failed of 9; it takes one of 4"),
        (None, "failed"),
    ],
)
def test_what_failed_is_checked_too(tmp_path, small, failed, message):
    module = SimpleNamespace(TeamEnv=type("Broken", (Players,), {"failed": failed}))
    args = ippo_llm.Args(**SMALL, output_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=message):
        ippo_llm.main(args, task=module, **small)


def test_an_environment_that_goes_on_after_its_turns_is_said_once(tmp_path, small, capsys):
    class Endless(Players):
        def step(self, actions):
            _, rewards, _ = super().step(actions)
            return [{b: "On." for b in actions[0]}, {}], rewards, set()

    args = ippo_llm.Args(**SMALL, output_dir=str(tmp_path / "run"), num_train_epochs=1, max_model_len=99)
    ippo_llm.main(args, task=SimpleNamespace(TeamEnv=Endless), **small)
    assert capsys.readouterr().out.count("goes on after --num-turns: an environment ends its episodes by itself") == 1


def test_a_game_may_be_over_and_cut_at_once(tmp_path, small):
    class Both(Game):
        def step(self, answer):
            return "over", 1.0, True, True, {}

    args = ppo_llm.Args(**SMALL, output_dir=str(tmp_path / "run"), lora_rank=2, num_train_epochs=1)
    _, run = ppo_llm.main(args, task=Both, **small)
    assert [row["turns"] for row in run.rows] == [1, 1] and run.rows[0]["reward_mean"] == 1


def test_the_length_of_prompts_is_no_matter_of_games(tmp_path, small):
    for name, value, words in (("max_prompt_length", 9, ""), ("long_prompts", "truncate", " truncate")):
        args = ppo_llm.Args(**SMALL, output_dir=str(tmp_path / "run"), lora_rank=2, **{name: value})
        with pytest.raises(UserError, match=f"^--{name.replace('_', '-')}{words} has no effect in a game"):
            ppo_llm.main(args, task=Game, **small)


def test_rows_of_which_some_have_no_prompt_are_refused(small):
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"text": "c"}, {"prompt": "d"}]
    with pytest.raises(UserError, match="KeyError: 'prompt'"):
        ippo_llm.main(ippo_llm.Args(**SMALL), train_dataset=rows, **small)


def test_a_seat_that_never_acts_does_not_stop_the_others(tmp_path, small):
    args = ippo_llm.Args(**SMALL, output_dir=str(tmp_path / "run"), num_train_epochs=1)
    _, run = ippo_llm.main(args, task=SimpleNamespace(TeamEnv=Players), **small)
    assert [row["reward_mean"] for row in run.rows] == [0.5, 0.5]


@pytest.mark.parametrize(
    "rewards, mean",
    [
        ({0: 7.0, 1: 8.0, 2: 9.0, 3: 10.0}.values(), 8.5),
        (Series([7.0, 8.0, 9.0, 10.0], index=[3, 2, 1, 0]), 8.5),
        (torch.tensor([1.0, 2.0, 3.0, 4.0]), 2.5),
        ((k for k in range(4)), 1.5),
        ([0.0, 0.0, 0.0, 1e10], 2.5e9),
        ([1e11, 2e11, 3e11, 0.0], 1.5e11),
        ([1e-9, 2e-9, 3e-9, 4.0], 1.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rewards_in_order_and_of_one_size_are_taken(tmp_path, small, rewards, mean):
    task = item_task(reward_func=lambda *texts: rewards)
    args = ippo_llm.Args(**SMALL | {"train_size": 4}, output_dir=str(tmp_path / "run"), num_train_epochs=1)
    _, run = ippo_llm.main(args, task=task, **small)
    assert run.rows[0]["reward_mean"] == pytest.approx(mean)
    losses = [value for name, value in run.rows[0].items() if name.endswith("policy_loss")]
    assert all(abs(loss) < 1e6 for loss in losses)


@pytest.mark.parametrize("reward, match", [(1e20, r"reward 1e\+20"), (1e9, r"step returned 1e\+09 for item 2, {'s")])
def test_what_an_environment_pays_is_of_a_size(tmp_path, small, reward, match):
    earned = itertools.cycle([1.0, 2.0, reward, 3.0])

    class Game:
        def reset(self, seed):
            return "Say.", {}

        def step(self, answer):
            return "", next(earned), True, False, {}

    args = ppo_llm.Args(rollout_buffer_size=4, mini_batch_size=4, train_size=4, output_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=match):
        ppo_llm.main(args, task=Game, **small)


def test_data_that_can_not_be_read_are_one_line(tmp_path, small):
    (tmp_path / "quiz.py").write_text(QUIZ)
    rows = {"ok": '{"question": "1", "answer": "1"}\n' * 12, "empty": "", "column": '{"question": "1"}\n' * 12}
    rows |= {"damaged": '{"question": "a"}\n{]', "few": '{"question": "1", "answer": "1"}\n' * 3}
    messages = {
        "empty": "empty.jsonl can't be loaded: it has no rows",
        "column": "has a row without answer, which --task",
    }
    messages |= {"damaged": "damaged.jsonl can't be loaded: ArrowInvalid", "few": "has 3 items; an update takes 4"}
    for name, text in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
        flags = {"task": str(tmp_path / "quiz.py"), "dataset": str(tmp_path / f"{name}.jsonl")}
        args = ippo_llm.Args(**SMALL, **flags, output_dir=str(tmp_path / "run"), num_train_epochs=1)
        if name == "ok":
            assert len(ippo_llm.main(args, **small)[1].rows) == 2
            continue
        with pytest.raises(UserError, match=messages[name]):
            args.output_dir = str(tmp_path / name)
            ippo_llm.main(args, **small)
        assert not (tmp_path / name).exists()


def test_a_misspelt_flag_is_one_line():
    with pytest.raises(UserError, match="--gama") as error:
        parse(ippo_llm.Args, ["--gama", "1"])
    assert "\n" not in str(error.value) and error.value.exit_code == 2


def test_a_command_ends_with_one_line_and_exit_code_2_in_a_terminal_without_utf_8(monkeypatch):
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="ascii") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "argv", ["ippo_llm.py", "--seed", "x"])
    with pytest.raises(SystemExit) as stop:
        command_line(ippo_llm.main, ippo_llm.Args, ippo_llm.__doc__)
    written = []
    for stream in streams.values():
        stream.flush()
        written.append(stream.buffer.getvalue())
    text = b"ippo_llm.py: error: Error parsing --seed: invalid literal for int() with base 10: 'x'\n"
    assert stop.value.code == 2 and written == [b"", text]


def test_flags_of_turns_are_refused_where_tokens_are_actions():
    for flags in ({"turn_level_clip": True}, {"turn_value_reduction": "mean"}):
        with pytest.raises(UserError, match="has no effect with --action-granularity token$"):
            ppo_llm.main(ppo_llm.Args(**flags))
        with pytest.raises(UserError, match="has no effect with --action-granularity auto --num-turns 1$"):
            ppo_llm.main(ppo_llm.Args(action_granularity="auto", num_turns=1, **flags))


def test_an_environment_in_which_nobody_observes_anything_is_refused(tmp_path, small):
    class TeamEnv:
        def __init__(self, task, items, args):
            self.num_agents = args.num_agents

        def reset(self):
            return [{} for _ in range(self.num_agents)]

        def step(self, actions):
            return self.reset(), self.reset(), set()

    task = SimpleNamespace(TeamEnv=TeamEnv)
    with pytest.raises(UserError, match="returned no observation: nobody would act$"):
        ippo_llm.main(ippo_llm.Args(**SMALL, output_dir=str(tmp_path / "run")), task=task, **small)


def test_it_is_said_that_a_task_has_one_turn(tmp_path, small, capsys):
    args = ippo_llm.Args(**SMALL, num_turns=3, num_train_epochs=1, output_dir=str(tmp_path / "run"))
    ippo_llm.main(args, task=item_task(), **small)
    assert "has no external_transition: its episodes have one turn" in capsys.readouterr().out


def test_a_function_of_a_task_that_is_misspelt_is_said(tmp_path, capsys):
    for name, said in (("formatter", "has no formatters, but formatter, which nothing calls"), ("formatters", "")):
        task = tmp_path / f"{name}s.py"
        task.write_text(f"def {name}(item): return 'Say.'\ndef reward_func(*texts): return [1.0] * len(texts[0])\n")
        tasks.load_task(None, ippo_llm.Args(task=str(task)), ippo_llm)
        shown = capsys.readouterr().out
        assert said in shown and ("nothing calls" in shown) == bool(said)
    (tmp_path / "quiz.py").write_text(QUIZ)
    tasks.load_task(None, ippo_llm.Args(task=str(tmp_path / "quiz.py")), ippo_llm)
    assert "nothing calls" not in capsys.readouterr().out


def test_a_run_in_the_place_of_its_agent_is_named(tmp_path):
    run = tmp_path / "run"
    (run / "agent_0").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"^--model {run} is a run; its agents are {run}/agent_0 ...$"):
        ippo_llm.main(ippo_llm.Args(model=(str(run),)))


def test_a_name_in_the_place_of_a_tokenizer_is_one_line(small):
    with pytest.raises(UserError, match="tokenizer= takes a tokenizer of transformers, got 'utils/tiny_lm'$"):
        ippo_llm.main(ippo_llm.Args(**SMALL), model=small["model"], tokenizer="utils/tiny_lm")


def test_an_argument_that_no_reward_func_is_given_is_one_line_at_the_start(tmp_path):
    task = SimpleNamespace(formatters=lambda item: "Say.", reward_func=lambda *texts, item: [1.0])
    with pytest.raises(UserError, match="reward_func asks for item, which nothing gives; it may name items, prompts"):
        tasks.load_task(task, ippo_llm.Args(), ippo_llm)
    task.reward_func = lambda *texts, items, weight=2.0: [weight]
    tasks.load_task(task, ippo_llm.Args(), ippo_llm)
    task.reward_func = lambda first, second, /, items: [1.0]
    tasks.load_task(task, ippo_llm.Args(), ippo_llm)
    task.reward_func = lambda prompts, first, second: [1.0]
    with pytest.raises(UserError, match="has prompts among its first arguments, where the completions of 2 agents"):
        tasks.load_task(task, ippo_llm.Args(), ippo_llm)


def test_a_model_without_a_tokenizer_is_one_line(tmp_path):
    build_model(AutoTokenizer.from_pretrained(locate("utils/tiny_lm"))).save_pretrained(tmp_path / "model")
    message = f"^--model {tmp_path}/model has no tokenizer that can be read: save one there"
    with pytest.raises(UserError, match=message):
        ippo_llm.main(ippo_llm.Args(**SMALL | {"model": str(tmp_path / "model")}, output_dir=str(tmp_path / "run")))
