"""Episodes of a team under way: ask the task for prompts, rewards and next prompts, and check what it returns."""

import contextlib
import inspect
import signal
import threading

from tqdm import tqdm

from utils.cli import TaskError, UserError, describe, one_line
from utils.prompts import new_message, render


class Episodes:
    """B episodes of a team of N agents, one of each item: a task's functions, called for them, and checked.

    `prompt_history[k][agent]` and `response_history[k][agent]` are lists, turn by turn, of episode k. What an
    environment may do to an episode, a task does not: none is `truncated` or `dropped`. `num_long_prompts` counts those
    of later turns that were too long for an agent.
    """

    truncated = frozenset()
    dropped = frozenset()

    def __init__(self, task, items, num_agents, num_turns=1, timeout=None, readers=()):
        """Each agent's first prompt is its formatter's. A call of reward_func may take `timeout` seconds; None: any.

        `readers` has of each agent its tokenizer and its PromptLimit: an episode ends before a prompt that is longer,
        unless prompts are truncated. Raises TaskError where a formatter fails.
        """
        check_timer(timeout)
        self.task = task
        self.items = items
        self.num_agents = num_agents
        self.num_turns = num_turns
        self.timeout = timeout
        self.readers = readers
        self.num_long_prompts = 0
        self.prompt_history = [[[] for _ in range(num_agents)] for _ in items]
        self.response_history = [[[] for _ in range(num_agents)] for _ in items]
        for agent, formatter in enumerate(formatters_of(task, num_agents)):
            for k, item in enumerate(items):
                with blame(f"formatter of agent {agent} failed on item {k}", item):
                    prompt = call(formatter, item, agent=agent, num_agents=num_agents)
                self.prompt_history[k][agent].append(prompt)

    def fork(self, k, other):
        """Let episode `other` have been played as episode k; returns its number."""
        if other != k:
            self.prompt_history[other] = [list(prompts) for prompts in self.prompt_history[k]]
            self.response_history[other] = [list(responses) for responses in self.response_history[k]]
        return other

    def prompts(self, agent, running, tokenizer):
        """What an agent reads in the running episodes: strings, special tokens included. Raises TaskError."""
        texts = []
        for k in running:
            with blame(f"{self.source(k)} of agent {agent} gave no prompt for item {k}", self.items[k]):
                texts.append(render(self.prompt_history[k][agent][-1], tokenizer))
        return texts

    def messages(self, k):
        """What is new in each agent's next prompt of an episode, after its response: N strings. Raises TaskError.

        A chat that goes on from the agent's last one is read from there; of any other the user's messages are.
        """
        texts = []
        for agent in range(self.num_agents):
            with blame(f"external_transition of agent {agent} gave no prompt for item {k}", self.items[k]):
                texts.append(new_message(*self.prompt_history[k][agent][-2:]))
        return texts

    def source(self, k):
        return "external_transition" if self.response_history[k][0] else "formatter"

    def reward_func(self, running, prompts, responses):
        """Score the responses to the prompts, N lists of one for each running episode.

        Returns the rewards as reward_func gave them, and as reward_processor (if any) left them: N lists of floats
        each. A reward_func that raises is asked once more. Raises TaskError where the task fails.
        """
        for agent, texts in enumerate(responses):
            for k, text in zip(running, texts):
                self.response_history[k][agent].append(text)
        return team_rewards(
            self.task,
            items=[self.items[k] for k in running],
            prompts=prompts,
            responses=responses,
            turns=[[self.response_history[k][agent] for k in running] for agent in range(self.num_agents)],
            turn=len(self.response_history[running[0]][0]) - 1,
            num_turns=self.num_turns,
            timeout=self.timeout,
        )

    def external_transition(self, k, num_paths=1):
        """The next prompts of an episode, one for each agent, or None where it ends. Raises TaskError.

        `num_paths`: as so many episodes prompts that are too long count, which have been played alike so far.
        """
        item = self.items[k]
        history = self.prompt_history[k]
        with blame(f"external_transition failed on item {k}", item):
            prompts = call(
                self.task.external_transition,
                prompt=item.get("prompt", "") if isinstance(item, dict) else "",
                agent_completions=[responses[-1] for responses in self.response_history[k]],
                num_agents=self.num_agents,
                prompt_history_per_agent=[list(prompts) for prompts in history],
                response_history_per_agent=[list(responses) for responses in self.response_history[k]],
                item=item,
                turn=len(self.response_history[k][0]) - 1,
            )
        if prompts is None:
            return None
        if not isinstance(prompts, (list, tuple)) or len(prompts) != self.num_agents:
            takes = f"a list of {self.num_agents} prompts, or None"
            raise TaskError(f"external_transition returned {one_line(repr(prompts), 80)}; it takes {takes}")
        for agent, (prompt, (tokenizer, limit)) in enumerate(zip(prompts, self.readers)):
            with blame(f"external_transition of agent {agent} gave no prompt for item {k}", item):
                too_long = limit.exceeds(render(prompt, tokenizer), tokenizer)
            if too_long:
                self.num_long_prompts += num_paths
                if not limit.truncate:
                    return None
        return prompts

    def add_prompts(self, k, prompts):
        """Let the agents read these prompts in the next turn of an episode, one each."""
        for agent, prompt in enumerate(prompts):
            self.prompt_history[k][agent].append(prompt)

    def finish(self):
        """All episodes are over."""


