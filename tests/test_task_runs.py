"""Every task trains in every script."""

import importlib

import pytest
from helpers import make_args

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
from utils.tasks import BUILT_IN


@pytest.mark.parametrize("task", BUILT_IN)
@pytest.mark.parametrize("script", [ippo_llm, pytest.param(iac_llm, marks=pytest.mark.slow), maac_llm, magrpo_llm])
def test_every_task_runs_offline_in_every_script(tmp_path, script, task):
    if task == "reasoning":
        pytest.importorskip("reasoning_gym")
    turns = 1 + hasattr(importlib.import_module(f"utils.tasks.{task}"), "external_transition")
    flags = {"task": task, "num_turns": turns, "train_size": 8, "max_new_tokens": 8}
    if script is magrpo_llm:
        flags |= {"num_generations": 2, "train_size": 8 // 2**turns}
    _, run = script.main(make_args(tmp_path, script, **flags))
    least = -3 * turns if task == "build" else 0
    assert len(run.rows) == 1 and least <= run.rows[0]["reward_mean"] <= (run.optimum or 3)
    assert run.rows[0]["eval/reward_mean"] is not None
