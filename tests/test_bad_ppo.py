"""Bad input to ppo_llm: one line and an exit code, no traceback, and nothing written before it is checked."""

import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_flags import make_model

import ppo_llm
import utils.run
from utils.cli import TaskError, UserError, command_line, parse
from utils.ranges import Range
from utils.tasks import number

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--train-size 8 --rollout-buffer-size 8 --batch-size 4 --num-train-epochs 1 --max-turns 2 --eval-loop 4"
SMALL = [*SMALL.split(), *"--max-output-tokens 4 --evaluation-interval 0 --lora-rank 8 --lora-alpha 16".split()]


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A folder of its own to work in; loading an environment adds folders to sys.path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(utils.run, "draw_curves", lambda *_: None)  # takes longer than all the rest


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command with flags, as from a shell; its exit code and what it said on standard error."""

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["ppo_llm.py", *map(str, flags), "--output-dir", "run"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            command_line(ppo_llm.main, ppo_llm.Args, ppo_llm.__doc__)
        return stop.value.code, capsys.readouterr().err

    return run


def refused(command, message, *flags):
    """One line, exit code 2, and nothing written."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if "__pycache__" not in str(path)}
    code, said = command(*flags)
    assert re.fullmatch(rf"ppo_llm\.py: error: .*{message}.*\n", said), said
    assert code == 2
    assert before == {path: path.stat().st_mtime_ns for path in Path().rglob("*") if "__pycache__" not in str(path)}


# --- Flags ------------------------------------------------------------------------------------------------------------

OUTSIDE = {  # of a range, by what it takes
    "1 or more": [0, -1],
    "0 or more": [-1],
    "a number from 0 to 1": [1.5, -0.1, float("nan")],
    "a number from 0 to below 1": [1.0, -0.1, float("nan")],
    "a number above 0, at most 1": [0.0, 1.5, float("nan")],
    "a number above 0": [0.0, -1.0, float("inf"), float("nan")],
    "a number of 0 or more": [-0.1, float("inf"), float("nan")],
}


def ranges():
    """Each flag that has a range, with its range, or the first of two."""
    for name, hint in typing.get_type_hints(ppo_llm.Args, include_extras=True).items():
        for part in [hint, *typing.get_args(hint)]:
            for limit in getattr(part, "__metadata__", ()):
                if isinstance(limit, Range):
                    yield name, limit.takes


RANGES = dict(reversed([*ranges()]))


@pytest.mark.parametrize("name", RANGES)
def test_a_number_out_of_range(command, monkeypatch, name):
    monkeypatch.setattr(ppo_llm, "load_env", None)
    flag, (first, *others) = "--" + name.replace("_", "-"), OUTSIDE[RANGES[name]]
    refused(command, rf"{flag} takes {RANGES[name]}(, or none)?, got {first}", f"{flag}={first}")
    for value in [*others, "one"]:
        with pytest.raises(UserError, match=f"^{flag} takes {RANGES[name]}(, or none)?, got {value}$"):
            ppo_llm.main(ppo_llm.Args(**{name: value}))


def test_every_number_has_a_range_but_a_threshold():
    numbers = {
        name
        for name, hint in typing.get_type_hints(ppo_llm.Args).items()
        if {int, float} & {hint, *typing.get_args(hint)}
    }
    assert numbers - RANGES.keys() == {"early_termination_threshold"}


