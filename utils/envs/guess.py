"""Guess a secret number from 1 to 16 in at most six turns, with "higher" or "lower" after each.

The default game of ppo_llm.py, for any script: python ippo_llm.py --env guess --num-agents 1 --num-turns 6
"""

import functools
import math
import random

MAX_NUMBER = 16
MAX_GUESSES = 6


class Env:
    """A game of guessing a secret number, uniform from 1 to 16, with Gymnasium's reset and step on text.

    A guess earns its expected value (see guess_value), so that luck is neither paid nor punished, and each but the
    first costs 1/6: the sooner the better. An answer that is no number of one to three digits ends the game with -1.
    """

    def reset(self, seed=None):
        rng = random.Random(None if seed is None else f"guess {seed}")
        self.secret = rng.randint(1, MAX_NUMBER)
        self.num_guesses = 0
        self.low = 1  # the secret is from low to high, by the observations so far
        self.high = MAX_NUMBER
        return f"I think of a number from 1 to {MAX_NUMBER}. Guess it.", {}

    def step(self, answer):
        """Returns observation, reward, terminated, truncated, info."""
        self.num_guesses += 1
        answer = answer.strip()
        if not (answer.isascii() and answer.isdigit() and len(answer) <= 3):
            return "not a number", -1.0, True, False, {}

        guess = int(answer)
        reward = guess_value(self.low, guess, self.high)
        if self.num_guesses > 1:
            reward -= 1 / MAX_GUESSES

        if guess == self.secret:
            return "met", reward, True, False, {}
        if guess < self.secret:
            observation = "higher"
            self.low = max(self.low, guess + 1)
        else:
            observation = "lower"
            self.high = min(self.high, guess - 1)
        if self.num_guesses == MAX_GUESSES:
            return "out of turns", reward, True, False, {}
        return observation, reward, False, False, {}


def guess_value(low, guess, high):
    """What a guess is worth where the secret is uniform from low to high; 0 for a number that is ruled out.

    Half the probability to meet the secret, and half the entropy of the observation, as a share of all 4 bits.
    """
    if not low <= guess <= high:
        return 0.0
    candidates = high - low + 1
    outcomes = (guess - low, 1, high - guess)  # candidates that are lower, met, higher
    entropy = sum(count / candidates * math.log2(candidates / count) for count in outcomes if count > 0)
    return 0.5 / candidates + 0.5 * entropy / math.log2(MAX_NUMBER)


@functools.cache
def optimal_score(candidates, guesses):
    """The expected sum of rewards of optimal play with so many candidates and guesses left."""
    if candidates == 0 or guesses == 0:
        return 0.0
    scores = []
    for guess in range(1, candidates + 1):
        score = guess_value(1, guess, candidates)
        if guesses > 1:
            for remaining in (guess - 1, candidates - guess):
                probability = remaining / candidates
                score += probability * (optimal_score(remaining, guesses - 1) - 1 / MAX_GUESSES)
        scores.append(score)
    return max(scores)


def optimum(num_turns):
    """The expected score of optimal play in so many turns: 29 / 48 = 0.604 for five or more.

    Guessing the middle of what is left meets one of the 16 secrets at turn 1, 2 at turn 2, 4 at turn 3, 8 at turn 4 and
    the last at turn 5, after 3.375 turns on average. A secret that is met has given all 4 bits, so the values add up to
    1 on average, and the score is 1 - (3.375 - 1) / 6.
    """
    return optimal_score(MAX_NUMBER, min(MAX_GUESSES, num_turns))
