"""The items of a run: a task's own, those of --dataset, or rows from Python; without too long prompts; in batches."""

import contextlib
import csv
import glob
import json
import math
import os
import random
import re
from pathlib import Path

import datasets
import fsspec
import numpy
import pandas
from datasets.fingerprint import Hasher
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.text.text import Text
from tqdm import tqdm

from utils import envs
from utils.cli import TaskError, UserError, describe, one_line
from utils.distributed import is_main, say
from utils.models.policy import UNLIMITED
from utils.models.transcripts import encode
from utils.tasks.calls import is_unordered
from utils.tasks.questions import as_prompt

MADE_ITEMS = 1536  # items to train on where a task makes them
FORMATS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv", ".txt": "text"}
FORMATS |= {".parquet": "parquet", ".arrow": "arrow"}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")  # what may stand after these
FROM_PYTHON = " on rows given from Python"
OF_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0", "No columns to parse")  # what datasets says
SPACE = re.compile(r"\s*")
GUESSED = ("timestamp", "date", "time", "duration", "float")  # types that JSON's reader makes of other values


def load_items(task, initials, args, train_dataset=None, eval_dataset=None):
    """The items to train on, and a list of those held out.

    `task` is a Task, `initials` what each agent reads with. `train_dataset` and `eval_dataset` are rows in place of the
    task's own: a datasets.Dataset, or a list of dicts. There are no held-out items where the task has no eval_dataset,
    or --dataset too few rows. Raises UserError where items can't be had, or where there are fewer to train on than an
    update takes.
    """
    if not (train_dataset is None and eval_dataset is None):
        task.name += FROM_PYTHON  # config.json says it
    least = args.rollout_buffer_size // args.num_generations
    rows = (train_dataset, eval_dataset)
    initials = initials * (args.num_agents // len(initials))  # --self-play: one reads in all seats
    is_task = args.task or not envs.is_game(task.given)
    has_rows = hasattr(task.given, "train_dataset") or is_task and (args.dataset or train_dataset is not None)
    if hasattr(task, "TeamEnv") and not has_rows:
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
            items = take(items, range(size)) if size and len(items) > size else items
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
        if is_unordered(items):
            raise TypeError(f"it returned a {type(items).__name__}, and is to return a list or a datasets.Dataset")
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
    reads = {*columns} if hasattr(task, "item_of") else {*columns, *(getattr(task, "item_columns", ()) or ["prompt"])}
    rows = check_prompts(rows, reads & set(there), source)
    if not hasattr(task, "item_of"):
        return rows
    items = []
    for row in rows:
        try:
            items.append(task.item_of(row))
        except Exception as error:
            refused = f"{source} has a row that {name} can't use, {one_line(row, 80)}"
            raise UserError(f"{refused}: {describe(error)}") from error
    return items


def check_prompts(rows, columns, source):
    """The rows, with prompts that are chats as such. Raises UserError for a null in one of the columns."""
    for column in sorted(columns):
        values = rows[column] if isinstance(rows, datasets.Dataset) else [row[column] for row in rows]
        for k, value in enumerate(values):
            if value is None or isinstance(value, float) and math.isnan(value):  # as pandas has it
                raise UserError(f"{source} has a row without {column}, which is null there: {one_line(rows[k], 80)}")
    if rows and "prompt" in rows[0] and not all(isinstance(row.get("prompt"), str) for row in rows):
        return [row | {"prompt": as_prompt(row["prompt"])} if "prompt" in row else row for row in rows]
    return rows


def check_items(task, name, items, source):
    """Raise UserError for an item without what the task's reward_fn or conversation_template reads."""
    columns = getattr(task, "item_columns", ())
    for item in items if columns else ():
        for column in columns:
            if not isinstance(item, dict) or item.get(column) is None:
                raise UserError(f"{source} has a row without {column}, which {name} reads: {one_line(item, 80)}")


# --- Files and the hub ------------------------------------------------------------------------------------------------


def load_splits(name):
    """The splits of a hub dataset, a folder or a file: rows by the split's name. Raises UserError."""
    file_format = format_of(name)
    if file_format and not os.path.isfile(name):  # False too for what may not be read, or can be no name
        raise UserError(f"--dataset takes a hub dataset's name, a folder or a file, and there is no file {name}")
    folder = name if os.path.exists(name) or ":" not in name else name.rpartition(":")[0]
    if (folder[:1] in (".", "~", "/") or folder.endswith("/")) and not os.path.exists(folder):
        raise UserError(f"--dataset takes a hub dataset's name, a folder or a file, and there is no folder {folder}")
    if os.path.isfile(name) and not file_format:
        raise UserError(f"--dataset takes a file of the formats {' '.join(FORMATS)}, got {name}")
    place, colon, configuration = name.rpartition(":")
    try:
        with quiet():
            if file_format:
                options = {"sep": "\t"} if file_format == "tsv" else {}
                path = glob.escape(os.path.abspath(name))  # else [1] in it would be a pattern
                return read_splits("csv" if options else file_format, data_files=path, **options)
            if os.path.isfile(os.path.join(name, "state.json")):
                return {"train": datasets.load_from_disk(name)}
            if colon and not os.path.exists(name):
                return read_splits(place, configuration)
            return read_splits(str(Path(name).resolve()) if os.path.exists(name) else name)
    except Exception as error:
        cause = error.__cause__ or error  # where a row can't be read, the error itself does not say why
        is_empty = isinstance(cause, StopIteration) or any(text in str(cause) for text in OF_NO_ROWS)
        reason = "it has no rows" if is_empty else f"{type(cause).__name__}: {one_line(cause)}"
        if "Config name is missing" in str(cause):
            reason += f"; name one of them, --dataset {name}:CONFIG"
        raise UserError(f"--dataset {name} can't be loaded: {reason}") from error


@contextlib.contextmanager
def quiet():
    """Within it, datasets does not say itself what can't be read: the error does."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


def format_of(name):
    """The format of a file of that name, None: it is of no file."""
    path = Path(name)
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return FORMATS.get(path.suffix.lower())


def read_splits(*place, **options):
    """What datasets.load_dataset returns, but for columns of CSV and JSON files, whose values are as the file has them.

    All columns of CSV files are text. Of JSON no text is read as a date, and no whole number as a float. A line of a
    .txt file, but an empty one, is a prompt.
    """
    folder = os.path.abspath(place[0])
    is_folder = "data_files" not in options and os.path.isdir(folder)
    if is_folder and glob.escape(folder) != folder:
        raise ValueError("datasets takes *, ? and [ in a folder's path for a pattern, and would read another one")
    builder = datasets.load_dataset_builder(*place, **options)
    files = builder.config.data_files
    if is_folder:
        # else it does not see that files which README.md names have changed; `files` has their times
        options["cache_dir"] = os.path.join(datasets.config.HF_DATASETS_CACHE, Hasher.hash(files))
    if isinstance(builder, Csv) and builder.config.features is None:
        check_lengths([path for paths in files.values() for path in paths], builder.config.sep)
        first = next(iter(files.values()))[0]
        head = pandas.read_csv(first, nrows=1, sep=builder.config.sep)
        if len(head) and not isinstance(head.index, pandas.RangeIndex):  # taken for an index
            raise ValueError("its rows have more fields than its header")
        columns = builder.config.names or head.columns
        text = datasets.Features({column: datasets.Value("string") for column in columns})
        options |= {"features": text, "na_filter": False}
    if isinstance(builder, Json):
        check_utf8([path for paths in files.values() for path in paths])
    splits = datasets.load_dataset(*place, **options)
    is_flat = isinstance(builder, Json) and builder.config.field is None
    if is_flat and any(is_guessed(rows.features) for rows in splits.values()):
        return {split: read_json_rows(paths) for split, paths in files.items()}
    if isinstance(builder, Text):
        lines = {split: [line for line in rows["text"] if line.strip()] for split, rows in splits.items()}
        return {split: [{"text": line, "prompt": line} for line in own] for split, own in lines.items()}
    return splits


def check_lengths(paths, separator):
    """Raise ValueError for a row of CSV files here that has fewer fields than the first: it would be filled up."""
    csv.field_size_limit(2**31 - 1)
    for path in filter(os.path.isfile, paths):
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer", newline="") as file:
            rows = csv.reader(file, delimiter=separator)
            width = len(next(rows, []))
            for row in rows:
                if len(row) < width and any(map(str.strip, row)):
                    raise ValueError(f"line {rows.line_num} has {len(row)} of {width} fields")


def check_utf8(paths):
    """Raise ValueError for a line of JSON files here that is not UTF-8: datasets finds it when it is read."""
    for path in filter(os.path.isfile, paths):
        with fsspec.open(path, "rb", compression="infer") as file:
            for k, line in enumerate(file, 1):
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(f"line {k} is not UTF-8: {error.reason}") from None


def is_guessed(feature):
    """Whether a type, or one within it, is one that JSON's reader makes of text, or of whole numbers."""
    if isinstance(feature, datasets.Value):
        return feature.dtype.startswith(GUESSED)
    if isinstance(feature, dict):
        return any(map(is_guessed, feature.values()))
    return hasattr(feature, "feature") and is_guessed(feature.feature)


def read_json_rows(paths):
    """The objects in JSON files, in lists or one after the other; what an object lacks is None. Raises ValueError."""
    rows = []
    decoder = json.JSONDecoder()
    for path in paths:
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
            text = file.read()
        end = SPACE.match(text).end()
        while end < len(text):
            value, end = decoder.raw_decode(text, end)
            rows += value if isinstance(value, list) else [value]
            end = SPACE.match(text, end).end()
    columns = dict.fromkeys(column for row in rows for column in row)
    return [dict.fromkeys(columns) | row for row in rows]


def split_rows(splits, eval_size, seed):
    """Rows to train on and held-out rows, shuffled; of an only split the last are held out, at most a fifth."""
    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    rows = shuffled(train, seed)
    for name in ("test", "validation", "val"):
        if name in splits and splits[name] is not train:
            return rows, shuffled(splits[name], seed)
    end = len(rows) - min(eval_size, len(rows) // 5)
    held_out = take(rows, [*range(end, len(rows))])  # of no row too
    return take(rows, range(end)), shuffled(held_out, seed)


def shuffled(rows, seed):
    """The rows in the order that datasets.Dataset.shuffle gives them."""
    return take(rows, numpy.random.default_rng(seed).permutation(len(rows)))


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
    if not hasattr(task.given, "formatters") and (args.max_prompt_length or args.long_prompts == "truncate"):
        flag = "--max-prompt-length" if args.max_prompt_length else "--long-prompts truncate"
        raise UserError(f"{flag} has no effect in a game, or an environment")
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
    say_what_is_raw(task, train_items, initials)
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


def say_what_is_raw(task, items, initials):
    """Say where first prompts are texts, which a chat template does not go around."""
    for i, initial in enumerate(initials):
        if initial.tokenizer.chat_template and len(items) and isinstance(task.formatters(items[0], i), str):
            chat = '[{"role": "user", "content": "..."}]'
            return say(f"prompts that are texts are read without the model's chat template; with it they are {chat}")


def find_fits(task, items, initials, limits):
    """The numbers of the items of which no agent's first prompt is too long. Raises UserError."""
    fits = []
    bar = tqdm(items, "reading prompts", delay=10, leave=False, disable=not is_main())
    for k, item in enumerate(bar):
        try:
            lengths = [len(encode(task.formatters(item, i), [], initial)) for i, initial in enumerate(initials)]
        except TaskError as error:
            raise UserError(str(error)) from error  # there is no run yet
        if all(length <= limit for length, limit in zip(lengths, limits)):
            fits.append(k)
    return fits


# --- Batches ----------------------------------------------------------------------------------------------------------


class Batches:
    """The items of each update: passes over all items, each in a new random order.

    Items that do not fill a list at the end of a pass open the first one of the next.
    """

    def __init__(self, items, args):
        self.items = items
        self.num_items = len(items)
        self.items_per_update = args.rollout_buffer_size // args.num_generations
        self.rng = random.Random(args.seed)
        self.order = []  # so far: passes are drawn when they are needed, for there may be more than anybody waits for
        self.num_in_all = args.num_train_epochs * len(items)
        self.most_updates = math.ceil(args.max_episodes / args.rollout_buffer_size) if args.max_episodes else math.inf
        self.begin_at(0)

    def begin_at(self, update):
        """Let the first items be those of this update, as in a fork that takes other data."""
        self.first = update
        self.num_updates = min(update + self.num_in_all // self.items_per_update, self.most_updates)

    def __len__(self):
        return self.num_updates

    def __getitem__(self, update):
        if not self.first <= update < self.num_updates:
            raise IndexError(update)
        start = (update - self.first) * self.items_per_update
        while len(self.order) < start + self.items_per_update:
            self.order += self.rng.sample(range(self.num_items), self.num_items)
        return [self.items[k] for k in self.order[start : start + self.items_per_update]]


def shuffled_batches(train_items, args):
    """The batches of a run, one for each update; it is said how many items of the last pass are left out."""
    batches = Batches(train_items, args)
    left_out = batches.num_in_all - len(batches) * batches.items_per_update
    if 0 < left_out < batches.items_per_update:
        say(f"the last {left_out} items of the last epoch are left out: an update takes {batches.items_per_update}")
    return batches
