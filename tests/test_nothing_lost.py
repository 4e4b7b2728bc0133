"""What ordinary commands and the ends of a run leave: no agent and no checkpoint that was there is lost."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from processes import (
    ROOT,
    assert_same,
    command,
    contents,
    finish,
    saved_steps,
    start,
    start_two,
    write_waiting_task,
)
from safetensors.torch import save_file

import utils.run
from utils import distributed
from utils.cli import UserError
from utils.files import read_rows
from utils.run import checkpoint

CASE = "iac head 1 number"

# --- Folders that are no run's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["base", "checkpoints", "agent_7", "critic", "config.json", "samples.jsonl"])
def test_overwrite_replaces_nothing_that_no_run_has_left(name, small_model, tmp_path):
    if "." in name:
        (tmp_path / name).write_text("{}")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    before = contents(tmp_path)
    script, flags = command(CASE, small_model)
    refused = start(script, *flags, "--output-dir", tmp_path, "--overwrite").wait()
    assert refused.exitcode == 2
    line = f"--output-dir can't be {tmp_path}: a run would replace {name} there, and no run has left that"
    assert refused.error == f"{script}.py: error: {line}\n"
    assert contents(tmp_path) == before


# --- How often it saves -----------------------------------------------------------------------------------------------


def test_a_default_run_that_is_killed_has_something_to_go_on_from(small_model, whole, tmp_path):
    name, flags = command(CASE, small_model)
    folder = tmp_path / "run"
    process = start(name, *flags, "--output-dir", folder)
    process.wait_until(lambda: saved_steps(folder))
    process.signal(signal.SIGKILL)
    process.wait()
    assert 0 < saved_steps(folder)[-1] < 6
    assert "going on from" in finish(name, "--resume", folder).output
    assert_same(folder, whole(CASE).folder)


def test_saving_where_no_interval_is_given_takes_two_per_cent_of_the_time(monkeypatch):
    run = object.__new__(utils.run.Run)
    run.args = utils.run.FolderArgs()
    run.saved_at, run.saving_seconds = 0.0, 0.0
    now = 100.0
    monkeypatch.setattr(utils.run.time, "time", lambda: now)
    saved = []
    for step in range(1, 1001):  # of one second each, and a save takes two
        now += 1.0
        if run.is_save_due():
            saved.append(step)
            now += 2.0
            run.saved_at, run.saving_seconds = now, 2.0
    assert saved[0] == 1  # what a save takes is known after the first
    assert {later - earlier for earlier, later in zip(saved, saved[1:])} == {101}


# --- A folder that is being replaced ----------------------------------------------------------------------------------


def test_an_agents_folder_is_never_gone_for_longer_than_it_takes_to_rename_another(tmp_path, monkeypatch):
    for name in ("agent_0", "agent_0.writing"):
        (tmp_path / name).mkdir()
        save_file({"x": torch.zeros(3)}, tmp_path / name / "model.safetensors")
    there = []
    rmtree = shutil.rmtree

    def remove(path, *rest, **options):
        there.append((tmp_path / "agent_0").exists())
        rmtree(path, *rest, **options)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", remove)
    checkpoint.put(tmp_path / "agent_0.writing", tmp_path / "agent_0")
    assert there == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["agent_0"]


# --- Signals that leave little time -----------------------------------------------------------------------------------


@pytest.fixture
def waiting(small_model, tmp_path):
    """Gives the script and the flags of a run that waits for a reward until a file is removed, and that file."""

    def of(processes):
        obstacle = write_waiting_task(tmp_path, held_out=2 // processes)
        name, flags = command(CASE, small_model)
        return name, [*flags, "--task", tmp_path / "waiting.py", "--output-dir", tmp_path / "run"], obstacle

    return of


def num_rows(folder):
    return len(read_rows(folder / "metrics.csv"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_done_before_the_update_under_way_is_saved_at_once(number, waiting, whole, tmp_path):
    name, flags, obstacle = waiting(1)
    folder = tmp_path / "run"
    process = start(name, *flags, "--save-interval", 0)
    process.wait_until(obstacle.with_suffix(".reached").exists)
    assert saved_steps(folder) == []
    process.signal(number)
    process.wait_until(lambda: saved_steps(folder))
    assert process.exitcode is None
    process.signal(signal.SIGKILL)
    process.wait()
    assert saved_steps(folder) == [num_rows(folder)]
    obstacle.unlink()
    finish(name, "--resume", folder)
    assert_same(folder, whole(CASE).folder)


def test_a_run_that_nohup_started_does_not_end_where_its_terminal_is_closed(waiting, whole, tmp_path):
    name, flags, obstacle = waiting(1)
    process = start(name, *flags, before=ignore_hangup)
    process.wait_until(obstacle.with_suffix(".reached").exists)
    process.signal(signal.SIGHUP)
    obstacle.unlink()
    assert process.wait().exitcode == 0, process.error
    assert_same(tmp_path / "run", whole(CASE).folder)


def ignore_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_run_whose_terminal_is_closed_saves_and_ends(waiting, whole, tmp_path):
    name, flags, obstacle = waiting(1)
    ours, theirs = os.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    command = [sys.executable, "-c", IN_SESSION, f"{name}.py", *map(str, flags)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)
    os.close(theirs)
    while not obstacle.with_suffix(".reached").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.close(ours)  # the kernel then sends SIGHUP, and all writing there fails
    obstacle.unlink()
    assert process.wait(120) == 128 + signal.SIGHUP
    assert saved_steps(tmp_path / "run")[-1] == num_rows(tmp_path / "run") < 6
    assert (tmp_path / "run" / "agent_0").is_dir()
    finish(name, "--resume", tmp_path / "run")
    assert_same(tmp_path / "run", whole(CASE).folder)


IN_SESSION = """
import fcntl, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# --- torchrun ---------------------------------------------------------------------------------------------------------


