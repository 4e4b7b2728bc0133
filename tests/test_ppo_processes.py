"""ppo_llm.py on two processes learns as on one; games that fail in one of them hold up neither."""

import shutil

import peft
import pytest
import torch
from helpers import make_episodes, make_ppo_agents, make_ppo_args, make_ppo_batch, make_ppo_rollout, read_metrics
from processes import assert_same, finish, finish_two, start_two
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ppo_llm
from utils.tasks import batches

ENV = """
FAILING = set()
class Env:
    def reset(self, seed):
        if seed in FAILING and seed % 2:
            raise RuntimeError("no start")
        self.seed = seed
        self.turn = 0
        return f"Say something about {seed}.", {}
    def step(self, answer):
        self.turn += 1
        if self.seed in FAILING:
            raise RuntimeError("no step")
        reward = sum(map(ord, answer)) % 7 / 7 + self.seed % 3
        return "And?", reward, self.turn > self.seed % 4, self.turn > self.seed % 5, {}
"""
SIZES = "--rollout-buffer-size 8 --train-size 64 --num-train-epochs 1 --max-turns 3 --max-output-tokens 3"
FLAGS = f"{SIZES} --evaluation-interval 4 --eval-loop 5"
FIRST = 1_000_000  # the seed of the first game
HELD_OUT = FIRST + 500_003  # the seed of a held-out game
FAILING = {  # the games that fail, by update, of the eight of which the even ones are process 0's
    2: [1, 3, 5, 7],
    4: [0, 2, 4, 6],
    5: [0, 1, 2, 4],
    6: [0, 1, 2, 3, 5, 7],
}


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """The file of an environment that fails in these games."""
    updates = list(batches(range(FIRST, FIRST + 64), size=8, epochs=1, seed=1))
    failing = {HELD_OUT}
    for update, games in FAILING.items():
        failing |= {updates[update - 1][k] for k in games}
    path = tmp_path_factory.mktemp("env") / "fragile.py"
    path.write_text(ENV.replace("set()", str(failing)))
    return path


def run_out_of_memory_once():
    """Let the first mini-batch be split."""
    loss = ppo_llm.ppo_loss
    failures = iter([RuntimeError("out of memory")])

    def fail_once(*values):
        for failure in failures:
            raise failure
        return loss(*values)

    ppo_llm.ppo_loss = fail_once


# --- As one process ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(env, small_model, tmp_path_factory):
    """A run of one process, and one of two, of which one runs out of memory; both take the likeliest tokens."""
    folder = tmp_path_factory.mktemp("pair")
    flags = [*FLAGS.split(), "--batch-size", 8, "--top-k", 1, "--model", small_model, "--env", env, "--output-dir"]
    finish("ppo_llm", *flags, folder / "one")
    finish_two("ppo_llm", *flags, folder / "two", before=(None, run_out_of_memory_once))
    return folder / "one", folder / "two"


@pytest.mark.parametrize("file", ["actor/adapter_model", "critic/adapter_model", "value_head"])
def test_two_processes_learn_as_one(pair, file):
    one, two = (load_file(folder / f"agent_0/{file}.safetensors") for folder in pair)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-4, rtol=0)
    assert any(weight.abs().max() > 1e-3 for name, weight in one.items() if "lora_A" not in name)


def test_two_processes_measure_as_one(pair):
    one, two = map(read_metrics, pair)
    assert [int(float(row["dropped"])) for row in two] == [0, 4, 0, 4, 4, 6, 0, 0]
    assert two[3]["fitness"] and {row["turns"] for row in two} > {"2"}
    for row, other in zip(one, two, strict=True):
        for name in row:
            if row[name] and not name.startswith("time/") and "per_second" not in name:
                assert float(other[name]) == pytest.approx(float(row[name]), abs=2e-4, rel=2e-4, nan_ok=True), name


def test_what_two_processes_save_opens_in_peft(pair, small_model):
    _, two = pair
    base = AutoModelForCausalLM.from_pretrained(small_model)
    ids = torch.arange(5, 25)[None]
    plain = base(ids).logits
    model = peft.PeftModel.from_pretrained(base, two / "agent_0/actor")
    assert (model(ids).logits - plain).abs().max() > 1e-3


