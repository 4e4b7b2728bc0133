"""Episodes of a team under way: ask the task for prompts, rewards and next prompts, and check what it says."""

import contextlib
import inspect
import math
import signal

import torch
from tqdm import tqdm

from utils.cli import TaskError, one_line
from utils.prompts import render
from utils.stats import masked_mean, sums_by


class Episodes:
    """B episodes of a team of N, one of each item, of at most --num-turns turns.

    While some are `running` (numbers from 0 to B - 1), every agent answers its `prompts`, and `play` takes the answers.
    """

    def __init__(self, task, items, args):
        self.task, self.items, self.args, self.turn = task, items, args, 0
        self.running = list(range(len(items)))
        formatters = (
            task.formatters if isinstance(task.formatters, (list, tuple)) else [task.formatters] * args.num_agents
        )
        self.asked = [[[] for _ in range(args.num_agents)] for _ in items]  # of each episode and agent, turn by turn
        self.answered = [[[] for _ in range(args.num_agents)] for _ in items]
        for agent, formatter in enumerate(formatters):
            for k, item in enumerate(items):
                with blame(f"formatter of agent {agent} failed on item {k}", item):
                    self.asked[k][agent].append(call(formatter, item, agent=agent, num_agents=args.num_agents))

    def prompts(self, agent, tokenizer):
        """What an agent reads in the running episodes: strings, special tokens included. Raises TaskError."""
        source = "formatter" if self.turn == 0 else "external_transition"
        rendered = []
        for k in self.running:
            with blame(f"{source} of agent {agent} gave no prompt for item {k}", self.items[k]):
                rendered.append(render(self.asked[k][agent][-1], tokenizer))
        return rendered

    def play(self, completions, prompts):
        """Take the answers (and the prompts answered), N lists of one for each running episode; end the turn.

        Returns the rewards as reward_func gave them and as reward_processor (if any) left them, N lists each. An
        episode ends after the last turn, where its reward (the agents' mean) is above --early-termination-threshold,
        or where external_transition says None. Raises TaskError where the task fails.
        """
        played, N = self.running, self.args.num_agents
        for position, k in enumerate(played):
            for agent in range(N):
                self.answered[k][agent].append(completions[agent][position])
        turns = [[self.answered[k][agent] for k in played] for agent in range(N)]
        known = {"turn": self.turn, "num_turns": self.args.num_turns, "timeout": self.args.reward_timeout}
        rewards, processed = score(self.task, [self.items[k] for k in played], prompts, completions, turns, **known)
        self.running = []
        if self.turn + 1 < self.args.num_turns:
            threshold = self.args.early_termination_threshold
            for k, given in zip(played, zip(*rewards)):
                if (threshold is None or sum(given) / N <= threshold) and self.ask_again(k):
                    self.running.append(k)
        self.turn += 1
        return rewards, processed

    def ask_again(self, k):
        """Ask the task for an episode's next prompts; whether there are any."""
        item, asked, answered = self.items[k], self.asked[k], self.answered[k]
        with blame(f"external_transition failed on item {k}", item):
            following = call(
                self.task.external_transition,
                prompt=item.get("prompt", "") if isinstance(item, dict) else "",
                agent_completions=[answers[-1] for answers in answered],
                num_agents=len(asked),
                prompt_history_per_agent=[[*prompts] for prompts in asked],
                response_history_per_agent=[[*answers] for answers in answered],
                item=item,
                turn=self.turn,
            )
        if following is None:
            return False
        if not isinstance(following, (list, tuple)) or len(following) != len(asked):
            given = one_line(repr(following), 80)
            raise TaskError(f"external_transition returned {given}; it takes a list of {len(asked)} prompts, or None")
        for prompts, prompt in zip(asked, following):
            prompts.append(prompt)
        return True


@contextlib.contextmanager
def blame(what, item):
    """Within it, an error of the task's own code becomes a TaskError of one line."""
    try:
        yield
    except Exception as error:
        raise TaskError(f"{what}, {one_line(item, 80)}: {type(error).__name__}: {one_line(error)}") from error


def call(function, *given, **known):
    """function(*given), with those of the known arguments that it names; all of them if it takes **any."""
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        known = {name: value for name, value in known.items() if name in names}
    return function(*given, **known)


