"""Guess a hidden number from 1 to 16 in at most six turns, told higher or lower after each; the sooner the better.

The number is uniform. A turn earns what may be expected of it, given all answers before, so that luck is neither paid
nor punished: half the probability that it meets the number; half the bits that its answer tells (met, higher or lower:
its entropy), as a share of the log2(16) = 4 there are; and every turn but the first costs 1/6. So a number that was
ruled out is a loss. An answer that is not a number of at most three digits ends the game and costs 1.

All answers up to a number found tell 4 bits, so a number found at turn t is worth 1/2 + 1/2 - (t - 1) / 6 = (7 - t) / 6
on average. Optimal play is known. Turn t can ask 2^(t - 1) different numbers, one for each way in which the turns
before may have been answered, and asking for the middle of what is left asks that many while there are any: of the 16,
one is found at turn 1, 2 at turn 2, 4 at turn 3, 8 at turn 4 and the last at turn 5, after 3.375 turns on average.
The expected score is (7 - 3.375) / 6 = 29 / 48 = 0.604.
"""

import functools
import math
import random

HIGH, TURNS = 16, 6


class Env:
    def reset(self, seed=None):
        self.number = random.Random(None if seed is None else f"guess {seed}").randint(1, HIGH)
        self.turn, self.low, self.high = 0, 1, HIGH
        return f"I think of a number from 1 to {HIGH}. Guess it.", {}

    def step(self, answer):
        self.turn += 1
        said = answer.strip()
        if not (said.isascii() and said.isdigit() and len(said) < 4):
            return "not a number", -1.0, True, False, {}
        said = int(said)
        reward = worth(self.low, said, self.high) - (self.turn > 1) / TURNS
        if said == self.number:
            return "met", reward, True, False, {}
        if said < self.number:
            self.low = max(self.low, said + 1)
        else:
            self.high = min(self.high, said - 1)
        if self.turn == TURNS:
            return "out of turns", reward, True, False, {}
        return "higher" if said < self.number else "lower", reward, False, False, {}


def worth(low, said, high):
    """What may be expected of asking for a number where the hidden one is from low to high."""
    if not low <= said <= high:
        return 0.0
    left = high - low + 1
    bits = sum(n / left * math.log2(left / n) for n in (said - low, 1, high - said) if n)
    return 0.5 / left + 0.5 * bits / math.log2(HIGH)


@functools.cache
def expected(left, turns):
    """The expected sum of the rewards of optimal play, with so many numbers and turns left."""
    if left == 0 or turns == 0:
        return 0.0

    def later(n):  # an answer that leaves n numbers, which is n times in `left`
        return n / left * (expected(n, turns - 1) - (turns > 1) / TURNS)

    return max(worth(1, said, left) + later(said - 1) + later(left - said) for said in range(1, left + 1))


def optimum(max_turns):
    """The expected score of optimal play in so many turns."""
    return expected(HIGH, min(TURNS, max_turns))
