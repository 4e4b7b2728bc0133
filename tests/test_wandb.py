"""Weights & Biases: whatever it does, the run goes on to the same bits; a resumed run goes on in the same run there."""

from pathlib import Path

import pytest
import wandb
from helpers import read_metrics
from short_runs import Faulty, assert_same_run, return_none, train

from utils.cli import TaskError

pytestmark = pytest.mark.usefixtures("in_tmp_path")


class Logger:
    """A run of Weights & Biases that is not sent anywhere; some calls of log, numbered from 1, fail."""

    def __init__(self, failing=()):
        self.id = "made-up"
        self.failing = failing
        self.num_calls = 0
        self.steps = []
        self.values = []
        self.exit_codes = []

    def log(self, values, step=None):
        self.num_calls += 1
        if self.num_calls in self.failing:
            raise wandb.errors.CommError("the line\nis dead")
        self.steps.append(step)
        self.values.append(values)

    def finish(self, exit_code):
        self.exit_codes.append(exit_code)


def stub_wandb(monkeypatch, logger, failing=()):
    """Let wandb.init give a logger, or fail in some modes; its arguments, call by call."""
    calls = []

    def init(**options):
        calls.append(options)
        if options["mode"] in failing:
            raise wandb.errors.CommError("no\nnetwork")
        return logger

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "Table", lambda **table: table)
    return calls


def test_weights_and_biases_out_of_reach_is_logged_to_offline(monkeypatch, undisturbed, capsys):
    logger = Logger()
    calls = stub_wandb(monkeypatch, logger, failing=[None])
    train("ippo", track=True)
    assert [options["mode"] for options in calls] == [None, "offline"]
    line = "--track: Weights & Biases does not start (no network); logging offline, for wandb sync"
    assert capsys.readouterr().out.splitlines().count(line) == 1
    assert logger.steps == [4, 8, 12, None]
    *rows, last = logger.values
    assert [f"{row['reward_mean']:.9g}" for row in rows] == [row["reward_mean"] for row in read_metrics(Path("run"))]
    assert last["samples"]["columns"] == ["global_step", "item", "agent_0", "agent_1", "reward"]
    assert len(last["samples"]["data"]) == 6
    assert logger.exit_codes == [0]
    assert_same_run("run", undisturbed("ippo"))


def test_a_run_goes_on_without_weights_and_biases(monkeypatch, undisturbed, capsys):
    calls = stub_wandb(monkeypatch, None, failing=[None, "offline"])
    train("ippo", track=True)
    assert len(calls) == 2
    assert capsys.readouterr().out.count("does not start (no network); the run goes on without it") == 1
    assert_same_run("run", undisturbed("ippo"))


def test_weights_and_biases_that_fails_midway_is_done_without(monkeypatch, undisturbed, capsys):
    logger = Logger(failing=range(2, 99))
    stub_wandb(monkeypatch, logger)
    train("ippo", track=True)
    line = "--track: Weights & Biases fails (the line is dead); the run goes on without it"
    assert capsys.readouterr().out.count(line) == 1
    assert logger.steps == [4]
    assert logger.num_calls == 2
    assert len(logger.exit_codes) == 1  # else wandb.init of the next run in the same process gives this one back
    assert_same_run("run", undisturbed("ippo"))


def test_a_resumed_run_goes_on_in_the_same_run_of_weights_and_biases(monkeypatch):
    first = Logger()
    calls = stub_wandb(monkeypatch, first)
    with pytest.raises(TaskError):
        train("ippo", Faulty(return_none, 2), track=True)
    assert (calls[0]["id"], calls[0]["resume"]) == (None, None)
    assert first.exit_codes == [1]
    second = Logger()
    calls = stub_wandb(monkeypatch, second)
    train("ippo", track=True, resume="run")
    assert (calls[0]["id"], calls[0]["resume"]) == ("made-up", "allow")
    assert second.steps == [8, 12, None]


def test_the_files_of_weights_and_biases_are_in_the_run_or_where_its_own_variables_say(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train("ppo", track=True, overwrite=True)
    assert len([*Path("run/wandb").glob("offline-run-*/*.wandb")]) == 1
    Path("elsewhere").mkdir()
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    train("ppo", track=True, folder="other")
    assert len([*Path("elsewhere/wandb").glob("offline-run-*/*.wandb")]) == 1
    assert not Path("other/wandb").exists()
    assert "--track" not in capsys.readouterr().out  # it takes rows and samples


def test_the_real_weights_and_biases_goes_offline_and_on_again(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    real_init = wandb.init

    def init(mode, **options):
        if mode is None:
            raise wandb.errors.CommError("no network")
        return real_init(mode=mode, **options)

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(TaskError):
        train("ppo", Faulty(return_none, 2), track=True)
    train("ppo", track=True, resume="run")
    names = [path.stem for path in Path("run/wandb").glob("offline-run-*/*.wandb")]
    assert len(names) == 2
    assert len({*names}) == 1
