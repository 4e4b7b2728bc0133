"""A reward function that fails, never answers or returns nonsense: once more, then one line, saved and resumable."""

import re
import signal
import time

import pytest
from helpers import PLACE, read_metrics
from short_runs import (
    SCRIPTS,
    Faulty,
    assert_one_line,
    assert_resumes,
    assert_same_run,
    every_script,
    reward_length,
    saved_state,
    train,
)

from utils.cli import TaskError

pytestmark = pytest.mark.usefixtures("in_tmp_path")

# --- It fails ---------------------------------------------------------------------------------------------------------


def fail(items):
    raise ConnectionError("the judge\nis away")


@every_script
def test_a_reward_function_that_fails_once_is_asked_once_more(undisturbed, script, capsys):
    reward_func = Faulty(fail, 3)
    train(script, reward_func)
    lines = [line for line in capsys.readouterr().out.splitlines() if "once more" in line]
    assert len(lines) == 1
    assert re.fullmatch(f"reward_func raised ConnectionError: the judge is away{PLACE}; it is asked once more", *lines)
    assert reward_func.num_calls == 4
    assert_same_run("run", undisturbed(script))


@every_script
def test_a_reward_function_that_fails_twice_ends_the_run_which_can_be_resumed(undisturbed, script, capsys):
    batches = []

    def reward_func(*completions, items):
        batches.append(items)
        if len(batches) > 2 and batches[2][1] in items:  # from the third update on, the second of its items
            raise ConnectionError("no judge")
        return reward_length(*completions, items=items)

    k = 0 if script == "magrpo" else 1  # whose items are answers to the same one
    message = rf"raised ConnectionError: no judge{PLACE} on item {k}, {{'share': 0\."
    with pytest.raises(TaskError, match=message) as error:
        train(script, reward_func)
    assert str(batches[2][1]) in str(error.value)
    assert_one_line(error, 1)
    state = saved_state("run")
    assert (state["step"], state["learning"]) == (2, False)
    assert "--resume run" in capsys.readouterr().out
    assert len(read_metrics("run")) == 2
    assert_resumes(script, undisturbed(script))


# --- It never answers -------------------------------------------------------------------------------------------------


def sleep(items):
    time.sleep(60)


def spin(items):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("script, hang", [*((script, sleep) for script in SCRIPTS), ("iac", spin)])
def test_a_reward_function_that_hangs_ends_the_run_soon(script, hang, capsys):
    starts = []

    def fault(items):
        starts.append(time.monotonic())
        hang(items)

    message = f"TimeoutError: no answer within --reward-timeout, 0.3 s({PLACE})? on the"
    with pytest.raises(TaskError, match=message) as error:
        train(script, Faulty(fault, *range(2, 99)), reward_timeout=0.3)
    assert time.monotonic() - starts[0] < 10  # most of it saving
    assert len(starts) == 2
    assert "asked once more" in capsys.readouterr().out
    assert_one_line(error, 1)
    assert saved_state("run")["step"] == 1


def test_the_alarm_is_set_only_with_the_flag_and_given_back():
    def handler(*_):
        pass

    before = signal.signal(signal.SIGALRM, handler)
    seen = []

    def watch(items):
        seen.append((signal.getsignal(signal.SIGALRM) is handler, signal.getitimer(signal.ITIMER_REAL)[0] > 0))
        return [0.5] * len(items)

    try:
        for timeout in (None, 30.0):
            train("ippo", Faulty(watch, 1), reward_timeout=timeout, train_size=4, overwrite=True)
            assert signal.getsignal(signal.SIGALRM) is handler
        with pytest.raises(TaskError):
            train("ippo", Faulty(sleep, 1, 2), reward_timeout=0.1, train_size=4, overwrite=True)
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [(True, False), (False, True)]
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


# --- It returns nonsense ----------------------------------------------------------------------------------------------

NONSENSE = {
    "None": (lambda items: None, "returned None; it takes a list of 4 numbers"),
    "NaN": (lambda items: [0.0, 0.0, float("nan"), 0.0], "returned nan for item 2, .*share"),
}


@every_script
@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_for_rewards_ends_the_run_which_can_be_resumed(undisturbed, script, case):
    nonsense, message = NONSENSE[case]
    with pytest.raises(TaskError, match=f"^reward_func {message}") as error:
        train(script, Faulty(nonsense, 2))
    assert_one_line(error, 1)
    assert saved_state("run")["step"] == 1
    assert_resumes(script, undisturbed(script))
