"""Short runs of the scripts in processes of their own: begun, stopped, crashed, resumed; and what they leave."""

import atexit
import fcntl
import functools
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import socket
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
import utils.run.log
from utils.cli import command_line
from utils.run import checkpoint
from utils.same import compare

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {module.__name__: module for module in (ippo_llm, iac_llm, maac_llm, magrpo_llm, ppo_llm)}
CONTEXT = multiprocessing.get_context("forkserver")
OUTPUT = tempfile.TemporaryDirectory()
NUMBERS = itertools.count()

# --- Processes --------------------------------------------------------------------------------------------------------


class Process:
    """work(*arguments) under way in a process of its own, forked from one that has imported everything already."""

    def __init__(self, work, *arguments):
        start_server()
        path = Path(OUTPUT.name) / str(next(NUMBERS))
        self.output_path = path.with_suffix(".out")
        self.error_path = path.with_suffix(".err")
        streams = (self.output_path, self.error_path)
        self.process = CONTEXT.Process(target=with_streams, args=(streams, work, arguments))
        self.process.start()
        atexit.register(self.process.kill)  # a failed test may leave it

    @property
    def exitcode(self):
        """None while it runs; negative: the signal that ended it."""
        return self.process.exitcode

    @property
    def output(self):
        return self.output_path.read_text() if self.output_path.exists() else ""

    @property
    def error(self):
        return self.error_path.read_text() if self.error_path.exists() else ""

    def wait(self, seconds=120):
        """The process, which has to end by itself."""
        self.process.join(seconds)
        if self.exitcode is None:
            self.process.kill()
            raise AssertionError(f"it does not end: {self.error[-2000:]}")
        return self

    def wait_until(self, condition, seconds=60):
        """Wait for a condition, or for its end."""
        start = time.monotonic()
        while not condition() and self.exitcode is None:
            assert time.monotonic() - start < seconds, self.error[-2000:]
            time.sleep(0.005)

    def signal(self, number):
        os.kill(self.process.pid, number)

    def join(self, seconds):
        self.process.join(seconds)


