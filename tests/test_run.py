"""A run as its user sees it: what is in its folder, how it ends, what it gives back, and what it logs elsewhere."""

import contextlib
import errno
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
import wandb
from helpers import read_metrics
from matplotlib.image import imread
from processes import ROOT, assert_same
from safetensors.torch import load_file
from short_runs import (
    FLAGS,
    SCRIPTS,
    Faulty,
    assert_one_line,
    every_script,
    make_task,
    return_none,
    reward_length,
    small_model,
    train,
)
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import utils.run
from utils import distributed
from utils.cli import Stopped, TaskError, UserError
from utils.files import WriteError, lock, whole_lines
from utils.run import failures, folder, log, report
from utils.run.metrics import agent_metrics
from utils.same import timeless
from utils.tasks import number
from utils.tasks.calls import as_metric

pytestmark = pytest.mark.usefixtures("in_tmp_path")


# --- What is in the folder --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three updates with curves, its agents, and its folder."""
    path = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utils.run.log.draw_curves", report.draw_curves)
        agents, run = train("ippo", folder=path, eval_interval=3, eval_size=4, use_separate_critic=True)
    return SimpleNamespace(agents=agents, run=run, folder=path)


def test_the_configuration_is_kept(finished):
    config = json.loads((finished.folder / "config.json").read_text())
    assert config["args"] == json.loads(json.dumps(vars(finished.run.args)))
    assert config["script"] == str(ROOT / "ippo_llm.py") and config["num_updates"] == 3
    assert config["versions"]["torch"] == torch.__version__ and "git_commit" in config


def test_samples_are_what_was_scored(finished):
    samples = [json.loads(line) for line in whole_lines(finished.folder / "samples.jsonl")]
    assert [sample["update"] for sample in samples] == [1, 1, 2, 2, 3, 3]
    for sample in samples:
        (reward,) = reward_length(*[[text] for text in sample["completions"]], items=[sample["item"]])
        assert sample["reward"] == pytest.approx(reward, abs=1e-6)


def test_metrics_are_of_each_update(finished):
    rows = read_metrics(finished.folder)
    assert [row["global_step"] for row in rows] == ["4", "8", "12"]
    assert [float(row["epoch"]) for row in rows] == pytest.approx([1 / 3, 2 / 3, 1])
    assert [bool(row["eval/reward_mean"]) for row in rows] == [True, False, True]  # the first and every third
    for row in rows:
        seconds = sum(float(row[f"time/{phase}"]) for phase in ("play", "reward", "learn"))
        assert float(row["samples_per_second"]) == pytest.approx(4 / seconds, rel=1e-3)
    assert [float(row["reward_mean"]) for row in rows] == pytest.approx(
        [row["reward_mean"] for row in finished.run.rows]
    )


def test_runs_that_are_compared_are_runs(finished, tmp_path):
    def ask(*words):
        done = subprocess.run([sys.executable, "-m", "utils.same", *words], cwd=ROOT, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    folder = str(finished.folder.resolve())
    assert ask(folder, folder)[0] == 0 and ask("--help")[0] == 0
    assert ask(folder) == (2, "usage: python -m utils.same RUN RUN: two folders of runs\n")
    assert ask(folder, str(tmp_path)) == (2, f"same.py: error: {tmp_path} is no run's folder: it has no metrics.csv\n")
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other/samples.jsonl").unlink()
    assert ask(folder, str(tmp_path / "other"))[0] == 1


def test_curves_are_drawn(finished):
    assert imread(finished.folder / "curves.png").shape[:2] == (650, 1200)


def test_agents_are_saved_as_they_are(finished):
    for i, agent in enumerate(finished.agents):
        path = finished.folder / f"agent_{i}"
        assert AutoTokenizer.from_pretrained(path).chat_template == agent.tokenizer.chat_template
        pairs = [(AutoModelForCausalLM.from_pretrained(path).state_dict(), agent.actor.model)]
        pairs.append((AutoModel.from_pretrained(path / "critic").state_dict(), agent.critic.model))
        pairs.append((load_file(path / "value_head.safetensors"), agent.value_head))
        for saved, module in pairs:
            assert saved.keys() == module.state_dict().keys()
            assert all(torch.equal(saved[name], x) for name, x in module.state_dict().items())


def test_adapters_are_saved_as_peft_has_them():
    agents, _ = train("ppo")
    model, _ = small_model()
    ids = torch.arange(10, 20)[None]
    for i, agent in enumerate(agents):
        opened = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_config(model.config), f"run/agent_{i}/actor")
        opened.get_base_model().load_state_dict(model.state_dict(), strict=False)
        own = peft.get_peft_model_state_dict(agent.actor.model, adapter_name=agent.actor.adapter)
        saved = load_file(f"run/agent_{i}/actor/adapter_model.safetensors")
        assert own.keys() == saved.keys() and all(torch.equal(x, own[name]) for name, x in saved.items())
        assert opened(ids).logits.isfinite().all()


