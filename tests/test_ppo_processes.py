"""ppo_llm.py on two processes learns as on one, also where games fail in one of them."""

import pytest
from helpers import assert_metrics_are_alike
from processes import finish, finish_two, largest_difference, start_two

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
FLAGS = "--rollout-buffer-size 8 --mini-batch-size 8 --train-size 24 --num-train-epochs 1 --num-turns 3"
FLAGS = (
    f"{FLAGS} --adam-epsilon 1e-4 --max-new-tokens 3 --lora-rank 4 --top-k 1 --eval-interval 3 --eval-size 5".split()
)
FAILING = "{seed for seed in range(2_000_000, 2_000_024) if seed % 5 < 2} | {2_500_003}"  # of --seed 2, one held out


@pytest.fixture(scope="module")
def one(small_model, tmp_path_factory):
    """The folder of a run of one process, in an environment of which many games fail, beside the environment."""
    folder = tmp_path_factory.mktemp("ppo")
    (folder / "fragile.py").write_text(ENV.replace("set()", FAILING))
    flags = [*FLAGS, "--model", small_model, "--env", folder / "fragile.py", "--seed", 2]
    finish("ppo_llm", *flags, "--output-dir", folder / "one")
    return folder, flags


@pytest.mark.parametrize(
    "more", [["--micro-batch-size", 3], ["--shard", "--micro-batch-size", 1], ["--shard", "--lora-rank", 0]], ids=str
)
def test_two_processes_learn_and_measure_as_one(one, tmp_path, more):
    folder, flags = one
    if "--lora-rank" in more:
        finish("ppo_llm", *flags, "--lora-rank", 0, "--output-dir", tmp_path / "one")
        folder = tmp_path
    finish_two("ppo_llm", *flags, *more, "--output-dir", tmp_path / "two")
    assert largest_difference(folder / "one/agent_0", tmp_path / "two/agent_0") < 1e-4
    assert_metrics_are_alike(folder / "one", tmp_path / "two")


def test_games_that_fail_in_both_processes_end_the_run_in_a_line(small_model, tmp_path):
    (tmp_path / "failing.py").write_text(ENV.replace("seed in FAILING and seed % 2", "True"))
    flags = [*FLAGS, "--model", small_model, "--env", tmp_path / "failing.py", "--output-dir", tmp_path / "run"]
    for process in start_two("ppo_llm", *flags):
        assert process.wait().exitcode == 1
        message = "failed in all 8 episodes, at first with RuntimeError: no start (failing.py:6), in reset"
        assert process.error.splitlines()[-1] == f"ppo_llm.py: error: the environment {message}"
