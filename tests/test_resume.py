"""A run that was killed, stopped or met a full disk goes on to the same bits; no damaged checkpoint is used."""

import csv
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from conftest import TINY
from test_flags import make_model
from transformers import AutoTokenizer

import iac_llm
import ippo_llm
import ppo_llm
import utils.run
from utils import checkpoint
from utils.cli import UserError, command_line, parse
from utils.run import read_lines, read_rows

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ippo_llm": ippo_llm, "iac_llm": iac_llm, "ppo_llm": ppo_llm}

# --- Processes that have imported everything before they start --------------------------------------------------------

CONTEXT = multiprocessing.get_context("forkserver")
STARTED = []
CRASHED = 99  # the exit code of a process that `crash_at` ended


@pytest.fixture(scope="module", autouse=True)
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        CONTEXT.set_forkserver_preload([__name__])
        multiprocessing.forkserver.ensure_running()


def within(work, given, said):
    """What a process does: `work`, with its standard output and error in two files."""
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    torch.set_num_threads(1)
    work(*given)


def start(work, *given):
    """A process under way."""
    folder = Path(os.environ["SAID"])
    said = [folder / f"{len([*folder.iterdir()])}.{name}" for name in ("out", "err")]
    process = CONTEXT.Process(target=within, args=(work, given, said))
    process.out, process.err = (functools.partial(read_if_there, path) for path in said)
    process.start()
    STARTED.append(process)
    return process


def read_if_there(path):
    return path.read_text() if path.exists() else ""


def ended(process, seconds=120):
    """The process, which ends by itself."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        pytest.fail(f"it does not end: {process.err()[-2000:]}")
    return process


def until(process, happened, seconds=60):
    """Wait until something has happened, or the process has ended."""
    before = time.monotonic()
    while not happened() and process.exitcode is None:
        assert time.monotonic() - before < seconds, process.err()[-2000:]
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def said(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SAID", str(tmp_path_factory.mktemp("said")))
    yield
    while STARTED:
        STARTED.pop().kill()  # of those that a failed test left


def script(name, flags, before=None):
    """Work for a process: a script, as if from the command line. `before` is called first."""
    utils.run.draw_curves = lambda *_: None  # takes longer than all the rest
    sys.argv = [f"{name}.py", *map(str, flags)]
    if before:
        before()
    command_line(SCRIPTS[name].main, SCRIPTS[name].Args, SCRIPTS[name].__doc__)


# --- Runs -------------------------------------------------------------------------------------------------------------

TEAM = "--train-size 12 --num-train-epochs 2 --rollout-buffer-size 4 --mini-batch-size 2 --eval-size 2 "
TEAM += "--eval-interval 3"  # six updates
ALONE = TEAM.replace("mini-batch-size", "batch-size").replace("eval-interval", "evaluation-interval") + " --eval-loop 2"
TLDR, NUMBER = "--max-new-tokens 8", "--task number --num-turns 3 --max-new-tokens 4"
COMMANDS = {
    f"{name} {critic} {agents} {turns}": (
        f"{name}_llm",
        f"{TEAM} {TLDR if turns == 'tldr' else NUMBER} --num-agents {agents}"
        + " --use-separate-critic" * (critic == "critic"),
    )
    for name in ("ippo", "iac")
    for critic in ("critic", "head")
    for agents in (1, 2)
    for turns in ("tldr", "number")
} | {
    "ppo guess": ("ppo_llm", ALONE),
    "ppo 2 tldr": ("ppo_llm", f"{ALONE} --task tldr --num-agents 2 --max-output-tokens 8"),
    "ppo 2 number": ("ppo_llm", f"{ALONE} --task number --max-turns 3 --num-agents 2 --max-output-tokens 4"),
}
SOME = ["ippo critic 2 tldr", "iac head 1 number", "ppo guess", "ppo 2 number"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model that is quick to save."""
    return make_model(tmp_path_factory.mktemp("small") / "model", AutoTokenizer.from_pretrained(TINY))


