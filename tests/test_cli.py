"""Flags: what they take, from the command line and from Python; what is refused is one line that names the flag."""

import copy
import dataclasses
import importlib.util
import math
import pickle
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from utils.cli import FOREIGN, UserError, check_needs, command_line, describe, flags, parse


@flags
class RunArgs:
    """The run: what is trained."""

    seed: NonNegativeInt = 1  # seed of everything random
    model: tuple[str, ...] = ("tiny",)  # names, one or one each
    layer_sizes: tuple[int, ...] = (4, 2)  # one for each layer
    train_size: PositiveInt | None = None  # items; none: all
    track: bool = False  # log elsewhere too


@flags
class LossArgs:
    """The loss."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0  # discount factor
    learning_rate: PositiveFloat = 1e-3  # of the optimiser
    threshold: float | None = None  # any number
    data_type: Literal["float32", "bfloat16"] = "float32"  # of the weights
    mode: Literal["fast", "slow"] | None = None  # none: by itself


@flags
class Args(RunArgs, LossArgs):
    """All flags."""

    @property
    def half_gamma(self):
        return self.gamma / 2


REFUSED = [  # field, value, what it takes
    ("seed", -1, "Input should be greater than or equal to 0"),
    ("seed", 2**31, "Input should be at most 2147483647"),
    ("train_size", 0, "Input should be greater than 0"),
    ("gamma", 1.5, "Input should be less than or equal to 1"),
    ("gamma", math.nan, "Input should be a finite number"),
    ("learning_rate", math.inf, "Input should be a finite number"),
    ("learning_rate", 0.0, "Input should be greater than 0"),
    ("learning_rate", 1e31, "Input should be 0 or of a size from 1e-30 to 1e30"),
    ("threshold", -1e300, "Input should be 0 or of a size from 1e-30 to 1e30"),
    ("threshold", math.nan, "Input should be a finite number"),
]
REFUSED_IN_PYTHON = [  # which can't be said on the command line, or is refused there in tyro's words
    ("seed", "one", "Input should be a valid integer"),
    ("seed", "1", "Input should be a valid integer"),
    ("seed", True, "Input should be a valid integer"),
    ("seed", 1.0, "Input should be a valid integer"),
    ("seed", None, "Input should be a valid integer"),
    ("track", 1, "Input should be a valid boolean"),
    ("gamma", "0.5", "Input should be a valid number"),
    ("model", (1,), "Input should be a valid string"),
    ("layer_sizes", (1, "a"), "Input should be a valid integer"),
    ("data_type", "sdpaa", "Input should be 'float32' or 'bfloat16'"),
    ("mode", "sdpaa", "Input should be 'fast' or 'slow'"),
    ("no_such", 1, "Unexpected keyword argument"),
]


def refusal(field, value, takes):
    """The line that a value is refused with."""
    value = value[-1] if isinstance(value, tuple) else value
    return f"--{field.replace('_', '-')}: {takes}, got {value}"


@pytest.mark.parametrize("field, value, takes", [*REFUSED, *REFUSED_IN_PYTHON])
def test_a_value_from_python_is_refused_in_one_line(field, value, takes):
    with pytest.raises(UserError) as error:
        Args(**{field: value})
    assert str(error.value) == refusal(field, value, takes)


@pytest.mark.parametrize("field, value, takes", REFUSED)
def test_a_value_on_the_command_line_is_refused_in_the_same_line(field, value, takes):
    with pytest.raises(UserError) as error:
        parse(Args, [f"--{field.replace('_', '-')}", str(value)])
    assert str(error.value) == refusal(field, value, takes)


@pytest.mark.parametrize(
    "argv",
    ["--seed one", "--seed", "--data-type sdpaa", "--mode sdpaa", "--no-such 1", "--gamma one", "--train-size 1e400"],
)
def test_what_is_no_value_at_all_is_one_line_that_names_the_flag(argv):
    with pytest.raises(UserError) as error:
        parse(Args, argv.split())
    assert argv.split()[0] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--train-sizes 64", "Unrecognized options: --train-sizes; did you mean --train-size?"),
        ("--no-such 1", "Unrecognized options: --no-such"),
        ("word", "Unrecognized options: word"),
        ("--train-size x", "Error parsing --train-size: no type matching {None}|INT could be instantiated from ['x']"),
    ],
)
def test_a_wrong_flag_is_named_and_so_is_one_like_it(argv, message):
    with pytest.raises(UserError) as error:
        parse(Args, argv.split())
    assert str(error.value) == message


def raised(work):
    try:
        work()
    except Exception as error:
        return error


def test_an_error_says_where_in_the_users_own_code_it_arose(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import json\n\n\ndef reward(text):\n    return len(json.loads(text))\n")
    spec = importlib.util.spec_from_file_location("mine", path)
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    text = "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (mine.py:5)"
    assert describe(raised(lambda: mine.reward("x"))) == text
    assert describe(raised(lambda: mine.reward("1"))).endswith("has no len() (mine.py:5)")
    assert describe(ValueError("a\nb")) == "ValueError: a b"
    utils = str(Path(sys.modules[describe.__module__].__file__).parent)
    assert f"{utils}/run.py".startswith(FOREIGN) and not f"{utils}_of_mine/reward.py".startswith(FOREIGN)


def test_a_long_value_is_cut_in_the_line():
    with pytest.raises(UserError) as error:
        Args(seed="x" * 1000)
    assert len(str(error.value)) < 200


def test_values_are_taken_as_they_are():
    values = {"seed": 3, "model": ("a", "b"), "train_size": None, "gamma": 0.5, "threshold": -2.0, "mode": "slow"}
    args = Args(**values)
    assert {name: getattr(args, name) for name in values} == values
    argv = "--seed 3 --model a b --train-size None --gamma 0.5 --threshold -2 --mode slow".split()
    assert parse(Args, argv) == args


def test_an_int_stands_for_a_float_and_a_list_or_a_string_for_a_tuple():
    args = Args(gamma=1, model="name", layer_sizes=[3, 4])
    assert isinstance(args.gamma, float) and args.model == ("name",) and args.layer_sizes == (3, 4)


def test_a_copy_with_another_value_is_checked_too():
    args = Args(gamma=0.5)
    assert dataclasses.replace(args, seed=7) == Args(gamma=0.5, seed=7)
    with pytest.raises(UserError, match="^--seed: "):
        dataclasses.replace(args, seed=-7)


def test_flags_are_an_ordinary_dataclass():
    args = Args(seed=5)
    assert dataclasses.asdict(args)["seed"] == 5 and len(dataclasses.asdict(args)) == 10
    assert copy.deepcopy(args) == args == pickle.loads(pickle.dumps(args))
    assert args.half_gamma == 0.5


def test_help_has_a_group_for_each_class_and_the_comment_behind_each_field(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(Args, ["--help"], "What it is for.")
    shown = capsys.readouterr().out
    assert not stop.value.code
    for text in ("What it is for.", "run options", "The run: what is trained.", "loss options", "The loss."):
        assert text in shown
    for comment in ("seed of everything random", "items; none: all", "discount factor", "none: by itself"):
        assert comment in shown


# --- A flag that another one makes void -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, refused",
    [
        ({"gamma": 0.5}, True),
        ({"gamma": 0.5, "train_size": 3}, False),
        ({"gamma": 1.0}, False),  # its default
        ({}, False),
    ],
)
def test_a_flag_without_the_one_that_it_needs_is_refused(values, refused):
    args = Args(**values)
    if not refused:
        check_needs(args, {"gamma": "train_size"})
        return
    with pytest.raises(UserError) as error:
        check_needs(args, {"gamma": "train_size"})
    assert str(error.value) == "--gamma has no effect without --train-size"


@pytest.mark.parametrize("off", [{"track": False}, {"model": ()}, {"threshold": None}, {"seed": 0}])
def test_off_is_none_false_0_or_nothing(off):
    (other,) = off
    with pytest.raises(UserError, match=f"^--gamma has no effect without --{other}$"):
        check_needs(Args(gamma=0.5, **off), {"gamma": other})


# --- The command ------------------------------------------------------------------------------------------------------


def fails(args):
    raise UserError("what\nhappened")


@pytest.mark.parametrize(
    "main, argv, line", [(print, ["--seed", "-1"], "--seed: Input should be "), (fails, [], "what happened")]
)
def test_an_error_is_one_line_and_exit_code_2(monkeypatch, capsys, main, argv, line):
    monkeypatch.setattr(sys, "argv", ["folder/script.py", *argv])
    with pytest.raises(SystemExit) as stop:
        command_line(main, Args, "What it is for.")
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith(f"script.py: error: {line}") and len(error.splitlines()) == 1