def test_no_pickle_and_nothing_half_written_is_left(finished):
    assert not {path.suffix for path in finished.folder.rglob("*")} & {".bin", ".pt", ".pkl", ".pth", ".writing"}


def test_a_run_ends_with_its_last_samples_and_where_the_time_went(capsys):
    train("ippo", train_size=4)
    shown = capsys.readouterr().out
    assert "agent 1:" in shown and "where the time went" in shown and shown.endswith("the run is in run\n")


@pytest.mark.parametrize(
    "rewards, held_out, end",
    [
        ([0.0, 2.0], [0.5, 1.5], "0.000 at first, 2.000 over the last tenth of updates; eval.*1.500 in the end"),
        ([1.0, 1.0], [None, None], "1.000 over the last tenth of updates: every episode earned the same"),
    ],
)
def test_the_last_line_says_what_was_earned(rewards, held_out, end):
    rows = [{"reward_mean": x, "reward_std": 0.0, "eval/reward_mean": y} for x, y in zip(rewards, held_out)]
    assert re.search(f"{end}$", report.outcome(rows, 2, None))


def test_evaluating_or_not_does_not_change_what_is_learned():
    for name, interval in (("a", 1), ("b", 0)):
        train("ippo", folder=name, eval_interval=interval, eval_size=3)
    with_evaluations, without = timeless("a"), timeless("b")
    assert all(row["eval/reward_mean"] for row in with_evaluations)
    assert [row | {"eval/reward_mean": ""} for row in with_evaluations] == without


def test_held_out_items_are_played_with_the_same_draws_each_time():
    calls = []

    def note(*completions, items):
        rewards = reward_length(*completions, items=items)
        calls.append(([item["share"] for item in items], completions, rewards))
        return rewards

    _, run = train("ippo", note, eval_interval=1, eval_size=3, actor_learning_rate=0.0)
    held_out = calls[1::2]
    assert held_out == [held_out[0]] * 3 and calls[0][1] != calls[2][1]
    assert held_out[0][0] == [item["share"] for item in number.eval_dataset(3, run.args.seed)]
    assert [row["eval/reward_mean"] for row in run.rows] == pytest.approx([sum(held_out[0][2]) / 3] * 3)


# --- Which folder -----------------------------------------------------------------------------------------------------


def test_an_earlier_run_is_kept_unless_it_is_to_be_replaced():
    train("ippo", train_size=4)
    before = Path("run/metrics.csv").read_bytes()
    with pytest.raises(UserError, match="--output-dir takes a folder without a run in it; run has one"):
        train("ippo", train_size=4)
    assert Path("run/metrics.csv").read_bytes() == before
    Path("run/mine.txt").write_text("notes")
    train("ippo", train_size=8, save_interval=1, overwrite=True)
    assert len(read_metrics("run")) == 2 and Path("run/mine.txt").read_text() == "notes"
    assert {path.name for path in Path("run/checkpoints").iterdir()} == {"update_000001", "update_000002"}


@pytest.mark.parametrize("task, name", [(None, "ippo_llm__3__"), ("some/task.py", "ippo_llm__task__3__")])
def test_a_run_without_a_folder_is_named_after_script_task_seed_and_time(task, name):
    args = SCRIPTS["ippo"].Args(seed=3, task=task)
    assert re.fullmatch(rf"runs/{name}\d{{8}}-\d{{6}}", str(folder.run_folder(args, "ippo_llm.py")))


