"""A run that is killed, stopped or refused at any moment loses nothing, and goes on to the same bits."""

import functools
import itertools
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from processes import (
    COMMANDS,
    ROOT,
    STEPS,
    assert_same,
    command,
    contents,
    finish,
    saved_steps,
    start,
    start_two,
    write_waiting_task,
)

import utils.run
from utils import distributed
from utils.cli import UserError
from utils.files import read_rows
from utils.run import checkpoint

every_case = pytest.mark.parametrize("case", COMMANDS)
GOES_ON = "once more, and it stops at once"


def num_rows(folder):
    return len(read_rows(folder / "metrics.csv"))


# --- At random moments ------------------------------------------------------------------------------------------------


def stop_again_and_again(case, model, folder, stops, number, *more):
    """The folder of a run that was stopped so many times, at random moments, and went on each time."""
    name, flags = command(case, model)
    rng = random.Random(case)
    num_stopped = 0
    while True:
        if (folder / "config.json").exists():
            process = start(name, "--resume", folder)
        else:
            process = start(name, *flags, *more, "--output-dir", folder, "--save-interval", "1")
        if stops:
            updates = num_rows(folder) + rng.randrange(3)  # a run has six or more
            process.wait_until(lambda: "writing" in process.output and num_rows(folder) >= updates)
            process.join(rng.uniform(0, 0.1))
            if process.exitcode is None:
                process.signal(number)
        process.wait()
        assert process.exitcode in (0, -number, 128 + number), process.error
        if process.exitcode == 0:
            assert num_stopped
            return folder
        stops -= 1
        num_stopped += 1


@every_case
def test_a_run_that_is_killed_again_and_again_gives_the_same_bits(case, small_model, whole, tmp_path):
    number = signal.SIGTERM if case == "ppo" else signal.SIGKILL
    assert_same(stop_again_and_again(case, small_model, tmp_path / "run", 2, number), whole(case))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@every_case
def test_a_longer_run_that_is_killed_twenty_times_gives_the_same_bits(case, number, whole, tmp_path):
    more = ["--num-train-epochs", "12"]
    model = "utils/tiny_lm"
    reference = whole(case, *more, model=model)
    assert_same(stop_again_and_again(case, model, tmp_path / "run", 20, number, *more), reference)


# --- By a signal, while it plays --------------------------------------------------------------------------------------


