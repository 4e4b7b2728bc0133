"""Questions with known answers: any dataset of the package reasoning-gym, which makes them by rule and scores answers.

Every agent answers the question, and the last one's answer is the team's: it earns what the dataset's own scorer says,
from 0 to 1 a turn. In a later turn each agent reads what all wrote in the turn before, so the others can help the last.
An answer is the text between the last <answer> and </answer>, or without them all of it.

    python ippo_llm.py --task reasoning --max-new-tokens 8                        gcd, the default
    python ippo_llm.py --task reasoning --dataset leg_counting --num-turns 2      another of its hundred datasets

The datasets whose scorer would run the answer as Python within the training's own process are refused.
Source: Reasoning Gym (arXiv 2505.24760).
"""

import difflib
import functools
import re

import datasets

from utils.cli import UserError

FORM = "Give only the answer, or put it between <answer> and </answer>."
NEEDS = "--task reasoning takes the package reasoning-gym: pip install reasoning-gym==0.1.25"
# Scorers that pass the answer to eval or to sympy.parse_expr, which calls eval
UNSAFE = set(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion".split()
)


def check(num_agents, num_turns):
    if num_turns > 1 and num_agents == 1:
        raise ValueError(f"{num_turns} turns take 2 or more agents: a single one reads nothing new")


def optimum(num_agents, num_turns):
    return 1.0 * num_turns


def train_dataset(size, seed):
    return named_dataset("gcd", size, seed, "train")


def eval_dataset(size, seed):
    return named_dataset("gcd", size, seed, "eval")


def named_dataset(name, size, seed, split):
    """`size` items of reasoning-gym's dataset of that name; what it takes to make an item again is in the item.

    Raises UserError where the package or the dataset is missing.
    """
    place = {"name": name, "size": size, "seed": 1_000_000 * (2 * seed + (split == "eval"))}  # a seed for each item
    rows = []
    for index in range(size):
        example = entry(**place, index=index)
        rows.append({"question": example["question"], "answer": str(example["answer"]), **place, "index": index})
    return datasets.Dataset.from_list(rows)


@functools.cache
def source(name, size, seed):
    """reasoning-gym's dataset, which makes its items one by one and scores answers to them."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(NEEDS) from error
    if name not in DATASETS:
        close = ", ".join(difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.0))
        raise UserError(f"--dataset {name} is not in reasoning-gym; the closest of its {len(DATASETS)} are {close}")
    if name in UNSAFE:
        raise UserError(f"--dataset {name} is refused: its scorer runs the answer as Python, outside of any sandbox")
    return reasoning_gym.create_dataset(name, size=size, seed=seed)


@functools.cache
def entry(name, size, seed, index):
    return source(name, size, seed)[index]


conversation_template = [{"role": "user", "content": "{question}\n\n" + FORM}]


def reward_fn(completion, answer, question, name, size, seed, index):
    """The score of the last agent's answer, from 0 to 1."""
    example = entry(name=name, size=size, seed=seed, index=index)
    try:
        return float(source(name, size, seed).score_answer(answer_in(completion), example))
    except Exception:  # some scorers fail on what they can't read: it is wrong
        return 0.0


def answer_in(text):
    """What stands in the last <answer>, or else all of it; what a model thinks, up to </think>, is not read."""
    text = text.rpartition("</think>")[2]
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return (answers[-1] if answers else text).strip()


def external_transition(agent_completions, num_agents, item):
    """Each agent reads the question again, with what everybody wrote; nobody learns who was right."""
    prompts = []
    for agent in range(num_agents):
        names = ["You" if other == agent else f"Agent {other}" for other in range(num_agents)]
        answers = "\n".join(f"{name} said: {text.strip()}" for name, text in zip(names, agent_completions))
        prompts.append([{"role": "user", "content": f"{item['question']}\n\n{answers}\n\n{FORM}"}])
    return prompts
