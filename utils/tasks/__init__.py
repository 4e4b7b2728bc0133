"""Tasks: load one by name or from a file, and its items from the task itself or from a dataset of yours.

A task is a module (or any object) with

    train_dataset(size, seed), eval_dataset(size, seed) -> datasets.Dataset; the second may be left out, and the first
        where items come from elsewhere
    formatters: one callable, or a list of one for each agent; item -> str, or chat messages for the tokenizer's
        template; it gets, if it names it, `agent` (the agent's number, from 0) and `num_agents`; it may be left out:
        then the agents read the item's "prompt"
    reward_func(*completions): N lists of B strings -> B floats (one joint reward each), or N lists of B floats (one
        list for each agent); it gets, if it names them, `items` (B items), `prompts` (N lists of B strings), `turn`
        (from 0), `num_turns` and `turns` (N lists of B lists: all completions of an episode so far)
    or, for questions with answers, in their place: conversation_template, chat messages in which {question}, or the
        name of another column, stands for the item's; reward_fn(completion, answer, question) -> float, which scores
        the last agent's completion of one item; other columns it gets if it names them
    external_transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent)
        -> N next prompts, or None to end the episode; only for several turns. It is called for one episode, with those
        of these that it names: `prompt` (the item's), N completions, N lists of an agent's prompts so far (as the task
        gave them) and of its responses, `item`, and `turn` (from 0, the one just played)
    optional: reward_processor(float) -> float; metrics_callback(rollouts) -> {name: float};
        optimum(num_agents, num_turns, items) -> float, the expected reward of an episode at best, with those of these
        arguments that it names;
        check(num_agents, num_turns), which raises ValueError for a team that it can't serve;
        and for --dataset: item_of(row) -> item, columns (names that a row must have), or, for a name that is no
        dataset of rows, named_dataset(name, size, seed, split) -> datasets.Dataset
"""

import importlib
import importlib.util
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import datasets
from pydantic import PositiveFloat, PositiveInt

from utils.cli import TaskError, UserError, describe, flag_name, flags, one_line
from utils.distributed import say
from utils.tasks import questions
from utils.tasks.episodes import Episodes, call, formatters_of
from utils.tasks.lengths import encode_texts, fit_prompts, prompt_limit, readers, take

__all__ = [
    "Episodes",
    "TaskArgs",
    "batches",
    "encode_texts",
    "extra_metrics",
    "load_data",
    "load_items",
    "load_task",
    "optimum",
    "prompt_limit",
    "readers",
]
BUILT_IN = ("arxiv", "build", "code", "number", "probe", "reasoning", "tldr")
NEEDED = ("formatters", "reward_func")
DATA = ("train_dataset", "eval_dataset", "named_dataset", "item_of")
OPTIONAL = (*DATA, "external_transition", "reward_processor", "metrics_callback", "optimum", "check")
SHORT_FORMS = {  # what a task may have in place of each that is needed, and what makes the one of the other
    "formatters": ("conversation_template", questions.make_formatter),
    "reward_func": ("reward_fn", questions.make_reward_func),
}
MADE_ITEMS = 1536  # items to train on where a task makes them
FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@flags
class TaskArgs:
    """The task and its items."""

    task: str | None = None  # arxiv, build, code, number, probe, reasoning, tldr or your FILE.py; none: the default
    dataset: str | None = None  # data in place of the task's own: a hub dataset's name, a folder, or a .jsonl file
    train_size: PositiveInt | None = None  # items to train on; none: all of --dataset, or 1536 of a task's own
    eval_size: PositiveInt = 64  # held-out items
    max_prompt_length: PositiveInt | None = None  # most tokens of a prompt; none: all that the model has room for
    long_prompts: Literal["drop", "truncate"] = "drop"  # leave items with longer ones out, or cut them on the left
    reward_timeout: PositiveFloat | None = None  # seconds a call of reward_func, reset or step may take; none: any time


# --- The task ---------------------------------------------------------------------------------------------------------


def load_task(task, num_agents, num_turns=1):
    """The task of a name, of a FILE.py, or any object with a task's names; checked.

    Raises UserError where there is none, where it lacks something, and where it can't serve such a team.
    """
    name = name_of(task)
    if isinstance(task, str):
        task = importlib.import_module(f"utils.tasks.{task}") if task in BUILT_IN else load_file(task)
    has_short_form = hasattr(task, "conversation_template") or hasattr(task, "reward_fn")
    if has_short_form or getattr(task, "formatters", None) is None:
        task = complete(task, name)
    for attribute in NEEDED:
        if not hasattr(task, attribute):
            raise UserError(f"{name} has no {attribute}")
    for attribute in (*NEEDED, *OPTIONAL):
        value = getattr(task, attribute, None)
        if attribute != "formatters" and hasattr(task, attribute) and not callable(value):
            raise UserError(f"{name}: {attribute} is not a function but {one_line(repr(value), 80)}")
    formatters = formatters_of(task, num_agents)
    if len(formatters) != num_agents:
        raise UserError(f"{name} has {len(formatters)} formatters for {num_agents} agents; it takes one each")
    if not all(map(callable, formatters)):
        raise UserError(f"{name}: each of its formatters is to be a function")
    if num_turns > 1 and not hasattr(task, "external_transition"):
        raise UserError(f"{name} has no external_transition, which {num_turns} turns take")
    if hasattr(task, "check"):
        try:
            task.check(num_agents, num_turns)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error
        except (Exception, SystemExit) as error:
            raise UserError(f"{name}: check failed: {describe(error)}") from error
    return task