# --- Shares that differ -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["games", "a task"])
def test_two_processes_with_several_mini_batches_go_on_to_the_same_bits(env, small_model, tmp_path, on):
    run = tmp_path / "run"
    flags = [*SIZES.split(), "--batch-size", 4, "--eval-loop", 1, "--max-steps", 32, "--lora-dropout", 0.1]
    flags += ["--env", env] if on == "games" else ["--task", "number", "--num-agents", 2]
    finish_two("ppo_llm", *flags, "--model", small_model, "--output-dir", run, "--save-interval", 2)
    shutil.copytree(run, tmp_path / "whole")
    shutil.rmtree(run / "checkpoints/update_000004")
    finish_two("ppo_llm", "--resume", run)
    assert_same(run, tmp_path / "whole")
    assert [int(row["global_step"]) for row in read_metrics(run)] == [8, 16, 24, 32]


def test_games_that_fail_in_both_processes_end_the_run_in_a_line(small_model, tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(ENV.replace("seed in FAILING and seed % 2", "True"))
    flags = [*SIZES.split(), "--batch-size", 8, "--model", small_model, "--env", path, "--output-dir", tmp_path / "run"]
    for process in start_two("ppo_llm", *flags):
        assert process.wait().exitcode == 1
        message = "the environment failed in all 8 episodes, at first with RuntimeError: no start (reset)"
        assert process.error.splitlines()[-1] == f"ppo_llm.py: error: {message}"


@pytest.fixture
def make(loaded_model, tokenizer):
    """A function of flags: agent, args and batch, from made-up episodes."""

    def build(kind="game", **flags):
        args = ppo_llm.resolve_args(make_ppo_args(task="number" if kind == "task" else None, **flags))
        (agent,) = make_ppo_agents(loaded_model, tokenizer, args)
        rollout = make_ppo_rollout(*make_episodes(kind), agent, args)
        return agent, args, make_ppo_batch(agent, rollout, args)

    return build


CASES = [("game", {}), ("game", {"action_granularity": "token"}), ("game", {"turn_level_clip": True}), ("task", {})]


@pytest.mark.parametrize("kind, flags", CASES)
def test_nothing_is_learned_from_a_blank_mini_batch(make, kind, flags):
    agent, args, batch = make(kind, beta=0.1, ent_coef=0.1, **flags)
    blank = batch.blank()
    blank.num_tokens = torch.tensor(1.0)
    blank.num_actions = torch.tensor(1.0)
    metrics = agent.faults.backward(agent, blank, args, ppo_llm.ppo_loss, ppo_llm.value_loss)
    assert metrics.keys() == {"policy_loss", "entropy", "k3", "approx_kl", "clip_fraction", "value_loss"}
    assert not any(metrics.values())
    for group in agent.optimizers[0].param_groups:
        for parameter in group["params"]:
            assert parameter.grad is not None and not parameter.grad.any()


@pytest.mark.parametrize("kind", ["game", "task"])
def test_a_process_without_episodes_has_numbers_that_do_not_count(make, kind):
    agent, args, _ = make(kind, adv_whitening=False)
    empty = ppo_llm.collate([], [], [], [], agent, args)
    assert not empty.mask.any() and not empty.played.any() and empty.items == []
    batch = make_ppo_batch(agent, empty, args)
    for name in ("advantages", "returns", "action_mask"):
        assert not getattr(batch, name).any()


# --- Sampled ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_two_processes_that_sample_earn_as_much_as_one(tmp_path, seed):
    flags = ["--seed", seed, "--train-size", 2560, "--num-train-epochs", 1, "--evaluation-interval", 0]
    finish("ppo_llm", *flags, "--output-dir", tmp_path / "one")
    finish_two("ppo_llm", *flags, "--output-dir", tmp_path / "two")
    one, two = ([float(row["reward_mean"]) for row in read_metrics(tmp_path / name)] for name in ("one", "two"))
    assert sum(two[:4]) / 4 < sum(two[-4:]) / 4 - 0.2
    assert sum(two[-4:]) / 4 == pytest.approx(sum(one[-4:]) / 4, abs=0.1)
