"""Make every run, table and picture of this folder, two runs at a time, of one thread each.

    python -m benchmark                                         about ten hours on two cores
    python -m benchmark --size quick --output-dir runs/quick    the same pictures from a few updates of each run

Runs are made in <output-dir>/runs; of each, <output-dir>/results keeps metrics.csv, which is the same to the byte every
time, times.csv, config.json, and its line of manifest.json. What is kept is not run again: delete a run in both
folders, and the command makes it anew. Tables are put into the pages (*.md), pictures beside them. Other systems are
run where the flags name Pythons that have them; peer_comlrl.py and peer_ppo.py say how to make these.
"""

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import PositiveInt

from utils import plot
from utils.benchmark import Failed, Job, check_seeds, finished, locked, run_jobs, write_manifest
from utils.cli import UserError, command_line, flags
from utils.envs import guess
from utils.files import read_json, write_whole, writing
from utils.probe import LEARNED, middle_mean
from utils.run.reader import read_metrics
from utils.run.report import draw_curves
from utils.same import is_time
from utils.tasks import number

HERE = Path(__file__).resolve().parent

# --- What is run: groups of one command, on tasks with flags of their own ---------------------------------------------

IPPO, IAC, MAAC, MAGRPO, PPO = (f"python {name}_llm.py" for name in ("ippo", "iac", "maac", "magrpo", "ppo"))
PEER, PEER_PPO = "python -m benchmark.peer_comlrl", "python -m benchmark.peer_ppo"
THIRD = "--num-train-epochs 1"
TASKS = {"tldr": "", "number": "--num-turns 3 --max-new-tokens 4", "code": "--max-new-tokens 48"}
NUMBER = {"number": "--max-new-tokens 4"}  # one turn
ONE_TURN = TASKS | NUMBER
TLDR, GUESS = {"tldr": ""}, {"guess": ""}
TEAM = {
    "tldr": "--num-agents 2 --num-turns 1 --max-new-tokens 72 --gae-lambda 0.95",
    "number": f"--num-agents 2 {TASKS['number']}",
}
TEAM |= {"code": f"--num-agents 2 --num-turns 1 {TASKS['code']}"}
ALONE = {"code": f"--num-turns 1 {TASKS['code']} --gae-lambda 0.95", "guess": "--train-size 1536"}  # one agent

RUNS = {  # group: command, tasks
    "ippo_critic": (f"{IPPO} --use-separate-critic", TASKS),
    "ippo_head": (IPPO, TASKS),
    "iac_critic": (f"{IAC} --use-separate-critic", TASKS),
    "iac_head": (IAC, TASKS),
    "maac": (MAAC, TASKS),
    "magrpo": (f"{MAGRPO} --max-episodes 4608", TASKS),
    "ppo": (PPO, TEAM | GUESS),
    "ippo_third": (f"{IPPO} --use-separate-critic {THIRD}", ONE_TURN),
    "iac_third": (f"{IAC} --use-separate-critic {THIRD}", ONE_TURN),
    "ippo_no_kl": (f"{IPPO} --use-separate-critic {THIRD} --kl-coef 0", TLDR | NUMBER),
    "iac_no_kl": (f"{IAC} --use-separate-critic {THIRD} --kl-coef 0", TLDR | NUMBER),
    "comlrl_ippo": (f"{PEER} ippo --critic separate {THIRD}", ONE_TURN),
    "comlrl_iac": (f"{PEER} iac --critic separate {THIRD}", ONE_TURN),
    "maac_third": (f"{MAAC} {THIRD}", ONE_TURN),
    "magrpo_third": (f"{MAGRPO} --max-episodes 1536", ONE_TURN),
    "comlrl_maac": (f"{PEER} maac {THIRD}", ONE_TURN),
    "comlrl_magrpo": (f"{PEER} magrpo {THIRD}", ONE_TURN),
    "ppo_alone": (f"{PPO} {THIRD}", ALONE),
    "ippo_alone": (f"{IPPO} --num-agents 1 --use-separate-critic {THIRD}", {"code": TASKS["code"]}),
    "agilerl": (f"{PEER_PPO} agilerl {THIRD}", {"guess": ALONE["guess"]}),
    "trl": (f"{PEER_PPO} trl {THIRD}", {"code": ""}),
}
CURVES = {  # pictures of one run, and what optimal play earns
    "curves": ("ippo_critic/tldr__1", None),
    "number": ("ippo_head/number__3", number.optimum(2, 3)),
    "guess": ("ppo/guess__2", guess.optimum(6)),
}
SEEDS = {  # of runs GROUP/TASK, how many; else 3
    "(ippo|iac)_third/tldr|comlrl_(ippo|iac)/tldr": 7,
    "(ippo|iac)_(critic|head)/.*|(maac|magrpo|ppo)/.*": 5,
}
PEERS = {"comlrl_ippo": "peer_ippo", "comlrl": "peer", "agilerl": "peer_agilerl", "trl": "peer_trl"}  # flags
ORDER = ["tldr", "number", "code", "guess"]  # of tasks
SMALL = "--train-size 32 --rollout-buffer-size 8 --num-train-epochs 1 --eval-size 4"  # --size quick
SMALL_PEER = "--train-size 64 --num-train-epochs 1"


