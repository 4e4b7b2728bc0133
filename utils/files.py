"""Files of a run: written whole, read as far as they are whole, and a folder that one run at a time may write."""

import contextlib
import csv
import fcntl
import json
import os
import shutil

from safetensors import SafetensorError

from utils.cli import UserError, one_line


class WriteError(UserError):
    """The disk does not take what is written; what it had before is intact."""

    exit_code = 1


@contextlib.contextmanager
def writing(folder):
    """Within it, a disk that does not take what is written becomes a WriteError of one line."""
    try:
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
        raise UserError(f"another run is under way in {folder}") from error
    return file


def in_columns(row, columns):
    """A row of metrics, {name: number or None}, as the cells of metrics.csv."""
    return ["" if row.get(key) is None else f"{row[key]:.9g}" for key in columns]


def read_rows(path):
    """The whole rows of a metrics.csv: numbers by name, None where there is none."""
    columns, *rows = [*csv.reader(whole_lines(path))] or [[]]
    return [{key: float(x) if x else None for key, x in zip(columns, row, strict=True)} for row in rows]


def read_lines(path):
    """The whole lines of a file, each a JSON value."""
    return [json.loads(line) for line in whole_lines(path)]


def whole_lines(path):
    """The lines of a file, if there is one, but for a last one that was cut off."""
    return [line.decode() for line in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []


def read_json(path):
    """The object in a JSON file. Raises UserError."""
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
    shutil.rmtree(gone, ignore_errors=True)


def remove(path):
    """Remove a folder, if it is there: first its name, so that no half of it is ever seen."""
    shutil.rmtree(move_aside(path), ignore_errors=True)


def move_aside(path):
    """Give a folder, if it is there, a name under which it is removed, and return that."""
    gone = path.with_name(path.name + ".removing")
    shutil.rmtree(gone, ignore_errors=True)
    if path.exists():
        os.replace(path, gone)
    return gone


STATE = "state.json"  # of a checkpoint


def checkpoints(folder):
    """The folders of checkpoints, oldest first, whole or not."""
    return sorted(path for path in folder.glob("update_*") if path.is_dir() and path.suffix == "")
