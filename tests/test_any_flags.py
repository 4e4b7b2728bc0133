"""Any flags at all: a run trains, or says in one line what it does not take. Random values for every flag of Args."""

import dataclasses
import signal
import typing
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
import torch
import wandb
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
import utils.run.folder
from utils.cli import UserError, parse

SMALL = {  # one update of one optimiser step
    "train_size": 2,
    "rollout_buffer_size": 2,
    "num_train_epochs": 1,
    "output_dir": "run",
    "eval_size": 1,
    "mini_batch_size": 2,
    "max_new_tokens": 2,
    "num_turns": 1,
    "eval_interval": 0,
}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
SCRIPTS = {
    "ippo": (ippo_llm, SMALL | {"task": "number"}),
    "iac": (iac_llm, SMALL | {"task": "number"}),
    "maac": (maac_llm, SMALL | {"task": "number"}),
    "magrpo": (magrpo_llm, SMALL | {"task": "number", "num_generations": 2}),
    "ppo": (ppo_llm, SMALL | {"update_epochs": 1, "lora_rank": 2}),
}
ONE_OR_ALL = ["maac", "ppo", *(pytest.param(script, marks=pytest.mark.slow) for script in ("ippo", "iac", "magrpo"))]

# So many of these are made, computed or held at once, for as long or as much as the flag says: no number is too large,
# but large ones take hours, or all memory. They stay at a few.
SIZES = "train_size eval_size num_train_epochs num_agents num_generations num_turns max_new_tokens update_epochs "
SIZES += "value_head_hidden_dim critic_value_head_hidden_dim lora_rank rollout_buffer_size"

# No command line can carry a NUL or half a surrogate pair, and a message repeats a value, line ends included.
TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=8)
NAMES = "tldr number nosuch nosuch.py guess grid utils/tiny_lm tests . / latest q_proj a:b : utils.envs:nothing".split()
TEXTS = st.one_of(TEXT, st.sampled_from([*NAMES, "", "x" * 300]))
PLACES = st.text("abcxyzäß-_ .", min_size=1, max_size=8).map(lambda name: f"made/{name}")  # to write in
SETTINGS = "use_cache hidden_size rope_parameters revision dtype initializer_range".split()
INTEGERS = st.one_of(st.integers(-3, 40), st.sampled_from([-(2**63), 2**31, 2**32, 2**63, 10**20]))
FLOATS = st.one_of(st.floats(), st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e-300, 1e300, -1.0]))


def values(name, hint):
    """Values of a flag: those of its type, and some that it does not take."""
    kind = typing.get_origin(hint)
    members = typing.get_args(hint)
    if name == "output_dir":
        return PLACES | st.sampled_from(["pyproject.toml", "x" * 300])
    if name in SIZES.split():
        takes_none = type(None) in members and name != "train_size"  # none: thousands of episodes
        return st.integers(-2, 4) | (st.none() if takes_none else st.just(-(2**63)))
    if kind is typing.Literal:
        return st.sampled_from(members) | TEXTS
    if kind is typing.Annotated:
        return values(name, members[0])
    if kind is dict:
        return st.dictionaries(TEXT | st.sampled_from(SETTINGS), TEXT | st.integers(-2, 70), max_size=2)
    if kind is tuple:
        return st.lists(values(name, members[0]), max_size=3).map(tuple)
    if type(None) in members:
        return st.one_of(st.none(), *(values(name, member) for member in members if member is not type(None)))
    return {int: INTEGERS, float: FLOATS, bool: st.booleans(), str: TEXTS}[hint]


def hints(script):
    Args = SCRIPTS[script][0].Args
    of_all = typing.get_type_hints(Args, include_extras=True)
    return {field.name: of_all[field.name] for field in dataclasses.fields(Args)}


@st.composite
def flags(draw, script, most):
    """One to `most` flags with their values."""
    hint_of = hints(script)
    names = draw(st.lists(st.sampled_from(sorted(hint_of)), min_size=1, max_size=most, unique=True))
    return {name: draw(values(name, hint_of[name])) for name in names}


def unreachable(*_, **__):
    raise ConnectionError("no network")


@pytest.fixture(autouse=True)
def surroundings(in_tmp_path, monkeypatch):
    """No network, and nothing that takes minutes."""
    monkeypatch.setattr(utils.run.folder, "git_commit", lambda script: None)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **named: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    logger = SimpleNamespace(id="made-up", log=lambda *_, **__: None, finish=lambda exit_code: None)
    monkeypatch.setattr(wandb, "init", lambda **_: logger)
    monkeypatch.setattr(wandb, "Table", lambda **_: None)