@functools.cache
def start_server():
    """Start the process from which the others are forked."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}):
        CONTEXT.set_forkserver_preload([__name__, "pytest"])
        multiprocessing.forkserver.ensure_running()


def with_streams(paths, work, arguments):
    """What a process does: the work, with its standard output and error in two files."""
    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    torch.set_num_threads(1)
    work(*arguments)


def run_script(name, flags, before=None):
    """Work for a process: a script, as if from the command line. `before` is called first."""
    utils.run.log.draw_curves = lambda *_: None  # takes longer than all the rest
    os.fsync = lambda file: None  # what is written outlives a process that is killed, if not the machine
    sys.argv = [f"{name}.py", *map(str, flags)]
    if before:
        before()
    command_line(SCRIPTS[name].main, SCRIPTS[name].Args, SCRIPTS[name].__doc__)


def start(name, *flags, before=None):
    """A script under way."""
    return Process(run_script, name, flags, before)


def finish(name, *flags, seconds=120):
    """A script that has ended well."""
    process = start(name, *flags).wait(seconds)
    assert process.exitcode == 0, process.error
    return process


def set_environment(values, before=None):
    os.environ.update(values)
    if before:
        before()


def environments_of_two():
    """What a launcher puts into the environments of two processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # a free one
    group = {"WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [group | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]


def start_two(name, *flags, before=(None, None)):
    """Two processes of a script under way, as a launcher starts them; each first calls its own of `before`."""
    processes = []
    for environment, own in zip(environments_of_two(), before):
        processes.append(start(name, *flags, before=functools.partial(set_environment, environment, own)))
    return processes


def work_in(environment, work, *arguments):
    set_environment(environment)
    work(*arguments)


def finish_two_works(work, *arguments, seconds=120):
    """work(*arguments) in two processes of a group, that have ended well."""
    processes = [Process(work_in, environment, work, *arguments) for environment in environments_of_two()]
    for process in processes:
        assert process.wait(seconds).exitcode == 0, process.error
    return processes


def finish_two(name, *flags, before=(None, None), seconds=120):
    """Two processes of a script that have ended well."""
    for process in start_two(name, *flags, before=before):
        assert process.wait(seconds).exitcode == 0, process.error


# --- Commands ---------------------------------------------------------------------------------------------------------

SIX_UPDATES = "--train-size 12 --num-train-epochs 2 --rollout-buffer-size 4 --mini-batch-size 2"
HELD_OUT = "--eval-size 2 --eval-interval 3"
NUMBER = "--task number --num-turns 3 --max-new-tokens 4"
COMMANDS = {
    "ippo": ("ippo_llm", f"{SIX_UPDATES} {HELD_OUT} {NUMBER} --num-agents 1"),
    "iac": ("iac_llm", f"{SIX_UPDATES} {HELD_OUT} --max-new-tokens 8 --use-separate-critic --lora-rank 2"),
    "maac": ("maac_llm", f"{SIX_UPDATES} {HELD_OUT} {NUMBER} --lora-rank 2"),
    "magrpo": ("magrpo_llm", f"{SIX_UPDATES} {HELD_OUT} {NUMBER} --train-size 3 --num-generations 4"),
    "ppo": ("ppo_llm", f"{SIX_UPDATES} {HELD_OUT} --max-new-tokens 4"),
}
STEPS = {"ippo": 4, "iac": 8, "maac": 6, "magrpo": 4, "ppo": 8}  # of optimisers in an update


def command(case, model):
    """The script and the flags of a command, by its name."""
    name, flags = COMMANDS[case]
    return name, [*flags.split(), "--model", model]


# --- Runs that nothing stops, made once -------------------------------------------------------------------------------


@contextmanager
def alone(path):
    """Within it no other process is within it with that path."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_whole(folder, case, model, *more):
    """The folder of a run that nothing stops, with all of its six checkpoints, made once."""
    name, flags = command(case, model)
    run = folder / " ".join([case, Path(model).name, *more]).replace(" ", "_")
    with alone(run.with_name(run.name + ".lock")):
        if not (run / "agent_0").exists():
            own = ["--output-dir", run, "--overwrite", "--save-interval", 1, "--keep-checkpoints", 9]
            finish(name, *flags, *more, *own)
    return run


def copy_begun(whole, folder):
    """A copy of a whole run, but for the later three of its six checkpoints and for its agents."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("update_00000[456]", "curves.png"))
    for path in (*folder.glob("agent_*"), *folder.glob("critic")):
        shutil.rmtree(path)
    return folder


# --- What runs leave --------------------------------------------------------------------------------------------------


def assert_same(one, other):
    """Two runs measured, sampled and learned the same to the bit; times and speeds aside."""
    same = compare(one, other)
    assert any(name.startswith("agent_0/") and name.endswith(".safetensors") for name in same)
    assert [name for name in same if not same[name]] == []


def saved_steps(folder):
    """The updates that a run has checkpoints of."""
    return [int(path.name.removeprefix("update_")) for path in checkpoint.checkpoints(folder / "checkpoints")]


def cut(run, folder):
    """A copy of a run without its last checkpoint."""
    shutil.copytree(run, folder)
    shutil.rmtree(checkpoint.checkpoints(folder / "checkpoints")[-1])
    return folder


def largest_difference(one, other):
    """Of what two folders have in safetensors files of the same names."""
    names = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert names == sorted(path.relative_to(other) for path in other.rglob("*.safetensors"))
    largest = 0.0
    for name in names:
        ours = load_file(one / name)
        theirs = load_file(other / name)
        assert ours.keys() == theirs.keys()
        largest = max(largest, *(float((ours[key] - theirs[key]).abs().max()) for key in ours))
    return largest


def contents(path):
    """The bytes of all files in a folder, by name."""
    return {str(file.relative_to(path)): file.read_bytes() for file in checkpoint.files_in(path)}


# --- A run that waits -------------------------------------------------------------------------------------------------

WAITING_TASK = """
import os, time
from utils.tasks import number
from utils.tasks.number import *
calls = 0
def reward_func(*completions, items):
    global calls
    calls += len(items) > HELD_OUT
    while calls > 3 and os.path.exists("WAIT"):
        open("WAIT.reached", "w").close()
        time.sleep(0.01)
    return number.reward_func(*completions, items=items)
"""


def write_waiting_task(folder, held_out=2):
    """<folder>/waiting.py, a task that waits in an update that is not the first, until the file returned is removed.

    Of so many items at most it is asked for held-out rewards, which it does not count.
    """
    obstacle = folder / "wait"
    (folder / "waiting.py").write_text(WAITING_TASK.replace("WAIT", str(obstacle)).replace("HELD_OUT", str(held_out)))
    obstacle.touch()
    return obstacle
