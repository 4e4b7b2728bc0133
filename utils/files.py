"""Files of a run: written whole, read as far as they are whole, and a folder that one run at a time may write."""

import contextlib
import csv
import fcntl
import json
import os
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError

from utils.cli import UserError, one_line
from utils.timers import at_rest


class WriteError(UserError):
    """The disk does not take what is written; what it had before is intact."""

    exit_code = 1


@contextlib.contextmanager
def writing(folder):
    """Within it timers rest, and a disk that does not take what is written becomes a WriteError of one line."""
    try:
        with at_rest():
            yield
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{folder} can't be written: {one_line(error)}") from error


@contextlib.contextmanager
def disk_errors():
    """Within it, what the tokenizers package raises where a disk takes nothing is an OSError, as of anybody else."""
    try:
        yield
    except Exception as error:
        if type(error) is Exception and "(os error " in str(error):
            raise OSError(str(error)) from error
        raise


def write_whole(path, text):
    """Write a file aside, then rename it: it is never half there."""
    aside = path.with_name(path.name + ".writing")
    with open(aside, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    sync(aside)
    os.replace(aside, path)


def sync(path):
    """Have a file or a folder on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def lock(folder):
    """Take a folder for this process, until the file returned is closed. Raises UserError where another has it."""
    file = open(folder / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if not isinstance(error, BlockingIOError):
            raise UserError(f"{folder} can't be locked: {error.strerror}; take another disk (--output-dir)") from error
        raise UserError(f"another run is under way in {folder}") from error
    return file


def in_columns(row, columns):
    """A row of metrics, {name: number or None}, as the cells of metrics.csv."""
    return ["" if row.get(key) is None else f"{row[key]:.9g}" for key in columns]


def read_rows(path, most=None):
    """The whole rows of a metrics.csv, or the first `most`: numbers by name, None where there is none.

    Raises ValueError.
    """
    lines = [line.decode() for line in whole_lines(path)[: None if most is None else most + 1]]
    try:
        columns, *rows = [*csv.reader(lines)] or [[]]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    return [{key: float(x) if x else None for key, x in zip(columns, row, strict=True)} for row in rows]


def json_line(value):
    """A value as a line of JSON: other keys than it has, and objects, are text, and half characters are escaped."""
    text = json.dumps(with_json_keys(value), ensure_ascii=False, default=str)
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text) + "\n"


def with_json_keys(value):
    if isinstance(value, dict):
        keys = [key if isinstance(key, str | int | float | None) else str(key) for key in value]
        return {key: with_json_keys(own) for key, own in zip(keys, value.values())}
    if isinstance(value, list | tuple):
        return [with_json_keys(own) for own in value]
    return value


def whole_lines(path):
    """The lines of a file, bytes, if there is one, but for a last one that was cut off. Raises UserError.

    They are not decoded here: where power was lost, those behind the last checkpoint may hold any bytes.
    """
    check_inside(path)
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def check_inside(path):
    """Raise UserError for a link that leads out of its folder: what a stranger's folder shows is to be its own."""
    if os.path.islink(path) and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent)):
        raise UserError(f"{path} is a link that leads out of its folder")


def read_json(path):
    """The object in a JSON file. Raises UserError."""
    check_inside(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read as JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is to hold a JSON object, and holds {one_line(content, 80)}")
    return content


def put(aside, final):
    """Give a folder the name `final`, in the place of an older folder, if there is one, which is removed after it."""
    gone = move_aside(final)
    os.replace(aside, final)
    with contextlib.suppress(OSError):
        erase(gone)


def remove(path):
    """Remove a folder, if it is there: first its name, so that no half of it is ever seen."""
    gone = move_aside(path)
    with contextlib.suppress(OSError):
        erase(gone)


def move_aside(path):
    """Give a folder, if it is there, a name under which it is removed, and return that."""
    gone = path.with_name(path.name + ".removing")
    erase(gone)
    if os.path.lexists(path):
        os.replace(path, gone)
    return gone


def erase(path):
    """Remove a file, a folder or a link, not what it leads to, if it is there."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


STATE = "state.json"  # of a checkpoint


def checkpoints(folder):
    """The folders of checkpoints, oldest first, whole or not."""
    paths = [path for path in folder.glob("update_*") if re.fullmatch(r"update_\d{6,}", path.name) and path.is_dir()]
    return sorted(paths, key=order)


def order(path):
    """What checkpoints are sorted by: their updates, of which there may be more than the six digits hold."""
    return len(path.name), path.name


def can_go_on(folder):
    """Whether a run's folder has what --resume goes on with, or keeps; else nothing is lost by beginning anew."""
    has_learned = len(whole_lines(folder / "metrics.csv")[1:]) > 1
    return bool(has_learned or checkpoints(folder / "checkpoints") or [*folder.glob("agent_[0-9]*")])
