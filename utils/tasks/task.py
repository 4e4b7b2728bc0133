"""A task's functions as a script's TeamEnv calls them: checked, timed, with the arguments that they name."""

import copy
import difflib
import importlib
import importlib.util
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

from utils import envs
from utils.cli import TaskError, UserError, describe, one_line
from utils.distributed import say
from utils.envs.seats import Game
from utils.tasks import questions
from utils.tasks.calls import (
    as_lists,
    as_metric,
    as_number,
    blame,
    call,
    call_twice,
    check_prompt,
    check_together,
    in_reward_phase,
    parameters_of,
)
from utils.timers import check_timer, time_limit

BUILT_IN = ("arxiv", "build", "code", "number", "probe", "reasoning", "tldr")
NEEDED = ("formatters", "reward_func")
DATA = ("train_dataset", "eval_dataset", "named_dataset", "item_of")
OPTIONAL = (*DATA, "external_transition", "reward_processor", "metrics_callback", "optimum", "check", "TeamEnv")
# What reward_func is given, if it names it; batch_items are the items too, as in CoMLRL
REWARD_KNOWS = ("items", "prompts", "turn", "turns", "num_turns", "batch_items")
SHORT_FORMS = {  # what a task may have in place of each that is needed, and what makes the one of the other
    "formatters": ("conversation_template", questions.make_formatter),
    "reward_func": ("reward_fn", questions.make_reward_func),
}


class Observation(list):
    """What an agent reads, messages or token ids; `given` is the whole prompt, as the task gave it."""

    def __init__(self, content, given):
        super().__init__(content)
        self.given = given


