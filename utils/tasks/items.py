"""The items of a run: a task's own, those of --dataset, or rows from Python; without too long prompts; in batches."""

import math
import random
from pathlib import Path

import datasets

from utils import envs
from utils.cli import TaskError, UserError, describe, one_line
from utils.distributed import say
from utils.models.policy import UNLIMITED
from utils.models.transcripts import encode

MADE_ITEMS = 1536  # items to train on where a task makes them
FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_items(task, initials, args, train_dataset=None, eval_dataset=None):
    """The items to train on, and a list of those held out.

    `task` is a Task, `initials` what each agent reads with. `train_dataset` and `eval_dataset` are rows in place of the
    task's own: a datasets.Dataset, or a list of dicts. There are no held-out items where the task has no eval_dataset,
    or --dataset too few rows. Raises UserError where items can't be had, or where there are fewer to train on than an
    update takes.
    """
    least = args.rollout_buffer_size // args.num_generations
    rows = (train_dataset, eval_dataset)
    if hasattr(task, "TeamEnv") and not hasattr(task.given, "train_dataset"):
        train_items, eval_items = envs.game_seeds(args, least, *rows)
    else:
        train_items, eval_items = find_items(task, args, least, *rows)
    train_items, eval_items = fit_prompts(task, initials, args, least, train_items, eval_items)
    return train_items, [*eval_items][: args.eval_size]


def find_items(task, args, least, train_dataset, eval_dataset):
    given, name = task.given, task.name
    if args.dataset and (train_dataset is not None or eval_dataset is not None):
        raise UserError(f"--dataset {args.dataset} and train_dataset= or eval_dataset= are both data; give one of them")
    if args.dataset and not hasattr(given, "named_dataset"):
        train_dataset, eval_dataset = split_rows(load_splits(args.dataset), args.eval_size, args.seed)
    parts = []
    for split, rows, size in (("train", train_dataset, args.train_size), ("eval", eval_dataset, args.eval_size)):
        source = f"--dataset {args.dataset}" if args.dataset else f"{split}_dataset="
        if rows is not None:
            items = use_rows(given, name, rows, size, source)
        else:
            items = make_items(given, name, args.dataset, split, size or MADE_ITEMS, args.seed)
            source = source if args.dataset else f"{split}_dataset of {name}"
        check_items(given, name, items, source)
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
        reason = "it has no rows" if isinstance(cause, StopIteration) else f"{type(cause).__name__}: {one_line(cause)}"
        raise UserError(f"--dataset {name} can't be loaded: {reason}") from error


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


def take(items, numbers):
    """The items of these numbers, of a datasets.Dataset or of any sequence."""
    if isinstance(items, datasets.Dataset):
        return items.select(numbers)
    return [items[k] for k in numbers]


# --- Long prompts -----------------------------------------------------------------------------------------------------


def fit_prompts(task, initials, args, least, train_items, eval_items):
    """The items without those of which an agent's first prompt is too long; with --long-prompts truncate, all items.

    Raises UserError where fewer than `least` are left to train on.
    """
    limits = [prompt_limit(initial, args) for initial in initials]
    if args.long_prompts == "truncate" and min(limits) == UNLIMITED:
        raise UserError("--long-prompts truncate takes --max-prompt-length: the model has room for any prompt")
    if args.long_prompts == "truncate":
        task.initials = [Reader(initial, limit) for initial, limit in zip(initials, limits)]
        return train_items, eval_items
    if not hasattr(task.given, "formatters"):
        return train_items, eval_items
    train_fits = find_fits(task, train_items, initials, limits)
    eval_fits = find_fits(task, eval_items, initials, limits)
    total = len(train_items) + len(eval_items)
    left_out = total - len(train_fits) - len(eval_fits)
    if left_out == 0:
        return train_items, eval_items
    most = " or ".join(map(str, sorted(set(limits))))
    what = f"{left_out} of {total} items are left out: a prompt has more than {most} tokens"
    if len(train_fits) < least:
        raise UserError(f"{what}; {len(train_fits)} are left to train on, and an update takes {least}")
    say(what)
    return take(train_items, train_fits), take(eval_items, eval_fits)


def prompt_limit(initial, args):
    """The most tokens of a prompt: by the room of the model, and --max-prompt-length."""
    return min(initial.longest_prompt, args.max_prompt_length or initial.longest_prompt)


class Reader:
    """What an agent reads with, and the most tokens of a prompt."""

    def __init__(self, initial, limit):
        self.tokenizer = initial.tokenizer
        self.config = initial.config
        self.prompt_limit = limit

    def encode(self, chat):
        return encode(chat, [], self)


def find_fits(task, items, initials, limits):
    """The numbers of the items of which no agent's first prompt is too long. Raises UserError."""
    fits = []
    for k, item in enumerate(items):
        try:
            lengths = [len(encode(task.formatters(item, i), [], initial)) for i, initial in enumerate(initials)]
        except TaskError as error:
            raise UserError(str(error)) from error  # there is no run yet
        if all(length <= limit for length, limit in zip(lengths, limits)):
            fits.append(k)
    return fits


# --- Batches ----------------------------------------------------------------------------------------------------------


class Batches:
    """The items of each update, each --num-generations times: passes over all items, each in a new random order.

    Items that do not fill a list at the end of a pass open the first one of the next.
    """

    def __init__(self, items, args):
        self.items = items
        self.num_items = len(items)
        self.num_generations = args.num_generations
        self.items_per_update = args.rollout_buffer_size // args.num_generations
        rng = random.Random(args.seed)
        self.order = []
        for _ in range(args.num_train_epochs):
            self.order += rng.sample(range(len(items)), len(items))
        self.num_updates = len(self.order) // self.items_per_update
        if args.max_episodes:
            self.num_updates = min(self.num_updates, math.ceil(args.max_episodes / args.rollout_buffer_size))

    def __len__(self):
        return self.num_updates

    def __getitem__(self, update):
        if not 0 <= update < self.num_updates:
            raise IndexError(update)
        start = update * self.items_per_update
        numbers = self.order[start : start + self.items_per_update]
        return [self.items[k] for k in numbers for _ in range(self.num_generations)]


def shuffled_batches(train_items, args):
    """The batches of a run, one for each update; it is said how many items of the last pass are left out."""
    batches = Batches(train_items, args)
    left_out = len(batches.order) - len(batches) * batches.items_per_update
    if 0 < left_out < batches.items_per_update:
        say(f"the last {left_out} items of the last epoch are left out: an update takes {batches.items_per_update}")
    return batches
