"""A game that is cut in three of four episodes: is what would have come counted?

The answer a ends the game with 0.6. Any other letter goes on and earns nothing; then the game is cut (truncated),
or, in one of four episodes, goes on, and the next turn earns 1, whatever is answered. To go on is worth 1 to a player
that values what a truncated episode would have earned, and 1/4 to one that does not.

    python ppo_llm.py --env probe
"""

import random

SURE = 0.6
GOES_ON = 0.25


class Env:
    def reset(self, seed=None):
        rng = random.Random(None if seed is None else f"probe {seed}")
        self.goes_on = rng.random() < GOES_ON
        self.turn = 0
        return "go", {}

    def step(self, answer):
        self.turn += 1
        if self.turn == 2:
            return "go", 1.0, True, False, {}
        if answer.strip() == "a":
            return "go", SURE, True, False, {}
        return "go", 0.0, False, not self.goes_on, {}


def worth(reward):
    """What a player's choices are worth, with truncated episodes at their value, by its mean reward."""
    share = (SURE - reward) / (SURE - GOES_ON)  # of episodes in which it goes on
    return SURE + share * (1 - SURE)
