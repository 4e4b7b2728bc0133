"""The command line: flags from a dataclass, grouped in --help; those of a run that is resumed; errors of one line."""

import ast
import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import json
import keyword
import math
import os
import re
import sys
import sysconfig
import textwrap
import tokenize
import traceback
import typing
import unicodedata
from enum import Enum
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


class SharedError(TaskError):
    """What ends the run in all of its processes at the same place."""


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

Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]
PositiveOrInf = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=True)]

# Names that other libraries have for our flags, taken on the command line and from Python
ALIASES = {
    "model_name": "model",
    "max_steps": "max_episodes",
    "per_device_train_batch_size": "micro_batch_size",
    "micro_batch_size_per_gpu": "micro_batch_size",
    "batch_size": "mini_batch_size",
    "train_batch_size": "mini_batch_size",
    "ppo_epochs": "update_epochs",
    "ac_epochs": "update_epochs",
    "magrpo_epochs": "update_epochs",
    "vf_coef": "value_loss_coef",
    "ent_coef": "entropy_coef",
    "adv_whitening": "advantage_normalization",
    "lr_actor": "actor_learning_rate",
    "agent_learning_rate": "actor_learning_rate",
    "lr_critic": "critic_learning_rate",
    "max_output_tokens": "max_new_tokens",
    "max_turns": "num_turns",
    "evaluation_interval": "eval_interval",
    "eval_loop": "eval_size",
    "discount": "gamma",
    "beta": "kl_loss_coef",
}


def aliases_of(Args):
    """Of the aliases, {alias: flag}, those of flags that a class has."""
    names = {field.name for field in dataclasses.fields(Args)}
    return {alias: name for alias, name in ALIASES.items() if name in names and alias not in names}


def flags(cls):
    """Make a class a pydantic dataclass of flags: a value that its annotation does not take is a UserError of one line.

    This holds for arguments from Python too, where an int may stand for a float, and a list, or one string, for a
    tuple. Numbers are those that float32 and int32 can hold: floats are finite (but for PositiveOrInf), 0 or of a size
    from 1e-30 to 1e30.
    """
    for name, annotation in inspect.get_annotations(cls, eval_str=True).items():
        kinds = [typing.get_origin(each) or each for each in (annotation, *typing.get_args(annotation))]
        if any(isinstance(kind, type) and issubclass(kind, list | set | Path | Enum) for kind in kinds):
            takes = "a number, a str, a Literal, or a tuple[...] of these, which config.json can keep"
            raise TypeError(f"the flag {name} is to be {takes}; it is {annotation}")
    config = pydantic.ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
    cls = pydantic.dataclasses.dataclass(config=config)(cls)
    check = cls.__init__
    aliases = aliases_of(cls)

    @functools.wraps(check)
    def __init__(self, *values, **named):
        for alias in named.keys() & aliases.keys():
            if aliases[alias] in named:
                raise UserError(given_twice(alias, aliases[alias]))
            named[aliases[alias]] = named.pop(alias)
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
        check_texts(self)

    cls.__init__ = __init__
    return cls


def given_twice(name, other):
    return f"{flag_name(name)} and {flag_name(other)} are one flag: give one of them"


def check_sizes(args):
    """Raise UserError for a number that int32 or float32 can't hold."""
    for name, value in vars(args).items():
        if isinstance(value, int) and abs(value) >= 2**31:
            raise UserError(refusal(name, "Input should be at most 2147483647", value))
        if isinstance(value, float) and value not in (0, math.inf) and not 1e-30 <= abs(value) <= 1e30:
            raise UserError(refusal(name, "Input should be 0 or of a size from 1e-30 to 1e30", value))


