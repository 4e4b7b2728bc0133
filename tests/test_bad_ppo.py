"""Bad input to ppo_llm: one line and an exit code, no traceback, and nothing written before it is checked."""

import re
import shutil
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest

import ppo_llm
from utils.cli import command_line, parse
from utils.tasks import number

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SMALL = "--train-size 8 --rollout-buffer-size 8 --batch-size 4 --num-train-epochs 1 --max-turns 2 --eval-loop 4 "
SMALL += "--max-output-tokens 4 --evaluation-interval 0 --lora-rank 8 --lora-alpha 16"
SMALL = SMALL.split()


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command with flags, as from a shell; its exit code and its standard error."""

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["ppo_llm.py", *map(str, flags), "--output-dir", "run"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            command_line(ppo_llm.main, ppo_llm.Args, ppo_llm.__doc__)
        return stop.value.code, capsys.readouterr().err

    return run


def assert_refused(command, message, *flags):
    """One line, exit code 2, and nothing written."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if "__pycache__" not in str(path)}
    code, error = command(*flags)
    assert re.fullmatch(rf"ppo_llm\.py: error: .*{message}.*\n", error), error
    assert code == 2
    assert before == {path: path.stat().st_mtime_ns for path in Path().rglob("*") if "__pycache__" not in str(path)}


# --- Flags ------------------------------------------------------------------------------------------------------------


def test_every_number_has_bounds_but_a_threshold():
    without = set()
    for name, hint in typing.get_type_hints(ppo_llm.Args, include_extras=True).items():
        members = () if typing.get_origin(hint) is typing.Annotated else typing.get_args(hint)
        if {int, float} & {hint, *members}:
            without.add(name)
    assert without == {"early_termination_threshold"}


