"""A run that is paused, killed or damaged goes on to the same bits; nothing that was learned is lost."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import build_model
from safetensors.torch import load_file
from transformers import AutoTokenizer

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils.cli import UserError
from utils.models.loading import locate
from utils.tasks import number

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ippo": ippo_llm, "iac": iac_llm, "maac": maac_llm, "magrpo": magrpo_llm, "ppo": ppo_llm}
SMALL = {"rollout_buffer_size": 4, "num_train_epochs": 1, "mini_batch_size": 2, "max_new_tokens": 3, "eval_size": 2}
SMALL |= {"eval_interval": 2, "num_agents": 2, "task": "number", "num_turns": 2}


@pytest.fixture(scope="module")
def small():
    tokenizer = AutoTokenizer.from_pretrained(locate("utils/tiny_lm"))
    return {"model": build_model(tokenizer), "tokenizer": tokenizer}


def make_args(script, folder, **flags):
    own = {"train_size": 4, "num_generations": 4} if script == "magrpo" else {"train_size": 16}
    return SCRIPTS[script].Args(**(SMALL | own | {"output_dir": str(folder)} | flags))


def rows_of(folder):
    """metrics.csv without times and speeds."""
    with open(Path(folder) / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: x for name, x in row.items() if "time/" not in name and "per_second" not in name} for row in rows]


def weights_of(folder):
    """All tensors that a run leaves with its agents."""
    paths = sorted(path for path in Path(folder).rglob("*.safetensors") if "checkpoints" not in path.parts)
    return {str(path.relative_to(folder)): load_file(path) for path in paths}


def assert_same(one, other):
    assert rows_of(one) == rows_of(other)
    here, there = weights_of(one), weights_of(other)
    assert here.keys() == there.keys() and here
    for path, tensors in here.items():
        assert all(torch.equal(x, there[path][name]) for name, x in tensors.items()), path


WAYS = [("ippo", {}), ("ippo", {"use_separate_critic": True, "lora_rank": 2}), ("iac", {}), ("maac", {})]
WAYS += [("magrpo", {}), ("ppo", {"lora_rank": 2}), ("ppo", {"lora_rank": 0, "action_granularity": "turn"})]


@pytest.mark.parametrize("script, flags", WAYS, ids=str)
def test_a_paused_run_goes_on_to_the_same_bits(tmp_path, small, script, flags):
    main = SCRIPTS[script].main
    main(make_args(script, tmp_path / "whole", **flags), **small)
    main(make_args(script, tmp_path / "cut", pause_at=2, **flags), **small)
    assert len(rows_of(tmp_path / "cut")) == 2
    args = make_args(script, tmp_path / "cut", **flags)
    args.resume = str(tmp_path / "cut")
    main(args, **small)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_a_fork_without_a_change_is_the_run_that_goes_on(tmp_path, small):
    ippo_llm.main(make_args("ippo", tmp_path / "whole"), **small)
    ippo_llm.main(make_args("ippo", tmp_path / "first", pause_at=2), **small)
    ippo_llm.main(make_args("ippo", tmp_path / "fork", fork=str(tmp_path / "first")), **small)
    assert_same(tmp_path / "whole", tmp_path / "fork")


def test_a_damaged_checkpoint_is_passed_over(tmp_path, small, capsys):
    ippo_llm.main(make_args("ippo", tmp_path / "whole"), **small)
    ippo_llm.main(make_args("ippo", tmp_path / "cut", pause_at=3, save_interval=1), **small)
    newest = sorted((tmp_path / "cut/checkpoints").iterdir())[-1]
    file = next(newest.rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    args = make_args("ippo", tmp_path / "cut", save_interval=1)
    args.resume = str(tmp_path / "cut")
    ippo_llm.main(args, **small)
    assert "looking for an earlier one" in capsys.readouterr().out
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_a_run_does_not_begin_where_another_one_is(tmp_path, small):
    ippo_llm.main(make_args("ippo", tmp_path / "run", pause_at=1), **small)
    with pytest.raises(UserError, match="without a run in it"):
        ippo_llm.main(make_args("ippo", tmp_path / "run"), **small)


def test_a_resumed_run_takes_no_other_flags(tmp_path, small):
    ippo_llm.main(make_args("ippo", tmp_path / "run", pause_at=1), **small)
    args = make_args("ippo", tmp_path / "run", gamma=0.5)
    args.resume = str(tmp_path / "run")
    with pytest.raises(UserError, match="--gamma 1.0 there, 0.5 here"):
        ippo_llm.main(args, **small)


def test_what_was_learned_is_saved_where_the_task_fails(tmp_path, small):
    calls = []

    def reward_func(*completions, items):
        calls.append(1)
        if len(calls) > 2:  # of an update each, and asked once more
            raise ValueError("no more")
        return [0.5] * len(items)

    task = SimpleNamespace(formatters=number.formatters, reward_func=reward_func, train_dataset=number.train_dataset)
    args = make_args("ippo", tmp_path / "run", task=None)
    with pytest.raises(UserError, match="^reward_func raised ValueError: no more"):
        ippo_llm.main(args, task=task, **small)
    assert len(rows_of(tmp_path / "run")) == 2
    assert (tmp_path / "run/checkpoints/update_000002/manifest.json").is_file()


def test_a_gradient_that_is_not_finite_is_not_stepped_with(tmp_path, small, monkeypatch):
    gae = ippo_llm.gae
    updates = []

    def gae_with_nan(*arguments):
        updates.append(1)
        advantages, returns = gae(*arguments)
        return (advantages * float("nan"), returns) if len(updates) > 2 else (advantages, returns)

    monkeypatch.setattr(ippo_llm, "gae", gae_with_nan)
    with pytest.raises(UserError, match="not finite"):
        ippo_llm.main(make_args("ippo", tmp_path / "run"), **small)
    for tensors in weights_of(tmp_path / "run").values():
        assert all(x.isfinite().all() for x in tensors.values())


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path, small, end):
    small["model"].save_pretrained(tmp_path / "model")
    small["tokenizer"].save_pretrained(tmp_path / "model")
    flags = (
        "--task number --num-turns 2 --rollout-buffer-size 4 --mini-batch-size 4 --train-size 48 --num-train-epochs 1"
    )
    flags += f" --max-new-tokens 3 --eval-interval 0 --save-interval 1 --model {tmp_path}/model"
    command = [sys.executable, str(ROOT / "ippo_llm.py"), *flags.split()]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--output-dir", tmp_path / "whole"], check=True, env=env, capture_output=True)
    process = subprocess.Popen([*command, "--output-dir", tmp_path / "cut"], env=env, stderr=subprocess.PIPE)
    while not (tmp_path / "cut/checkpoints/update_000002").exists():
        time.sleep(0.02)
    process.send_signal(end)
    process.communicate()
    assert process.returncode == (143 if end == signal.SIGTERM else -9)
    subprocess.run([*command[:2], "--resume", tmp_path / "cut"], check=True, env=env, capture_output=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


# --- Several processes ------------------------------------------------------------------------------------------------


def torchrun(folder, model, *flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*command, str(ROOT / flags[0])], folder, model, *flags[1:])


def run(command, folder, model, *flags):
    size = (
        "--rollout-buffer-size 4 --mini-batch-size 4 --train-size 12 --num-train-epochs 1 --eval-size 3 --no-do-sample"
    )
    size += " --task number --num-turns 2 --max-new-tokens 3 --eval-interval 1 --num-agents 2"
    size = [*size.split(), "--model", str(model), "--output-dir", str(folder)]
    result = subprocess.run([*command, *size, *flags], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()[-2000:]


CASES = [("ippo_llm.py",), ("maac_llm.py", "--shard"), ("ppo_llm.py", "--shard", "--lora-rank", "2")]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_two_processes_learn_what_one_does(tmp_path, small, case):
    small["model"].save_pretrained(tmp_path / "model")
    small["tokenizer"].save_pretrained(tmp_path / "model")
    alone = [flag for flag in case[1:] if flag != "--shard"]
    run([sys.executable, str(ROOT / case[0])], tmp_path / "one", tmp_path / "model", *alone)
    torchrun(tmp_path / "two", tmp_path / "model", *case)
    for one, two in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        for name in ("reward_mean", "eval/reward_mean", "kl"):
            assert float(two[name]) == pytest.approx(float(one[name]), abs=1e-4), name
    here, there = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert here.keys() == there.keys()
    for path, tensors in here.items():
        if "optimizer" not in path:
            assert all(torch.allclose(x, there[path][name], atol=2e-4) for name, x in tensors.items()), path
    shutil.rmtree(tmp_path)
