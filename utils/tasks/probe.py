"""Small games of letters, of one ability each; `python -m utils.probe` plays them all, `--dataset` names one.

    python ippo_llm.py --task probe --dataset first-4 --num-agents 1 --max-new-tokens 4

Without `--dataset` it is first-4. The number after a game's name is its size, in letters to choose from, tokens of an
answer, or turns. Every game has few different items, `deals`, all equally likely; a player sees what `show` says of
one, as do all its partners, and answers with letters. So the score of a player of uniformly random letters, and the
best that there is, are known exactly, by enumeration (`worth`).
"""

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import datasets

from utils.cli import UserError

LETTERS = "abcdefgh"
WORDS = ("go", "tell")


@dataclass(frozen=True)
class Game:
    """A game: `pay`, `show` and `ends` are functions of a deal and of what was said so far.

    `said` has a list for each turn, of a string for each agent: its letters, one for each token.
    """

    ability: str  # what it takes
    pay: Callable  # (deal, said) -> what the last turn is worth to the team
    show: Callable = lambda deal, said: "go"  # (deal, said) -> what all read before a turn, letters or `go`
    ends: Callable = lambda deal, said: False  # (deal, said) -> whether the episode is over before its last turn
    deals: tuple = (0,)
    num_letters: int = 4  # that an answer is made of
    num_tokens: int = 1  # of an answer
    num_turns: int = 1
    num_agents: int = 1

    @property
    def answers(self):
        letters = itertools.product(LETTERS[: self.num_letters], repeat=self.num_tokens)
        return ["".join(answer) for answer in letters]


# --- The games --------------------------------------------------------------------------------------------------------


def always(size):
    ability = "an answer that is always right"
    return Game(ability, lambda deal, said: said[-1][0].count("a") / size, num_tokens=size)


def copy(size):
    ability = "an answer that the prompt tells"
    return Game(ability, right_letter, show_deal, deals=tuple(LETTERS[:size]), num_letters=size)


def critic(size):
    ability = "a reward that the prompt tells, whatever is answered: values, and a policy at rest"
    deals = tuple(LETTERS[:size])
    return Game(ability, lambda deal, said: 1.0 if deal in deals[::2] else -1.0, show_deal, deals=deals)


def first(size):
    ability = "credit for the first token of an answer"
    return Game(ability, lambda deal, said: float(said[-1][0][:1] == "a"), num_tokens=size)


def last(size):
    ability = "credit for the last token of an answer"
    return Game(ability, lambda deal, said: float(said[-1][0][size - 1 : size] == "a"), num_tokens=size)


def delayed(size):
    ability = "credit for the first turn, paid after the last"
    return Game(ability, lambda deal, said: float(len(said) == size and said[0][0] == "a"), num_turns=size)


def steps(size):
    ability = "a letter to copy in each turn, each paid at once"
    return Game(ability, lambda deal, said: copied(deal, said[-1:], len(said) - 1) / size, **in_turns(size))


def whole(size):
    ability = "a letter to copy in each turn, all paid after the last"
    return Game(ability, lambda deal, said: copied(deal, said) / size * (len(said) == size), **in_turns(size))


def memory(size):
    ability = "a letter told at first, asked at last"

    def show(deal, said):
        return deal if not said else "tell" if len(said) == size - 1 else "go"

    def pay(deal, said):
        return float(len(said) == size and said[-1][0] == deal)

    return Game(ability, pay, show, deals=tuple(LETTERS[:4]), num_turns=size)


def ending(size):
    ability = "an end that costs what would have come: each turn pays, and one answer ends the game"
    return Game(ability, lambda deal, said: 1 / size, ends=says("a"), num_letters=2, num_turns=size)


def trap(size):
    ability = "a small sure reward that ends the game, against a larger one turns away"

    def pay(deal, said):
        if said[-1][0] == "a":
            return 0.3
        return float(len(said) == size)

    return Game(ability, pay, ends=says("a"), num_letters=2, num_turns=size)


def noise(size):
    ability = "an answer that the prompt tells, under noise on the reward as large as what it is worth"
    deals = tuple(itertools.product(LETTERS[:4], (-size, size)))

    def pay(deal, said):
        return right_letter(deal[0], said) + deal[1]

    return Game(ability, pay, lambda deal, said: deal[0], deals=deals)


def roles(size):
    ability = "a team of which each says another letter"

    def pay(deal, said):
        return sum(answer == LETTERS[i] for i, answer in enumerate(said[-1])) / size

    return Game(ability, pay, num_letters=size, num_agents=size)


def differ(size):
    ability = "a team that has to settle, without talk, who says what"

    def pay(deal, said):  # half for letters of the team's, half for all of them
        own = [answer for answer in said[-1] if answer in [*LETTERS[:size]]]
        return 0.5 * len(own) / size + 0.5 * (len(set(own)) == size)

    return Game(ability, pay, num_letters=size, num_agents=size)


def partner(size):
    ability = "a partner whose answer is noise"
    deals = tuple(itertools.product(LETTERS[:4], (-size, size)))

    def pay(deal, said):
        letter, chance = deal
        mine, others = said[-1]
        return float(mine == letter) + (chance if others in ("a", "b") else -chance)

    return Game(ability, pay, lambda deal, said: deal[0], deals=deals, num_agents=2)


