"""What goes wrong while a run is under way: it goes on where it can, else ends in one line, saved and resumable."""

import json
import random
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import wandb
from accelerate import Accelerator
from test_run import read_metrics, timeless

import iac_llm
import ippo_llm
import ppo_llm
import utils.run
from utils.checkpoint import check_whole, checkpoints
from utils.cli import TaskError, UserError
from utils.tasks import number

ROOT = Path(__file__).resolve().parent.parent
HANDLERS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)

# Three updates, each of one optimiser step an agent, and one call of reward_func.
SMALL = {"train_size": 12, "rollout_buffer_size": 4, "num_train_epochs": 1, "num_agents": 2, "eval_size": 4}
TEAM = SMALL | {"mini_batch_size": 4, "max_new_tokens": 3, "eval_interval": 0}
PPO = SMALL | {"batch_size": 4, "update_epochs": 1, "max_output_tokens": 3, "evaluation_interval": 0}
PPO |= {"lora_rank": 4, "lora_alpha": 8.0}
ENV = {"num_agents": 1, "env": "faulty:Env", "max_turns": 2}  # other flags of ppo, to play in an environment
SCRIPTS = {"ippo": (ippo_llm, TEAM), "iac": (iac_llm, TEAM), "ppo": (ppo_llm, PPO)}
LOSS = {"ippo": "losses", "iac": "losses", "ppo": "actor_loss"}
LOWER = {"ippo": "--mini-batch-size", "iac": "--mini-batch-size", "ppo": "--micro-batch-size-per-gpu"}

every_script = pytest.mark.parametrize("script", SCRIPTS)


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A folder of its own to work in, no curves, and a check that a run puts back what it takes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(utils.run, "draw_curves", lambda *_: None)  # takes longer than all the rest
    before = [signal.getsignal(each) for each in HANDLERS]
    yield
    assert [signal.getsignal(each) for each in HANDLERS] == before
    assert not torch.are_deterministic_algorithms_enabled()


def task_of(reward_func):
    """The number game, scored by another function."""
    parts = {"train_dataset": number.train_dataset, "formatters": number.formatters, "reward_func": reward_func}
    return SimpleNamespace(**parts, eval_dataset=number.eval_dataset, external_transition=number.external_transition)


def train(script, reward_func=number.reward_func, folder="run", **flags):
    """Agents and Run of a short run, on the number game or, with ENV, in an environment."""
    module, small = SCRIPTS[script]
    args = module.Args(**{**small, "output_dir": None if "resume" in flags else str(folder), **flags})
    return module.main(args, None if args.__dict__.get("env") else task_of(reward_func))


def learned(folder):
    """The bits of all that a run has learned, optimisers too: those of its newest checkpoint, which is whole."""
    newest = checkpoints(Path(folder) / "checkpoints")[-1]
    check_whole(newest)
    files = {path.relative_to(newest).as_posix(): path.read_bytes() for path in newest.rglob("*.safetensors")}
    assert any("optimizer" in name for name in files)
    return newest.name, files


