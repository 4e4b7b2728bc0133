"""Learning is seen, not assumed. The short form runs with all tests; python -m pytest -m slow runs whole trainings."""

import pytest
from test_run import read_metrics

from ippo_llm import Args, main


def mean(rows, name):
    return sum(float(row[name]) for row in rows) / len(rows)


def test_the_reward_rises_within_a_few_updates(tmp_path):
    main(
        Args(
            output_dir=str(tmp_path / "run"),
            use_separate_critic=True,
            train_size=1024,
            num_train_epochs=1,
            eval_interval=0,
        )
    )
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 16
    assert float(rows[0]["reward_mean"]) < 1.2 and mean(rows[-4:], "reward_mean") > mean(rows[:2], "reward_mean") + 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("critic, reward, logprob", [("separate", 2.3, -1.6), ("head", 2.0, -2.0)])
def test_the_default_run_learns_to_coordinate_in_sentences(tmp_path, seed, critic, reward, logprob):
    main(Args(output_dir=str(tmp_path / "run"), seed=seed, use_separate_critic=critic == "separate"))
    rows = read_metrics(tmp_path / "run")
    last = rows[-len(rows) // 10 :]
    assert float(rows[0]["reward_mean"]) < 1.2
    assert mean(last, "reward_mean") >= reward and mean(last, "reference_logprob") >= logprob
