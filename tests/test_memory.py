"""Micro-batches, whose gradients add up to the mini-batch's; memory that runs out, and that grows."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    gradients,
    make_agent,
    make_args,
    make_episodes,
    make_ppo_agents,
    make_ppo_args,
    make_ppo_rollout,
    seeded,
)
from processes import Process
from short_runs import (
    FOUR_ITEMS,
    LOSSES,
    SCRIPTS,
    assert_one_line,
    break_calls,
    every_script,
    make_task,
    reward_length,
    saved_state,
    small_model,
    train,
)

import ippo_llm
import ppo_llm
from utils.cli import UserError, parse
from utils.run import Run, is_out_of_memory

OUT_OF_MEMORY = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
OUT_OF_MEMORY += "to allocate 9 bytes. Error code 12 (Cannot allocate memory)"
OF_MODELS = ("ippo", "iac", "maac", "magrpo")
LEARN_FLAGS = dict.fromkeys(OF_MODELS, "micro_batch_size") | {"ppo": "micro_batch_size_per_gpu"}
SAMPLE_FLAGS = dict.fromkeys(OF_MODELS, "per_device_train_batch_size") | {"ppo": "hf_generate_chunk_size"}

in_tmp_path = pytest.mark.usefixtures("in_tmp_path")


# --- The gradients of micro-batches add up to the mini-batch's --------------------------------------------------------

FROZEN = {"actor_learning_rate": 0.0, "critic_learning_rate": 0.0}  # every update begins with the same weights
PPO_CASES = {
    "ppo token": {"action_granularity": "token"},
    "ppo turn": {"action_granularity": "turn", "turn_value_reduction": "mean"},
    "ppo turn clip": {"action_granularity": "turn", "turn_level_clip": True},
    "ppo reference": {"action_granularity": "turn", "beta": 0.1, "adv_whitening": False},
}


def watch_gradients(patch, module):
    """The gradients of all optimiser steps so far, each a list of tensors."""
    optimizer_step = module.optimizer_step
    seen = []

    def watch(agent, args):
        seen.append(gradients(agent))
        return optimizer_step(agent, args)

    patch.setattr(module, "optimizer_step", watch)
    return seen


def assert_parts_add_up(patch, script, agent, rollout, args, passes):
    """An update in micro-batches of 1, 3 and 5 of the 8 episodes has the gradient, and the metrics, of the whole.

    `passes` are the functions that make a step's passes, with gradients.
    """
    module = SCRIPTS[script]
    calls = [break_calls(patch, module, name, [], "") for name in passes]
    seen = watch_gradients(patch, module)
    metrics = []
    for size, num_parts in ((None, 1), (1, 8), (3, 3), (5, 2)):
        setattr(args, LEARN_FLAGS[script], size)
        before = [len(each) for each in calls]
        metrics.append({name: float(x) for name, x in module.learn(agent, rollout, args, seeded()).items()})
        assert [len(each) - number for each, number in zip(calls, before)] == [num_parts] * len(passes)
    whole, *others = [torch.cat([x.flatten() for x in step]) for step in seen]
    for parts in others:
        torch.testing.assert_close(parts, whole, atol=1e-6 * float(whole.norm()), rtol=0)
    for each in metrics[1:]:
        assert each == pytest.approx(metrics[0], abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("granularity", ["token", "turn"])
@pytest.mark.parametrize("critic", ["head", "separate"])
def test_the_gradients_of_micro_batches_add_up(model, tokenizer, monkeypatch, granularity, critic):
    flags = {"mini_batch_size": 8, "max_new_tokens": 8, "num_turns": 2, "entropy_coef": 0.1, "num_agents": 1} | FROZEN
    args = make_args(action_granularity=granularity, **flags)
    agent = make_agent(args, model, tokenizer, critic)
    task = SimpleNamespace(
        formatters=lambda item: "Guess it. " * item["k"],
        reward_func=lambda texts, items, turn: [item["k"] - 3.0 * turn for item in items],
        external_transition=lambda item: ["Again."] if item["k"] % 3 else None,
    )
    (rollout,) = ippo_llm.play([agent], task, [{"k": k} for k in range(1, 9)], args, seeded())
    assert rollout.played.sum(1).tolist() == [2, 2, 1, 2, 2, 1, 2, 2]
    rollout.logprobs += 0.1 * torch.randn(rollout.logprobs.shape, generator=seeded()) * rollout.response_mask
    assert_parts_add_up(monkeypatch, "ippo", agent, rollout, args, ["ippo_loss"])


@pytest.mark.parametrize("case", PPO_CASES)
def test_the_gradients_of_micro_batches_of_transcripts_add_up(loaded_model, tokenizer, monkeypatch, case):
    args = ppo_llm.resolve_args(make_ppo_args(**({"ent_coef": 0.01, "lr_actor": 0.0} | PPO_CASES[case])))
    (agent,) = make_ppo_agents(loaded_model, tokenizer, args)
    episodes = make_episodes("game")
    episodes[6] = ppo_llm.Transcript(prompt_ids=[0])  # one that was dropped
    rollout = make_ppo_rollout(episodes, agent, args)
    noise = 0.1 * torch.randn(rollout.logprobs.shape, generator=seeded())  # so that the ratios are not 1
    rollout.logprobs = rollout.logprobs + noise * rollout.response_mask
    assert_parts_add_up(monkeypatch, "ppo", agent, rollout, args, ["ppo_loss", "value_loss"])
    groups = agent.optimizers[0].param_groups
    assert [group["lr"] for group in groups] == [0.0, 0.0]


# --- Memory that runs out ---------------------------------------------------------------------------------------------


def exhaust(patch, script, phase, calls):
    """Let memory run out in some calls of a script's first loss, or of its sampler."""
    function = LOSSES[script] if phase == "learn" else "sample_tokens"
    return break_calls(patch, SCRIPTS[script], function, calls, OUT_OF_MEMORY)


