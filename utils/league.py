"""Who beats whom: each run in each seat of a game, against each other run, and against the game's random player,
where it has one.

    python -m utils.league RUN [RUN ...]                    200 matches of each in each seat, as a table
    python -m utils.league RUN RUN --matches 1000

A row is a player in a seat. Under each other player, which has all other seats there, stand the mean of what the row's
player earned in a match, and the half of its 95 % interval; under `all` the mean of these means. A run plays with its
newest weights and its own sampling, an agent in the seat in which it learned; the runs may be of different models and
scripts. An illegal answer costs what it does in training. The same command prints the same again.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy
import tyro
from pydantic import Field, NonNegativeInt
from tqdm import tqdm

from utils import distributed, envs
from utils.cli import UserError, command_line, flags, one_line, printable
from utils.enjoy import import_script, is_of_project, read_config
from utils.envs.exact import seats_of
from utils.envs.seats import RANDOM, has_random_player
from utils.load import load
from utils.matches import AgentPlayer, RandomPlayer, play_matches


@flags
class LeagueArgs:
    """Who plays, and how often."""

    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # folders of runs of one game
    matches: Annotated[int, Field(ge=2, le=envs.MOST_GAMES)] = 200  # of each player in each seat against each other
    seed: NonNegativeInt = 1  # of the matches' chance, and of the sampling
    script: str | None = None  # the runs' script, where it is none of the project's: it is imported, and so run


@flags
class Args(LeagueArgs):
    """All flags."""


@dataclass
class Side:
    """A run that takes part: its agent in each seat, its flags and its script."""

    name: str
    seats: list
    args: Any
    module: Any
    is_sampling: bool = False  # whether it plays within models.sampling


@dataclass
class Result:
    """What a player earned in a seat against another one in all other seats."""

    mean: float
    half: float | None  # of the 95 % interval of the mean; None: of one match


def load_sides(runs, script=None):
    """A Side for each folder of a run; all are of one game. Raises UserError."""
    if not runs:
        raise UserError("it takes the folders of runs: python -m utils.league RUN [RUN ...]")
    places = [os.path.realpath(run) for run in runs]
    names = [Path(place).name for place in places]
    sides = []
    first = None
    for k, run in enumerate(runs):
        if places[k] in places[:k]:
            raise UserError(f"{run} is given twice")
        config = read_config(run)
        env, num_agents = (config["args"].get(name) for name in ("env", "num_agents"))
        if not envs.of_library(env):
            games = ", ".join(f"{library}:GAME" for library in envs.LIBRARIES)
            raise UserError(f"{run} is no run of a game of several seats by name, --env {games}")
        first = first or (run, env, num_agents)
        if (env, num_agents) != first[1:]:
            there = f"{first[0]} of --env {first[1]} --num-agents {first[2]}"
            raise UserError(f"{run} is a run of --env {one_line(env, 80)} --num-agents {num_agents}, and {there}")
        own = None if is_of_project(Path(str(config.get("script")))) else script
        agents, args = load(run, module := import_script(run, config, own))
        name = one_line(run if names.count(names[k]) > 1 or names[k] == RANDOM else names[k], 80)
        if name in [RANDOM, *(side.name for side in sides)]:  # a run of that name, or long names, whose ends are cut
            name = f"{name[:70]} ({k + 1})"
        sides.append(Side(name, seats_of(agents, num_agents), args, module))
    if script and os.path.realpath(script) not in [os.path.realpath(side.module.__file__) for side in sides]:
        raise UserError(f"--script {script} has no effect: all runs are of the project's scripts")
    return sides


def play_league(runs, matches=200, seed=1, script=None):
    """What each player earns in each seat against each other one: {(player, seat, opponent): Result}.

    Raises UserError for runs of different games, and for what is no run of a game of several seats.
    """
    sides = {side.name: side for side in load_sides(runs, script)}
    args = next(iter(sides.values())).args
    args.num_turns = max(side.args.num_turns for side in sides.values())
    args.train_size, args.eval_size, args.seed = None, matches, seed
    game, _ = envs.load_env(args.env, args)
    _, items = envs.game_seeds(args, 1)
    if has_random_player(game):
        sides[RANDOM] = None
    players = [*sides]
    if len(players) == 1:
        raise UserError(f"--env {args.env} has no random player: it takes two runs or more")

    cells = [
        (own, seat, other) for own in players for seat in range(args.num_agents) for other in players if own != other
    ]
    earned = {}  # by who has each seat: of two seats both are played at once
    results = {}
    for own, seat, other in tqdm(cells, unit="pair", leave=False, dynamic_ncols=True):
        seating = tuple(own if k == seat else other for k in range(args.num_agents))
        if seating not in earned:
            earned[seating] = play_sides([sides[name] for name in seating], game, items, args, seed)
        results[own, seat, other] = result_of(earned[seating][:, seat])
    return results


def play_sides(seating, game, items, args, seed):
    """What each of N seats earns in a match of each item, [matches, N]; a seat has a Side, or None, a random player."""
    generator = distributed.generator(seed)
    players = []
    for seat, side in enumerate(seating):
        if side is None:
            players.append(RandomPlayer(f"{seed + 1_000_003 * distributed.rank()} {seat}"))
        else:
            players.append(AgentPlayer(side.seats[seat], side.args, side.module, generator, side.is_sampling))
    played = play_matches(players, game.make_env(None, items, args), len(items))
    return numpy.array([match.earned for match in played]).reshape(len(items), len(seating))


def result_of(rewards):
    """The Result of what was earned in matches."""
    half = 1.96 * float(rewards.std(ddof=1)) / len(rewards) ** 0.5 if len(rewards) > 1 else None
    return Result(float(rewards.mean()), half)


def as_table(results):
    """The results as text in columns."""
    players = list(dict.fromkeys(own for own, _, _ in results))
    num_seats = 1 + max(seat for _, seat, _ in results)
    rows = [["player", "seat", *players, "all"]]
    for own in players:
        for seat in range(num_seats):
            found = [results.get((own, seat, other)) for other in players]
            cells = ["-" if each is None else f"{each.mean:.3f} ± {each.half:.3f}" for each in found]
            means = [each.mean for each in found if each is not None]
            rows.append([own, str(seat), *cells, f"{sum(means) / len(means):.3f}"])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for name, *cells in rows:
        lines.append("  ".join([name.ljust(widths[0]), *[cell.rjust(w) for cell, w in zip(cells, widths[1:])]]))
    return printable("\n".join(lines))


def main(args):
    """Play, and print the table; returns the results."""
    results = play_league(args.runs, args.matches, args.seed, args.script)
    print(f"what a player earns in a match, in the mean over {args.matches}, and half of the 95 % interval:\n")
    print(as_table(results))
    return results


if __name__ == "__main__":
    command_line(main, Args, __doc__)