class Task:
    """A task, or a game, as TeamEnv calls it. `given` is the user's own object, `name` what errors call it.

    `TeamEnv` is there where the task or the game brings an environment of its own, `formatters` and the other methods
    for all others. `initials` has of each agent what it reads with, where prompts are to be truncated.
    """

    def __init__(self, given, name, args):
        self.given = given
        self.name = name
        self.args = args
        self.initials = None
        self.eval_opponents = None
        check_timer(args.reward_timeout)

    def formatters(self, item, i):
        """The first prompt of agent i, a string or chat messages; or token ids, where it was truncated."""
        formatters = formatters_of(self.given, self.args.num_agents)
        with blame(f"formatter of agent {i} failed on item", item):
            chat = call(formatters[i], item, agent=i, num_agents=self.args.num_agents)
        with blame(f"formatter of agent {i} gave no prompt for item", item):
            check_prompt(chat)
        if self.initials is None:
            return chat
        ids = self.initials[i].encode(chat)
        limit = self.initials[i].prompt_limit
        return chat if len(ids) <= limit else Observation(truncate(ids, limit, self.initials[i].tokenizer), chat)

    def reward_func(self, *completions, items, histories):
        """What each agent earns in a turn: N lists of B floats, for N lists of B answers. Raises TaskError.

        histories[b][i] is what agent i of episode b has read and answered, in turn. A reward_func that raises is asked
        once more. A joint reward is each agent's. reward_processor, if there is one, has been applied.
        """
        N = len(completions)
        if not items:
            return [[] for _ in range(N)]
        name = getattr(self.given.reward_func, "__name__", "reward_func")
        turn = len(histories[0][0]) // 2 - 1

        def reward_rows(rows):
            own = [histories[k] for k in rows]
            with time_limit(self.args.reward_timeout):
                rewards = call(
                    self.given.reward_func,
                    *[[texts[k] for k in rows] for texts in completions],
                    items=[items[k] for k in rows],
                    batch_items=[items[k] for k in rows],
                    prompts=[[given_prompts(history[i])[-1] for history in own] for i in range(N)],
                    turns=[[history[i][1::2] for history in own] for i in range(N)],
                    turn=turn,
                    num_turns=self.args.num_turns,
                )
                if isinstance(rewards, Iterator):  # as a generator is, whose work is done here
                    rewards = [*itertools.islice(rewards, max(len(rows), N) + 1)]
            return rewards

        with in_reward_phase():
            rewards = as_lists(call_twice(reward_rows, name, items), name, N, items)
            rewards = [[as_number(value, name, k, items[k]) for k, value in enumerate(row)] for row in rewards]
            if hasattr(self.given, "reward_processor"):
                rewards = [[self.process(value, k, items[k]) for k, value in enumerate(row)] for row in rewards]
            for row in rewards:
                check_together(row, name, items)
        return rewards * N if len(rewards) == 1 and N > 1 else rewards

    def process(self, value, k, item):
        with blame(f"reward_processor raised on {value} of item {k}", item):
            processed = self.given.reward_processor(value)
        return as_number(processed, "reward_processor", k, item)

    def external_transition(self, item, completions, history):
        """What the agents read next, N lists of new messages; None: the episode ends. Raises TaskError.

        The task returns whole prompts; `new_messages` says what of them is new.
        """
        if not hasattr(self.given, "external_transition"):
            return None
        N = len(completions)
        prompts = [given_prompts(own) for own in history]
        with blame("external_transition failed on item", item), in_reward_phase():
            next_prompts = call(
                self.given.external_transition,
                prompt=item.get("prompt", "") if isinstance(item, dict) else "",
                agent_completions=list(completions),
                num_agents=N,
                prompt_history_per_agent=[copy.deepcopy(own) for own in prompts],  # it may change them
                response_history_per_agent=[own[1::2] for own in history],
                item=item,
                turn=len(history[0]) // 2 - 1,
            )
        if next_prompts is None:
            return None
        if not isinstance(next_prompts, (list, tuple)) or len(next_prompts) != N:
            got = f"external_transition returned {one_line(repr(next_prompts), 80)} for item {one_line(item, 80)}"
            raise TaskError(f"{got}; it takes a list of {N} prompts, or None")
        observations = []
        for i, prompt in enumerate(next_prompts):
            with blame(f"external_transition of agent {i} gave no prompt for item", item):
                check_prompt(prompt)
                observations.append(Observation(new_messages(prompts[i][-1], prompt), prompt))
        return observations

    def extra_metrics(self, rollouts, items):
        """What the metrics_callback, if there is one, returns for B episodes: {name: float}. Raises TaskError."""
        if not items or not hasattr(self.given, "metrics_callback"):
            return {}
        try:
            metrics = call(self.given.metrics_callback, rollouts, items=items)
        except (Exception, SystemExit) as error:
            raise TaskError(f"metrics_callback raised {describe(error)}") from error
        if not isinstance(metrics, Mapping):
            raise TaskError(f"metrics_callback returned {one_line(repr(metrics), 80)}; it takes a dict of numbers")
        return {one_line(name): as_metric(value, name) for name, value in metrics.items()}

    def scores(self, agents):
        """Of a game by name its exact scores of the agents, and what they earn against --eval-against: {name: float}.

        The names are those in metrics.csv.
        """
        exact = self.given.scores(agents, self.args) if isinstance(self.given, Game) else {}
        return exact | self.eval_opponents.scores(agents) if self.eval_opponents else exact

    def optimum(self, items):
        """The expected reward of an episode of these items at best; None: the task does not say. Raises UserError."""
        if not hasattr(self.given, "optimum"):
            return None
        counts = {"num_agents": self.args.num_agents, "num_turns": self.args.num_turns, "items": items}
        try:
            best = call(self.given.optimum, **counts)
            best = None if best is None else float(best)
        except (Exception, SystemExit) as error:
            raise UserError(f"optimum of {self.name} failed: {describe(error)}") from error
        if best is not None and not math.isfinite(best):
            raise UserError(f"optimum of {self.name} returned {best}; it takes a finite number")
        return best


def given_prompts(own):
    """The prompts in an agent's history, as the task gave them."""
    return [getattr(observation, "given", observation) for observation in own[::2]]


