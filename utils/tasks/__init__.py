"""Tasks: load one by name or from a file, call its reward function and check what it says.

A task is a module (or any object) with

    train_dataset(size, seed), eval_dataset(size, seed) -> datasets.Dataset; the second may be left out
    formatters: one callable, or a list of one for each agent; item -> str, or chat messages for the tokenizer's
        template; a callable with a parameter `agent` gets the agent's number, from 0
    reward_func(*completions): N lists of B strings -> B floats (one joint reward each), or N lists of B floats (one
        list for each agent); with parameters `items` and `prompts` it gets these too: B items, N lists of B strings
    optional: reward_processor(float) -> float; metrics_callback(rollouts) -> {name: float}
"""

import importlib.util
import inspect
import math
import random
import sys
from pathlib import Path

from utils.cli import TaskError, UserError, one_line


def load_task(task, inline, num_agents):
    """The task of that name, file or object, checked; `inline` is the module that holds the default one, `tldr`.

    Raises UserError where there is none, or where it lacks a part.
    """
    name = task if isinstance(task, str) else getattr(task, "__name__", type(task).__name__)
    if task == "tldr":
        task = inline
    elif isinstance(task, str) and task.endswith(".py"):
        task = load_file(task)
    elif isinstance(task, str):
        raise UserError(f"--task takes tldr or a FILE.py, got {task}")
    for part in ("train_dataset", "reward_func", "formatters"):
        if not hasattr(task, part):
            raise UserError(f"--task {name} has no {part}")
    for part in ("train_dataset", "eval_dataset", "reward_func", "reward_processor", "metrics_callback"):
        if not callable(getattr(task, part, print)):
            raise UserError(f"--task {name}: {part} is not a function but {one_line(repr(getattr(task, part)), 80)}")
    formatters = task.formatters if isinstance(task.formatters, (list, tuple)) else [task.formatters] * num_agents
    if len(formatters) != num_agents:
        raise UserError(
            f"--task {name} has {len(formatters)} formatters for --num-agents {num_agents}; it takes one each"
        )
    if not all(map(callable, formatters)):
        raise UserError(f"--task {name}: each of its formatters is to be a function")
    return task


def load_file(path):
    if not Path(path).is_file():
        raise UserError(f"--task takes tldr or a FILE.py, and there is no file {path}")
    sys.path.append(str(Path(path).resolve().parent))  # so that it may import its neighbours
    spec = importlib.util.spec_from_file_location("task_file", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"--task {path} can't be loaded: {type(error).__name__}: {error}") from error
    return module


def load_dataset(task, part, size, seed, least=1):
    """The task's `part`, train_dataset or eval_dataset; none where it has no eval_dataset.

    Raises UserError where the function fails or yields fewer than `least` items.
    """
    if part == "eval_dataset" and not hasattr(task, part):
        return []
    try:
        dataset = getattr(task, part)(size, seed)
        found = len(dataset)
    except Exception as error:
        raise UserError(f"{part} of --task failed: {type(error).__name__}: {error}") from error
    if found < least:
        raise UserError(f"{part} of --task has {found} items; an update takes {least} (--train-size, --eval-size)")
    return dataset


def batches(dataset, size, epochs, seed):
    """Lists of `size` items, in a new random order each epoch, until fewer than that are left."""
    rng, indices = random.Random(seed), []
    for _ in range(epochs):
        indices += rng.sample(range(len(dataset)), len(dataset))
        while len(indices) >= size:
            yield [dataset[k] for k in indices[:size]]
            indices = indices[size:]


def score(task, items, prompts, completions):
    """Rewards of B joint samples, N lists of B floats, from N lists of prompts and of completions.

    Returns them as reward_func gave them and as reward_processor (if any) left them. Raises TaskError, naming the
    function, the item and the value, where a function raises or returns anything but finite numbers.
    """
    N, B = len(completions), len(items)
    rewards = call_reward(task.reward_func, items, prompts, completions)
    name = getattr(task.reward_func, "__name__", "reward_func")
    try:
        rewards = [x.tolist() if hasattr(x, "tolist") else x for x in rewards]
    except TypeError:
        raise TaskError(f"{name} returned {one_line(repr(rewards), 80)}; it takes a list of {B} numbers") from None
    per_agent = len(rewards) == N and all(isinstance(x, (list, tuple)) for x in rewards)
    rows = [list(row) for row in rewards] if per_agent else [list(rewards)]
    for row in rows:
        if len(row) != B:
            told = "has none" if len(row) < B else "has one too many"
            culprit = items[min(len(row), B - 1)]
            raise TaskError(f"{name} returned {len(row)} values for {B} items: {one_line(culprit, 80)} {told}")
    rows = [[number(value, name, k, items[k]) for k, value in enumerate(row)] for row in rows]
    processor = getattr(task, "reward_processor", None)
    processed = [[processed_value(processor, value, k, items[k]) for k, value in enumerate(row)] for row in rows]
    copies = 1 if per_agent else N
    return rows * copies, processed * copies


def call_reward(reward_func, items, prompts, completions):
    named = inspect.signature(reward_func).parameters

    def call(rows):
        known = {"items": [items[k] for k in rows], "prompts": [[texts[k] for k in rows] for texts in prompts]}
        known = {key: value for key, value in known.items() if key in named}
        return reward_func(*([texts[k] for k in rows] for texts in completions), **known)

    try:
        return call(range(len(items)))
    except Exception as error:
        cause, where = error, f"the batch of {len(items)} items"
        for k in range(len(items)):  # which item is it?
            try:
                call([k])
            except Exception as single:
                cause, where = single, f"item {k}, {one_line(items[k], 80)}"
                break
        name = getattr(reward_func, "__name__", "reward_func")
        raise TaskError(f"{name} raised {type(cause).__name__}: {cause} on {where}") from cause


def processed_value(processor, value, k, item):
    if processor is None:
        return value
    try:
        return number(processor(value), "reward_processor", k, item)
    except TaskError:
        raise
    except Exception as error:
        what = f"reward_processor raised {type(error).__name__}: {error}"
        raise TaskError(f"{what} on {value} of item {k}, {one_line(item, 80)}") from error


def number(value, name, k, item):
    if isinstance(value, str) or not hasattr(value, "__float__") or not math.isfinite(value):
        raise TaskError(
            f"{name} returned {one_line(repr(value), 80)} for item {k}, {one_line(item, 80)}; it takes a number"
        )
    return float(value)


def extra_metrics(task, rollouts):
    """What the task's metrics_callback says of a team's rollouts, if it has one: {name: float}. Raises TaskError."""
    if not hasattr(task, "metrics_callback"):
        return {}
    try:
        return {str(name): float(value) for name, value in task.metrics_callback(rollouts).items()}
    except Exception as error:
        raise TaskError(f"metrics_callback raised {type(error).__name__}: {error}") from error
