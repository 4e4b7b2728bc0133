"""A run as its user sees it: what is in the folder, what it learns from, its flags in --help, and other runs."""

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import TINY, make_args, read_metrics, task_of, with_curves
from matplotlib.image import imread
from processes import ROOT
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
import utils.run
from utils.cli import TaskError, UserError, parse
from utils.same import timeless
from utils.tasks import tldr


def read_samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "rewards, held_out, end",
    [
        (
            [0.0, 2.0],
            [0.5, 1.5],
            "0.000 at first, 2.000 over the last tenth of updates; held: 1.500 in the end",
        ),
        ([0.0, 2.0], [0.5, None], "held: 0.500 after update 1"),
        ([1.0, 1.0], [None, None], "1.000 over the last tenth of updates: every joint sample earned the same"),
    ],
)
def test_the_last_line_says_when_items_were_held_out_and_whether_rewards_differed(rewards, held_out, end):
    rows = [{"reward_mean": x, "reward_std": 0.0, "held": y} for x, y in zip(rewards, held_out)]
    run = SimpleNamespace(rows=rows, held_out_metric="held", num_updates=2, optimum=None)
    assert utils.run.Run.outcome(run).endswith(end)


# --- What is in the folder --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["separate", "head"])
def finished(request, tmp_path_factory):
    """A run of five updates: critic, args, agents, Run, folder."""
    folder = tmp_path_factory.mktemp("finished")
    args = make_args(folder, use_separate_critic=request.param == "separate", save_interval=2)
    with with_curves():
        agents, run = ippo_llm.main(args)
    return SimpleNamespace(critic=request.param, args=args, agents=agents, run=run, folder=folder / "run")


def test_metrics_have_the_columns_of_the_documentation(finished):
    of_team = "global_step epoch reward_mean reward_std kl reference_logprob time/sample time/reward time/learn "
    of_team += "samples_per_second new_tokens_per_second eval/reward_mean eval/reward_mean_untrained"
    of_agent = "policy_loss value_loss entropy approx_kl grad_norm skipped explained_variance response_length"
    columns = {*of_team.split(), *(f"agent_{i}/{name}" for i in range(2) for name in of_agent.split())}
    assert read_metrics(finished.folder)[0].keys() == columns


def test_the_configuration_is_kept(finished):
    config = json.loads((finished.folder / "config.json").read_text())
    lists = {"wandb_tags": [], "model": ["utils/tiny_lm"], "critic_model_name_or_path": []}
    assert config["args"] == vars(finished.args) | lists
    assert config["versions"]["torch"] == torch.__version__
    assert config["script"] == str(ROOT / "ippo_llm.py")
    assert "git_commit" in config


def test_samples_are_what_was_scored(finished):
    samples = read_samples(finished.folder)
    assert len(samples) == 10
    for sample in samples:
        pair = [[text] for text in sample["completions"]]
        (reward,) = tldr.reward_func(*pair, items=[sample["item"]])
        assert sample["reward"] == pytest.approx(reward, abs=1e-6)


def test_curves_are_drawn(finished):
    assert imread(finished.folder / "curves.png").shape[:2] == (650, 1200)


def test_agents_are_saved_as_they_are(finished):
    for i, agent in enumerate(finished.agents):
        folder = finished.folder / f"agent_{i}"
        assert AutoTokenizer.from_pretrained(folder).chat_template == AutoTokenizer.from_pretrained(TINY).chat_template
        pairs = [(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict(), agent.actor)]
        pairs.append((load_file(folder / "value_head.safetensors"), agent.value_head))
        assert (folder / "critic").exists() == (finished.critic == "separate")
        if finished.critic == "separate":
            critic = AutoModel.from_pretrained(folder / "critic", dtype=torch.float32)
            pairs.append((critic.state_dict(), agent.critic))
        for saved, module in pairs:
            assert saved.keys() == module.state_dict().keys()
            assert all(torch.equal(saved[name], x) for name, x in module.state_dict().items())


