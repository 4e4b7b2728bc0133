"""A run's folder, which may be a stranger's, as it is read to be shown: checked, and no link is followed out of it."""

import os
from pathlib import Path

from utils.cli import UserError, one_line
from utils.files import check_inside, read_json, read_rows

LARGEST = 1e30  # number, as of flags


def read_config(run):
    """config.json: `args`, flags by name, `command`, a list of texts, and what else it says. Raises UserError."""
    path = Path(run) / "config.json"
    if not os.path.isfile(path):  # False too for what can be no name
        problem = "it has no config.json" if os.path.isdir(run) else "there is no such folder"
        raise UserError(f"a run's folder is needed, and {one_line(run, 80) or 'none'} is none: {problem}")
    config = read_json(path)
    args, command = config.get("args"), config.get("command")
    if not isinstance(args, dict) or not isinstance(command, list) or not command:
        raise UserError(f"{path} is not of these scripts")
    texts = [*command, *(args[name] for name in ("task", "env", "dataset") if args.get(name) is not None)]
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise UserError(f"{path} has a name that is no text")
    for name, number in (("seed", args.get("seed")), ("num_updates", config.get("num_updates", 0))):
        if type(number) is not int or not 0 <= number < 2**63:
            raise UserError(f"{path}: {name} takes a whole number from 0, got {one_line(number, 80)}")
    return config


def read_metrics(run, name="metrics.csv"):
    """The rows of a run's metrics: numbers, NaN too, by name, None where there is none. Raises UserError."""
    path = Path(run) / name
    try:
        rows = read_rows(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {one_line(error)}") from error
    for k, row in enumerate(rows, 1):
        for column, value in row.items():
            if value is not None and abs(value) > LARGEST:
                takes = f"{one_line(column, 80)} takes a number up to {LARGEST:g}"
                raise UserError(f"{path}: {takes}, got {value} in row {k}")
    return rows


def read_curves(run):
    """The bytes of a run's curves.png; None: it has none. Raises UserError for what is no picture."""
    path = Path(run) / "curves.png"
    if not os.path.isfile(path):
        return None
    check_inside(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        raise UserError(f"{path} is no PNG file")
    return content