def torchrun(script, flags, *options, processes=2, seconds=1):
    """A script under torchrun, which kills processes that do not end within so many seconds of a signal."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *options]
    environment = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(seconds), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *launcher, f"{script}.py", *map(str, flags)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **streams)


def test_where_torchrun_waits_for_less_than_an_update_what_was_done_is_saved(waiting, tmp_path):
    name, flags, obstacle = waiting(2)
    process = torchrun(name, [*flags, "--save-interval", 0])
    while not obstacle.with_suffix(".reached").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    _, error = process.communicate(timeout=120)
    said = "SIGTERM: the update under way is finished and saved, if 1 s suffice, then the run stops"
    assert error.count(said) == 1  # by the main process
    assert process.returncode != 0
    assert saved_steps(tmp_path / "run") == [num_rows(tmp_path / "run")]
    obstacle.unlink()
    finish(name, "--resume", tmp_path / "run")
    assert num_rows(tmp_path / "run") == 6


FAILING_TASK = """
import os
from utils.tasks import number
from utils.tasks.number import *
calls = 0
def reward_func(*completions, items):
    global calls
    calls += 1
    if calls > 8 and not os.path.exists("FAILED"):
        open("FAILED", "w").close()
        os._exit(1)
    return number.reward_func(*completions, items=items)
