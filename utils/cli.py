"""The command line: flags from a dataclass, grouped in --help; those of a run that is resumed; errors of one line."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import sys
import sysconfig
import traceback
import unicodedata
from pathlib import Path
from typing import Annotated

import pydantic
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


def printable(text):
    """A text with U+FFFD for what steers a terminal, and for what no file takes."""
    bad = {c for c in text if unicodedata.category(c) in ("Cc", "Cs")} - {"\n", "\t"}
    return "".join("\N{REPLACEMENT CHARACTER}" if c in bad else c for c in text)


def one_line(text, most=200):
    """A text of any shape as one line of at most so many characters, that may be printed."""
    text = printable(" ".join(str(text).split()))
    return text if len(text) <= most else text[: most - 1] + "…"


LIBRARIES = [str(Path(__file__).resolve().parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))]
FOREIGN = ("<", *(f"{folder}{os.sep}" for folder in LIBRARIES))  # how the names of files that are not a user's begin


def describe(error, most=200):
    """An error as one line: its type, its text, and the place in the user's own code where it arose, if it did."""
    text = f"{type(error).__name__}: {one_line(error, most)}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(FOREIGN):
            return f"{text} ({Path(frame.filename).name}:{frame.lineno})"
    return text


# --- Flags ------------------------------------------------------------------------------------------------------------


def flags(cls):
    """Make a class a pydantic dataclass of flags: a value that its annotation does not take is a UserError of one line.

    This holds for arguments from Python too, where an int may stand for a float, and a list, or one string, for a
    tuple. Numbers are those that float32 and int32 can hold: floats are finite, 0 or of a size from 1e-30 to 1e30.
    """
    config = pydantic.ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
    cls = pydantic.dataclasses.dataclass(config=config)(cls)
    check = cls.__init__

    @functools.wraps(check)
    def __init__(self, *values, **named):
        for field in dataclasses.fields(cls):
            value = named.get(field.name)
            if isinstance(value, list):
                named[field.name] = tuple(value)
            elif isinstance(value, str) and isinstance(field.default, tuple):
                named[field.name] = (value,)
        try:
            check(self, *values, **named)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise UserError(refusal(first["loc"][0], first["msg"], first["input"])) from None
        check_sizes(self)

    cls.__init__ = __init__
    return cls


def check_sizes(args):
    """Raise UserError for a number that int32 or float32 can't hold."""
    for name, value in vars(args).items():
        if isinstance(value, int) and abs(value) >= 2**31:
            raise UserError(refusal(name, "Input should be at most 2147483647", value))
        if isinstance(value, float) and value != 0 and not 1e-30 <= abs(value) <= 1e30:
            raise UserError(refusal(name, "Input should be 0 or of a size from 1e-30 to 1e30", value))


def refusal(name, takes, value):
    return f"{flag_name(name)}: {takes}, got {one_line(value, 80)}"


def flag_name(name):
    """A field's name as it stands on the command line."""
    return "--" + str(name).replace("_", "-")


