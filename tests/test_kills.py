"""A run that is killed or stopped at any moment goes on to the same bits."""

import functools
import itertools
import random
import signal
import time

import pytest
from processes import COMMANDS, SCRIPTS, assert_same, command, finish, saved_steps, start, write_waiting_task

from utils.files import read_rows

SOME = ["ippo critic 2 tldr", "iac head 1 number", "ppo guess", "ppo 2 number"]
SOME += ["maac 2 number", "magrpo 2 number"]
CASE = "iac head 1 number"

# --- Killed at random moments -----------------------------------------------------------------------------------------


def stop_again_and_again(case, model, folder, stops, seed, pace, number, *more):
    """Stop a run at random moments, going on with it each time, till it ends; then another, while stops are left.

    Returns their folders.
    """
    name, flags = command(case, model)
    rng = random.Random(seed)
    folders = [folder / "0"]
    while True:
        run = folders[-1]
        if (run / "config.json").exists():
            process = start(name, "--resume", run)
        else:
            process = start(name, *flags, *more, "--output-dir", run, "--save-interval", "1")
        if stops:
            stop_at_random(process, rng, pace, number)
        process.wait()
        assert process.exitcode in (0, -number, 128 + number), process.error
        if process.exitcode != 0:
            stops -= 1
        elif not stops:
            return folders
        else:
            folders.append(folder / str(len(folders)))


def stop_at_random(process, rng, pace, number):
    """Send a process a signal within three updates, or, more seldom, while it starts."""
    if rng.random() < 0.85:
        process.wait_until(lambda: "writing" in process.output)
    process.join(rng.uniform(0, 3 * pace))
    if process.exitcode is None:
        process.signal(number)


@pytest.mark.parametrize("case, number", [*((case, signal.SIGKILL) for case in SOME), ("ppo guess", signal.SIGTERM)])
def test_a_run_that_is_killed_again_and_again_gives_the_same_bits(case, number, small_model, whole, tmp_path):
    model = small_model if "tldr" in case else "utils/tiny_lm"  # which answers with numbers: games go on
    reference = whole(case, model=model)
    for folder in stop_again_and_again(case, model, tmp_path, 2, SOME.index(case), reference.pace, number):
        assert_same(folder, reference.folder)
    assert "tldr" in case or read_rows(reference.folder / "metrics.csv")[-1]["turns"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("case", COMMANDS)
def test_a_longer_run_that_is_killed_twenty_times_gives_the_same_bits(case, number, whole, tmp_path):
    twelve_updates = ["--num-train-epochs", "4"]
    model = "utils/tiny_lm"
    reference = whole(case, *twelve_updates, model=model)
    seed = [*COMMANDS].index(case)
    for folder in stop_again_and_again(case, model, tmp_path, 20, seed, reference.pace, number, *twelve_updates):
        assert_same(folder, reference.folder)


# --- Stopped by a signal ----------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(small_model, tmp_path):
    """Starts a run that waits for a reward, in an update that is not the first, until a file is removed."""
    obstacle = write_waiting_task(tmp_path)

    def begin():
        name, flags = command(CASE, small_model)
        process = start(name, *flags, "--task", tmp_path / "waiting.py", "--output-dir", tmp_path / "run")
        process.wait_until((tmp_path / "wait.reached").exists)
        assert process.exitcode is None, process.error
        return process, obstacle

    return begin


def announces_stop(process):
    return "once more, and it stops at once" in process.error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_after_the_update_under_way(number, waiting, whole, tmp_path):
    folder = tmp_path / "run"
    process, obstacle = waiting()
    before = len(read_rows(folder / "metrics.csv"))
    process.signal(number)
    process.wait_until(lambda: announces_stop(process))
    process.signal(number)  # as `timeout` does: at once, and so it is no second one
    obstacle.unlink()
    assert process.wait().exitcode == 128 + number, process.error
    assert "Traceback" not in process.error
    line = f"iac_llm.py: stopped by {number.name} after update {before + 1} of 6; go on with: python iac_llm.py "
    assert process.error.splitlines()[-1] == f"{line}--resume {folder}"
    assert saved_steps(folder)[-1] == len(read_rows(folder / "metrics.csv")) == before + 1
    finish("iac_llm", "--resume", folder)
    assert_same(folder, whole(CASE).folder)


def test_a_second_signal_ends_a_run_at_once(waiting, whole, tmp_path):
    process, obstacle = waiting()
    process.signal(signal.SIGTERM)
    process.wait_until(lambda: announces_stop(process))
    time.sleep(1.1)
    process.signal(signal.SIGTERM)
    assert process.wait(5).exitcode == -signal.SIGTERM
    assert saved_steps(tmp_path / "run")[-1] == len(read_rows(tmp_path / "run" / "metrics.csv"))
    obstacle.unlink()
    finish("iac_llm", "--resume", tmp_path / "run")
    assert_same(tmp_path / "run", whole(CASE).folder)


# --- In the midst of learning -----------------------------------------------------------------------------------------

STEPS = {  # of optimisers in an update, all agents' and, the last of a joint mini-batch, a central critic's
    "ippo critic 2 tldr": 4,
    "iac head 1 number": 2,
    "maac 2 number": 6,
    "magrpo 2 number": 8,
    "ppo 2 number": 8,
}


def wait_while_learning(name, call, obstacle):
    """Let a script wait at some call of its optimizer_step, numbered from 1, till a file is removed."""
    optimizer_step = SCRIPTS[name].optimizer_step
    numbers = itertools.count(1)

    def wait(*values):
        if next(numbers) == call:
            obstacle.with_suffix(".reached").touch()
            while obstacle.exists():
                time.sleep(0.01)
        return optimizer_step(*values)

    SCRIPTS[name].optimizer_step = wait


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * ("magrpo" in c)) for c in STEPS])
def test_a_run_that_is_stopped_while_it_learns_gives_the_same_bits(case, number, small_model, whole, tmp_path):
    """At the last step of an optimiser in the third update: all others of it are made."""
    name, flags = command(case, small_model)
    folder = tmp_path / "run"
    obstacle = tmp_path / "wait"
    obstacle.touch()
    before = functools.partial(wait_while_learning, name, 3 * STEPS[case], obstacle)
    process = start(name, *flags, "--output-dir", folder, "--save-interval", "1", before=before)
    process.wait_until(obstacle.with_suffix(".reached").exists)
    process.signal(number)
    if number == signal.SIGTERM:
        process.wait_until(lambda: announces_stop(process))
    obstacle.unlink()
    assert process.wait().exitcode == (128 + number if number == signal.SIGTERM else -number), process.error
    assert saved_steps(folder)[-1] == (3 if number == signal.SIGTERM else 2)
    finish(name, "--resume", folder)
    assert_same(folder, whole(case).folder)


# --- Two runs in one folder -------------------------------------------------------------------------------------------


def test_of_two_runs_in_one_folder_the_second_is_refused_and_the_first_unharmed(waiting, small_model, whole, tmp_path):
    name, flags = command(CASE, small_model)
    folder = tmp_path / "run"
    first, obstacle = waiting()
    for more in (["--resume", folder], [*flags, "--output-dir", folder, "--overwrite"]):
        second = start(name, *more).wait(30)
        assert second.exitcode == 2
        assert second.error == f"{name}.py: error: another run is under way in {folder}\n"
    assert first.exitcode is None
    obstacle.unlink()
    assert first.wait().exitcode == 0
    assert_same(folder, whole(CASE).folder)
