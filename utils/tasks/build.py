"""N builders fill the cells of a picture together, turn by turn, each with a block of its own kind.

The picture is five of the nine cells of a grid, which are numbered row by row from 1 to 9 and hang together. All read
which; a builder's words are numbers, each a cell that gets its block, and any other word is left out. Builder 0 builds
first, builder 1 may build over that, and so on; none sees what another builds. A world is worth

    2 covered / 5 - 1.5 extra / 4 - same / pairs - 0.25 missing,

with `covered` cells of the picture and `extra` other cells that have a block, `pairs` of neighbouring blocks, side by
side, of which `same` are of one kind, and `missing` builders without a block. So the best that there is, 2, takes
blocks that alternate like a chessboard's fields, and more than one builder. After StrBuild (arXiv 2601.21972), whose
grid is larger, and whose builders have two kinds each. In StrBuild every turn pays what its world is worth, and begins
with an empty one; here, which of both is a dataset's name:

    every-kept     every turn pays what the world is worth, and builds on what is there (without --dataset)
    every-empty    every turn pays, and begins with an empty world
    last-kept      only turn --num-turns pays, and all that was built is there

    python ippo_llm.py --task build --num-turns 4 --max-new-tokens 4 --dataset last-kept

Optimal play, of one number in an answer, is found by search over all worlds; several in one may earn more. It needs no
cell that is not of the picture, for a builder may fill a cell again. `iou`, the cells of the picture that are filled
among those of both, is a metric.
"""

import functools
import itertools
import random

import datasets

from utils.cli import UserError

SIZE = 3
CELLS = range(1, SIZE * SIZE + 1)
NUM_CELLS = 5  # of a picture
VARIANTS = ("every-kept", "every-empty", "last-kept")
NEIGHBOURS = [(cell, cell + 1) for cell in CELLS if cell % SIZE] + [(cell, cell + SIZE) for cell in CELLS[:-SIZE]]
WORTH = {"covered": 2.0, "extra": 1.5, "same": 1.0, "missing": 0.25}


# --- Pictures and worlds ----------------------------------------------------------------------------------------------


def hangs_together(cells):
    """Whether each of the cells is reached from the first, from neighbour to neighbour."""
    reached = {cells[0]}
    for _ in cells:
        for one, two in NEIGHBOURS:
            if one in cells and two in cells and {one, two} & reached:
                reached |= {one, two}
    return len(reached) == len(cells)


PICTURES = [cells for cells in itertools.combinations(CELLS, NUM_CELLS) if hangs_together(cells)]


def worth(world, picture, num_agents):
    """What a world, {cell: builder}, is worth."""
    pairs = [(world[one], world[two]) for one, two in NEIGHBOURS if one in world and two in world]
    covered = len(world.keys() & set(picture)) / len(picture)
    extra = len(world.keys() - set(picture)) / (len(CELLS) - len(picture))
    same = sum(one == two for one, two in pairs) / max(1, len(pairs))
    missing = num_agents - len(set(world.values()))
    return WORTH["covered"] * covered - WORTH["extra"] * extra - WORTH["same"] * same - WORTH["missing"] * missing


def build(world, completions):
    """The world, {cell: builder}, with the blocks that builders 0, 1, 2, ... add to it in a turn."""
    world = dict(world)
    for agent, completion in enumerate(completions):
        for line in completion.split():
            if line.isdecimal() and len(line) == 1 and int(line) in CELLS:
                world[int(line)] = agent
    return world


def last_world(turns, variant):
    """The world after the last of an episode's turns, each a list of N completions."""
    world = {}
    for completions in turns[-1:] if variant == "every-empty" else turns:
        world = build(world, completions)
    return world


def intersection_over_union(world, picture):
    return len(world.keys() & set(picture)) / len(world.keys() | set(picture))


# --- The task ---------------------------------------------------------------------------------------------------------


def train_dataset(size, seed):
    return named_dataset(VARIANTS[0], size, seed, "train")


def eval_dataset(size, seed):
    return named_dataset(VARIANTS[0], size, seed, "eval")


def named_dataset(name, size, seed, split):
    """Pictures in a random order, again and again; every sixth is held out."""
    if name not in VARIANTS:
        raise UserError(f"--task build takes --dataset {', '.join(VARIANTS)}, got {name}")
    pictures = [cells for k, cells in enumerate(PICTURES) if (k % 6 == 5) == (split == "eval")]
    rng = random.Random(f"build {split} {seed}")
    order = []
    while len(order) < size:
        order += rng.sample(pictures, len(pictures))
    rows = [{"picture": list(cells), "variant": name} for cells in order[:size]]
    return datasets.Dataset.from_list(rows)


def formatters(item):
    cells = " ".join(map(str, item["picture"]))
    return [{"role": "user", "content": f"We each say a number from 1 to 9, of {cells}. Say yours."}]


def external_transition(agent_completions, prompt_history_per_agent):
    """Each builder's own lines so far, and the call for more."""
    next_prompts = []
    for prompts, completion in zip(prompt_history_per_agent, agent_completions):
        response = {"role": "assistant", "content": completion.strip()}
        next_prompts.append([*prompts[-1], response, {"role": "user", "content": "Say another."}])
    return next_prompts


def reward_func(*completions, items, turns, turn, num_turns):
    rewards = []
    for k, item in enumerate(items):
        played = [*zip(*(histories[k] for histories in turns))]
        pays = item["variant"] != "last-kept" or turn + 1 == num_turns
        world = last_world(played, item["variant"])
        rewards.append(worth(world, item["picture"], len(completions)) if pays else 0.0)
    return rewards


def metrics_callback(rollouts, items):
    """The mean intersection over union of the last world with the picture."""
    shares = []
    for k, item in enumerate(items):
        turns = [*zip(*(rollout.answers[k] for rollout in rollouts))]
        shares.append(intersection_over_union(last_world(turns, item["variant"]), item["picture"]))
    return {"iou": sum(shares) / len(shares)}


# --- Optimal play -----------------------------------------------------------------------------------------------------


@functools.cache
def best_worth(picture, world, num_agents, num_turns, variant):
    """What is paid from a world on, kept in order as pairs (cell, builder), in so many turns of optimal play."""
    best = -float("inf")
    for cells in itertools.product(picture, repeat=num_agents):
        new = build({} if variant == "every-empty" else dict(world), map(str, cells))
        pays = variant != "last-kept" or num_turns == 1
        value = worth(new, picture, num_agents) if pays else 0.0
        if num_turns > 1:
            rest = () if variant == "every-empty" else tuple(sorted(new.items()))
            value += best_worth(picture, rest, num_agents, num_turns - 1, variant)
        best = max(best, value)
    return best


def optimum(num_agents, num_turns, items):
    """The expected reward of an episode of optimal play, of one number a turn; None where it takes minutes to find."""
    if num_agents == 3 and num_turns > 2 and any(item["variant"] != "every-empty" for item in items):
        return None
    values = {}
    for item in items:
        key = (tuple(item["picture"]), item["variant"])
        if key not in values:
            values[key] = best_worth(key[0], (), num_agents, num_turns, key[1])
    return sum(values[tuple(item["picture"]), item["variant"]] for item in items) / len(items)


def check(num_agents, num_turns):
    if num_agents > 3:
        raise ValueError(f"build takes 1 to 3 agents, got {num_agents}")