def state_of(folder):
    newest = checkpoints(Path(folder) / "checkpoints")[-1]
    check_whole(newest)
    return json.loads((newest / "state.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of a script that nothing happens to, made once."""
    made = {}

    def folder(script):
        if script not in made:
            made[script] = tmp_path_factory.mktemp(script) / "run"
            train(script, folder=made[script])
        return made[script]

    return folder


def assert_same_run(folder, other):
    assert timeless(folder) == timeless(other)
    assert learned(folder) == learned(other)
    assert len(timeless(folder)) == 3


def assert_resumes(script, other):
    """With the fault gone the run goes on as if nothing had happened."""
    train(script, resume="run")
    assert_same_run("run", other)


def assert_one_line(error, code):
    assert str(error.value) and "\n" not in str(error.value) and error.value.exit_code == code


class Faulty:
    """number.reward_func, but for some of its calls, numbered from 1, which do something else."""

    __name__ = "reward_func"

    def __init__(self, fault, *calls):
        self.fault, self.calls, self.called = fault, calls, 0

    def __call__(self, *completions, items):
        self.called += 1
        if self.called in self.calls:
            return self.fault(items)
        return number.reward_func(*completions, items=items)


def fail(*_):
    raise ConnectionError("the judge\nis away")


# --- A reward function that fails -------------------------------------------------------------------------------------


@every_script
def test_a_reward_function_that_fails_once_is_asked_once_more(whole, script, capsys):
    reward_func = Faulty(fail, 3)
    train(script, reward_func)
    told = [line for line in capsys.readouterr().out.splitlines() if "once more" in line]
    assert told == ["reward_func raised ConnectionError: the judge is away; it is asked once more"]
    assert reward_func.called == 4
    assert_same_run("run", whole(script))


@every_script
def test_a_reward_function_that_fails_twice_ends_the_run_which_can_be_resumed(whole, script, capsys):
    seen = []

    def reward_func(*completions, items):
        seen.append(items)
        if len(seen) > 2 and seen[2][1] in items:  # from the third update on, the second of its items
            raise ConnectionError("no judge")
        return number.reward_func(*completions, items=items)

    with pytest.raises(TaskError, match=r"raised ConnectionError: no judge on item 1, {'share': 0\.") as error:
        train(script, reward_func)
    assert str(seen[2][1]) in str(error.value)
    assert_one_line(error, 1)
    state = state_of("run")
    assert (state["step"], state["learning"]) == (2, False)
    assert "--resume run" in capsys.readouterr().out
    assert len(read_metrics("run")) == 2
    assert_resumes(script, whole(script))


@every_script
def test_the_line_that_ends_a_run_is_one_line_also_where_the_error_has_several(script):
    with pytest.raises(TaskError) as error:
        train(script, Faulty(fail, *range(1, 99)))
    assert_one_line(error, 1)


def test_a_failure_in_a_hundred_calls_is_survived():
    draw, failed = random.Random(5), []

    def reward_func(*completions, items):
        if draw.random() < 0.01:
            failed.append(items)
            fail()
        return number.reward_func(*completions, items=items)

    flags = {"num_agents": 1, "train_size": 120, "rollout_buffer_size": 1, "mini_batch_size": 1, "max_new_tokens": 1}
    _, run = train("iac", reward_func, **flags)
    assert run.step == 120 and failed


# --- What never answers -----------------------------------------------------------------------------------------------


def sleep(*_):
    time.sleep(60)


def spin(*_):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("script, hang", [("ippo", sleep), ("iac", sleep), ("ppo", sleep), ("iac", spin)])
def test_a_reward_function_that_hangs_ends_the_run_soon(script, hang, capsys):
    began = []

    def fault(items):
        began.append(time.monotonic())
        hang()

    with pytest.raises(TaskError, match="TimeoutError: no answer within --reward-timeout, 0.5 s on the") as error:
        train(script, Faulty(fault, *range(2, 99)), reward_timeout=0.5)
    assert time.monotonic() - began[0] < 10  # most of it saving
    assert len(began) == 2 and "asked once more" in capsys.readouterr().out
    assert_one_line(error, 1)
    assert state_of("run")["step"] == 1


@every_script
def test_a_reward_function_that_hangs_once_is_asked_once_more(whole, script, capsys):
    train(script, Faulty(sleep, 2), reward_timeout=0.5)
    assert capsys.readouterr().out.count("TimeoutError: no answer within --reward-timeout, 0.5 s; it is asked") == 1
    assert_same_run("run", whole(script))


@every_script
def test_the_alarm_is_set_only_with_the_flag_and_given_back(script):
    def mine(*_):
        pass

    before, seen = signal.signal(signal.SIGALRM, mine), []
    try:
        for timeout in (None, 30.0):

            def watch(items):
                seen.append((signal.getsignal(signal.SIGALRM) is mine, signal.getitimer(signal.ITIMER_REAL)[0] > 0))
                return [0.5] * len(items)

            train(script, Faulty(watch, 1), reward_timeout=timeout, train_size=4, overwrite=True)
            assert signal.getsignal(signal.SIGALRM) is mine
        with pytest.raises(TaskError):
            train(script, Faulty(sleep, 1, 2), reward_timeout=0.1, train_size=4, overwrite=True)
        assert signal.getsignal(signal.SIGALRM) is mine
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [(True, False), (False, True)]
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


class Env:
    """Two turns of counting, for 1 each."""

    def reset(self, seed):
        self.seed = seed
        return "Count.", {}

    def step(self, answer):
        return "And on.", 1.0, False, False, {}


@pytest.fixture
def env(monkeypatch):
    """Make a class the environment of ENV."""

    def make(Env):
        module = ModuleType("faulty")
        module.Env = Env
        monkeypatch.setitem(sys.modules, "faulty", module)

    return make


LATE = 1_000_007  # the seed of one of the twelve episodes


class HangsAtReset(Env):
    def reset(self, seed):
        return spin() if seed == LATE else super().reset(seed)


class HangsInStep(Env):
    def step(self, answer):
        return sleep() if self.seed == LATE else super().step(answer)


@pytest.mark.parametrize("kind, where", [(HangsAtReset, "reset"), (HangsInStep, "turn 1")], ids=["reset", "step"])
def test_an_environment_that_hangs_drops_its_own_episode(env, kind, where, capsys):
    env(kind)
    _, run = train("ppo", **ENV, reward_timeout=0.5)
    assert sorted(row["dropped"] for row in run.rows) == [0, 0, 1]
    told = [line for line in capsys.readouterr().out.splitlines() if "is dropped" in line]
    assert len(told) == 1
    said = f"the episode of seed {LATE} is dropped: TimeoutError: no answer within --reward-timeout, 0.5 s ({where})"
    assert told[0].endswith(said)


def test_an_environment_that_hangs_when_it_is_closed_does_not_hang_the_run(env):
    """After its step has failed, that is, or where it is cut short."""
    closed = []

    class HangsInClose(HangsInStep):
        seed = None

        def close(self):
            if self.seed == LATE:
                time.sleep(4)
                closed.append(self)

    env(HangsInClose)
    _, run = train("ppo", **ENV, reward_timeout=0.5)
    assert run.step == 3 and not closed


# --- Nonsense ---------------------------------------------------------------------------------------------------------

NONSENSE = {
    "None": (lambda items: None, "returned None; it takes a list of 4 numbers"),
    "NaN": (lambda items: [0.0, 0.0, float("nan"), 0.0], "returned nan for item 2, .*share"),
    "too many": (lambda items: [0.5] * 5, "returned 5 values for 4 items"),
    "a string": (lambda items: [0.5, "good", 0.5, 0.5], "returned 'good' for item 1, .*share"),
}


@pytest.mark.parametrize("script, case", [*product(["iac"], NONSENSE), *product(["ippo", "ppo"], ["None", "NaN"])])
def test_nonsense_for_rewards_ends_the_run_which_can_be_resumed(whole, script, case):
    nonsense, message = NONSENSE[case]
    with pytest.raises(TaskError, match=f"^reward_func {message}") as error:
        train(script, Faulty(nonsense, 2))
    assert_one_line(error, 1)
    assert state_of("run")["step"] == 1
    assert_resumes(script, whole(script))


STEPS = {
    "four values": (("And on.", 1.0, False, {}), "step of Wrong returned 4 values; it takes 5"),
    "None": (None, "step of Wrong returned a single value of type NoneType; it takes 5"),
    "NaN": (("And on.", float("nan"), False, False, {}), "step of Wrong returned the reward nan"),
    "no text": ((17, 1.0, False, False, {}), "step of Wrong returned an observation of type int"),
}


@pytest.fixture(scope="module")
def whole_env(tmp_path_factory):
    folder, module = tmp_path_factory.mktemp("env") / "run", ModuleType("faulty")
    module.Env = Env
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "faulty", module)
        patch.setattr(sys, "path", [*sys.path])
        train("ppo", folder=folder, **ENV)
    return folder


@pytest.mark.parametrize("case", STEPS)
def test_nonsense_from_an_environment_ends_the_run_which_can_be_resumed(whole_env, env, case):
    returned, message = STEPS[case]

    class Wrong(Env):
        def step(self, answer):
            return returned if Path("run/metrics.csv").exists() else super().step(answer)

    env(Wrong)
    with pytest.raises(TaskError, match=f"^{message}") as error:
        train("ppo", **ENV)
    assert_one_line(error, 1)
    assert state_of("run")["step"] == 1
    env(Env)
    train("ppo", **ENV, resume="run")
    assert_same_run("run", whole_env)


# --- Memory that runs out ---------------------------------------------------------------------------------------------

OUT_OF_MEMORY = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
OUT_OF_MEMORY += "to allocate 9 bytes. Error code 12 (Cannot allocate memory)"


def breaks(monkeypatch, place, name, calls, message=OUT_OF_MEMORY, after=False):
    """Let some calls of a function, numbered from 1, raise a RuntimeError, before or after their work; all calls."""
    original, called = getattr(place, name), []

    def broken(*given, **known):
        called.append(given)
        result = original(*given, **known) if after or len(called) not in calls else None
        if len(called) in calls:
            raise RuntimeError(message)
        return result

    monkeypatch.setattr(place, name, broken)
    return called


def spied_gradients(monkeypatch, module):
    """The gradients of all optimiser steps so far, each a list of tensors."""
    clip, seen = module.clip_gradients, []

    def spy(optimizer, *rest):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append([None if p.grad is None else p.grad.clone() for p in parameters])
        return clip(optimizer, *rest)

    monkeypatch.setattr(module, "clip_gradients", spy)
    return seen


ALONE = {"num_agents": 1, "train_size": 8}  # two updates, of a step each
CUTS = {  # where memory runs out: in a function of the script, or once a gradient is there
    **{
        f"{script} {granularity} {critic} {place}": (script, place, flags)
        for script, place in (("ippo", "losses"), ("ippo", "backward"), ("iac", "losses"))
        for granularity, critic in (("token", "head"), ("token", "separate"), ("turn", "head"), ("turn", "separate"))
        for flags in [{"action_granularity": granularity, "use_separate_critic": critic == "separate"}]
    },
    "ppo token": ("ppo", "actor_loss", {"action_granularity": "token"}),
    "ppo token critic": ("ppo", "critic_loss", {"action_granularity": "token"}),
    "ppo turn": ("ppo", "actor_loss", {"action_granularity": "turn", "turn_value_reduction": "mean"}),
    "ppo turn critic": ("ppo", "critic_loss", {"action_granularity": "turn", "turn_value_reduction": "final_value"}),
    "ppo turn clip": ("ppo", "critic_loss", {"action_granularity": "turn", "turn_level_clip": True, "ent_coef": 0.01}),
    "ppo micro-batches": ("ppo", "critic_loss", {"micro_batch_size_per_gpu": 3}),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_step_in_halves_has_the_gradient_of_the_whole(monkeypatch, env, case, capsys):
    script, place, flags = CUTS[case]
    module, flags, found = SCRIPTS[script][0], ALONE | flags, []
    if script == "ppo":
        flags |= ENV
        env(Env)
    steps = 2 if flags.get("use_separate_critic") else 1  # optimisers
    for folder, call in (("whole", None), ("halves", 2 if flags.get("micro_batch_size_per_gpu") is None else 4)):
        with monkeypatch.context() as patch:
            found.append(spied_gradients(patch, module))
            of = Accelerator if place == "backward" else module
            breaks(patch, of, place, [call], after=place == "backward")  # in the second update
            agents, _ = train(script, folder=folder, **flags)
            assert [agent.parts for agent in agents] == [1 if call is None else 2]
    told = f"out of memory in an update: from now on half of {LOWER[script]} at once"
    assert capsys.readouterr().out.count(told) == 1
    before, after = found
    assert len(before) == len(after) == 2 * steps
    assert any(x is not None and x.abs().max() > 1e-3 for step in before[steps:] for x in step)
    for one, other in zip(before, after):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


@every_script
def test_after_memory_ran_out_every_step_is_in_halves(monkeypatch, script):
    called = breaks(monkeypatch, SCRIPTS[script][0], LOSS[script], [2])
    agents, run = train(script, num_agents=1)
    assert [agent.parts for agent in agents] == [2] and run.step == 3
    assert len(called) == 1 + (1 + 2) + 2


@every_script
def test_memory_that_runs_out_again_ends_the_run_with_the_flag_to_lower(monkeypatch, script):
    breaks(monkeypatch, SCRIPTS[script][0], LOSS[script], range(3, 99))  # two agents: from the second update on
    with pytest.raises(UserError, match=f"out of memory.*lower {LOWER[script]}$") as error:
        train(script)
    assert_one_line(error, 2)
    assert state_of("run")["step"] == 1


@every_script
def test_memory_that_runs_out_in_two_updates_ends_the_run_with_the_flag_to_lower(monkeypatch, script):
    breaks(monkeypatch, SCRIPTS[script][0], LOSS[script], [2, 5])
    with pytest.raises(UserError, match=f"out of memory.*lower {LOWER[script]}$") as error:
        train(script, num_agents=1)
    assert_one_line(error, 2)
    state = state_of("run")
    assert state["step"] == 2 and state["agents"][0]["parts"] == 2


@every_script
def test_a_resumed_run_stays_in_halves(monkeypatch, script):
    for folder, failing in (("through", []), ("run", [3, 4])):
        with monkeypatch.context() as patch:
            breaks(patch, SCRIPTS[script][0], LOSS[script], [1])
            if failing:
                with pytest.raises(TaskError):
                    train(script, Faulty(lambda items: None, 3), folder=folder)
            else:
                train(script, folder=folder)
    assert [agent["parts"] for agent in state_of("run")["agents"]] == [2, 1]
    agents, _ = train(script, resume="run")
    assert [agent.parts for agent in agents] == [2, 1]
    assert_same_run("run", "through")


@every_script
def test_any_other_error_of_an_update_is_raised_as_it_is(monkeypatch, script, capsys):
    called = breaks(monkeypatch, SCRIPTS[script][0], LOSS[script], range(3, 99), "shapes differ")
    with pytest.raises(RuntimeError, match="^shapes differ$"):
        train(script)
    assert len(called) == 3 and "out of memory" not in capsys.readouterr().out
    assert state_of("run")["step"] == 1


@every_script
def test_a_checkpoint_in_the_midst_of_an_update_says_so(monkeypatch, script):
    """One agent, two optimiser steps an update: the second update fails at its second."""
    breaks(monkeypatch, SCRIPTS[script][0], LOSS[script], [4], "shapes differ")
    with pytest.raises(RuntimeError):
        train(script, num_agents=1, **{"batch_size" if script == "ppo" else "mini_batch_size": 2})
    state = state_of("run")
    assert (state["step"], state["learning"]) == (1, True)


# --- Gradients that are not finite ------------------------------------------------------------------------------------


def not_finite(monkeypatch, script, calls):
    """Let the loss of some calls, numbered from 1, have a gradient of NaN."""
    module, name = SCRIPTS[script][0], LOSS[script]
    original, called = getattr(module, name), []

    def broken(*given):
        called.append(given)
        result, factor = original(*given), float("nan") if len(called) in calls else 1.0
        if isinstance(result, dict):
            return {**result, "loss": result["loss"] * factor}
        return result[0] * factor, result[1]

    monkeypatch.setattr(module, name, broken)


@every_script
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(monkeypatch, script):
    not_finite(monkeypatch, script, [2])
    _, run = train(script, num_agents=1, save_interval=1, keep_checkpoints=9)
    assert [row["agent_0/skipped"] for row in run.rows] == [0, 1, 0]
    saved = [
        {path.relative_to(update): path.read_bytes() for path in update.rglob("*.safetensors")}
        for update in checkpoints(Path("run/checkpoints"))
    ]
    assert saved[0] == saved[1] != saved[2]


@every_script
def test_three_gradients_running_that_are_not_finite_end_the_run(monkeypatch, script):
    not_finite(monkeypatch, script, [2, 4, 5, 6])  # three running, and one before
    with pytest.raises(UserError, match="^three gradients running were not finite: lower --") as error:
        train(script, num_agents=1, train_size=32)
    assert_one_line(error, 2)
    assert state_of("run")["step"] == 5 and len(read_metrics("run")) == 5


@every_script
def test_a_run_that_is_resumed_with_such_gradients_ends_again(monkeypatch, script):
    flags = {"num_agents": 1, "train_size": 32}
    for more in ({}, {"resume": "run"}):
        with monkeypatch.context() as patch:
            not_finite(patch, script, range(1 if more else 2, 99))
            with pytest.raises(UserError, match="^three gradients running were not finite: lower --"):
                train(script, **flags, **more)


@every_script
def test_a_run_that_such_gradients_ended_can_be_resumed(monkeypatch, script):
    flags = {"num_agents": 1, "train_size": 24}
    with monkeypatch.context() as patch:
        not_finite(patch, script, range(2, 99))
        with pytest.raises(UserError, match="not finite"):
            train(script, **flags)
    _, run = train(script, **flags, resume="run")
    assert run.step == 6 and run.rows[-1]["agent_0/skipped"] == 0


# --- Weights & Biases -------------------------------------------------------------------------------------------------


class Logger:
    """A run of Weights & Biases that is not sent anywhere; some calls of log, numbered from 1, fail."""

    def __init__(self, id="made-up", failing=()):
        self.id, self.failing, self.logged, self.called, self.finished = id, failing, [], 0, []

    def log(self, values, step=None):
        self.called += 1
        if self.called in self.failing:
            raise wandb.errors.CommError("the line\nis dead")
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.finished.append(exit_code)


def stub_wandb(monkeypatch, logger, failing=()):
    """Let wandb.init give a logger, or fail in some modes; what it was asked for, call by call."""
    asked = []

    def init(**known):
        asked.append(known)
        if known["mode"] in failing:
            raise wandb.errors.CommError("no\nnetwork")
        return logger

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "Table", lambda **parts: parts)
    return asked


@every_script
def test_weights_and_biases_out_of_reach_is_logged_to_offline(monkeypatch, whole, script, capsys):
    logger = Logger()
    asked = stub_wandb(monkeypatch, logger, failing=[None])
    train(script, track=True)
    assert [known["mode"] for known in asked] == [None, "offline"]
    told = "--track: Weights & Biases does not start (no network); logging offline, for wandb sync"
    assert capsys.readouterr().out.splitlines().count(told) == 1
    assert [step for step, _ in logger.logged] == [4, 8, 12, None] and logger.finished == [0]
    assert_same_run("run", whole(script))


@every_script
def test_a_run_goes_on_without_weights_and_biases(monkeypatch, whole, script, capsys):
    asked = stub_wandb(monkeypatch, None, failing=[None, "offline"])
    train(script, track=True)
    assert len(asked) == 2
    assert capsys.readouterr().out.count("does not start (no network); the run goes on without it") == 1
    assert_same_run("run", whole(script))


@every_script
def test_weights_and_biases_that_fails_midway_is_done_without(monkeypatch, whole, script, capsys):
    logger = Logger(failing=range(2, 99))
    stub_wandb(monkeypatch, logger)
    train(script, track=True)
    told = "--track: Weights & Biases fails (the line is dead); the run goes on without it"
    assert capsys.readouterr().out.count(told) == 1
    assert [step for step, _ in logger.logged] == [4] and logger.called == 2
    assert_same_run("run", whole(script))


def test_weights_and_biases_that_fails_midway_is_finished_all_the_same(monkeypatch):
    """Else wandb.init of the next run in the same process gives this one back."""
    logger = Logger(failing=[2])
    stub_wandb(monkeypatch, logger)
    train("iac", track=True)
    assert len(logger.finished) == 1


@every_script
def test_a_resumed_run_goes_on_in_the_same_run_of_weights_and_biases(monkeypatch, script):
    loggers = [Logger(), Logger()]
    first = stub_wandb(monkeypatch, loggers[0])
    with pytest.raises(TaskError):
        train(script, Faulty(lambda items: None, 2), track=True)
    assert (first[0]["id"], first[0]["resume"]) == (None, None) and loggers[0].finished == [1]
    second = stub_wandb(monkeypatch, loggers[1])
    train(script, track=True, resume="run")
    assert (second[0]["id"], second[0]["resume"]) == ("made-up", "allow")
    assert [step for step, _ in loggers[1].logged] == [8, 12, None]


def test_the_real_weights_and_biases_goes_offline_and_on_again(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    original = wandb.init

    def init(mode, **known):
        if mode is None:
            raise wandb.errors.CommError("no network")
        return original(mode=mode, **known)

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(TaskError):
        train("ppo", Faulty(lambda items: None, 2), track=True)
    train("ppo", track=True, resume="run")
    names = [path.stem for path in Path("run/wandb").glob("offline-run-*/*.wandb")]
    assert len(names) == 2 and len({*names}) == 1


# --- Deterministic algorithms -----------------------------------------------------------------------------------------


@every_script
def test_deterministic_algorithms_are_for_the_run_alone(script):
    seen = []

    def watch(items):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return [0.5] * len(items)

    train(script, Faulty(watch, 1), train_size=4, deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(TaskError):
        train(script, Faulty(lambda items: None, 1), deterministic=True, overwrite=True)
    assert not torch.are_deterministic_algorithms_enabled()
    train(script, Faulty(watch, 1), train_size=4, overwrite=True)
    assert seen == [True, False]


@every_script
@pytest.mark.parametrize("deterministic", [True, False])
def test_an_operation_that_is_not_deterministic_is_named(monkeypatch, script, deterministic):
    """torch has no deterministic put_."""
    module, name = SCRIPTS[script][0], LOSS[script]
    original = getattr(module, name)

    def loss(*given):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        return original(*given)

    monkeypatch.setattr(module, name, loss)
    if not deterministic:
        assert train(script, train_size=4)[1].step == 1
        return
    with pytest.raises(
        UserError, match="^--deterministic: put_.* does not have a deterministic implementation"
    ) as error:
        train(script, deterministic=True)
    assert_one_line(error, 2)


# --- What a run takes, it gives back ----------------------------------------------------------------------------------


@every_script
@pytest.mark.parametrize("fault", [None, fail], ids=["done", "failed"])
def test_signals_and_the_folder_are_given_back(script, fault):
    def mine(*_):
        pass

    within, numbers = [], (signal.SIGTERM, signal.SIGINT)

    def watch(items):
        within.append([signal.getsignal(each) is mine for each in numbers])
        with pytest.raises(UserError, match="another run is under way in run"):
            utils.run.lock(Path("run"))
        return [0.5] * len(items)

    reward_func = Faulty(watch, 1)
    if fault:
        reward_func = Faulty(lambda items: watch(items) if reward_func.called == 1 else fault(), *range(1, 99))
    before = [signal.signal(each, mine) for each in numbers]
    try:
        if fault:
            with pytest.raises(TaskError):
                train(script, reward_func, train_size=8)
        else:
            train(script, reward_func, train_size=8)
        assert [signal.getsignal(each) for each in numbers] == [mine, mine]
    finally:
        for each, handler in zip(numbers, before):
            signal.signal(each, handler)
    assert within == [[False, False]]
    utils.run.lock(Path("run")).close()


@every_script
def test_a_run_that_does_not_start_gives_back_the_folder(script):
    with pytest.raises(TaskError):
        train(script, Faulty(lambda items: None, 2))
    (checkpoint,) = checkpoints(Path("run/checkpoints"))
    (checkpoint / "state.json").write_text("{}")
    with pytest.raises(UserError, match="no checkpoint in run/checkpoints is whole") as error:
        train(script, resume="run", deterministic=False)
    assert_one_line(error, 2)
    utils.run.lock(Path("run")).close()


# --- Memory that grows ------------------------------------------------------------------------------------------------

TINY = "--train-size {items} --rollout-buffer-size 2 --num-train-epochs 1 --output-dir run "
ENDLESS = {
    "ippo": TINY + "--task number --mini-batch-size 2 --max-new-tokens 2 --eval-interval 0",
    "iac": TINY + "--task number --mini-batch-size 2 --max-new-tokens 2 --eval-interval 0",
    "ppo": TINY + "--batch-size 2 --max-turns 1 --max-output-tokens 2 --lora-rank 4 --evaluation-interval 0",
}
WATCHED = """
import json, sys
from pathlib import Path
import {module} as script
from utils.cli import parse
from utils.run import Run

resident, log = [], Run.log

def watched(*given):
    log(*given)
    resident.append(int(Path("/proc/self/statm").read_text().split()[1]))

Run.log = watched
script.main(parse(script.Args, sys.argv[1:]))
Path("resident.json").write_text(json.dumps(resident))
"""


def median(numbers):
    return sorted(numbers)[len(numbers) // 2]


@pytest.mark.parametrize(
    "script, updates",
    [("ippo", 60), ("ppo", 60), *(pytest.param(script, 300, marks=pytest.mark.slow) for script in SCRIPTS)],
)
def test_memory_does_not_grow_with_the_updates(script, updates):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})" + WATCHED.format(module=SCRIPTS[script][0].__name__)
    command = [sys.executable, "-c", code, *ENDLESS[script].format(items=2 * updates).split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    resident = json.loads(Path("resident.json").read_text())
    assert len(resident) == updates
    assert median(resident[-20:]) < 1.05 * median(resident[29:40])