def score(task, items, prompts, completions, turns, timeout=None, **known):
    """Rewards of B joint samples, N lists of B floats, from N lists of prompts, of completions, of all turns so far.

    Returns them as reward_func gave them and as reward_processor (if any) left them. Raises TaskError, naming the
    function, the item and the value, where a function raises twice, or takes longer than `timeout` seconds (None: any
    time) twice, or returns anything but finite numbers.
    """
    N, B = len(completions), len(items)
    rewards = call_reward(task.reward_func, items, prompts, completions, turns, timeout, known)
    name = getattr(task.reward_func, "__name__", "reward_func")
    try:
        rewards = [x.tolist() if hasattr(x, "tolist") else x for x in rewards]
    except TypeError:
        raise TaskError(f"{name} returned {one_line(repr(rewards), 80)}; it takes a list of {B} numbers") from None
    per_agent = len(rewards) == N and all(isinstance(x, (list, tuple)) for x in rewards)
    rows = [list(row) for row in rewards] if per_agent else [list(rewards)]
    for row in rows:
        if len(row) != B:
            told = "has none" if len(row) < B else "has one too many"
            culprit = items[min(len(row), B - 1)]
            raise TaskError(f"{name} returned {len(row)} values for {B} items: {one_line(culprit, 80)} {told}")
    rows = [[number(value, name, k, items[k]) for k, value in enumerate(row)] for row in rows]
    processor = getattr(task, "reward_processor", None)
    processed = [[processed_value(processor, value, k, items[k]) for k, value in enumerate(row)] for row in rows]
    copies = 1 if per_agent else N
    return rows * copies, processed * copies


def call_reward(reward_func, items, prompts, completions, turns, timeout, known):
    def rewards_of(rows):
        of_agents = {"prompts": prompts, "turns": turns}
        batch = {name: [[texts[k] for k in rows] for texts in lists] for name, lists in of_agents.items()}
        batch["items"] = [items[k] for k in rows]
        with time_limit(timeout):
            return call(reward_func, *([texts[k] for k in rows] for texts in completions), **batch, **known)

    name = getattr(reward_func, "__name__", "reward_func")
    try:
        return rewards_of(range(len(items)))
    except Exception as error:
        tqdm.write(f"{name} raised {one_line(f'{type(error).__name__}: {error}')}; it is asked once more")
    try:
        return rewards_of(range(len(items)))
    except Exception as error:
        cause, where = error, f"the batch of {len(items)} items"
        for k in [] if isinstance(error, TimeoutError) else range(len(items)):  # which item is it?
            try:
                rewards_of([k])
            except Exception as single:
                cause, where = single, f"item {k}, {one_line(items[k], 80)}"
                break
        raise TaskError(f"{name} raised {type(cause).__name__}: {one_line(cause)} on {where}") from cause


@contextlib.contextmanager
def time_limit(seconds):
    """Within it, Python code that takes longer is ended by a TimeoutError; None: no limit. For the main thread only."""

    def expire(*_):
        raise TimeoutError(f"no answer within --reward-timeout, {seconds:g} s")

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def processed_value(processor, value, k, item):
    if processor is None:
        return value
    with blame(f"reward_processor raised on {value} of item {k}", item):
        processed = processor(value)
    return number(processed, "reward_processor", k, item)


def number(value, name, k, item):
    if isinstance(value, str) or not hasattr(value, "__float__") or not math.isfinite(value):
        raise TaskError(
            f"{name} returned {one_line(repr(value), 80)} for item {k}, {one_line(item, 80)}; it takes a number"
        )
    return float(value)


def episode_rewards(rollouts):
    """A team's reward in each of B episodes, [B], from its rollouts: the sum over the turns of the agents' mean."""
    return sums_by(rollouts[0].episodes, torch.stack([rollout.rewards for rollout in rollouts]).mean(0))


def team_metrics(rollouts, num_turns, accelerator):
    """The reward of an episode, its deviation, and, where there may be several turns, the reward of each turn."""
    joint = accelerator.gather(episode_rewards(rollouts))
    metrics = {"reward_mean": joint.mean(), "reward_std": joint.std(correction=0)}
    if num_turns > 1:
        episodes, rewards = rollouts[0].episodes, torch.stack([rollout.rewards for rollout in rollouts]).mean(0)
        turns = torch.arange(len(episodes), device=episodes.device) - torch.searchsorted(episodes, episodes)
        metrics["turns"] = len(episodes) / (episodes[-1] + 1)
        for t in range(num_turns):
            metrics[f"turn_{t + 1}/reward_mean"] = masked_mean(rewards, (turns == t).float(), accelerator)
    return metrics
