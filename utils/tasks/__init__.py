"""Tasks: load one by name or from a file, and its items from the task itself or from a dataset of yours.

A task is a module (or any object) with

    train_dataset(size, seed), eval_dataset(size, seed) -> datasets.Dataset; the second may be left out, and the first
        where items come from elsewhere
    formatters: one callable, or a list of one for each agent; item -> str, or chat messages for the tokenizer's
        template; it gets, if it names it, `agent` (the agent's number, from 0) and `num_agents`; it may be left out:
        then the agents read the item's "prompt"
    reward_func(*completions): N lists of B strings -> B floats (one joint reward each), or N lists of B floats (one
        list for each agent); it gets, if it names them, `items` (B items), `prompts` (N lists of B prompts as the task
        gave them: texts or chats), `turn` (from 0), `num_turns` and `turns` (N lists of B lists: all completions of an
        episode so far)
    or, for questions with answers, in their place: conversation_template, chat messages in which {question}, or the
        name of another column, stands for the item's; reward_fn(completion, answer, question) -> float, which scores
        the last agent's completion of one item; other columns it gets if it names them
    external_transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent)
        -> N next prompts, or None to end the episode; an episode of a task without it has one turn. It is called for
        one episode, with those of these that it names: `prompt` (the item's), N completions, N lists of an agent's
        prompts so far (as the task gave them) and of its responses, `item`, and `turn` (from 0, the one just played).
        An agent reads what is new after all that it has read and written: of a chat that goes on from its last prompt
        all messages after the answer, of any other chat all but the assistant's and but those, such as a system
        message, that its last prompt had; a string is a message of the user
    optional: reward_processor(float) -> float, which all rewards go through, those in metrics too;
        metrics_callback(rollouts, items) -> {name: float}, from N Rollouts and the items of their B episodes, if it
        names them; optimum(num_agents, num_turns, items) -> float, the expected reward of an episode at best, with
        those of these arguments that it names;
        check(num_agents, num_turns), which raises ValueError for a team that it can't serve;
        TeamEnv, a class that plays in place of the script's, as utils/envs has it: then it is not needed that there are
        formatters and a reward_func;
        and for --dataset: item_of(row) -> item, columns (names that a row must have), or, for a name that is no
        dataset of rows, named_dataset(name, size, seed, split) -> datasets.Dataset

`load_task` makes one of these, or a game of utils/envs, a Task: its methods are what a script calls.
"""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from utils import distributed, models
from utils.cli import flags, needs
from utils.tasks.items import load_items, shuffled_batches
from utils.tasks.task import load_task

__all__ = ["TaskArgs", "load_items", "load_task", "mean_reward", "shuffled_batches"]


@flags
class TaskArgs:
    """The task and its items."""

    task: str | None = None  # arxiv, build, code, number, probe, reasoning, tldr or your FILE.py; none: the default
    env: str | None = None  # a game in place of a task: grid, guess, probe, LIBRARY:GAME, FILE.py or MODULE:CALLABLE
    dataset: str | None = None  # data in place of the task's own: a hub dataset's NAME or NAME:CONFIG, a folder, a file
    # items to train on; none: all of --dataset, 1536 of a task's own, or 4800 games
    train_size: PositiveInt | None = None
    eval_size: PositiveInt = 64  # held-out items
    # whom each seat of LIBRARY:GAME meets in evaluations, beside the team: random, and folders of runs
    eval_against: tuple[str, ...] = needs("eval_interval", default=())
    max_prompt_length: PositiveInt | None = None  # most tokens of a prompt; none: all that the model has room for
    long_prompts: Literal["drop", "truncate"] = "drop"  # leave items with longer ones out, or cut them on the left
    reward_timeout: PositiveFloat | None = None  # seconds a call of reward_func, reset or step may take; none: any time


def mean_reward(rollouts):
    """The mean over all processes' episodes, of the sum of an episode's rewards, as a mean over the agents.

    What an agent earned before it first acted counts too, though it learns nothing from it.
    An episode in which no agent acted does not count; NaN: none does.
    """
    rewards = sum(models.episode_rewards(rollout) for rollout in rollouts) / len(rollouts)  # [B]
    has_acted = (sum(rollout.turns.amax(1) for rollout in rollouts) > 0).float()
    return distributed.sum((rewards * has_acted).sum()) / distributed.sum(has_acted.sum())