def test_two_runs_of_the_same_second_have_folders_of_their_own(monkeypatch):
    monkeypatch.setattr(folder.time, "strftime", lambda _: "now")
    for name in ("ippo_llm__1__now", "ippo_llm__1__now__2", "ippo_llm__1__now__3"):
        args = SCRIPTS["ippo"].Args(**FLAGS["ippo"] | {"output_dir": None, "train_size": 4})
        _, run = SCRIPTS["ippo"].main(args, make_task(reward_length), *small_model())
        assert run.folder == Path("runs", name) and len(read_metrics(run.folder)) == len(run.rows)
    assert len([*Path("runs").iterdir()]) == 3


@pytest.mark.parametrize(
    "flag, path",
    [
        ("model", ("run/agent_0",)),
        ("critic_model_name_or_path", ("run/critic",)),
        ("opponent_run", "run"),
        ("eval_against", ("random", "run")),
    ],
)
def test_what_a_run_begins_from_is_not_overwritten(flag, path):
    train("ippo", train_size=4)
    Path("run/critic").mkdir()
    Path("run/mine").mkdir()
    args = SCRIPTS["ppo"].Args(output_dir="run", overwrite=True, **{flag: path})
    name = path if isinstance(path, str) else path[-1]
    message = (
        f"^--{flag.replace('_', '-')} {name} is in run, and --overwrite would remove it: give another --output-dir$"
    )
    with pytest.raises(UserError, match=message):
        folder.run_folder(args, "ppo_llm.py")
    args.__dict__[flag] = ("run/mine",)
    assert folder.run_folder(args, "ppo_llm.py") == Path("run")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_task_may_change_the_working_directory(is_stopped, tmp_path):
    calls = itertools.count()

    def reward(*completions, items):
        os.chdir(tempfile.mkdtemp(dir=tmp_path))
        os.rmdir(os.getcwd())
        if is_stopped and next(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return reward_length(*completions, items=items)

    with pytest.raises(Stopped) if is_stopped else contextlib.nullcontext():
        train("ippo", reward, save_interval=0)
    os.chdir(tmp_path)
    names = {path.name for path in Path("run").iterdir()}
    assert names >= {"agent_0", "checkpoints", "samples.jsonl"}
    steps = [path.name for path in Path("run/checkpoints").iterdir()]
    assert max(steps) == f"update_{len(read_metrics('run')):06d}"


def test_the_reference_is_the_actor_of_every_so_many_updates():
    """After four updates it is the actor of before the third; a copy the other way would undo what was learned."""
    flags = {"train_size": 16, "reference_update_interval": 2}
    agents, run = train("ppo", folder="four", **flags)
    earlier, _ = train("ppo", folder="two", pause_at=2, **flags)
    for now, then in zip(agents, earlier):
        reference = now.reference.parameters()
        assert all(map(torch.equal, reference, then.actor.parameters()))
        assert not all(map(torch.equal, reference, now.actor.parameters()))
    assert [abs(row["kl"]) < 1e-6 for row in run.rows] == [True, False, True, False]


def test_without_a_kl_penalty_magrpo_makes_no_passes_to_measure_it(monkeypatch):
    passes = []
    forward = SCRIPTS["magrpo"].policy_forward
    monkeypatch.setattr(SCRIPTS["magrpo"], "policy_forward", lambda *given: passes.append(1) or forward(*given))
    _, run = train("magrpo", folder="without", kl_coef=0.0, pause_at=1)
    assert len(passes) == 2 and not {"kl", "reference_logprob"} & set(run.rows[0])  # one optimiser step of two agents
    _, run = train("magrpo", folder="with", pause_at=1)
    assert len(passes) == 8 and {"kl", "reference_logprob"} <= set(run.rows[0])


def test_an_infinite_metric_is_not_a_number():
    assert as_metric(3, "a") == 3 and math.isnan(as_metric(math.inf, "a")) and math.isnan(as_metric(-1e40, "a"))


def test_a_signal_as_the_disk_is_full_is_not_an_error_of_the_task(monkeypatch):
    def refuse():
        raise WriteError("the disk is full")

    monkeypatch.setattr(utils.run.clock, "phases", ["play"])
    utils.run.Run.on_signal(SimpleNamespace(save_early=refuse))


def test_how_to_go_on_can_be_typed(monkeypatch):
    run = SimpleNamespace(script="/there/ippo_llm.py", folder=Path("my run"), args=SimpleNamespace(task=None, env=None))
    run.task = SimpleNamespace(name="the task in ippo_llm.py")
    monkeypatch.setattr(sys, "argv", ["some where/ippo_llm.py"])
    go_on = utils.run.Run.how_to_go_on
    assert go_on(run) == "go on with: python 'some where/ippo_llm.py' --resume 'my run'"
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert go_on(run) == "go on with: torchrun --nproc-per-node 4 ippo_llm.py --resume 'my run'"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert go_on(run) == "go on as it was started, with --resume 'my run'"


def test_the_commit_is_marked_where_code_differs(tmp_path, monkeypatch):
    def git(*words):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    (tmp_path / "utils").mkdir()
    for name in ("script.py", "page.md", "utils/folder.py"):
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(folder, "__file__", str(tmp_path / "utils" / "folder.py"))
    git("init")
    git("add", "-A")
    git("commit", "-m", "x")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "page.md").write_text("2")
    (tmp_path / "mine.py").write_text("a copy that is in no commit")
    assert folder.git_commit(tmp_path / "script.py") == commit
    assert folder.git_commit(tmp_path / "mine.py") == commit + "+"
    (tmp_path / "script.py").write_text("2")
    assert folder.git_commit(tmp_path / "script.py") == commit + "+"


