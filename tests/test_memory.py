"""Micro-batches, whose gradients add up to the mini-batch's; memory that runs out, and that grows."""

import json
import re
from pathlib import Path

import pytest
import torch
from processes import Process

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils.cli import UserError, parse
from utils.run import Run, failures
from utils.run.failures import is_out_of_memory

SCRIPTS = {"ippo": ippo_llm, "iac": iac_llm, "maac": maac_llm, "magrpo": magrpo_llm, "ppo": ppo_llm}
OUT_OF_MEMORY = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
OUT_OF_MEMORY += "to allocate 9 bytes. Error code 12 (Cannot allocate memory)"
SMALL = {"train_size": 12, "rollout_buffer_size": 4, "mini_batch_size": 4, "micro_batch_size": 4, "num_train_epochs": 1}
SMALL |= {"num_agents": 1, "max_new_tokens": 2, "num_turns": 2, "task": "number", "eval_interval": 0, "eval_size": 2}
MORE = {"magrpo": {"num_generations": 2, "train_size": 6}, "ppo": {"lora_rank": 4, "update_epochs": 1}}

every_script = pytest.mark.parametrize("script", SCRIPTS)
pytestmark = pytest.mark.usefixtures("in_tmp_path", "quick")


def train(script, folder="run", **flags):
    """The Run of three updates."""
    module = SCRIPTS[script]
    return module.main(module.Args(**(SMALL | MORE.get(script, {}) | {"output_dir": folder} | flags)))[1]


@every_script
def test_the_gradients_of_micro_batches_add_up(script):
    whole, parts = (train(script, str(size), micro_batch_size=size).rows[0] for size in (4, 1))
    names = {name for name in whole if name.endswith(("_loss", "grad_norm", "entropy", "explained_variance"))}
    assert len(names) >= 3
    for name in names:
        assert parts[name] == pytest.approx(whole[name], abs=1e-5), name


# --- Memory that runs out ---------------------------------------------------------------------------------------------


def exhaust(patch, script, name, calls, text=OUT_OF_MEMORY):
    """Let some calls of a script's function raise."""
    function = getattr(SCRIPTS[script], name)
    count = iter(range(1000))

    def failing(*values):
        if next(count) in calls:
            raise RuntimeError(text)
        return function(*values)

    patch.setattr(SCRIPTS[script], name, failing)


def calls_in_an_update(script, name):
    with pytest.MonkeyPatch.context() as patch:
        function = getattr(SCRIPTS[script], name)
        count = []
        patch.setattr(SCRIPTS[script], name, lambda *values: count.append(0) or function(*values))
        train(script, "counted", pause_at=1)
    return len(count)


@every_script
@pytest.mark.parametrize("phase", ["play", "learn"])
def test_memory_that_runs_out_ends_the_run_with_the_flag_that_takes_less(script, phase):
    """In the second of three updates; the command of the line goes on from the first."""
    name, what, flag = {
        "play": ("generate", "playing", "--hf-generate-chunk-size"),
        "learn": ("policy_forward", "learning", "--micro-batch-size"),
    }[phase]
    with pytest.MonkeyPatch.context() as patch:
        exhaust(patch, script, name, [calls_in_an_update(script, name)])
        with pytest.raises(UserError) as error:
            train(script)
    command = f"python {script}_llm.py --resume run {flag} 2"
    assert re.fullmatch(f"out of memory in {what}: {flag} 2 takes less; go on with: {command}", str(error.value))
    args = parse(SCRIPTS[script].Args, command.split()[2:], script=f"{script}_llm")
    assert SCRIPTS[script].main(args)[1].step == 3


def test_half_of_what_the_flag_was_takes_less_until_it_is_one(monkeypatch):
    exhaust(monkeypatch, "ippo", "policy_forward", range(99))
    for size, what in ((3, ": --micro-batch-size 1 takes less"), (1, ", with --micro-batch-size 1")):
        with pytest.raises(UserError, match=f"^out of memory in learning{what}$"):
            train("ippo", overwrite=True, micro_batch_size=size)


def test_each_of_four_processes_has_a_fourth_of_a_mini_batch(monkeypatch):
    monkeypatch.setattr(failures.distributed, "world_size", lambda: 4)
    error = failures.explain(torch.OutOfMemoryError(), SCRIPTS["ippo"].Args(), ["learn"], None)
    assert str(error) == "out of memory in learning: --micro-batch-size 2 takes less"


def test_an_evaluation_takes_less_by_the_flag_of_sampling(monkeypatch):
    exhaust(monkeypatch, "ippo", "generate", [calls_in_an_update("ippo", "generate")])
    with pytest.raises(UserError, match="^out of memory in (playing|evaluation): --hf-generate-chunk-size 2 takes"):
        train("ippo", eval_interval=1)


def test_errors_that_are_of_memory():
    for error in (torch.OutOfMemoryError("CUDA"), RuntimeError("CUDA out of memory."), RuntimeError(OUT_OF_MEMORY)):
        assert is_out_of_memory(error)
    for error in (RuntimeError("shapes differ"), ValueError("out of memory"), None):
        assert not is_out_of_memory(error)


def test_any_other_error_of_an_update_is_raised_as_it_is(monkeypatch):
    exhaust(monkeypatch, "ippo", "policy_forward", [calls_in_an_update("ippo", "policy_forward")], "shapes differ")
    with pytest.raises(RuntimeError, match="^shapes differ$"):
        train("ippo")
    assert len(Path("run/metrics.csv").read_text().splitlines()) == 2


# --- Memory that grows ------------------------------------------------------------------------------------------------


def watch_memory(script, updates, folder):
    """Work for a process: a run, and the pages that are resident after each update."""
    log = Run.log
    resident = []

    def watch(*values, **__):
        log(*values)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]))

    Run.log = watch
    train(script, str(folder / "run"), train_size=2 * updates, max_episodes=2 * updates, rollout_buffer_size=2)
    (folder / "resident.json").write_text(json.dumps(resident))


def median(numbers):
    return sorted(numbers)[len(numbers) // 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, updates",
    [("ippo", 60), ("ppo", 60), *((script, 300) for script in SCRIPTS)],
)
def test_memory_does_not_grow_with_the_updates(script, updates, tmp_path):
    process = Process(watch_memory, script, updates, tmp_path).wait(600)
    assert process.exitcode == 0, process.error
    resident = json.loads((tmp_path / "resident.json").read_text())
    assert len(resident) == updates
    assert median(resident[-20:]) < 1.05 * median(resident[29:40])
