"""Play small games of one ability each: in minutes, what an algorithm learns, and what it does not.

    python -m utils.probe --command "python ppo_llm.py" --quick
    python -m utils.probe --command "python mine.py --gae-lambda 1" --seeds 1 2 3 --picture probes.png

A game takes --episodes of an untrained model of 0.1 million parameters that knows eight letters, so that it says any of
them from the start. utils/tasks/probe.py and utils/envs/probe.py have the games, and the exact scores of a player of
uniformly random letters and of the best one; a script is to have --task, and with --env it plays `truncation` too. The
score is the mean reward of the last tenth of updates, as sampled; of `truncation`, what such answers are worth with
what was cut counted; of `critic`, what share of the reward's variance the values explain, or what is left of the
policy's entropy, whichever is less (the latter where there is no critic). The share of the way is that from the random
player to the best, or, of `critic`, from 0 to 1. From 90 % on it counts as learned.
"""

import contextlib
import csv
import io
import json
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from pydantic import PositiveInt
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from utils import benchmark
from utils.cli import UserError, command_line, flags
from utils.envs import probe as truncation
from utils.files import disk_errors, put, write_whole, writing
from utils.make_tiny_lm import ASSISTANT, CHAT_TEMPLATE, END, PAD, SYSTEM, USER
from utils.run.report import COLORS
from utils.tasks import probe as games

LEARNED = 0.9  # the share of the way from which on a game counts as learned
FLAGS = {  # what a probe sets, and the flag for it
    "num_agents": "--num-agents",
    "num_turns": "--num-turns",
    "num_tokens": "--max-new-tokens",
    "evaluations": "--eval-interval",
}


@flags
class ProbeArgs:
    """What is probed, how long, and what is kept of it."""

    command: str = ""  # required: a script and its flags but for task, team, model, seed and folder
    quick: bool = False  # one size of each game; else every size
    episodes: PositiveInt = 3200  # of each game
    probes: tuple[str, ...] = ()  # games, such as first, or first-4 of one size; none: all
    seeds: tuple[int, ...] = (1,)  # values of --seed
    workers: PositiveInt = 2  # runs at a time, of one thread each
    output_dir: str | None = None  # keep the runs in this folder, and go on with those that are there; none: they go
    json: str | None = None  # write the table to this file, as JSON
    picture: str | None = None  # draw the shares of the way to this file, as PNG


@flags
class Args(ProbeArgs):
    """All flags."""


@dataclass
class Probe:
    """A game, what it is played with, and what its players earn."""

    name: str  # such as first-4
    ability: str
    words: list  # flags that play it
    random: float  # the score of a uniformly random player
    best: float
    first: list = field(default_factory=list)  # scores, one of each seed, of the first update
    last: list = field(default_factory=list)  # and of the last tenth of updates
    seconds: float = 0.0  # of all seeds

    @property
    def shares(self):
        """Of the way from the random player to the best one, one of each seed."""
        return [(score - self.random) / (self.best - self.random) for score in self.last]

    @property
    def share(self):
        """Their mean; None: it was not played."""
        return mean(self.shares) if self.last else None

    @property
    def verdict(self):
        if self.share is None:
            return "failed"
        return "learned" if self.share >= LEARNED else f"{self.share:.0%} of the way"


# --- What is played ---------------------------------------------------------------------------------------------------


def probes_of(args, known_flags):
    """The probes that the flags name, or all that a script with these flags can play. Raises UserError."""
    names = []
    for game, sizes in games.GAMES.items():
        names += [f"{game.__name__}-{size}" for size in (sizes[:1] if args.quick else sorted(sizes))]
    if "--env" in known_flags:
        names.append("truncation-2")
    chosen = []
    for name in args.probes:
        found = [each for each in names if name in (each, each.rpartition("-")[0])]
        if not found and name != "truncation-2":
            with contextlib.suppress(ValueError):
                games.game_of(name)
                found = [name]
        if not found:
            kinds = dict.fromkeys(each.rpartition("-")[0] for each in names)
            raise UserError(f"--probes takes {', '.join(kinds)}, or one with its size, as first-4, got {name}")
        chosen += found
    return [probe_of(name, known_flags) for name in dict.fromkeys(chosen or names)]


def probe_of(name, known_flags):
    """The Probe of a name, for a script with these flags. Raises UserError where it lacks one."""
    values = {"num_agents": 1, "num_turns": 2, "num_tokens": 1, "evaluations": 0}
    if name == "truncation-2":
        ability = "a truncated episode: what would have come counts"
        words = ["--env", "probe"]
        scores = [truncation.worth(p * truncation.SURE + (1 - p) * truncation.GOES_ON) for p in (0.25, 0.0)]
    else:
        game = games.game_of(name)
        ability = game.ability
        words = ["--task", "probe", "--dataset", name]
        values |= {key: getattr(game, key) for key in ("num_agents", "num_turns", "num_tokens")}
        scores = [games.score(game, choose) for choose in (games.mean, max)]
    if name.startswith("critic-"):
        scores = [0.0, 1.0]
    if scores[0] == scores[1]:
        raise UserError(f"--probes {name}: whatever is said earns the most, so that there is nothing to learn")
    for key, value in values.items():
        if FLAGS[key] in known_flags:
            words += [FLAGS[key], str(value)]
        elif value > 1:
            raise UserError(f"--command: the script has no {FLAGS[key]}, which {name} takes")
    return Probe(name, ability, words, *scores)


