"""Questions with known answers: a task's conversation_template and reward_fn as formatters and reward_func."""

import re

from utils.cli import UserError, one_line
from utils.tasks.calls import parameters_of


def make_formatter(template, name):
    """formatters of a conversation_template: {column} in its texts is the item's, other braces stay as they are."""
    if not is_chat(template):
        takes = "a list of messages, each with role and content"
        raise UserError(f"{name}: conversation_template takes {takes}, got {one_line(repr(template), 80)}")

    def conversation_template(item):
        return [fill_message(message, item) for message in template]

    return conversation_template


def is_chat(value):
    """Whether it is a list of messages, dicts with role and content."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)


class Chat(list):
    """A prompt of messages, which is the text of these wherever a task writes it into one: f"{item['prompt']}"."""

    def __str__(self):
        return "\n\n".join(message["content"] for message in self)

    def __format__(self, form):
        return format(str(self), form)

    def __add__(self, other):
        return str(self) + other if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other):
        return other + str(self)


def as_prompt(value):
    """A chat as a Chat, without what its messages do not have; anything else as it is."""
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy's, as pandas has it
    if not is_chat(value):
        return value
    messages = [{key: part for key, part in message.items() if part is not None} for message in value]
    return Chat(messages) if all(isinstance(message.get("content"), str) for message in messages) else value


def fill_message(message, item):
    """A message with the item's columns in its texts."""
    return {key: fill(value, item) if isinstance(value, str) else value for key, value in message.items()}


def fill(text, item):
    """A text with the item's columns in place of their names in braces; what a column says is not filled again."""

    def column(match):
        value = item.get(match[1], match[0])
        if value is None:
            raise ValueError(f"its {match[1]} is null")
        return str(as_prompt(value))

    return re.sub(r"\{([^{}]+)\}", column, text)


def read_prompt(item):
    """formatters of a task that has none, nor a conversation_template."""
    return item["prompt"]


def make_reward_func(function, name):
    """reward_func of a reward_fn, which scores the last agent's completions, one item at a time."""
    if not callable(function):
        raise UserError(f"{name}: reward_fn is not a function but {one_line(repr(function), 80)}")
    others = other_columns(function)

    def reward_fn(*completions, items):
        rewards = []
        for completion, item in zip(completions[-1], items):
            more = {column: item[column] for column in others if column in item}
            rewards.append(function(completion, item["answer"], item["question"], **more))
        return rewards

    return reward_fn


def other_columns(function):
    """The parameters that a reward_fn has after completion, answer and question, by name."""
    parameters = parameters_of(function)[3:]
    return {parameter.name: parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}


def needed_columns(task):
    """The columns that an item must have for the task's reward_fn, and to be a prompt, in order."""
    columns = []
    if hasattr(task, "reward_fn"):
        others = other_columns(task.reward_fn).items()
        columns += ["question", "answer"]
        columns += [column for column, parameter in others if parameter.default is parameter.empty]
    elif "{question}" in str(getattr(task, "conversation_template", None)):
        columns.append("question")
    if getattr(task, "formatters", None) is None and not hasattr(task, "conversation_template"):
        columns.append("prompt")
    return columns
