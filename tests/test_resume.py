"""--resume: which flags may differ, which run is meant, what it goes on from, and that it ends with the same bits."""

import functools
import itertools
import json
import os
import shutil

import pytest
import safetensors.torch
from processes import (
    SCRIPTS,
    assert_same,
    command,
    contents,
    finish,
    parse_resumed,
    resume_here,
    saved_steps,
    start,
)

from utils.cli import UserError
from utils.files import read_lines, read_rows
from utils.same import timeless

CASE = "ippo head 1 number"


def some_slow(*cases, fast=("ippo head 1 tldr", "ppo 2 tldr")):
    """The cases, of which only some are fast."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


# --- Flags ------------------------------------------------------------------------------------------------------------


def test_flags_that_differ_are_all_named_before_anything_is_loaded(begun, monkeypatch):
    monkeypatch.setattr(SCRIPTS["ippo_llm"], "build_agents", None)
    folder = begun()
    before = contents(folder)
    flags = ["--seed", "9", "--gamma", "0.5", "--num-train-epochs", "1", "--keep-checkpoints", "7"]
    with pytest.raises(UserError) as error:
        resume_here("ippo_llm", folder, *flags)
    first, differing = str(error.value).split(": ", 1)
    assert first == f"--resume {folder} goes on with that run's flags, and these differ"
    assert sorted(differing.split("; ")) == [
        "--gamma 1.0 there, 0.5 here",
        "--num-train-epochs 2 there, 1 here",
        "--seed 1 there, 9 here",
    ]
    assert error.value.exit_code == 2
    assert contents(folder) == before


def test_flags_that_are_not_given_are_those_of_the_run(begun):
    folder = begun()
    there = json.loads((folder / "config.json").read_text())["args"]
    args = vars(parse_resumed("ippo_llm", folder, "--save-interval", "5"))
    assert json.loads(json.dumps(args)) == there | {"resume": str(folder), "overwrite": False, "save_interval": 5}
    assert there["train_size"] == 12 and there["save_interval"] == 1
    assert isinstance(args["model"], tuple)


def test_a_run_goes_on_in_its_own_folder_and_keeps_what_is_done(begun, tmp_path):
    folder = begun()
    before = contents(folder)
    other = tmp_path / "other"
    for flags, reason in (
        (["--overwrite"], "keeps what is done, and --overwrite would not: give one of them"),
        (["--output-dir", str(other)], f"goes on in that folder: leave out --output-dir {other}"),
    ):
        with pytest.raises(UserError, match=f"^--resume {folder} {reason}$"):
            resume_here("ippo_llm", folder, *flags)
    assert contents(folder) == before
    assert not other.exists()
    resume_here("ippo_llm", folder, "--output-dir", os.path.relpath(folder))


def test_a_run_may_go_on_for_longer_and_be_saved_otherwise(begun):
    folder = begun()
    flags = ["--num-train-epochs", "3", "--save-interval", "2", "--keep-checkpoints", "3"]
    _, run = resume_here("ippo_llm", folder, *flags)
    assert len(run.rows) == run.step == 9
    assert saved_steps(folder) == [6, 8, 9]
    args = parse_resumed("ippo_llm", folder)
    assert (args.num_train_epochs, args.save_interval, args.keep_checkpoints) == (3, 2, 3)


# --- Which run --------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(UserError, match="^--resume takes a run's folder, or latest, and .*nothing has no config.json$"):
        parse_resumed("ippo_llm", tmp_path / "nothing")
    for content in ("", "{", "[]", "{}", '{"args": 3}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match="^--resume: .*config.json can't be read: ") as error:
            parse_resumed("ippo_llm", tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["iac_llm", "ppo_llm"])
def test_a_run_of_another_script_is_one_line(name, begun):
    with pytest.raises(UserError, match=r"^--resume: .* is a run of another script or version: .*ppo_epochs") as error:
        parse_resumed(name, begun())
    assert "\n" not in str(error.value)


def test_a_run_of_a_copy_goes_on_with_the_copy(begun):
    folder = begun()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"script": "/somewhere/mine.py"}))
    before = contents(folder)
    with pytest.raises(UserError, match=f"^--resume {folder} is a run of mine.py, and goes on with that script$"):
        resume_here("ippo_llm", folder)
    assert contents(folder) == before


def test_the_latest_run_is_that_which_wrote_last(begun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="^--resume latest: there is no run of ippo_llm.py under runs/$"):
        parse_resumed("ippo_llm", "latest")
    runs = [begun(name=f"runs/{name}") for name in ("ippo_llm__z", "ippo_llm__a", "iac_llm__b")]
    for seconds, run in enumerate(runs, 1_000_000_000):
        for path in (run, *run.glob("*.*")):
            os.utime(path, (seconds, seconds))
    assert parse_resumed("ippo_llm", "latest").resume == "runs/ippo_llm__a"
    (runs[0] / "metrics.csv").touch()
    assert parse_resumed("ippo_llm", "latest").resume == "runs/ippo_llm__z"
    _, run = resume_here("ippo_llm", "latest")
    assert run.step == 6
    assert (runs[0] / "agent_0").is_dir()


# --- What it goes on from ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agents", [[], ["agent_0", "agent_1"]], ids=["updates", "agents"])
def test_a_run_without_checkpoints_that_has_learned_is_refused_and_kept(agents, begun):
    folder = begun()
    shutil.rmtree(folder / "checkpoints")
    for name in agents:
        (folder / name).mkdir()
        (folder / name / "model.safetensors").touch()
    before = contents(folder)
    refused = start("ippo_llm", "--resume", folder).wait()
    assert refused.exitcode == 2
    there = ", ".join(["6 updates in metrics.csv", *agents])
    line = f"--resume: {folder} has no checkpoint to go on from; it has {there}, which are kept; --output-dir {folder}"
    assert refused.error == f"ippo_llm.py: error: {line} --overwrite begins anew\n"
    assert contents(folder) == before | {".lock": b""}


def test_a_run_that_has_done_no_update_begins_anew(begun, whole):
    folder = begun()
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.csv").unlink()
    assert "going on from" not in finish("ippo_llm", "--resume", folder).output
    assert_same(folder, whole(CASE).folder)


def test_lines_that_were_half_written_are_left_out(begun, whole):
    folder = begun()
    for name in ("metrics.csv", "samples.jsonl"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: content[:-1].rfind(b"\n") + 20])
    finish("ippo_llm", "--resume", folder)
    assert_same(folder, whole(CASE).folder)


def test_a_run_that_has_ended_ends_again_with_the_same_bits(begun, whole):
    folder = begun()
    for _ in range(2):
        finish("ippo_llm", "--resume", folder)
        assert_same(folder, whole(CASE).folder)


def test_a_file_that_someone_else_put_beside_the_checkpoints_is_no_harm(begun):
    folder = begun()
    (folder / "checkpoints/.directory").write_text("a file manager's")
    resume_here("ippo_llm", folder)
    assert saved_steps(folder) == [1, 2, 3, 4, 5, 6]


def test_a_file_cut_off_anywhere_gives_its_whole_lines(begun):
    """Also within a letter, or between the two ends of a line that csv writes."""
    for name, read, head in (("metrics.csv", read_rows, 1), ("samples.jsonl", read_lines, 0)):
        path = begun(name=name) / name
        content = path.read_bytes()
        if name == "samples.jsonl":
            content += '{"text": "größer"}\n'.encode()
        path.write_bytes(content)
        rows = [repr(row) for row in read(path)]
        for end in range(len(content)):
            path.write_bytes(content[:end])
            num_lines = max(0, content[:end].count(b"\n") - head)
            complete = content[:end].endswith(b"\r") and end > content.find(b"\n")
            assert [repr(row) for row in read(path)] in (rows[:num_lines], rows[: num_lines + complete])


def test_metrics_that_lack_updates_are_one_line(begun):
    folder = begun()
    (folder / "metrics.csv").unlink()
    with pytest.raises(UserError, match="^.*metrics.csv has 0 of the 3 updates that are done$"):
        resume_here("ippo_llm", folder)


def fail_while_learning(name, call):
    """Let a script fail at some call of its optimizer_step, numbered from 1."""
    optimizer_step = SCRIPTS[name].optimizer_step
    numbers = itertools.count(1)

    def fail(*values):
        if next(numbers) == call:
            raise RuntimeError("a fault")
        return optimizer_step(*values)

    SCRIPTS[name].optimizer_step = fail


LENGTHS = """
from utils.tasks.tldr import *
def reward_func(*completions):
    return [float(len("".join(texts)) % 7) for texts in zip(*completions)]
