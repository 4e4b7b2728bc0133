"""Two processes under torchrun or accelerate launch train one run together, and go on to the same bits."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import TINY, build_model, make_args, make_ppo_args, read_metrics
from processes import ROOT, assert_same, command, finish, finish_two, finish_two_works, saved_steps, start_two
from transformers import AutoTokenizer

import ippo_llm
import ppo_llm
from utils import distributed

LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc-per-node 2",
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0",
}
SMALL = "--rollout-buffer-size 8 --mini-batch-size 4 --train-size 16 --num-train-epochs 1 --max-new-tokens 24"
TURNS = "--task number --num-turns 3 --max-new-tokens 4"


def launch(launcher, script, *flags, folder=ROOT):
    """Run a script in two processes; what it prints."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *LAUNCHERS[launcher].split(), str(ROOT / script), *flags]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


TASK = """
import datasets
def numbers(size, seed): return datasets.Dataset.from_list([{"number": k} for k in range(size)])
train_dataset = eval_dataset = numbers
def formatters(item): return "Guess it."
def reward_func(*texts, items): return [float(item["number"] ** 2) for item in items]
"""


@pytest.mark.parametrize("launcher, eval_size, mean", [("torchrun", 5, 6.0), ("accelerate", 1, 0.0)])
def test_two_processes_train_one_run(tmp_path, launcher, eval_size, mean):
    (tmp_path / "squares.py").write_text(TASK)
    flags = f"{SMALL} --eval-size {eval_size} --task squares.py"
    shown = launch(launcher, "iac_llm.py", *flags.split(), folder=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert shown.count("the run is in") == 1
    rows = read_metrics(folder)
    assert [int(row["global_step"]) for row in rows] == [8, 16]  # 4 of 8 joint samples in each process
    rewards = [float(row["reward_mean"]) for row in rows]
    assert sum(rewards) / 2 == pytest.approx(sum(k**2 for k in range(16)) / 16)  # each item once
    assert float(rows[-1]["eval/reward_mean"]) == pytest.approx(mean)  # over items that do not divide among processes
    state = json.loads((folder / "checkpoints/update_000002/state.json").read_text())
    assert len(state["random"]) == 2 and state["random"][0] != state["random"][1]


def test_two_processes_go_on_to_the_same_bits(tmp_path):
    run = tmp_path / "run"
    flags = f"{SMALL} --eval-size 5 {TURNS}"
    finish_two("ippo_llm", *flags.split(), "--output-dir", run, "--save-interval", "1")
    shutil.copytree(run, tmp_path / "whole")
    shutil.rmtree(run / "checkpoints/update_000002")
    finish_two("ippo_llm", "--resume", run)
    assert_same(run, tmp_path / "whole")
    assert [int(row["global_step"]) for row in read_metrics(run)] == [8, 16]


# --- Held-out items ---------------------------------------------------------------------------------------------------


class Env:
    """A game of one turn, whose reward tells its seed and the process."""

    def reset(self, seed):
        self.seed = seed
        return "Guess it.", {}

    def step(self, answer):
        return "", self.seed**2 + 100.0 * distributed.rank(), True, False, {}


def reward_func(*texts, items):
    return [item["seed"] ** 2 + 100.0 * distributed.rank() for item in items]


def evaluate(case, shard, folder):
    """Work for a process: the mean rewards of one held-out item, and of three."""
    device = distributed.start()
    task = SimpleNamespace(formatters=lambda item: "Guess it.", reward_func=reward_func)
    if case == "ippo":
        script = ippo_llm
        args = make_args(max_new_tokens=2, shard=shard)
    else:
        script = ppo_llm
        flags = {"task": "number", "max_turns": 1} if case == "ppo task" else {}
        args = ppo_llm.resolve_args(make_ppo_args(shard=shard, **flags))
    if case == "ppo games":
        task = Env
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    agents = script.build_agents(args, device, 1, build_model(tokenizer), tokenizer)
    means = []
    for seeds in ([3], [3, 4, 5]):
        means.append(script.evaluate(agents, task, [{"seed": seed} for seed in seeds], args).item())
    (folder / f"{distributed.rank()}.json").write_text(json.dumps(means))


@pytest.mark.parametrize("case, shard", [("ippo", False), ("ippo", True), ("ppo task", False), ("ppo games", False)])
def test_held_out_items_count_once_also_where_a_process_has_none(tmp_path, case, shard):
    finish_two_works(evaluate, case, shard, tmp_path)
    for rank in range(2):
        means = json.loads((tmp_path / f"{rank}.json").read_text())
        assert means == [9.0, pytest.approx((9 + 116 + 25) / 3)]  # 4 is of the second process


# --- Trees ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["--no-shard", "--shard"])
def test_two_processes_grow_trees_side_by_side(small_model, tmp_path, shard):
    flags = "--task number --num-turns 2 --num-generations 2 --rollout-buffer-size 8 --mini-batch-size 4 "
    flags += "--train-size 4 --num-train-epochs 1 --max-new-tokens 3 --eval-size 1"
    finish_two("magrpo_llm", *flags.split(), shard, "--model", small_model, "--output-dir", tmp_path / "run")
    assert [int(row["global_step"]) for row in read_metrics(tmp_path / "run")] == [8, 16]


# --- One of them is killed --------------------------------------------------------------------------------------------


KILLED = [  # a command, the rank of the process that is killed, a flag more
    ("ippo head 1 number", 1, "--shard"),
    ("iac head 1 number", 0, "--no-shard"),
    ("maac 2 tldr", 1, "--no-shard"),
    ("maac 2 tldr", 0, "--shard"),
    ("ppo guess", 1, "--no-shard"),
    ("ppo guess", 1, "--shard"),
]


@pytest.mark.parametrize("case, victim, shard", KILLED)
def test_where_a_process_is_killed_the_other_ends_with_a_line_and_the_run_goes_on(
    small_model, tmp_path, case, victim, shard
):
    run = tmp_path / "run"
    script, flags = command(case, small_model)
    processes = start_two(script, *flags, shard, "--output-dir", run, "--save-interval", 1)
    other = processes[1 - victim]
    other.wait_until(lambda: saved_steps(run))
    processes[victim].signal(signal.SIGKILL)
    assert other.wait(60).exitcode == 1
    assert "Traceback" not in other.error and "Warning" not in other.error
    message = "error: another process of this run has ended: "
    assert other.error.splitlines()[-1].startswith(f"{script}.py: {message}")
    assert (f"go on with: python {script}.py --resume {run}" in other.output) == (victim == 1)  # by the main process
    assert saved_steps(run)[-1] < 6
    if shard == "--shard" and script != "ppo_llm":  # a process alone has no whole agent
        assert not list(run.glob("agent_*"))

    finish_two(script, "--resume", run)
    assert [int(row["global_step"]) for row in read_metrics(run)] == [4, 8, 12, 16, 20, 24]


# --- Sampled ----------------------------------------------------------------------------------------------------------

NUMBER = f"{TURNS} --train-size 1152 --num-train-epochs 1 --eval-interval 0"
LEARN = {
    "ippo_llm": NUMBER,
    "iac_llm": NUMBER,
    "maac_llm": NUMBER,
    "ppo_llm": "--train-size 2560 --num-train-epochs 1 --evaluation-interval 0",
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Makes a run of one process that learns."""

    @functools.cache
    def make(script, seed):
        folder = tmp_path_factory.mktemp("one") / "run"
        finish(script, "--seed", seed, *LEARN[script].split(), "--output-dir", folder, seconds=600)
        return folder

    return make


def first_and_last(folder):
    """Mean rewards of a run's first and of its last four updates."""
    rewards = [float(row["reward_mean"]) for row in read_metrics(folder)]
    return sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("script", LEARN)
@pytest.mark.parametrize("shard", [[], ["--shard"]], ids=["whole", "sharded"])
def test_two_processes_that_sample_earn_as_much_as_one(one_process, tmp_path, script, seed, shard):
    finish_two(script, "--seed", seed, *LEARN[script].split(), "--output-dir", tmp_path / "two", *shard, seconds=600)
    first, last = first_and_last(tmp_path / "two")
    assert last > first + 0.15
    assert last == pytest.approx(first_and_last(one_process(script, seed))[1], abs=0.15)
