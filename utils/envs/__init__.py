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
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from utils import distributed
from utils.cli import TaskError, UserError, describe, flags, one_line
from utils.prompts import render
from utils.tasks import import_file, search_in
from utils.tasks.episodes import call, check_timer, is_number, time_limit

BUILT_IN = ("grid", "guess", "probe")
MOST_GAMES = 500_000  # of one seed to train on, and to hold out


@flags
class EnvArgs:
    """The environment."""

    env: str | None = None  # grid, guess, probe, FILE.py or MODULE:CALLABLE; none: the script's own


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


def game_seeds(args, least, num_held_out, train_dataset=None, eval_dataset=None):
    """Items to train on and to hold out, {"seed": k}. Raises UserError where there are too few, or rows of a task."""
    if train_dataset is not None or eval_dataset is not None:
        raise UserError("train_dataset= and eval_dataset= are the data of a task; give task= or --task")
    if args.train_size < least:
        raise UserError(f"--train-size takes at least the games of an update, {least}, got {args.train_size}")
    if max(args.train_size, num_held_out) > MOST_GAMES:
        most = f"{MOST_GAMES} games to train on, and as many to hold out"
        raise UserError(f"--train-size: there are {most}, got {args.train_size} and {num_held_out}")
    first = 2 * MOST_GAMES * args.seed
    train_items = [{"seed": first + k} for k in range(args.train_size)]
    return train_items, [{"seed": first + MOST_GAMES + k} for k in range(num_held_out)]


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
        raise UserError(f"{label}: {what}: {describe(error, 300)}") from error


def type_name(value):
    return type(value).__name__


def close(environment):
    if hasattr(environment, "close"):
        environment.close()


# --- A batch under way ------------------------------------------------------------------------------------------------


class Games:
    """B episodes of one player, each in an environment of its own, which is reset with its seed.

    It has the methods of a task's `Episodes`: a step gives the reward, and its observation is the next prompt. An
    episode that an environment cuts short is `truncated`; one that an error ends is `dropped`, {number: error}.
    """

    def __init__(self, factory, items, timeout=None):
        """Items are {"seed": k}. A call that takes longer than `timeout` seconds fails. Raises TaskError."""
        check_timer(timeout)
        self.seeds = [item["seed"] for item in items]
        self.timeout = timeout
        self.turn = 0
        self.environments = {}
        self.observations = {}  # of the last step
        self.prompt_history = [[[]] for _ in items]  # observations that were read
        self.response_history = [[[]] for _ in items]
        self.terminated = set()
        self.truncated = set()
        self.dropped = {}
        for k, seed in enumerate(self.seeds):
            with self.guard(k):
                environment = factory()
                self.environments[k] = environment
                observation = check_reset(call(environment.reset, seed=seed), environment)
                self.prompt_history[k][0].append(observation)

    def prompts(self, agent, running, tokenizer):
        """The first observations of the running episodes, as what the player reads: strings."""
        return [render([{"role": "user", "content": self.messages(k)[0]}], tokenizer) for k in running]

    def messages(self, k):
        """The last observation of an episode that was to be read, in a list."""
        return [self.prompt_history[k][0][-1]]

    def reward_func(self, running, prompts, responses):
        """Step the running episodes with a response each: their rewards twice, a list of one list each.

        Of an episode that is dropped the reward is 0. Raises TaskError where a step returns the wrong thing.
        """
        self.turn += 1
        rewards = []
        for k, response in zip(running, responses[0], strict=True):
            self.response_history[k][0].append(response)
            rewards.append(0.0)
            with self.guard(k):
                environment = self.environments[k]
                observation, rewards[-1], terminated, truncated = check_step(environment.step(response), environment)
                self.observations[k] = observation
                if terminated:
                    self.terminated.add(k)
                elif truncated:
                    self.truncated.add(k)
                if terminated or truncated:
                    close(self.environments.pop(k))
        return [rewards], [rewards]

    def external_transition(self, k):
        """The observation after a step, in a list, or None where the episode has terminated or is dropped."""
        if k in self.terminated or k in self.dropped:
            return None
        return [self.observations[k]]

    def add_prompts(self, k, prompts):
        """Let the player read an observation in the next turn of an episode."""
        self.prompt_history[k][0] += prompts

    def finish(self):
        """All episodes are over, in all processes, which wait for each other here.

        What was dropped is said. Raises TaskError where all episodes have failed.
        """
        for k in list(self.environments):
            with self.guard(k):
                close(self.environments.pop(k))
        for k, error in self.dropped.items():
            tqdm.write(f"the episode of seed {self.seeds[k]} is dropped: {error}")
        num_episodes = 0
        errors = []
        for size, dropped in distributed.gather_objects((len(self.seeds), self.dropped)):
            num_episodes += size
            errors += dropped.values()
        if errors and len(errors) == num_episodes:
            raise TaskError(f"the environment failed in all {num_episodes} episodes, at first with {errors[0]}")

    @contextlib.contextmanager
    def guard(self, k):
        """Within it, an error of the environment, or too long a call, drops episode k, and a TaskError ends the run."""
        try:
            with time_limit(self.timeout):
                yield
        except TaskError:
            raise
        except (Exception, SystemExit) as error:
            where = f"turn {self.turn}" if self.turn else "reset"
            self.dropped[k] = f"{describe(error, 300)}, in {where}"
            with contextlib.suppress(Exception, SystemExit), time_limit(self.timeout):  # the first error is to be told
                close(self.environments.pop(k, None))


def episode_counts(rollout):
    """How many episodes were truncated, and how many dropped: metrics whose means over the processes are of all."""
    processes = distributed.world_size()
    dropped = (~rollout.played[:, 0]).sum()
    return {"truncated": processes * rollout.truncated.sum(), "dropped": processes * dropped}


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
        raise TaskError(f"{method} returned the reward {one_line(repr(reward), 80)}; it takes a number up to 1e30")
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


def is_bool(value):
    """Whether it is True or False, be it of Python, numpy or torch."""
    try:
        return bool(value in (True, False))
    except Exception:  # such as an array of several
        return False
