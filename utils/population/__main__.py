"""Breed runs: a population learns side by side, and after each generation its losers go on as forks of its winners.

    python -m utils.population --command "python ppo_llm.py" --size 4 --generation 25 \\
        --mutate actor_learning_rate=1e-4:1e-2

Population-based training (arXiv 1711.09846), by Ray Tune's scheduler; pip install -r requirements-population.txt. The
hyperparameters of the first generation are drawn from the ranges of --mutate, log-uniform. After a generation, when all
members have done its updates, the worst fork the best (--fork), with values that are drawn anew, or 0.8 or 1.2 times
those of the best. <output-dir>/population.json says who descended from whom, with fitness and hyperparameters of each,
population.png shows it, and generation_<g>/member_<k>/ is a run as any other, its log beside it. Stopped or killed,
the same command goes on.
"""

import math
import shutil
import sys
from dataclasses import field
from pathlib import Path
from random import Random
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from utils.benchmark import known_flags, words_of
from utils.cli import (
    ALIASES,
    Fraction,
    Settings,
    Stopped,
    UserError,
    check_needs,
    command_line,
    flag_name,
    flags,
    not_with,
    one_line,
)
from utils.files import read_json, read_rows
from utils.population.folder import Population
from utils.run.folder import OF_FOLDER, OF_LENGTH, OF_MACHINE
from utils.run.fork import OF_AGENTS, OF_UPDATE
from utils.run.report import EVAL_REWARD

OWN = ("--fork", "--pause-at")  # flags that a run gets from here, beside those of utils.benchmark
# Flags that a fork may not change, or that change how long a run is or what its fitness is a mean of
FIXED = {*OF_AGENTS, *OF_UPDATE, *OF_LENGTH}
FIXED |= {*"seed train_size eval_size eval_interval max_prompt_length".split()}


@flags
class PopulationArgs:
    """What is bred, how, and where."""

    command: str = ""  # required: a script and its flags but for seed, folder and what is mutated: "python ppo_llm.py"
    mutate: Settings = field(default_factory=dict)  # required: FLAG=LOW:HIGH, ranges of the script's flags
    size: PositiveInt = 4  # members
    generation: PositiveInt = 25  # updates of a generation
    metric: str = EVAL_REWARD  # column of metrics.csv, the more the better
    quantile_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.25  # share of losers, and of winners
    resample_probability: Fraction = 0.25  # how often a value is drawn anew
    seed: NonNegativeInt = 1  # of all members' runs, and of what is drawn
    workers: PositiveInt = not_with("address", default=1)  # members at a time, of one thread each
    address: str | None = None  # of a Ray cluster, in the place of --workers, or auto
    gpus: NonNegativeFloat | None = None  # GPUs of each member; none: one, or a part of it where there are fewer
    keep_generations: PositiveInt = 2  # the newest ones whose agents and checkpoints stay
    output_dir: str | None = None  # folder of the population; none: runs/population/<script>__<seed>


@flags
class Args(PopulationArgs):
    """All flags."""


# --- What is asked ----------------------------------------------------------------------------------------------------


def ranges_of(mutate, known):
    """{name: (low, high, whether whole numbers)} of --mutate, for a script with these flags. Raises UserError."""
    if not mutate:
        raise UserError("--mutate is missing; it takes FLAG=LOW:HIGH, as actor_learning_rate=1e-4:1e-2")
    ranges = {}
    for key, text in mutate.items():
        name = key.strip("-").replace("-", "_")
        if not known.get(flag_name(name)):
            name = ALIASES.get(name, name)
        flag = flag_name(name)
        if flag not in known:
            raise UserError(f"--mutate {key}: the script has no {flag}")
        if name in ranges:
            raise UserError(f"--mutate {key}: {flag} has a range already")
        if known[flag] not in ("INT", "FLOAT"):
            raise UserError(f"--mutate {key}: {flag} is not a number")
        if name in OF_FOLDER | OF_MACHINE:
            raise UserError(f"--mutate {key}: {flag} changes nothing of what a run learns")
        if name in FIXED:
            raise UserError(f"--mutate {key}: {flag} can't differ between a run and its fork, or changes its length")
        number = int if known[flag] == "INT" else float
        takes = f"LOW:HIGH, {'whole ' if number is int else ''}numbers above 0, the second one larger"
        try:
            low, high = (number(part) for part in str(text).split(":"))
        except ValueError:
            low = high = 0
        if not 0 < low < high < math.inf:
            raise UserError(f"--mutate {key} takes {takes}, got {one_line(text, 80)}")
        ranges[name] = (low, high, number is int)
    return ranges


def check_size(args):
    """Raise UserError where there would be no loser or no winner."""
    least = math.ceil(1 / args.quantile_fraction)
    if args.size < least:
        share = f"--quantile-fraction {args.quantile_fraction}"
        raise UserError(f"--size takes at least {least} with {share}: one is to lose, one to win; got {args.size}")


# --- Its life ---------------------------------------------------------------------------------------------------------