def new_messages(earlier, prompt):
    """The messages of a prompt that are new after an earlier one and the answer to it.

    Of a chat that goes on from there they are all that come after the answer, of any other chat all but the assistant's
    and those, such as a system message, that stood in the earlier prompt and are not the user's. Raises ValueError
    where there is none.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    goes_on = list(prompt) != list(earlier) and list(prompt[: len(earlier)]) == list(earlier)
    if goes_on:
        new = list(prompt[len(earlier) :])
        new = new[1:] if new[0]["role"] == "assistant" else new
    else:
        others = [message for message in prompt if message["role"] != "assistant"]
        new = [message for message in others if message["role"] == "user" or message not in list(earlier)]
    if all(message["role"] == "assistant" for message in new):
        raise ValueError("its chat has no new message for the agent")
    return new


def truncate(ids, most, tokenizer):
    """Token ids, of which those on the left go where there are more than `most`; a first special token stays."""
    if len(ids) <= most:
        return ids
    first = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return first + ids[len(ids) - most + len(first) :]


def formatters_of(task, num_agents):
    """The formatter of each agent: the task has one for all, or a list."""
    if isinstance(task.formatters, (list, tuple)):
        return list(task.formatters)
    return [task.formatters] * num_agents


# --- Loading ----------------------------------------------------------------------------------------------------------


def load_task(given, args, default):
    """The task or game of these flags as a Task. Raises UserError where there is none, or where it lacks something.

    `given` is an object from Python in place of what --task or --env names; None: there is none. Without any it is
    `default`, a script's module.
    """
    if args.task and args.env:
        raise UserError(f"--env {args.env} and --task {args.task} are two things to train on; give one")
    if args.eval_against and not (given is None and envs.of_library(args.env)):
        games = ", ".join(f"{library}:GAME" for library in envs.LIBRARIES)
        raise UserError(f"--eval-against has no effect without a game of several seats by name, --env {games}")
    if given is None:
        given = args.task or args.env or default
    if args.env and given is args.env or not isinstance(given, str) and envs.is_game(given):
        return load_game(given, args)
    name = name_of(given)
    task = given
    if isinstance(task, str):
        task = importlib.import_module(f"utils.tasks.{task}") if task in BUILT_IN else load_file(task)
        if given not in BUILT_IN:
            say_what_is_misspelt(task, name)
    has_env = given is not default and hasattr(task, "TeamEnv")
    is_short = any(hasattr(task, form) for form, _ in SHORT_FORMS.values())
    if is_short or not has_env and getattr(task, "formatters", None) is None:
        task = complete(task, name, has_env)
    check(task, name, args, () if has_env else NEEDED)
    whole = Task(task, name, args)
    if has_env:
        whole.TeamEnv = envs.guarded(task.TeamEnv, name)
    elif args.num_turns > 1 and not hasattr(task, "external_transition"):
        say(f"{name} has no external_transition: its episodes have one turn")
    return whole


def load_game(given, args):
    """A game, of one player or of several, as a Task that has an environment of its own."""
    game, environment = envs.load_env(given, args)
    check_processor(game, envs.label_of(given))
    whole = Task(game, envs.label_of(given), args)
    whole.TeamEnv = environment
    if args.eval_against:
        from utils.opponents import EvalOpponents  # here, as it imports the environments

        whole.eval_opponents = EvalOpponents(game, args)
    return whole


def check_processor(task, name):
    if hasattr(task, "reward_processor") and not hasattr(task, "reward_func"):
        raise UserError(f"{name}: reward_processor has no effect without reward_func; it pays what step returns")


def check(task, name, args, needed):
    """Raise UserError for a task that lacks something that is needed, or can't serve the team."""
    for attribute in needed:
        if not hasattr(task, attribute):
            raise UserError(f"{name} has no {attribute}")
    check_processor(task, name)
    for attribute in (*NEEDED, *OPTIONAL):
        value = getattr(task, attribute, None)
        if attribute != "formatters" and hasattr(task, attribute) and not callable(value):
            raise UserError(f"{name}: {attribute} is not a function but {one_line(repr(value), 80)}")
    if hasattr(task, "formatters"):
        formatters = formatters_of(task, args.num_agents)
        if len(formatters) != args.num_agents:
            raise UserError(f"{name} has {len(formatters)} formatters for {args.num_agents} agents; it takes one each")
        if not all(map(callable, formatters)):
            raise UserError(f"{name}: each of its formatters is to be a function")
    if hasattr(task, "reward_func"):
        for own in parameters_of(task.reward_func):
            if own.kind is own.KEYWORD_ONLY and own.default is own.empty and own.name not in REWARD_KNOWS:
                takes = f"may name {', '.join(REWARD_KNOWS)}"
                raise UserError(f"{name}: reward_func asks for {own.name}, which nothing gives; it {takes}")
    if hasattr(task, "check"):
        try:
            task.check(args.num_agents, args.num_turns)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error
        except (Exception, SystemExit) as error:
            raise UserError(f"{name}: check failed: {describe(error)}") from error
    if hasattr(task, "reward_func"):
        by_place = [own for own in parameters_of(task.reward_func) if own.kind <= own.POSITIONAL_OR_KEYWORD]
        for own in by_place[: args.num_agents]:
            if own.name in REWARD_KNOWS and own.kind is own.POSITIONAL_OR_KEYWORD:
                first = f"the completions of {args.num_agents} agents come first"
                raise UserError(f"{name}: reward_func has {own.name} among its first arguments, where {first}")


