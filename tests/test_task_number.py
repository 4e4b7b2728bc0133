"""The task `number`: optimal play against a search over all ways to play, and the rule move by move."""

import functools

import pytest

from utils.tasks import number
from utils.tasks.episodes import Episodes


def best(n, turns):
    """Least sum of distances over n neighbouring targets: a search over every number to name, in every turn."""

    @functools.cache
    def search(n, turns):
        if n == 0 or turns == 0:
            return 0
        return min(
            sum(abs(i - k) for i in range(n)) + search(k, turns - 1) + search(n - 1 - k, turns - 1) for k in range(n)
        )

    return search(n, turns)


@pytest.mark.parametrize("num_agents, num_turns", [(1, 1), (1, 3), (2, 1), (2, 3), (3, 5), (8, 8)])
def test_the_optimum_is_what_a_search_over_all_plays_finds(num_agents, num_turns):
    n = 10 * num_agents + 1
    expected = num_turns - best(n, num_turns) / n / (n - 1)
    assert number.optimum(num_agents, num_turns) == pytest.approx(expected, abs=1e-12)


def play(targets, num_turns, choose):
    """Rewards of two players over targets; choose(hints) is the sum of their numbers after these hints."""
    items = [{"share": (target + 0.5) / 21} for target in targets]
    episodes = Episodes(number, items, num_agents=2, num_turns=num_turns)
    rewards = [0.0] * len(targets)
    running = range(len(targets))
    for turn in range(num_turns):
        if turn > 0:
            next_prompts = {k: episodes.external_transition(k) for k in running}
            running = [k for k in running if next_prompts[k] is not None]
            for k in running:
                episodes.add_prompts(k, next_prompts[k])
        if not running:
            break
        sums = []
        for k in running:
            messages = episodes.prompt_history[k][0][-1]
            observations = [message["content"] for message in messages if message["role"] == "user"]
            sums.append(choose(observations[1:]))  # the first is the rule
        responses = [[str(s // 2) for s in sums], [f" {s - s // 2}\n" for s in sums]]
        raw_rewards, _ = episodes.reward_func(running, responses, responses)
        for k, reward in zip(running, raw_rewards[0]):
            rewards[k] += reward
    return rewards


def middle(hints):
    low, high = 0, 20
    for hint in hints:
        guess = (low + high) // 2
        low, high = {"higher": (guess + 1, high), "lower": (low, guess - 1), "met": (guess, guess)}[hint]
    return (low + high) // 2


def test_playing_the_middle_earns_the_optimum():
    rewards = play(range(21), 3, middle)
    assert sum(rewards) / 21 == pytest.approx(number.optimum(2, 3), abs=1e-12)
    assert rewards[10] == 3.0  # met at once, and said again


def test_the_rule_move_by_move():
    assert play([4], 3, lambda hints: 5 if hints else 10) == [pytest.approx(1 - 6 / 20 + 2 * (1 - 1 / 20))]
    items = [{"share": 0.5}] * 4
    legal = number.reward_func(["5", "5", "11", "five"], ["5", "6", "5", "5"], items=items)
    assert legal == [1.0, 1 - 1 / 20, 0.0, 0.0]  # 10 is hidden; 11 and a word are no moves
    assert number.external_transition(["11", "5"], 2, [[[]], [[]]], items[0]) is None
    assert play([4], 3, lambda hints: 23) == [0.0]  # 11 and 12 spoil the game
    first = number.formatters(items[0])
    prompts = number.external_transition(["3", "4"], 2, [[first], [first]], items[0])
    assert prompts[1] == [*first, {"role": "assistant", "content": "4"}, {"role": "user", "content": "higher"}]


def test_hidden_numbers_are_uniform():
    shares = number.train_dataset(4200, 1)
    counts = [0] * 21
    for item in shares:
        counts[number.hidden(item, 2)] += 1
    assert min(counts) > 140 and max(counts) < 260  # 200 each; deviation 14
