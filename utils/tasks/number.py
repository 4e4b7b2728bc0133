"""N players meet a hidden number: each says one from 0 to 10, together they should add up to it, and turns help.

The hidden number is uniform over 0 ... 10 N. A turn earns 1 - |sum - hidden| / 10 N; then all read whether to go
higher or lower, or that the number is met, and better said again. Anything but a number from 0 to 10 earns nothing, and
ends the game.

Optimal play is known. The n numbers that are still possible are neighbours, and the middle of them is both the nearest
on average and the best question, so a team plays the middle (how to share it is settled by habit: none sees what
another says). The distances of n numbers from their middle sum up to floor(n^2 / 4), so over T turns the sum is

    F(n, T) = floor(n^2 / 4) + F(floor((n - 1) / 2), T - 1) + F(ceil((n - 1) / 2), T - 1),    F(n, 0) = F(0, T) = 0,

and the expected reward of an episode is T - F(n, T) / (n (n - 1)), n = 10 N + 1: 2.571 for two players and 3 turns.

    python ippo_llm.py --task number --num-turns 3 --max-new-tokens 4
"""

import random

import datasets

HIGH = 10  # the largest number to say


def train_dataset(size, seed):
    return targets(size, f"train {seed}")


def eval_dataset(size, seed):
    return targets(size, f"eval {seed}")


def targets(size, seed):
    """Shares of the range from 0 to 1, for the number of players is not known here."""
    rng = random.Random(f"number {seed}")
    return datasets.Dataset.from_list([{"share": rng.random()} for _ in range(size)])


def hidden(item, num_agents):
    """The number to meet, uniform over the integers from 0 to HIGH times the players."""
    return int(item["share"] * (HIGH * num_agents + 1))


def formatters(item):
    rule = f"We each say a number from 0 to {HIGH}. Together they should meet a hidden number. Say yours."
    return [{"role": "user", "content": rule}]


def total(completions):
    """The sum of the players' numbers; None where one of them is no number from 0 to HIGH."""
    numbers = [completion.strip() for completion in completions]
    legal = all(number.isdecimal() and len(number) < 4 and int(number) <= HIGH for number in numbers)
    return sum(map(int, numbers)) if legal else None


def reward_func(*completions, items):
    rewards = []
    for item, team_completions in zip(items, zip(*completions)):
        num_agents = len(team_completions)
        guess = total(team_completions)
        if guess is None:
            rewards.append(0.0)
        else:
            rewards.append(1 - abs(guess - hidden(item, num_agents)) / (HIGH * num_agents))
    return rewards


def external_transition(agent_completions, num_agents, prompt_history_per_agent, item):
    """Each player's own game so far, and which way to go; None where the game is spoilt."""
    guess = total(agent_completions)
    target = hidden(item, num_agents)
    if guess is None:
        return None
    hint = "met" if guess == target else "higher" if guess < target else "lower"
    next_prompts = []
    for prompts, completion in zip(prompt_history_per_agent, agent_completions):
        response = {"role": "assistant", "content": completion.strip()}
        next_prompts.append([*prompts[-1], response, {"role": "user", "content": hint}])
    return next_prompts


def optimum(num_agents, num_turns):
    """The expected reward of an episode of optimal play."""

    def distances(n, turns):
        if n == 0 or turns == 0:
            return 0
        return n * n // 4 + distances((n - 1) // 2, turns - 1) + distances(n // 2, turns - 1)

    n = HIGH * num_agents + 1
    return num_turns - distances(n, num_turns) / (n * (n - 1))
