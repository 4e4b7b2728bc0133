"""Episodes of a team: what the task's functions get, what is made of what they return, what they may do wrong."""

from types import SimpleNamespace

import pytest
from helpers import PLACE

from utils.cli import TaskError
from utils.tasks.episodes import Episodes

ITEMS = [{"number": 0, "prompt": "p"}, {"number": 1, "prompt": "q"}]
RESPONSES = [["a", "b"], ["c", "d"]]
PROMPTS = [["p", "q"], ["p", "q"]]


class Tokenizer:
    """Of a model that takes no first token."""

    def __call__(self, text):
        return SimpleNamespace(input_ids=[])

    def decode(self, ids):
        return ""


def task_of(**functions):
    task = {"formatters": lambda item, agent: f"Agent {agent}, guess {item['number']}."}
    task |= {"reward_func": lambda first, second: [0.25, 0.75], "external_transition": lambda item: ["x", "y"]}
    return SimpleNamespace(**(task | functions))


def test_functions_get_what_they_name():
    calls = []

    def reward_func(first, second, turns, turn, num_turns, items):
        calls.append((turn, num_turns, turns, [item["number"] for item in items]))
        return [[0.0] * len(first), [1.0] * len(first)]

    def external_transition(prompt, **others):
        calls.append((prompt, others))
        return None if others["item"]["number"] == 1 else ["x", "y"]

    task = task_of(reward_func=reward_func, external_transition=external_transition)
    episodes = Episodes(task, ITEMS, num_agents=2, num_turns=2)
    assert episodes.prompts(1, [0, 1], Tokenizer()) == ["Agent 1, guess 0.", "Agent 1, guess 1."]
    assert episodes.reward_func([0, 1], PROMPTS, RESPONSES) == ([[0.0, 0.0], [1.0, 1.0]],) * 2
    assert [episodes.external_transition(k) for k in (0, 1)] == [["x", "y"], None]
    episodes.add_prompts(0, ["x", "y"])
    assert calls[0] == (0, 2, [[["a"], ["b"]], [["c"], ["d"]]], [0, 1])
    others = {"agent_completions": ["a", "c"], "num_agents": 2, "item": ITEMS[0], "turn": 0}
    others |= {"prompt_history_per_agent": [["Agent 0, guess 0."], ["Agent 1, guess 0."]]}
    assert calls[1] == ("p", others | {"response_history_per_agent": [["a"], ["c"]]})
    assert episodes.prompts(1, [0], Tokenizer()) == ["y"]
    episodes.reward_func([0], [["p"]] * 2, [["e"], ["f"]])
    assert calls[-1] == (1, 2, [[["a", "e"]], [["c", "f"]]], [0])
    assert episodes.prompt_history[0] == [["Agent 0, guess 0.", "x"], ["Agent 1, guess 0.", "y"]]
    assert episodes.response_history == [[["a", "e"], ["c", "f"]], [["b"], ["d"]]]


def test_the_rewards_are_processed_one_by_one():
    episodes = Episodes(task_of(reward_processor=lambda reward: 2 * reward - 1), ITEMS, 2, num_turns=1)
    assert episodes.reward_func([0, 1], PROMPTS, RESPONSES) == ([[0.25, 0.75]] * 2, [[-0.5, 0.5]] * 2)


def user(text):
    return {"role": "user", "content": text}


FIRST = [{"role": "system", "content": "Be brief."}, user("Guess.")]
NEXT_PROMPTS = {  # and what is new in them, after FIRST
    "a text": ("Higher.", "Higher."),
    "a chat that goes on": ([*FIRST, {"role": "assistant", "content": "3"}, user("Higher.")], "Higher."),
    "a chat that says two things": ([*FIRST, user("Higher."), user("Guess again.")], "Higher.\n\nGuess again."),
    "a new chat": ([{"role": "system", "content": "Be bold."}, user("Higher than 3.")], "Higher than 3."),
    "the same chat": (FIRST, "Guess."),
}