def formatters_of(task, num_agents):
    """The formatter of each agent: the task has one for all, or a list."""
    if isinstance(task.formatters, (list, tuple)):
        return list(task.formatters)
    return [task.formatters] * num_agents


@contextlib.contextmanager
def blame(what, item):
    """Within it, an error of the task's own code becomes a TaskError of one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise TaskError(f"{what}, {one_line(item, 80)}: {describe(error)}") from error


def call(function, *arguments, **optional):
    """function(*arguments), with those of the optional arguments that it names; all of them if it takes **any."""
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        optional = {name: value for name, value in optional.items() if name in names}
    return function(*arguments, **optional)


def check_timer(seconds):
    """Raise UserError where `time_limit` can't serve."""
    if seconds is not None and threading.current_thread() is not threading.main_thread():
        raise UserError("--reward-timeout takes the main thread: its alarm is a signal")


@contextlib.contextmanager
def time_limit(seconds):
    """Within it, Python code that takes longer is ended by a TimeoutError; None: no limit. For the main thread only."""

    def expire(*_):
        raise TimeoutError(f"no answer within --reward-timeout, {seconds:g} s")

    if seconds is None:
        yield
        return
    handler = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def team_rewards(task, items, prompts, responses, turns, turn, num_turns, timeout=None):
    """Rewards of B joint responses from N lists each of prompts, of responses, of all responses of an episode so far.

    Returns N lists of B floats as reward_func gave them, and as reward_processor (if any) left them. Raises TaskError,
    naming the function, the item and the value, where a function fails, or returns anything but finite numbers.
    """
    N = len(responses)
    name = getattr(task.reward_func, "__name__", "reward_func")

    def reward_rows(rows):
        with time_limit(timeout):
            return call(
                task.reward_func,
                *select(responses, rows),
                items=[items[k] for k in rows],
                prompts=select(prompts, rows),
                turns=select(turns, rows),
                turn=turn,
                num_turns=num_turns,
            )

    rewards = as_lists(call_twice(reward_rows, name, items), name, N, items)
    rewards = [[as_number(value, name, k, items[k]) for k, value in enumerate(row)] for row in rewards]
    processed = rewards
    if hasattr(task, "reward_processor"):
        processed = [[process(task, value, k, items[k]) for k, value in enumerate(row)] for row in rewards]
    copies = N if len(rewards) == 1 else 1  # a joint reward is each agent's
    return rewards * copies, processed * copies


def select(lists, rows):
    return [[values[k] for k in rows] for values in lists]


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
        rewards = [value.tolist() if hasattr(value, "tolist") else value for value in rewards]
    except TypeError:
        got = one_line(repr(rewards), 80)
        raise TaskError(f"{name} returned {got}; it takes a list of {B} numbers") from None
    per_agent = len(rewards) == num_agents and all(isinstance(row, (list, tuple)) for row in rewards)
    rows = rewards if per_agent else [rewards]
    for row in rows:
        if len(row) != B:
            item = one_line(items[min(len(row), B - 1)], 80)
            what = "has none" if len(row) < B else "has one too many"
            raise TaskError(f"{name} returned {len(row)} values for {B} items, one each: {item} {what}")
    return rows


def process(task, value, k, item):
    with blame(f"reward_processor raised on {value} of item {k}", item):
        processed = task.reward_processor(value)
    return as_number(processed, "reward_processor", k, item)


def as_number(value, name, k, item):
    if not is_number(value):
        got = one_line(repr(value), 80)
        raise TaskError(f"{name} returned {got} for item {k}, {one_line(item, 80)}; it takes a number up to 1e30")
    return float(value)


def is_number(value):
    """Whether it is a number of Python, numpy or torch, and of a size up to 1e30, as flags are."""
    if isinstance(value, (str, bytes)):
        return False
    try:
        return abs(float(value)) <= 1e30
    except Exception:  # of whatever it is that is no number
        return False
