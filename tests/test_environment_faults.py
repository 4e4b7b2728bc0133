"""An environment that never answers loses its own episode; one that returns nonsense ends the run, in one line."""

import re
import sys
import time
from pathlib import Path

import pytest
from helpers import PLACE
from short_runs import IN_ENV, Env, assert_one_line, assert_same_run, install_env, saved_state, train

from utils.cli import TaskError

pytestmark = pytest.mark.usefixtures("in_tmp_path")
LATE = 1_000_007  # the seed of one of the twelve episodes

# --- It never answers -------------------------------------------------------------------------------------------------


class HangsAtReset(Env):
    def reset(self, seed):
        while seed == LATE:
            pass
        return super().reset(seed)


class HangsInStep(Env):
    def step(self, answer):
        if self.seed == LATE:
            time.sleep(60)
        return super().step(answer)


@pytest.mark.parametrize("kind, where", [(HangsAtReset, "reset"), (HangsInStep, "turn 1")], ids=["reset", "step"])
def test_an_environment_that_hangs_drops_its_own_episode(monkeypatch, kind, where, capsys):
    install_env(monkeypatch, kind)
    _, run = train("ppo", **IN_ENV, reward_timeout=0.3)
    assert sorted(row["dropped"] for row in run.rows) == [0, 0, 1]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "is dropped" in line]
    error = f"TimeoutError: no answer within --reward-timeout, 0.3 s{PLACE}, in {where}"
    assert re.search(f"the episode of seed {LATE} is dropped: {error}$", line)


def test_an_environment_that_hangs_when_it_is_closed_does_not_hang_the_run(monkeypatch):
    """After its step has failed, that is, or where it is cut short."""
    closed = []

    class HangsInClose(HangsInStep):
        seed = None

        def close(self):
            if self.seed == LATE:
                time.sleep(4)
                closed.append(self)

    install_env(monkeypatch, HangsInClose)
    _, run = train("ppo", **IN_ENV, reward_timeout=0.3)
    assert run.step == 3
    assert not closed


# --- It returns nonsense ----------------------------------------------------------------------------------------------

STEPS = {
    "four values": (("And on.", 1.0, False, {}), "step of Wrong returned 4 values; it takes 5"),
    "NaN": (("And on.", float("nan"), False, False, {}), "step of Wrong returned the reward nan"),
}


@pytest.fixture(scope="module")
def undisturbed_env(tmp_path_factory):
    """The folder of a run in an environment that nothing happens to."""
    folder = tmp_path_factory.mktemp("env") / "run"
    with pytest.MonkeyPatch.context() as patch:
        install_env(patch, Env)
        patch.setattr(sys, "path", [*sys.path])
        train("ppo", folder=folder, **IN_ENV)
    return folder


@pytest.mark.parametrize("case", STEPS)
def test_nonsense_from_an_environment_ends_the_run_which_can_be_resumed(undisturbed_env, monkeypatch, case):
    result, message = STEPS[case]

    class Wrong(Env):
        def step(self, answer):
            return result if Path("run/metrics.csv").exists() else super().step(answer)

    install_env(monkeypatch, Wrong)
    with pytest.raises(TaskError, match=f"^{message}") as error:
        train("ppo", **IN_ENV)
    assert_one_line(error, 1)
    assert saved_state("run")["step"] == 1
    install_env(monkeypatch, Env)
    train("ppo", **IN_ENV, resume="run")
    assert_same_run("run", undisturbed_env)