LAYERS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
FLAGS = {
    "--env guess --task number": "--env guess and --task number are two things to train on; give one",
    "--num-agents 2": "--num-agents 2 takes a --task; an environment has one player",
    "--max-output-tokens 5 --max-model-len 4": "--max-output-tokens takes at most --max-model-len,? 4, got 5",
    "--max-output-tokens 600": "--max-output-tokens takes at most --max-model-len, 512, got 600",  # the model.s
    "--min-output-tokens 9": "--min-output-tokens takes at most --max-output-tokens, 8, got 9",
    "--turn-level-clip --action-granularity token": "--turn-level-clip takes turns as actions",
    "--turn-level-clip --max-turns 1": "--turn-level-clip takes turns as actions",
    "--reference-update-interval 1 --no-use-separate-reference-adapter": (
        "--reference-update-interval takes a --use-separate-reference-adapter"
    ),
    "--load-optimizer": "--load-optimizer takes a --load-checkpoint",
    "--merge-lora-configs": "--merge-lora-configs takes a --load-checkpoint",
    "--lora-target-modules q_proj nothing": rf"names of linear layers \({LAYERS}; .*the model has no nothing",
    "--load-checkpoint gone": "--load-checkpoint takes a folder with agent_0 .* got gone: there is no such folder",
    "--load-checkpoint .": "--load-checkpoint takes a folder with agent_0 .*: it has no agent_0",
    "--model .": r"--model takes a model's folder or a hub name, and \. has no config.json",
    "--task nosuch": "--task takes arxiv, .*tldr or a FILE.py, got nosuch",
    "--task tldr --max-turns 2": "--max-turns 2 takes a task with an external_transition, and tldr has none",
    "--task number --train-size 10": "--train-size takes at least --rollout-buffer-size,? 64, got 10",
    "--train-size 10": "--train-size takes at least --rollout-buffer-size,? 64, got 10",
    "--gamma two": "--gamma.*two",
    "--dtype float16": "--dtype.*float32.*bfloat16",
    "--no-such-flag": "Unrecognized options: --no-such-flag",
    "--env gues": "--env gues: there is none; --env takes grid, guess, FILE.py or MODULE:CALLABLE",
    "--env gone.py": "--env gone.py: there is no such file",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_that_are_wrong_or_do_not_go_together(command, flags):
    refused(command, FLAGS[flags], *flags.split())


def test_the_command_ends_with_one_line_and_exit_code_2():
    command = [sys.executable, ROOT / "ppo_llm.py", "--num-agents", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ppo_llm.py: error: --num-agents takes 1 or more, got 0\n"


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(ppo_llm.Args, ["--help"], ppo_llm.__doc__)
    assert stop.value.code in (0, None)
    told, source = capsys.readouterr().out, Path(ppo_llm.__file__).read_text() + Path(utils.run.__file__).read_text()
    for name in vars(ppo_llm.Args()):
        assert f"--{name.replace('_', '-')}" in told
        comment, *_ = re.findall(rf"^    {name}: .*  # (.+)$", source, flags=re.M)
        assert " ".join(comment.split()[:3]) in " ".join(told.replace("│", " ").split()), name


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("stage") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils.run, "draw_curves", lambda *_: None)
        ppo_llm.main(parse(ppo_llm.Args, [*SMALL, "--output-dir", str(folder)]))
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory, tokenizer):
    """The folder of another model."""
    return make_model(tmp_path_factory.mktemp("other") / "model", tokenizer)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


