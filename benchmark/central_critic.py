"""Does a central critic help a team, and when? IAC, IPPO, MAAC and MAGRPO on the task build, and the page of it.

    python -m benchmark.central_critic --workers 2                                   an hour and a half on two cores
    python -m benchmark.central_critic --size quick --output-dir runs/central        its short form, in a minute

Every method scores as many joint samples (a team's answers of one turn), about 64 in an update, whatever the number of
turns. First each has its learning rate chosen, on two turns and other seeds; then all play each setting. Runs are made
in <output-dir>/runs, one thread each, what is kept of them in <output-dir>/results, and runs that are kept are not made
again: the command may be stopped and given again. Tables are put into central_critic.md, pictures beside it.

The agents are copies of central/model, 0.14 million parameters, made like the embedded model but for its size:

    python -m utils.make_tiny_lm --layers 2 --heads 2 --out benchmark/central/model
"""

import shlex
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import PositiveInt

from benchmark.__main__ import fill, gather
from utils import plot
from utils.benchmark import Failed, Job, check_seeds, finished, run_jobs
from utils.cli import UserError, command_line, flags
from utils.files import read_rows, writing
from utils.tasks import build

HERE = Path(__file__).resolve().parent
GENERATIONS = 2  # of MAGRPO
METHODS = {
    "IAC": "python iac_llm.py --use-separate-critic --value-clip-range inf",  # MAAC's critic has a plain loss too
    "IPPO": "python ippo_llm.py --use-separate-critic --value-clip-range inf",
    "MAAC": "python maac_llm.py",
    "MAGRPO": f"python magrpo_llm.py --num-generations {GENERATIONS}",
}
SAME = "--model benchmark/central/model --kl-coef 0 --task build --max-new-tokens 4 --eval-interval 1000"
SETTINGS = {  # name: turns, what pays
    "1 turn": (1, "every-kept"),
    "2 turns, each pays": (2, "every-kept"),
    "2 turns, the last pays": (2, "last-kept"),
    "4 turns, each pays": (4, "every-kept"),
    "4 turns, the last pays": (4, "last-kept"),
}
CHOSEN_ON = ("2 turns, each pays", "2 turns, the last pays")
RATES = ("2.5e-4", "5e-4", "1e-3", "2e-3")  # of actors; critics have twice that
SAMPLES = {"full": 4096, "quick": 128}  # joint samples that a run scores
UPDATE = 64  # joint samples of an update, which is two optimiser steps


# --- What is run ------------------------------------------------------------------------------------------------------


def job_of(method, setting, rate, seed, folder, size):
    """A run in <folder>/<method>/<setting>__<seed>."""
    num_turns, variant = SETTINGS[setting]
    episodes = UPDATE // num_turns  # each scores a joint sample a turn
    words = f"{METHODS[method]} {SAME} --num-turns {num_turns} --dataset {variant} --seed {seed}"
    words += f" --rollout-buffer-size {episodes} --mini-batch-size {episodes // 2}"
    words += f" --max-episodes {SAMPLES[size] // num_turns} --actor-learning-rate {rate}"
    if method != "MAGRPO":
        words += f" --critic-learning-rate {2 * float(rate):g}"
    name = setting.replace(",", "").replace(" ", "_")
    return Job(f"{folder}/{method}/{name}__{seed}", shlex.split(words))


def make(jobs, args):
    """Make the runs that are not kept, and keep them; returns the names of those that failed."""
    folder = Path(args.output_dir)
    kept = finished(folder / "results")
    for job in jobs:
        if job.name in kept and kept[job.name]["command"] != shlex.join(job.argv):
            command = kept[job.name]["command"]
            raise UserError(f"{folder / 'results' / job.name} is of another command, {command}: delete it first")
    try:
        return run_jobs([job for job in jobs if job.name not in kept], folder / "runs", args.workers)
    finally:
        gather(jobs, folder / "runs", folder / "results")


def grid(args):
    """The runs that choose the learning rates."""
    jobs = []
    for setting in CHOSEN_ON:
        for rate in RATES:
            jobs += [
                job_of(method, setting, rate, s, f"rate_{rate}", args.size)
                for method in METHODS
                for s in args.rate_seeds
            ]
    return jobs


def chosen_rates(results):
    """Of each method the learning rate, the mean share of the best rewards by learning rate."""
    shares = {}
    for method in METHODS:
        for rate in RATES:
            of_settings = [
                np.mean([curve.final for curve in curves]) / best_reward(setting)
                for setting, curves in load(results, f"rate_{rate}", method).items()
            ]
            shares.setdefault(method, {})[rate] = float(np.mean(of_settings))
    return {method: max(of, key=of.get) for method, of in shares.items()}, shares


# --- What came of it --------------------------------------------------------------------------------------------------


def best_reward(setting):
    """What optimal play earns an episode, over the pictures that are trained on."""
    num_turns, variant = SETTINGS[setting]
    return build.optimum(2, num_turns, [*build.named_dataset(variant, 41, 0, "train")])


