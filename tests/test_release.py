"""A run gives back what it takes, however it ends: torch's algorithms, signals, its folder."""

import signal
from pathlib import Path

import pytest
import torch
from short_runs import (
    LOSSES,
    SCRIPTS,
    Faulty,
    assert_one_line,
    every_script,
    newest_checkpoint,
    return_none,
    train,
)

from utils.cli import TaskError, UserError
from utils.files import lock

pytestmark = pytest.mark.usefixtures("in_tmp_path")

# --- Deterministic algorithms -----------------------------------------------------------------------------------------


@every_script
def test_deterministic_algorithms_are_for_the_run_alone(script):
    seen = []

    def watch(items):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return [0.5] * len(items)

    train(script, Faulty(watch, 1), train_size=4, deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(TaskError):
        train(script, Faulty(return_none, 1), deterministic=True, overwrite=True)
    assert not torch.are_deterministic_algorithms_enabled()
    train(script, Faulty(watch, 1), train_size=4, overwrite=True)
    assert seen == [True, False]


@every_script
def test_an_operation_that_is_not_deterministic_is_named(monkeypatch, script):
    """torch has no deterministic put_."""
    function = getattr(SCRIPTS[script], LOSSES[script])

    def loss(*values):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        return function(*values)

    monkeypatch.setattr(SCRIPTS[script], LOSSES[script], loss)
    message = "^--deterministic: put_.* does not have a deterministic implementation"
    with pytest.raises(UserError, match=message) as error:
        train(script, deterministic=True)
    assert_one_line(error, 2)


# --- Signals and the folder -------------------------------------------------------------------------------------------


@every_script
@pytest.mark.parametrize("calls_that_fail", [[], range(2, 99)], ids=["done", "failed"])
def test_signals_and_the_folder_are_given_back(script, calls_that_fail):
    def handler(*_):
        pass

    numbers = (signal.SIGTERM, signal.SIGINT)
    seen = []

    def reward_func(*completions, items):
        seen.append([signal.getsignal(number) is handler for number in numbers])
        if len(seen) in calls_that_fail:
            raise ConnectionError
        with pytest.raises(UserError, match="another run is under way in run"):
            lock(Path("run"))
        return [0.5] * len(items)

    before = [signal.signal(number, handler) for number in numbers]
    try:
        if calls_that_fail:
            with pytest.raises(TaskError):
                train(script, reward_func, train_size=8)
        else:
            train(script, reward_func, train_size=8)
        assert [signal.getsignal(number) for number in numbers] == [handler, handler]
    finally:
        for number, previous in zip(numbers, before):
            signal.signal(number, previous)
    assert seen[0] == [False, False]
    lock(Path("run")).close()


@every_script
def test_a_run_that_does_not_start_gives_back_the_folder(script):
    with pytest.raises(TaskError):
        train(script, Faulty(return_none, 2))
    (newest_checkpoint("run") / "state.json").write_text("{}")
    with pytest.raises(UserError, match="no checkpoint in run/checkpoints is whole") as error:
        train(script, resume="run")
    assert_one_line(error, 2)
    lock(Path("run")).close()
