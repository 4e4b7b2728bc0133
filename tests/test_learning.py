"""Learning is seen, not assumed: a few updates in the short form, whole runs with -m slow."""

import pytest
from helpers import read_metrics

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
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


BRIEF = {"num_train_epochs": 1, "eval_interval": 0}
NUMBER = BRIEF | {"task": "number", "num_turns": 3, "max_new_tokens": 4, "train_size": 512}
FAST = {"actor_learning_rate": 1e-3}
RISES = {
    "iac on summaries": (iac_llm, BRIEF | {"use_separate_critic": True, "train_size": 384}, 0.3),
    "ippo on numbers": (ippo_llm, NUMBER, 0.15),
    "maac on numbers": (maac_llm, NUMBER | FAST | {"train_size": 384}, 0.1),
    "magrpo on numbers": (magrpo_llm, NUMBER | FAST | {"num_generations": 4, "train_size": 128}, 0.1),
    "ppo on guesses": (ppo_llm, BRIEF | {"train_size": 512}, 0.12),
}
LONGER = dict.fromkeys(("iac", "maac", "magrpo", "ppo"), [pytest.mark.slow])


@pytest.mark.parametrize("case", [pytest.param(case, marks=LONGER.get(case.split()[0], [])) for case in RISES])
def test_the_reward_rises_within_a_few_updates(tmp_path, case):
    script, flags, rise = RISES[case]
    rows = train(script, tmp_path, **flags)
    assert mean(rows[-4:]) > mean(rows[:2]) + rise


@pytest.mark.slow
@SEEDS
@pytest.mark.parametrize("use_separate_critic", [False, True])
def test_the_default_run_learns_to_coordinate_in_sentences(tmp_path, seed, use_separate_critic):
    rows = train(ippo_llm, tmp_path, seed=seed, use_separate_critic=use_separate_critic)
    assert float(rows[0]["reward_mean"]) < 1.2
    assert mean(last_tenth(rows)) >= 2.1
    assert mean(last_tenth(rows), "reference_logprob") >= -2.0


@pytest.mark.slow
@SEEDS
@pytest.mark.parametrize("script, reward", [(iac_llm, 2.0), (maac_llm, 1.8), (magrpo_llm, 1.8)])
def test_the_default_runs_of_the_other_scripts_learn_too(tmp_path, seed, script, reward):
    rows = train(script, tmp_path, seed=seed)
    assert mean(last_tenth(rows)) >= reward


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
    assert float(rows[-1]["eval/reward_mean"]) >= 0.55
    assert mean(last_tenth(rows)) >= 0.8 * guess.optimum(6)


@pytest.mark.slow
@SEEDS
def test_two_agents_on_one_base_coordinate(tmp_path, seed):
    rows = train(ppo_llm, tmp_path, task="tldr", num_agents=2, num_turns=1, max_new_tokens=72, seed=seed)
    assert mean(last_tenth(rows)) >= 2.0
