"""A run as its user sees it: the folder, the same bits from the same seed, one line for every error."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, make_args
from matplotlib.image import imread
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import iac_llm
import ippo_llm
import utils.run
from ippo_llm import Args, main
from utils.cli import TaskError, UserError, parse
from utils.same import compare, timeless
from utils.tasks import tldr

ROOT = Path(__file__).resolve().parent.parent


def read_metrics(folder):
    with open(Path(folder) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def task_of(**parts):
    """The default task with some parts replaced."""
    names = ("train_dataset", "eval_dataset", "formatters", "reward_func")
    return SimpleNamespace(**({name: getattr(tldr, name) for name in names} | parts))


@pytest.mark.parametrize("critic", ["separate", "head"])
def test_a_run_folder_is_as_documented(tmp_path, critic, capsys):
    args = make_args(tmp_path, use_separate_critic=critic == "separate", save_interval=2)
    agents, run = main(args)
    folder = tmp_path / "run"
    rows = read_metrics(folder)
    assert [int(row["global_step"]) for row in rows] == [8, 16, 24, 32, 40]
    assert float(rows[-1]["epoch"]) == 1.0
    agent = "policy_loss value_loss entropy approx_kl grad_norm explained_variance response_length".split()
    columns = "global_step epoch reward_mean reward_std kl reference_logprob time/sample time/reward time/evaluate "
    columns += "time/update samples_per_second new_tokens_per_second eval/reward_mean"
    assert {*columns.split(), *(f"agent_{i}/{name}" for i in range(2) for name in agent)} <= rows[0].keys()
    assert [row["eval/reward_mean"] != "" for row in rows] == [True, False, True, False, True]
    assert abs(float(rows[0]["kl"])) < 1e-5 and abs(float(rows[0]["agent_0/approx_kl"])) < 0.01  # starts on-policy

    config = json.loads((folder / "config.json").read_text())
    assert config["args"] == {
        **vars(args),
        "wandb_tags": [],
        "model": ["utils/tiny_lm"],
        "critic_model_name_or_path": [],
    }
    assert config["versions"]["torch"] == torch.__version__ and "git_commit" in config
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 10 and all(len(sample["completions"]) == 2 for sample in samples)
    for sample in samples:  # what was logged is what was scored
        pair = [[text] for text in sample["completions"]]
        assert sample["reward"] == pytest.approx(tldr.reward_func(*pair, items=[sample["item"]])[0], abs=1e-6)
    assert imread(folder / "curves.png").shape[:2] == (650, 1200)

    tokenizer = AutoTokenizer.from_pretrained(folder / "agent_0")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(TINY).chat_template
    for i, agent in enumerate(agents):
        saved = AutoModelForCausalLM.from_pretrained(folder / f"agent_{i}", dtype=torch.float32).state_dict()
        assert all(torch.equal(saved[name], tensor) for name, tensor in agent.actor.state_dict().items())
        assert load_file(folder / f"agent_{i}/value_head.safetensors").keys() == agent.value_head.state_dict().keys()
        assert (folder / f"agent_{i}/critic").exists() == (critic == "separate")
        if critic == "separate":
            saved = AutoModel.from_pretrained(folder / f"agent_{i}/critic", dtype=torch.float32).state_dict()
            assert all(torch.equal(saved[name], tensor) for name, tensor in agent.critic.state_dict().items())
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["update_000004", "update_000005"]
    AutoModelForCausalLM.from_pretrained(folder / "checkpoints/update_000004/agent_1")
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pkl", ".pth", ".writing")]
    told = capsys.readouterr().out
    assert "where the time went" in told and "agent 1:" in told


@pytest.mark.parametrize("script", [ippo_llm, iac_llm], ids=["ippo", "iac"])
def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path, script):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        flags = {"seed": seed, "output_dir": str(tmp_path / name), "use_separate_critic": True}
        script.main(make_args(script=script, **flags))
    assert len(timeless(tmp_path / "a")) == 5
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")
    assert (tmp_path / "a/samples.jsonl").read_bytes() == (tmp_path / "b/samples.jsonl").read_bytes()
    weights = [(tmp_path / name / "agent_1/model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
    assert timeless(tmp_path / "a") != timeless(tmp_path / "c")


@pytest.mark.parametrize("anneal", [True, False])
def test_learning_rates_fall_to_zero_over_the_run_unless_told(tmp_path, anneal):
    agents, _ = main(make_args(tmp_path, anneal_lr=anneal, actor_learning_rate=1e-3, eval_interval=0))
    rates = {group["initial_lr"]: group["lr"] for group in agents[1].optimizers[0].param_groups}
    assert rates[1e-3] == pytest.approx(0.0 if anneal else 1e-3, abs=1e-12)


def test_evaluating_or_not_does_not_change_what_is_learned(tmp_path):
    for name, interval in (("a", 1), ("b", 0)):
        main(make_args(output_dir=str(tmp_path / name), eval_interval=interval))
    rows = [[{**row, "eval/reward_mean": ""} for row in timeless(tmp_path / name)] for name in "ab"]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("num_agents", [1, 3])
def test_teams_of_other_sizes_train(tmp_path, num_agents):
    main(make_args(tmp_path, num_agents=num_agents, train_size=8))
    assert f"agent_{num_agents - 1}/policy_loss" in read_metrics(tmp_path / "run")[0]
    assert sorted(path.name for path in (tmp_path / "run").glob("agent_*")) == [f"agent_{i}" for i in range(num_agents)]


def test_generations_answer_the_same_items(tmp_path):
    seen = []

    def reward_func(first, second, items, prompts):
        seen.append(([item["prompt"] for item in items], prompts))
        return [1.0] * len(first)

    main(make_args(tmp_path, num_generations=4, train_size=8, eval_interval=0), task_of(reward_func=reward_func))
    assert len(seen) == 4  # 8 items in rollouts of 8 joint samples, 4 for each item
    for posts, prompts in seen:
        assert [posts.count(post) for post in posts] == [4] * 8
        assert all(post in prompt for agent in prompts for post, prompt in zip(posts, agent))


def test_rewards_of_their_own_teach_each_agent_its_own_lesson(tmp_path):
    parts = {
        "reward_func": lambda first, second: [[1.0, 2.0, 3.0, 4.0] * 2, [7.0] * 8],
        "reward_processor": lambda reward: 10 * reward,
        "metrics_callback": lambda rollouts: {"texts": sum(len(rollout.texts) for rollout in rollouts)},
    }
    flags = {"eval_interval": 0, "train_size": 8, "kl_coef": 0.0, "reward_normalization": False, "gae_lambda": 1.0}
    _, run = main(make_args(tmp_path, **flags), task_of(**parts))
    (row,) = read_metrics(tmp_path / "run")
    assert float(row["reward_mean"]) == pytest.approx((2.5 + 7) / 2)
    assert float(row["texts"]) == 16
    assert float(row["agent_1/value_loss"]) == pytest.approx(70.0**2, rel=0.05)  # values start at 0
    assert run.samples[0]["rewards"] == [1.0, 7.0]


def test_a_loaded_model_and_its_tokenizer_can_be_given_and_are_not_changed(tmp_path, model, tokenizer):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    agents, _ = main(make_args(tmp_path, num_agents=1, model="nowhere"), model=model, tokenizer=tokenizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not torch.equal(agents[0].actor.lm_head.weight, model.lm_head.weight)


def test_a_critic_of_its_own_kind(tmp_path):
    from transformers import LlamaConfig, LlamaModel

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaModel(LlamaConfig(vocab_size=768, **small)).save_pretrained(tmp_path / "critic")
    flags = {"use_separate_critic": True, "critic_model_name_or_path": (str(tmp_path / "critic"),), "train_size": 8}
    agents, _ = main(make_args(tmp_path, **flags))
    assert agents[0].critic.config.hidden_size == 32
    LlamaModel(LlamaConfig(vocab_size=99, **small)).save_pretrained(tmp_path / "critic")
    with pytest.raises(UserError, match="--critic-model-name-or-path .* knows 99 tokens, .* has 768"):
        main(make_args(tmp_path, **flags, overwrite=True))


def test_weights_and_biases_gets_the_same(tmp_path, monkeypatch):
    import wandb  # a requirement: absent, this fails

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged, tables = [], []
    original, table = wandb.Run.log, wandb.Table.__init__

    def log(run, data, *rest, **more):
        logged.append(data)
        return original(run, data, *rest, **more)

    monkeypatch.setattr(wandb.Run, "log", log)
    monkeypatch.setattr(wandb.Table, "__init__", lambda self, **parts: tables.append(parts) or table(self, **parts))
    main(make_args(tmp_path, track=True, wandb_tags=("a", "b"), wandb_run_name="name", train_size=16))
    rows = read_metrics(tmp_path / "run")
    assert [f"{row['reward_mean']:.9g}" for row in logged if "reward_mean" in row] == [r["reward_mean"] for r in rows]
    assert tables[0]["columns"] == ["global_step", "item", "agent_0", "agent_1", "reward"]
    assert len(tables[0]["data"]) == 4 and "samples" in logged[-1]
    assert list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))


TASK = """
import datasets
def train_dataset(size, seed): return datasets.Dataset.from_list([{"q": str(k)} for k in range(size)])
def formatters(item): return "Guess " + item["q"]
def reward_func(first, second): return [len(a + b) / 1000 for a, b in zip(first, second)]
"""
BAD_TASKS = {
    "def f(:": r"--task .*mine.py can't be loaded: SyntaxError",
    TASK.replace("def reward_func", "def reward"): r"--task .*mine.py has no reward_func",
    TASK + "formatters = [formatters] * 3": r"--task .*mine.py has 3 formatters for --num-agents 2",
    TASK + "formatters = 'Guess'": r"formatters is to be a function",
    TASK + "reward_func = 3": r"reward_func is not a function but 3",
    TASK.replace("range(size)", "range(2)"): r"train_dataset of --task has 2 items; an update takes 8",
    TASK.replace("return datasets", "return nothing"): r"train_dataset of --task failed: NameError",
}


def test_a_task_file_of_your_own(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    main(make_args(tmp_path, task=str(tmp_path / "mine.py")))
    assert 0 < float(read_metrics(tmp_path / "run")[0]["reward_mean"]) < 1


@pytest.mark.parametrize("code", BAD_TASKS)
def test_a_bad_task_is_one_line_before_anything_is_loaded_or_made(tmp_path, monkeypatch, code):
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.setattr(ippo_llm, "load_team", None)
    with pytest.raises(UserError, match=BAD_TASKS[code]) as error:
        main(make_args(tmp_path, task=str(tmp_path / "mine.py")))
    assert "\n" not in str(error.value) and error.value.exit_code == 2 and not (tmp_path / "run").exists()


BAD_FLAGS = {
    "--num-agents 0": "--num-agents takes 1 or more, got 0",
    "--mini-batch-size 0": "--mini-batch-size takes 1 or more, got 0",
    "--temperature 0": "--temperature takes a number above 0.*got 0",
    "--temperature nan": "--temperature takes a number above 0.*got nan",
    "--gamma 1.5": "--gamma takes a number from 0 to 1, got 1.5",
    "--gae-lambda -0.1": "--gae-lambda takes a number from 0 to 1, got -0.1",
    "--top-p 0": "--top-p takes a number above 0, at most 1, got 0",
    "--top-k -1": "--top-k takes 0 or more, got -1",
    "--num-turns 2": "--num-turns 2 takes a task with an external_transition, and tldr has none",
    "--num-generations 3": "--rollout-buffer-size takes a multiple of generations x processes, 3, got 64",
    "--per-device-train-batch-size 0": "--per-device-train-batch-size takes 1 or more, or none, got 0",
    "--actor-learning-rate inf": "--actor-learning-rate takes a number of 0 or more, got inf",
    "--train-size 10": "train_dataset of --task has 10 items; an update takes 64",
    "--task nosuch": "--task takes arxiv, .*tldr or a FILE.py, got nosuch",
    "--task nosuch.py": "there is no file nosuch.py",
    "--model tests": "--model takes a model's folder or a hub name, and .*tests has no config.json",
    "--critic-model-name-or-path x": "--critic-model-name-or-path takes --use-separate-critic",
    "--num-agents two": "--num-agents.*invalid literal.*two",
    "--no-such-flag": "Unrecognized options: --no-such-flag",
    "--action-granularity word": "--action-granularity.*'token', 'turn'",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_a_bad_flag_is_one_line_before_anything_is_loaded_or_made(tmp_path, monkeypatch, flags):
    monkeypatch.setattr(ippo_llm, "load_team", None)
    with pytest.raises(UserError, match=BAD_FLAGS[flags]) as error:
        main(parse(Args, [*flags.split(), "--output-dir", str(tmp_path / "run")]))
    assert "\n" not in str(error.value) and error.value.exit_code == 2 and not (tmp_path / "run").exists()


def test_a_model_out_of_reach_is_one_line(tmp_path, monkeypatch):
    import huggingface_hub

    def model_info(*_, **__):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    with pytest.raises(UserError, match="--model takes .* no/such is no folder and can't be reached: no network$"):
        main(make_args(tmp_path, model="no/such"))
    assert not (tmp_path / "run").exists()


def test_the_command_ends_with_one_line_and_exit_code_2():
    command = [sys.executable, "ippo_llm.py", "--num-agents", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ippo_llm.py: error: --num-agents takes 1 or more, got 0\n"


@pytest.mark.parametrize("script", [ippo_llm, iac_llm], ids=["ippo", "iac"])
def test_help_explains_every_flag(script):
    done = subprocess.run([sys.executable, script.__file__, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for group in ("run", "folder", "model", "sampling", "algorithm", script.__name__.removesuffix("_llm"), "optimizer"):
        assert f"{group} options" in done.stdout
    source = Path(script.__file__).read_text() + (ROOT / "utils/run.py").read_text()
    for name in vars(script.Args()):
        assert f"--{name.replace('_', '-')}" in done.stdout
        (comment,) = re.findall(rf"^    {name}: .*  # (.+)$", source, flags=re.M)
        assert " ".join(comment.split()[:3]) in " ".join(done.stdout.replace("│", " ").split()), name


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run can't be written: .*Not a directory"):
        main(make_args(tmp_path, train_size=8, output_dir=str(tmp_path / "file/run")))


def test_an_earlier_run_is_kept_unless_told(tmp_path):
    main(make_args(tmp_path, train_size=8, save_interval=1))
    before = (tmp_path / "run/metrics.csv").read_bytes()
    with pytest.raises(UserError, match="--output-dir takes a folder without a run in it"):
        main(make_args(tmp_path, train_size=8))
    assert (tmp_path / "run/metrics.csv").read_bytes() == before
    (tmp_path / "run/mine.txt").write_text("notes")
    main(make_args(tmp_path, train_size=16, overwrite=True))
    assert len(read_metrics(tmp_path / "run")) == 2 and (tmp_path / "run/mine.txt").read_text() == "notes"
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["update_000002"]


def fails_on_second_call(value):
    calls = []

    def reward_func(first, second, items):
        calls.append(None)
        if len(calls) < 2 or len(items) == 1:
            return [0.5] * len(items)
        return value(len(items))

    return reward_func


BAD_REWARDS = {
    "too few": (lambda n: [1.0] * (n - 1), r"^reward_func returned 7 values for 8 items: .*prompt.* has none"),
    "a string": (lambda n: [1.0] * 3 + ["good"] * (n - 3), r"^reward_func returned 'good' for item 3, .*prompt"),
    "a NaN": (lambda n: [1.0] * 5 + [float("nan")] * (n - 5), r"^reward_func returned nan for item 5, .*prompt"),
    "None": (lambda n: None, r"^reward_func returned None; it takes a list of 8 numbers"),
    "an error": (lambda n: 1 / 0, r"^reward_func raised ZeroDivisionError: division by zero on the batch of 8 items"),
}


@pytest.mark.parametrize("case", BAD_REWARDS)
def test_a_bad_reward_is_one_line_and_the_agents_are_saved(tmp_path, case, model):
    value, message = BAD_REWARDS[case]
    with pytest.raises(TaskError, match=message) as error:
        main(make_args(tmp_path, eval_interval=0), task_of(reward_func=fails_on_second_call(value)))
    assert "\n" not in str(error.value) and error.value.exit_code == 1
    assert len(read_metrics(tmp_path / "run")) == 1
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run/agent_1", dtype=torch.float32)
    assert not torch.equal(saved.lm_head.weight, model.lm_head.weight)  # what the first update taught


def test_a_reward_function_that_raises_names_the_item(tmp_path):
    def reward_func(first, second, items):
        return [1.0 if item["number"] != 5 else 1 / 0 for item in items]

    import datasets

    numbered = {"train_dataset": lambda size, seed: datasets.Dataset.from_list([{"number": k} for k in range(size)])}
    numbered |= {"formatters": [lambda item: f"Guess {item['number']}"] * 2, "reward_func": reward_func}
    task = SimpleNamespace(**numbered)
    with pytest.raises(TaskError, match=r"reward_func raised ZeroDivisionError: .* on item \d, {'number': 5}"):
        main(make_args(tmp_path, train_size=8), task)


def test_a_formatter_that_raises_is_one_line(tmp_path):
    with pytest.raises(TaskError, match=r"formatter of agent 0 failed on item 0, .*: KeyError: 'nothing'"):
        main(make_args(tmp_path), task_of(formatters=lambda item: item["nothing"]))


def test_a_prompt_that_leaves_no_room_is_one_line(tmp_path):
    with pytest.raises(
        UserError, match="--max-new-tokens 24 after a prompt of [0-9]+ exceeds the model's 512 positions"
    ):
        main(make_args(tmp_path), task_of(formatters=lambda item: item["prompt"] * 10))


def run_script(*command):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


SMALL = "--rollout-buffer-size 8 --mini-batch-size 4 --train-size 16 --num-train-epochs 1 --max-new-tokens 24".split()


def test_bfloat16_autocast_and_weights_train(tmp_path):
    flags = ["--mixed-precision", "bf16", "--dtype", "bfloat16", "--use-separate-critic", "--eval-size", "4"]
    run_script("ippo_llm.py", *SMALL, *flags, "--output-dir", str(tmp_path / "run"))
    assert len(read_metrics(tmp_path / "run")) == 2
    assert abs(float(read_metrics(tmp_path / "run")[0]["agent_0/approx_kl"])) < 0.1


@pytest.mark.parametrize("flags", ["--eval-size 5", "--eval-size 5 --task number --num-turns 3 --max-new-tokens 4"])
def test_two_processes_train_together_and_go_on_to_the_same_bits(tmp_path, monkeypatch, flags):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launch, flags = "-m torch.distributed.run --nproc-per-node 2 ippo_llm.py".split(), [*SMALL, *flags.split()]
    run_script(*launch, *flags, "--output-dir", str(tmp_path / "whole"))
    run_script(*launch, *flags, "--output-dir", str(tmp_path / "run"), "--save-interval", "1")
    shutil.rmtree(tmp_path / "run/checkpoints/update_000002")
    state = json.loads((tmp_path / "run/checkpoints/update_000001/state.json").read_text())
    assert len(state["random"]) == 2 and state["random"][0] != state["random"][1]
    run_script(*launch, "--resume", str(tmp_path / "run"))
    assert all(compare(tmp_path / "whole", tmp_path / "run").values())
    rows = read_metrics(tmp_path / "run")
    assert [int(row["global_step"]) for row in rows] == [8, 16] and rows[-1]["eval/reward_mean"] != ""
    assert ("turn_1/reward_mean" in rows[0]) == ("number" in flags)


def test_stopping_by_the_keyboard_saves_the_agents(tmp_path):
    def reward_func(first, second):
        if (tmp_path / "run/metrics.csv").exists():
            raise KeyboardInterrupt
        return [0.0] * len(first)

    with pytest.raises(KeyboardInterrupt):
        main(make_args(tmp_path, eval_interval=0), task_of(reward_func=reward_func))
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/agent_1")
    assert len(read_metrics(tmp_path / "run")) == 1 and (tmp_path / "run/curves.png").exists()


def test_commit_is_marked_where_code_differs(tmp_path, monkeypatch):
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
