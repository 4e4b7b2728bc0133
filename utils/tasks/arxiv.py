"""Two writers expand a paper's abstract: agent 0 its background and motivation, agent 1 its method and implications.

Neither sees the other's text. The team earns up to 3 points, each level opening the next:

    0.5  both texts have 128 to 256 words; else stop
    1.0  the second is 1.3 to 1.6 times as long in characters; linear to 0 at 0.8 and 2.0, outside stop
    0.5  it has 0.7 to 1.3 times as many different words; linear to 0 at 0.5 and 1.7, outside stop
    0.4  transition words: 0.4 of it for one of the twelve categories in either text, 0.05 for each further one
    0.6  a common subject: the Jaccard index of their content words; 0.23 earns all of it

Rule and numbers: arXiv 2508.04652 and CoMLRL's code for it. The made abstracts are shorter than those, of 100 to 300
tokens, for which it was meant, so texts about them may have 16 words.

    python ippo_llm.py --task arxiv                                        made abstracts
    python ippo_llm.py --task arxiv --dataset OpenMLRL/arXiv_abstract --max-new-tokens 400      the hub's
"""

import random
import re

import datasets

from utils.tasks.words import STOPWORDS, TRANSITIONS

columns = ("abstract_text",)
MIN_WORDS = 128
MAX_WORDS = 256
PARTS = ["the background and the motivation", "the method and its implications"]
LENGTHS = [1.25, 1.8]  # words that an agent is to write, as a multiple of the least
FIELDS = {  # what is studied, what is wrong with it, where it is tried
    "language models": ("they invent facts", "question answering"),
    "teams of robots": ("they get into each other's way", "warehouses"),
    "weather forecasts": ("they miss local storms", "coastal towns"),
    "protein folding": ("rare shapes are predicted badly", "enzymes"),
    "traffic lights": ("they do not adapt to crowds", "large cities"),
    "solar cells": ("they wear out in heat", "desert plants"),
}
METHODS = {
    "a graph neural network": "it shares what neighbours know",
    "a Bayesian model": "it knows how sure it is",
    "reinforcement learning": "it learns from rewards alone",
    "a simple search": "it needs no training data",
    "a mixture of experts": "each expert sees a part of the problem",
}
SENTENCES = [  # one of each row; the second and the last row may be left out
    ["Much work is done on {field}, but {flaw}.", "Although {field} are widely used, {flaw}."],
    ["This is costly in {place}.", "Earlier work on {place} did not solve this.", ""],
    ["We study {method} for this problem, because {reason}.", "We propose {method}: {reason}."],
    ["It is compared with {n} other methods in {place}.", "We test it in {place} on {n} benchmarks."],
    ["It reduces the error by {p} percent.", "It is {n} times as fast and loses no accuracy."],
    ["As a result, {field} can be trusted more.", "This also helps {other}.", ""],
]


def check(num_agents, num_turns):
    if num_agents != 2:
        raise ValueError(f"it takes 2 agents, one for each part of the text, got {num_agents}")


def train_dataset(size, seed):
    return abstracts(size, f"train {seed}")


def eval_dataset(size, seed):
    return abstracts(size, f"eval {seed}")


def abstracts(size, seed):
    """`size` abstracts of 4 to 6 sentences, composed by rule; the same for the same seed."""
    rng = random.Random(f"abstracts {seed}")
    rows = []
    for _ in range(size):
        field, other = rng.sample(list(FIELDS), 2)
        method, reason = rng.choice(list(METHODS.items()))
        flaw, place = FIELDS[field]
        slots = {"field": field, "flaw": flaw, "place": place, "other": other, "method": method, "reason": reason}
        slots["n"] = rng.randint(2, 9)
        slots["p"] = rng.randint(10, 60)
        sentences = [rng.choice(row).format(**slots) for row in SENTENCES]
        rows.append({"abstract_text": " ".join(filter(None, sentences)), "min_words": 16})
    return datasets.Dataset.from_list(rows)


def item_of(row):
    text = row["abstract_text"]  # a text, or its sentences
    return {"abstract_text": text if isinstance(text, str) else " ".join(text), "min_words": MIN_WORDS}


def formatters(item, agent):
    """Agent 0 is to write 1.25 times as many words as there have to be, agent 1 1.8 times as many."""
    words = round(item["min_words"] * LENGTHS[agent])
    request = f"Write {PARTS[agent]} of this paper in about {words} words. Another writer adds {PARTS[1 - agent]}."
    return [{"role": "user", "content": f"{item['abstract_text']}\n\n{request}"}]


def reward_func(first, second, items):
    return [pair_reward(*texts, item["min_words"]) for *texts, item in zip(first, second, items)]


def pair_reward(first, second, min_words):
    """Points from 0 to 3 for the two parts; each level opens the next."""
    for text in (first, second):
        if not min_words <= len(text.split()) <= MAX_WORDS:
            return 0.0
    reward = 0.5

    length_points = band(len(second) / len(first), 0.8, 1.3, 1.6, 2.0)
    if length_points < 0:
        return reward
    reward += length_points

    first_words = set(re.findall(r"\w+", first.lower()))
    second_words = set(re.findall(r"\w+", second.lower()))
    word_points = band(len(second_words) / max(1, len(first_words)), 0.5, 0.7, 1.3, 1.7)
    if word_points < 0:
        return reward
    reward += 0.5 * word_points

    both = f"{first}\n{second}".lower()
    categories = 0
    for phrases in TRANSITIONS.values():
        if re.search(rf"\b({phrases})\b", both):
            categories += 1
    if categories > 0:
        reward += 0.4 * min(1.0, 0.4 + 0.05 * (categories - 1))

    first_content = first_words - STOPWORDS
    second_content = second_words - STOPWORDS
    union = first_content | second_content
    jaccard_index = len(first_content & second_content) / max(1, len(union))
    return reward + 0.6 * min(1.0, jaccard_index / 0.23)


def band(x, least, low, high, most):
    """1 from low to high, linear to 0 at least and at most, below 0 outside."""
    return min(1.0, (x - least) / (low - least), (most - x) / (most - high))
