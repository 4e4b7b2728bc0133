"""The run folder: flags, a row of metrics per update, samples, curves, the agents; and what the terminal shows."""

import contextlib
import csv
import dataclasses
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

from utils.cli import UserError, one_line

SAMPLES = 2  # joint samples written of each update
PACKAGES = "torch transformers accelerate peft datasets tokenizers safetensors numpy tyro wandb matplotlib tqdm".split()


def run_folder(args, script, subject):
    """The folder that the run will write, not made yet; `subject` is the task's name.

    Raises UserError where a run is in it, without --overwrite.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(args.output_dir or f"runs/{script}__{Path(subject).stem}__{args.seed}__{stamp}")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output-dir takes a folder, and {folder} is a file")
    if outputs(folder) and not args.overwrite:
        raise UserError(f"--output-dir takes a folder without a run in it; {folder} has one (--overwrite replaces it)")
    return folder


def outputs(folder):
    """What an earlier run left in a folder."""
    names = ["config.json", "metrics.csv", "samples.jsonl", "curves.png", "checkpoints", "agent_[0-9]*"]
    return [path for name in names for path in folder.glob(name)]


class Run:
    """A run under way, used as a context: `progress` over the updates, `time` its phases, `log` each update.

    However the loop ends, leaving the context saves the agents with `save(folder)` and closes the files. Of many
    processes only the main one writes.
    """

    def __init__(self, folder, args, updates, save, accelerator, optimum=None, held_out="eval/reward_mean"):
        self.folder, self.args, self.updates, self.save, self.optimum = folder, args, updates, save, optimum
        self.held_out = held_out  # the metric of what is held out
        self.main_process = accelerator.is_main_process
        self.rows, self.samples, self.seconds, self.totals = [], [], {}, {}
        self.wandb = self.bar = None
        self.started, self.drawn_at, self.drawing = time.time(), 0.0, 0.0

    def __enter__(self):
        if self.main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in outputs(self.folder):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            (self.folder / "checkpoints").mkdir()
            config = {"command": sys.argv, "args": dataclasses.asdict(self.args), "versions": versions()}
            (self.folder / "config.json").write_text(json.dumps(config | {"git_commit": git_commit()}, indent=2) + "\n")
            if self.args.track:
                self.wandb = start_wandb(self.folder, self.args, config)
            tqdm.write(f"writing {self.folder}")
        return self

    def progress(self, iterable):
        """Pass through an iterable of updates, showing a bar."""
        self.bar = tqdm(iterable, total=self.updates, unit="update", disable=not self.main_process, dynamic_ncols=True)
        return self.bar

    @contextlib.contextmanager
    def time(self, phase):
        """Add the seconds of a block to a phase of this update; phases may be entered many times."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def log(self, row, items, rollouts):
        """Write an update: its numbers (`reward_mean` and `new_tokens` among them) and its first joint samples.

        `items` are the B items; `rollouts` has for each agent the `prompts`, `texts` and `rewards` of the turns of its
        `episodes`. Adds the seconds of each phase since the last call, and the speeds; `new_tokens` is not written.
        """
        seconds = self.add_up()
        if not self.main_process:
            return
        start = time.perf_counter()
        phases = {f"time/{phase}": seconds.get(phase, 0.0) for phase in ("sample", "reward", "evaluate", "update")}
        held_out, tokens = {self.held_out: row.pop(self.held_out, None)}, row.pop("new_tokens")
        done = row["global_step"] - (self.rows[-1]["global_step"] if self.rows else 0)
        per_second = {"samples_per_second": done, "new_tokens_per_second": tokens}
        row |= phases | {name: amount / sum(phases.values()) for name, amount in per_second.items()} | held_out
        self.rows.append(row)
        self.write_metrics()
        for k in range(min(SAMPLES, len(items))):
            sample = {"update": len(self.rows), "global_step": row["global_step"]}
            sample |= joint_sample(k, items[k], rollouts, self.args.num_turns)
            self.samples.append(sample)
            with open(self.folder / "samples.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(sample, ensure_ascii=False, default=str) + "\n")
        self.bar.set_postfix_str(f"reward {row['reward_mean']:.2f}, {row['samples_per_second']:.0f} samples/s")
        if self.wandb:
            self.wandb.log({key: value for key, value in row.items() if value is not None}, step=row["global_step"])
        if time.time() - self.drawn_at > 50 * self.drawing:  # drawing may take 2 % of the time
            self.draw()
        if self.args.save_interval and len(self.rows) % self.args.save_interval == 0:
            self.save(self.folder / "checkpoints" / f"update_{len(self.rows):06d}")
        self.seconds["log, save"] = time.perf_counter() - start

    def add_up(self):
        """Add this update's seconds to the totals; what they were."""
        seconds, self.seconds = self.seconds, {}
        for phase, spent in seconds.items():
            self.totals[phase] = self.totals.get(phase, 0.0) + spent
        return seconds

    def write_metrics(self):
        """Append the last row to metrics.csv; write the file anew where a column has come."""
        columns = (
            list(dict.fromkeys(key for row in self.rows for key in row)) if len(self.rows) > 1 else list(self.rows[0])
        )
        anew = len(self.rows) == 1 or columns != self.columns
        self.columns = columns
        with open(self.folder / "metrics.csv", "w" if anew else "a", newline="") as file:
            writer = csv.writer(file)
            if anew:
                writer.writerow(columns)
            for row in self.rows if anew else self.rows[-1:]:
                writer.writerow(["" if row.get(key) is None else f"{row[key]:.9g}" for key in columns])

    def draw(self):
        start = time.time()
        draw_curves(self.rows, self.folder / "curves.png", self.folder.name, self.held_out, self.optimum)
        self.drawn_at, self.drawing = time.time(), time.time() - start

    def __exit__(self, kind, error, trace):
        if not self.main_process:
            return
        if self.bar is not None:
            self.bar.close()
        with self.time("log, save"):
            self.save(self.folder)
        self.add_up()
        if self.rows:
            self.draw()
            print(side_by_side(self.samples[-2:]))
            print(time_table(self.totals, time.time() - self.started))
            print(self.outcome())
        print(f"{'stopped early; ' if kind else ''}the run is in {self.folder}", flush=True)
        if self.wandb:
            if self.samples:
                import wandb

                columns = ["global_step", "item", *(f"agent_{i}" for i in range(len(self.samples[0]["completions"])))]
                rows = [
                    [s["global_step"], one_line(s["item"]), *map(as_text, s["completions"]), s["reward"]]
                    for s in self.samples[-200:]
                ]
                self.wandb.log({"samples": wandb.Table(columns=[*columns, "reward"], data=rows)})
            self.wandb.finish(exit_code=int(kind is not None))

    def outcome(self):
        """The reward at first and in the end, and the best that there is, where the task knows it, in a line."""
        rewards = [row["reward_mean"] for row in self.rows]
        last = rewards[-max(1, len(rewards) // 10) :]
        outcome = f"reward: {rewards[0]:.3f} at first, {sum(last) / len(last):.3f} over the last tenth of updates"
        held_out = [row[self.held_out] for row in self.rows if row.get(self.held_out) is not None]
        outcome += f"; {self.held_out}: {held_out[-1]:.3f}" if held_out else ""
        return outcome + ("" if self.optimum is None else f"; optimal play: {self.optimum:.3f}")


def joint_sample(k, item, rollouts, num_turns):
    """Episode k for samples.jsonl: of each agent its text and reward, or, of several turns, lists of these."""
    rows = (rollouts[0].episodes == k).nonzero().flatten().tolist()
    rewards = [[float(rollout.rewards[row]) for row in rows] for rollout in rollouts]
    texts = [[rollout.texts[row] for row in rows] for rollout in rollouts]
    sample = {"reward": sum(map(sum, rewards)) / len(rewards)}
    if num_turns == 1:
        return sample | {"rewards": [r for (r,) in rewards], "item": item, "completions": [t for (t,) in texts]}
    prompts = [[rollout.prompts[row] for row in rows] for rollout in rollouts]
    return sample | {"rewards": rewards, "item": item, "prompts": prompts, "completions": texts}


def as_text(turns):
    """An agent's completions of one joint sample as one text."""
    return turns if isinstance(turns, str) else "\n".join(f"[{k}] {text}" for k, text in enumerate(turns, 1))


def start_wandb(folder, args, config):
    import wandb

    try:
        return wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            name=args.wandb_run_name or folder.name,
            tags=list(args.wandb_tags),
            config=config,
            dir=folder,
        )
    except Exception as error:
        raise UserError(
            f"--track: Weights & Biases does not start ({error}); WANDB_MODE=offline needs no account"
        ) from error


def versions():
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def git_commit():
    """The commit of this code, with `+` after it where files differ from it; None outside a git checkout."""
    here = Path(__file__).resolve().parent
    try:
        say = {"cwd": here, "capture_output": True, "text": True, "check": True}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **say).stdout.strip()
        return commit + "+" * bool(subprocess.run(["git", "status", "--porcelain", "-uno"], **say).stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return None


def time_table(totals, elapsed):
    """Where the time went, as text."""
    totals = {**totals, "start, end": max(0.0, elapsed - sum(totals.values()))}
    lines = [f"{phase:<12}{spent:>8.1f} s {spent / elapsed:>7.1%}" for phase, spent in totals.items()]
    return "\n".join(["", "where the time went", *lines, f"{'in all':<12}{elapsed:>8.1f} s", ""])


def side_by_side(samples, width=None):
    """Joint samples as text, the agents' responses in columns."""
    width = width or min(160, shutil.get_terminal_size((120, 24)).columns)
    lines = []
    for sample in samples:
        texts = sample["completions"]
        column = max(20, (width - 3 * (len(texts) - 1)) // len(texts))
        item = "  ".join(f"{key}: {one_line(value)}" for key, value in sample["item"].items())
        lines += [
            "",
            f"sample of update {sample['update']}, reward {sample['reward']:.2f}",
            *textwrap.wrap(item, width),
            "",
        ]
        cells = [
            [f"agent {i}:", *(line for part in as_text(text).split("\n") for line in textwrap.wrap(part, column))]
            for i, text in enumerate(texts)
        ]
        for k in range(max(map(len, cells))):
            row = [cell[k] if k < len(cell) else "" for cell in cells]
            lines.append(" | ".join(text.ljust(column) for text in row).rstrip())
    return "\n".join(lines)


def draw_curves(rows, path, title, held_out="eval/reward_mean", optimum=None):
    """curves.png: reward, response lengths, entropy, value loss, explained variance, distance to the initial model."""
    steps = [row["global_step"] for row in rows]
    agents = [key.split("/")[0] for key in rows[0] if key.endswith("/policy_loss")]
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(2, 3).flat

    def panel(label, lines, note=None):
        axis = next(axes)
        axis.set_title(label, loc="left", fontsize=11)
        axis.set_xlabel("joint samples", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        for color, (name, values) in zip(COLORS, lines):
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axis.plot(steps, smooth(values), color=color, linewidth=2, label=name)
        if len(lines) > 1 or note:
            axis.legend(frameon=False, fontsize=9)
        return axis

    def per_agent(metric):
        return [(agent.replace("_", " "), [row[f"{agent}/{metric}"] for row in rows]) for agent in agents]

    reward = panel("reward", [("training", [row["reward_mean"] for row in rows])], note=True)
    tests = [(row["global_step"], row[held_out]) for row in rows if row.get(held_out) is not None]
    if tests:
        reward.plot(*zip(*tests), "o", color="black", markersize=5, label="held-out items")
    if optimum is not None:
        reward.axhline(optimum, color="black", linestyle="--", linewidth=1, label="optimal play")
    reward.legend(frameon=False, fontsize=9)
    panel("response length (tokens)", per_agent("response_length"))
    panel("entropy (nats a token)", per_agent("entropy"))
    panel("value loss", per_agent("value_loss"))
    panel("explained variance of the critic", per_agent("explained_variance")).set_ylim(-1.05, 1.05)
    panel("log-prob. a token under the initial model", [("team", [row["reference_logprob"] for row in rows])])
    figure.savefig(path, dpi=100)


COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#555555"]  # Okabe and Ito


def smooth(values, reach=4):
    """Each value's mean with up to `reach` neighbours on either side, as many on both."""
    around = [min(reach, k, len(values) - 1 - k) for k in range(len(values))]
    return [sum(values[k - r : k + r + 1]) / (2 * r + 1) for k, r in enumerate(around)]