def complete(task, name):
    """A task with formatters, also where it has none, and reward_func, in place of what stands for them."""
    there = (*NEEDED, *OPTIONAL, "columns", "__file__", "__name__")
    whole = SimpleNamespace(**{attribute: getattr(task, attribute) for attribute in there if hasattr(task, attribute)})
    for attribute, (short_form, make) in SHORT_FORMS.items():
        if hasattr(task, short_form):
            if hasattr(task, attribute):
                raise UserError(f"{name} has both {attribute} and {short_form}; it takes one of them")
            setattr(whole, attribute, make(getattr(task, short_form), name))
    if getattr(whole, "formatters", None) is None:
        whole.formatters = questions.read_prompt
    whole.item_columns = questions.needed_columns(task)
    return whole


def name_of(task):
    """What errors call a task."""
    if isinstance(task, str):
        return f"--task {task}"
    if getattr(task, "__file__", None):
        return f"the task in {Path(task.__file__).name}"
    return f"the task {getattr(task, '__name__', type(task).__name__)}"


def load_file(path):
    """The module in a task's file. Raises UserError."""
    if not path.endswith(".py"):
        raise UserError(f"--task takes {', '.join(BUILT_IN)} or a FILE.py, got {path}")
    if not Path(path).is_file():
        raise UserError(f"--task takes {', '.join(BUILT_IN)} or a FILE.py, and there is no file {path}")
    try:
        return import_file(path, "task_file")
    except (Exception, SystemExit) as error:
        raise UserError(f"--task {path} can't be loaded: {describe(error)}") from error


def import_file(path, name):
    """Import a file as the module of that name; it may import its neighbours."""
    search_in(Path(path).parent)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def search_in(folder):
    """Let modules be found in a folder too, after all other places."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


def extra_metrics(task, rollouts):
    """What the task's metrics_callback, if there is one, returns for N rollouts: {name: float}. Raises TaskError."""
    if not hasattr(task, "metrics_callback"):
        return {}
    try:
        return {str(name): float(value) for name, value in task.metrics_callback(rollouts).items()}
    except (Exception, SystemExit) as error:
        raise TaskError(f"metrics_callback raised {describe(error)}") from error


def optimum(task, items, num_agents, num_turns):
    """The expected reward of an episode of these items at best, None where the task does not say. Raises UserError."""
    if not hasattr(task, "optimum"):
        return None
    try:
        best = call(task.optimum, num_agents=num_agents, num_turns=num_turns, items=items)
        best = None if best is None else float(best)
    except (Exception, SystemExit) as error:
        raise UserError(f"optimum of {name_of(task)} failed: {describe(error)}") from error
    if best is not None and not math.isfinite(best):
        raise UserError(f"optimum of {name_of(task)} returned {best}; it takes a finite number")
    return best


# --- Its items --------------------------------------------------------------------------------------------------------


def load_data(task, args, readers, least, train_dataset=None, eval_dataset=None, most=None):
    """The items to train on and a list of those held out, as `load_items` has them, without those of too long prompts.

    `readers` has of each agent its tokenizer and its PromptLimit. `most` is the name of the flag that says how many
    items are held out; None: all. Raises UserError.
    """
    data = load_items(task, args, args.seed, least, train_dataset, eval_dataset)
    train_items, held_out_items = fit_prompts(task, args, readers, least, *data)
    size = getattr(args, most) if most else None
    if size and size > len(held_out_items):
        say(f"{flag_name(most)} {size}: the task has {len(held_out_items)} held-out items, and those are taken")
    return train_items, [*held_out_items][:size]


def load_items(task, args, seed, least, train_dataset=None, eval_dataset=None):
    """The items to train on and the held-out items: the task's own, those of --dataset, or of rows from Python.

    `train_dataset` and `eval_dataset` are rows in place of the task's own: a datasets.Dataset, or a list of dicts.
    There are no held-out items where the task has no eval_dataset, or --dataset too few rows. Raises UserError where
    items can't be had, or where there are fewer than `least` to train on.
    """
    name = name_of(args.task or task)
    if args.dataset and (train_dataset is not None or eval_dataset is not None):
        raise UserError(f"--dataset {args.dataset} and train_dataset= or eval_dataset= are both data; give one of them")
    if args.dataset and not hasattr(task, "named_dataset"):
        train_dataset, eval_dataset = split_rows(load_splits(args.dataset), args.eval_size, seed)
    parts = []
    for split, rows, size in (("train", train_dataset, args.train_size), ("eval", eval_dataset, args.eval_size)):
        source = f"--dataset {args.dataset}" if args.dataset else f"{split}_dataset="
        if rows is not None:
            items = use_rows(task, name, rows, size, source)
        else:
            items = make_items(task, name, args.dataset, split, size or MADE_ITEMS, seed)
            source = source if args.dataset else f"{split}_dataset of {name}"
        check_items(task, name, items, source)
        if split == "train" and len(items) < least:
            flag = "--train-size" if args.train_size and args.train_size < least else "--rollout-buffer-size"
            raise UserError(f"{source} has {len(items)} items; an update takes {least} ({flag})")
        parts.append(items)
    return parts


