"""Calls of a task's own code: with the arguments that it names, in time, at a second attempt, and checked."""

import contextlib
import inspect
import math
from collections.abc import Mapping, Set
from statistics import median

import torch
from tqdm import tqdm

from utils.cli import TaskError, describe, one_line
from utils.clock import clock

LARGEST = 1e12  # reward
LARGEST_METRIC = 1e30  # as is read again to be drawn
A_NUMBER = f"a number up to {LARGEST:g}"


@contextlib.contextmanager
def blame(what, item):
    """Within it, an error of the task's own code becomes a TaskError of one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise TaskError(f"{what}, {one_line(item, 80)}: {describe(error)}") from error


def call(function, *arguments, **optional):
    """function(*arguments), with those of the optional arguments that it names; all of them if it takes **any."""
    parameters = parameters_of(function)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        optional = {name: value for name, value in optional.items() if name in names}
    return function(*arguments, **optional)


def parameters_of(function):
    """The parameters of a function; of one that does not tell them, none."""
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return []


@contextlib.contextmanager
def in_reward_phase():
    """A context in which time is the task's: of the phase "reward", or of the evaluation that is under way.

    A model that the task has is computed as it is, whatever the precision in which the agents sample.
    """
    with clock.timed("evaluate" if "evaluate" in clock.phases else "reward"), without_autocast():
        yield


@contextlib.contextmanager
def without_autocast():
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def call_twice(reward_rows, name, items):
    """What reward_func returns for all items, at a second attempt if need be. Raises TaskError where both fail."""
    rows = range(len(items))
    try:
        return reward_rows(rows)
    except (Exception, SystemExit) as error:
        tqdm.write(f"{name} raised {describe(error)}; it is asked once more")
    try:
        return reward_rows(rows)
    except (Exception, SystemExit) as error:
        cause = error
    where = f"the batch of {len(items)} items"
    if not isinstance(cause, TimeoutError):
        for k in rows:  # which item is it?
            try:
                reward_rows([k])
            except (Exception, SystemExit) as error:
                cause = error
                where = f"item {k}, {one_line(items[k], 80)}"
                break
    raise TaskError(f"{name} raised {describe(cause)} on {where}") from cause


def as_lists(rewards, name, num_agents, items):
    """What reward_func returned as one list of B values (joint rewards) or a list for each agent. Raises TaskError."""
    B = len(items)
    try:
        if is_unordered(rewards):
            raise TypeError
        rewards = [value.tolist() if hasattr(value, "tolist") else value for value in rewards]
    except TypeError:
        got = one_line(repr(rewards), 80)
        raise TaskError(f"{name} returned {got}; it takes a list of {B} numbers") from None
    are_lists = len(rewards) > 0 and all(isinstance(row, (list, tuple)) for row in rewards)
    per_agent = are_lists and len(rewards) == num_agents
    if are_lists and not per_agent:
        raise TaskError(f"{name} returned {len(rewards)} lists for {num_agents} agents; it takes one for each")
    rows = rewards if per_agent else [rewards]
    for i, row in enumerate(rows):
        if len(row) != B:
            whose = f" of agent {i}" if per_agent else ""
            raise TaskError(f"{name} returned {len(row)} values{whose} for {B} items; it takes one for each")
    return rows


def as_number(value, name, k, item):
    if not is_number(value):
        got = one_line(repr(value), 80)
        raise TaskError(f"{name} returned {got} for item {k}, {one_line(item, 80)}; it takes {A_NUMBER}")
    return float(value)


def as_metric(value, name):
    """A number of the metrics_callback; NaN for one that is too large to be drawn. Raises TaskError."""
    try:
        number = float(value)
    except Exception as error:  # of whatever it is that is no number
        got = f"{one_line(repr(value), 80)} as {one_line(name, 80)}"
        raise TaskError(f"metrics_callback returned {got}; it takes a number") from error
    return number if abs(number) <= LARGEST_METRIC else math.nan


def is_unordered(values):
    """Whether it is no row of values: a set has no first one, a dict or a table of pandas is read as its keys."""
    is_table = hasattr(values, "keys") and not hasattr(values, "tolist")
    return is_table or isinstance(values, Set | Mapping | str | bytes | bytearray)


def check_together(rewards, name, items):
    """Raise TaskError where one reward is so large that float32, beside it, holds most of the others as one number.

    Then they can't be standardised: what tells the others apart would be lost, and every loss be 0.
    """
    largest = max(rewards, key=abs, default=0.0)
    if abs(largest) < 2**24:
        return
    middle = median(rewards)
    alike = [reward for reward in rewards if abs(reward - middle) <= abs(largest) / 2**24]
    if 2 * len(alike) >= len(rewards) and max(alike) - min(alike) > 1e-9 * max(map(abs, alike)):
        where = f"item {rewards.index(largest)}, {one_line(items[rewards.index(largest)], 80)}"
        others = f"beside it float32 does not tell {min(alike):.12g} from {max(alike):.12g}, which others earn"
        raise TaskError(f"{name} returned {largest:g} for {where}; {others}")


def check_prompt(prompt):
    """Raise TypeError for what is neither a string nor chat messages."""
    messages = prompt if isinstance(prompt, (list, tuple)) and prompt else [None]
    is_chat = all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages)
    if not isinstance(prompt, str) and not (is_chat and all("role" in message for message in messages)):
        raise TypeError(f"a prompt is a string, or a list of messages with role and content, got {prompt!r:.80}")


def is_number(value):
    """Whether it is a number of Python, numpy or torch whose square float32 can hold many of."""
    if isinstance(value, (str, bytes)):
        return False
    try:
        return abs(float(value)) <= LARGEST
    except Exception:  # of whatever it is that is no number
        return False