# --- How it ends ------------------------------------------------------------------------------------------------------


@every_script
def test_a_task_that_fails_ends_the_run_in_a_line_with_what_was_learned(script, undisturbed):
    with pytest.raises(TaskError, match="^reward_func returned None") as error:
        train(script, Faulty(return_none, 3))
    assert_one_line(error, 1)
    assert len(read_metrics("run")) == 2 and Path("run/agent_1").is_dir()
    train(script, resume="run")
    assert_same(Path("run"), undisturbed(script))


def test_a_signal_in_the_last_update_ends_a_run_as_one_that_is_done(capsys):
    def interrupt(items):
        os.kill(os.getpid(), signal.SIGTERM)
        return [0.5] * len(items)

    _, run = train("ippo", Faulty(interrupt, 3))
    assert run.step == run.num_updates == 3 and "go on" not in capsys.readouterr().out


def test_samples_say_what_was_earned_without_a_move(monkeypatch):
    monkeypatch.setattr(log, "read_transcript", lambda _, rollout, k: (["read"], [1.0] if rollout.answers[k] else []))
    rollouts = [SimpleNamespace(answers=[["a"]]), SimpleNamespace(answers=[[]])]
    monkeypatch.setattr(log, "episode_rewards", lambda rollout, _: torch.tensor([1.0 if rollout.answers[0] else -1.0]))
    (sample,) = log.joint_samples([{}], [SimpleNamespace(tokenizer=None)], rollouts, several_turns=True)
    assert sample["earned"] == [1.0, -1.0] and sample["rewards"] == [[1.0], []] and sample["reward"] == 0


@pytest.mark.parametrize("script, of_second", [("maac", -1.0), ("iac", -1.0), ("maac", 1.0)])
def test_opposite_rewards_are_said_and_that_a_critic_of_the_team_is_idle(script, of_second, capsys):
    def reward_func(*completions, items):
        return [[sign * len(text) for text in completions[0]] for sign in (1.0, of_second)]

    train(script, reward_func)
    lines = [line for line in capsys.readouterr().out.splitlines() if "adds up to 0" in line]
    assert len(lines) == (of_second < 0)
    assert all(line.endswith("teaches them nothing: take iac_llm.py") == (script == "maac") for line in lines)


def test_what_was_not_measured_is_nan():
    x = torch.ones(2, 3)
    assert distributed.explained_variance(x, x, torch.zeros(2, 3)).isnan()
    assert distributed.explained_variance(x, x, x) == 1
    assert distributed.explained_variance(x, 0.5 + torch.rand(2, 3), x).isnan()  # all returns are the same


def test_who_sampled_nothing_is_in_no_mean_of_the_team():
    idle, acting = {"kl": 0.0, "reference_logprob": 0.0}, {"kl": 0.5, "reference_logprob": -2.0, "entropy": 1.0}
    assert agent_metrics([idle, acting]) == {"kl": 0.5, "reference_logprob": -2.0, "agent_1/entropy": 1.0}
    assert agent_metrics([{"kl": 0.5}]) == {"kl": 0.5}  # of a script of one's own