@pytest.fixture(scope="module")
def command(small):
    """The script and the flags of a command by its name."""
    return lambda case, model=small: (COMMANDS[case][0], [*COMMANDS[case][1].split(), "--model", model])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that several tests look at: their folders, and how many seconds an update takes."""
    return tmp_path_factory.mktemp("runs"), {}


@pytest.fixture
def uninterrupted(runs):
    """A run that nothing stopped, of a command, made once."""

    def make(name, flags, *more):
        folder, made = runs
        key = " ".join([name, *flags, *more])
        if key not in made:
            run = folder / str(len(made))
            process = ended(start(script, name, [*flags, "--output-dir", run, *more]))
            assert process.exitcode == 0, process.err()
            rows = read_rows(run / "metrics.csv")
            made[key] = SimpleNamespace(folder=run, pace=sum(v for k, v in rows[-1].items() if k.startswith("time/")))
        return made[key]

    return make


@pytest.fixture
def begun(uninterrupted, command, tmp_path):
    """A copy of a run as it was when it ended, but for the later half of its six checkpoints, and its agents."""

    def make(case="ippo head 1 number", name="run"):
        done = uninterrupted(*command(case), "--save-interval", "1", "--keep-checkpoints", "9").folder
        ignored = shutil.ignore_patterns("update_00000[456]", "curves.png")
        shutil.copytree(done, tmp_path / name, ignore=ignored)
        for path in (tmp_path / name).glob("agent_*"):
            shutil.rmtree(path)
        return tmp_path / name

    return make


def bits(folder):
    """What a run learned, said and measured; times and speeds, which no seed decides, aside."""
    files = [*folder.glob("agent_*/**/*.safetensors"), folder / "samples.jsonl"]
    bits = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    with open(folder / "metrics.csv", newline="") as file:
        columns = [column for column in zip(*csv.reader(file)) if "time" not in column[0] and "second" not in column[0]]
    return bits | {"metrics": columns}


def go_on(name, folder, *flags):
    """Resume a run, to its end."""
    process = ended(start(script, name, ["--resume", folder, *flags]))
    assert process.exitcode == 0, process.err()
    return process


def resumed(name, folder, *flags):
    """What main takes to go on with a run, from the command line."""
    return parse(SCRIPTS[name].Args, ["--resume", str(folder), *flags], script=name)


def main(name, folder, *flags):
    return SCRIPTS[name].main(resumed(name, folder, *flags))


def kept(folder):
    """The updates that a run has checkpoints of."""
    return [int(path.name.removeprefix("update_")) for path in checkpoint.checkpoints(folder / "checkpoints")]


def damage(path):
    """Change a byte of a checkpoint's weights."""
    file = sorted(path.rglob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))


# --- Killed -----------------------------------------------------------------------------------------------------------


def chaos(name, flags, folder, kills, seed, pace, number=signal.SIGKILL):
    """Stop a run at random moments, going on with it each time, till it ends; then another, while kills are left.

    Returns their folders.
    """
    moments, done = random.Random(seed), []
    while True:
        run = folder / str(len(done))
        anew = [*flags, "--output-dir", run, "--save-interval", "1"]
        process = start(script, name, ["--resume", run] if (run / "config.json").exists() else anew)
        if kills:
            if moments.random() < 0.85:  # else it is killed while it starts
                until(process, lambda: "writing" in process.out())
            process.join(moments.uniform(0, 3 * pace))
            if process.exitcode is None:
                os.kill(process.pid, number)
        ended(process)
        assert process.exitcode in (0, -number, 128 + number), process.err()
        if process.exitcode == 0:
            done.append(run)
            if not kills:
                return done
        else:
            kills -= 1


