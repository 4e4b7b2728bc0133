"""The default task: writers summarise a post, each at about twice the length of the one before, unseen by the others.

The team earns up to 3 points for a sound length, a ratio of lengths, a ratio of different words, transition words and
a common subject (rule and numbers: arXiv 2508.04652). A single writer's text is compared with the post itself.

    python ippo_llm.py --task tldr                            posts made by rule, in the embedded model's reach
    python ippo_llm.py --task tldr --dataset trl-lib/tldr     the hub's, or any dataset with a column `prompt`
"""

import re

import datasets

from utils.tasks.made_text import posts
from utils.tasks.words import STOPWORDS, TRANSITIONS

columns = ("prompt",)  # what a row of --dataset must have
MIN_WORDS = 8
MAX_WORDS = 256


def train_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"train {seed}"))


def eval_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"eval {seed}"))


def formatters(item, agent):
    """The prompt of an agent, as a chat: agent 0, 1, 2, ... is to write about 16, 32, 64, ... words."""
    request = f"Summarise this post in about {16 * 2**agent} words."
    return [{"role": "user", "content": f"{item['prompt']}\n\n{request}"}]


def reward_func(*completions, items):
    """The team's reward for N lists of B summaries: B floats, the mean of pair_reward over neighbouring writers."""
    texts = list(completions)
    if len(texts) == 1:  # a single writer is compared with the post
        texts.append([item["prompt"] for item in items])
    rewards = []
    for chain in zip(*texts):
        pair_rewards = [pair_reward(short, long) for short, long in zip(chain, chain[1:])]
        rewards.append(sum(pair_rewards) / len(pair_rewards))
    return rewards


def pair_reward(short, long):
    """Points from 0 to 3 for two texts, the second longer and richer (arXiv 2508.04652); each level opens the next.

    0.5  both texts have 8 to 256 words
    1.0  the second is 1.6 to 3.2 times as long, in characters; linear to 0 at 1.1 and 5.0, outside of it stop
    0.5  it has at least 2 times as many different words; linear to 0 at 1.3, below it stop
    0.4  it has transition words: 40 % for one of the twelve categories, 5 % for each further one
    0.6  a common subject: the Jaccard index of their content words
    """
    short, long = str(short), str(long)  # a post may be a chat
    for text in (short, long):
        if not MIN_WORDS <= len(text.split()) <= MAX_WORDS:
            return 0.0
    reward = 0.5

    length_ratio = len(long) / len(short)
    length_points = min(1.0, (length_ratio - 1.1) / (1.6 - 1.1), (5.0 - length_ratio) / (5.0 - 3.2))
    if length_points < 0:
        return reward
    reward += length_points

    short_words = set(re.findall(r"\w+", short.lower()))
    long_words = set(re.findall(r"\w+", long.lower()))
    word_ratio = len(long_words) / max(1, len(short_words))
    word_points = min(1.0, (word_ratio - 1.3) / (2.0 - 1.3))
    if word_points < 0:
        return reward
    reward += 0.5 * word_points

    categories = 0
    for phrases in TRANSITIONS.values():
        if re.search(rf"\b({phrases})\b", long.lower()):
            categories += 1
    if categories > 0:
        reward += 0.4 * min(1.0, 0.4 + 0.05 * (categories - 1))

    short_content = short_words - STOPWORDS
    long_content = long_words - STOPWORDS
    union = short_content | long_content
    jaccard_index = len(short_content & long_content) / max(1, len(union))
    return reward + 0.6 * jaccard_index
