"""The command line: flags from a dataclass, grouped in --help; every error is one line and an exit code."""

import contextlib
import dataclasses
import io
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


def one_line(text, most=200):
    """A text of any shape as one line of at most so many characters."""
    text = " ".join(str(text).split())
    return text if len(text) <= most else text[: most - 1] + "…"


def title(group):
    return group.__name__.removesuffix("Args").lower()


def parse(Args, argv=None, description=None):
    """Args from the command line. Each dataclass that Args inherits from is a group of --help under its docstring."""
    groups = [base for base in Args.__mro__ if dataclasses.is_dataclass(base) and base is not Args]
    fields = [(title(g), tyro.conf.OmitArgPrefixes[g], dataclasses.field(default_factory=g)) for g in groups]
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


def command_line(main, Args, description):
    """Run main(Args) as a command; an error that the user can mend is one line on standard error, no traceback."""
    script = Path(sys.argv[0]).name
    try:
        main(parse(Args, description=description))
    except UserError as error:
        print(f"{script}: error: {one_line(error, 1000)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(f"{script}: stopped by the keyboard", file=sys.stderr)
        sys.exit(130)