def make_model(folder):
    """Write an untrained Llama that knows eight letters, two words and the tokens of a chat, and says any of them.

    Its weights are large enough for logits of about 1, and the same each time.
    """
    special = [PAD, END, USER, ASSISTANT, SYSTEM]
    words = [*special, *games.LETTERS, *games.WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=special[2:],
        padding_side="left",
        model_max_length=128,
        chat_template=CHAT_TEMPLATE,
    )
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.125,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    with contextlib.redirect_stderr(io.StringIO()):  # the bar of a single file
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- What came of it --------------------------------------------------------------------------------------------------


def scores_of(probe, folder):
    """(score of the first update, of the last tenth of updates) of a run."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    tenth = rows[-max(1, len(rows) // 10) :]

    def of_agents(rows, name):
        return mean(float(row[key]) for row in rows for key in row if key.endswith(f"/{name}"))

    if probe.name.startswith("critic-"):
        scores = []
        for part in (rows[:1], tenth):
            left = of_agents(part, "entropy") / of_agents(rows[:1], "entropy")
            has_critic = any(key.endswith("/explained_variance") for key in rows[0])
            scores.append(min(left, of_agents(part, "explained_variance")) if has_critic else left)
        return tuple(scores)
    scores = [mean(float(row["reward_mean"]) for row in part) for part in (rows[:1], tenth)]
    if probe.name == "truncation-2":
        scores = [truncation.worth(score) for score in scores]
    return tuple(scores)


def play(probes, words, args, folder):
    """Play the probes with each seed, in runs below a folder, and fill in what came of it. Raises UserError."""
    model = folder / "model"
    if not model.exists():
        with writing(folder), disk_errors():
            make_model(folder / "model.writing")
            put(folder / "model.writing", model)
    jobs = {}
    for probe in probes:
        for seed in args.seeds:
            own = ["--model", str(model), "--max-episodes", str(args.episodes), "--seed", str(seed)]
            jobs[probe.name, seed] = benchmark.Job(f"{probe.name}__{seed}", [*words, *probe.words, *own])
    benchmark.run_jobs(list(jobs.values()), folder, args.workers)
    records = benchmark.manifest(folder)
    for probe in probes:
        for seed in args.seeds:
            record = records[jobs[probe.name, seed].name]
            probe.seconds += record["seconds"]
            if record["status"] == "finished":
                first, last = scores_of(probe, folder / jobs[probe.name, seed].name)
                probe.first.append(first)
                probe.last.append(last)


def table(probes):
    """The probes as a table of Markdown."""
    lines = ["| probe | what it takes | at first | in the end | random | best | the way | verdict | seconds |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for probe in probes:
        cells = [probe.name, probe.ability]
        cells += [f"{mean(scores):.2f}" if scores else "" for scores in (probe.first, probe.last)]
        cells += [f"{probe.random:.2f}", f"{probe.best:.2f}", "" if probe.share is None else f"{probe.share:.0%}"]
        cells += [probe.verdict, f"{probe.seconds:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def middle_mean(values):
    """The interquartile mean: of what is left without the lowest and the highest quarter (arXiv 2108.13264)."""
    values = sorted(values)
    quarter = len(values) // 4
    return mean(values[quarter : len(values) - quarter])


def draw(probes, path, title):
    """Bars of the share of the way, a dot for each seed."""
    figure = Figure(figsize=(11, 1.2 + 0.3 * len(probes)), layout="constrained")
    axis = figure.subplots()
    axis.set_title(title, loc="left", fontsize=10, parse_math=False)
    for k, probe in enumerate(probes):
        share = probe.share or 0.0
        axis.barh(k, share, color=COLORS[2] if share >= LEARNED else COLORS[1], height=0.7)
        axis.plot(probe.shares, [k] * len(probe.shares), ".", color="black", markersize=5)
    axis.axvline(LEARNED, color="black", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(probes)), [f"{probe.ability}  {probe.name}" for probe in probes], fontsize=8)
    axis.set_ylim(len(probes) - 0.4, -0.6)
    axis.set_xlim(-0.25, 1.1)
    axis.set_xlabel("share of the way from random (0) to best (1)", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    with writing(Path(path).parent):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100, format="png")


def main(args):
    """Play the probes, and print, write and draw what came of them. Exits with code 1 where a run failed."""
    words, _ = benchmark.words_of(args.command, ("--task", "--env", "--model", "--num-agents", "--max-episodes"))
    benchmark.check_seeds(args.seeds)
    for flag, name in (("--json", args.json), ("--picture", args.picture)):
        if name and Path(name).is_dir():
            raise UserError(f"{flag} takes a file to write, and {name} is a folder")
    probes = probes_of(args, benchmark.known_flags(words, ("--task",)))
    started = time.time()
    with contextlib.ExitStack() as stack:
        folder = args.output_dir or stack.enter_context(tempfile.TemporaryDirectory())
        play(probes, words, args, Path(folder))
    print(f"\n{args.command}, seeds {' '.join(map(str, args.seeds))}\n\n{table(probes)}\n")
    learned = sum(probe.verdict == "learned" for probe in probes)
    shares = [share for probe in probes for share in probe.shares]
    middle = f"; interquartile mean of the way {middle_mean(shares):.1%}" if shares else ""
    print(f"{learned} of {len(probes)} probes are learned{middle}; {time.time() - started:.0f} s")
    if args.json:
        entries = [asdict(probe) | {"share": probe.share, "verdict": probe.verdict} for probe in probes]
        with writing(Path(args.json).parent):
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            write_whole(Path(args.json), json.dumps({"command": args.command, "probes": entries}, indent=1) + "\n")
    if args.picture:
        draw(probes, args.picture, args.command)
    failed = [probe.name for probe in probes if len(probe.last) < len(args.seeds)]
    if failed:
        raise benchmark.Failed(f"{len(failed)} of {len(probes)} probes failed: {', '.join(failed)}")


if __name__ == "__main__":
    command_line(main, Args, __doc__)