def check_texts(args):
    """Raise UserError for a text that can be no file's name: with half a character (as bytes give), or a null one.

    And for none at all, as of a variable of the shell that is not set, but where that is the default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, value in vars(args).items():
        for text in value if isinstance(value, tuple) else [value]:
            if text == "" and defaults.get(name) != "":
                raise UserError(f"{flag_name(name)}: Input should be a text that is not empty")
            if isinstance(text, str):
                if "\0" in text or text != text.encode(errors="replace").decode():
                    raise UserError(refusal(name, "Input should be a text that files can be named by", ascii(text)))


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
    """The default of a flag that has no effect beside others, which are named: flag, flag=value, or several by &."""
    return void_flag(default, [(other, True) for other in others])


def void_flag(default, conditions):
    value = {"default_factory": dict} if default is dict else {"default": default}
    return dataclasses.field(**value, metadata={"void": conditions})


def check_needs(args):
    """Raise UserError for a flag that has no effect, by its default from `needs` or `not_with`.

    A flag counts where it is not its default; the other is off where it is None, False, 0 or empty.
    """
    default = type(args)()
    for field in dataclasses.fields(args):
        if getattr(args, field.name) != getattr(default, field.name):
            for condition, void in field.metadata.get("void", ()):
                others = [other.partition("=") for other in condition.split("&")]
                if void == all(is_on(args, other, value) for other, _, value in others):
                    beside = "with" if void else "without"
                    words = " ".join(f"{flag_name(other)} {value}".rstrip() for other, _, value in others)
                    raise UserError(f"{flag_name(field.name)} has no effect {beside} {words}")


def is_on(args, flag, value):
    """Whether a flag has a value, given as text; with "": whether it is on."""
    return str(getattr(args, flag)) == value if value else bool(getattr(args, flag))


OF_START = {"pause_at": None, "overwrite": False}  # flags that hold for one start of a run, and not for the next
OF_OUTPUT = {"output_dir": None, "overwrite": False, "resume": None, "wandb_run_name": None}  # that a fork begins anew


# --- The command line -------------------------------------------------------------------------------------------------


def parse(Args, argv=None, description=None, script=None):
    """Args from the command line. Raises UserError.

    With --resume or --fork, flags that are not given are those of the run.
    """
    args = parse_flags(Args, argv, description, {})
    if getattr(args, "resume", None):
        folder = find_run(args.resume, script)
        args = parse_flags(Args, argv, description, flags_of(folder, Args) | OF_START)
        args.resume = str(folder)
    elif getattr(args, "fork", None):
        folder = find_run(run_of(args.fork), script, "--fork")
        args = parse_flags(Args, argv, description, flags_of(folder, Args, "--fork") | OF_OUTPUT | OF_START)
        if args.fork == "latest":
            args.fork = str(folder)
    return args


def parse_flags(Args, argv, description, defaults):
    """Args from the command line; `defaults` are {name: value} in place of those of the class."""
    argv = without_aliases(sys.argv[1:] if argv is None else argv, aliases_of(Args))
    defaults = vars(Args()) | defaults
    groups = []
    for title, (doc, helps) in help_groups(Args).items():
        fields = []
        for name, (annotation, text) in helps.items():
            factory = functools.partial(copy.copy, defaults[name])
            annotation = Annotated[annotation, tyro.conf.arg(help=text)]
            fields.append((name, annotation, dataclasses.field(default_factory=factory)))
        group = dataclasses.make_dataclass(title, fields, namespace={"__doc__": doc})
        groups.append((title, tyro.conf.OmitArgPrefixes[group], dataclasses.field(default_factory=group)))
    nested = dataclasses.make_dataclass("Args", groups)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            # Helps are given: to look for them in sources takes a third of the time
            config = [tyro.conf.HelptextFromCommentsOff]
            spec = sys.modules["__main__"].__spec__  # None: a file is run
            program = f"python -m {spec.name.removesuffix('.__main__')}" if spec else None
            lines = re.sub(r"(?m)^(?=\w+'?: )", " ", description or "") or None  # "Word: ..." begins a line of the help
            parsed = tyro.cli(nested, args=argv, prog=program, description=lines, config=config)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        text = re.sub(r"[╭╰][^\n]*[╮╯]|│", "", errors.getvalue())  # without the box that tyro draws
        text = re.sub(r"\A\s*[\w ]+\n\s*-{8,}\s*\n", "", text)  # and without the title, where the box is of ASCII
        message, *more = re.split(r"[─-]{8,}", text)  # its parts, between rules
        # without what follows a flag's name, or what was given
        message = re.sub(r"(options: .*?--[^,]*|instantiated from \[.*?\]).*", r"\1", one_line(message))
        similar = re.search(r"Perhaps you meant:\s*(--[\w-]+)", " ".join(more))
        raise UserError(message + (f"; did you mean {similar[1]}?" if similar else "")) from None
    values = {}
    for group in vars(parsed).values():
        values |= vars(group)
    return Args(**values)


def without_aliases(argv, aliases):
    """Arguments with our names of the flags in place of aliases. Raises UserError where both are given."""
    renamed = []
    given = {}  # by our name, the name it had
    for argument in argv:
        match = re.fullmatch(r"--(no[-_])?([\w-]+)(=.*)?", argument, re.DOTALL)
        if match:
            no, name, value = match[1] or "", match[2].replace("-", "_"), match[3] or ""
            flag = aliases.get(name, name)
            if given.setdefault(flag, name) != name:
                raise UserError(given_twice(given[flag], name))
            if flag != name:
                argument = "--" + no + flag.replace("_", "-") + value
        renamed.append(argument)
    return renamed


def help_groups(Args):
    """The groups of flags in --help: {title: (text, {name: (annotation, help)})}.

    They are the class's own fields up to its first title, then those under each title, then those of each dataclass
    that it inherits from. A title is a comment that follows an empty line, a field's help the comment beside it or the
    one right above.
    """
    groups = {}
    hints = typing.get_type_hints(Args, include_extras=True)
    seen = set()
    also = {}
    for alias, name in aliases_of(Args).items():
        also.setdefault(name, []).append(flag_name(alias))
    for cls in Args.__mro__:
        if not dataclasses.is_dataclass(cls):
            continue
        first = title_of(cls)
        about = (inspect.getdoc(cls) or "").split("\n\n")[0] or None
        for name, (title, text) in comments_of(cls).items():
            if name in hints and name not in seen:
                seen.add(name)
                text += f" (also {', '.join(also[name])})" if name in also else ""
                key = re.sub(r"\W+", "_", title.lower()).strip("_") if title else first
                key = key if key.isidentifier() and not keyword.iskeyword(key) else f"flags_{key}"
                _, helps = groups.setdefault(key, (about if key == first else None, {}))
                helps[name] = (hints[name], text)
    return groups


def title_of(cls):
    """The title of a class's flags: own_flags for OwnFlagsArgs, and the module's name for Args."""
    name = cls.__name__.removesuffix("Args")
    if not name:
        module = sys.modules[cls.__module__]
        stem = re.sub(r"\W+", "_", Path(getattr(module, "__file__", None) or cls.__module__).stem)
        return stem if stem.isidentifier() else f"script_{stem}"
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()


@functools.cache  # --resume and --fork parse twice
def comments_of(cls):
    """{name: (title, help)} of the fields that stand in a class itself, from its source, if that can be had."""
    own = inspect.get_annotations(cls)
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return dict.fromkeys(own, (None, ""))
    comments = {}  # by row
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
    lines = ["", *source.splitlines()]
    found = {}
    title = None
    row = 1  # after the field before
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            texts = []
            for above in range(row, node.lineno):
                if above in comments and not lines[above - 1].strip():
                    title, texts = comments[above], []
                elif above in comments:
                    texts.append(comments[above])
            texts += [comments[k] for k in range(node.lineno, node.end_lineno + 1) if k in comments]
            found[node.target.id] = (title, " ".join(texts))
        row = node.end_lineno + 1
    return dict.fromkeys(own, (None, "")) | found


def run_of(fork):
    """The run that --fork names, itself or by RUN/checkpoints/update_<n>."""
    path = Path(fork)
    is_run = os.path.isfile(path / "config.json")  # one that lies in a folder of that name
    return str(path.parent.parent) if path.parent.name == "checkpoints" and not is_run else fork


def find_run(name, script, flag="--resume"):
    """The folder that a flag names, or the newest of that script under runs/ (latest). Raises UserError."""
    if name == "latest":
        runs = [path.parent for path in Path("runs").glob(f"{script}__*/config.json")]
        if not runs:
            raise UserError(f"{flag} latest: there is no run of {script}.py under runs/")
        return max(runs, key=last_change)
    if not os.path.isfile(Path(name) / "config.json"):  # False too for what can be no name
        raise UserError(f"{flag} takes a run's folder, or latest, and {name} has no config.json")
    return Path(name)


def last_change(run):
    """When a run's folder or a file in it was last written, in seconds."""
    times = [0.0]
    for path in (run, *run.glob("*.*")):
        with contextlib.suppress(OSError):  # it has just been renamed
            times.append(path.lstat().st_mtime)
    return max(times)