def test_the_keyboard_ends_a_run_with_what_was_learned():
    def interrupt(items):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("ippo", Faulty(interrupt, 2))
    assert len(read_metrics("run")) == 1 and AutoModelForCausalLM.from_pretrained("run/agent_1")


@pytest.mark.parametrize(
    "flags, phases, message",
    [
        (
            {},
            ["learn"],
            "out of memory in learning: --micro-batch-size 8 takes less; go on with: it --micro-batch-size 8",
        ),
        ({"micro_batch_size": 1}, ["learn"], "out of memory in learning, with --micro-batch-size 1"),
        ({}, ["play"], "out of memory in playing: --hf-generate-chunk-size 32 takes less"),
        (
            {"hf_generate_chunk_size": 6},
            ["evaluate"],
            "out of memory in evaluation: --hf-generate-chunk-size 3 takes less",
        ),
        ({}, ["log, save"], "out of memory"),
    ],
)
def test_out_of_memory_names_the_flag_that_takes_less(flags, phases, message):
    args = SCRIPTS["ippo"].Args(**flags)
    error = failures.explain(torch.OutOfMemoryError(), args, phases, "go on with: it" if phases == ["learn"] else None)
    assert str(error) == message


def test_memory_that_runs_out_while_it_learns_names_the_flag(monkeypatch):
    def exhaust(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(SCRIPTS["ippo"], "gae", exhaust)
    with pytest.raises(UserError, match="^out of memory in learning: --micro-batch-size 2 takes less$"):
        train("ippo")


# --- What it gives back -----------------------------------------------------------------------------------------------


def test_a_disk_without_locks_is_said(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(UserError, match="^.* can't be locked: No locks available; take another disk "):
        lock(tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_signals_the_folder_and_torchs_algorithms_are_given_back(fails):
    def handler(*_):
        pass

    numbers = (signal.SIGTERM, signal.SIGINT)
    seen = []

    def watch(*completions, items):
        seen.append([signal.getsignal(number) is handler for number in numbers])
        seen.append(torch.are_deterministic_algorithms_enabled())
        with pytest.raises(UserError, match="another run is under way in run"):
            lock(Path("run"))
        return None if fails else [0.5] * len(items)

    before = [signal.signal(number, handler) for number in numbers]
    try:
        if fails:
            with pytest.raises(TaskError):
                train("ippo", watch, train_size=4, deterministic=True)
        else:
            train("ippo", watch, train_size=4, deterministic=True)
        assert [signal.getsignal(number) for number in numbers] == [handler, handler]
    finally:
        for number, previous in zip(numbers, before):
            signal.signal(number, previous)
    assert seen == [[False, False], True] and not torch.are_deterministic_algorithms_enabled()
    lock(Path("run")).close()


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_settings_are_as_they_were(fails, deterministic, warn_only):
    logging = transformers.utils.logging
    logging.enable_progress_bar()
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with contextlib.nullcontext() if not fails else pytest.raises(TaskError):
            train("ippo", (lambda *texts, items: None) if fails else None, train_size=4, deterministic=deterministic)
        assert torch.are_deterministic_algorithms_enabled() and logging.is_progress_bar_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        assert {name: os.environ.get(name) for name in environment} == environment
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["checkpoints", "agent_0", "samples.jsonl"])
@pytest.mark.parametrize("there", [True, False])
def test_overwrite_replaces_a_link_and_not_what_it_leads_to(name, there):
    """Nor does a link that leads nowhere stop it."""
    train("ippo", train_size=4)
    Path("run", name).rename("elsewhere")
    if not there:
        Path("elsewhere").rename("lost")
    Path("run", name).symlink_to(Path("elsewhere").absolute())
    before = {path: path.read_bytes() for path in [Path("elsewhere"), *Path("elsewhere").rglob("*")] if path.is_file()}
    assert bool(before) == there
    _, run = train("ippo", train_size=4, overwrite=True)
    assert run.step == 1 and Path("run", name).exists() and not Path("run", name).is_symlink()
    assert {path: path.read_bytes() for path in before} == before and Path("elsewhere").exists() == there


def test_an_operation_that_is_not_deterministic_is_named(monkeypatch):
    """torch has no deterministic put_."""
    gae = SCRIPTS["ippo"].gae

    def put(*values):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        return gae(*values)

    monkeypatch.setattr(SCRIPTS["ippo"], "gae", put)
    with pytest.raises(UserError, match="^--deterministic: put_.* does not have a deterministic implementation"):
        train("ippo", deterministic=True)


def test_cublas_is_told_to_be_deterministic_before_a_model_is_on_a_gpu(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []

    def build(*_):
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        raise UserError("enough")

    monkeypatch.setattr(SCRIPTS["ippo"], "Agent", build)
    for deterministic in (False, True):
        with pytest.raises(UserError, match="enough"):
            train("ippo", deterministic=deterministic)
    assert seen == [None, ":4096:8"]
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


# --- Weights & Biases -------------------------------------------------------------------------------------------------


class Logger:
    """A run of Weights & Biases that is not sent anywhere; some calls of log, numbered from 1, fail."""

    def __init__(self, failing=()):
        self.id = "made-up"
        self.failing = failing
        self.calls = []
        self.exit_codes = []

    def log(self, values, step=None):
        self.calls.append((step, values))
        if len(self.calls) in self.failing:
            raise wandb.errors.CommError("the line\nis dead")

    def finish(self, exit_code):
        self.exit_codes.append(exit_code)


def stub_wandb(monkeypatch, logger, failing=()):
    """Let wandb.init give a logger, or fail in some modes; its arguments, call by call."""
    calls = []

    def init(**options):
        calls.append(options)
        if options["mode"] in failing:
            raise wandb.errors.CommError("no\nnetwork")
        return logger

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "Table", lambda **table: table)
    return calls


def test_weights_and_biases_out_of_reach_is_logged_to_offline(monkeypatch, undisturbed, capsys):
    logger = Logger()
    calls = stub_wandb(monkeypatch, logger, failing=[None])
    train("ippo", track=True)
    assert [options["mode"] for options in calls] == [None, "offline"]
    line = "--track: Weights & Biases does not start (no network); logging offline, for wandb sync"
    assert capsys.readouterr().out.splitlines().count(line) == 1
    assert [step for step, _ in logger.calls] == [4, 8, 12, None] and logger.exit_codes == [0]
    *rows, last = [values for _, values in logger.calls]
    assert [f"{row['reward_mean']:.9g}" for row in rows] == [row["reward_mean"] for row in read_metrics("run")]
    assert last["samples"]["columns"] == ["global_step", "item", "agent_0", "agent_1", "reward"]
    assert len(last["samples"]["data"]) == 6
    assert_same(Path("run"), undisturbed("ippo"))


@pytest.mark.parametrize(
    "logger, failing, line",
    [
        (None, [None, "offline"], "does not start (no network); the run goes on without it"),
        (
            Logger(failing=range(2, 99)),
            [],
            "--track: Weights & Biases fails (the line is dead); the run goes on without",
        ),
    ],
)
def test_a_run_goes_on_without_weights_and_biases(logger, failing, line, monkeypatch, undisturbed, capsys):
    stub_wandb(monkeypatch, logger, failing)
    train("ippo", track=True)
    assert capsys.readouterr().out.count(line) == 1
    assert logger is None or (len(logger.calls), len(logger.exit_codes)) == (2, 1)
    assert_same(Path("run"), undisturbed("ippo"))


def test_a_resumed_run_goes_on_in_the_same_run_of_weights_and_biases(monkeypatch):
    calls = stub_wandb(monkeypatch, Logger())
    with pytest.raises(TaskError):
        train("ippo", Faulty(return_none, 2), track=True)
    second = Logger()
    more = stub_wandb(monkeypatch, second)
    train("ippo", track=True, resume="run")
    assert [(each["id"], each["resume"]) for each in calls + more] == [(None, None), ("made-up", "allow")]
    assert [step for step, _ in second.calls] == [8, 12, None]


def test_the_real_weights_and_biases_takes_rows_and_samples_offline_into_the_run_or_elsewhere(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train("ippo", track=True, pause_at=1)
    train("ippo", track=True, resume="run")
    assert len([*Path("run/wandb").glob("offline-run-*/*.wandb")]) == 2
    Path("elsewhere").mkdir()
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    train("ippo", track=True, folder="other", pause_at=1)
    assert len([*Path("elsewhere/wandb").glob("offline-run-*/*.wandb")]) == 1 and not Path("other/wandb").exists()
    assert "--track" not in capsys.readouterr().out