def load(results, folder, method):
    """Curves by setting, over the joint samples that were scored, sorted by seed."""
    curves_by_setting = {}
    for setting, (num_turns, _) in SETTINGS.items():
        pattern = f"{folder}/{method}/{setting.replace(',', '').replace(' ', '_')}__*"
        if any(results.glob(pattern)):
            (curves,) = plot.load([f"{method}:{results / pattern}"]).values()
            curves_by_setting[setting] = [curve._replace(steps=curve.steps * num_turns) for curve in curves]
    return curves_by_setting


def column(curve, *names):
    """The mean over the last tenth of a run of the columns that have these ends; None where there are none."""
    rows = read_rows(curve.folder / "metrics.csv")
    last = rows[-max(1, len(rows) // 10) :]
    values = [float(x) for row in last for name, x in row.items() if name.endswith(names) and x]
    return float(np.mean(values)) if values else None


def table(curves):
    """A row for each setting and method: lines of Markdown."""
    lines = []
    for setting in SETTINGS:
        best = best_reward(setting)
        for method in METHODS:
            runs = curves.get((method, setting))
            if not runs:
                continue
            finals = [run.final / best for run in runs]
            explained = [column(run, "explained_variance") for run in runs]
            iou = [column(run, "iou") for run in runs]
            line = [setting, method, len(runs), plot.estimate(np.mean(finals), *plot.interval(finals))]
            line += [plot.number(np.mean([run.held_out / best for run in runs])), plot.number(np.mean(iou))]
            line.append("" if None in explained else plot.number(np.mean(explained)))
            line.append(f"{np.mean([run.steps[-1] for run in runs]):.0f}")
            lines.append(line)
    header = "setting|method|seeds|reward / best|held out / best|IoU|explained variance|joint samples"
    return plot.markdown(header, lines)


def table_of_rates(shares, rates):
    lines = []
    for method, of in shares.items():
        lines.append([method, *(plot.number(of[rate]) for rate in RATES), rates[method]])
    return plot.markdown("|".join(["method", *RATES, "taken"]), lines)


def draw(curves, path):
    """Curves over joint samples, a panel for each setting."""
    settings = [setting for setting in SETTINGS if any(of == setting for _, of in curves)]
    figure = plot.Figure(figsize=(4 * len(settings), 3.4), layout="constrained")
    for k, setting in enumerate(settings):
        axis = figure.add_subplot(1, len(settings), k + 1)
        for color, method in zip(plot.COLORS, METHODS):
            runs = curves.get((method, setting), [])
            if not runs:
                continue
            length = min(len(run.steps) for run in runs)
            rewards = np.array([run.rewards[:length] for run in runs]) / best_reward(setting)
            steps = runs[0].steps[:length]
            axis.plot(steps, rewards.mean(0), color=color, label=method)
            axis.fill_between(steps, rewards.min(0), rewards.max(0), color=color, alpha=0.15, linewidth=0)
        axis.set_title(setting, fontsize=10)
        axis.set_xlabel("joint samples")
        if k == 0:
            axis.set_ylabel("reward / best")
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


@flags
class StudyArgs:
    """What is run, and where it goes."""

    size: Literal["full", "quick"] = "full"  # quick: a few updates, of two turns and one learning rate
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # seeds of every run
    rate_seeds: tuple[int, ...] = (101, 102, 103)  # seeds of the runs that choose the learning rates
    workers: PositiveInt = 1  # runs at a time, of one thread each
    output_dir: str = f"{HERE.name}/central"  # folder of the runs, and of what is kept of them


@flags
class Args(StudyArgs):
    """All flags."""


def main(args):
    """Make what is missing; draw and write. Raises UserError, and Failed where a run failed."""
    check_seeds(args.seeds)
    check_seeds(args.rate_seeds)
    folder = Path(args.output_dir)
    results = folder / "results"
    is_quick = args.size == "quick"
    if is_quick and folder.resolve() == HERE / "central":
        raise UserError(f"--size quick takes another --output-dir: the full results are in {folder}")
    tables = {}
    rates = dict.fromkeys(METHODS, "1e-3")
    if not is_quick:
        failed = make(grid(args), args)
        if failed:
            raise Failed(f"{len(failed)} runs failed: {', '.join(failed)}")
        rates, shares = chosen_rates(results)
        tables["rates"] = table_of_rates(shares, rates)
    settings = CHOSEN_ON[:1] if is_quick else SETTINGS
    jobs = []
    for seed in args.seeds:  # so that a study that is stopped has whole seeds
        jobs += [job_of(m, setting, rates[m], seed, "study", args.size) for setting in settings for m in METHODS]
    failed = make(jobs, args)
    if len(failed) == len(jobs):
        raise Failed(f"all {len(jobs)} runs failed")

    curves = {}
    for method in METHODS:
        curves |= {(method, setting): runs for setting, runs in load(results, "study", method).items()}
    tables["study"] = table(curves)
    try:
        best = {setting: (0.0, best_reward(setting)) for setting in settings}
        tables["study over settings"] = plot.aggregate_lines(plot.aggregate(curves, best))
    except UserError as reason:
        tables["study over settings"] = [f"No aggregate: {reason}."]
    with writing(folder):
        pages = folder if is_quick else HERE
        draw(curves, pages / "central_critic.png")
        fill([HERE / "central_critic.md"], tables, pages)
    if failed:
        raise Failed(f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}")
    print(f"wrote {pages / 'central_critic.md'}")


if __name__ == "__main__":
    command_line(main, Args, __doc__)