def say_what_is_misspelt(task, name):
    """Say which functions of a task's file have nearly the name of one that a task may have, and that it lacks."""
    for own in vars(task).keys() - {form for form, _ in SHORT_FORMS.values()}:
        for known in difflib.get_close_matches(own, (*NEEDED, *OPTIONAL), n=1, cutoff=0.8):
            if own != known and not hasattr(task, known) and callable(getattr(task, own)):
                say(f"{name} has no {known}, but {own}, which nothing calls: is {known} meant?")


def complete(task, name, has_env):
    """A task with formatters, also where it has none, and reward_func, in place of what stands for them.

    One with an environment of its own has what stands there, and no formatters besides.
    """
    there = (*NEEDED, *OPTIONAL, "columns", "__file__", "__name__")
    whole = SimpleNamespace(**{attribute: getattr(task, attribute) for attribute in there if hasattr(task, attribute)})
    for attribute, (short_form, make) in SHORT_FORMS.items():
        if hasattr(task, short_form):
            if hasattr(task, attribute):
                raise UserError(f"{name} has both {attribute} and {short_form}; it takes one of them")
            setattr(whole, attribute, make(getattr(task, short_form), name))
    if has_env:  # which reads what it likes
        return whole
    if getattr(whole, "formatters", None) is None:
        whole.formatters = questions.read_prompt
    whole.item_columns = questions.needed_columns(task)
    return whole


def name_of(task):
    """What errors call a task."""
    if isinstance(task, str):
        return f"--task {task}"
    if getattr(task, "__file__", None):
        return f"the task in {Path(task.__file__).name}"
    return f"the task {getattr(task, '__name__', type(task).__name__)}"


def load_file(path):
    """The module in a task's file. Raises UserError."""
    if not path.endswith(".py"):
        raise UserError(f"--task takes {', '.join(BUILT_IN)} or a FILE.py, got {path}")
    if not os.path.isfile(path):
        raise UserError(f"--task takes {', '.join(BUILT_IN)} or a FILE.py, and there is no file {path}")
    try:
        return envs.import_file(path, "task_file")
    except (Exception, SystemExit) as error:
        raise UserError(f"--task {path} can't be loaded: {describe(error)}") from error
