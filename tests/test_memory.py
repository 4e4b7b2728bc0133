"""Memory that runs out in an update: the step is made in halves, with the same gradient; and none that grows."""

import json
from pathlib import Path

import pytest
import torch
from helpers import (
    gradients,
    make_episodes,
    make_ppo_agents,
    make_ppo_args,
    make_ppo_batch,
    make_ppo_rollout,
)
from processes import Process
from short_runs import (
    IN_ENV,
    LOSSES,
    SCRIPTS,
    Env,
    Faulty,
    assert_one_line,
    assert_same_run,
    break_calls,
    every_script,
    install_env,
    return_none,
    saved_state,
    train,
)

import ppo_llm
from utils.cli import TaskError, UserError, parse
from utils.run import Run

OUT_OF_MEMORY = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
OUT_OF_MEMORY += "to allocate 9 bytes. Error code 12 (Cannot allocate memory)"
SIZE_FLAGS = {"ippo": "--mini-batch-size", "iac": "--mini-batch-size", "ppo": "--micro-batch-size-per-gpu"}

in_tmp_path = pytest.mark.usefixtures("in_tmp_path")


def exhaust(patch, script, calls):
    """Let memory run out in some calls of a script's first loss; all its calls."""
    return break_calls(patch, SCRIPTS[script], LOSSES[script], calls, OUT_OF_MEMORY)


# --- The gradient in halves is that of the whole ----------------------------------------------------------------------

TWO_UPDATES = {"num_agents": 1, "train_size": 8}  # of a step each
CASES = {  # of a script, the function in which memory runs out, and flags; backward: once a gradient is there
    **{
        f"{script} {granularity} {critic} {function}": (
            script,
            function,
            {"action_granularity": granularity, "use_separate_critic": critic == "separate"},
        )
        for script, function in (("ippo", "ippo_loss"), ("ippo", "backward"), ("iac", "iac_loss"))
        for granularity in ("token", "turn")
        for critic in ("head", "separate")
    },
    "ppo token": ("ppo", "ppo_loss", {"action_granularity": "token"}),
    "ppo token value": ("ppo", "value_loss", {"action_granularity": "token"}),
    "ppo turn": ("ppo", "ppo_loss", {"action_granularity": "turn", "turn_value_reduction": "mean"}),
    "ppo turn value": ("ppo", "value_loss", {"action_granularity": "turn", "turn_value_reduction": "final_value"}),
    "ppo turn clip": ("ppo", "value_loss", {"action_granularity": "turn", "turn_level_clip": True, "ent_coef": 0.01}),
    "ppo micro-batches": ("ppo", "value_loss", {"micro_batch_size_per_gpu": 3}),
}


def watch_gradients(patch, module):
    """The gradients of all updates so far, each a list of tensors."""
    optimizer_step = module.optimizer_step
    seen = []

    def watch(agent, args):
        seen.append(gradients(agent))
        return optimizer_step(agent, args)

    patch.setattr(module, "optimizer_step", watch)
    return seen


