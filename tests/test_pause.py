"""--pause-at: a run ends after an update, and goes on, or is forked, to the same bits."""

import json
from pathlib import Path

import pytest
from short_runs import SCRIPTS, every_script, newest_checkpoint, train

from utils.cli import parse
from utils.same import compare, timeless

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@every_script
def test_a_paused_run_goes_on_to_the_same_bits(script, undisturbed, capsys):
    """Learning rates are lowered over the length of the whole run."""
    _, run = train(script, pause_at=2, save_interval=0)
    assert run.step == len(timeless("run")) == 2 and newest_checkpoint("run").name == "update_000002"
    goes_on = f"paused after update 2 of 3; go on with: python {script}_llm.py --resume run\n"
    assert capsys.readouterr().out.endswith(f"{goes_on}the run is in run\n")
    _, run = train(script, resume="run", pause_at=1)
    assert run.step == 2
    _, run = train(script, resume="run")
    assert run.step == 3 and "paused" not in capsys.readouterr().out.split("the run is in run")[1]
    same = compare("run", undisturbed(script))
    assert all(same.values()) and len(same) > 2


def test_a_fork_pauses_too(undisturbed):
    train("ippo", folder="first", pause_at=1)
    _, run = train("ippo", folder="second", fork="first", pause_at=2)
    assert run.step == 2
    train("ippo", folder="third", fork="second")
    assert all(compare("third", undisturbed("ippo")).values())


def test_a_pause_holds_for_one_start():
    train("ippo", pause_at=1)
    assert json.loads(Path("run/config.json").read_text())["args"]["pause_at"] == 1
    for flag in ("--resume", "--fork"):
        args = [parse(SCRIPTS["ippo"].Args, [flag, "run", *more]) for more in ([], ["--pause-at", "3"])]
        assert [each.pause_at for each in args] == [None, 3]
