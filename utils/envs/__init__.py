"""Environments: games of text, loaded by name, from a file or from a package, as a script's `play` takes them.

A game of one player is any object with Gymnasium's two methods, where observations and actions are text:

    reset(seed) -> observation, info
    step(answer) -> observation, reward, terminated, truncated, info

`reset` may do without the seed. A `close()`, if there is one, is called when the episode ends. An error that either
method raises ends that episode alone, from which nothing is learned; anything else than the above ends the run. A
module with such a class `Env`, or a function `make`, may have, beside it, optimum(num_turns) -> float, the expected
score of an episode at best, and a task's metrics_callback.

An environment of N players is a class TeamEnv(task, items, args) with the methods of the scripts' own:

    reset() -> observations, N dicts {episode: chat}
    step(actions) -> observations, rewards, truncated: N dicts {episode: answer} -> N dicts {episode: chat},
        N dicts {episode: float}, and a set of episodes that are cut: their agents read, do not act any more, and are
        paid no more. An episode is paid in turns in which somebody acts in it. From what an agent earns before it
        first acts it does not learn

An agent that observes nothing in an episode does not act. The loop ends where nobody observes anything. Then nothing
is learned from the episodes that are in `failed`, if there is such an attribute.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy
from tqdm import tqdm

from utils import distributed
from utils.cli import SharedError, TaskError, UserError, describe, one_line
from utils.tasks.calls import A_NUMBER, call, check_prompt, check_together, in_reward_phase, is_number
from utils.timers import time_limit

BUILT_IN = ("grid", "guess", "probe")
LIBRARIES = ("open_spiel", "pettingzoo", "textarena")  # their games of several seats are LIBRARY:GAME; docs/games.md
MADE_GAMES = 4800  # to train on, without --train-size
MOST_GAMES = 500_000  # of one seed to train on, and to hold out
OF_TASKS = ("reward_func", "reward_fn", "formatters", "conversation_template", "train_dataset")


# --- Loading ----------------------------------------------------------------------------------------------------------


def is_game(given):
    """Whether an object from Python, or a script's module, is a game, and no task."""
    return not any(hasattr(given, name) for name in OF_TASKS) and not isinstance(given, dict)


def load_env(env, args):
    """(its module, what makes an environment of N players: f(task, items, args)) of a game. Raises UserError.

    `env` is a module, the name of one here, or a FILE.py, each with a class `TeamEnv` or `Env`, or a function `make`;
    or LIBRARY:GAME; or MODULE:CALLABLE, where the module may lie in the working folder; or such a function or class
    itself. A game of one player is made and closed once, to check.
    """
    label = label_of(env)
    if of_library(env):
        library, _, name = env.partition(":")
        game = importlib.import_module(f"utils.envs.{library}").load(name, args)
        return game, guarded(game.make_env, label)
    module, name = find(env, label)
    factory = getattr(module, name)
    if not callable(factory):
        raise UserError(f"{label}: {name} can't be called to make an environment; it is of type {type_name(factory)}")
    if name == "TeamEnv":
        return module, guarded(factory, label)
    if args.num_agents > 1:
        raise UserError(f"--num-agents {args.num_agents}: {label} is a game of one player")
    with blame(label, f"{name}() failed"):
        environment = factory()
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise UserError(f"{label}: {name}() gives an object of type {type_name(environment)}, without a {method}()")
    with blame(label, "close() failed"):
        close(environment)
    beside = {own: getattr(module, own, None) for own in ("optimum", "metrics_callback", "reward_processor")}
    game = SimpleNamespace(**{own: function for own, function in beside.items() if callable(function)})
    return game, functools.partial(Games, factory)


def of_library(env):
    """Whether it names a game of a library."""
    return isinstance(env, str) and env.partition(":")[0] in LIBRARIES


def game_seeds(args, least, train_dataset=None, eval_dataset=None):
    """Items to train on and to hold out, {"seed": k}. Raises UserError where there are too few, or rows of a task."""
    if args.dataset or train_dataset is not None or eval_dataset is not None:
        raise UserError("--dataset, train_dataset= and eval_dataset= are the data of a task, and this is a game")
    size = args.train_size or MADE_GAMES
    if size < least:
        raise UserError(f"--train-size takes at least the games of an update, {least}, got {size}")
    if max(size, args.eval_size) > MOST_GAMES:
        most = f"{MOST_GAMES} games to train on, and as many to hold out"
        raise UserError(f"--train-size: there are {most}, got {size} and {args.eval_size}")
    first = 2 * MOST_GAMES * args.seed
    train_items = [{"seed": first + k} for k in range(size)]
    return train_items, [{"seed": first + MOST_GAMES + k} for k in range(args.eval_size)]