def test_no_pickle_and_nothing_half_written_is_left(finished):
    suffixes = {path.suffix for path in finished.folder.rglob("*")}
    assert not suffixes & {".bin", ".pt", ".pkl", ".pth", ".writing"}


def test_a_run_ends_with_its_last_samples_and_where_the_time_went(tmp_path, capsys):
    ippo_llm.main(make_args(tmp_path, train_size=8))
    shown = capsys.readouterr().out
    assert "agent 1:" in shown and "where the time went" in shown and f"the run is in {tmp_path}/run" in shown


# --- What it learns from ----------------------------------------------------------------------------------------------


def test_evaluating_or_not_does_not_change_what_is_learned(tmp_path):
    for name, interval in (("a", 1), ("b", 0)):
        flags = {"eval_interval": interval, "train_size": 24, "max_new_tokens": 8}
        ippo_llm.main(make_args(output_dir=str(tmp_path / name), **flags))
    with_evaluations, without = [timeless(tmp_path / name) for name in "ab"]
    for row in with_evaluations:
        del row["eval/reward_mean_untrained"]
    assert [row | {"eval/reward_mean": ""} for row in with_evaluations] == without


def test_generations_answer_the_same_items(tmp_path):
    rollouts = []

    def reward_func(first, second, items, prompts):
        rollouts.append(([item["prompt"] for item in items], prompts))
        return [1.0] * len(first)

    args = make_args(tmp_path, num_generations=4, train_size=8, eval_interval=0)
    ippo_llm.main(args, task_of(reward_func=reward_func))
    assert len(rollouts) == 4  # 8 items in rollouts of 8 joint samples, 4 for each item
    for posts, prompts in rollouts:
        assert [posts.count(post) for post in posts] == [4] * 8
        assert all(post in prompt for agent in prompts for post, prompt in zip(posts, agent))


def test_rewards_of_their_own_teach_each_agent_its_own_lesson(tmp_path):
    task = task_of(
        reward_func=lambda first, second: [[1.0, 2.0, 3.0, 4.0] * 2, [7.0] * 8],
        reward_processor=lambda reward: 10 * reward,
        metrics_callback=lambda rollouts: {"texts": sum(len(rollout.responses) for rollout in rollouts)},
    )
    flags = {"eval_interval": 0, "train_size": 8, "kl_coef": 0.0, "reward_normalization": False, "gae_lambda": 1.0}
    _, run = ippo_llm.main(make_args(tmp_path, **flags), task)
    (row,) = read_metrics(tmp_path / "run")
    assert float(row["reward_mean"]) == pytest.approx((2.5 + 7) / 2)  # as they were before they were processed
    assert float(row["agent_1/value_loss"]) == pytest.approx(70.0**2, rel=0.05)  # values start at 0
    assert float(row["texts"]) == 16
    assert run.samples[0]["rewards"] == [1.0, 7.0]


def test_a_metric_that_a_run_has_of_its_own_is_refused(tmp_path):
    task = task_of(metrics_callback=lambda rollouts: {"mine": 1.0, "reward_mean": 2.0, "epoch": 3.0})
    message = "^metrics_callback returned epoch, reward_mean, which a run has of its own$"
    with pytest.raises(TaskError, match=message):
        ippo_llm.main(make_args(tmp_path, eval_interval=0, train_size=8), task)