"""


def test_a_run_that_torchrun_starts_again_goes_on(small_model, whole, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING_TASK.replace("FAILED", str(tmp_path / "failed")))
    name, flags = command(CASE, small_model)
    own = ["--task", tmp_path / "failing.py", "--output-dir", tmp_path / "run", "--save-interval", 1, "--overwrite"]
    process = torchrun(name, [*flags, *own], "--max-restarts=1", processes=1)
    output, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert "going on from" in output
    assert_same(tmp_path / "run", whole(CASE).folder)


def test_a_run_that_torchrun_may_start_again_takes_a_folder(monkeypatch):
    args = utils.run.FolderArgs()
    distributed.check_restarts(args)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(UserError, match="torchrun --max-restarts takes --output-dir, in which"):
        distributed.check_restarts(args)


# --- Several processes ------------------------------------------------------------------------------------------------


def delay_folder():
    """Let this process come to the folder long after the other."""
    init = utils.run.Run.__init__

    def wait(*values, **named):
        time.sleep(3.0)
        init(*values, **named)

    utils.run.Run.__init__ = wait


@pytest.mark.parametrize("slower", [0, 1])
def test_a_process_that_is_slower_takes_the_folder_that_the_main_one_has_chosen(slower, small_model, tmp_path):
    name, flags = command(CASE, small_model)
    before = [None, None]
    before[slower] = delay_folder
    for process in start_two(name, *flags, "--output-dir", tmp_path / "run", before=before):
        assert process.wait().exitcode == 0, process.error
    assert num_rows(tmp_path / "run") == 6


def test_what_the_main_process_refuses_ends_all_with_its_line(small_model, tmp_path):
    (tmp_path / "agent_0").mkdir()
    name, flags = command(CASE, small_model)
    for process in start_two(name, *flags, "--output-dir", tmp_path):
        assert process.wait().exitcode == 2
        assert f"--output-dir can't be {tmp_path}: a run would replace agent_0 there" in process.error


# --- Stopped in any way, again and again ------------------------------------------------------------------------------


def kept(folder):
    """The updates in the newest checkpoint that is whole, 0 where there is none, and the agents that are there."""
    _, state = checkpoint.newest_whole(folder / "checkpoints", tell=lambda text: None)
    models = [*folder.glob("agent_?"), *folder.glob("critic")]
    return state["step"] if state else 0, {path.name for path in models if any(path.iterdir())}


def stop_again_and_again(case, model, folder, stops, number, processes, seed):
    """Stop a run with default flags at random moments, with a signal to all of its processes, and go on with it."""
    name, flags = command(case, model)
    rng = random.Random(seed)
    start_all = start_two if processes == 2 else lambda *own: [start(*own)]
    for process in start_all(name, *flags, "--output-dir", folder):
        assert process.wait().exitcode == 0, process.error  # its agents are there from now on
    for stop in range(1, stops + 1):
        running = start_all(name, "--resume", folder, "--num-train-epochs", 2 + 2 * stop)
        before = kept(folder)
        running[0].wait_until(lambda: "writing" in running[0].output)
        running[0].join(rng.uniform(0.0, 1.0))
        for process in running:
            if process.exitcode is None:
                process.signal(number)
        for process in running:
            process.wait()
        assert_kept(folder, before)


def assert_kept(folder, before):
    updates, agents = kept(folder)
    assert updates >= before[0]
    assert agents >= before[1]


NUMBERS = [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", NUMBERS[:2])
def test_a_default_run_that_is_stopped_keeps_its_checkpoints_and_agents(number, processes, small_model, tmp_path):
    stop_again_and_again("ippo critic 2 tldr", small_model, tmp_path / "run", 1, number, processes, seed=int(number))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("case", [CASE, "maac 2 number", "magrpo 2 number", "ppo 2 number"])
def test_a_default_run_that_is_stopped_twenty_times_keeps_them(case, number, processes, small_model, tmp_path):
    stop_again_and_again(case, small_model, tmp_path / "run", 20, number, processes, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_default_run_that_torchrun_stops_twenty_times_keeps_them(processes, small_model, tmp_path):
    name, flags = command(CASE, small_model)
    folder = tmp_path / "run"
    rng = random.Random(processes)
    finish(name, *flags, "--output-dir", folder)
    for stop in range(1, 21):
        process = torchrun(name, ["--resume", folder, "--num-train-epochs", 2 + 20 * stop], processes=processes)
        before = kept(folder)
        rows = num_rows(folder)
        while num_rows(folder) == rows and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 1.0))
        process.terminate()
        process.communicate(timeout=120)
        assert_kept(folder, before)