"""
FAILURES = {
    "ippo head 1 tldr": 2 * 2 + 2,
    "maac 2 tldr": 2 * 6 + 2,
    "magrpo 2 tldr": 2 * 4 + 2,
    "ppo 2 tldr": 2 * 8 + 3,
}


@pytest.mark.parametrize("case", some_slow(*FAILURES, fast=("ippo head 1 tldr", "maac 2 tldr", "ppo 2 tldr")))
def test_a_run_that_failed_while_it_learned_goes_on_from_there(case, small_model, tmp_path):
    """An agent has made a step of the third update; its samples are drawn once more, from what it is then."""
    name, flags = command(case, small_model)
    (tmp_path / "lengths.py").write_text(LENGTHS)
    flags += ["--task", tmp_path / "lengths.py", "--output-dir"]
    finish(name, *flags, tmp_path / "whole")
    before = functools.partial(fail_while_learning, name, FAILURES[case])
    process = start(name, *flags, tmp_path / "failed", before=before).wait()
    assert process.exitcode == 1 and process.error.splitlines()[-1] == "RuntimeError: a fault"
    resumed = finish(name, "--resume", tmp_path / "failed")
    assert "2 of 6 updates are done, and some of the next" in resumed.output
    rows, undisturbed = [timeless(path) for path in (tmp_path / "failed", tmp_path / "whole")]
    assert len(rows) == 6
    assert rows[:2] == undisturbed[:2] and rows[2] != undisturbed[2]


@pytest.mark.parametrize("case", some_slow(CASE, "maac 2 tldr", "magrpo 2 tldr", "ppo guess", fast=(CASE, "ppo guess")))
def test_a_model_that_has_changed_since_is_one_line(case, small_model, tmp_path):
    model = shutil.copytree(small_model, tmp_path / "model")
    folder = tmp_path / "run"
    name, flags = command(case, str(model))
    finish(name, *flags, "--output-dir", folder, "--save-interval", "1")
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    safetensors.torch.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    before = contents(folder)
    with pytest.raises(UserError, match="began with another model|is of the base .*: the weights differ$") as error:
        resume_here(name, folder)
    assert "\n" not in str(error.value)
    assert contents(folder) == before


# --- All random generators --------------------------------------------------------------------------------------------

NOISY_TASK = """
import random, numpy, torch
from utils.tasks.tldr import *
def reward_func(*completions):
    return [random.random() + random.gauss(0, 1) + numpy.random.rand() + torch.rand(()).item() for _ in completions[0]]
"""


@pytest.mark.parametrize("case", some_slow("ippo head 1 tldr", "maac 2 tldr", "magrpo 2 tldr", "ppo 2 tldr"))
def test_a_task_that_draws_from_any_generator_draws_the_same(case, small_model, tmp_path):
    name, flags = command(case, small_model)
    folder = tmp_path / "run"
    (tmp_path / "noisy.py").write_text(NOISY_TASK)
    own = [*flags, "--task", tmp_path / "noisy.py", "--save-interval", "1", "--keep-checkpoints", "9"]
    finish(name, *own, "--output-dir", folder)
    shutil.copytree(folder, tmp_path / "whole")
    for step in (4, 5, 6):
        shutil.rmtree(folder / f"checkpoints/update_00000{step}")
    assert "3 of 6 updates are done" in finish(name, "--resume", folder).output
    assert_same(folder, tmp_path / "whole")
