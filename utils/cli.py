"""The command line: flags from a dataclass, grouped in --help; those of a run that is resumed; errors of one line."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import sys
from pathlib import Path

import tyro


class UserError(Exception):
    """Something that the user can mend; its text is one line that says what and how."""

    exit_code = 2


class TaskError(UserError):
    """A task's own code failed while the run was under way."""

    exit_code = 1


class Stopped(UserError):
    """The user, or the machine, stopped the run, and its state is saved."""

    def __init__(self, message, signal):
        super().__init__(message)
        self.exit_code = 128 + signal


def one_line(text, most=200):
    """A text of any shape as one line of at most so many characters."""
    text = " ".join(str(text).split())
    return text if len(text) <= most else text[: most - 1] + "…"


def title(group):
    return group.__name__.removesuffix("Args").lower()


def parse(Args, argv=None, description=None, script=None):
    """Args from the command line. Each dataclass that Args inherits from is a group of --help under its docstring.

    With --resume, flags that are not given are those of the run.
    """
    args = parse_flags(Args, argv, description, {})
    if getattr(args, "resume", None):
        folder = find_run(args.resume, script)
        args = parse_flags(Args, argv, description, flags_of(folder, Args))
        args.resume = str(folder)
    return args


def parse_flags(Args, argv, description, defaults):
    groups = [base for base in Args.__mro__ if dataclasses.is_dataclass(base) and base is not Args]
    fields = []
    for group in groups:
        own = {field.name: defaults[field.name] for field in dataclasses.fields(group) if field.name in defaults}
        whole = dataclasses.field(default_factory=functools.partial(group, **own))
        fields.append((title(group), tyro.conf.OmitArgPrefixes[group], whole))
    nested = dataclasses.make_dataclass("Args", fields)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = tyro.cli(nested, args=argv, description=description)
    except SystemExit as stop:
        if stop.code:  # tyro's boxed message, down to its first rule, as one line
            message = re.split(r"─{8,}", re.sub(r"[╭╰][^\n]*[╮╯]|│", "", said.getvalue()))[0]
            raise UserError(one_line(message)) from None
        raise
    return Args(**{k: v for group in groups for k, v in vars(getattr(parsed, title(group))).items()})


def find_run(resume, script):
    """The folder that --resume names, or the newest of that script under runs/. Raises UserError."""
    if resume == "latest":
        runs = [path.parent for path in Path("runs").glob(f"{script}__*/config.json")]
        if not runs:
            raise UserError(f"--resume latest: there is no run of {script}.py under runs/")
        return max(runs, key=lambda run: max(path.stat().st_mtime for path in (run, *run.glob("*.*"))))
    if not os.path.isfile(Path(resume) / "config.json"):  # False too for what can be no name
        raise UserError(f"--resume takes a run's folder, or latest, and {resume} has no config.json")
    return Path(resume)


def flags_of(folder, Args):
    """The flags of an earlier run of the same script, by name. Raises UserError where they are not to be had."""
    path = Path(folder) / "config.json"
    try:
        flags = json.loads(path.read_text(encoding="utf-8"))["args"]
        names, known = set(flags), {field.name for field in dataclasses.fields(Args)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--resume: {path} can't be read: {type(error).__name__}: {one_line(error)}") from error
    if names != known:
        raise UserError(f"--resume: {folder} is a run of another script or version: {', '.join(sorted(names ^ known))}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}


# Flags that may change when a run is resumed: how it is kept, watched and computed, not what it learns.
FREE = "resume output_dir overwrite save_interval keep_checkpoints reward_timeout micro_batch_size_per_gpu "
FREE += "gradient_checkpointing track wandb_project_name wandb_entity wandb_run_name wandb_tags"


def resumed_folder(args, script):
    """The folder that --resume names. Raises UserError, with all of them, where flags differ from that run's."""
    folder, differing = find_run(args.resume, script), []
    for name, there in flags_of(folder, type(args)).items():
        here = getattr(args, name)
        longer = name == "num_train_epochs" and here > there
        found = name == "max_model_len" and here is None  # what the model takes
        if here != there and name not in FREE.split() and not longer and not found:
            differing.append(f"--{name.replace('_', '-')} {there} there, {here} here")
    if differing:
        raise UserError(f"--resume {folder} goes on with that run's flags, and these differ: {'; '.join(differing)}")
    return folder


def command_line(main, Args, description):
    """Run main(Args) as a command; an error that the user can mend is one line on standard error, no traceback."""
    script = Path(sys.argv[0]).name.replace("__main__.py", Path(sys.argv[0]).parent.name)
    try:
        main(parse(Args, description=description, script=Path(script).stem))
    except Stopped as stop:
        print(f"{script}: {one_line(stop, 1000)}", file=sys.stderr)
        sys.exit(stop.exit_code)
    except UserError as error:
        print(f"{script}: error: {one_line(error, 1000)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(f"{script}: stopped by the keyboard", file=sys.stderr)
        sys.exit(130)