def option(script, phase, size):
    """The flag that takes less memory in a phase."""
    name = LEARN_FLAGS[script] if phase == "learn" else SAMPLE_FLAGS[script]
    return f"--{name.replace('_', '-')} {size}"


def go_on(error):
    """Agents and Run of the command in an error's line."""
    script, flags = re.search(r"go on with: python (\w+)_llm\.py (.*)$", str(error.value)).groups()
    args = parse(SCRIPTS[script].Args, flags.split(), script=f"{script}_llm")
    return SCRIPTS[script].main(args, make_task(reward_length), *small_model())


@in_tmp_path
@every_script
@pytest.mark.parametrize("phase", ["sample", "learn"])
def test_memory_that_runs_out_ends_the_run_with_the_flag_that_takes_less(monkeypatch, script, phase):
    """One agent, in the second of three updates; the command of the line goes on from the first."""
    flags = FOUR_ITEMS.get(script, {}) if phase == "sample" else {}  # half of what it does at once is 2
    with monkeypatch.context() as patch:
        exhaust(patch, script, phase, [2])
        with pytest.raises(UserError) as error:
            train(script, num_agents=1, **flags)
    assert_one_line(error, 2)
    less = option(script, phase, 2)
    command = f"python {script}_llm.py --resume run {less}"
    assert str(error.value) == f"out of memory in the phase {phase}: {less} takes less; go on with: {command}"
    assert saved_state("run")["step"] == 1

    _, resumed = go_on(error)
    assert (resumed.step, getattr(resumed.args, less.split()[0][2:].replace("-", "_"))) == (3, 2)
    if phase == "learn":
        _, through = train(script, num_agents=1, folder="through")
        for row, expected in zip(resumed.rows[:2], through.rows):
            names = {"reward_mean", "agent_0/policy_loss", "agent_0/grad_norm"}
            names |= {name for name in row if name.endswith("/value_loss")}
            assert len(names) == (3 if script == "magrpo" else 4)
            for name in names:
                assert row[name] == pytest.approx(expected[name], abs=1e-5)


@in_tmp_path
@every_script
def test_memory_that_runs_out_after_some_agents_have_learned_leaves_what_they_learned(monkeypatch, script):
    """Of two agents the second fails in the second update, which the run begins anew."""
    with monkeypatch.context() as patch:
        exhaust(patch, script, "learn", [4])
        with pytest.raises(UserError, match="^out of memory in the phase learn: ") as error:
            train(script, save_interval=0)
    state = saved_state("run")
    assert (state["step"], state["learning"]) == (1, True)
    assert go_on(error)[1].step == 3


@in_tmp_path
@every_script
def test_half_of_what_the_flag_was_takes_less_until_it_is_one(monkeypatch, script):
    exhaust(monkeypatch, script, "learn", range(99))
    for size, what in ((3, f": {option(script, 'learn', 1)} takes less"), (1, f", with {option(script, 'learn', 1)}")):
        with pytest.raises(UserError, match=f"^out of memory in the phase learn{what}$"):
            train(script, overwrite=True, **{LEARN_FLAGS[script]: size})


@in_tmp_path
@pytest.mark.parametrize("call", [1, 3])  # before the first update, and after it
def test_an_evaluation_takes_less_by_the_flag_of_sampling(monkeypatch, call):
    exhaust(monkeypatch, "ippo", "sample", [call])
    flags = {"num_agents": 1, "eval_interval": 1, "eval_size": 2}
    with pytest.raises(UserError, match="^out of memory in the phase evaluate: --per-device-train-batch-size 2 takes"):
        train("ippo", **flags)


def test_errors_that_are_of_memory():
    for error in (torch.OutOfMemoryError("CUDA"), RuntimeError("CUDA out of memory."), RuntimeError(OUT_OF_MEMORY)):
        assert is_out_of_memory(error)
    for error in (RuntimeError("shapes differ"), ValueError("out of memory"), None):
        assert not is_out_of_memory(error)


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


# --- Memory that grows ------------------------------------------------------------------------------------------------

TINY_UPDATES = "--rollout-buffer-size 2 --num-train-epochs 1"
TEAM = f"{TINY_UPDATES} --task number --mini-batch-size 2 --max-new-tokens 2 --eval-interval 0"
ADAPTERS = f"{TINY_UPDATES} --batch-size 2 --max-turns 1 --max-output-tokens 2 --lora-rank 4 --evaluation-interval 0"
LONG_RUNS = dict.fromkeys(OF_MODELS, TEAM) | {"ppo": ADAPTERS}
LONG_RUNS["magrpo"] = f"{TEAM} --num-generations 2"


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