def live(population, words, breeding):
    """Let the population play what is left of its generations. Raises UserError."""
    args = population.args
    first = max(1, population.newest())
    started_here = breeding.connect(args.address, args.workers)
    try:
        with population.handling_signals():
            gpus = args.gpus
            if gpus is None:
                gpus = breeding.gpus_of(args.size if args.address else args.workers)
            if not args.address:  # a cluster may grow
                breeding.check_gpus(gpus)
            plan = {"folder": str(population.folder), "cwd": str(Path.cwd()), "python": sys.executable, "words": words}
            plan |= {"generation": args.generation, "num_updates": population.num_updates, "seed": args.seed}
            plan |= {"metric": args.metric, "first": first}
            plan["records"] = {key: record for key, record in population.records.items() if key[0] >= first}
            values = values_of(population, first, breeding)
            if population.num_updates is None:
                begin(population, plan, values[0], gpus, breeding)
                plan["num_updates"] = population.num_updates
            shutil.rmtree(population.folder / "tune", ignore_errors=True)  # Ray's own, of an earlier start
            breeding.breed(
                plan,
                values,
                population.ranges,
                args,
                gpus,
                population.add,
                lambda: bool(population.signals or population.error),
            )
            shutil.rmtree(population.folder / "tune", ignore_errors=True)
    finally:
        if started_here:
            breeding.ray.shutdown()
    if population.error:
        raise population.error


def values_of(population, generation, breeding):
    """The hyperparameters of each member in a generation: as recorded, or, of the first, drawn."""
    values = []
    for member in range(population.args.size):
        rng = Random(f"{population.args.seed} 1 {member}")
        drawn = {name: breeding.draw(rng, *limits) for name, limits in population.ranges.items()}
        record = population.records.get((generation, member))
        values.append(record["hyperparameters"] if record else drawn)
    return values


def begin(population, plan, values, gpus, breeding):
    """Let the first member make its first update, which shows how long runs are, and what is wrong with the command.

    Raises UserError, and leaves nothing then.
    """
    code, error = breeding.first_update(plan, values, gpus)
    if code is None:
        raise Stopped("nothing was begun; the same command begins", population.signals[0][1])
    folder = population.folder / breeding.folder_of(1, 0)
    try:
        if code == UserError.exit_code or (code and not (folder / "config.json").is_file()):
            raise UserError(f"--command: {error}")
        population.num_updates = read_json(folder / "config.json")["num_updates"]
        check_length(population.args, population.num_updates)
        if not code:  # what else went wrong is a matter of that member
            check_metric(population.args, folder)
    except UserError:
        shutil.rmtree(population.folder, ignore_errors=True)
        raise
    population.write()


def check_length(args, num_updates):
    if args.generation > num_updates:
        raise UserError(f"--generation {args.generation} is longer than a run, of {num_updates} updates")


def check_metric(args, folder):
    first = read_rows(folder / "metrics.csv")[0]
    if args.metric not in first:
        raise UserError(f"--metric {args.metric} is no column of the runs' metrics.csv: {', '.join(first)}")
    config = read_json(folder / "config.json")
    interval = config.get("args", {}).get("eval_interval") or 0
    if args.metric.startswith("eval/") and interval > args.generation < config["num_updates"]:
        raise UserError(f"--eval-interval {interval} passes over generations: it takes --generation {interval} or more")
    if args.metric == EVAL_REWARD and first[EVAL_REWARD] is None:
        raise UserError(f"--metric {EVAL_REWARD}: the runs evaluate nothing (--eval-interval 0, or no held-out items)")


def outcome(population):
    """The members of the last generation, the best first, as a table, and who is best."""
    names = [*population.ranges]
    lines = [f"| member | fitness | {' | '.join(names)} | line of descent |", "| --- " * (3 + len(names)) + "|"]
    last = [population.records[population.newest(), member] for member in range(population.args.size)]
    for record in sorted(last, key=lambda record: math.inf if record["fitness"] is None else -record["fitness"]):
        line = " ".join(str(each["member"]) for each in reversed(population.ancestors(record)))
        shown = "lost" if record["fitness"] is None else f"{record['fitness']:.4g}"
        values = [str(record["hyperparameters"][name]) for name in names]
        lines.append(f"| {record['member']} | {shown} | {' | '.join(values)} | {line} |")
    best = population.best()
    return "\n".join(lines) + f"\n\nthe best is member {best['member']}, in {population.folder / best['folder']}"


def main(args):
    """Breed what the flags say, or go on with it, and say who is best. Raises UserError."""
    check_needs(args)
    check_size(args)
    words, script = words_of(args.command, OWN)
    known = known_flags(words, (*OWN, "--seed", "--output-dir"))
    ranges = ranges_of(args.mutate, known)
    words_of(args.command, [flag_name(name) for name in ranges])
    words += ["--seed", str(args.seed)]
    names = {word.split("=")[0].replace("_", "-") for word in words}
    if "--eval-interval" in known and not names & {"--eval-interval", "--evaluation-interval"}:
        words += ["--eval-interval", str(args.generation)]
    try:
        from utils.population import breeding
    except ImportError as error:
        needs = "pip install -r requirements-population.txt"
        raise UserError(f"populations take Ray Tune, which is not here ({one_line(error)}): {needs}") from error
    population = Population(args, script, ranges)
    try:
        population.open()
        if population.num_updates is None or population.newest() < population.generations:
            live(population, words, breeding)
        print(outcome(population))
    finally:
        population.close()  # Ray keeps what it was given, and so the population


if __name__ == "__main__":
    command_line(main, Args, __doc__)