@pytest.fixture
def waiting(small_model, tmp_path):
    """Gives the script and the flags of a run that waits for a reward until a file is removed, and that file."""

    def of(*more, processes=1):
        obstacle = write_waiting_task(tmp_path, held_out=2 // processes)
        name, flags = command("ippo", small_model)
        return name, [*flags, "--task", tmp_path / "waiting.py", "--output-dir", tmp_path / "run", *more], obstacle

    return of


@pytest.fixture
def at_reward(waiting):
    """Starts such a run, and waits until it waits."""

    def begin(*more, before=None):
        name, flags, obstacle = waiting(*more)
        process = start(name, *flags, before=before)
        process.wait_until(obstacle.with_suffix(".reached").exists)
        assert process.exitcode is None, process.error
        return process, obstacle

    return begin


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_after_the_update_under_way(number, at_reward, whole, tmp_path):
    process, obstacle = at_reward()
    before = num_rows(tmp_path / "run")
    process.signal(number)
    process.wait_until(lambda: GOES_ON in process.error)
    process.signal(number)  # as `timeout` does: at once, and so it is no second one
    obstacle.unlink()
    assert process.wait().exitcode == 128 + number and "Traceback" not in process.error
    line = f"ippo_llm.py: stopped by {number.name} after update {before + 1} of 6; go on with: python ippo_llm.py "
    assert process.error.splitlines()[-1] == f"{line}--resume {tmp_path}/run"
    assert saved_steps(tmp_path / "run")[-1] == num_rows(tmp_path / "run") == before + 1
    finish("ippo_llm", "--resume", tmp_path / "run")
    assert_same(tmp_path / "run", whole("ippo"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_done_before_the_update_under_way_is_saved_at_once(number, at_reward, whole, tmp_path):
    process, obstacle = at_reward("--save-interval", 0)
    assert saved_steps(tmp_path / "run") == []
    process.signal(number)
    process.wait_until(lambda: saved_steps(tmp_path / "run"))
    process.signal(signal.SIGKILL)
    process.wait()
    assert saved_steps(tmp_path / "run") == [num_rows(tmp_path / "run")]
    obstacle.unlink()
    finish("ippo_llm", "--resume", tmp_path / "run")
    assert_same(tmp_path / "run", whole("ippo"))


def test_a_second_signal_ends_a_run_at_once(at_reward, tmp_path):
    process, _ = at_reward()
    process.signal(signal.SIGTERM)
    process.wait_until(lambda: GOES_ON in process.error)
    time.sleep(1.1)
    process.signal(signal.SIGTERM)
    assert process.wait(20).exitcode == -signal.SIGTERM
    assert saved_steps(tmp_path / "run")[-1] == num_rows(tmp_path / "run")


def ignore_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_run_that_nohup_started_does_not_end_where_its_terminal_is_closed(at_reward, tmp_path):
    process, obstacle = at_reward(before=ignore_hangup)
    process.signal(signal.SIGHUP)
    obstacle.unlink()
    assert process.wait().exitcode == 0 and num_rows(tmp_path / "run") == 6


def write_into(path, mode=os.O_WRONLY):
    """Let this process write into a file of that name."""
    for stream in (1, 2):
        os.dup2(os.open(path, mode), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))


def take_terminal(name):
    """Let this process lead a session of its own, on a terminal, and write there."""
    os.setsid()
    write_into(name, os.O_RDWR)  # the first that a session opens to read too is its own


def test_a_run_whose_terminal_is_closed_saves_and_ends(at_reward, tmp_path):
    ours, theirs = os.openpty()
    process, obstacle = at_reward(before=functools.partial(take_terminal, os.ttyname(theirs)))
    os.close(theirs)
    os.close(ours)  # the kernel then sends SIGHUP, and all writing there fails
    obstacle.unlink()
    assert process.wait().exitcode == 128 + signal.SIGHUP
    assert saved_steps(tmp_path / "run")[-1] == num_rows(tmp_path / "run") < 6
    assert (tmp_path / "run" / "agent_0").is_dir()


@pytest.mark.parametrize("seconds", [0, 0.03])
def test_a_run_whose_output_nobody_reads_any_more_saves_and_ends(seconds, at_reward, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    ours = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    process, obstacle = at_reward("--save-interval", 0, before=functools.partial(write_into, tmp_path / "pipe"))
    process.signal(signal.SIGINT)  # as Ctrl-C does, which ends the reader in `| tee log` too
    time.sleep(seconds)
    os.close(ours)
    obstacle.unlink()
    assert process.wait().exitcode == 128 + signal.SIGINT
    assert saved_steps(tmp_path / "run")[-1] == num_rows(tmp_path / "run") < 6
    assert (tmp_path / "run" / "agent_0").is_dir()


@pytest.mark.slow
def test_a_command_whose_output_nobody_reads_any_more_ends_as_the_signal_says(waiting, tmp_path):
    """Of a real command the interpreter's last flush is seen too."""
    name, flags, obstacle = waiting("--save-interval", 0)
    ours, theirs = os.pipe()
    process = subprocess.Popen([sys.executable, f"{name}.py", *map(str, flags)], cwd=ROOT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    while not obstacle.with_suffix(".reached").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    os.close(ours)
    obstacle.unlink()
    assert process.wait(120) == 128 + signal.SIGINT
    assert saved_steps(tmp_path / "run")[-1] == num_rows(tmp_path / "run") < 6


# --- By a signal, while it learns -------------------------------------------------------------------------------------


def wait_while_learning(call, obstacle):
    """Let this process wait before some step of an optimiser, numbered from 1, till a file is removed."""
    clip = distributed.average_and_clip_gradients
    numbers = itertools.count(1)

    def wait(*values):
        if next(numbers) == call:
            obstacle.with_suffix(".reached").touch()
            while obstacle.exists():
                time.sleep(0.01)
        return clip(*values)

    distributed.average_and_clip_gradients = wait


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@every_case
def test_a_run_that_is_stopped_while_it_learns_gives_the_same_bits(case, number, small_model, whole, tmp_path):
    """Before the last step of an optimiser in the third update."""
    name, flags = command(case, small_model)
    (tmp_path / "wait").touch()
    before = functools.partial(wait_while_learning, 3 * STEPS[case], tmp_path / "wait")
    process = start(name, *flags, "--output-dir", tmp_path / "run", "--save-interval", "1", before=before)
    process.wait_until((tmp_path / "wait.reached").exists)
    assert num_rows(tmp_path / "run") == 2, process.error
    process.signal(number)
    if number == signal.SIGTERM:
        process.wait_until(lambda: GOES_ON in process.error)
    (tmp_path / "wait").unlink()
    process.wait()
    assert saved_steps(tmp_path / "run")[-1] == (3 if number == signal.SIGTERM else 2)
    finish(name, "--resume", tmp_path / "run")
    assert_same(tmp_path / "run", whole(case))


# --- Folders ----------------------------------------------------------------------------------------------------------


def test_of_two_runs_in_one_folder_the_second_is_refused_and_the_first_unharmed(
    at_reward, small_model, whole, tmp_path
):
    name, flags = command("ippo", small_model)
    first, obstacle = at_reward()
    for more in (["--resume", tmp_path / "run"], [*flags, "--output-dir", tmp_path / "run", "--overwrite"]):
        second = start(name, *more).wait(60)
        assert second.exitcode == 2
        assert second.error == f"{name}.py: error: another run is under way in {tmp_path}/run\n"
    obstacle.unlink()
    assert first.wait().exitcode == 0
    assert_same(tmp_path / "run", whole("ippo"))


@pytest.mark.parametrize("name", ["base", "checkpoints", "agent_7", "critic", "config.json", "samples.jsonl"])
def test_overwrite_replaces_nothing_that_no_run_has_left(name, tmp_path):
    if "." in name:
        (tmp_path / name).write_text("{}")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    before = contents(tmp_path)
    args = utils.run.FolderArgs(output_dir=str(tmp_path), overwrite=True)
    args.seed, args.task = 1, None
    with pytest.raises(UserError, match=f"^--output-dir can't be .*: a run would replace {name} there, and no run has"):
        utils.run.run_folder(args, "ippo_llm.py")
    assert contents(tmp_path) == before


def test_an_agents_folder_is_never_gone_for_longer_than_it_takes_to_rename_another(tmp_path, monkeypatch):
    for name in ("agent_0", "agent_0.writing"):
        (tmp_path / name).mkdir()
    there = []
    rmtree = checkpoint.shutil.rmtree

    def remove(path, *rest, **options):
        there.append((tmp_path / "agent_0").exists())
        rmtree(path, *rest, **options)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", remove)
    checkpoint.put(tmp_path / "agent_0.writing", tmp_path / "agent_0")
    assert there == [True] and [path.name for path in tmp_path.iterdir()] == ["agent_0"]


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
    assert saved[0] == 1 and {later - earlier for earlier, later in zip(saved, saved[1:])} == {101}


# --- Under torchrun ---------------------------------------------------------------------------------------------------


def torchrun(script, flags, *options, processes=2, seconds=1):
    """A script under torchrun, which kills processes that do not end within so many seconds of a signal."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *options]
    environment = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(seconds), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *launcher, f"{script}.py", *map(str, flags)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **streams)


@pytest.mark.slow
def test_where_torchrun_waits_for_less_than_an_update_what_was_done_is_saved(waiting, tmp_path):
    name, flags, obstacle = waiting("--save-interval", 0, processes=2)
    process = torchrun(name, flags)
    while not obstacle.with_suffix(".reached").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    _, error = process.communicate(timeout=120)
    said = "SIGTERM: the update under way is finished and saved, if 1 s suffice, then the run stops"
    assert error.count(said) == 1  # by the main process
    assert process.returncode != 0 and saved_steps(tmp_path / "run") == [num_rows(tmp_path / "run")]
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
    if calls > 5 and not os.path.exists("FAILED"):
        open("FAILED", "w").close()
        os._exit(1)
    return number.reward_func(*completions, items=items)
"""


@pytest.mark.slow
def test_a_run_that_torchrun_starts_again_goes_on(small_model, whole, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING_TASK.replace("FAILED", str(tmp_path / "failed")))
    name, flags = command("ippo", small_model)
    own = ["--task", tmp_path / "failing.py", "--output-dir", tmp_path / "run", "--save-interval", 1, "--overwrite"]
    process = torchrun(name, [*flags, *own], "--max-restarts=1", processes=1)
    output, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert "going on from" in output
    assert_same(tmp_path / "run", whole("ippo"))


def test_a_run_that_torchrun_may_start_again_takes_a_folder(monkeypatch):
    args = utils.run.FolderArgs()
    distributed.check_restarts(args)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(UserError, match="torchrun --max-restarts takes --output-dir, in which"):
        distributed.check_restarts(args)


def delay_folder():
    """Let this process come to the folder long after the other."""
    init = utils.run.Run.__init__

    def wait(*values, **named):
        time.sleep(3.0)
        init(*values, **named)

    utils.run.Run.__init__ = wait


@pytest.mark.parametrize("slower", [0, 1])
def test_a_process_that_is_slower_takes_the_folder_that_the_main_one_has_chosen(slower, small_model, tmp_path):
    name, flags = command("ippo", small_model)
    before = [None, None]
    before[slower] = delay_folder
    for process in start_two(name, *flags, "--output-dir", tmp_path / "run", before=before):
        assert process.wait().exitcode == 0, process.error
    assert num_rows(tmp_path / "run") == 6


def test_what_the_main_process_refuses_ends_all_with_its_line(small_model, tmp_path):
    (tmp_path / "agent_0").mkdir()
    name, flags = command("ippo", small_model)
    for process in start_two(name, *flags, "--output-dir", tmp_path):
        assert process.wait().exitcode == 2
        assert f"--output-dir can't be {tmp_path}: a run would replace agent_0 there" in process.error
