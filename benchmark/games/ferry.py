"""Load a ferry: five cars come one by one, each is taken or not, and only the whole load is paid, at the end.

A car weighs 1 to 5, uniformly; the ferry carries 9. The answer 1 takes the car, anything else lets it go. A load above
9 sinks the ferry, which ends the game with nothing; else the reward is the load / 9, after the last car.

Optimal play is known by enumeration of what is loaded and how many cars are to come.
"""

import functools
import random

WEIGHTS = range(1, 6)
CAPACITY = 9
CARS = 5


class Env:
    def reset(self, seed=None):
        rng = random.Random(None if seed is None else f"ferry {seed}")
        self.cars = [rng.choice(WEIGHTS) for _ in range(CARS)]
        self.load = 0
        return f"{self.observation()}. Say 1 or 2.", {}

    def observation(self):
        return f"{self.load} and {self.cars[0]}"

    def step(self, answer):
        weight = self.cars.pop(0)
        if answer.strip() == "1":
            self.load += weight
        if self.load > CAPACITY:
            return "it sinks", 0.0, True, False, {}
        if not self.cars:
            return "the end", self.load / CAPACITY, True, False, {}
        return self.observation(), 0.0, False, False, {}


@functools.cache
def expected(load, cars, turns):
    """Of optimal play before the next car, with so many cars and turns to come; a game that is cut short pays 0."""
    if cars == 0:
        return load / CAPACITY
    if turns == 0:
        return 0.0
    total = 0.0
    for weight in WEIGHTS:
        take = expected(load + weight, cars - 1, turns - 1) if load + weight <= CAPACITY else 0.0
        total += max(take, expected(load, cars - 1, turns - 1))
    return total / len(WEIGHTS)


def optimum(num_turns):
    return expected(0, CARS, num_turns)
