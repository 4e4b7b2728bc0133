"""Gradients that are not finite change nothing; the third one running ends the run in one line."""

from pathlib import Path

import pytest
from helpers import read_metrics
from short_runs import LOSSES, SCRIPTS, assert_one_line, every_script, saved_state, tensor_files, train

from utils.cli import UserError
from utils.run.checkpoint import checkpoints

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def spoil_losses(patch, script, calls):
    """Let the loss of some calls, numbered from 1, have a gradient of NaN."""
    function = getattr(SCRIPTS[script], LOSSES[script])
    seen = []

    def spoiled(*values):
        seen.append(values)
        loss, metrics = function(*values)
        return loss * (float("nan") if len(seen) in calls else 1.0), metrics

    patch.setattr(SCRIPTS[script], LOSSES[script], spoiled)


@every_script
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(monkeypatch, script):
    spoil_losses(monkeypatch, script, [2])
    _, run = train(script, num_agents=1, save_interval=1, keep_checkpoints=9)
    assert [row["agent_0/skipped"] for row in run.rows] == [0, 1, 0]
    saved = [tensor_files(path) for path in checkpoints(Path("run/checkpoints"))]
    first, second, third = [{name: x[name] for name in x if name.startswith("agent")} for x in saved]  # not a critic
    assert first == second != third


def test_a_gradient_of_a_central_critic_that_is_not_finite_changes_no_bit_of_it_and_agents_learn(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(LOSSES, "maac", "value_loss")
        spoil_losses(patch, "maac", [2])
        _, run = train("maac", save_interval=1, keep_checkpoints=9)
    assert [row["critic/skipped"] for row in run.rows] == [0, 1, 0]
    assert not any(row[f"agent_{i}/skipped"] for row in run.rows for i in range(2))
    saved = [tensor_files(path) for path in checkpoints(Path("run/checkpoints"))]
    first, second, third = [{name: x[name] for name in x if name.startswith("critic/")} for x in saved]
    assert len(first) > 2 and first == second != third
    assert saved[0]["agent_0/model.safetensors"] != saved[1]["agent_0/model.safetensors"]


@every_script
def test_three_gradients_running_that_are_not_finite_end_the_run(monkeypatch, script):
    spoil_losses(monkeypatch, script, [2, 4, 5, 6])  # three running, and one before
    with pytest.raises(UserError, match="^three gradients in a row were not finite: lower --") as error:
        train(script, num_agents=1, train_size=32)
    assert_one_line(error, 2)
    assert saved_state("run")["step"] == 5
    assert len(read_metrics("run")) == 5


@every_script
def test_a_run_that_such_gradients_ended_can_be_resumed(monkeypatch, script):
    flags = {"num_agents": 1, "train_size": 24}
    with monkeypatch.context() as patch:
        spoil_losses(patch, script, range(2, 99))
        with pytest.raises(UserError, match="not finite"):
            train(script, **flags)
    _, run = train(script, **flags, resume="run")
    assert run.step == 6
    assert run.rows[-1]["agent_0/skipped"] == 0
