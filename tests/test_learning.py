"""Learning is seen, not assumed. The short form runs with all tests; python -m pytest -m slow runs whole trainings."""

import pytest
from helpers import read_metrics

import iac_llm
import ippo_llm
import ppo_llm
from utils.envs import guess
from utils.tasks.number import optimum

SEEDS = pytest.mark.parametrize("seed", [1, 2, 3])


def mean(rows, name="reward_mean"):
    return sum(float(row[name]) for row in rows) / len(rows)


def train(script, tmp_path, **flags):
    script.main(script.Args(output_dir=str(tmp_path / "run"), **flags))
    return read_metrics(tmp_path / "run")


def last_tenth(rows):
    return rows[-max(1, len(rows) // 10) :]


def test_the_reward_rises_within_a_few_updates(tmp_path):
    rows = train(iac_llm, tmp_path, use_separate_critic=True, train_size=384, num_train_epochs=1, eval_interval=0)
    assert len(rows) == 384 // iac_llm.Args().rollout_buffer_size
    assert float(rows[0]["reward_mean"]) < 1.2
    assert mean(rows[-4:]) > mean(rows[:2]) + 0.3


def test_players_meet_the_number_better_within_a_few_updates(tmp_path):
    flags = {"num_turns": 3, "max_new_tokens": 4, "train_size": 768, "num_train_epochs": 1, "eval_interval": 0}
    rows = train(ippo_llm, tmp_path, task="number", **flags)
    assert len(rows) == 12 and mean(rows[-4:]) > mean(rows[:2]) + 0.2


def test_a_player_guesses_better_within_a_few_updates(tmp_path):
    rows = train(ppo_llm, tmp_path, train_size=960, num_train_epochs=1, evaluation_interval=0)
    assert len(rows) == 15 and mean(rows[-4:]) > mean(rows[:2]) + 0.2


@pytest.mark.slow
@SEEDS
@pytest.mark.parametrize("critic, reward, logprob", [("separate", 2.3, -1.6), ("head", 2.0, -2.0)])
def test_the_default_run_learns_to_coordinate_in_sentences(tmp_path, seed, critic, reward, logprob):
    rows = train(ippo_llm, tmp_path, seed=seed, use_separate_critic=critic == "separate")
    assert float(rows[0]["reward_mean"]) < 1.2
    assert mean(last_tenth(rows)) >= reward
    assert mean(last_tenth(rows), "reference_logprob") >= logprob


@pytest.mark.slow
@SEEDS
def test_the_default_run_of_iac_learns_too(tmp_path, seed):
    rows = train(iac_llm, tmp_path, seed=seed, use_separate_critic=True)
    assert float(rows[0]["reward_mean"]) < 1.2
    assert mean(last_tenth(rows)) >= 2.0  # seed 1: 2.19 on one thread


@pytest.mark.slow
@SEEDS
def test_players_go_most_of_the_way_to_optimal_play(tmp_path, seed):
    rows = train(ippo_llm, tmp_path, task="number", num_turns=3, max_new_tokens=4, seed=seed)
    first = mean(rows[: len(rows) // 10])
    assert mean(last_tenth(rows)) >= first + 0.7 * (optimum(2, 3) - first)


@pytest.mark.slow
@SEEDS
def test_programmers_share_the_work(tmp_path, seed):
    rows = train(ippo_llm, tmp_path, task="code", max_new_tokens=48, use_separate_critic=True, seed=seed)
    assert mean(last_tenth(rows)) >= mean(rows[:1]) + 0.5


@pytest.mark.slow
@SEEDS
def test_a_player_comes_near_to_binary_search(tmp_path, seed):
    rows = train(ppo_llm, tmp_path, seed=seed)
    assert float(rows[-1]["fitness"]) >= 0.57  # 0.587, 0.598, 0.575 with seeds 1, 2, 3 on one thread
    assert mean(last_tenth(rows)) >= 0.8 * guess.optimum(6)


@pytest.mark.slow
@SEEDS
def test_two_agents_on_one_base_coordinate(tmp_path, seed):
    rows = train(ppo_llm, tmp_path, task="tldr", num_agents=2, seed=seed)
    assert float(rows[-1]["fitness"]) >= 2.2  # 2.29, 2.55, 2.55 on one thread
    assert mean(last_tenth(rows)) >= 2.1