def decider(size):
    ability = "a team of which the prompt says who decides, and what is right"
    deals = tuple(itertools.product(range(size), LETTERS[:2]))

    def pay(deal, said):
        agent, letter = deal
        return float(said[-1][agent] == letter)

    def show(deal, said):
        return f"{LETTERS[deal[0]]} {deal[1]}"

    return Game(ability, pay, show, deals=deals, num_letters=2, num_agents=size)


def right_letter(deal, said):
    return float(said[-1][0] == deal)


def show_deal(deal, said):
    return deal


def says(letter):
    return lambda deal, said: said[-1][0] == letter


def copied(deal, said, start=0):
    """How many of the turns said the deal's letter."""
    return sum(answers[0] == deal[start + turn] for turn, answers in enumerate(said))


def in_turns(size):
    """Four deals of a letter for each turn, such that none tells the next."""
    rng = random.Random(0)
    columns = [rng.sample(LETTERS[:4], 4) for _ in range(size)]
    return {"show": lambda deal, said: deal[len(said)], "deals": tuple(zip(*columns)), "num_turns": size}


GAMES = {  # sizes, the first of which the quick form plays
    always: (1, 2, 4, 8),
    copy: (4, 2, 8),
    critic: (4,),
    first: (4, 2, 8),
    last: (4, 2, 8),
    delayed: (4, 2, 8),
    steps: (4, 2, 8),
    whole: (4, 2, 8),
    memory: (2, 4, 8),
    ending: (4,),
    trap: (3,),
    noise: (1,),
    roles: (2,),
    differ: (2,),
    partner: (1,),
    decider: (3,),
}
BY_NAME = {game.__name__: game for game in GAMES}


@functools.cache
def game_of(name):
    """The Game of a name such as first-4. Raises ValueError."""
    kind, _, size = name.rpartition("-")
    if kind not in BY_NAME or not size.isdecimal() or not 1 <= int(size) <= 8:
        raise ValueError(f"the games are {', '.join(BY_NAME)}, with a size of 1 to 8, as in first-4")
    return BY_NAME[kind](int(size))


# --- What a player can earn -------------------------------------------------------------------------------------------


def score(game, choose):
    """The expected score of a team that takes the `mean`, or the `max`, of what its joint answers are worth."""
    parts = by_sight(game, game.deals, ())
    return sum(len(alike) / len(game.deals) * worth(game, choose, alike, ()) for alike in parts)


def worth(game, choose, deals, said):
    """The expected score from here on, where all deals look alike to the players."""
    totals = []
    for answers in itertools.product(game.answers, repeat=game.num_agents):
        now = (*said, answers)
        total = sum(game.pay(deal, now) for deal in deals) / len(deals)
        going = [deal for deal in deals if len(now) < game.num_turns and not game.ends(deal, now)]
        for alike in by_sight(game, going, now):
            total += len(alike) / len(deals) * worth(game, choose, alike, now)
        totals.append(total)
    return choose(totals)


def by_sight(game, deals, said):
    """The deals in lists of those that look alike before the next turn."""
    seen = {}
    for deal in deals:
        seen.setdefault(game.show(deal, said), []).append(deal)
    return list(seen.values())


def mean(values):
    return sum(values) / len(values)


# --- The task ---------------------------------------------------------------------------------------------------------


def train_dataset(size, seed):
    return named_dataset("first-4", size, seed, "train")


def eval_dataset(size, seed):
    return named_dataset("first-4", size, seed, "eval")


def named_dataset(name, size, seed, split):
    try:
        game = game_of(name)
    except ValueError as error:
        raise UserError(f"--dataset {name}: {error}") from error
    rng = random.Random(f"probe {name} {split} {seed}")
    deals = [k % len(game.deals) for k in range(size)]
    rng.shuffle(deals)
    return datasets.Dataset.from_list([{"game": name, "deal": deal} for deal in deals])


def letters_of(completion):
    """The letters of an answer, one for each token."""
    return "".join(completion.split())


def formatters(item):
    game = game_of(item["game"])
    return [{"role": "user", "content": game.show(game.deals[item["deal"]], ())}]


def reward_func(*completions, items, turns):
    rewards = []
    for k, item in enumerate(items):
        game = game_of(item["game"])
        rewards.append(game.pay(game.deals[item["deal"]], said_in([responses[k] for responses in turns])))
    return rewards


def said_in(responses):
    """What was said in each turn, from each agent's list of responses."""
    return tuple(tuple(letters_of(answer) for answer in answers) for answers in zip(*responses))


def external_transition(prompt_history_per_agent, response_history_per_agent, item):
    game = game_of(item["game"])
    deal = game.deals[item["deal"]]
    said = said_in(response_history_per_agent)
    if game.ends(deal, said):
        return None
    next_prompts = []
    for prompts, responses in zip(prompt_history_per_agent, response_history_per_agent):
        response = {"role": "assistant", "content": responses[-1]}
        next_prompts.append([*prompts[-1], response, {"role": "user", "content": game.show(deal, said)}])
    return next_prompts
