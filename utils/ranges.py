"""What flags take beyond their type, written as the type: `gamma: Share = 1.0`."""

import typing
from typing import Annotated

from utils.cli import UserError


class Range:
    """What a flag takes beyond its type: stands in the flag's annotation, and `check_ranges` holds it."""

    def __init__(self, takes, holds):
        self.takes, self.holds = takes, holds


INFINITY = float("inf")
INT = Range("at most 2147483647", lambda x: x < 2**31)
FLOAT = Range("a number from 1e-30 to 1e30, or 0", lambda x: x == 0 or 1e-30 <= x <= 1e30)  # what float32 can do with
Count = Annotated[int, Range("1 or more", lambda x: x >= 1), INT]
Natural = Annotated[int, Range("0 or more", lambda x: x >= 0), INT]
Share = Annotated[float, Range("a number from 0 to 1", lambda x: 0 <= x <= 1)]
Decay = Annotated[float, Range("a number from 0 to below 1", lambda x: 0 <= x < 1)]
Portion = Annotated[float, Range("a number above 0, at most 1", lambda x: 0 < x <= 1)]
Positive = Annotated[float, Range("a number above 0", lambda x: 0 < x < INFINITY), FLOAT]
NonNegative = Annotated[float, Range("a number of 0 or more", lambda x: 0 <= x < INFINITY), FLOAT]


def check_ranges(args):
    """Raise UserError for the first flag (a dataclass's field) whose value its annotation, Range or Literal, denies."""
    for name, hint in typing.get_type_hints(type(args), include_extras=True).items():
        value, parts = getattr(args, name), [hint, *typing.get_args(hint)]
        optional = type(None) in parts
        for choices in [typing.get_args(part) for part in parts if typing.get_origin(part) is typing.Literal]:
            if value not in (choices + (None,) * optional):
                raise UserError(f"--{name.replace('_', '-')} takes {', '.join(choices)}, got {value}")
        for limit in [x for part in parts for x in getattr(part, "__metadata__", ()) if isinstance(x, Range)]:
            if not (optional and value is None) and not holds(limit, value):
                flag, takes = name.replace("_", "-"), limit.takes + ", or none" * optional
                raise UserError(f"--{flag} takes {takes}, got {value}")


def holds(limit, value):
    try:
        return limit.holds(value)
    except TypeError:  # main(Args(seed="one")), from Python
        return False
