"""Environments: games of text in several turns, loaded by name, from a file or from a package; and a batch under way.

An environment is any object with Gymnasium's two methods, where what is observed and what is answered is text:

    reset(seed) -> observation, info
    step(answer) -> observation, reward, terminated, truncated, info

`reset` may do without the seed. A `close()`, if there is one, is called when the episode ends. An error that either
method raises ends that episode alone, which is dropped; anything else than the above ends the run. A module with an
environment may have, beside it, optimum(max_turns) -> float, the expected score of an episode at best.
"""

import contextlib
import importlib
import importlib.util
import math
import sys
from pathlib import Path

from utils.cli import TaskError, UserError, one_line
from utils.episodes import call, time_limit

BUILT_IN = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def load_env(spec, max_turns):
    """(a function without arguments that makes a new environment, its optimum(max_turns) if it has one, or None).

    `spec` is the name of a module here or a FILE.py, either with a function `make` or a class `Env`, or
    MODULE:CALLABLE, where the module may lie in the working folder. One environment is made and closed, to check.
    Raises UserError.
    """
    module, name = find(spec)
    if not hasattr(module, name):
        raise UserError(f"--env {spec}: there is no {'make or ' * (':' not in spec)}{name} in it")
    factory, optimum = getattr(module, name), getattr(module, "optimum", None)
    if not callable(factory):
        raise UserError(f"--env {spec}: {name} can't be called to make an environment; it is of type {kind(factory)}")
    with blame(spec, f"{name}() failed"):
        environment = factory()
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise UserError(f"--env {spec}: {name}() gives an object of type {kind(environment)}, without a {method}()")
    with blame(spec, "close() failed"):
        close(environment)
    with blame(spec, "optimum failed"):
        return factory, float(optimum(max_turns)) if callable(optimum) else None


def find(spec):
    """The module of an environment, and the name there of what makes it. Raises UserError."""
    if spec.endswith(".py"):
        if not Path(spec).is_file():
            raise UserError(f"--env {spec}: there is no such file")
        import_from(Path(spec).parent)  # so that it may import its neighbours
        source = importlib.util.spec_from_file_location("env_file", spec)
        module = sys.modules[source.name] = importlib.util.module_from_spec(source)
        with blame(spec, "it can't be loaded"):
            source.loader.exec_module(module)
    elif spec in BUILT_IN:
        module = importlib.import_module(f"utils.envs.{spec}")
    elif ":" in spec:
        path, name = spec.split(":", 1)
        import_from(Path())
        with blame(spec, f"{path} can't be imported"):
            return importlib.import_module(path), name
    else:
        raise UserError(f"--env {spec}: there is none; --env takes {', '.join(BUILT_IN)}, FILE.py or MODULE:CALLABLE")
    return module, "make" if hasattr(module, "make") else "Env"


def import_from(folder):
    """Let modules be found in a folder too, after all other places."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


@contextlib.contextmanager
def blame(spec, what):
    """Within it, an error of the environment's own code becomes a UserError of one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UserError(f"--env {spec}: {what}: {said(error)}") from error


def said(error):
    return one_line(f"{type(error).__name__}: {error}", 300)


def kind(value):
    return type(value).__name__


def close(environment):
    getattr(environment, "close", lambda: None)()


