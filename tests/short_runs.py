"""Short runs of every script in this process, functions that fail at chosen calls, and what such runs leave."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import build_model
from transformers import AutoTokenizer

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils.models.loading import locate
from utils.run.checkpoint import check_whole, checkpoints
from utils.tasks import number

# Three updates, each of one optimiser step an agent, and one call of reward_func.
TEAM = {"train_size": 12, "rollout_buffer_size": 4, "num_train_epochs": 1, "num_agents": 2, "mini_batch_size": 4}
TEAM |= {"num_turns": 1, "max_new_tokens": 3, "eval_interval": 0}
GROUPS = TEAM | {"num_generations": 4, "train_size": 3}  # items, of which each is answered four times
SCRIPTS = {"ippo": ippo_llm, "iac": iac_llm, "maac": maac_llm, "magrpo": magrpo_llm, "ppo": ppo_llm}
FLAGS = {"ippo": TEAM, "iac": TEAM, "maac": TEAM, "magrpo": GROUPS, "ppo": TEAM | {"update_epochs": 1, "lora_rank": 4}}

every_script = pytest.mark.parametrize("script", SCRIPTS)


# --- Runs -------------------------------------------------------------------------------------------------------------


@functools.cache
def small_model():
    """A model that is quick to copy and to save, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(locate("utils/tiny_lm"))
    return build_model(tokenizer), tokenizer


def train(script, reward_func=None, folder="run", **flags):
    """Agents and Run of a short run on the game of numbers, scored by the function."""
    if "resume" not in flags:
        flags["output_dir"] = str(folder)
    if script == "magrpo" and "train_size" in flags:
        flags["train_size"] //= GROUPS["num_generations"]  # as many joint samples as of the others
    args = SCRIPTS[script].Args(**(FLAGS[script] | flags))
    return SCRIPTS[script].main(args, make_task(reward_func or reward_length), *small_model())


def make_task(reward_func):
    """The game of numbers, scored by another function."""
    return SimpleNamespace(
        train_dataset=number.train_dataset,
        eval_dataset=number.eval_dataset,
        formatters=number.formatters,
        external_transition=number.external_transition,
        reward_func=reward_func,
    )


def reward_length(*completions, items):
    """A reward that differs from one joint response to the next, whatever they are."""
    return [len("".join(texts)) / 10 for texts in zip(*completions)]


# --- Failures ---------------------------------------------------------------------------------------------------------


class Faulty:
    """reward_length, but for some of its calls, numbered from 1, which do something else."""

    __name__ = "reward_func"

    def __init__(self, fault, *calls):
        self.fault = fault
        self.calls = calls
        self.num_calls = 0

    def __call__(self, *completions, items):
        self.num_calls += 1
        if self.num_calls in self.calls:
            return self.fault(items)
        return reward_length(*completions, items=items)


def return_none(items):
    """A fault that ends a run."""


# --- What runs leave --------------------------------------------------------------------------------------------------


def newest_checkpoint(folder):
    """The newest checkpoint of a run, which is whole."""
    newest = checkpoints(Path(folder) / "checkpoints")[-1]
    check_whole(newest)
    return newest


def saved_state(folder):
    """state.json of a run's newest checkpoint."""
    return json.loads((newest_checkpoint(folder) / "state.json").read_text())


def assert_one_line(error, exit_code):
    """An error is one line, and ends a command with that code."""
    assert str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == exit_code