@in_tmp_path
@pytest.mark.parametrize("case", CASES)
def test_a_step_in_halves_has_the_gradient_of_the_whole(monkeypatch, case, capsys):
    script, function, flags = CASES[case]
    place = torch.Tensor if function == "backward" else SCRIPTS[script]
    call = 4 if case == "ppo micro-batches" else 2  # in the second update
    flags = TWO_UPDATES | flags
    if script == "ppo":
        flags |= IN_ENV
        install_env(monkeypatch, Env)

    updates = {}
    for folder, calls in (("whole", []), ("halves", [call])):
        with monkeypatch.context() as patch:
            updates[folder] = watch_gradients(patch, SCRIPTS[script])
            break_calls(patch, place, function, calls, OUT_OF_MEMORY, after=function == "backward")
            agents, _ = train(script, folder=folder, **flags)
        assert [agent.faults.num_parts for agent in agents] == [2 if calls else 1]

    line = f"out of memory in an update: from now on half of {SIZE_FLAGS[script]} at once"
    assert capsys.readouterr().out.count(line) == 1
    assert len(updates["whole"]) == len(updates["halves"]) == 2
    assert any(x.abs().max() > 1e-3 for x in updates["whole"][1])
    for whole, halves in zip(updates["whole"], updates["halves"]):
        torch.testing.assert_close(halves, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("function", ["ppo_loss", "value_loss"])
@pytest.mark.parametrize("kind, granularity", [("game", "turn"), ("game", "token"), ("task", "token")])
def test_two_losses_in_halves_have_the_gradient_and_the_metrics_of_the_whole(
    loaded_model, tokenizer, monkeypatch, kind, granularity, function, after
):
    """That of the actor, of the critic and of the value head, wherever memory runs out; before or after its forward."""
    task = {"task": "number"} if kind == "task" else {}
    args = ppo_llm.resolve_args(make_ppo_args(action_granularity=granularity, ent_coef=0.01, **task))
    (agent,) = make_ppo_agents(loaded_model, tokenizer, args)
    rollout = make_ppo_rollout(*make_episodes(kind), agent, args)  # of a task they are fewer than --batch-size
    rollout.logprobs += 0.1 * torch.randn(rollout.logprobs.shape)  # so that the ratios are not 1
    batch = make_ppo_batch(agent, rollout, args)

    policy_loss, metrics = ppo_llm.ppo_loss(agent, batch, args)
    policy_loss.backward()
    value_loss, value_metrics = ppo_llm.value_loss(agent, batch, args)
    value_loss.backward()
    expected = gradients(agent)
    groups = agent.optimizers[0].param_groups
    assert all(any(p.grad.abs().max() > 1e-3 for p in group["params"]) for group in groups)
    agent.optimizers[0].zero_grad()

    calls = break_calls(monkeypatch, ppo_llm, function, [1], OUT_OF_MEMORY, after)
    sums = agent.faults.backward(agent, batch, args, ppo_llm.ppo_loss, ppo_llm.value_loss)
    assert len(calls) == 1 + 2
    torch.testing.assert_close(gradients(agent), expected, atol=1e-5, rtol=1e-4)
    assert {name: x.item() for name, x in sums.items()} == pytest.approx(
        {name: x.item() for name, x in (metrics | value_metrics).items()}, abs=1e-5
    )


# --- Halves from then on ----------------------------------------------------------------------------------------------


@in_tmp_path
@every_script
def test_after_memory_ran_out_every_step_is_in_halves(monkeypatch, script):
    calls = exhaust(monkeypatch, script, [2])
    agents, run = train(script, num_agents=1)
    assert [agent.faults.num_parts for agent in agents] == [2]
    assert run.step == 3
    assert len(calls) == 1 + (1 + 2) + 2


@in_tmp_path
@every_script
def test_memory_that_runs_out_again_ends_the_run_with_the_flag_to_lower(monkeypatch, script):
    exhaust(monkeypatch, script, range(3, 99))  # two agents: from the second update on
    with pytest.raises(UserError, match=f"out of memory.*lower {SIZE_FLAGS[script]}$") as error:
        train(script)
    assert_one_line(error, 2)
    assert saved_state("run")["step"] == 1


@in_tmp_path
@every_script
def test_memory_that_runs_out_in_two_updates_ends_the_run_with_the_flag_to_lower(monkeypatch, script):
    exhaust(monkeypatch, script, [2, 5])
    with pytest.raises(UserError, match=f"out of memory.*lower {SIZE_FLAGS[script]}$") as error:
        train(script, num_agents=1)
    assert_one_line(error, 2)
    state = saved_state("run")
    assert state["step"] == 2
    assert state["agents"][0]["parts"] == 2


@in_tmp_path
@every_script
def test_a_resumed_run_stays_in_halves(monkeypatch, script):
    with monkeypatch.context() as patch:
        exhaust(patch, script, [1])
        train(script, folder="through")
    with monkeypatch.context() as patch:
        exhaust(patch, script, [1])
        with pytest.raises(TaskError):
            train(script, Faulty(return_none, 3))
    assert [agent["parts"] for agent in saved_state("run")["agents"]] == [2, 1]
    agents, _ = train(script, resume="run")
    assert [agent.faults.num_parts for agent in agents] == [2, 1]
    assert_same_run("run", "through")


# --- Other errors -----------------------------------------------------------------------------------------------------


@in_tmp_path
@every_script
def test_any_other_error_of_an_update_is_raised_as_it_is(monkeypatch, script, capsys):
    calls = break_calls(monkeypatch, SCRIPTS[script], LOSSES[script], range(3, 99), "shapes differ")
    with pytest.raises(RuntimeError, match="^shapes differ$"):
        train(script)
    assert len(calls) == 3
    assert "out of memory" not in capsys.readouterr().out
    assert saved_state("run")["step"] == 1


@in_tmp_path
@every_script
def test_a_checkpoint_in_the_midst_of_an_update_says_so(monkeypatch, script):
    """One agent, two optimiser steps an update: the second update fails at its second."""
    break_calls(monkeypatch, SCRIPTS[script], LOSSES[script], [4], "shapes differ")
    batch_size = {"batch_size" if script == "ppo" else "mini_batch_size": 2}
    with pytest.raises(RuntimeError):
        train(script, num_agents=1, **batch_size)
    state = saved_state("run")
    assert (state["step"], state["learning"]) == (1, True)


# --- Memory that grows ------------------------------------------------------------------------------------------------

TINY_UPDATES = "--rollout-buffer-size 2 --num-train-epochs 1"
TEAM = f"{TINY_UPDATES} --task number --mini-batch-size 2 --max-new-tokens 2 --eval-interval 0"
ADAPTERS = f"{TINY_UPDATES} --batch-size 2 --max-turns 1 --max-output-tokens 2 --lora-rank 4 --evaluation-interval 0"
LONG_RUNS = {"ippo": TEAM, "iac": TEAM, "ppo": ADAPTERS}


def watch_memory(script, flags, folder):
    """Work for a process: a run, and the pages that are resident after each update."""
    log = Run.log
    resident = []

    def watch(*values):
        log(*values)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]))

    Run.log = watch
    SCRIPTS[script].main(parse(SCRIPTS[script].Args, [*flags.split(), "--output-dir", str(folder / "run")]))
    (folder / "resident.json").write_text(json.dumps(resident))


def median(numbers):
    return sorted(numbers)[len(numbers) // 2]


@pytest.mark.parametrize(
    "script, updates",
    [("ippo", 60), ("ppo", 60), *(pytest.param(script, 300, marks=pytest.mark.slow) for script in SCRIPTS)],
)
def test_memory_does_not_grow_with_the_updates(script, updates, tmp_path):
    process = Process(watch_memory, script, f"{LONG_RUNS[script]} --train-size {2 * updates}", tmp_path).wait(600)
    assert process.exitcode == 0, process.error
    resident = json.loads((tmp_path / "resident.json").read_text())
    assert len(resident) == updates
    assert median(resident[-20:]) < 1.05 * median(resident[29:40])