def import_file(path, name):
    """Import a file as the module of that name; it may import its neighbours."""
    search_in(Path(path).parent)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def search_in(folder):
    """Let modules be found in a folder too, after all other places."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


def label_of(env):
    """What errors call an environment."""
    if isinstance(env, str):
        return f"--env {env}"
    if getattr(env, "__file__", None):
        return f"the environment in {Path(env.__file__).name}"
    return f"the environment {getattr(env, '__name__', type_name(env))}"


def find(env, label):
    """The module of an environment, and the name there of what makes it. Raises UserError."""
    names = ("TeamEnv", "make", "Env")
    if callable(env):
        names = (getattr(env, "__name__", "make"),)
        module = SimpleNamespace(**{names[0]: env})
    elif not isinstance(env, str):
        module = env
        names = ("make", "Env", "TeamEnv")  # in this order: a script has a TeamEnv of its own, for tasks
    elif env.endswith(".py"):
        if not os.path.isfile(env):
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
        games = f"{', '.join(BUILT_IN)}, {':GAME, '.join(LIBRARIES)}:GAME"
        raise UserError(f"{label}: there is none; --env takes {games}, FILE.py or MODULE:CALLABLE")
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


# --- Games of one player ----------------------------------------------------------------------------------------------


class Games:
    """B episodes of a game of one player, each in an environment of its own, which is reset with its seed."""

    def __init__(self, factory, task, items, args):
        self.factory = factory
        self.items = items
        self.num_turns = args.num_turns
        self.timeout = args.reward_timeout
        self.turn = 0
        self.environments = {}
        self.errors = {}  # {episode: error that ended it}

    def reset(self):
        """The first observations, a list of one dict {episode: chat}."""
        observations = {}
        for b, item in enumerate(self.items):
            with self.guard(b):
                environment = self.factory()
                self.environments[b] = environment
                observations[b] = as_chat(check_reset(call(environment.reset, seed=item["seed"]), environment))
        return [observations]

    def step(self, actions):
        """Step the episodes that go on with an answer each: next observations, rewards, episodes that are truncated."""
        self.turn += 1
        observations, rewards, truncated = {}, {}, set()
        for b, answer in actions[0].items():
            with self.guard(b):
                environment = self.environments[b]
                observation, reward, is_over, is_cut = check_step(environment.step(answer), environment)
                rewards[b] = reward
                if is_cut and not is_over:
                    truncated.add(b)
                if not is_over and (is_cut or self.turn < self.num_turns):
                    observations[b] = as_chat(observation)
                if is_over or is_cut or self.turn == self.num_turns:
                    close(self.environments.pop(b))
        check_together([*rewards.values()], "step", [self.items[b] for b in rewards])
        return [observations], [rewards], truncated

    @property
    def failed(self):
        """The episodes that an error ended, which are named, once all are over. Closes what is left.

        Raises TaskError where all episodes of all processes failed; the processes wait for each other here.
        """
        for b in list(self.environments):
            with self.guard(b):
                close(self.environments.pop(b))
        for b, error in self.errors.items():
            tqdm.write(f"the episode of seed {self.items[b]['seed']} is dropped: {error}")
        everywhere = distributed.gather_objects((len(self.items), [*self.errors.values()]))
        num_episodes = sum(size for size, _ in everywhere)
        errors = [error for _, own in everywhere for error in own]
        if errors and len(errors) == num_episodes:
            raise SharedError(f"the environment failed in all {num_episodes} episodes, at first with {errors[0]}")
        return set(self.errors)

    @contextlib.contextmanager
    def guard(self, b):
        """Within it an error of the environment, or too long a call, drops episode b, and a TaskError ends the run."""
        try:
            with in_reward_phase(), time_limit(self.timeout):
                yield
        except TaskError:
            raise
        except (Exception, SystemExit) as error:
            where = f"turn {self.turn}" if self.turn else "reset"
            self.errors[b] = f"{describe(error, 300)}, in {where}"
            with contextlib.suppress(Exception, SystemExit), time_limit(self.timeout):  # the first error is to be told
                close(self.environments.pop(b, None))


def as_chat(observation):
    return [{"role": "user", "content": observation}]


# --- Environments of several players ----------------------------------------------------------------------------------


def guarded(TeamEnv, label):
    """A user's class TeamEnv, whose errors and wrong returns are TaskErrors of one line."""
    notices = []

    class GuardedEnv:
        def __init__(self, task, items, args):
            self.num_agents = args.num_agents
            self.steps_left = args.num_turns
            self.episodes = range(len(items))
            self.timeout = args.reward_timeout
            with self.guard("__init__"):
                self.env = TeamEnv(task, items, args) if items else None  # None: no episodes, as of nothing held out

        @property
        def failed(self):
            with self.guard("failed"):
                failed = [*getattr(self.env, "failed", ())]
            check_no_flags(failed, f"failed of {label}")
            self.check_episodes(failed, "failed", "failed")
            return failed

        def reset(self):
            if self.env is None:
                return [{} for _ in range(self.num_agents)]
            with self.guard("reset"):
                observations = self.env.reset()
            observations = self.check_observations(observations, "reset")
            if self.episodes and not any(observations):
                raise TaskError(f"reset of {label} returned no observation: nobody would act")
            return observations

        def step(self, actions):
            with self.guard("step"):
                result = self.env.step(actions)
            names = ("observations", "rewards", "truncated")
            observations, rewards, truncated = check_length(result, f"step of {label}", names)
            with self.guard("step"):
                truncated = [*truncated] if is_row(truncated) else truncated
            check_no_flags(truncated, f"truncated, which step of {label} returned,")
            with self.guard("step"):
                truncated = set(truncated)
            self.check_episodes(truncated, "step", "truncated")
            observations = self.check_observations(observations, "step")
            self.steps_left -= 1
            if self.steps_left == 0 and any(own.keys() - truncated for own in observations):
                if not notices:
                    distributed.say(f"{label} goes on after --num-turns: an environment ends its episodes by itself")
                notices.append(label)
            return observations, self.check_rewards(rewards), truncated

        def check_observations(self, observations, method):
            for i, own in enumerate(self.check(observations, method, "observations")):
                for b, chat in own.items():
                    with self.guard(f"{method}, where agent {i} observes episode {b},"):
                        check_prompt(chat)
            return observations

        def check_rewards(self, rewards):
            for i, own in enumerate(self.check(rewards, "step", "rewards")):
                for b, reward in own.items():
                    got = f"the reward {one_line(repr(reward), 80)} of agent {i} in episode {b}"
                    if not is_number(reward):
                        raise TaskError(f"step of {label} returned {got}; it takes {A_NUMBER}")
                names = [f"episode {b}" for b in own]
                check_together([float(reward) for reward in own.values()], f"step of {label}", names)
            return [{b: float(reward) for b, reward in own.items()} for own in rewards]

        def check(self, dicts, method, what):
            right = isinstance(dicts, (list, tuple)) and len(dicts) == self.num_agents
            if not right or not all(isinstance(own, dict) for own in dicts):
                got = f"{method} of {label} returned {what} {one_line(repr(dicts), 80)}"
                is_of_others = isinstance(dicts, (list, tuple)) and all(isinstance(own, dict) for own in dicts)
                wanted = f": give --num-agents {len(dicts)}" if is_of_others else ""
                raise TaskError(f"{got}; it takes a dict for each of {self.num_agents} agents{wanted}")
            for own in dicts:
                self.check_episodes(own, method, what)
            return dicts

        def check_episodes(self, episodes, method, what):
            for b in episodes:
                if b not in self.episodes:
                    takes = f"one of {len(self.episodes)} episodes, from 0"
                    raise TaskError(f"{method} of {label} returned {what} of {one_line(repr(b), 80)}; it takes {takes}")

        @contextlib.contextmanager
        def guard(self, method):
            try:
                with in_reward_phase(), time_limit(self.timeout):
                    yield
            except TaskError:
                raise
            except (Exception, SystemExit) as error:
                raise TaskError(f"{method} of {label} raised {describe(error, 300)}") from error

    return GuardedEnv


def is_row(episodes):
    return isinstance(episodes, Iterable) and not isinstance(episodes, Mapping)


def check_no_flags(episodes, what):
    """Raise TaskError where each episode has a boolean, as in other libraries, in place of a set of some."""
    if not is_row(episodes) or any(isinstance(b, bool | numpy.bool_) for b in episodes):
        raise TaskError(f"{what} is {one_line(repr(episodes), 80)}; it takes a set of episodes")


# --- What a game returns ----------------------------------------------------------------------------------------------


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
        raise TaskError(f"{method} returned the reward {one_line(repr(reward), 80)}; it takes {A_NUMBER}")
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