def check_run(script, changed):
    """Train with these flags: an update or more, or one line."""
    module, small = SCRIPTS[script]
    handlers = [signal.getsignal(number) for number in SIGNALS]
    try:
        _, run = module.main(module.Args(**{**small, "overwrite": True, **changed}))
        assert run.step == run.num_updates >= 1
    except UserError as error:
        assert str(error).strip() and "\n" not in str(error)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert not torch.are_deterministic_algorithms_enabled()


def some(examples):
    """So many examples, the same ones every time."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("examples, most", [(5, 3), pytest.param(300, 6, marks=pytest.mark.slow)])
def test_any_flags_train_or_are_one_line(script, examples, most):
    @some(examples)
    @given(flags(script, most))
    def check(changed):
        check_run(script, changed)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("script, name", [(script, name) for script in SCRIPTS for name in hints(script)])
def test_any_value_of_a_flag_trains_or_is_one_line(script, name):
    @some(20)
    @given(values(name, hints(script)[name]))
    def check(value):
        check_run(script, {name: value})

    check()


# Values that ended in a traceback, or would where a check were left out.
EXTREMES = [
    {"seed": 10**20},
    {"temperature": 1e-30},
    {"temperature": 1e-300},
    {"output_dir": "x" * 300},
    {"resume": "x" * 300},
    {"load_checkpoint": "x" * 300},
    {"lora_config": "x" * 300, "lora_rank": 16},
    {"lora_config": "", "lora_rank": 16},
    {"model": ":"},
    {"model": "x" * 300},
    {"task": ""},
    {"task": "x" * 300 + ".py"},
    {"env": "x" * 300 + ".py", "task": None},
    {"dataset": "x" * 300},
    {"train_size": 4, "actor_learning_rate": 1e30},
    {"train_size": 4, "weight_decay": 1e30},
    {"lora_dropout": 1.0, "lora_rank": 2},
]


def extremes():
    """Each with the scripts that have its flags; those of iac_llm are ippo_llm's."""
    for script in SCRIPTS:
        marks = [pytest.mark.slow] * (script == "iac")
        for changed in EXTREMES:
            if changed.keys() <= hints(script).keys():
                label = ", ".join(f"{name}={str(value)[:12]}" for name, value in changed.items())
                yield pytest.param(script, changed, marks=marks, id=f"{script} {label}")


@pytest.mark.parametrize("script, changed", [*extremes()])
def test_extreme_values_train_or_are_one_line(script, changed):
    check_run(script, changed)


# --- The command line -------------------------------------------------------------------------------------------------

WORDS = st.one_of(
    TEXT.filter(lambda text: "tyro" not in text),  # whose own flags write files
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["", "-", "--", "=", "None", "True", "no", "1e400", "0x1", "[]", "{}", "x" * 300, "--help", "-h"]),
)


@st.composite
def command(draw, script):
    """Flags, most of which there are, each with some words."""
    own = [f"--{name.replace('_', '-')}" for name in hints(script)]
    there = st.sampled_from([*own, "--no-anneal-lr", "--no-track", "--resume"])
    words = []
    for flag in draw(st.lists(there | WORDS, max_size=3)):
        words += [flag, *draw(st.lists(WORDS, max_size=2))]
    return words


def check_command(script, argv):
    module = SCRIPTS[script][0]
    try:
        args = parse(module.Args, argv, module.__doc__, module.__name__)
        assert type(args) is module.Args
    except UserError as error:
        assert str(error).strip() and "\n" not in str(error) and error.exit_code == 2
    except SystemExit as stop:
        assert not stop.code and {"--help", "-h"} & {*argv}


@pytest.mark.parametrize("script", ONE_OR_ALL)
@pytest.mark.parametrize("examples", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_command_line_gives_flags_or_one_line(script, examples):
    @some(examples)
    @given(command(script))
    @example(["--resume", "x" * 300])
    @example(["--help"])
    def check(argv):
        check_command(script, argv)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_word_for_every_flag_gives_flags_or_one_line(script):
    words = [[], [""], ["-1"], ["nan"], ["٣"], ["x", "y"]]
    for k, name in enumerate(hints(script)):
        check_command(script, [f"--{name.replace('_', '-')}", *words[k % len(words)]])