class Games:
    """B episodes under way, each of at most `max_turns` turns in an environment of its own, reset with its seed.

    While some are `running` (numbers from 0 to B - 1), take their `observations`, and `step` with the answers. Of each
    episode there are the `rewards`, a float for each turn, and how it `ended`: "terminated", "truncated", "horizon"
    (of max_turns), "dropped", or None while it runs. `dropped` has, by number, the error of each dropped episode.
    """

    def __init__(self, factory, seeds, max_turns, timeout=None):
        """A call that takes longer than `timeout` seconds fails. Raises TaskError: a reset is wrong, or all fail."""
        self.max_turns, self.timeout, self.turn, self.environments, self.dropped = max_turns, timeout, 0, {}, {}
        self.observations, self.ended = [None] * len(seeds), [None] * len(seeds)
        self.rewards = [[] for _ in seeds]
        for k, seed in enumerate(seeds):
            with self.dropping(k), time_limit(timeout):
                environment = self.environments[k] = factory()
                self.observations[k] = check_reset(call(environment.reset, seed=seed), environment)
        self.go_on(range(len(seeds)))

    def step(self, answers):
        """Play a turn of the running episodes with their answers, a string each in the order of `running`.

        Raises TaskError where a step returns the wrong thing, or all episodes have failed.
        """
        played, self.turn = self.running, self.turn + 1
        for k, answer in zip(played, answers, strict=True):
            with self.dropping(k), time_limit(self.timeout):
                environment = self.environments[k]
                observation, reward, terminated, truncated = check_step(environment.step(answer), environment)
                self.observations[k] = observation
                self.rewards[k].append(reward)
                if terminated or truncated or self.turn == self.max_turns:
                    self.ended[k] = "terminated" if terminated else "truncated" if truncated else "horizon"
                    close(self.environments.pop(k))
        self.go_on(played)

    def stop(self, k):
        """End a running episode from outside, as truncated."""
        self.running.remove(k)
        self.ended[k] = "truncated"
        with self.dropping(k), time_limit(self.timeout):
            close(self.environments.pop(k))
        self.check_some_are_left()

    def go_on(self, played):
        self.running = [k for k in played if self.ended[k] is None]
        self.check_some_are_left()

    def check_some_are_left(self):
        if self.dropped and len(self.dropped) == len(self.ended):
            first = next(iter(self.dropped.values()))
            raise TaskError(f"the environment failed in all {len(self.dropped)} episodes, at first with {first}")

    @contextlib.contextmanager
    def dropping(self, k):
        """Within it, an error of the environment ends episode k, and a TaskError the run."""
        try:
            yield
        except TaskError:
            raise
        except Exception as error:
            self.ended[k] = "dropped"
            self.dropped[k] = f"{said(error)} ({f'turn {self.turn}' if self.turn else 'reset'})"
            with contextlib.suppress(Exception), time_limit(self.timeout):  # the first error is the one to tell
                close(self.environments.pop(k, None))


def check_reset(returned, environment):
    """The observation of what reset returned. Raises TaskError."""
    of = f"reset of {kind(environment)}"
    observation, info = values(returned, of, ["observation", "info"])
    if not isinstance(info, dict):
        raise TaskError(f"{of} returned an info of type {kind(info)}; it takes a dict")
    return text(observation, of)


def check_step(returned, environment):
    """Observation, reward, terminated and truncated of what step returned: str, float, bool, bool. Raises TaskError."""
    of = f"step of {kind(environment)}"
    names = ["observation", "reward", "terminated", "truncated", "info"]
    observation, reward, *ends, _ = values(returned, of, names)
    try:
        number = math.nan if isinstance(reward, (str, bytes)) else float(reward)
    except Exception:  # of whatever it is that is no number
        number = math.nan
    if not math.isfinite(number):
        raise TaskError(f"{of} returned the reward {one_line(repr(reward), 80)}; it takes a finite number")
    for name, end in zip(names[2:], ends):
        if not is_bool(end):
            raise TaskError(f"{of} returned {name} = {one_line(repr(end), 80)}; it takes True or False")
    return text(observation, of), number, *map(bool, ends)


def values(returned, of, names):
    """What a method returned, if it is a value for each of the names. Raises TaskError."""
    many = len(returned) if isinstance(returned, (tuple, list)) else None
    if many != len(names):
        got = f"a single value of type {kind(returned)}" if many is None else f"{many} value{'s' * (many != 1)}"
        raise TaskError(f"{of} returned {got}; it takes {len(names)}: {', '.join(names)}")
    return returned


def text(observation, of):
    if not isinstance(observation, str):
        raise TaskError(f"{of} returned an observation of type {kind(observation)}; it takes text, a str")
    return observation


def is_bool(value):
    """Whether it is True or False, be it of Python, numpy or torch."""
    try:
        return bool(value in (True, False))
    except Exception:  # such as an array of several
        return False
