"""Environments: games of text in several turns, loaded by name, from a file or from a package; and a batch under way.

An environment is any object with Gymnasium's two methods, where observations and actions are text:

    reset(seed) -> observation, info
    step(response) -> observation, reward, terminated, truncated, info

`reset` may do without the seed. A `close()`, if there is one, is called when the episode ends. An error that either
method raises ends that episode alone, which is dropped; anything else than the above ends the run. A module with an
environment may have, beside it, optimum(max_turns) -> float, the expected score of an episode at best.
"""

import contextlib
import importlib
import math
from pathlib import Path
from types import SimpleNamespace

from utils import distributed
from utils.cli import TaskError, UserError, flags, one_line
from utils.tasks import import_file, search_in
from utils.tasks.episodes import call, check_timer, time_limit

BUILT_IN = ("grid", "guess")


@flags
class EnvArgs:
    """The environment."""

    env: str | None = None  # grid, guess, FILE.py or MODULE:CALLABLE; none: the script's own


# --- Loading ----------------------------------------------------------------------------------------------------------


def load_env(env, max_turns):
    """(a function without arguments that makes a new environment, its optimum(max_turns) if it has one, or None).

    `env` is a module, the name of one here, or a FILE.py, each with a function `make` or a class `Env`; or
    MODULE:CALLABLE, where the module may lie in the working folder; or such a function or class itself. One environment
    is made and closed, to check. Raises UserError.
    """
    label = label_of(env)
    module, name = find(env, label)
    factory = getattr(module, name)
    if not callable(factory):
        raise UserError(f"{label}: {name} can't be called to make an environment; it is of type {type_name(factory)}")
    with blame(label, f"{name}() failed"):
        environment = factory()
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise UserError(f"{label}: {name}() gives an object of type {type_name(environment)}, without a {method}()")
    with blame(label, "close() failed"):
        close(environment)
    optimum = getattr(module, "optimum", None)
    if not callable(optimum):
        return factory, None
    with blame(label, "optimum failed"):
        return factory, float(optimum(max_turns))


def label_of(env):
    """What errors call an environment."""
    if isinstance(env, str):
        return f"--env {env}"
    if getattr(env, "__file__", None):
        return f"the environment in {Path(env.__file__).name}"
    return f"the environment {getattr(env, '__name__', type_name(env))}"


def find(env, label):
    """The module of an environment, and the name there of what makes it. Raises UserError."""
    names = ("make", "Env")
    if callable(env):
        names = (getattr(env, "__name__", "make"),)
        module = SimpleNamespace(**{names[0]: env})
    elif not isinstance(env, str):
        module = env
    elif env.endswith(".py"):
        if not Path(env).is_file():
            raise UserError(f"{label}: there is no such file")
        with blame(label, "it can't be loaded"):
            module = import_file(env, "env_file")
    elif env in BUILT_IN:
        module = importlib.import_module(f"utils.envs.{env}")
    elif ":" in env:
        path, name = env.split(":", 1)
        names = (name,)
        search_in(Path())
        with blame(label, f"{path} can't be imported"):
            module = importlib.import_module(path)
    else:
        raise UserError(f"{label}: there is none; --env takes {', '.join(BUILT_IN)}, FILE.py or MODULE:CALLABLE")
    for name in names:
        if hasattr(module, name):
            return module, name
    raise UserError(f"{label}: there is no {' or '.join(names)} in it")


