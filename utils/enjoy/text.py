"""What `show` found as text for a terminal."""

import itertools
import shutil
import textwrap

from utils.cli import one_line, printable
from utils.enjoy import TEAMS


def as_text(samples, width=None):
    """The samples, the two teams in columns."""
    width = width or min(160, shutil.get_terminal_size((120, 24)).columns)
    column = max(20, (width - 3) // 2)
    lines = []
    for k, sample in enumerate(samples, 1):
        lines += ["", f"--- item {k} of {len(samples)} ".ljust(width, "-")]
        lines += [line for fact in facts(sample["item"]) for line in textwrap.wrap(": ".join(fact), width)]
        for agent in range(len(sample["trained"]["completions"])):
            cells = [["", f"agent {agent}, {name}:"] for name in TEAMS]
            for cell, name in zip(cells, TEAMS):
                for turn, (prompt, text, reward) in enumerate(turns(sample[name], agent)):
                    cell += [f"> {one_line(prompt, column - 2)}"] if turn else []
                    text += f"  ({reward})" if reward else ""
                    cell += [line for part in text.split("\n") for line in textwrap.wrap(part, column)]
            for row in itertools.zip_longest(*cells, fillvalue=""):
                lines.append(" | ".join(text.ljust(column) for text in row).rstrip(" |"))
        lines += ["", *(f"{name}: {reward_text(sample[name])}" for name in TEAMS)]
    means, title = mean_rewards(samples)
    lines += ["", f"{title}: " + ", ".join(f"{name} {x:.3f}" for name, x in means.items())] if means else []
    return printable("\n".join(lines))


def mean_rewards(samples):
    """(Each team's mean reward over the samples in which both have one, by name, how many these are in words)."""
    pairs = [[sample[name]["reward"] for name in TEAMS] for sample in samples]
    pairs = [pair for pair in pairs if None not in pair]
    means = {name: sum(x) / len(x) for name, x in zip(TEAMS, zip(*pairs))}
    return means, f"mean reward over {len(pairs)} item{'s' * (len(pairs) != 1)}"


def reward_text(team):
    return f"no reward: {team['note']}" if team["note"] else f"reward {team['reward']:.3f}"


def turns(team, agent):
    """Prompt and response of an agent in each turn, and its reward, where the team's does not say it."""
    rewards = team["rewards"]
    texts = [f"reward {reward:.3f}" for reward in rewards[agent]]
    if team["note"] or len(rewards[agent]) == 1 and len({*map(tuple, rewards)}) == 1:
        texts = [""] * len(team["completions"][agent])
    return zip(team["prompts"][agent], team["completions"][agent], texts)


def facts(item):
    """What an item holds, as pairs of texts; numbers of six digits."""
    values = item if isinstance(item, dict) else {"item": item}
    return [(str(name), f"{x:.6g}" if isinstance(x, float) else str(x)) for name, x in values.items()]
