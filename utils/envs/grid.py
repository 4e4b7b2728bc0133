"""Walk to a goal on a grid of 4 by 4, a step in each turn, by the shortest way.

Start and goal are two different squares, uniformly. The answers are up, down, left and right; a step off the grid
stays where it is, and counts. Reaching the goal ends the game with the reward 1 - (steps - shortest) / 12, where
`shortest` is the distance, |columns| + |rows|; every other turn earns nothing. Anything else than the four words ends
the game, and so does the 12th step.

The best is the shortest way, which is at most 6 steps, so the expected score of optimal play is 1. If fewer turns are
played, the goals further off are out of reach: it is the share of the 240 pairs of squares that are near enough.
"""

import itertools
import random

SIDE = 4
MAX_STEPS = 12
SQUARES = list(itertools.product(range(1, SIDE + 1), repeat=2))  # (column, row)
MOVES = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}


def distance(start, goal):
    return abs(start[0] - goal[0]) + abs(start[1] - goal[1])


class Env:
    def reset(self, seed=None):
        rng = random.Random(None if seed is None else f"grid {seed}")
        self.square, self.goal = rng.sample(SQUARES, 2)
        self.shortest = distance(self.square, self.goal)
        self.steps = 0
        rule = "Columns count from the left, rows from the bottom. Say up, down, left or right."
        return f"{self.observation()} {rule}", {}

    def observation(self):
        start = "column {} row {}".format(*self.square)
        goal = "column {} row {}".format(*self.goal)
        return f"Walk from {start} to {goal}."

    def step(self, answer):
        self.steps += 1
        move = MOVES.get(answer.strip().lower())
        if move is None:
            return "not a step", 0.0, True, False, {}
        square = (self.square[0] + move[0], self.square[1] + move[1])
        if square in SQUARES:
            self.square = square
        if self.square == self.goal:
            return "there", 1 - (self.steps - self.shortest) / MAX_STEPS, True, False, {}
        if self.steps == MAX_STEPS:
            return "out of steps", 0.0, True, False, {}
        return self.observation(), 0.0, False, False, {}


def optimum(num_turns):
    """The expected score of optimal play in so many turns."""
    pairs = list(itertools.permutations(SQUARES, 2))
    return sum(distance(*pair) <= num_turns for pair in pairs) / len(pairs)