def jobs_of(args):
    """The runs, a Job each, task by task; those of a peer where its Python is given. Raises UserError."""
    try:
        chosen = re.compile("|".join(f"(?:{only})" for only in args.only))
    except re.error as error:
        raise UserError(f"--only takes regular expressions, got {' '.join(args.only)}: {error}") from error
    jobs = []
    for task in ORDER:
        for group, (command, tasks) in RUNS.items():
            flag = PEERS.get(group, PEERS.get(group.split("_")[0]))
            peer = flag and getattr(args, flag)
            if task not in tasks or (flag and peer is None) or not chosen.search(f"{group}/{task}"):
                continue
            small = SMALL_PEER if peer else SMALL
            what = f"--env {task}" if task == "guess" else f"--task {task}"
            flags = f"{command} {what} {tasks[task]} {small if args.size == 'quick' else ''}"
            for seed in seeds_of(f"{group}/{task}", args):
                job = Job(f"{group}/{task}__{seed}", [*shlex.split(flags), "--seed", str(seed)])
                jobs.append(job)
                if peer:
                    job.python, job.resumable = peer, False
    if not jobs:
        raise UserError(f"--only takes regular expressions of GROUP/TASK, and {' '.join(args.only)} fits none")
    return jobs


def seeds_of(runs, args):
    """The seeds of GROUP/TASK."""
    if args.seeds is not None:
        return args.seeds
    counts = [count for pattern, count in SEEDS.items() if re.fullmatch(pattern, runs)] if args.size == "full" else []
    return range(1, [*counts, 3][0] + 1)


# --- What is made of it -----------------------------------------------------------------------------------------------

PICTURES = {  # name: groups by label
    "main": {"IPPO, critics": "ippo_critic", "IPPO, heads": "ippo_head", "IAC, critics": "iac_critic"}
    | {"IAC, heads": "iac_head", "MAAC": "maac", "MAGRPO": "magrpo", "PPO, adapters": "ppo"},
    "comlrl": {"IPPO": "ippo_third", "CoMLRL's IPPO": "comlrl_ippo", "IAC": "iac_third", "CoMLRL's IAC": "comlrl_iac"}
    | {"IPPO, no KL penalty": "ippo_no_kl", "IAC, no KL penalty": "iac_no_kl"},
    "joint": {"MAAC": "maac_third", "CoMLRL's MAAC": "comlrl_maac"}
    | {"MAGRPO": "magrpo_third", "CoMLRL's MAGRPO": "comlrl_magrpo"},
    "alone": {"PPO, adapters": "ppo_alone", "AgileRL's LLMPPO": "agilerl"}
    | {"IPPO, critics": "ippo_alone", "TRL's PPO": "trl"},
}


