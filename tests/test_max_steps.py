"""--max-steps ends a run after so many joint samples, and may grow when it is resumed."""

import pytest
from short_runs import FOUR_ITEMS, every_script, train

from utils.cli import UserError
from utils.same import timeless

pytestmark = pytest.mark.usefixtures("in_tmp_path")
CONSTANT = {script: {"anneal_lr": False} for script in ("ippo", "iac", "maac", "magrpo")}
CONSTANT["ppo"] = {"cosine_lr_schedule": False}


@pytest.mark.parametrize(
    "script, max_steps, num_updates", [("ippo", 4, 1), ("ippo", 99, 3), *((script, 5, 2) for script in CONSTANT)]
)
def test_a_run_ends_after_so_many_samples_rounded_up_to_an_update(script, max_steps, num_updates):
    agents, run = train(script, max_steps=max_steps, eval_size=1)
    assert [row["global_step"] for row in run.rows] == [4, 8, 12][:num_updates]
    assert run.num_updates == num_updates
    rates = [rate for agent in agents for schedule in agent.schedules for rate in schedule.get_last_lr()]
    assert rates == [0.0] * len(rates)  # the schedules are as long as the run


@every_script
def test_it_alone_says_how_long_a_run_is(script, undisturbed):
    _, run = train(script, max_steps=21, num_train_epochs=None, **CONSTANT[script])  # 12 items, 4 an update
    assert [row["epoch"] for row in run.rows] == pytest.approx([k / 3 for k in range(1, 7)])
    train(script, num_train_epochs=2, folder="other", **CONSTANT[script])
    assert timeless("run") == timeless("other")


def test_where_the_epochs_end_a_run_before_it_that_is_said(capsys):
    train("ippo", max_steps=16)
    said = "--num-train-epochs 1 ends the run after 12 of --max-steps 16 samples"
    assert said in capsys.readouterr().out
    train("ippo", max_steps=12, folder="other")
    assert "--num-train-epochs" not in capsys.readouterr().out


def test_without_both_a_run_has_three_epochs_and_may_have_more_when_it_goes_on():
    _, run = train("ippo", num_train_epochs=None)
    assert run.num_updates == 9
    with pytest.raises(UserError, match="these differ: --num-train-epochs 3 there, 2 here$"):
        train("ippo", num_train_epochs=2, resume="run")
    _, run = train("ippo", num_train_epochs=4, resume="run")
    assert run.num_updates == len(run.rows) == 12


@every_script
def test_it_may_grow_when_a_run_goes_on(script, undisturbed):
    train(script, max_steps=4, **CONSTANT[script])
    with pytest.raises(UserError, match="these differ: --max-steps 4 there, 3 here$"):
        train(script, max_steps=3, resume="run", **CONSTANT[script])
    train(script, max_steps=8, resume="run", **CONSTANT[script])
    _, run = train(script, resume="run", **CONSTANT[script])
    train(script, folder="whole", **CONSTANT[script])
    assert timeless("run") == timeless("whole") and len(run.rows) == 3
    with pytest.raises(UserError, match="these differ: --max-steps None there, 8 here$"):
        train(script, max_steps=8, resume="run", **CONSTANT[script])


@every_script
def test_only_items_that_the_end_of_the_epochs_leaves_out_are_said_to_be(script, capsys):
    flags = FOUR_ITEMS.get(script, {})
    samples = 4 if flags else 1  # of an item
    flags = flags | {"train_size": 14 * samples}
    train(script, **flags)
    assert "the last 2 items of the last epoch are left out" in capsys.readouterr().out
    train(script, **flags, max_steps=8 * samples, folder="other")
    assert "left out" not in capsys.readouterr().out
