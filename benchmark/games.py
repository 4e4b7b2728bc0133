"""What keeps self-play from going round in circles? Kuhn poker, scored exactly, under kinds of regularisation.

    python -m benchmark.games --workers 2                          four to five hours on two cores
    python -m benchmark.games --only "moving reference"            one rule alone, 40 minutes
    python -m benchmark.games --size quick --output-dir runs/kuhn  its short form, in two minutes

One agent of 0.18 million parameters, which begins with each legal move as likely as any other (make_game_lm), plays
both seats of 400 times 256 matches; under one rule two agents have a seat each. Exploitability is computed every 25
updates. Runs are made in <output-dir>/runs, one thread each, what is kept of them in <output-dir>/results, and runs
that are kept are not made again: the command may be stopped and given again. The table is put into games.md, the
picture beside it.
"""

import shlex
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import PositiveInt

from benchmark.__main__ import fill
from benchmark.central_critic import make
from utils import make_game_lm, plot
from utils.benchmark import Failed, Job, check_seeds, finished
from utils.cli import UserError, command_line, flags
from utils.files import writing
from utils.run.reader import read_metrics

HERE = Path(__file__).resolve().parent
GAME = "open_spiel:kuhn_poker"
SCORE = "eval/exploitability"
SAME = f"--env {GAME} --num-agents 2 --self-play --num-turns 3 --max-new-tokens 2 --lora-rank 0"
SAME += " --no-use-separate-critic --update-epochs 1 --num-train-epochs 1"
RATES = "--actor-learning-rate 1e-3 --critic-learning-rate 2e-3 --adam-beta2 0.999"
SIZES = {  # matches of the run, of an update, updates between scores
    "full": "--train-size 102400 --rollout-buffer-size 256 --mini-batch-size 256 --micro-batch-size 256 "
    "--eval-interval 25",
    "quick": "--train-size 512 --rollout-buffer-size 64 --mini-batch-size 64 --micro-batch-size 64 --eval-interval 4",
}
VARIANTS = {  # GAE's lambda, what regularises
    "moving reference": (0.85, "--kl-loss-coef 0.5 --reference-update-interval 50"),
    "moving reference, whole returns": (1, "--kl-loss-coef 0.5 --reference-update-interval 50"),
    "moving reference, one baseline": (0.85, "--kl-loss-coef 0.5 --reference-update-interval 50 --no-turn-baseline"),
    "moving reference, two agents": (0.85, "--no-self-play --kl-loss-coef 0.5 --reference-update-interval 50"),
    "nothing": (1, "--kl-loss-coef 0"),
    "entropy, lowered": (1, "--kl-loss-coef 0 --entropy-coef 0.4 --entropy-coef-end 0"),
    "entropy, held": (1, "--kl-loss-coef 0 --entropy-coef 0.4"),
    "little entropy, lowered": (1, "--kl-loss-coef 0 --entropy-coef 0.05 --entropy-coef-end 0"),
    "initial reference": (1, "--kl-loss-coef 0.5"),
    "4 earlier copies": (1, "--kl-loss-coef 0 --opponents 4"),
}


def job_of(variant, seed, base, size):
    """A run in <variant>__<seed>."""
    gae_lambda, regularised = VARIANTS[variant]
    words = f"python ppo_llm.py --model {base} {SAME} --gae-lambda {gae_lambda} {RATES} {SIZES[size]} {regularised}"
    return Job(f"{folder_of(variant)}__{seed}", shlex.split(f"{words} --seed {seed}"))


def folder_of(variant):
    return variant.replace(",", "").replace(" ", "_")


def scores(results, variant):
    """Of each seed that is there (matches, exploitability, share of illegal answers), arrays over its evaluations."""
    curves = []
    for folder in sorted(Path(results).glob(f"{folder_of(variant)}__*")):
        rows = [row for row in read_metrics(folder) if row.get(SCORE) is not None]
        names = ("global_step", SCORE, "illegal_rate")
        curves.append(np.array([[row[name] for name in names] for row in rows], float).T)
    return curves