def gather(jobs, runs, results):
    """Keep of the finished runs in the folder `runs` what the pages are made of, in the folder `results`."""
    made = finished(runs)
    with writing(results):
        results.mkdir(parents=True, exist_ok=True)
        with locked(results):
            kept = finished(results)
            for job in jobs:
                if job.name not in kept and job.name in made:
                    (results / job.name).mkdir(parents=True, exist_ok=True)
                    config = read_json(runs / job.name / "config.json")
                    if "script" in config:  # its place on this machine
                        config["script"] = Path(config["script"]).name
                    write_whole(results / job.name / "config.json", json.dumps(config, indent=2) + "\n")
                    with open(runs / job.name / "metrics.csv", newline="", encoding="utf-8") as file:
                        columns, *rows = csv.reader(file)
                    for name, timed in (("times.csv", True), ("metrics.csv", False)):
                        part = [k for k, column in enumerate(columns) if is_time(column) == timed]
                        lines = [",".join(row[k] for k in part) + "\n" for row in (columns, *rows)]
                        write_whole(results / job.name / name, "".join(lines))
                    kept[job.name] = made[job.name]
            write_manifest(results, kept)


def pictures(results, folder):
    """Draw what the results allow; returns the tables' lines of Markdown by name."""
    for name, (run, optimum) in CURVES.items():
        if (results / run / "metrics.csv").exists():
            draw_curves(read_metrics(results / run), folder / f"{name}.png", run, optimum)
    tables = {}
    for name, groups in PICTURES.items():
        there = {label: group for label, group in groups.items() if any(results.glob(f"{group}/*__*"))}
        if not there:
            continue
        curves = plot.load([f"{label}:{results / group}/*__*" for label, group in there.items()])
        curves = {key: curves[key] for key in sorted(curves, key=lambda key: ORDER.index(key[1]))}
        plot.draw(curves, folder / f"{name}.png", by="samples")
        rows = plot.table(curves)
        commands = [[label, f"`{RUNS[group][0]}`"] for label, group in there.items()]
        picture = f"![Rewards by joint samples: {'; '.join(there)}]({name}.png)"
        tables |= {name: [picture, "", *plot.table_lines(rows, seconds=False)], f"{name} in short": rewards_of(rows)}
        tables[f"{name} commands"] = plot.markdown("|command, but for task and seed", commands)
        tables[f"{name}, how soon"] = how_soon(curves)
        try:
            found = plot.aggregate(curves)
        except UserError as reason:
            tables[f"{name} over tasks"] = [f"No aggregate: {reason}."]
        else:
            tables[f"{name} over tasks"] = plot.aggregate_lines(found)
    return tables


def rewards_of(rows):
    """The rewards of plot.table as lines of Markdown, a column for each task."""
    ends = ("reward", "reward_low", "reward_high")
    found = {(row["label"], row["task"]): plot.estimate(*(row[name] for name in ends)) for row in rows}
    labels, tasks = plot.names(found)
    lines = [[label, *(found.get((label, task), "") for task in tasks)] for label in labels]
    return plot.markdown("|".join(["", *tasks]), lines)


def probe_lines(folder):
    """What each script learns of the probes, by utils.probe's tables in a folder: lines of Markdown."""
    files = [folder / f"{name}_llm.json" for name in ("ippo", "iac", "maac", "magrpo", "ppo")]
    tables = {file.stem: read_json(file)["probes"] for file in files if file.exists()}
    lines = {}
    for name, probes in tables.items():
        for probe in probes:
            start = [probe["name"], probe["ability"], f"{probe['random']:.2f}", f"{probe['best']:.2f}"]
            row = lines.setdefault(probe["name"], start + [""] * len(tables))
            share = f"{probe['share']:.0%}" if probe["share"] < LEARNED else f"**{probe['share']:.0%}**"
            row[4 + list(tables).index(name)] = f"{share}: {', '.join(f'{score:.2f}' for score in probe['last'])}"
    means = []
    for probes in tables.values():
        shares = []
        for probe in probes:
            shares += [(score - probe["random"]) / (probe["best"] - probe["random"]) for score in probe["last"]]
        means.append(f"{middle_mean(shares):.1%}")
    header = "|".join(["probe", "what it takes", "random", "best", *(f"`{name}.py`" for name in tables)])
    return plot.markdown(header, [*lines.values(), ["", "interquartile mean of the way", "", "", *means]])