@pytest.mark.parametrize("case", NEXT_PROMPTS)
def test_what_is_new_in_the_next_prompt_is_a_message(case):
    prompt, message = NEXT_PROMPTS[case]
    task = task_of(formatters=lambda item: FIRST, external_transition=lambda item: [prompt, "To the other."])
    episodes = Episodes(task, ITEMS, num_agents=2, num_turns=2)
    episodes.reward_func([0, 1], PROMPTS, RESPONSES)
    episodes.add_prompts(0, episodes.external_transition(0))
    assert episodes.messages(0) == [message, "To the other."]


@pytest.mark.parametrize("prompt", [[*FIRST, {"role": "assistant", "content": "3"}], FIRST[:1], 3])
def test_a_next_prompt_that_says_nothing_new_is_one_line(prompt):
    task = task_of(formatters=lambda item: FIRST, external_transition=lambda item: ["Higher.", prompt])
    episodes = Episodes(task, ITEMS, num_agents=2, num_turns=2)
    episodes.reward_func([0, 1], PROMPTS, RESPONSES)
    episodes.add_prompts(1, episodes.external_transition(1))
    with pytest.raises(TaskError, match="^external_transition of agent 1 gave no prompt for item 1, {'number': 1.*"):
        episodes.messages(1)


WRONG = {
    "transition raises": (
        {"external_transition": lambda item: 1 / 0},
        r"external_transition failed on item 0, {'number': .*}: ZeroDivisionError: division by zero" + PLACE,
    ),
    "too few prompts": (
        {"external_transition": lambda item: ["only one"]},
        r"external_transition returned \['only one'\]; it takes a list of 2 prompts, or None",
    ),
    "a text": (
        {"external_transition": lambda item: "no"},  # as many letters as there are agents
        r"external_transition returned 'no'; it takes a list of 2 prompts, or None",
    ),
    "no prompt": (
        {"external_transition": lambda item: [3, 4]},
        r"external_transition of agent 0 gave no prompt for item 0, .*",
    ),
    "formatter raises": (
        {"formatters": [lambda item: "Hi", lambda item: item["text"]]},
        r"formatter of agent 1 failed on item 0, {'number': .*}: KeyError: 'text'" + PLACE,
    ),
    "one item raises": (
        {"reward_func": lambda a, b, items: [1 / (1 - item["number"]) for item in items]},
        r"<lambda> raised ZeroDivisionError: division by zero" + PLACE + r" on item 1, {'number': 1.*",
    ),
    "too few rewards": (
        {"reward_func": lambda a, b: [0.5]},
        r"<lambda> returned 1 values for 2 items, one each: {'number': 1.*} has none",
    ),
    "too many rewards": (
        {"reward_func": lambda a, b: [[0.5] * 3] * 2},
        r"<lambda> returned 3 values for 2 items, one each: {'number': 1.*} has one too many",
    ),
    "a word": (
        {"reward_func": lambda a, b: ["1", 1]},
        r"<lambda> returned '1' for item 0, .*; it takes a number up to 1e30",
    ),
    "infinite in float32": ({"reward_func": lambda a, b: [1, 1e39]}, r"<lambda> returned 1e\+39 for item 1, .*"),
    "no float": ({"reward_func": lambda a, b: [1, 10**400]}, r"<lambda> returned 10+… for item 1, .*"),
    "transition exits": (
        {"external_transition": lambda item: exit(0)},
        r"external_transition failed on item 0, {'number': .*}: SystemExit: 0" + PLACE,
    ),
    "reward exits": (
        {"reward_func": lambda a, b: exit(0)},
        r"<lambda> raised SystemExit: 0" + PLACE + r" on item 0, {'number': 0.*",
    ),
    "processor raises": (
        {"reward_processor": lambda reward: {}[reward]},
        r"reward_processor raised on 0.25 of item 0, {'number': 0.*}: KeyError: 0.25" + PLACE,
    ),
    "processor returns nothing": (
        {"reward_processor": lambda reward: None},
        r"reward_processor returned None for item 0, .*; it takes a number up to 1e30",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_task_does_wrong_is_one_line(case):
    functions, message = WRONG[case]
    with pytest.raises(TaskError, match=f"^{message}$") as error:
        episodes = Episodes(task_of(**functions), ITEMS, 2, num_turns=2)
        episodes.reward_func([0, 1], PROMPTS, RESPONSES)
        episodes.add_prompts(0, episodes.external_transition(0))
        episodes.prompts(0, [0], Tokenizer())
    assert "\n" not in str(error.value)
