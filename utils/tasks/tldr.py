"""The default task: writers summarise a post, each at about twice the length of the one before, unseen by the others.

The team earns up to 3 points: both texts of a sound length, a ratio of lengths, a ratio of different words, transition
words, and a common subject (rule and numbers: arXiv 2508.04652). A single writer's text is held against the post.

    python ippo_llm.py --task tldr                            posts made by rule, in the embedded model's reach
    python ippo_llm.py --task tldr --dataset trl-lib/tldr     the hub's, or any dataset with a column `prompt`
"""

import re

import datasets

from utils.made_text import posts
from utils.words import STOPWORDS, TRANSITIONS

columns = ("prompt",)
MIN_WORDS, MAX_WORDS = 8, 256


def train_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"train {seed}"))


def eval_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"eval {seed}"))


def formatters(item, agent):
    """Agent 0, 1, 2, ... is asked for 16, 32, 64, ... words."""
    return [{"role": "user", "content": f"{item['prompt']}\n\nSummarise this post in about {16 * 2**agent} words."}]


def reward_func(*completions, items):
    """Joint reward of N lists of B texts: the mean of `pair_reward` over neighbours in the chain, B floats."""
    chain = [*completions] if len(completions) > 1 else [*completions, [item["prompt"] for item in items]]
    pairs = [[pair_reward(*pair) for pair in zip(shorter, longer)] for shorter, longer in zip(chain, chain[1:])]
    return [sum(rewards) / len(rewards) for rewards in zip(*pairs)]


def pair_reward(short, long):
    """Points from 0 to 3 for two texts about one thing, the second longer and richer; each level opens the next."""
    if not all(MIN_WORDS <= len(text.split()) <= MAX_WORDS for text in (short, long)):
        return 0.0
    ratio = len(long) / len(short)
    length_points = min(1.0, (ratio - 1.1) / (1.6 - 1.1), (5.0 - ratio) / (5.0 - 3.2))
    if length_points < 0:
        return 0.5
    words = [set(re.findall(r"\w+", text.lower())) for text in (short, long)]
    unique_points = 0.5 * min(1.0, (len(words[1]) / max(1, len(words[0])) - 1.3) / (2.0 - 1.3))
    if unique_points < 0:
        return 0.5 + length_points
    found = sum(bool(re.search(rf"\b({phrases})\b", long.lower())) for phrases in TRANSITIONS.values())
    transitions = min(1.0, 0.4 + 0.05 * (found - 1)) if found else 0.0
    content = [text_words - STOPWORDS for text_words in words]
    overlap = len(content[0] & content[1]) / max(1, len(content[0] | content[1]))  # Jaccard index
    return 0.5 + length_points + unique_points + 0.4 * transitions + 0.6 * overlap
