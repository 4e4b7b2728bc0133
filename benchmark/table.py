"""A line of numbers for each run folder: the reward at the start and over the last tenth of the updates, and the cost.

python -m benchmark.table runs/*
"""

import csv
import json
import sys
from pathlib import Path

COLUMNS = "run|first reward|reward|held-out reward|log-prob. under the initial model|joint samples|seconds of updates"


def summary(folder):
    """The numbers of one run folder, strings in the order of COLUMNS; means over the last tenth of the updates."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    last = rows[-max(1, len(rows) // 10) :]
    reward, logprob = (sum(float(row[k]) for row in last) / len(last) for k in ("reward_mean", "reference_logprob"))
    seconds = sum(float(row[key]) for row in rows for key in row if key.startswith("time/"))
    flags = json.loads((folder / "config.json").read_text())["args"]
    critic = {True: "separate critics", False: "value heads", None: "adapters"}[flags.get("use_separate_critic")]
    name = f"{folder.name} (seed {flags['seed']}, {critic})"
    held_out = float(rows[-1].get("eval/reward_mean") or rows[-1].get("fitness") or "nan")
    numbers = [f"{float(rows[0]['reward_mean']):.2f}", f"{reward:.2f}", f"{held_out:.2f}", f"{logprob:.2f}"]
    return [name, *numbers, rows[-1]["global_step"], f"{seconds:.0f}"]


def main():
    folders = [Path(folder) for folder in sys.argv[1:] if (Path(folder) / "metrics.csv").is_file()]
    if not folders:
        sys.exit("benchmark.table takes run folders with a metrics.csv")
    header = COLUMNS.split("|")
    for cells in (header, ["---"] * len(header), *map(summary, folders)):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
