"""How time and memory grow with agents, turns, new tokens and parameters: ippo_llm.py, one change at a time.

    python -m benchmark.cost                                    ten minutes on two quiet cores
    python -m benchmark.cost --axes agents turns --output-dir runs/cost

A team of value heads answers 16 prompts, each answer of its full length, and learns from them in one pass; models are
those of random_lm, which are made where they are missing. Each measurement is a process of its own of two updates, of
which the second counts. What is measured is kept in <output-dir>/cost.jsonl and not measured again; the table of it and
its picture, cost.png, are put beside it. The exponent is that between an axis' first and last value: 1 is linear.
"""

import json
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from matplotlib.figure import Figure
from tqdm import tqdm

import ippo_llm
from benchmark import speed
from benchmark.__main__ import fill
from utils.cli import UserError, command_line, flags
from utils.files import write_whole, writing
from utils.run.report import COLORS

HERE = Path(__file__).resolve().parent
MODELS = {  # parameters in millions: of random_lm
    0.9: "",
    31: "--layers 8 --width 512 --vocabulary 8192",
    135: "--layers 30 --width 576 --inner 1536 --heads 9 --groups 3 --vocabulary 49152",
    494: "--layers 24 --width 896 --inner 4864 --heads 14 --groups 2 --vocabulary 151936",
}
FIRST = {"agents": 2, "turns": 1, "new_tokens": 64, "parameters": 0.9}
AXES = {"agents": (1, 2, 4, 8), "turns": (1, 3, 6), "new_tokens": (64, 256, 1024), "parameters": (0.9, 31, 135, 494)}
WHAT = {"agents": "agents", "turns": "turns", "new_tokens": "new tokens", "parameters": "millions of parameters"}


@flags
class Args:
    """What is measured, and where it goes."""

    axes: tuple[Literal["agents", "turns", "new_tokens", "parameters"], ...] = tuple(AXES)
    output_dir: str = str(HERE / "cost")  # folder of cost.jsonl, of the picture, and of the models
    one: str | None = None  # JSON: measure one case in this process, and print it


def cases_of(axis):
    """The measurements of an axis; with one agent along parameters, where two do not fit into 24 GiB."""
    first = FIRST | ({"agents": 1} if axis == "parameters" else {})
    return [first | {axis: value} for value in AXES[axis]]


def measure(case, folder):
    """Seconds of an update's parts for each joint sample, and the most memory of this process, in MiB."""

    def external_transition(agent_completions):
        return [" Go on: "] * len(agent_completions)

    task = SimpleNamespace(**vars(speed.TASK), external_transition=external_transition)
    with tempfile.TemporaryDirectory() as output_dir:
        args = ippo_llm.Args(
            model=folder,
            num_agents=case["agents"],
            num_turns=case["turns"],
            max_new_tokens=case["new_tokens"],
            min_output_tokens=case["new_tokens"],
            train_size=32,
            num_train_epochs=1,
            rollout_buffer_size=16,
            mini_batch_size=16,
            micro_batch_size=4,
            eval_interval=0,
            save_interval=0,
            output_dir=output_dir,
        )
        row = ippo_llm.main(args, task)[1].rows[-1]
    seconds = {part: row[f"time/{part}"] / 16 for part in ("play", "learn")}
    return case | seconds | {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def model_of(parameters, output_dir):
    """The folder of a model, made if it is missing."""
    folder = output_dir / "models" / f"{parameters}M"
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "benchmark.random_lm", str(folder), *MODELS[parameters].split()]
        subprocess.run(command, check=True)
    return str(folder)


def exponent(values, costs):
    """p of cost ~ value ** p, between the first and the last."""
    return math.log(costs[-1] / costs[0]) / math.log(values[-1] / values[0])


def table_of(measured, axes):
    text = "|  | of a joint sample: play, s | learn, s | joint samples/s | peak memory, MiB |\n"
    text += "| --- | --- | --- | --- | --- |\n"
    for axis in axes:
        rows = [measured[json.dumps(case)] for case in cases_of(axis)]
        for row in rows:
            seconds = row["play"] + row["learn"]
            text += f"| {WHAT[axis]}: {row[axis]} | {row['play']:.3f} | {row['learn']:.3f} | {1 / seconds:.2f} "
            text += f"| {row['mib']:.0f} |\n"
        values = [row[axis] for row in rows]
        powers = [exponent(values, [row[name] for row in rows]) for name in ("play", "learn")]
        powers.append(exponent(values, [row["play"] + row["learn"] for row in rows]))
        text += f"| exponent of {axis.replace('_', ' ')} | {powers[0]:.2f} | {powers[1]:.2f} | -{powers[2]:.2f} "
        text += f"| {exponent(values, [row['mib'] for row in rows]):.2f} |\n"
    return text


def draw(measured, axes, path):
    figure = Figure(figsize=(3.2 * len(axes), 5.6), layout="constrained")
    panels = figure.subplots(2, len(axes), squeeze=False)
    for k, axis in enumerate(axes):
        rows = [measured[json.dumps(case)] for case in cases_of(axis)]
        values = [row[axis] for row in rows]
        costs = {"seconds of a joint sample": [row["play"] + row["learn"] for row in rows]}
        costs["peak memory, MiB"] = [row["mib"] for row in rows]
        for panel, (label, cost), color in zip(panels[:, k], costs.items(), COLORS):
            panel.loglog(values, cost, "o-", color=color)
            panel.loglog(values, [cost[0] * value / values[0] for value in values], ":", color="#999999")
            panel.set_xticks(values, map(str, values))
            panel.set_xticks([], minor=True)
            panel.set_xlabel(WHAT[axis])
            panel.set_ylabel(label if k == 0 else "")
    figure.savefig(path, dpi=100)


def main(args=None):
    args = args or Args()
    if args.one:
        request = json.loads(args.one)
        print(json.dumps(measure(request["case"], request["folder"])))
        return
    output_dir = Path(args.output_dir)
    kept = output_dir / "cost.jsonl"
    with writing(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    lines = kept.read_text().splitlines() if kept.exists() else []
    measured = {json.dumps({name: row[name] for name in FIRST}): row for row in map(json.loads, lines)}
    for case in tqdm([case for axis in args.axes for case in cases_of(axis)], disable=None):
        if json.dumps(case) not in measured:
            request = json.dumps({"case": case, "folder": model_of(case["parameters"], output_dir)})
            child = subprocess.run(
                [sys.executable, "-m", "benchmark.cost", "--one", request], capture_output=True, text=True
            )
            if child.returncode:
                raise UserError(f"{case}: {(child.stderr.splitlines() or ['it was killed'])[-1]}")
            measured[json.dumps(case)] = json.loads(child.stdout.splitlines()[-1])
            write_whole(kept, "".join(json.dumps(row) + "\n" for row in measured.values()))
    table = table_of(measured, args.axes)
    draw(measured, args.axes, output_dir / "cost.png")
    if output_dir == HERE / "cost" and set(args.axes) == {*AXES}:
        fill([HERE / "README.md"], {"cost": table.splitlines()}, HERE)
    print(table)


if __name__ == "__main__":
    command_line(main, Args, __doc__)
