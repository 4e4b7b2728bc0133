"""--reward-timeout holds whatever a reward function does with alarms; a save takes as long as it takes."""

import signal
import threading
import time

import pytest
from short_runs import newest_checkpoint, train

import utils.run
from utils.cli import Stopped, TaskError
from utils.timers import at_rest, limits, time_limit

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture(autouse=True)
def nothing_left():
    """That no timer goes on, and no thread."""
    yield
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and not limits
    assert not [thread for thread in threading.enumerate() if "watch" in thread.name]


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def set_alarm(*_):
    """Have an alarm of its own, as math_verify has, and give it back."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(20)
    try:
        pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def alarm_and_spin():
    set_alarm()
    spin(20)


def alarm_and_sleep():
    set_alarm()
    time.sleep(20)


def ignore_and_spin():
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        spin(20)
    finally:
        signal.signal(signal.SIGALRM, before)


def catch():
    try:
        spin(20)
    except Exception:
        pass


def catch_and_go_on():
    catch()
    spin(20)


SLOW = [lambda: spin(20), lambda: time.sleep(20), alarm_and_spin, alarm_and_sleep, ignore_and_spin, catch]


@pytest.mark.parametrize("work", [*SLOW, catch_and_go_on])
def test_what_takes_longer_is_ended_whatever_it_does_with_alarms(work):
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="^no answer within --reward-timeout, 0.2 s$"), time_limit(0.2):
        work()
    assert 0.2 <= time.monotonic() - start < 5


def test_what_is_in_time_returns_and_so_does_a_limit_within_a_limit():
    for _ in range(200):
        with time_limit(5.0):
            set_alarm()
    with pytest.raises(TimeoutError, match="0.2 s$"), time_limit(0.2):
        with time_limit(5.0):
            set_alarm()
        spin(20)


def test_a_limit_that_ends_at_the_same_time_as_the_work_leaves_nothing_behind():
    for k in range(300):
        try:
            with time_limit(0.002):
                spin(0.002 + (k % 20 - 10) / 10_000)
        except TimeoutError:
            pass


def test_timers_go_on_after_a_rest_where_they_were():
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    start = time.monotonic()
    with time_limit(1.0):
        with at_rest():
            time.sleep(1.2)
            assert not rang
        time.sleep(0.4)
    signal.signal(signal.SIGALRM, before)
    assert 1.5 <= rang[0] - start < 3


def test_a_reward_function_with_an_alarm_of_its_own_is_ended_and_named():
    def reward_func(*completions, items):
        alarm_and_spin()

    with pytest.raises(TaskError, match="^reward_func raised TimeoutError: no answer within --reward-timeout, 0.2 s"):
        train("ippo", reward_func, reward_timeout=0.2)


@pytest.mark.parametrize("own", [False, True], ids=["limit", "alarm"])
def test_a_save_within_a_reward_function_takes_as_long_as_it_takes(own, monkeypatch, capsys):
    """In the second update SIGTERM comes, and saving takes longer than all timers."""
    calls = []
    save_agents = utils.run.save_agents

    def save_slowly(*values, **named):
        spin(0.6)
        save_agents(*values, **named)

    def out_of_time(*_):
        raise TimeoutError("the function's own")

    def reward_func(*completions, items):
        calls.append(1)
        before = signal.getsignal(signal.SIGALRM)
        if own:
            signal.signal(signal.SIGALRM, out_of_time)
            signal.setitimer(signal.ITIMER_REAL, 0.4)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        if own:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return [1.0] * len(items)

    monkeypatch.setattr(utils.run, "save_agents", save_slowly)
    with pytest.raises(Stopped, match="^stopped by SIGTERM after update 2 of 3"):
        train("ippo", reward_func, save_interval=0, reward_timeout=None if own else 0.4)
    assert "asked once more" not in capsys.readouterr().out
    assert len(calls) == 2 and newest_checkpoint("run").name == "update_000002"
    assert newest_checkpoint("run").with_name("update_000001").is_dir()
