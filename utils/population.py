"""Breed runs: a population learns side by side, and after each generation its losers go on as forks of its winners.

    python -m utils.population --command "python ppo_llm.py" --size 4 --generation 25 --mutate lr_actor=1e-4:1e-2

Population-based training (arXiv 1711.09846), by Ray Tune's scheduler; pip install -r requirements-population.txt. The
hyperparameters of the first generation are drawn from the ranges of --mutate, log-uniform. After a generation, when all
members have done its updates, the worst fork the best (--fork), with values that are drawn anew, or 0.8 or 1.2 times
those of the best. <output-dir>/population.json says who descended from whom, with fitness and hyperparameters of each,
population.png shows it, and generation_<g>/member_<k>/ is a run as any other, its log beside it. Stopped or killed,
the same command goes on.
"""

import contextlib
import json
import math
import shutil
import signal
import sys
import time
from dataclasses import field
from pathlib import Path
from random import Random
from typing import Annotated

from matplotlib.figure import Figure
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from utils.benchmark import Failed, known_flags, words_of
from utils.cli import Settings, Stopped, UserError, check_needs, command_line, flag_name, flags, not_with, one_line
from utils.files import lock, read_json, write_whole, writing
from utils.run.report import COLORS

OWN = ("--fork", "--pause-at")  # flags that a run gets from here, beside those of utils.benchmark
EVALUATIONS = ("--eval-interval", "--evaluation-interval")
FIXED = """seed train_size max_prompt_length num_agents lora_rank lora_alpha lora_dropout value_head_hidden_dim
critic_value_head_hidden_dim rollout_buffer_size num_generations num_train_epochs max_steps save_interval
keep_checkpoints""".split()  # numbers that a fork may not change, or that change how long a run is or how it is kept


@flags
class PopulationArgs:
    """What is bred, how, and where."""

    command: str = ""  # required: a script and its flags but for seed, folder and what is mutated: "python ppo_llm.py"
    mutate: Settings = field(default_factory=dict)  # required: FLAG=LOW:HIGH, ranges of the script's flags
    size: PositiveInt = 4  # members
    generation: PositiveInt = 25  # updates of a generation
    metric: str | None = None  # column of metrics.csv, the more the better; none: the reward on held-out items
    quantile_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.25  # share of losers, and of winners
    resample_probability: Annotated[float, Field(ge=0, le=1)] = 0.25  # how often a value is drawn anew
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
        raise UserError("--mutate is missing; it takes FLAG=LOW:HIGH, as lr_actor=1e-4:1e-2")
    ranges = {}
    for key, text in mutate.items():
        name = key.strip("-").replace("-", "_")
        flag = flag_name(name)
        if flag not in known:
            raise UserError(f"--mutate {key}: the script has no {flag}")
        if known[flag] not in ("INT", "FLOAT"):
            raise UserError(f"--mutate {key}: {flag} is not a number")
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


# --- The population ---------------------------------------------------------------------------------------------------


