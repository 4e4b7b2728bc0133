"""Remember a number over two turns of other talk, in which each answer is paid too.

A code from 1 to 6 is told at first, and the answer is to be another number that is told, from 1 to 6; so again in the
second turn, with a new one. In the third turn the code is asked. The two answers are worth 1/4 each, the code 1/2, and
the score at best is 1.
"""

import random

CODES = range(1, 7)
WORTH = (0.25, 0.25, 0.5)


class Env:
    def reset(self, seed=None):
        rng = random.Random(None if seed is None else f"relay {seed}")
        code, first, second = (rng.choice(CODES) for _ in range(3))
        self.answers = [first, second, code]
        self.observations = [f"Say {second}.", "What is the number?", "the end"]
        self.turn = 0
        return f"{code} is the number. Say {first}.", {}

    def step(self, answer):
        right = answer.strip() == str(self.answers[self.turn])
        reward = WORTH[self.turn] * right
        observation = self.observations[self.turn]
        self.turn += 1
        return observation, reward, self.turn == len(WORTH), False, {}


def optimum(num_turns):
    return sum(WORTH[:num_turns])
