"""A solver answers a question of reasoning-gym; then a judge reads both, and says whether the answer is right.

    python ippo_llm.py --task benchmark/games/judge.py --num-turns 2 --max-new-tokens 4

The solver earns the score of its answer. The judge earns 1 where its verdict begins with yes and the answer is right,
or where it begins otherwise and the answer is wrong. An answer is right that begins with the known one.
"""

from utils.tasks import reasoning

NAME = "syllogism"


def train_dataset(size, seed):
    return reasoning.named_dataset(NAME, size, seed, "train")


def eval_dataset(size, seed):
    return reasoning.named_dataset(NAME, size, seed, "eval")


class TeamEnv:
    def __init__(self, task, items, args):
        self.items = items
        self.answers = None

    def chats(self, texts):
        return {b: [{"role": "user", "content": text}] for b, text in texts.items()}

    def reset(self):
        return [self.chats({b: f"{item['question']}\n\n{reasoning.FORM}" for b, item in enumerate(self.items)}), {}]

    def step(self, actions):
        if self.answers is None:
            self.answers = actions[0]
            texts = {}
            for b, answer in self.answers.items():
                question = self.items[b]["question"]
                texts[b] = f"{question}\n\nA student says: {answer.strip()}\n\nIs the student right? (Yes or No)"
            return [{}, self.chats(texts)], [{b: self.score(b) for b in self.answers}, {}], set()
        rewards = {}
        for b, verdict in actions[1].items():
            rewards[b] = float(self.is_right(b) == verdict.strip().lower().startswith("yes"))
        return [{}, {}], [{}, rewards], set()

    def score(self, b):
        place = {key: self.items[b][key] for key in ("answer", "name", "size", "seed", "index")}
        return reasoning.reward_fn(completion=self.answers[b], question=self.items[b]["question"], **place)

    def is_right(self, b):
        return self.answers[b].strip().lower().startswith(self.items[b]["answer"].lower())
