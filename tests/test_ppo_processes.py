"""ppo_llm.py on two processes learns as on one; games that fail in one of them hold up neither."""

import peft
import pytest
import torch
from helpers import (
    all_parameters,
    gradients,
    make_ppo_agents,
    make_ppo_args,
    make_ppo_batch,
    read_metrics,
    seeded,
)
from processes import alone, assert_same, cut, finish, finish_two, largest_difference, start_two
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


# --- As one process ---------------------------------------------------------------------------------------------------


GREEDY = f"{FLAGS} --batch-size 8 --top-k 1 --save-interval 4 --save-base".split()


@pytest.fixture(scope="module")
def one(env, small_model, shared_folder):
    """The folder of a run of one process, which takes the likeliest tokens, as all of the next do."""
    folder = shared_folder / "ppo one"
    with alone(shared_folder / "ppo one.lock"):
        if not (folder / "base").exists():
            finish("ppo_llm", *GREEDY, "--model", small_model, "--env", env, "--output-dir", folder)
    return folder


@pytest.fixture(scope="module")
def two(env, small_model, shared_folder):
    """That of two processes, in micro-batches."""
    folder = shared_folder / "ppo two"
    with alone(shared_folder / "ppo two.lock"):
        if not (folder / "base").exists():
            flags = [*GREEDY, "--model", small_model, "--env", env, "--output-dir", folder]
            finish_two("ppo_llm", *flags, "--micro-batch-size-per-gpu", 3)
    return folder


@pytest.fixture(scope="module")
def sharded(env, small_model, shared_folder):
    """That of two processes that share the base, and so make all forward passes together, also of dropped games."""
    folder = shared_folder / "ppo sharded"
    with alone(shared_folder / "ppo sharded.lock"):
        if not (folder / "base").exists():
            flags = [*GREEDY, "--model", small_model, "--env", env, "--output-dir", folder]
            finish_two("ppo_llm", *flags, "--shard", "--micro-batch-size-per-gpu", 1)
    return folder


@pytest.fixture(params=["two", "sharded"])
def pair(request, one):
    """The folders of a run of one process and of one of two."""
    return one, request.getfixturevalue(request.param)


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


# --- Processes that share the base ------------------------------------------------------------------------------------


def test_the_folders_of_two_that_share_the_base_are_those_of_one(one, sharded):
    for folder in ("agent_0", "base"):
        names = [path.relative_to(one) for path in (one / folder).rglob("*") if path.is_file()]
        assert len(names) > 3
        for name in names:
            if folder == "agent_0" and name.suffix == ".safetensors":
                assert (sharded / name).stat().st_size == (one / name).stat().st_size
            else:
                assert (sharded / name).read_bytes() == (one / name).read_bytes()


def test_one_process_goes_on_with_a_run_of_two_that_share_the_base(sharded, tmp_path):
    run = cut(sharded, tmp_path / "run")
    finish("ppo_llm", "--resume", run, "--no-shard")
    assert len(read_metrics(run)) == 8
    assert largest_difference(run / "checkpoints", sharded / "checkpoints") < 1e-4


@pytest.mark.slow
def test_two_that_share_the_base_go_on_with_a_run_of_one(one, tmp_path):
    run = cut(one, tmp_path / "run")
    finish_two("ppo_llm", "--resume", run, "--shard")
    assert len(read_metrics(run)) == 8
    assert largest_difference(run / "checkpoints", one / "checkpoints") < 1e-4


TASK = """
import datasets
def posts(size, seed): return datasets.Dataset.from_list([{"number": k} for k in range(size)])
train_dataset = eval_dataset = posts
def formatters(item): return "Write about " + str(item["number"]) * (item["number"] + 1)
def reward_func(*texts, items):
    return [float(len(first) + len(second) + item["number"]) for first, second, item in zip(*texts, items)]
"""


def test_two_that_share_the_base_learn_a_task_as_one(small_model, tmp_path):
    """With layers that are computed twice, held-out items for one of the two alone, and references that follow."""
    (tmp_path / "lengths.py").write_text(TASK)
    flags = "--num-agents 2 --rollout-buffer-size 4 --train-size 16 --num-train-epochs 2 --max-output-tokens 3"
    flags += " --top-k 1 --batch-size 4 --reference-update-interval 1 --eval-size 1 --evaluation-interval 4"
    flags = [*flags.split(), "--model", small_model, "--task", tmp_path / "lengths.py", "--output-dir"]
    finish("ppo_llm", *flags, tmp_path / "one")
    finish_two("ppo_llm", *flags, tmp_path / "two", "--shard", "--gradient-checkpointing")
    for i in range(2):
        assert largest_difference(tmp_path / f"one/agent_{i}", tmp_path / f"two/agent_{i}") < 1e-4
        moments = load_file(tmp_path / f"one/agent_{i}/optimizer.safetensors")
        assert max(x.abs().max() for name, x in moments.items() if "exp_avg" in name) > 1e-3
    one, two = (read_metrics(tmp_path / name)[3]["fitness"] for name in ("one", "two"))
    assert float(one) == float(two) > 0