@pytest.mark.parametrize("case, number", [*((case, signal.SIGKILL) for case in SOME), ("ppo guess", signal.SIGTERM)])
def test_a_run_that_is_killed_again_and_again_gives_the_same_bits(
    case, number, command, small, uninterrupted, tmp_path
):
    name, flags = command(case, small if "tldr" in case else "utils/tiny_lm")  # which says numbers: games go on
    whole = uninterrupted(name, flags)
    for folder in chaos(name, flags, tmp_path, 3, SOME.index(case), whole.pace, number):
        assert bits(folder) == bits(whole.folder)
    assert "tldr" in case or read_rows(whole.folder / "metrics.csv")[-1]["turns"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("case", COMMANDS)
def test_a_longer_run_that_is_killed_twenty_times_gives_the_same_bits(case, number, command, uninterrupted, tmp_path):
    name, flags = command(case, "utils/tiny_lm")
    flags += ["--num-train-epochs", "4"]  # 12 updates
    whole = uninterrupted(name, flags)
    for folder in chaos(name, flags, tmp_path, 20, [*COMMANDS].index(case), whole.pace, number):
        assert bits(folder) == bits(whole.folder)


# --- Stopped ----------------------------------------------------------------------------------------------------------

HELD = """
import os, time
from utils.tasks import number
from utils.tasks.number import *
calls = 0
def reward_func(*completions, items):
    global calls
    calls += 1
    while calls > 8 and os.path.exists("HOLD"):
        open("HOLD.reached", "w").close()
        time.sleep(0.01)
    return number.reward_func(*completions, items=items)
"""


@pytest.fixture
def held(command, tmp_path):
    """A run that waits for a reward, in an update that is not the first, until a file is removed."""
    hold, reached = tmp_path / "hold", tmp_path / "hold.reached"
    (tmp_path / "held.py").write_text(HELD.replace("HOLD", str(hold)))
    hold.touch()

    def begin(case):
        name, flags = command(case)
        own = [*flags, "--task", tmp_path / "held.py", "--output-dir", tmp_path / "run"]
        process = start(script, name, own)
        until(process, reached.exists)
        assert process.exitcode is None, process.err()
        return process, hold

    return begin


def test_a_command_that_is_told_to_end_says_how_to_go_on_and_that_gives_the_same_bits(command, uninterrupted, tmp_path):
    name, flags = command("ippo critic 2 tldr")
    env, folder = os.environ | {"OMP_NUM_THREADS": "1"}, tmp_path / "run"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": env}
    process = subprocess.Popen([sys.executable, f"{name}.py", *flags, "--output-dir", folder], **pipes)
    while not (folder / "metrics.csv").exists() and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    _, error = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, error
    last = error.splitlines()[-1]
    done, how = re.fullmatch(
        r"ippo_llm.py: stopped by SIGTERM after update ([1-5]) of 6; go on with: (.*)", last
    ).groups()
    assert kept(folder) == [int(done)] and "Traceback" not in error
    going = subprocess.run([sys.executable, *how.split()[1:]], capture_output=True, text=True, cwd=ROOT, env=env)
    assert (
        going.returncode == 0 and f"going on from {folder}/checkpoints/update_00000{done}: {done} of 6" in going.stdout
    )
    assert bits(folder) == bits(uninterrupted(name, flags).folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("case", ["iac head 1 number", "ppo 2 number"])
def test_a_signal_ends_a_run_after_the_update_under_way(case, number, held, command, uninterrupted, tmp_path):
    (name, flags), folder = command(case), tmp_path / "run"
    process, hold = held(case)
    before = len(read_rows(folder / "metrics.csv"))
    os.kill(process.pid, number)
    until(process, lambda: "once more, and it stops at once" in process.err())
    os.kill(process.pid, number)  # as `timeout` does, and not taken for a second one
    hold.unlink()
    ended(process)
    assert process.exitcode == 128 + number and "Traceback" not in process.err(), process.err()
    assert f"go on with: python {name}.py --resume {folder}" in process.err().splitlines()[-1]
    assert kept(folder) == [len(read_rows(folder / "metrics.csv"))] == [before + 1]
    go_on(name, folder)
    assert bits(folder) == bits(uninterrupted(name, flags).folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_at_once(number, held, command, uninterrupted, tmp_path):
    name, flags = command("iac head 1 number")
    process, hold = held("iac head 1 number")
    os.kill(process.pid, number)
    until(process, lambda: "once more, and it stops at once" in process.err())
    time.sleep(1.1)
    os.kill(process.pid, number)
    assert ended(process, 5).exitcode == -number and kept(tmp_path / "run") == []
    hold.unlink()
    go_on(name, tmp_path / "run")
    assert bits(tmp_path / "run") == bits(uninterrupted(name, flags).folder)


def test_of_two_runs_in_one_folder_the_second_is_refused_and_the_first_unharmed(held, command, uninterrupted, tmp_path):
    (name, flags), folder = command("iac head 1 number"), tmp_path / "run"
    first, hold = held("iac head 1 number")
    for more in (["--resume", folder], [*flags, "--output-dir", folder, "--overwrite"]):
        second = ended(start(script, name, more), 30)
        assert second.exitcode == 2
        assert second.err() == f"{name}.py: error: another run is under way in {folder}\n"
    assert first.exitcode is None
    hold.unlink()
    assert ended(first).exitcode == 0
    assert bits(folder) == bits(uninterrupted(name, flags).folder)


# --- Crashed at any operation on files --------------------------------------------------------------------------------

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree", "shutil.move"}


def crash_at(k):
    """End this process, all at once, at its k-th change of files from now on: 1 the first."""
    counted = itertools.count(1)

    def crash(at_once=True):
        if next(counted) == k:
            return os._exit(CRASHED) if at_once else True

    def hook(event, given):
        if event in CHANGES or event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            crash()

    def fsync(file):  # what is written outlives a process, if not the machine
        crash()

    def serialize_file(tensors, path, *rest, original=safetensors.torch.serialize_file, **known):
        halfway = crash(at_once=False)
        original(tensors, path, *rest, **known)
        if halfway:
            with open(path, "r+b") as file:
                file.truncate(os.path.getsize(path) // 2)
            os._exit(CRASHED)

    os.fsync, safetensors.torch.serialize_file = fsync, serialize_file
    sys.addaudithook(hook)


def write_some(folder, text):
    """What stands in for agents."""
    for name in ("a.txt", "agent_0/b.txt", "agent_0/critic/c.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{text} {name}")


def contents(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in checkpoint.files_in(path)}


def prepared(folder, case, write):
    """A folder as it is before a checkpoint after update 3 is written; `write` writes one after another."""
    for step in {"first": [], "second": [2], "pruned": [1, 2], "damaged": [2, 3]}[case]:
        checkpoint.write_checkpoint(folder, step, lambda path: write(path, step), {"step": step}, 9)
    if case == "damaged":
        (folder / "update_000003" / checkpoint.STATE).write_text("{}")
    folder.mkdir(exist_ok=True)


def crash_everywhere(folder, case, write):
    """Crash at every change of files of a save: what is whole then is the earlier checkpoint, or the new one."""
    os.fsync = lambda file: None
    prepared(folder / "before", case, write)
    save = functools.partial(
        checkpoint.write_checkpoint,
        step=3,
        write=lambda path: write(path, 3),
        state={"step": 3},
        keep=1 if case == "pruned" else 2,
    )
    shutil.copytree(folder / "before", folder / "after")
    save(folder / "after")
    states = {3: contents(folder / "after/update_000003")}
    if case != "first":
        states[2] = contents(folder / "before/update_000002")
    seen = []
    for k in itertools.count(1):
        shutil.rmtree(folder / "now", ignore_errors=True)
        shutil.copytree(folder / "before", folder / "now")
        if not (pid := os.fork()):
            crash_at(k)
            save(folder / "now")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, CRASHED), code
        path, state = checkpoint.newest_whole(folder / "now", lambda told: None)
        seen.append(state and state["step"])
        if path is None:
            assert case == "first", f"no checkpoint is there after a crash at change {k}"
        else:
            assert contents(path) == states[state["step"]]
        if code == 0:
            break
        save(folder / "now")  # nothing that is left is in the way
        path, _ = checkpoint.newest_whole(folder / "now")
        assert contents(path) == states[3]
        assert [path.name for path in (folder / "now").iterdir() if path.suffix == ".writing"] == []
    before = None if case == "first" else 2
    change = seen.index(3)
    assert change > 10 and {*seen[:change]} == {before} and {*seen[change:]} == {3}


def crash_everywhere_of_a_team(folder, case, model):
    """With the files that a team has: two states of it, of updates 2 and 3."""
    flags = {"model": (model,), "task": "number", "max_new_tokens": 4, "train_size": 8, "rollout_buffer_size": 8}
    flags |= {"num_train_epochs": 1, "num_agents": 1, "use_separate_critic": True, "eval_interval": 0}
    agents, run = ippo_llm.main(ippo_llm.Args(**flags, output_dir=str(folder / "run")))

    def write(path, step):
        with torch.no_grad():
            agents[0].value_head[0].weight.fill_(step)
        run.save(path, checkpoint=True)

    crash_everywhere(folder, case, write)


@pytest.mark.parametrize("case", ["first", "second", "pruned", "damaged"])
def test_a_crash_at_any_change_of_files_leaves_the_earlier_checkpoint_or_the_new_one(case, tmp_path):
    process = ended(start(crash_everywhere, tmp_path, case, write_some))
    assert process.exitcode == 0, process.err()


@pytest.mark.parametrize("case", ["first", pytest.param("second", marks=pytest.mark.slow), "pruned", "damaged"])
def test_a_crash_anywhere_while_a_team_is_saved_leaves_the_earlier_checkpoint_or_the_new_one(case, small, tmp_path):
    process = ended(start(crash_everywhere_of_a_team, tmp_path, case, small))
    assert process.exitcode == 0, process.err()


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, replace = set(), os.replace

    def fsync(file, original=os.fsync):
        synced.add(os.fstat(file).st_ino)
        original(file)

    def replaced(source, target):
        if Path(target).name == "update_000003":
            assert {path.stat().st_ino for path in (source, *source.rglob("*"))} <= synced
            synced.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaced)
    checkpoint.write_checkpoint(tmp_path / "there", 3, lambda path: write_some(path, 3), {}, 1)
    assert synced == {(tmp_path / "there").stat().st_ino}  # the name


@pytest.mark.parametrize("k", [1, 12, 60, 90, 150])
@pytest.mark.parametrize("case", ["ippo head 1 number", "ppo guess"])
def test_a_run_that_crashed_at_a_change_of_files_gives_the_same_bits(case, k, command, uninterrupted, tmp_path):
    (name, flags), folder = command(case), tmp_path / "run"
    own = [*flags, "--output-dir", folder, "--save-interval", "1"]
    process = ended(start(script, name, own, functools.partial(crash_at, k)))
    assert process.exitcode == CRASHED, process.err()
    if (folder / "config.json").exists():
        go_on(name, folder)
    else:
        assert ended(start(script, name, own)).exitcode == 0
    assert bits(folder) == bits(uninterrupted(name, flags).folder)


@pytest.mark.parametrize("k", [3, 4, 5, 6, 10, 30])
def test_a_run_that_crashed_while_it_replaced_another_is_one_of_both(k, begun, command, uninterrupted):
    folder, (name, flags) = begun(), command("ippo head 1 number")
    own = [*flags, "--seed", "2", "--output-dir", folder, "--overwrite"]
    process = ended(start(script, name, own, functools.partial(crash_at, k)))
    assert process.exitcode == CRASHED, process.err()
    if (folder / "config.json").exists():
        go_on(name, folder)
        seed = json.loads((folder / "config.json").read_text())["args"]["seed"]
        assert bits(folder) == bits(uninterrupted(name, flags + ["--seed", str(seed)]).folder)


# --- A full disk ------------------------------------------------------------------------------------------------------


def full_above(size):
    """From now on files of this process can't grow beyond so many bytes, as if the disk were full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("size, flags", [(1000, []), (30_000, []), (4500, ["--save-interval", "0"])])
@pytest.mark.parametrize("case", ["ippo head 1 number", "ppo guess"])
def test_a_full_disk_is_one_line_and_the_checkpoints_are_as_they_were(
    case, size, flags, begun, command, uninterrupted, tmp_path
):
    folder, (name, _) = begun(case), command(case)
    before = {path: contents(path) for path in checkpoint.checkpoints(folder / "checkpoints")}
    process = ended(start(script, name, ["--resume", folder, *flags], functools.partial(full_above, size)))
    assert process.exitcode == 1, process.err()
    last = process.err().splitlines()[-1]
    assert last.startswith(f"{name}.py: error: ") and "can't be written" in last and "File too large" in last
    assert "Traceback" not in process.err()
    assert {path: contents(path) for path in before} == before and kept(folder) == [1, 2, 3]
    assert [path.name for path in folder.glob("checkpoints/*.*")] == []
    go_on(name, folder)
    assert bits(folder) == bits(uninterrupted(*command(case)).folder)


# --- Damaged ----------------------------------------------------------------------------------------------------------


def damaged(content, moments):
    """A file with a byte changed, or its end lost."""
    at = moments.randrange(len(content))
    if moments.random() < 0.3:
        return content[:at]
    return content[:at] + bytes([content[at] ^ moments.choice([1, 2, 4, 8, 16, 32, 64, 128, 255])]) + content[at + 1 :]


@pytest.mark.parametrize("case", ["ippo head 1 number", "ppo guess"])
def test_of_1000_damages_to_a_checkpoint_each_is_found(case, begun):
    """Or changes nothing, as another space in the manifest does."""
    moments, folder = random.Random(case), begun(case) / "checkpoints"
    path, state = checkpoint.newest_whole(folder)
    manifest = checkpoint.read_json(path / checkpoint.MANIFEST)
    for earlier in checkpoint.checkpoints(folder)[:-1]:
        shutil.rmtree(earlier)
    files, found = checkpoint.files_in(path), 0
    for _ in range(1000):
        file = moments.choice([*files, path / checkpoint.MANIFEST])
        content = file.read_bytes()
        file.write_bytes(damaged(content, moments))
        try:
            assert checkpoint.newest_whole(folder, lambda told: None) == (path, state)
            assert file.name == checkpoint.MANIFEST and checkpoint.read_json(file) == manifest
        except UserError as error:
            found += 1
            assert "\n" not in str(error) and str(error) == f"no checkpoint in {folder} is whole: there are 1"
        file.write_bytes(content)
    assert found > 980 and checkpoint.newest_whole(folder) == (path, state)


def test_an_earlier_checkpoint_is_used_for_a_damaged_one_and_that_is_said(begun):
    moments, folder = random.Random(0), begun() / "checkpoints"
    path, _ = checkpoint.newest_whole(folder)
    for file in checkpoint.files_in(path):
        content, told = file.read_bytes(), []
        file.write_bytes(content[: moments.randrange(len(content))])
        assert checkpoint.newest_whole(folder, told.append)[0].name == "update_000002"
        (line,) = told
        assert line.startswith(f"{path} is not whole: ") and file.name in line and line.endswith("an earlier one")
        assert "\n" not in line
        file.write_bytes(content)
    file.unlink()
    assert checkpoint.newest_whole(folder, told.append)[0].name == "update_000002" and "is missing" in told[-1]


def test_a_run_goes_on_from_an_earlier_checkpoint_to_the_same_bits(begun, command, uninterrupted):
    folder, (name, flags) = begun(), command("ippo head 1 number")
    damage(folder / "checkpoints/update_000003")
    process = go_on(name, folder)
    assert "update_000003 is not whole" in process.out() and "update_000002: 2 of 6 updates are done" in process.out()
    assert bits(folder) == bits(uninterrupted(name, flags).folder)


NOISY = """
import random, numpy, torch
from utils.tasks.tldr import *
def reward_func(*completions):
    return [random.random() + random.gauss(0, 1) + numpy.random.rand() + torch.rand(()).item() for _ in completions[0]]
"""


@pytest.mark.parametrize("case", ["ippo head 1 tldr", "ppo 2 tldr"])
def test_a_task_that_draws_from_any_generator_draws_the_same(case, command, tmp_path):
    (name, flags), folder = command(case), tmp_path / "run"
    (tmp_path / "noisy.py").write_text(NOISY)
    own = [*flags, "--task", tmp_path / "noisy.py", "--save-interval", "1", "--keep-checkpoints", "9"]
    assert ended(start(script, name, [*own, "--output-dir", folder])).exitcode == 0
    whole = bits(folder)
    for step in (4, 5, 6):
        shutil.rmtree(folder / f"checkpoints/update_00000{step}")
    assert "3 of 6 updates are done" in go_on(name, folder).out()
    assert bits(folder) == whole


def test_checkpoints_that_are_all_damaged_are_one_line(begun):
    folder = begun()
    for path in checkpoint.checkpoints(folder / "checkpoints"):
        damage(path)
    before = contents(folder)
    with pytest.raises(UserError, match="^no checkpoint in .* is whole: there are 3$"):
        main("ippo_llm", folder)
    assert contents(folder).keys() - before.keys() <= {".lock"}
    assert all(contents(folder)[name] == before[name] for name in before)


def test_a_manifest_that_is_too_deep_is_one_line(begun):
    folder = begun() / "checkpoints"
    (folder / "update_000003" / checkpoint.MANIFEST).write_text("[" * 1_000_000)
    assert checkpoint.newest_whole(folder, lambda told: None)[0].name == "update_000002"


def test_a_checkpoint_that_was_just_written_stays_where_later_ones_are_damaged(tmp_path):
    """They are of a run that went on from an earlier one, with fewer checkpoints to keep."""
    for step in (1, 2, 3):
        checkpoint.write_checkpoint(tmp_path, step, lambda path: write_some(path, step), {"step": step}, 3)
    for step in (2, 3):
        (tmp_path / f"update_00000{step}" / checkpoint.STATE).write_text("{}")
    checkpoint.write_checkpoint(tmp_path, 2, lambda path: write_some(path, 2), {"step": 2}, 1)
    assert checkpoint.newest_whole(tmp_path)[1] == {"step": 2}


class Planted:
    """Reading a pickle of it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def planted(tmp_path):
    """A pickle; that it was not read is checked, and that this can be seen."""
    content = pickle.dumps(Planted(tmp_path / "read"))
    yield content
    assert not (tmp_path / "read").exists()
    pickle.loads(content)
    assert (tmp_path / "read").exists()


PLACES = {
    "ippo critic 2 tldr": "model.safetensors value_head.safetensors optimizer_0.safetensors optimizer_0.json base.json "
    "config.json critic/model.safetensors critic/config.json",
    "ppo guess": "actor/adapter_model.safetensors critic/adapter_config.json reference/adapter_model.safetensors "
    "value_head.safetensors optimizer.safetensors optimizer.json base.json",
}
PLACES = [(case, f"agent_0/{file}") for case, files in PLACES.items() for file in files.split()]
PLACES += [(case, file) for case in ("ippo critic 2 tldr", "ppo guess") for file in ("state.json", "manifest.json")]


def only_one(folder):
    """The last of a run's checkpoints, now the only one."""
    *others, last = checkpoint.checkpoints(folder / "checkpoints")
    for path in others:
        shutil.rmtree(path)
    return last


@pytest.mark.parametrize("case", ["ippo critic 2 tldr", "ppo guess"])
def test_a_pickle_in_a_checkpoint_is_not_read(case, begun, planted):
    path = only_one(begun(case))
    more = ["agent_0/pytorch_model.bin", "agent_0/optimizer.pt", "agent_9/training_args.bin", "state.pkl"]
    for name in [place for other, place in PLACES if other == case] + more:
        before = (path / name).read_bytes() if (path / name).exists() else None
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(planted)
        with pytest.raises(UserError, match="no checkpoint in .* is whole: there are 1$"):
            checkpoint.newest_whole(path.parent, lambda told: None)
        (path / name).write_bytes(before) if before else (path / name).unlink()
    assert checkpoint.newest_whole(path.parent)[0] == path


def fit_manifest(path):
    """Make a checkpoint's manifest that of its files, as one who plants files would."""
    files = {str(file.relative_to(path)): checkpoint.digest(file) for file in checkpoint.files_in(path)}
    del files[checkpoint.MANIFEST]
    (path / checkpoint.MANIFEST).write_text(json.dumps(files))


@pytest.mark.parametrize("case, place", [(case, place) for case, place in PLACES if place != "manifest.json"])
def test_a_pickle_that_the_manifest_knows_is_one_line_and_not_read(case, place, begun, command, planted):
    folder, (name, _) = begun(case), command(case)
    path = only_one(folder)
    (path / place).write_bytes(planted)
    fit_manifest(path)
    with pytest.raises(UserError) as error:
        main(name, folder)
    assert "\n" not in str(error.value), str(error.value)


@pytest.mark.parametrize("case, weights", [("ippo critic 2 tldr", "model"), ("ppo guess", "actor/adapter_model")])
def test_a_pickle_in_place_of_weights_is_one_line_and_not_read(case, weights, begun, command, planted):
    folder, (name, _) = begun(case), command(case)
    path = only_one(folder)
    (path / f"agent_0/{weights}.safetensors").unlink()
    (path / f"agent_0/{weights}.bin").write_bytes(planted)
    (path / "agent_0/pytorch_model.bin").write_bytes(planted)
    fit_manifest(path)
    with pytest.raises(UserError) as error:
        main(name, folder)
    assert "\n" not in str(error.value), str(error.value)


# --- Flags ------------------------------------------------------------------------------------------------------------


def test_flags_that_differ_are_all_named_before_anything_is_loaded(begun, monkeypatch):
    monkeypatch.setattr(ippo_llm, "load_team", None)
    folder = begun()
    before = contents(folder)
    more = ["--seed", "9", "--gamma", "0.5", "--num-train-epochs", "1", "--keep-checkpoints", "7"]
    with pytest.raises(UserError) as error:
        main("ippo_llm", folder, *more)
    differing = "--gamma 1.0 there, 0.5 here; --seed 1 there, 9 here; --num-train-epochs 2 there, 1 here"
    assert str(error.value) == f"--resume {folder} goes on with that run's flags, and these differ: {differing}"
    assert error.value.exit_code == 2 and contents(folder) == before


def test_flags_that_are_not_given_are_those_of_the_run(begun):
    folder = begun()
    there = json.loads((folder / "config.json").read_text())["args"]
    args = vars(resumed("ippo_llm", folder, "--save-interval", "5"))
    assert json.loads(json.dumps(args)) == there | {"resume": str(folder), "save_interval": 5}
    assert there["train_size"] == 12 and there["save_interval"] == 1
    assert isinstance(args["model"], tuple)


def test_a_run_may_go_on_for_longer_and_be_saved_otherwise(begun):
    folder = begun()
    _, run = main("ippo_llm", folder, "--num-train-epochs", "3", "--save-interval", "2", "--keep-checkpoints", "3")
    assert len(run.rows) == run.step == 9 and kept(folder) == [6, 8, 9]
    args = resumed("ippo_llm", folder)
    assert (args.num_train_epochs, args.save_interval, args.keep_checkpoints) == (3, 2, 3)


@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_checkpoints_are_kept(keep, begun):
    folder = begun()
    main("ippo_llm", folder, "--keep-checkpoints", str(keep))
    assert kept(folder) == [4, 5, 6][-keep:]


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(UserError, match="^--resume takes a run's folder, or latest, and .*nothing has no config.json$"):
        resumed("ippo_llm", tmp_path / "nothing")
    for content in ("", "{", "[]", "{}", '{"args": 3}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match="^--resume: .*config.json can't be read: ") as error:
            resumed("ippo_llm", tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["iac_llm", "ppo_llm"])
def test_a_run_of_another_script_is_one_line(name, begun):
    with pytest.raises(UserError, match=r"^--resume: .* is a run of another script or version: .*ppo_epochs") as error:
        resumed(name, begun())
    assert "\n" not in str(error.value)


def test_the_latest_run_is_that_which_wrote_last(begun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="^--resume latest: there is no run of ippo_llm.py under runs/$"):
        resumed("ippo_llm", "latest")
    runs = [begun(name=f"runs/{name}") for name in ("ippo_llm__z", "ippo_llm__a", "iac_llm__b")]
    for seconds, run in enumerate(runs, 1_000_000_000):
        for path in (run, *run.glob("*.*")):
            os.utime(path, (seconds, seconds))
    assert resumed("ippo_llm", "latest").resume == "runs/ippo_llm__a"
    (runs[0] / "metrics.csv").touch()
    assert resumed("ippo_llm", "latest").resume == "runs/ippo_llm__z"
    _, run = main("ippo_llm", "latest")
    assert run.step == 6 and (runs[0] / "agent_0").is_dir()


def test_a_run_without_checkpoints_begins_anew(begun, command, uninterrupted):
    folder, (name, flags) = begun(), command("ippo head 1 number")
    shutil.rmtree(folder / "checkpoints")
    assert "going on from" not in go_on(name, folder).out()
    assert bits(folder) == bits(uninterrupted(name, flags).folder)


def test_lines_that_were_half_written_are_left_out(begun, command, uninterrupted):
    folder, (name, flags) = begun(), command("ippo head 1 number")
    for file in ("metrics.csv", "samples.jsonl"):
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: content[:-1].rfind(b"\n") + 20])
    go_on(name, folder)
    assert bits(folder) == bits(uninterrupted(name, flags).folder)


def test_a_run_that_has_ended_ends_again_with_the_same_bits(begun, command, uninterrupted):
    folder, (name, flags) = begun(), command("ippo head 1 number")
    for _ in range(2):
        go_on(name, folder)
        assert bits(folder) == bits(uninterrupted(name, flags).folder)


def test_a_file_that_someone_else_put_beside_the_checkpoints_is_no_harm(begun):
    folder = begun()
    (folder / "checkpoints/.directory").write_text("a file manager's")
    main("ippo_llm", folder)
    assert kept(folder) == [1, 2, 3, 4, 5, 6]


def test_a_file_cut_off_anywhere_gives_its_whole_lines(begun):
    """Also within a letter, or between the two ends of a line that csv writes."""
    for name, read, head in (("metrics.csv", read_rows, 1), ("samples.jsonl", read_lines, 0)):
        path = begun(name=name) / name
        content = path.read_bytes() + '{"text": "größer"}\n'.encode() * (head == 0)
        path.write_bytes(content)
        whole = [repr(line) for line in read(path)]
        for at in range(len(content)):
            path.write_bytes(content[:at])
            lines = max(0, content[:at].count(b"\n") - head)
            ended = content[:at].endswith(b"\r") and at > content.find(b"\n")
            assert [repr(line) for line in read(path)] in (whole[:lines], whole[: lines + ended])


def test_metrics_that_lack_updates_are_one_line(begun):
    folder = begun()
    (folder / "metrics.csv").unlink()
    with pytest.raises(UserError, match="^.*metrics.csv has 0 of the 3 updates that are done$"):
        main("ippo_llm", folder)


@pytest.mark.parametrize("case", ["ippo head 1 number", "ppo guess"])
def test_a_model_that_has_changed_since_is_one_line(case, command, small, tmp_path):
    name, flags = command(case, str(shutil.copytree(small, tmp_path / "model")))
    folder = tmp_path / "run"
    process = ended(start(script, name, [*flags, "--output-dir", folder, "--save-interval", "1"]))
    assert process.exitcode == 0, process.err()
    weights = safetensors.torch.load_file(tmp_path / "model/model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    safetensors.torch.save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    before = contents(folder)
    with pytest.raises(UserError, match="began with another model|is of the base .*: the weights differ$") as error:
        main(name, folder)
    assert "\n" not in str(error.value) and contents(folder) == before
