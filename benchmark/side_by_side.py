"""How fast our scripts and CoMLRL's trainers are on the same tasks, two runs at a time, of one thread each.

    python -m benchmark.side_by_side --peer-ippo PEER_IPPO/bin/python --peer PEER/bin/python \\
        --json benchmark/results/side_by_side.json

peer_comlrl.py says how to make the two Pythons, and what is the same in both. Of each pair 320 joint samples are made
(--samples), and the speed is the median over a run's updates of joint samples a second of sampling and learning. Runs
that are in --output-dir are not made again. Prints a table, and keeps the speeds of all updates in --json.
"""

import json
import shlex
from pathlib import Path

import numpy as np
from pydantic import PositiveInt

from benchmark.__main__ import IAC, IPPO, MAAC, MAGRPO, ONE_TURN, PEER
from utils import plot
from utils.benchmark import Failed, Job, run_jobs
from utils.cli import UserError, command_line, flags
from utils.files import write_whole, writing

OURS = {
    "ippo": f"{IPPO} --use-separate-critic",
    "iac": f"{IAC} --use-separate-critic",
    "maac": MAAC,
    "magrpo": MAGRPO,
}


@flags
class SideBySideArgs:
    """What is run, and where."""

    peer: str = ""  # required: Python that has CoMLRL's release with IAC, MAAC, MAGRPO
    peer_ippo: str = ""  # required: Python that has CoMLRL's release with IPPO
    samples: PositiveInt = 320  # joint samples of each run
    workers: PositiveInt = 2  # runs at a time
    output_dir: str = "runs/side_by_side"
    json: str | None = None  # write the speeds to this file


@flags
class Args(SideBySideArgs):
    """All flags."""


def jobs_of(args):
    """Of each algorithm and task our run, then CoMLRL's."""
    jobs = []
    for name, command in OURS.items():
        python = args.peer_ippo if name == "ippo" else args.peer
        critic = "--critic separate" if name in ("ippo", "iac") else ""
        for task, own in ONE_TURN.items():
            ours = f"{command} --eval-interval 0 --max-episodes {args.samples} --task {task} {own}"
            theirs = f"{PEER} {name} {critic} --num-train-epochs 1 --train-size {args.samples} --task {task} {own}"
            jobs.append(Job(f"{name}/{task}", shlex.split(ours)))
            jobs.append(Job(f"comlrl_{name}/{task}", shlex.split(theirs), python, resumable=False))
    return jobs


def speeds_of(folder):
    """Joint samples a second of each update of a run."""
    _, curve = plot.read(folder)
    return (np.diff(curve.steps, prepend=0) / np.diff(curve.seconds, prepend=0)).round(3).tolist()


def table_of(speeds):
    """The speeds, lists by "GROUP/TASK", as lines of Markdown."""
    rows = []
    for name in OURS:
        for task in ONE_TURN:
            pair = speeds[f"{name}/{task}"], speeds[f"comlrl_{name}/{task}"]
            cells = [f"{np.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in pair]
            ours, theirs = map(np.median, pair)
            rows.append([name.upper(), task, *cells, f"{ours / theirs:.1f}"])
    return plot.markdown("algorithm|task|joint samples/s|CoMLRL's|times as fast", rows)


def main(args):
    """Run, and print the table. Raises UserError, and Failed where a run failed."""
    for name in ("peer", "peer_ippo"):
        if not Path(getattr(args, name)).is_file():
            raise UserError(f"--{name.replace('_', '-')} takes a Python, got {getattr(args, name) or 'none'}")
    jobs = jobs_of(args)
    failed = run_jobs(jobs, args.output_dir, args.workers)
    if failed:
        raise Failed(f"runs failed: {', '.join(failed)}")
    speeds = {job.name: speeds_of(Path(args.output_dir) / job.name) for job in jobs}
    if args.json:
        with writing(Path(args.json).parent):
            write_whole(Path(args.json), json.dumps(speeds, indent=1) + "\n")
    print("\n".join(table_of(speeds)))


if __name__ == "__main__":
    command_line(main, Args, __doc__)