# --- Shares that differ -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on, shard", [("games", "--no-shard"), ("games", "--shard"), ("a task", "--shard")])
def test_two_processes_with_several_mini_batches_go_on_to_the_same_bits(env, small_model, tmp_path, on, shard):
    flags = [*SIZES.split(), "--batch-size", 4, "--eval-loop", 1, "--max-steps", 32, "--lora-dropout", 0.1]
    flags += ["--env", env] if on == "games" else ["--task", "number", "--num-agents", 2]
    whole = tmp_path / "whole"
    finish_two("ppo_llm", *flags, shard, "--model", small_model, "--output-dir", whole, "--save-interval", 2)
    run = cut(whole, tmp_path / "run")
    finish_two("ppo_llm", "--resume", run)
    assert_same(run, whole)
    assert [int(row["global_step"]) for row in read_metrics(run)] == [8, 16, 24, 32]


def test_games_that_fail_in_both_processes_end_the_run_in_a_line(small_model, tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(ENV.replace("seed in FAILING and seed % 2", "True"))
    flags = [*SIZES.split(), "--batch-size", 8, "--model", small_model, "--env", path, "--output-dir", tmp_path / "run"]
    flags += ["--evaluation-interval", 0]
    for process in start_two("ppo_llm", *flags):
        assert process.wait().exitcode == 1
        message = "failed in all 8 episodes, at first with RuntimeError: no start (failing.py:6), in reset"
        assert process.error.splitlines()[-1] == f"ppo_llm.py: error: the environment {message}"


# --- Games that are dropped, and of which a process may have nothing else ---------------------------------------------

ACTIONS = pytest.mark.parametrize("flags", [{}, {"action_granularity": "turn"}, {"turn_level_clip": True}], ids=str)


class Fragile:
    """Six games: the first two do not begin, the next two fail in their second turn, the last two go on."""

    def reset(self, seed):
        if seed < 2:
            raise RuntimeError("no start")
        self.seed = seed
        self.turn = 0
        return f"Say something about {seed}.", {}

    def step(self, answer):
        self.turn += 1
        if self.seed < 4 and self.turn == 2:
            raise RuntimeError("no step")
        return "And?", float(self.seed + self.turn), False, False, {}


DROPPED = torch.arange(4)
PLAYED = torch.arange(4, 6)


@pytest.fixture
def make(loaded_model, tokenizer):
    """A function of flags: agent, args and the rollout of the six games."""

    def build(**flags):
        args = ppo_llm.resolve_args(make_ppo_args(**flags))
        (agent,) = make_ppo_agents(loaded_model, tokenizer, args)
        (rollout,) = ppo_llm.play([agent], Fragile, [{"seed": k} for k in range(6)], args, seeded())
        return agent, args, rollout

    return build


def learn_from(agent, batch, args):
    """The metrics of a mini-batch and its gradients."""
    agent.optimizers[0].zero_grad()
    metrics = {}
    for loss_of in (ppo_llm.ppo_loss, ppo_llm.value_loss):
        loss, more = loss_of(agent, batch, args)
        loss.backward()
        metrics |= more
    assert all(parameter.grad is not None for parameter in all_parameters(agent))  # as in the other processes
    return metrics, gradients(agent)


@ACTIONS
def test_nothing_is_learned_from_a_mini_batch_of_dropped_games(make, flags):
    agent, args, rollout = make(beta=0.1, ent_coef=0.1, batch_size=4, **flags)
    args.adv_whitening = False
    batch = make_ppo_batch(agent, rollout.select(DROPPED), args)
    (minibatch,) = ppo_llm.minibatches(batch, args, seeded())
    metrics, all_gradients = learn_from(agent, minibatch, args)
    assert metrics.keys() == {"policy_loss", "entropy", "k3", "approx_kl", "clip_fraction", "value_loss"}
    assert not any(metrics.values())
    assert not any(gradient.any() for gradient in all_gradients)


@ACTIONS
def test_dropped_games_change_nothing_of_what_is_learned_from_others(make, flags):
    agent, args, rollout = make(beta=0.1, ent_coef=0.1, **flags)
    metrics, all_gradients = learn_from(agent, make_ppo_batch(agent, rollout, args), args)
    played_metrics, expected = learn_from(agent, make_ppo_batch(agent, rollout.select(PLAYED), args), args)
    assert max(gradient.abs().max() for gradient in expected) > 0.01
    for x, y in zip(all_gradients, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)
    for name, x in played_metrics.items():
        torch.testing.assert_close(metrics[name], x, atol=1e-5, rtol=1e-4, msg=name)
