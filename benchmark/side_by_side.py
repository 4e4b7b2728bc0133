"""How fast our scripts and CoMLRL's trainers are on the same tasks, two runs at a time, of one thread each.

    python -m benchmark.side_by_side --peer-ippo PEER_IPPO/bin/python --peer PEER/bin/python

peer_comlrl.py says how to make the two Pythons, and what is the same in both. Of each pair 320 joint samples are made
(--samples), and the speed is the median over a run's updates of joint samples a second of sampling and learning. Runs
that are in --output-dir are not made again. Prints a table.
"""

import shlex
from pathlib import Path

import numpy as np
from pydantic import PositiveInt

from benchmark.__main__ import IAC, IPPO, MAAC, MAGRPO, ONE_TURN, PEER
from utils import plot
from utils.benchmark import Failed, Job, run_jobs
from utils.cli import UserError, command_line, flags

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


def speeds(folder):
    """Joint samples a second of each update of a run."""
    _, curve = plot.read(folder)
    return np.diff(curve.steps, prepend=0) / np.diff(curve.seconds, prepend=0)


def main(args):
    """Run, and print the table. Raises UserError, and Failed where a run failed."""
    for name in ("peer", "peer_ippo"):
        if not Path(getattr(args, name)).is_file():
            raise UserError(f"--{name.replace('_', '-')} takes a Python, got {getattr(args, name) or 'none'}")
    failed = run_jobs(jobs_of(args), args.output_dir, args.workers)
    if failed:
        raise Failed(f"runs failed: {', '.join(failed)}")
    rows = []
    for name in OURS:
        for task in ONE_TURN:
            ours, theirs = (speeds(Path(args.output_dir) / group / task) for group in (name, f"comlrl_{name}"))
            cells = [f"{np.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in (ours, theirs)]
            rows.append([name.upper(), task, *cells, f"{np.median(ours) / np.median(theirs):.1f}"])
    print("\n".join(plot.markdown("algorithm|task|joint samples/s|CoMLRL's|times as fast", rows)))


if __name__ == "__main__":
    command_line(main, Args, __doc__)
