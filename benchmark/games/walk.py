"""Walk along nine squares to a goal in at most five turns; only where the walk ends is paid.

Start and goal are two different squares, uniformly. The answer 1 is a step to the left, 2 to the right; anything else,
and a step off the squares, stays. The walk ends at the goal, or after five turns, with the reward 1 - distance / 8.

At best a walk comes nearer by five squares: the expected score of optimal play is the mean of
1 - max(0, distance - 5) / 8 over the 72 pairs of squares, 0.965; with T < 5 turns, after which a walk that is not at
the goal earns nothing, the share of pairs at a distance of at most T.
"""

import itertools
import random

SQUARES = range(1, 10)
MAX_TURNS = 5


class Env:
    def reset(self, seed=None):
        rng = random.Random(None if seed is None else f"walk {seed}")
        self.square, self.goal = rng.sample(SQUARES, 2)
        self.turn = 0
        return f"{self.observation()}. Say 1 or 2.", {}

    def observation(self):
        return f"{self.square} to {self.goal}"

    def step(self, answer):
        self.turn += 1
        square = self.square + {"1": -1, "2": 1}.get(answer.strip(), 0)
        if square in SQUARES:
            self.square = square
        distance = abs(self.square - self.goal)
        if distance == 0 or self.turn == MAX_TURNS:
            return "the end", 1 - distance / 8, True, False, {}
        return self.observation(), 0.0, False, False, {}


def optimum(num_turns):
    pairs = list(itertools.permutations(SQUARES, 2))
    if num_turns < MAX_TURNS:
        return sum(abs(start - goal) <= num_turns for start, goal in pairs) / len(pairs)
    return sum(1 - max(0, abs(start - goal) - MAX_TURNS) / 8 for start, goal in pairs) / len(pairs)