# --- Help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script", [ippo_llm, pytest.param(iac_llm, marks=pytest.mark.slow), maac_llm, magrpo_llm, ppo_llm]
)
def test_help_explains_every_flag(script, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(script.Args, ["--help"], script.__doc__)
    assert not stop.value.code
    text = capsys.readouterr().out
    groups = "training task folder loading vllm".split()
    if script is ppo_llm:
        groups += "env policy lora stage generation optimization".split()
    else:
        groups += "agent sampling algorithm optimizer".split()
    if script in (ippo_llm, iac_llm, maac_llm):
        groups.append("central-critic" if script is maac_llm else "critic")
    for group in (*groups, script.__name__.removesuffix("_llm")):
        assert f"{group} options" in text
    shown = " ".join(text.replace("│", " ").split())
    modules = "run engine models lora stages tasks/__init__ envs/__init__".split()
    files = [script.__file__, *(ROOT / f"utils/{name}.py" for name in modules)]
    source = "".join(Path(file).read_text() for file in files)
    for name in vars(script.Args()):
        assert f"--{name.replace('_', '-')}" in text
        flag_comments = re.findall(rf"^(?:    # (.+)\n)?    {name}: .*?(?:  # (.+))?$", source, flags=re.M)
        comments = [above or behind for above, behind in flag_comments if above or behind]
        assert any(" ".join(comment.split()[:3]) in shown for comment in comments), name


# --- Other runs, other programs ---------------------------------------------------------------------------------------


def test_an_earlier_run_is_kept_unless_it_is_to_be_replaced(tmp_path):
    ippo_llm.main(make_args(tmp_path, train_size=8, save_interval=1))
    before = (tmp_path / "run/metrics.csv").read_bytes()
    with pytest.raises(UserError, match="--output-dir takes a folder without a run in it"):
        ippo_llm.main(make_args(tmp_path, train_size=8))
    assert (tmp_path / "run/metrics.csv").read_bytes() == before
    (tmp_path / "run/mine.txt").write_text("notes")
    ippo_llm.main(make_args(tmp_path, train_size=16, overwrite=True))
    assert len(read_metrics(tmp_path / "run")) == 2
    assert (tmp_path / "run/mine.txt").read_text() == "notes"
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == {"update_000001", "update_000002"}


def test_a_run_without_a_folder_is_named_after_script_task_seed_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags, name in (({}, "ippo_llm__3__"), ({"task": "number"}, "ippo_llm__number__3__")):
        _, run = ippo_llm.main(make_args(train_size=8, eval_interval=0, max_new_tokens=4, seed=3, **flags))
        assert re.fullmatch(rf"runs/{name}\d{{8}}-\d{{6}}", str(run.folder))


def test_stopping_by_the_keyboard_saves_the_agents(tmp_path):
    def reward_func(first, second):
        if (tmp_path / "run/metrics.csv").exists():
            raise KeyboardInterrupt
        return [0.0] * len(first)

    with pytest.raises(KeyboardInterrupt), with_curves():
        ippo_llm.main(make_args(tmp_path, eval_interval=0), task_of(reward_func=reward_func))
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/agent_1")
    assert len(read_metrics(tmp_path / "run")) == 1
    assert (tmp_path / "run/curves.png").exists()


@pytest.mark.parametrize(
    "phase, flags, message",
    [
        ("learn", {"micro_batch_size": 99}, " in the phase learn: --micro-batch-size 2 takes less"),
        ("log, save", {}, ""),
    ],
)
def test_a_run_out_of_memory_names_the_flag_that_takes_less_if_there_is_one(tmp_path, phase, flags, message):
    memory_flags = {"sample": ("per_device_train_batch_size", 8), "learn": ("micro_batch_size", 4)}
    run = utils.run.Run(make_args(tmp_path, **flags), ippo_llm.__file__, None, 40, 8, memory_flags=memory_flags)
    assert run.out_of_memory(phase) == f"out of memory{message}"


def test_the_commit_is_marked_where_code_differs(tmp_path, monkeypatch):
    def git(*words):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    (tmp_path / "utils").mkdir()
    for name in ("script.py", "page.md", "utils/run.py"):
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(utils.run, "__file__", str(tmp_path / "utils" / "run.py"))
    git("init")
    git("add", "-A")
    git("commit", "-m", "x")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "page.md").write_text("2")
    assert utils.run.git_commit() == commit
    (tmp_path / "script.py").write_text("2")
    assert utils.run.git_commit() == commit + "+"


def test_cublas_is_told_to_be_deterministic_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []

    def build_agents(*_):
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        raise UserError("enough")

    monkeypatch.setattr(ippo_llm, "build_agents", build_agents)
    for deterministic in (False, True):
        with pytest.raises(UserError, match="enough"):
            ippo_llm.main(make_args(tmp_path, deterministic=deterministic))
    assert seen == [None, ":4096:8"]
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