class Population:
    """The folder of a population, and what is in its population.json."""

    def __init__(self, args, script, ranges):
        self.args = args
        self.ranges = ranges
        self.folder = Path(args.output_dir or f"runs/population/{Path(script).stem}__{args.seed}").absolute()
        self.settings = {
            name: getattr(args, name)
            for name in "command size generation mutate metric quantile_fraction resample_probability seed".split()
        }
        self.num_updates = None
        self.records = {}  # (generation, member): what came of it
        self.error = None  # that ends it
        self.lock = None  # of the folder
        self.signals = []  # (when, number)

    # --- Its file ---

    def open(self):
        """Take the folder, and what an earlier start left there. Raises UserError where it is something else's."""
        path = self.folder / "population.json"
        if self.folder.exists() and not path.is_file() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UserError(f"--output-dir takes a new folder, or a population's, and {self.folder} is another thing")
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = lock(self.folder)
            (self.folder / "stop").unlink(missing_ok=True)
        if path.is_file():
            self.read(read_json(path), path)
        else:
            self.write()

    def close(self):
        """Give the folder back."""
        if self.lock:
            self.lock.close()

    def read(self, content, path):
        differing = []
        for name, here in self.settings.items():
            if content.get(name) != here:
                differing.append(f"{flag_name(name)} {content.get(name)} there, {here} here")
        if differing:
            raise UserError(f"--output-dir {self.folder} is another population's: {'; '.join(differing)}")
        try:
            self.num_updates = content["num_updates"]
            for record in content["members"]:
                self.records[record["generation"], record["member"]] = record
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is no population's: {type(error).__name__} {error}") from error
        if self.records and self.best() is None:  # all were lost; what they lacked may be mended
            newest = self.newest()
            self.records = {key: record for key, record in self.records.items() if key[0] != newest}

    def write(self):
        best = self.best()
        content = self.settings | {"num_updates": self.num_updates, "best": best and best["folder"]}
        head = json.dumps(content, indent=1)[:-2]
        lines = [json.dumps(record) for _, record in sorted(self.records.items())]
        with writing(self.folder):
            write_whole(self.folder / "population.json", head + ',\n "members": [\n' + ",\n".join(lines) + "\n]}\n")

    # --- What came of it ---

    def is_complete(self, generation):
        return all((generation, member) in self.records for member in range(self.args.size))

    def newest(self):
        """The newest generation that is complete; 0: none."""
        return max((g for g, _ in self.records if self.is_complete(g)), default=0)

    @property
    def generations(self):
        return math.ceil(self.num_updates / self.args.generation)

    def best(self):
        """The record of the best member of the newest complete generation, or None."""
        there = [r for (g, _), r in self.records.items() if g == self.newest() and r["fitness"] is not None]
        return max(there, key=lambda record: record["fitness"]) if there else None

    def add(self, record):
        """Keep a record, and say it; after a generation, draw it, and remove what no other one is forked from."""
        key = (record["generation"], record["member"])
        if key in self.records:
            return
        self.records[key] = record
        print(self.line(record), flush=True)
        try:
            self.write()
            if self.is_complete(record["generation"]):
                self.draw()
                self.trim(record["generation"] - self.args.keep_generations)
                if self.best() is None:
                    self.error = Failed(f"no member of generation {record['generation']} is left: {record['error']}")
        except UserError as error:
            self.error = error

    def line(self, record):
        values = ", ".join(f"{name} {value}" for name, value in record["hyperparameters"].items())
        where = f"generation {record['generation']} of {self.generations}, member {record['member']}"
        if record["parent"] not in (None, record["member"]):
            where += f", fork of {record['parent']}"
        if record["fitness"] is None:
            return f"{where}: LOST: {record['error']} ({values}; all in {record['folder']}.log)"
        return f"{where}: {record['fitness']:.4g} ({values}; {record['seconds']:.0f} s)"

    def trim(self, generation):
        """Remove agents and checkpoints of a generation and of those before."""
        for k in range(1, generation + 1):
            for pattern in ("checkpoints", "agent_*", "critic", "base"):
                for path in self.folder.glob(f"generation_{k:03d}/member_*/{pattern}"):
                    with writing(self.folder):
                        shutil.rmtree(path)

    def draw(self):
        """population.png: fitness and hyperparameters by generation, a line from each parent to its child."""
        figure = Figure(figsize=(7, 2.6 * (1 + len(self.ranges))), layout="constrained")
        axes = figure.subplots(1 + len(self.ranges), squeeze=False)[:, 0]
        figure.suptitle(one_line(self.args.command, 90), fontsize=10, parse_math=False)
        self.draw_panel(axes[0], "fitness", lambda record: record["fitness"])
        for axis, name in zip(axes[1:], self.ranges):
            self.draw_panel(axis, name, lambda record, name=name: record["hyperparameters"][name])
            axis.set_yscale("log")
        axes[-1].set_xlabel(f"generation, of {self.args.generation} updates", fontsize=9)
        with writing(self.folder):
            figure.savefig(self.folder / "population.png", dpi=100)

    def draw_panel(self, axis, title, value):
        line_of_best = {(record["generation"], record["member"]) for record in self.ancestors(self.best())}
        for key, record in sorted(self.records.items()):
            if value(record) is None:
                continue
            founder = self.ancestors(record)[-1]["member"]
            color = COLORS[founder % len(COLORS)]
            axis.plot(record["generation"], value(record), "o", color=color, markersize=4)
            parent = self.parent(record)
            if parent and value(parent) is not None:
                width = 3.5 if key in line_of_best else 1
                x = [parent["generation"], record["generation"]]
                axis.plot(x, [value(parent), value(record)], color=color, linewidth=width)
        axis.set_title(title, loc="left", fontsize=11, parse_math=False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)

    def parent(self, record):
        return self.records.get((record["generation"] - 1, record["parent"]))

    def ancestors(self, record):
        """A record and those that it descended from, the first generation's last."""
        line = []
        while record:
            line.append(record)
            record = self.parent(record)
        return line

    # --- Signals ---

    def on_signal(self, number, _):
        if not self.signals:
            (self.folder / "stop").touch()
            print(f"\n{signal.Signals(number).name}: the members under way save, and end", file=sys.stderr, flush=True)
        elif time.monotonic() - self.signals[0][0] > 1:  # sooner it is no second one
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signals.append((time.monotonic(), number))

    @contextlib.contextmanager
    def handling_signals(self):
        """Within it, a signal lets the members save and end, and then raises Stopped; a second one ends it at once."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
            numbers.append(signal.SIGHUP)
        handlers = {number: signal.signal(number, self.on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            (self.folder / "stop").unlink(missing_ok=True)
        if self.signals:
            raise Stopped("the members under way are saved; the same command goes on with them", self.signals[0][1])


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
            check_metric(population.args, folder, [breeding.EVAL_REWARD])
    except UserError:
        shutil.rmtree(population.folder, ignore_errors=True)
        raise
    population.write()


def check_length(args, num_updates):
    if args.generation > num_updates:
        raise UserError(f"--generation {args.generation} is longer than a run, of {num_updates} updates")


def check_metric(args, folder, held_out):
    """Raise UserError where a run has no column of the metric, or none of the reward on held-out items."""
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        columns = file.readline().strip().split(",")
    if args.metric and args.metric not in columns:
        raise UserError(f"--metric {args.metric} is no column of the runs' metrics.csv: {', '.join(columns)}")
    if not args.metric and not set(columns) & set(held_out):
        raise UserError("--metric is missing: the runs have no reward on held-out items")


def outcome(population):
    """The members of the last generation, the best first, as a table, and who is best."""
    names = [*population.ranges]
    lines = [f"| member | fitness | {' | '.join(names)} | line of descent |", "| --- " * (3 + len(names)) + "|"]
    last = [population.records[population.newest(), member] for member in range(population.args.size)]
    for record in sorted(last, key=lambda record: -math.inf if record["fitness"] is None else -record["fitness"]):
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
    interval = [flag for flag in EVALUATIONS if flag in known and flag not in words]
    words += ["--seed", str(args.seed), *(word for flag in interval for word in (flag, str(args.generation)))]
    try:
        from utils import breeding
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
