"""Tell whether two runs are the same to the bit: metrics (columns of time and speed aside), samples, weights.

    python -m utils.same RUN RUN

Prints a line for each file, and ends with exit code 1 where one differs or is missing, 2 where a folder has no run.
"""

import csv
import sys
from pathlib import Path


def is_time(column):
    """Whether a column of metrics is of time or speed, which differ from run to run."""
    return column.startswith("time/") or "per_second" in column


def timeless(folder):
    """The rows of a run's metrics.csv as text, without the columns of time and speed."""
    with open(Path(folder) / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if not is_time(name)} for row in rows]


def compare(one, other):
    """For each file of what two runs learned whether it is the same in both, by name."""
    one, other = Path(one), Path(other)
    places = ("agent_*/**/*.safetensors", "critic/**/*.safetensors")
    names = {x.relative_to(run).as_posix() for run in (one, other) for place in places for x in run.glob(place)}
    same = {"metrics.csv": all((run / "metrics.csv").is_file() for run in (one, other))}
    same["metrics.csv"] = same["metrics.csv"] and timeless(one) == timeless(other)
    samples = ["samples.jsonl"] * any((run / "samples.jsonl").exists() for run in (one, other))
    for name in samples + sorted(names):
        pair = [run / name for run in (one, other)]
        same[name] = all(path.is_file() for path in pair) and pair[0].read_bytes() == pair[1].read_bytes()
    return same


if __name__ == "__main__":
    runs = sys.argv[1:]
    if {"-h", "--help"} & {*runs}:
        print(__doc__)
        sys.exit()
    if len(runs) != 2:
        print("usage: python -m utils.same RUN RUN: two folders of runs", file=sys.stderr)
        sys.exit(2)
    for run in runs:
        if not Path(run, "metrics.csv").is_file():
            print(f"same.py: error: {run} is no run's folder: it has no metrics.csv", file=sys.stderr)
            sys.exit(2)
    found = compare(*runs)
    for name, same in found.items():
        print(f"{'the same' if same else 'DIFFERENT'}  {name}")
    sys.exit(not all(found.values()))