def flags_of(folder, Args, what="--resume"):
    """The flags of an earlier run of the same script, by name, for what wants them. Raises UserError."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        earlier = config["args"]
        there = set(earlier)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = "no run wrote it" if isinstance(error, KeyError) else f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{what}: {path} can't be read: {reason}") from error
    here = {field.name for field in dataclasses.fields(Args)}
    if there != here:
        differ = one_line(", ".join(sorted(there ^ here)), 80)
        made = f"{folder}, of {config['script']}," if config.get("script") else folder
        raise UserError(f"{what}: {made} is a run of another script or version: {differ}")
    defaults = {field.name: field.default for field in dataclasses.fields(Args)}
    earlier = {name: defaults[name] if value == "" else value for name, value in earlier.items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in earlier.items()}


def command_line(main, Args, description):
    """Run main(Args) as a command; an error that the user can mend is one line on standard error, no traceback."""
    script = Path(sys.argv[0]).name.replace("__main__.py", Path(sys.argv[0]).parent.name)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows ASCII alone ends no run
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
    except RuntimeError as error:
        from utils.run.failures import is_out_of_memory  # with torch, which not every command needs

        if not is_out_of_memory(error):
            raise
        names = [flag_name(name) for name in ("lora_rank", "dtype", "shard") if name in Args.__dataclass_fields__]
        less = f"{', '.join(names)} may take less; " if names else ""
        print(f"{script}: error: out of memory: {less}{one_line(error, 300)}", file=sys.stderr)
        sys.exit(1)