@contextlib.contextmanager
def blame(label, what):
    """Within it, an error of the environment's own code becomes a UserError of one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UserError(f"{label}: {what}: {describe(error)}") from error


def describe(error):
    return one_line(f"{type(error).__name__}: {error}", 300)


def type_name(value):
    return type(value).__name__


def close(environment):
    if hasattr(environment, "close"):
        environment.close()


# --- A batch under way ------------------------------------------------------------------------------------------------


class Games:
    """B episodes under way, each of at most `max_turns` turns in an environment of its own, reset with its seed.

    While some are `running` (numbers from 0 to B - 1), take their `observations`, and `step` with the responses. Of
    each episode there are the `rewards`, a float for each turn, and how it `ended`: "terminated", "truncated",
    "horizon" (of max_turns), "dropped", or None while it runs. `dropped` is {number: error} of the dropped episodes.
    Where its last episode ends, a process waits for the others, which have as many batches.
    """

    def __init__(self, factory, seeds, max_turns, timeout=None):
        """A call that takes longer than `timeout` seconds fails. Raises TaskError: a reset is wrong, or all fail."""
        check_timer(timeout)
        self.max_turns = max_turns
        self.timeout = timeout
        self.turn = 0
        self.environments = {}
        self.observations = [None] * len(seeds)
        self.rewards = [[] for _ in seeds]
        self.ended = [None] * len(seeds)
        self.dropped = {}
        self.running = list(range(len(seeds)))
        for k, seed in enumerate(seeds):
            with self.guard(k):
                environment = factory()
                self.environments[k] = environment
                self.observations[k] = check_reset(call(environment.reset, seed=seed), environment)
        self.update_running()

    def step(self, responses):
        """Play a turn of the running episodes with a response each, strings in the order of `running`.

        Raises TaskError where a step returns the wrong thing, or all episodes have failed.
        """
        self.turn += 1
        for k, response in zip(self.running, responses, strict=True):
            with self.guard(k):
                environment = self.environments[k]
                observation, reward, terminated, truncated = check_step(environment.step(response), environment)
                self.observations[k] = observation
                self.rewards[k].append(reward)
                if terminated:
                    self.ended[k] = "terminated"
                elif truncated:
                    self.ended[k] = "truncated"
                elif self.turn == self.max_turns:
                    self.ended[k] = "horizon"
                if self.ended[k]:
                    close(self.environments.pop(k))
        self.update_running()

    def stop(self, k):
        """End a running episode from outside, as truncated."""
        self.ended[k] = "truncated"
        with self.guard(k):
            close(self.environments.pop(k))
        self.update_running()

    def update_running(self):
        self.running = [k for k in self.running if self.ended[k] is None]
        if not self.running:
            self.check_dropped()

    def check_dropped(self):
        """Raise TaskError where all episodes of all processes have failed."""
        num_episodes = 0
        errors = []
        for size, dropped in distributed.gather_objects((len(self.ended), self.dropped)):
            num_episodes += size
            errors += dropped.values()
        if errors and len(errors) == num_episodes:
            raise TaskError(f"the environment failed in all {num_episodes} episodes, at first with {errors[0]}")

    @contextlib.contextmanager
    def guard(self, k):
        """Within it, an error of the environment, or too long a call, ends episode k, and a TaskError the run."""
        try:
            with time_limit(self.timeout):
                yield
        except TaskError:
            raise
        except Exception as error:
            where = f"turn {self.turn}" if self.turn else "reset"
            self.ended[k] = "dropped"
            self.dropped[k] = f"{describe(error)} ({where})"
            with contextlib.suppress(Exception), time_limit(self.timeout):  # the first error is the one to report
                close(self.environments.pop(k, None))


def check_reset(result, environment):
    """The observation of what reset returned. Raises TaskError."""
    method = f"reset of {type_name(environment)}"
    observation, info = check_length(result, method, ("observation", "info"))
    if not isinstance(info, dict):
        raise TaskError(f"{method} returned an info of type {type_name(info)}; it takes a dict")
    return check_text(observation, method)


def check_step(result, environment):
    """Observation, reward, terminated and truncated of what step returned: str, float, bool, bool. Raises TaskError."""
    method = f"step of {type_name(environment)}"
    names = ("observation", "reward", "terminated", "truncated", "info")
    observation, reward, terminated, truncated, _ = check_length(result, method, names)
    if not is_number(reward):
        raise TaskError(f"{method} returned the reward {one_line(repr(reward), 80)}; it takes a finite number")
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not is_bool(value):
            raise TaskError(f"{method} returned {name} = {one_line(repr(value), 80)}; it takes True or False")
    return check_text(observation, method), float(reward), bool(terminated), bool(truncated)


def check_length(result, method, names):
    """What a method returned, if it is a value for each of the names. Raises TaskError."""
    if not isinstance(result, (tuple, list)):
        got = f"a single value of type {type_name(result)}"
    elif len(result) == 1:
        got = "1 value"
    else:
        got = f"{len(result)} values"
    if not isinstance(result, (tuple, list)) or len(result) != len(names):
        raise TaskError(f"{method} returned {got}; it takes {len(names)}: {', '.join(names)}")
    return result


def check_text(observation, method):
    if not isinstance(observation, str):
        raise TaskError(f"{method} returned an observation of type {type_name(observation)}; it takes text, a str")
    return observation


def is_number(value):
    """Whether it is a finite number, be it of Python, numpy or torch."""
    if isinstance(value, (str, bytes)):
        return False
    try:
        return math.isfinite(float(value))
    except Exception:  # of whatever it is that is no number
        return False


def is_bool(value):
    """Whether it is True or False, be it of Python, numpy or torch."""
    try:
        return bool(value in (True, False))
    except Exception:  # such as an array of several
        return False
