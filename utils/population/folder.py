"""The folder of a population: who descended from whom, drawn and kept."""

import contextlib
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

from matplotlib.figure import Figure

from utils.benchmark import Failed
from utils.cli import Stopped, UserError, flag_name, one_line
from utils.files import lock, read_json, write_whole, writing
from utils.run.report import COLORS
from utils.run.signals import silence_unread


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
        own = {".lock", "population.json.writing"}  # all that a start has left that came no further
        names = {each.name for each in self.folder.iterdir()} if self.folder.is_dir() else {"a file"}
        if self.folder.exists() and not path.is_file() and names - own:
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
                if self.best() is None:  # the generation before is forked again
                    self.error = Failed(f"no member of generation {record['generation']} is left: {record['error']}")
                else:
                    self.trim(record["generation"] - self.args.keep_generations)
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
        self.signals.append((time.monotonic(), number))
        if len(self.signals) == 1:
            (self.folder / "stop").touch()
            silence_unread(number)
            with contextlib.suppress(OSError):
                os.write(2, f"\n{signal.Signals(number).name}: the members under way save, and end\n".encode())
        elif time.monotonic() - self.signals[0][0] > 1:  # sooner it is no second one
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

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
