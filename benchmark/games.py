"""What keeps self-play from going round in circles? Poker, scored exactly, under kinds of regularisation.

    python -m benchmark.games --workers 2                                    Kuhn poker, four to five hours on two cores
    python -m benchmark.games --only "moving reference"                      one rule alone, 40 minutes
    python -m benchmark.games --size quick --seeds 1 --output-dir runs/kuhn  all rules in short, in two minutes
    python -m benchmark.games --game leduc --workers 2                       Leduc poker, one to two hours a run

One agent of 0.18 million parameters, which begins with each legal move as likely as any other (make_game_lm), plays
both seats for 400 updates, each of 256 matches of Kuhn poker or 128 of Leduc poker; under one rule of Kuhn poker two
agents have a seat each. Exploitability is computed every 25 updates. Runs are made in <output-dir>/runs, one thread
each, what is kept of them in <output-dir>/results, and runs that are kept are not made again: the command may be
stopped and given again. The rows of Leduc poker in benchmark/leduc were not kept by it (games.md says how they were
made), so that it makes those runs anew, and half an hour before them the model that they begin from. The table is put
into games.md, the picture beside it.
"""

import shlex
from dataclasses import dataclass
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
SCORE = "eval/exploitability"
FOLLOWING = "--kl-loss-coef 0.5 --reference-update-interval 50"


@dataclass(frozen=True)
class Game:
    """A game, how it is played, and what regularises."""

    title: str
    uniform: float  # exploitability of a player who takes each legal move as often as any other
    flags: str  # of every run
    size: str  # flags of a full run: its matches, those of an update, how many are learned from at a time
    variants: dict  # of each rule GAE's lambda, and its flags
    reading_coef: float = 0.0  # of the model that runs begin from


GAMES = {
    "kuhn": Game(
        title="Kuhn poker",
        uniform=0.458,
        flags="--num-turns 3",
        size="--train-size 102400 --rollout-buffer-size 256 --mini-batch-size 256 --micro-batch-size 256",
        variants={
            "moving reference": (0.85, FOLLOWING),
            "moving reference, whole returns": (1, FOLLOWING),
            "moving reference, one baseline": (0.85, f"{FOLLOWING} --no-turn-baseline"),
            "moving reference, two agents": (0.85, f"--no-self-play {FOLLOWING}"),
            "nothing": (1, "--kl-loss-coef 0"),
            "entropy, lowered": (1, "--kl-loss-coef 0 --entropy-coef 0.4 --entropy-coef-end 0"),
            "entropy, held": (1, "--kl-loss-coef 0 --entropy-coef 0.4"),
            "little entropy, lowered": (1, "--kl-loss-coef 0 --entropy-coef 0.05 --entropy-coef-end 0"),
            "initial reference": (1, "--kl-loss-coef 0.5"),
            "4 earlier copies": (1, "--kl-loss-coef 0 --opponents 4"),
        },
    ),
    "leduc": Game(
        title="Leduc poker",
        uniform=2.374,
        flags="--num-turns 8 --reward-normalization",
        size="--train-size 51200 --rollout-buffer-size 128 --mini-batch-size 128 --micro-batch-size 16",
        variants={
            "moving reference": (0.85, FOLLOWING),
            "nothing": (0.85, "--kl-loss-coef 0"),
            "initial reference": (0.85, "--kl-loss-coef 0.5"),
        },
        reading_coef=1.0,
    ),
}
QUICK = "--train-size 512 --rollout-buffer-size 64 --mini-batch-size 64 --micro-batch-size 64 --eval-interval 4"


def job_of(name, variant, seed, base, size):
    """A run in <variant>__<seed>."""
    game = GAMES[name]
    gae_lambda, regularised = game.variants[variant]
    words = f"python ppo_llm.py --model {base} --env open_spiel:{name}_poker --num-agents 2 --self-play {game.flags}"
    words += " --max-new-tokens 2 --lora-rank 0 --no-use-separate-critic --update-epochs 1 --num-train-epochs 1"
    words += f" --gae-lambda {gae_lambda} --actor-learning-rate 1e-3 --critic-learning-rate 2e-3 --adam-beta2 0.999"
    words += f" {f'{game.size} --eval-interval 25' if size == 'full' else QUICK} {regularised} --seed {seed}"
    return Job(f"{folder_of(variant)}__{seed}", shlex.split(words))


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
    """A row for each rule, of as many matches as all runs have played."""
    shortest = min(matches[-1] for seeds in curves.values() for matches, *_ in seeds)
    lines = []
    for variant, seeds in curves.items():
        seeds = [seed[:, seed[0] <= shortest] for seed in seeds]
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
    score = f"exploitability after {shortest:,.0f} matches"
    header = f"regularised by|seeds|{score}|95 % interval|of each seed|mean of lowest|illegal answers"
    return plot.markdown(header, lines)


def draw(curves, game, path):
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
    axis.axhline(game.uniform, color="grey", linewidth=0.8, linestyle=":", label="uniformly random")
    plot.dress(axis, f"{game.title} by self-play")
    axis.set_xlabel("matches", fontsize=9)
    axis.set_ylabel("exploitability", fontsize=9)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)


@flags
class StudyArgs:
    """What is run, and where it goes."""

    game: Literal["kuhn", "leduc"] = "kuhn"  # the poker that is played
    size: Literal["full", "quick"] = "full"  # quick: a few small updates
    seeds: tuple[int, ...] = (1, 2, 3)  # seeds of every run
    only: tuple[str, ...] = ()  # rules to run, as the tables in games.md name them; none: all
    workers: PositiveInt = 1  # runs at a time, of one thread each
    output_dir: str | None = None  # folder of the runs, their first model, and what is kept; none: benchmark/<game>


@flags
class Args(StudyArgs):
    """All flags."""


def main(args):
    """Make what is missing; draw and write. Raises UserError, and Failed where a run failed."""
    check_seeds(args.seeds)
    game, is_quick = GAMES[args.game], args.size == "quick"
    args.output_dir = args.output_dir or f"{HERE.name}/{args.game}"
    folder = Path(args.output_dir)
    if is_quick and folder.resolve() in {HERE / name for name in GAMES}:
        raise UserError(f"--size quick takes another --output-dir: the full results are in {folder}")
    for variant in args.only:
        if variant not in game.variants:
            raise UserError(f"--only takes {', '.join(map(repr, game.variants))}, got {variant!r}")
    base = folder / "runs" / f"{args.game}_lm"
    jobs = [job_of(args.game, v, seed, base, args.size) for seed in args.seeds for v in args.only or game.variants]
    kept = finished(folder / "results")
    if not (base / "config.json").exists() and any(job.name not in kept for job in jobs):
        steps, coef = 20 if is_quick else 200, game.reading_coef
        env = f"open_spiel:{args.game}_poker"
        make_game_lm.main(make_game_lm.Args(env=env, out=str(base), steps=steps, reading_coef=coef))
    failed = make(jobs, args)
    curves = {variant: seeds for variant in game.variants if (seeds := scores(folder / "results", variant))}
    pictures = folder if is_quick else HERE
    if curves:
        with writing(folder):
            draw(curves, game, pictures / f"{args.game}.png")
            fill([HERE / "games.md"], {args.game: table(curves)}, pictures)
    if failed:
        raise Failed(f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}")
    print(f"wrote {pictures}")


if __name__ == "__main__":
    command_line(main, Args, __doc__)
