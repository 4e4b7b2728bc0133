"""Compare runs: curves by joint samples and by time, a table of numbers, aggregates over tasks, all over seeds.

    python -m utils.plot --runs "IPPO:runs/ippo_*" "IAC:runs/iac_*" --output-dir plots

Runs of one label and one task are its seeds. Intervals are of 95 %, by bootstrap over seeds. Written are curves.png,
finals.png, table.md and table.csv; where all labels have two tasks or more in common, with two seeds or more and as
many of each, and rliable (Agarwal et al. 2021, arXiv 2108.13264) is installed, aggregate.md and aggregate.png too.
"""

import csv
import dataclasses
import glob
import itertools
import math
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from utils.cli import UserError, command_line, flag_name, flags, one_line
from utils.run import FolderArgs
from utils.run.folder import OF_MACHINE
from utils.run.reader import read_config, read_metrics
from utils.run.report import COLORS, smooth

LINES, MARKERS = ["-", "--", "-.", ":"], ["", "o", "s", "^", "D", "v", "P", "X"]
RESAMPLES = 10_000  # drawn for an interval, where there are too many to take each
KINDS = ("interquartile mean", "mean")  # aggregates over tasks
REPEATS = 2000  # resamples for an interval by rliable, which is slow
FREE = {"--seed", *map(flag_name, [*OF_MACHINE, *(field.name for field in dataclasses.fields(FolderArgs))])}
BROKEN = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, csv.Error)  # what a bad file raises
READ_AS = "Means over seeds; reward and log-probability are of the last tenth of updates. In brackets are 95 % "
READ_AS += "intervals, a percentile bootstrap over seeds, which of fewer than five is no wider than the seeds. The "
READ_AS += "threshold is reached at the first update whose reward, smoothed over nine, is as high: the median over "
READ_AS += "seeds, and how many reached it. Time is without held-out evaluation."


@flags
class PlotArgs:
    """What is compared, and where the figures go."""

    runs: tuple[str, ...] = ()  # "LABEL:GLOB" of run folders each; without a label it is their parent folder's name
    output_dir: str = "plots"  # folder of what is drawn and written; what is there of an earlier time is replaced
    by: Literal["samples", "time", "both"] = "both"  # curves by joint samples, by minutes of training, or both
    thresholds: tuple[str, ...] = ()  # TASK=REWARD each; else 90 % of the way from the first to the best final reward
    ranges: tuple[str, ...] = ()  # TASK=LOW:HIGH each, 0 and 1 in the aggregates; else the mean first and best reward


@flags
class Args(PlotArgs):
    """All flags."""


class Curve(NamedTuple):
    """A run: arrays [U] over its updates, and its numbers; NaN stands for what it has not."""

    folder: Path
    flags: dict
    seed: int
    steps: np.ndarray  # joint samples so far
    seconds: np.ndarray  # training time so far, without held-out evaluation
    rewards: np.ndarray  # smoothed
    first: float  # reward
    final: float  # reward, mean over the last tenth of updates
    held_out: float  # the last held-out reward
    logprob: float  # under the reference, mean over the last tenth of updates


def load(runs):
    """Curves by (label, task), sorted by seed; `runs` are texts LABEL:GLOB. Raises UserError, names unfinished runs."""
    groups = {}
    for text in runs:
        label, colon, pattern = text.partition(":")
        has_label = colon and not glob.glob(text)  # the folder of a game's run may have a colon in its name
        label, pattern = (one_line(label), pattern) if has_label else ("", text)
        folders = sorted(path for path in map(Path, glob.glob(pattern)) if path.is_dir())
        if not folders:
            raise UserError(f"--runs: no folder is named {pattern}")
        earlier = {name for name, _ in groups}
        for folder in folders:
            name = label or folder.resolve().parent.name
            if name in earlier:
                raise UserError(f"--runs: two groups are named {name}")
            task, curve = read(folder)
            groups.setdefault((name, task), []).append(curve)
    for (label, task), curves in groups.items():
        curves.sort(key=lambda curve: curve.seed)
        check_seeds(curves, f"{label}, {task}")
    return groups


