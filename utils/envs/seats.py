"""Games of N seats that move one after the other, as an environment of N players.

A library's games become such an environment by a subclass of Game. Its begin(seed) gives a match, with

    seat: whose move it is; None: the match is over
    text(seat) -> what that seat reads
    move(answer) -> whether the answer of the seat whose move it is was legal; the game says what follows if not
    returns() -> what each seat has earned so far

and, if the library knows it, answers() -> texts that whoever is to move may say.
"""

import random

import torch

from utils import distributed
from utils.cli import UserError
from utils.distributed import say

RANDOM = "random"  # who draws legal answers, where players are named
LARGEST_SEED = 2**31 - 1  # that a library's own chance takes


class Game:
    """A game by name, and how many of its last answers were illegal."""

    illegal_cost = 0.0  # what an illegal answer takes from its seat, beside what the game itself says
    is_zero_sum = False  # by its rules, as far as that is known
    has_told_of_cuts = False
    random_seats = ()  # whose moves are random legal answers, made within the environment: nobody observes these seats

    def __init__(self, num_seats):
        self.num_seats = num_seats
        self.counts = {}  # {seed: [illegal answers, answers]} of the newest matches of that seed

    def begin(self, seed):
        raise NotImplementedError

    def scores(self, agents, args):
        """{name in metrics.csv: score} of the agents, for a library that can compute some."""
        return {}

    def make_env(self, task, items, args):
        return Seats(self, items, args)

    def metrics_callback(self, rollouts, items):
        """The share of illegal answers in the matches of these items, and in those of other processes."""
        counts = [self.counts[seed] for seed in {item["seed"] for item in items}]
        illegal, answers = distributed.sum(torch.tensor(counts, device=distributed.device()).sum(0)).tolist()
        return {"illegal_rate": illegal / max(1, answers)}


class Seats:
    """B matches. A match that --num-turns ends is cut: every seat reads how it stands, if any but random ones moved."""

    def __init__(self, game, items, args):
        self.game = game
        self.seeds = [item["seed"] for item in items]
        self.num_turns = args.num_turns
        self.moves = [0] * len(items)  # made in each match
        self.random_seats = game.random_seats
        self.random = [random.Random(f"random seats {seed}") for seed in self.seeds]

    def reset(self):
        self.matches = [self.game.begin(seed) for seed in self.seeds]
        self.returns = [match.returns() for match in self.matches]  # that were paid
        self.game.counts |= {seed: [0, 0] for seed in self.seeds}
        for b in range(len(self.seeds)):
            self.play_random_seats(b)
        return self.observe([b for b, made in enumerate(self.moves) if made < self.num_turns], set())

    def play_random_seats(self, b):
        match = self.matches[b]
        while match.seat in self.random_seats and self.moves[b] < self.num_turns:
            match.move(self.random[b].choice(match.answers()))
            self.moves[b] += 1

    def observe(self, episodes, cut):
        observations = [{} for _ in range(self.game.num_seats)]
        for b in episodes:
            match = self.matches[b]
            for seat, own in enumerate(observations):
                if seat == match.seat or b in cut:
                    own[b] = [{"role": "user", "content": match.text(seat)}]
        return observations

    def step(self, actions):
        rewards = [{} for _ in actions]
        moved = [(b, seat, answer) for seat, own in enumerate(actions) for b, answer in own.items()]
        for b, seat, answer in moved:
            match = self.matches[b]
            is_illegal = not match.move(answer)
            self.moves[b] += 1
            self.play_random_seats(b)
            returns = match.returns()
            for own, old, new in zip(rewards, self.returns[b], returns):
                own[b] = new - old
            self.returns[b] = returns
            rewards[seat][b] -= self.game.illegal_cost * is_illegal
            count = self.game.counts[self.seeds[b]]
            count[0] += is_illegal
            count[1] += 1
        cut = {b for b, _, _ in moved if self.moves[b] >= self.num_turns and self.matches[b].seat is not None}
        if cut and len(cut) == len(self.matches) and not self.game.has_told_of_cuts:
            self.game.has_told_of_cuts = True
            say(f"--num-turns {self.num_turns} cuts all {len(cut)} matches before their end")
        return self.observe([b for b, _, _ in moved], cut), rewards, cut


def has_random_player(game):
    """Whether it is a game by name that says which answers are legal."""
    return isinstance(game, Game) and hasattr(game.begin(0), "answers")


def check_seats(label, num_seats, args):
    """Raise UserError where there is not an agent for each seat."""
    if num_seats < 2:
        raise UserError(f"{label}: it has {num_seats} seat, and takes two or more to be a game of several")
    if args.num_agents != num_seats:
        raise UserError(f"{label} has {num_seats} seats: it takes --num-agents {num_seats}, got {args.num_agents}")