def make_items(task, name, dataset, split, size, seed):
    """Items that the task makes, of the dataset with that name if there is one; split is train or eval."""
    function = "named_dataset" if dataset else f"{split}_dataset"
    if not hasattr(task, function):
        if split == "train":
            raise UserError(f"{name} has no {function}")
        return []
    try:
        if dataset:
            items = task.named_dataset(dataset, size, seed, split)
        else:
            items = getattr(task, function)(size, seed)
        len(items)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{function} of {name} failed: {describe(error)}") from error
    try:
        [items[k] for k in range(min(1, len(items)))]  # they are taken by their numbers
    except Exception as error:
        returned = f"{function} of {name} returned a {type(items).__name__}"
        raise UserError(f"{returned}; it takes a list of items, or a datasets.Dataset") from error
    return items


def use_rows(task, name, rows, size, source):
    """Items from rows, a datasets.Dataset or a list of dicts: the first `size`, or all."""
    if isinstance(rows, datasets.Dataset):
        there = rows.column_names
    elif isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        there = [column for column in (rows[0] if rows else ()) if all(column in row for row in rows)]
    else:
        raise UserError(f"{source} takes a datasets.Dataset or a list of dicts, got {one_line(repr(rows), 80)}")
    columns = getattr(task, "columns", ())
    if rows and not set(columns) <= set(there):
        raise UserError(f"{source} has the columns {', '.join(there)}; {name} reads {', '.join(columns)}")
    rows = take(rows, range(min(size or len(rows), len(rows))))
    if not hasattr(task, "item_of"):
        return rows
    try:
        return [task.item_of(row) for row in rows]
    except Exception as error:
        raise UserError(f"{source} has a row that {name} can't use: {describe(error)}") from error


def check_items(task, name, items, source):
    """Raise UserError for an item without what the task's reward_fn or conversation_template reads."""
    columns = getattr(task, "item_columns", ())
    for item in items if columns else ():
        for column in columns:
            if not isinstance(item, dict) or item.get(column) is None:
                raise UserError(f"{source} has a row without {column}, which {name} reads: {one_line(item, 80)}")


def load_splits(name):
    """The splits of a hub dataset, a folder or a file. Raises UserError."""
    file_format = FORMATS.get(Path(name).suffix.lower())
    if file_format and not Path(name).is_file():
        raise UserError(f"--dataset takes a hub dataset's name, a folder or a file, and there is no file {name}")
    if Path(name).is_file() and not file_format:
        raise UserError(f"--dataset takes a file of the formats {' '.join(FORMATS)}, got {name}")
    try:
        if file_format:
            return datasets.load_dataset(file_format, data_files=name)
        return datasets.load_dataset(name)
    except Exception as error:
        cause = error.__cause__ or error  # where a row can't be read, the error itself does not say why
        raise UserError(f"--dataset {name} can't be loaded: {type(cause).__name__}: {one_line(cause)}") from error


def split_rows(splits, eval_size, seed):
    """Rows to train on and held-out rows, shuffled; of an only split the last are held out, at most a fifth."""
    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    rows = train.shuffle(seed=seed)
    for name in ("test", "validation", "val"):
        if name in splits and splits[name] is not train:
            return rows, splits[name].shuffle(seed=seed)
    end = len(rows) - min(eval_size, len(rows) // 5)
    held_out = take(rows, [*range(end, len(rows))])  # of no row too
    return take(rows, range(end)), held_out.shuffle(seed=seed)


def batches(items, size, epochs, seed, first=0, count=None):
    """Lists of `size` items, in a new random order each epoch, from item number `first` on: all, or `count` of them.

    Items that do not fill a list at the end of an epoch open the first one of the next; those of the last epoch are
    left out, and it is said how many.
    """
    total = (epochs * len(items) - first) // size
    left_out = (epochs * len(items) - first) % size
    count = total if count is None else count
    if left_out and count == total:
        say(f"the last {left_out} items of the last epoch are left out: an update takes {size}")
    rng = random.Random(seed)
    order = []
    for _ in range(epochs):
        order += rng.sample(range(len(items)), len(items))
        gone = min(first, len(order))  # before the first list
        order = order[gone:]
        first -= gone
        while len(order) >= size and count > 0:
            yield [items[index] for index in order[:size]]
            order = order[size:]
            count -= 1