WEIGHTS = "agent_0/actor/adapter_model.safetensors"
CHECKPOINTS = {  # what is done to a file, other flags, and what is said
    "incomplete": (WEIGHTS, Path.unlink, "", rf"agent_0 is incomplete: there is no .*{WEIGHTS}"),
    "cut": (WEIGHTS, cut, "", f"{WEIGHTS} is no whole safetensors file"),
    "cut head": ("agent_0/value_head.safetensors", cut, "", "value_head.safetensors is no whole safetensors file"),
    "cut optimiser": (
        "agent_0/optimizer.safetensors",
        cut,
        "--load-optimizer",
        "optimizer.safetensors is no whole safetensors file",
    ),
    "another configuration": (
        None,
        None,
        "--lora-rank 4 --lora-alpha 3",
        "takes its LoRA configuration, or --merge-lora-configs: .*r 8 there, 4 here; .*lora_alpha 16.0 there, 3.0 here",
    ),
    "another optimiser": (
        None,
        None,
        "--lora-rank 16 --merge-lora-configs --load-optimizer",
        "--load-optimizer takes the LoRA configuration of stage, not a merged one: r 8 there, 16 here",
    ),
    "another team": (None, None, "--num-agents 2 --task number", "stage has 1 agent, and --num-agents is 2"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_does_not_do(command, saved, case):
    file, damage, flags, message = CHECKPOINTS[case]
    shutil.copytree(saved, "stage")
    if file:
        damage(Path("stage") / file)
    refused(command, message, "--load-checkpoint", "stage", *SMALL, *flags.split())


def test_a_checkpoint_of_another_base(command, saved, other):
    message = f"agent_0 is of the base utils/tiny_lm, not of {other}: hidden_size 160 there, 32 here"
    refused(command, message, "--load-checkpoint", saved, "--model", other, *SMALL)


def test_an_earlier_run_is_left_alone_also_if_it_was_to_be_replaced(command, saved):
    shutil.copytree(saved, "run")
    refused(command, "--output-dir takes a folder without a run in it; run has one", *SMALL)
    refused(command, "the model has no nothing", "--overwrite", "--lora-target-modules", "nothing", *SMALL)
    refused(command, "takes its LoRA config", "--overwrite", "--load-checkpoint", "run", *SMALL, "--lora-rank", "4")


# --- Environments -----------------------------------------------------------------------------------------------------

ENV = """
class Env:
    def reset(self, seed=None):
        return "Say a number.", {}

    def step(self, answer):
        return "more", 1.0, False, False, {}
"""
FILES = {
    ENV.replace("reset", "start"): r"Env\(\) gives an object of type Env, without a reset\(\)",
    ENV.replace("step", "turn"): r"Env\(\) gives an object of type Env, without a step\(\)",
    ENV.replace("Env", "Environment"): "there is no make or Env in it",
    "import no_such_module\n" + ENV: "it can't be loaded: ModuleNotFoundError: No module named 'no_such_module'",
    "def f(:\n" + ENV: "it can't be loaded: SyntaxError: .*",
    ENV + "def optimum(max_turns): return 1 / (max_turns - 2)": "optimum failed: ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("code", FILES)
def test_an_environment_that_is_none(command, code):
    Path("mine.py").write_text(code)
    refused(command, f"--env mine.py: {FILES[code]}", "--env", "mine.py", *SMALL)


STEP, RESET = '"more", 1.0, False, False, {}', '"Say a number.", {}'
WHILE = {  # a run is under way: what was learned so far is saved
    "four values": (
        STEP,
        '"more", 1.0, False, {}',
        1,
        "step of Env returned 4 values; it takes 5: observation, reward",
    ),
    "no text": (RESET, "[1, 2], {}", 1, "reset of Env returned an observation of type list; it takes text, a str"),
    "nan": (
        STEP,
        '"more", float("nan"), False, False, {}',
        1,
        "step of Env returned the reward nan; it takes a finite",
    ),
    "all fail": (STEP, "1 / 0", 1, r"failed in all 8 episodes, at first with ZeroDivisionError: .* \(turn 1\)"),
    "no room": (RESET, '"Say it. " * 300, {}', 2, "--max-output-tokens 4 after a prompt of .* exceeds --max-model-len"),
}


@pytest.mark.parametrize("case", WHILE)
def test_an_environment_that_goes_wrong(command, case):
    old, new, expected, message = WHILE[case]
    assert old in ENV
    Path("mine.py").write_text(ENV.replace(old, new))
    code, said = command("--env", "mine.py", *SMALL)
    assert re.search(rf"(^|\n)ppo_llm\.py: error: .*{message}.*\n$", said), said
    assert code == expected and "Traceback" not in said
    assert Path("run", WEIGHTS).is_file() and not Path("run/metrics.csv").exists()


def test_an_environment_that_does_not_close_what_is_cut_short():
    """Stopped for lack of room, all episodes are dropped: there is nothing to learn from."""
    ending = "\n    def close(self):\n        if hasattr(self, 'played'): raise OSError('still open')\n"
    Path("mine.py").write_text(
        ENV.replace("        return " + STEP, "        self.played = 1\n        return " + STEP) + ending
    )
    flags = [*SMALL, "--max-turns", "6", "--max-model-len", "22"]
    with pytest.raises(TaskError, match="failed in all 8 episodes, at first with OSError: still open"):
        ppo_llm.main(parse(ppo_llm.Args, ["--env", "mine.py", *flags, "--output-dir", "run"]))


def test_a_failure_in_the_first_update_is_one_line_also_with_weights_and_biases(command, monkeypatch):
    logger = SimpleNamespace(id="1", log=lambda *_, **__: None, finish=lambda exit_code: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: logger, Table=dict))
    Path("mine.py").write_text(ENV.replace(STEP, "1 / 0"))
    code, said = command("--env", "mine.py", "--track", *SMALL)
    assert code == 1 and re.search(r"(^|\n)ppo_llm\.py: error: the environment failed in all 8 episodes", said)


def test_a_task_may_have_no_held_out_items():
    """As it says of itself in utils/tasks: eval_dataset may be left out."""
    names = ("train_dataset", "formatters", "reward_func", "external_transition")
    task = SimpleNamespace(**{name: getattr(number, name) for name in names})
    flags = [*SMALL, "--task", "number", "--evaluation-interval", "1", "--output-dir", "run"]
    _, run = ppo_llm.main(parse(ppo_llm.Args, flags), task)
    assert run.rows[0]["fitness"] is None