def read_settings(pairs):
    """KEY=VALUE strings as a dict; a value is read as JSON, and where it is none, as text."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ValueError(f"it takes KEY=VALUE, got {pair}")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def write_settings(settings):
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


Settings = Annotated[  # of a library: a dict of JSON values, KEY=VALUE ... on the command line
    dict[str, pydantic.JsonValue],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[KEY=VALUE ...]",
        instance_from_str=read_settings,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=write_settings,
    ),
]


def needs(*others, default=None):
    """The default of a flag that has no effect without others, which are named; `dict` is an empty one."""
    return void_flag(default, [(other, False) for other in others])


def not_with(*others, default=None):
    """The default of a flag that has no effect beside others, which are named."""
    return void_flag(default, [(other, True) for other in others])


def void_flag(default, conditions):
    value = {"default_factory": dict} if default is dict else {"default": default}
    return dataclasses.field(**value, metadata={"void": conditions})


def check_needs(args, more=None):
    """Raise UserError for a flag that has no effect, by its default from `needs` or `not_with`, or {name: other}.

    A flag counts where it is not its default; the other is off where it is None, False, 0 or empty.
    """
    default = type(args)()
    for field in dataclasses.fields(args):
        if getattr(args, field.name) != getattr(default, field.name):
            conditions = list(field.metadata.get("void", ()))
            if more and field.name in more:
                conditions.append((more[field.name], False))
            for other, void in conditions:
                if bool(getattr(args, other)) == void:
                    beside = "with" if void else "without"
                    raise UserError(f"{flag_name(field.name)} has no effect {beside} {flag_name(other)}")


OF_START = {"pause_at": None, "overwrite": False}  # flags that hold for one start of a run, and not for the next
OF_FOLDER = {"output_dir": None, "overwrite": False, "resume": None, "wandb_run_name": None}  # that a fork begins anew


# --- The command line -------------------------------------------------------------------------------------------------


def parse(Args, argv=None, description=None, script=None):
    """Args from the command line. Each dataclass that Args inherits from is a group of --help under its docstring.

    With --resume or --fork, flags that are not given are those of the run. Raises UserError.
    """
    args = parse_flags(Args, argv, description, {})
    if getattr(args, "resume", None):
        folder = find_run(args.resume, script)
        args = parse_flags(Args, argv, description, flags_of(folder, Args) | OF_START)
        args.resume = str(folder)
    elif getattr(args, "fork", None):
        folder = find_run(run_of(args.fork), script, "--fork")
        args = parse_flags(Args, argv, description, flags_of(folder, Args, "--fork") | OF_FOLDER | OF_START)
        if args.fork == "latest":
            args.fork = str(folder)
    return args


def parse_flags(Args, argv, description, defaults):
    """Args from the command line; `defaults` are {name: value} in place of those of the class."""
    groups = [base for base in Args.__mro__ if dataclasses.is_dataclass(base) and base is not Args]
    fields = []
    for group in groups:
        names = {field.name for field in dataclasses.fields(group)}
        own_defaults = {name: value for name, value in defaults.items() if name in names}
        factory = functools.partial(group, **own_defaults)
        fields.append((title(group), tyro.conf.OmitArgPrefixes[group], dataclasses.field(default_factory=factory)))
    nested = dataclasses.make_dataclass("Args", fields)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed = tyro.cli(nested, args=argv, description=description)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        text = re.sub(r"[╭╰][^\n]*[╮╯]|│", "", errors.getvalue())  # without the box that tyro draws
        message, *more = re.split(r"─{8,}", text)  # its parts, between rules
        # without what follows a flag's name, or what was given
        message = re.sub(r"(options: .*?--[^,]*|instantiated from \[.*?\]).*", r"\1", one_line(message))
        similar = re.search(r"Perhaps you meant:\s*(--[\w-]+)", " ".join(more))
        raise UserError(message + (f"; did you mean {similar[1]}?" if similar else "")) from None
    values = {}
    for group in groups:
        values |= vars(getattr(parsed, title(group)))
    return Args(**values)


def title(group):
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", group.__name__.removesuffix("Args")).lower()


def run_of(fork):
    """The run that --fork names, itself or by RUN/checkpoints/update_<n>."""
    path = Path(fork)
    return str(path.parent.parent) if path.parent.name == "checkpoints" else fork


def find_run(name, script, flag="--resume"):
    """The folder that a flag names, or the newest of that script under runs/ (latest). Raises UserError."""
    if name == "latest":
        runs = [path.parent for path in Path("runs").glob(f"{script}__*/config.json")]
        if not runs:
            raise UserError(f"{flag} latest: there is no run of {script}.py under runs/")
        return max(runs, key=lambda run: max(path.stat().st_mtime for path in (run, *run.glob("*.*"))))
    if not os.path.isfile(Path(name) / "config.json"):  # False too for what can be no name
        raise UserError(f"{flag} takes a run's folder, or latest, and {name} has no config.json")
    return Path(name)


def flags_of(folder, Args, what="--resume"):
    """The flags of an earlier run of the same script, by name, for what wants them. Raises UserError."""
    path = Path(folder) / "config.json"
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))["args"]
        there = set(earlier)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{what}: {path} can't be read: {type(error).__name__}: {one_line(error)}") from error
    here = {field.name for field in dataclasses.fields(Args)}
    if there != here:
        raise UserError(f"{what}: {folder} is a run of another script or version: {', '.join(sorted(there ^ here))}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in earlier.items()}


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