def table(curves):
    lines = []
    for variant, seeds in curves.items():
        last = [exploitability[-1] for _, exploitability, _ in seeds]
        best = [exploitability.min() for _, exploitability, _ in seeds]
        illegal = np.mean([share[-1] for *_, share in seeds])
        low, high = plot.interval(last)
        row = [
            variant,
            str(len(seeds)),
            plot.number(np.mean(last), 3),
            f"{plot.number(low, 3)} to {plot.number(high, 3)}" if len(seeds) > 1 else "",
        ]
        row += [" ".join(f"{value:.3f}" for value in last), plot.number(np.mean(best), 3), f"{illegal:.1%}"]
        lines.append(row)
    header = "regularised by|seeds|exploitability at the end|95 % interval|of each seed|mean of lowest|illegal answers"
    return plot.markdown(header, lines)


def draw(curves, path):
    """Exploitability by matches: means over seeds, between the lowest and the highest of them."""
    figure = plot.Figure(figsize=(9.5, 3.8), layout="constrained")
    axis = figure.add_subplot()
    for k, (variant, seeds) in enumerate(curves.items()):
        color = plot.COLORS[k % len(plot.COLORS)]
        length = min(len(matches) for matches, *_ in seeds)
        values = np.array([exploitability[:length] for _, exploitability, _ in seeds])
        matches = seeds[0][0][:length]
        axis.plot(matches, values.mean(0), "-" if k < len(plot.COLORS) else "--", color=color, label=variant)
        axis.fill_between(matches, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
    axis.axhline(0.05, color="grey", linewidth=0.8, linestyle=":")
    plot.dress(axis, "Kuhn poker by self-play")
    axis.set_xlabel("matches", fontsize=9)
    axis.set_ylabel("exploitability", fontsize=9)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)


@flags
class StudyArgs:
    """What is run, and where it goes."""

    size: Literal["full", "quick"] = "full"  # quick: a few small updates
    seeds: tuple[int, ...] = (1, 2, 3)  # seeds of every run
    only: tuple[str, ...] = ()  # variants to run; none: all
    workers: PositiveInt = 1  # runs at a time, of one thread each
    output_dir: str = f"{HERE.name}/kuhn"  # folder of the base, of the runs, and of what is kept of them


@flags
class Args(StudyArgs):
    """All flags."""


def main(args):
    """Make what is missing; draw and write. Raises UserError, and Failed where a run failed."""
    check_seeds(args.seeds)
    folder = Path(args.output_dir)
    is_quick = args.size == "quick"
    if is_quick and folder.resolve() == HERE / "kuhn":
        raise UserError(f"--size quick takes another --output-dir: the full results are in {folder}")
    for variant in args.only:
        if variant not in VARIANTS:
            raise UserError(f"--only takes {', '.join(map(repr, VARIANTS))}, got {variant!r}")
    base = folder / "runs" / "kuhn_lm"
    jobs = [job_of(v, seed, base, args.size) for seed in args.seeds for v in args.only or VARIANTS]
    kept = finished(folder / "results")
    if not (base / "config.json").exists() and any(job.name not in kept for job in jobs):
        make_game_lm.main(make_game_lm.Args(env=GAME, out=str(base), steps=20 if is_quick else 200))
    failed = make(jobs, args)
    curves = {variant: seeds for variant in VARIANTS if (seeds := scores(folder / "results", variant))}
    with writing(folder):
        pictures = folder if is_quick else HERE
        draw(curves, pictures / "kuhn.png")
        fill([HERE / "games.md"], {"kuhn": table(curves)}, pictures)
    if failed:
        raise Failed(f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}")
    print(f"wrote {pictures}")


if __name__ == "__main__":
    command_line(main, Args, __doc__)
