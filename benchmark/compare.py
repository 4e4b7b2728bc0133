"""Learning curves of groups of runs on one picture: the mean over a group's runs, and each of them, thin.

python -m benchmark.compare OUT.png "turns:runs/iac_turn_*" "tokens:runs/iac_token_*"
"""

import csv
import glob
import sys

from matplotlib.figure import Figure

from utils.run import COLORS, smooth


def read(folder):
    """The joint samples and the rewards of a run, smoothed over nine updates."""
    with open(f"{folder}/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [int(row["global_step"]) for row in rows], smooth([float(row["reward_mean"]) for row in rows])


def main():
    if len(sys.argv) < 3 or not all(":" in group for group in sys.argv[2:]):
        sys.exit(__doc__)
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    for color, group in zip(COLORS, sys.argv[2:]):
        name, pattern = group.split(":", 1)
        runs = [read(folder) for folder in sorted(glob.glob(pattern))]
        if not runs:
            sys.exit(f"benchmark.compare: no run is named {pattern}")
        for steps, rewards in runs:
            axis.plot(steps, rewards, color=color, alpha=0.3, linewidth=1)
        mean = [sum(rewards) / len(rewards) for rewards in zip(*(rewards for _, rewards in runs))]
        axis.plot(runs[0][0][: len(mean)], mean, color=color, linewidth=2.5, label=f"{name}, mean of {len(runs)} seeds")
    axis.set_xlabel("joint samples")
    axis.set_ylabel("reward")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