def read(folder):
    """The task and the Curve of a run folder. Raises UserError."""
    try:
        config = read_config(folder)
        args = config["args"]
        rows = read_metrics(folder)
        if (folder / "times.csv").is_file():  # where the columns of time are kept apart
            rows = [row | times for row, times in zip(rows, read_metrics(folder, "times.csv"), strict=True)]
        values = {"script": Path(config.get("script") or config["command"][0]).name}  # an earlier version has no script
        values |= {"task": config["task"]} if "task" in config else {}
        values |= {flag_name(name): value for name, value in args.items()}
        seed = args["seed"]
        seconds = [sum(value for name, value in row.items() if name.startswith("time/")) for row in rows]
        steps, rewards = np.array([[row["global_step"], row["reward_mean"]] for row in rows], float).reshape(-1, 2).T
        task = task_of(config)
    except BROKEN as error:
        raise UserError(f"{folder} is no run that can be read: {type(error).__name__}: {one_line(error)}") from error
    if not rows:
        raise UserError(f"{folder} has no metrics.csv with a whole update in it")
    if not np.isfinite([steps, rewards, seconds]).all() or min(seconds) <= 0 or (np.diff(steps, prepend=0) <= 0).any():
        raise UserError(f"{folder}/metrics.csv has an update without its joint samples, reward or seconds")
    last = slice(-max(1, len(rows) // 10), None)
    logprobs = np.array([row.get("reference_logprob") for row in rows[last]], float)
    held_out = [row.get("eval/reward_mean", row.get("fitness")) for row in rows]
    held_out = [np.nan, *(reward for reward in held_out if reward is not None)][-1]
    numbers = float(rewards[0]), float(rewards[last].mean()), held_out, float(logprobs.mean())
    smoothed = np.array(smooth(rewards.tolist()))
    return task, Curve(folder, values, seed, steps, np.cumsum(seconds), smoothed, *numbers)


def task_of(config):
    """The name of what a run was trained on, from its config.json."""
    args = config["args"]
    subject = args.get("task") or args.get("env")
    if subject is None:
        if "script" not in config:  # an earlier version's
            return "guess"
        return "guess" if Path(config["script"]).stem == "ppo_llm" else "the script's task"
    return one_line(Path(subject).stem if subject.endswith(".py") else subject, 80)


def check_seeds(curves, name):
    """Raise UserError unless the curves, sorted by seed, are of one command and many seeds; name those cut short."""
    first = curves[0]
    longest = max(len(curve.steps) for curve in curves)
    for before, curve in zip([first, *curves], curves):
        here = curve.flags
        there = first.flags
        differing = [flag for flag in there if flag in here and here[flag] != there[flag] and flag not in FREE]
        if differing:
            both = "; ".join(f"{flag} {there[flag]} and {here[flag]}" for flag in differing)
            raise UserError(f"{name}: {first.folder} and {curve.folder} differ in more than the seed: {both}")
        if before is not curve and before.seed == curve.seed:
            raise UserError(f"{name}: {before.folder} and {curve.folder} are the same seed, {curve.seed}")
        if len(curve.steps) < longest:
            short = f"{name}: {curve.folder} has {len(curve.steps)} of its siblings' {longest} updates"
            print(f"{short}; the curve ends there, and the table takes it as it is")


def interval(values):
    """The 95 % interval of the mean over n seeds of `values` [n, ...]: low and high, [2, ...]; NaN for one seed.

    A percentile bootstrap: the 2.5th and 97.5th percentiles of the means of n seeds drawn with replacement, over all
    n**n draws where these are few (up to five seeds), else over RESAMPLES draws, always the same.
    """
    n = len(values)
    if n == 1:
        return np.full((2, *np.shape(values)[1:]), np.nan)
    if n**n <= RESAMPLES:
        draws = np.array([*itertools.product(range(n), repeat=n)])
    else:
        draws = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    counts = (draws[:, :, None] == np.arange(n)).sum(1)
    return np.percentile(counts @ np.asarray(values) / n, [2.5, 97.5], axis=0)


def names(groups):
    """The labels and the tasks, each once, in the order they came."""
    return [[*dict.fromkeys(column)] for column in zip(*groups)]


def dress(axis, title):
    axis.set_title(title, loc="left", fontsize=10, parse_math=False)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def draw(groups, path, by="both"):
    """A panel for each task, by joint samples, minutes of training (`by` samples, time) or one above the other.

    Lines are means over seeds of the smoothed reward, bands their intervals, as far as the shortest seed goes.
    """
    labels, tasks = names(groups)
    kinds = {"samples": "joint samples", "time": "minutes of training"}
    kinds = kinds if by == "both" else {by: kinds[by]}
    blocks = math.ceil(len(tasks) / 4)
    columns = math.ceil(len(tasks) / blocks)
    width = 8.5 if columns > 1 else 5
    fit = max(1, int(width * 13) // (max(map(len, labels)) + 8))  # labels that stand side by side
    height = 0.5 + 0.2 * math.ceil(len(labels) / fit) + 2.1 * blocks * len(kinds)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes, lines = figure.subplots(blocks * len(kinds), columns, squeeze=False), {}
    for (k, task), (row, kind) in itertools.product(enumerate(tasks), enumerate(kinds)):
        top = k // columns * len(kinds)
        axis = axes[top + row, k % columns]
        dress(axis, "" if row else task)
        axis.set_xlabel(kinds[kind], fontsize=9)
        axis.set_ylabel("" if k % columns else "reward", fontsize=9)
        axis.locator_params(axis="x", nbins=4)
        if row:
            axis.sharey(axes[top, k % columns])
        for n, label in enumerate(labels):
            curves = groups.get((label, task), [])
            at = [curve.steps if kind == "samples" else curve.seconds / 60 for curve in curves]
            if curves:
                grid = min(at, key=lambda x: x[-1])
                grid = grid[grid >= max(x[0] for x in at)]
                rewards = np.array([np.interp(grid, x, curve.rewards) for x, curve in zip(at, curves)])
                color, marker = COLORS[n % len(COLORS)], MARKERS[n // len(LINES) % len(MARKERS)]
                look = {"linewidth": 1.8, "marker": marker, "markersize": 4, "markevery": len(grid) // 6 + 1}
                (lines[label],) = axis.plot(grid, rewards.mean(0), LINES[n % len(LINES)], color=color, **look)
                axis.fill_between(grid, *interval(rewards), color=color, alpha=0.2, linewidth=0)
    for axis in axes.flat:
        axis.set_visible(axis.has_data())
    look = {"loc": "outside upper center", "ncols": fit, "frameon": False, "fontsize": 9}
    for text in figure.legend([lines[label] for label in labels], labels, **look).get_texts():
        text.set_parse_math(False)
    figure.savefig(path, dpi=200)


def table(groups, thresholds=None):
    """A dict of numbers for each task and label, task by task; `thresholds` are rewards by task. NaN: there is none."""
    rows = []
    for task in names(groups)[1]:
        found = {label: curves for (label, of), curves in groups.items() if of == task}
        first = np.mean([curve.first for curves in found.values() for curve in curves])
        best = max(np.mean([curve.final for curve in curves]) for curves in found.values())
        threshold = (thresholds or {}).get(task, first + 0.9 * (best - first) if best > first else np.nan)
        for label, curves in found.items():
            start, final, held_out, logprob = np.mean([curve[-4:] for curve in curves], axis=0)
            low, high = interval([curve.final for curve in curves])
            reached = np.array([min(c.steps[c.rewards >= threshold], default=np.inf) for c in curves])
            samples, seconds = np.mean([(curve.steps[-1], curve.seconds[-1]) for curve in curves], axis=0)
            row = {"task": task, "label": label, "seeds": len(curves), "reward": final, "reward_low": low}
            row |= {"reward_high": high, "first_reward": start, "held_out_reward": held_out}
            row |= {"reference_logprob": logprob, "joint_samples": samples, "threshold": threshold}
            row |= {"samples_to_threshold": np.median(reached), "seeds_to_threshold": int(np.isfinite(reached).sum())}
            rows.append(row | {"seconds": seconds, "samples_per_second": samples / seconds})
    return rows


def number(value, digits=2):
    return "" if np.isnan(value) else f"{value:.{digits}f}"


def estimate(value, low, high):
    return number(value) + ("" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]")


def markdown(header, rows):
    """A table as lines of Markdown, an empty one after it; `header` is names with | between them."""
    lines = [header.split("|"), ["---"] * (header.count("|") + 1), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines] + [""]


def write_table(rows, folder):
    """table.csv, the rows of `table`, and table.md, the same to be read."""
    with open(folder / "table.csv", "w", newline="", encoding="utf-8") as file:
        plain = [[x if isinstance(x, str) else "" if np.isnan(x) else f"{x:.9g}" for x in row.values()] for row in rows]
        csv.writer(file, lineterminator="\n").writerows([rows[0], *plain])
    (folder / "table.md").write_text("\n".join([*table_lines(rows), READ_AS, ""]), encoding="utf-8")


def table_lines(rows, seconds=True):
    """The rows of `table` as lines of Markdown; without `seconds`, those of runs made on different machines."""
    header = "task|label|seeds|first reward|reward|held-out reward|log-prob. under the reference|joint samples"
    header += "|joint samples to the threshold" + seconds * "|seconds|samples/s"
    lines = []
    for row in rows:
        task, label, seeds, *reward, first, held_out, logprob, steps, goal, median, count, time, speed = row.values()
        reached = f"{goal:.2f}: {f'{median:.0f}' if np.isfinite(median) else 'never'} ({count}/{seeds})"
        lines.append([task, label, seeds, number(first), estimate(*reward), *map(number, (held_out, logprob))])
        lines[-1] += [number(steps, 0), "" if np.isnan(goal) else reached]
        if seconds:
            lines[-1] += [number(time, 0), number(speed, 1)]
    return markdown(header, lines)


def aggregate(groups, ranges=None):
    """Final rewards over the tasks that all labels have, each task on a scale from 0 to 1, through rliable.

    `ranges` are the rewards (low, high) that are 0 and 1, by task; else the mean first reward and the best final one of
    any run. Returns "scales", (low, high) by task; "left_out", the other tasks; "seeds" by label; "interquartile
    mean" and "mean", (value, low, high) by label. The intervals are a percentile bootstrap over seeds, stratified by
    task, the same every time. Raises UserError with the reason why there is no aggregate.
    """
    labels, tasks = names(groups)
    common = [task for task in tasks if all((label, task) in groups for label in labels)]
    if len(common) < 2:
        raise UserError(f"it takes two tasks that every label has; these have in common: {', '.join(common) or 'none'}")
    scales, scores = {}, {}
    for task in common:
        curves = [curve for label in labels for curve in groups[label, task]]
        own = np.mean([curve.first for curve in curves]), max(curve.final for curve in curves)
        scales[task] = low, high = (ranges or {}).get(task, own)
        if low >= high:
            raise UserError(f"no run of {task} ends above its first reward; give --ranges {task}=LOW:HIGH")
    for label in labels:
        finals = {task: [curve.final for curve in groups[label, task]] for task in common}
        seeds = {len(values) for values in finals.values()}
        if len(seeds) > 1 or 1 in seeds:
            counts = ", ".join(f"{len(values)} of {task}" for task, values in finals.items())
            raise UserError(f"it takes as many seeds of each task, two or more, and {label} has {counts}")
        scores[label] = np.array([(np.array(finals[t]) - low) / (high - low) for t, (low, high) in scales.items()]).T
    try:
        from rliable import library, metrics
    except (ImportError, TypeError) as error:  # TypeError: its package arch does not know pandas 3
        raise UserError("it takes rliable: pip install rliable==1.2.0 'pandas<3'") from error

    def estimates(function, scores):
        np.random.seed(0)  # rliable draws from numpy's global generator, whatever random_state it is given
        values, bounds = library.get_interval_estimates(scores, lambda x: np.array([function(x)]), reps=REPEATS)
        return {key: np.vstack([values[key], bounds[key]])[:, 0].tolist() for key in scores}

    found = {"scales": scales, "left_out": [task for task in tasks if task not in common]}
    found |= {"seeds": {label: len(values) for label, values in scores.items()}}
    return found | dict(zip(KINDS, (estimates(f, scores) for f in (metrics.aggregate_iqm, metrics.aggregate_mean))))


def aggregate_lines(found):
    """What `aggregate` returned, as lines of Markdown."""
    rows = [[label, n, *(estimate(*found[kind][label]) for kind in KINDS)] for label, n in found["seeds"].items()]
    lines = markdown("label|seeds of each task|interquartile mean|mean", rows)
    scales = "; ".join(f"{task} {low:.2f} and {high:.2f}" for task, (low, high) in found["scales"].items())
    left_out = f" Left out, as not every label has them: {', '.join(found['left_out'])}." if found["left_out"] else ""
    text = f"Final rewards, each task on a scale where these are 0 and 1: {scales}.{left_out} In brackets are 95 % "
    text += f"intervals, a percentile bootstrap over seeds, stratified by task ({REPEATS} resamples, rliable)."
    return [*lines, text, ""]


def draw_aggregate(found, path):
    """The interquartile means and means of `aggregate`."""
    draw_bars({kind: {label: (*numbers, []) for label, numbers in found[kind].items()} for kind in KINDS}, path)


def draw_finals(groups, path):
    """Final rewards, a panel for each task: means over seeds, their intervals, and each seed a dot."""
    panels = {task: {} for task in names(groups)[1]}
    for (label, task), curves in groups.items():
        finals = [curve.final for curve in curves]
        panels[task][label] = (np.mean(finals), *interval(finals), finals)
    draw_bars(panels, path)


def draw_bars(panels, path):
    """Intervals as bars, means as strokes, other values as dots; `panels` are {label: (mean, low, high, values)}."""
    labels = [*dict.fromkeys(label for panel in panels.values() for label in panel)]
    figure = Figure(figsize=(8.5, 0.6 + 0.3 * len(labels)), layout="constrained")
    for axis, (title, panel) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items()):
        dress(axis, title)
        for label, (mean, low, high, values) in panel.items():
            k = labels.index(label)
            axis.hlines(k, low, high, color=COLORS[k % len(COLORS)], alpha=0.5, linewidth=11)
            axis.plot(values, [k] * len(values), "o", color=COLORS[k % len(COLORS)], markersize=4)
            axis.plot(mean, k, "|", color="black", markersize=12, markeredgewidth=2)
        axis.set_yticks(range(len(labels)), labels, fontsize=9, parse_math=False)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    figure.savefig(path, dpi=200)


def by_task(flag, texts, form, tasks):
    """The numbers of texts TASK=REWARD or TASK=LOW:HIGH (`form`) by task. Raises UserError."""
    found = {}
    for text in texts:
        task, _, values = text.rpartition("=")
        try:
            numbers = [float(value) for value in values.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) != form.count(":") + 1 or not np.isfinite(numbers).all() or numbers != sorted({*numbers}):
            raise UserError(f"--{flag} takes {form}, got {text}")
        if task not in tasks or task in found:
            raise UserError(f"--{flag} takes {form}, a task of the runs ({', '.join(tasks)}) once, got {text}")
        found[task] = numbers
    return found


def main(args):
    """Read, draw, write. Raises UserError."""
    if not args.runs:
        raise UserError('--runs takes one or more "LABEL:GLOB" of run folders')
    groups, folder = load(args.runs), Path(args.output_dir)
    thresholds = by_task("thresholds", args.thresholds, "TASK=REWARD", names(groups)[1])
    ranges = by_task("ranges", args.ranges, "TASK=LOW:HIGH", names(groups)[1])
    try:
        if (folder / "config.json").exists():
            raise UserError(f"--output-dir {folder} is a run's folder, and its curves.png would be replaced")
        folder.mkdir(parents=True, exist_ok=True)
        draw(groups, folder / "curves.png", args.by)
        draw_finals(groups, folder / "finals.png")
        write_table(table(groups, {task: reward for task, (reward,) in thresholds.items()}), folder)
        try:
            found = aggregate(groups, ranges)
            (folder / "aggregate.md").write_text("\n".join(aggregate_lines(found)), encoding="utf-8")
            draw_aggregate(found, folder / "aggregate.png")
        except UserError as reason:
            for name in ("aggregate.md", "aggregate.png"):  # an earlier one, of other runs
                (folder / name).unlink(missing_ok=True)
            if len(names(groups)[1]) > 1:  # else nobody asks for one
                print(f"no aggregate over tasks: {reason}")
    except OSError as error:
        raise UserError(f"--output-dir {folder} can't be written: {error.strerror}") from error
    print(f"wrote {folder}")


if __name__ == "__main__":
    command_line(main, Args, __doc__)
