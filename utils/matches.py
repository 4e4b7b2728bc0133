"""Matches between players of any kind: agents of runs, a random player, a person.

A player has a seat in each of B matches, which are played at once:

    begin(num_matches)
    read(b, chat) -> whether it has room for an answer to what it reads in match b
    answer(episodes, env) -> {b: text} of these matches
"""

import contextlib
import random
from dataclasses import dataclass

from utils import models


class AgentPlayer:
    """An agent of a run, with that run's own sampling: it reads and writes transcripts as in training.

    `module` is the run's script, `generator` torch's. With `is_sampling` the matches are within models.sampling.
    """

    def __init__(self, agent, args, module, generator, is_sampling=False):
        self.agent = agent
        self.args = args
        self.module = module
        self.generator = generator
        self.is_sampling = is_sampling

    def begin(self, num_matches):
        self.transcripts = [[] for _ in range(num_matches)]

    def read(self, b, chat):
        ids = self.transcripts[b]
        ids += models.encode(chat, ids, self.agent)
        return len(ids) <= self.agent.longest_prompt

    def answer(self, episodes, env):
        if not episodes:  # no weights need be cast
            return {}
        contexts = [self.transcripts[b] for b in episodes]
        with contextlib.nullcontext() if self.is_sampling else models.sampling([self.agent], self.args):
            answers = self.module.generate(self.agent, contexts, self.args, self.generator)
        for b, ids in zip(episodes, answers):
            self.transcripts[b] += ids
        return dict(zip(episodes, models.decode(answers, self.agent, self.args)))


class RandomPlayer:
    """A uniformly random legal answer in each turn, of a game that says what is legal."""

    def __init__(self, seed):
        self.seed = seed

    def begin(self, num_matches):
        self.rng = [random.Random(f"random player {self.seed} {b}") for b in range(num_matches)]

    def read(self, b, chat):
        return True

    def answer(self, episodes, env):
        return {b: self.rng[b].choice(env.matches[b].answers()) for b in episodes}


@dataclass
class Match:
    """What was said in a match, and what each of N seats earned."""

    moves: list  # (seat, text), in order
    earned: list  # N floats


def play_matches(players, env, num_matches):
    """Play matches between N players, one in each seat of an environment of several players; a list of Match.

    A match ends for all where one has no room for an answer, as in training.
    """
    for player in players:
        player.begin(num_matches)
    matches = [Match([], [0.0] * len(players)) for _ in range(num_matches)]
    observations = env.reset()
    over = set()
    while any(observations):
        for player, observed in zip(players, observations):
            over |= {b for b, chat in observed.items() if not player.read(b, chat)}
        actions = []
        for seat, (player, observed) in enumerate(zip(players, observations)):
            actions.append(player.answer([b for b in observed if b not in over], env))
            for b, text in actions[-1].items():
                matches[b].moves.append((seat, text))
        if not any(actions):
            break
        observations, rewards, cut = env.step(actions)
        for seat, own in enumerate(rewards):
            for b in own.keys() - over:
                matches[b].earned[seat] += own[b]
        over |= cut
    return matches
