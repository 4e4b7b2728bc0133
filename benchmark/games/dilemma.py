"""The iterated prisoner's dilemma, for as many rounds as --num-turns: each of two agents is paid for itself.

    python ippo_llm.py --env benchmark/games/dilemma.py --num-turns 5 --max-new-tokens 2

In a round 1 is to cooperate and 2 to defect; another answer costs 1, and a coin decides. Both read what both did, and
are paid 3 each where both cooperate, 1 each where both defect, and 5 and 0 where one defects alone.
"""

import random

PAYOFFS = {("1", "1"): (3, 3), ("1", "2"): (0, 5), ("2", "1"): (5, 0), ("2", "2"): (1, 1)}


class TeamEnv:
    pays_the_sum = False

    def __init__(self, task, items, args):
        self.coins = [random.Random(f"dilemma {item['seed']}") for item in items]
        self.rounds_left = args.num_turns

    def reset(self):
        return [{b: self.chat("Say 1 or 2.") for b in range(len(self.coins))} for _ in range(2)]

    def chat(self, text):
        return [{"role": "user", "content": text}]

    def step(self, actions):
        self.rounds_left -= 1
        rewards = [{}, {}]
        observations = [{}, {}]
        for b in actions[0]:
            answers = [own[b].strip() for own in actions]
            moves = tuple(answer if answer in ("1", "2") else self.coins[b].choice("12") for answer in answers)
            paid = [payoff - (answer not in ("1", "2")) for payoff, answer in zip(PAYOFFS[moves], answers)]
            for i in range(2):
                rewards[i][b] = float(sum(paid) if self.pays_the_sum else paid[i])
                if self.rounds_left:
                    observations[i][b] = self.chat(f"You {moves[i]}, other {moves[1 - i]}. Say 1 or 2.")
        return observations, rewards, set()