def how_soon(curves):
    """After how many joint samples ours reach the reward that CoMLRL's end with: lines of Markdown.

    Ours reach it where the mean over seeds of the smoothed rewards does; theirs is the mean over the last tenth.
    """
    lines = []
    for (label, task), ours in curves.items():
        theirs = curves.get((f"CoMLRL's {label.split(',')[0]}", task))
        if not theirs:
            continue
        goal = np.mean([curve.final for curve in theirs])
        steps = min((curve.steps for curve in ours), key=len)
        reached = np.mean([curve.rewards[: len(steps)] for curve in ours], axis=0) >= goal
        lines.append([task, label, f"{goal:.3f}", f"{steps[np.argmax(reached)]:.0f}" if reached.any() else "never"])
    return plot.markdown("task|label|reward CoMLRL's ends with|joint samples to it", lines)


def fill(pages, tables, folder):
    """Write the pages to a folder, each table between its marks: <!-- NAME --> and <!-- end -->."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for name, lines in tables.items():
            marks = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
            text = marks.sub(lambda found: found[1] + "\n" + "\n".join(lines).rstrip() + "\n\n" + found[2], text)
        write_whole(folder / page.name, text)


@flags
class BenchmarkArgs:
    """What is run, and where it goes."""

    size: Literal["full", "quick"] = "full"  # quick: a few small updates of each run, to another --output-dir
    seeds: tuple[int, ...] | None = None  # seeds of every run; none: 1 2 3, up to 5 or 7 where differences are small
    only: tuple[str, ...] = (".",)  # regular expressions: the runs whose GROUP/TASK has one of them in it
    workers: PositiveInt = 2  # runs at a time
    threads: PositiveInt = 1  # threads of each; with another number a run is another, at first in the last digits
    output_dir: str = str(HERE.name)  # folder of results, pages and pictures
    peer: str | None = None  # Python that has CoMLRL's release with IAC, MAAC, MAGRPO; none: as in the results
    peer_ippo: str | None = None  # Python that has CoMLRL's release with IPPO; none: as in the results
    peer_agilerl: str | None = None  # Python that has AgileRL; none: as in the results
    peer_trl: str | None = None  # Python that has TRL; none: as in the results


@flags
class Args(BenchmarkArgs):
    """All flags."""


def main(args):
    """Make what is missing; draw and write. Raises UserError, and Failed where a run failed."""
    if args.seeds is not None:
        check_seeds(args.seeds)
    folder = Path(args.output_dir)
    results, runs = folder / "results", folder / "runs"
    if args.size != "full" and folder.resolve() == HERE:
        raise UserError(f"--size {args.size} takes another --output-dir: the full results are in {folder}")
    jobs, kept = jobs_of(args), finished(results)
    for job in jobs:
        if job.name in kept and kept[job.name]["command"] != shlex.join(job.argv):
            raise UserError(f"{results / job.name} is of another command, {kept[job.name]['command']}: delete it first")
    try:
        failed = run_jobs([job for job in jobs if job.name not in kept], runs, args.workers, args.threads)
    finally:
        gather(jobs, runs, results)
    with writing(folder):
        tables = pictures(results, folder) | {"probes": probe_lines(HERE / "results" / "probes")}
        fill(sorted(HERE.glob("*.md")), tables, folder)
        if folder.resolve() == HERE:
            fill([HERE.parent / "README.md"], tables, HERE.parent)
    if failed:
        raise Failed(f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}")
    print(f"wrote {folder}")


if __name__ == "__main__":
    command_line(main, Args, __doc__)
