"""Tasks: load one by name or from a file, and its data from the task itself or from a dataset of yours.

A task is a module (or any object) with

    train_dataset(size, seed), eval_dataset(size, seed) -> datasets.Dataset; the second may be left out
    formatters: one callable, or a list of one for each agent; item -> str, or chat messages for the tokenizer's
        template; it gets, if it names it, `agent` (the agent's number, from 0)
    reward_func(*completions): N lists of B strings -> B floats (one joint reward each), or N lists of B floats (one
        list for each agent); it gets, if it names them, `items` (B items), `prompts` (N lists of B strings), `turn`
        (from 0), `num_turns` and `turns` (N lists of B lists: all completions of an episode so far)
    external_transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent)
        -> N next prompts, or None to end the episode; only for several turns. It is called for one episode, with those
        of these that it names: `prompt` (the item's), N completions, N lists of what the agent was asked (as the task
        said it) and of what it answered so far, `item`, and `turn` (from 0, the one just played)
    optional: reward_processor(float) -> float; metrics_callback(rollouts) -> {name: float};
        optimum(num_agents, num_turns) -> float, the expected reward of an episode at best;
        check(num_agents, num_turns), which raises ValueError for a team that it can't serve;
        and for --dataset: item_of(row) -> item, columns (names that a row must have), or, for a name that is no
        dataset of rows, named_dataset(name, size, seed, split) -> datasets.Dataset
"""

import importlib
import importlib.util
import random
import sys
from pathlib import Path

import datasets

from utils.cli import TaskError, UserError, one_line

BUILT_IN = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
FUNCTIONS = (
    "train_dataset eval_dataset reward_func reward_processor metrics_callback external_transition optimum".split()
)


def load_task(task, num_agents, num_turns=1, turns_flag="--num-turns"):
    """The task of that name, file or object, checked. Raises UserError where there is none, or it lacks a part."""
    name = task if isinstance(task, str) else getattr(task, "__name__", type(task).__name__)
    if isinstance(task, str):
        task = importlib.import_module(f"utils.tasks.{task}") if task in BUILT_IN else load_file(task)
    for part in ("train_dataset", "reward_func", "formatters"):
        if not hasattr(task, part):
            raise UserError(f"--task {name} has no {part}")
    for part in FUNCTIONS:
        if not callable(getattr(task, part, print)):
            raise UserError(f"--task {name}: {part} is not a function but {one_line(repr(getattr(task, part)), 80)}")
    formatters = task.formatters if isinstance(task.formatters, (list, tuple)) else [task.formatters] * num_agents
    if len(formatters) != num_agents:
        raise UserError(
            f"--task {name} has {len(formatters)} formatters for --num-agents {num_agents}; it takes one each"
        )
    if not all(map(callable, formatters)):
        raise UserError(f"--task {name}: each of its formatters is to be a function")
    if num_turns > 1 and not hasattr(task, "external_transition"):
        raise UserError(f"{turns_flag} {num_turns} takes a task with an external_transition, and {name} has none")
    try:
        getattr(task, "check", lambda *_: None)(num_agents, num_turns)
    except ValueError as error:
        raise UserError(f"--task {name}: {error}") from error
    return task


def load_file(path):
    if not path.endswith(".py"):
        raise UserError(f"--task takes {', '.join(BUILT_IN)} or a FILE.py, got {path}")
    if not Path(path).is_file():
        raise UserError(f"--task takes {', '.join(BUILT_IN)} or a FILE.py, and there is no file {path}")
    sys.path.append(str(Path(path).resolve().parent))  # so that it may import its neighbours
    spec = importlib.util.spec_from_file_location("task_file", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"--task {path} can't be loaded: {type(error).__name__}: {error}") from error
    return module


def load_datasets(task, args, least):
    """The items to train on and the held-out ones: the task's own, or those of --dataset; of the latter maybe none.

    Raises UserError where they can't be had, or where there are fewer than `least` to train on.
    """
    if args.dataset and not hasattr(task, "named_dataset"):
        train, held_out = from_dataset(task, args)
    else:
        train, held_out = from_task(task, args, "train"), from_task(task, args, "eval")
    if len(train) < least:
        where = f"--dataset {args.dataset}" if args.dataset else "train_dataset of --task"
        raise UserError(f"{where} has {len(train)} items; an update takes {least} (--train-size)")
    return train, held_out


def from_task(task, args, split):
    part, size = f"{split}_dataset", getattr(args, f"{split}_size")
    if args.dataset:
        part, of = "named_dataset", lambda: task.named_dataset(args.dataset, size, args.seed, split)
    elif hasattr(task, part):
        of = lambda: getattr(task, part)(size, args.seed)  # noqa: E731
    else:
        return []
    try:
        dataset = of()
        len(dataset)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{part} of --task failed: {type(error).__name__}: {error}") from error
    return dataset


def from_dataset(task, args):
    """Items from a hub dataset, a folder or a file: as many as there are, up to --train-size and --eval-size."""
    name = args.dataset
    kind = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}.get(Path(name).suffix)
    if kind and not Path(name).is_file():
        raise UserError(f"--dataset takes a hub dataset's name, a folder or a file, and there is no file {name}")
    try:
        splits = datasets.load_dataset(kind, data_files=name) if kind else datasets.load_dataset(name)
    except Exception as error:
        raise UserError(f"--dataset {name} can't be loaded: {type(error).__name__}: {error}") from error
    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    tests = [splits[key] for key in ("test", "validation", "val") if key in splits and splits[key] is not train]
    train = train.shuffle(seed=args.seed)
    if not tests:  # the last rows of the only split
        size = min(args.eval_size, len(train) // 5)
        train, tests = train.select(range(len(train) - size)), [train.select(range(len(train) - size, len(train)))]
    lacking = [column for column in getattr(task, "columns", ()) if column not in train.column_names]
    if lacking:
        there = ", ".join(train.column_names)
        raise UserError(f"--dataset {name} has the columns {there}; --task {args.task} reads {', '.join(task.columns)}")
    held_out = tests[0].shuffle(seed=args.seed)
    rows = [
        dataset.select(range(min(size, len(dataset))))
        for dataset, size in ((train, args.train_size), (held_out, args.eval_size))
    ]
    item_of = getattr(task, "item_of", lambda row: row)
    try:
        return [[item_of(row) for row in dataset] for dataset in rows]
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"--dataset {name} has a row that --task {args.task} can't use: {what}") from error


def batches(dataset, size, epochs, seed, done=0):
    """Lists of `size` items, in a new random order each epoch, while so many are left, but for the first `done`."""
    rng, indices = random.Random(seed), []
    for _ in range(epochs):
        indices += rng.sample(range(len(dataset)), len(dataset))
        while len(indices) >= size:
            if done <= 0:
                yield [dataset[k] for k in indices[:size]]
            indices, done = indices[size:], done - 1


def extra_metrics(task, rollouts):
    """What the task's metrics_callback says of a team's rollouts, if it has one: {name: float}. Raises TaskError."""
    if not hasattr(task, "metrics_callback"):
        return {}
    try:
        return {str(name): float(value) for name, value in task.metrics_callback(rollouts).items()}
    except Exception as error:
        raise TaskError(f"metrics_callback raised {type(error).__name__}: {error}") from error