LAYERS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
TAKE_TURNS = "--turn-level-clip and --turn-value-reduction take --action-granularity turn"
FLAGS = {
    "--env guess --task number": "--env guess and --task number are two things to train on; give one",
    "--shard": "--shard takes several processes, and this is one: start them with torchrun, or add --no-shard",
    "--num-agents 2": "--num-agents 2 takes a --task; an environment has one player",
    "--dataset items.jsonl": "--dataset has no effect without --task",
    "--eval-size 8": "--eval-size has no effect without --task",
    "--early-termination-threshold 0.5": "--early-termination-threshold has no effect without --task",
    "--early-termination-threshold 0.5 --task number": "--early-termination-threshold takes several turns",
    "--max-output-tokens 5 --max-model-len 4": "--max-output-tokens 5 after a prompt of 1 exceeds --max-model-len 4",
    "--max-output-tokens 600": "--max-output-tokens 600 after a prompt of 1 exceeds the model.s 512 positions",
    "--min-output-tokens 9": "--min-output-tokens takes at most --max-output-tokens, 8, got 9",
    "--turn-level-clip --action-granularity token": TAKE_TURNS,
    "--turn-value-reduction mean --action-granularity token": TAKE_TURNS,
    "--reference-update-interval 1 --no-use-separate-reference-adapter": (
        "--reference-update-interval has no effect without --use-separate-reference-adapter"
    ),
    "--load-optimizer": "--load-optimizer has no effect without --load-checkpoint",
    "--merge-lora-configs": "--merge-lora-configs has no effect without --load-checkpoint",
    "--keep-reference": "--keep-reference has no effect without --load-checkpoint",
    "--fresh-critic": "--fresh-critic has no effect without --load-checkpoint",
    "--keep-reference --load-checkpoint x --beta 0": "--keep-reference has no effect without --beta",
    "--keep-reference --load-checkpoint x --no-use-separate-reference-adapter": (
        "--keep-reference has no effect without --use-separate-reference-adapter"
    ),
    "--lora-config gone.json": "--lora-config: gone.json can't be read as JSON: .*No such file",
    "--lora-target-modules q_proj nothing": rf"names of linear layers \({LAYERS}; .*the model has no nothing",
    "--load-checkpoint gone": "--load-checkpoint takes a folder with agent_0 .* got gone: there is no such folder",
    "--load-checkpoint .": "--load-checkpoint takes a folder with agent_0 .*: it has no agent_0",
    "--model .": r"--model takes a model's folder or a hub name, and \. has no config.json",
    "--task nosuch": "--task takes arxiv, .*tldr or a FILE.py, got nosuch",
    "--task tldr --max-turns 2": "--task tldr has no external_transition, which 2 turns take",
    "--task number --train-size 10": "has 10 items; an update takes 64",
    "--train-size 10": "--train-size takes at least the games of an update, 64, got 10",
    "--train-size 10 --num-generations 4": "--train-size takes at least the games of an update, 16, got 10",
    "--env gues": "--env gues: there is none; --env takes grid, guess, probe, FILE.py or MODULE:CALLABLE",
    "--env gone.py": "--env gone.py: there is no such file",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_that_are_wrong_or_do_not_go_together_are_refused(command, flags):
    assert_refused(command, FLAGS[flags], *flags.split())


SIZES = {
    "--rollout-buffer-size 10 --num-generations 2": (
        "--rollout-buffer-size takes a multiple of generations x processes, 4, got 10"
    ),
    "--batch-size 7": "--batch-size takes a multiple of 2 processes, got 7",
}


@pytest.mark.parametrize("flags", SIZES)
def test_a_size_that_does_not_divide_among_processes_is_refused(command, monkeypatch, flags):
    monkeypatch.setattr(ppo_llm.distributed, "world_size", lambda: 2)
    assert_refused(command, SIZES[flags], *SMALL, *flags.split())


UNSHARDED = {  # flags: what of the base --shard does not take
    ("--torch-compiler", "default"): "compiled: leave out --torch-compiler",
    ("--model-config", 'quantization_config={"load_in_4bit": true}'): "quantized",
}


@pytest.mark.parametrize("flags", UNSHARDED)
def test_a_base_that_can_not_be_shared_out_is_refused(command, monkeypatch, flags):
    monkeypatch.setattr(ppo_llm.distributed, "world_size", lambda: 2)
    assert_refused(command, f"--shard takes a base that is not {UNSHARDED[flags]}", "--shard", *flags)


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("stage") / "run"
    ppo_llm.main(parse(ppo_llm.Args, [*SMALL, "--output-dir", str(folder)]))
    return folder


WEIGHTS = "agent_0/actor/adapter_model.safetensors"
MISFITS = {  # flags, and the message
    "--lora-rank 4 --lora-alpha 3": (
        "takes its LoRA configuration, or --merge-lora-configs: .*r 8 there, 4 here; .*lora_alpha 16.0 there, 3.0 here"
    ),
    "--lora-rank 16 --merge-lora-configs --load-optimizer": (
        "--load-optimizer takes the LoRA configuration of stage, not a merged one: r 8 there, 16 here"
    ),
    "--num-agents 2 --task number": "stage has 1 agent, and the team has 2",
}


@pytest.mark.parametrize("flags", MISFITS)
def test_a_checkpoint_that_does_not_fit_the_flags_is_refused(command, stage, flags):
    shutil.copytree(stage, "stage")
    assert_refused(command, MISFITS[flags], "--load-checkpoint", "stage", *SMALL, *flags.split())


REPLACING = {
    "": "--output-dir takes a folder without a run in it; run has one",
    "--overwrite --lora-target-modules nothing": "the model has no nothing",
    "--overwrite --load-checkpoint run --lora-rank 4": "takes its LoRA config",
}


@pytest.mark.parametrize("flags", REPLACING)
def test_an_earlier_run_is_left_alone_where_the_next_is_refused(command, stage, flags):
    shutil.copytree(stage, "run")
    assert_refused(command, REPLACING[flags], *SMALL, *flags.split())


# --- Environments -----------------------------------------------------------------------------------------------------

ENV = """
class Env:
    def reset(self, seed=None):
        return "Say a number.", {}

    def step(self, response):
        return "more", 1.0, False, False, {}
"""


STEP = '"more", 1.0, False, False, {}'


def test_a_failure_in_the_first_update_is_one_line_also_with_weights_and_biases(command, monkeypatch):
    logger = SimpleNamespace(id="1", log=lambda *_, **__: None, finish=lambda exit_code: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: logger, Table=dict))
    Path("mine.py").write_text(ENV.replace(STEP, "1 / 0"))
    code, error = command("--env", "mine.py", "--track", *SMALL)
    assert code == 1 and re.search(r"(^|\n)ppo_llm\.py: error: the environment failed in all 8 episodes", error)
    assert Path("run", WEIGHTS).is_file() and not Path("run/metrics.csv").exists()


# --- Tasks ------------------------------------------------------------------------------------------------------------


def test_a_task_may_have_no_held_out_items():
    names = ("train_dataset", "formatters", "reward_func", "external_transition")
    task = SimpleNamespace(**{name: getattr(number, name) for name in names})
    flags = [*SMALL, "--evaluation-interval", "1", "--output-dir", "run"]
    _, run = ppo_llm.main(parse(ppo_llm.Args, flags), task)
    assert run.rows[0]["fitness"] is None
