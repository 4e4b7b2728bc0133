"""The run folder: flags, metrics, samples, curves, checkpoints, the agents; and what the terminal shows."""

import contextlib
import csv
import dataclasses
import fcntl
import functools
import importlib.metadata
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import torch
from accelerate.utils import gather_object
from matplotlib.figure import Figure
from safetensors import SafetensorError
from tqdm import tqdm

from utils.checkpoint import WriteError, newest_whole, random_state, restore_random_state, sync, write_checkpoint
from utils.cli import Stopped, UserError, one_line, resumed_folder
from utils.ranges import Count, Natural, Positive

SAMPLES = 2  # joint samples written of each update
PACKAGES = "torch transformers accelerate peft datasets tokenizers safetensors numpy tyro wandb matplotlib tqdm".split()


@dataclasses.dataclass
class FolderArgs:
    """The run's folder, what is kept in it, what ends the run, who else is told."""

    output_dir: str | None = None  # folder of the run; none: runs/<script>__<task>__<seed>__<time>
    overwrite: bool = False  # replace the run that is already in --output-dir
    save_interval: Natural = 0  # updates between checkpoints, in <run>/checkpoints; 0: only at the end
    keep_checkpoints: Count = 2  # how many of the newest checkpoints stay
    resume: str | None = None  # go on with a run, from its newest whole checkpoint: its folder, or latest
    reward_timeout: Positive | None = None  # seconds a call of reward_func, reset or step may take; none: any time
    deterministic: bool = False  # take only algorithms of torch that give the same bits every time, on a GPU too
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "llm-teams"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team or user
    wandb_run_name: str | None = None  # Weights & Biases run name; none: the run folder's name
    wandb_tags: tuple[str, ...] = ()  # Weights & Biases tags


def run_folder(args, script, subject):
    """The folder that the run will write, not made yet, or goes on in (--resume); `subject` is the task's name.

    Raises UserError where a run is in it, without --overwrite, and where other flags began the run that is resumed.
    """
    if args.resume:
        return resumed_folder(args, script)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(args.output_dir or f"runs/{script}__{Path(subject).stem}__{args.seed}__{stamp}")
    if os.path.exists(folder) and not folder.is_dir():
        raise UserError(f"--output-dir takes a folder, and {folder} is a file")
    try:
        taken = outputs(folder)
    except OSError as error:
        raise UserError(f"--output-dir can't be {one_line(folder, 80)}: {error.strerror}") from error
    if taken and not args.overwrite:
        raise UserError(f"--output-dir takes a folder without a run in it; {folder} has one (--overwrite replaces it)")
    return folder


def outputs(folder):
    """What an earlier run left in a folder."""
    names = ["config.json", "metrics.csv", "samples.jsonl", "curves.png", "checkpoints", "agent_[0-9]*"]
    return [path for name in names for path in folder.glob(name)]


class Run:
    """A run under way, used as a context: `progress` over the updates, `time` its phases, `log` each update.

    `agents` have `schedules` of learning rates and the counts `skipped` and `parts`. save(folder, checkpoint) writes
    agents, load(checkpoint) restores them. Entering the context takes the folder and, with --resume, restores all of
    the newest checkpoint, of `step` updates. SIGTERM and SIGINT end the run after the update under way. However the
    loop ends, leaving the context saves. Of many processes only the main one writes.
    """

    def __init__(self, folder, args, updates, agents, save, load, generator, accelerator, optimum=None, held_out=None):
        self.folder, self.args, self.updates, self.agents, self.optimum = folder, args, updates, agents, optimum
        self.save, self.load, self.generator, self.accelerator = save, load, generator, accelerator
        self.held_out = held_out or "eval/reward_mean"  # the metric of what is held out
        self.main_process = accelerator.is_main_process
        self.step = self.saved = self.stop = 0  # updates done, updates in the last checkpoint, the signal that came
        self.rows, self.samples, self.seconds, self.totals = [], [], {}, {}
        self.wandb = self.wandb_id = self.bar = self.lock = self.heard = None
        self.started, self.drawn_at, self.drawing = time.time(), 0.0, 0.0
        self.random, self.handlers = random_state(generator), {}

    def __enter__(self):
        try:
            if self.main_process:
                with writing(self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self.lock = lock(self.folder)
            if self.args.resume:
                self.restore()
            if self.main_process:
                with writing(self.folder):
                    self.begin()
        except BaseException:
            self.release()
            raise
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self.handlers[number] = signal.signal(number, self.on_signal)
        torch.use_deterministic_algorithms(self.args.deterministic)
        if self.args.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return self

    def restore(self):
        """Take up the newest whole checkpoint, where there is one. Raises UserError."""
        path, state = newest_whole(self.folder / "checkpoints", tqdm.write if self.main_process else lambda _: None)
        if path is None:
            return
        processes = self.accelerator.num_processes
        if len(state["random"]) != processes:
            raise UserError(f"--resume {self.folder} is a run of {len(state['random'])} processes, not of {processes}")
        self.load(path)
        self.step = self.saved = state["step"]
        for agent, counts in zip(self.agents, state["agents"], strict=True):
            agent.skipped, agent.parts = counts["skipped"], counts["parts"]
            for schedule in agent.schedules:
                schedule.last_epoch = self.step - 1
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that no optimiser has made a step yet
                    schedule.step()
        self.totals, self.wandb_id = state["totals"], state["wandb"]
        self.started -= state["elapsed"]
        self.random = state["random"][self.accelerator.process_index]
        restore_random_state(self.random, self.generator)
        if self.main_process:
            begun = ", and some of the next" if state["learning"] else ""
            tqdm.write(f"going on from {path}: {self.step} of {self.updates} updates are done{begun}")

    def begin(self):
        """Make the folder what it is after `step` updates: flags, rows of metrics, samples; nothing of an older run."""
        samples = []
        if self.step:
            try:
                self.rows = read_rows(self.folder / "metrics.csv")[: self.step]
                samples = [s for s in read_lines(self.folder / "samples.jsonl") if s["update"] <= self.step]
            except (ValueError, KeyError, TypeError) as error:
                told = f"metrics.csv or samples.jsonl in {self.folder} has a line that can't be read"
                raise UserError(f"{told}: {one_line(error)}") from error
        if len(self.rows) < self.step:
            raise UserError(f"{self.folder}/metrics.csv has {len(self.rows)} of the {self.step} updates that are done")
        if not self.step:
            for path in outputs(self.folder):  # the flags first: without them the rest is no run
                if not (self.args.resume and path.name == "config.json"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        config = {"command": sys.argv, "args": dataclasses.asdict(self.args), "versions": versions()}
        config |= {"git_commit": git_commit()}
        write_whole(self.folder / "config.json", json.dumps(config, indent=2) + "\n")
        if self.step:
            self.write_all_metrics()
            lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
            write_whole(self.folder / "samples.jsonl", "".join(lines))
            self.samples = samples[-200:]
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        for path in (self.folder / "checkpoints").glob("update_*.*ing"):  # half written, half removed
            shutil.rmtree(path)
        if self.args.track:
            self.start_wandb(config)
        tqdm.write(f"writing {self.folder}")

    def on_signal(self, number, frame):
        if self.heard is None:
            self.stop, self.heard = number, time.monotonic()
            told = "the update under way is finished and saved, then the run stops; once more, and it stops at once"
            os.write(2, f"\n{signal.Signals(number).name}: {told}\n".encode())
        elif time.monotonic() - self.heard > 1:  # sooner it is no second one: `timeout` sends its own twice
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def progress(self, iterable):
        """Pass through an iterable of updates, showing a bar."""
        look = {"unit": "update", "disable": not self.main_process, "dynamic_ncols": True}
        self.bar = tqdm(iterable, total=self.updates, initial=self.step, **look)
        return self.bar

    @contextlib.contextmanager
    def time(self, phase):
        """Add the seconds of a block to a phase of this update; phases may be entered many times."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def log(self, row, items, rollouts):
        """Write an update: its numbers (`reward_mean` and `new_tokens` among them) and its first joint samples.

        `items` are the B items; `rollouts` has for each agent the `prompts`, `texts` and `rewards` of the turns of its
        `episodes`. Adds the seconds of each phase since the last call, and the speeds; `new_tokens` is not written.
        Saves when it is time. Raises Stopped after a signal, WriteError where the disk does not take it.
        """
        self.step, seconds = self.step + 1, self.add_up()
        self.random = random_state(self.generator)
        with self.time("log, save"):
            if self.main_process:
                with writing(self.folder):
                    self.record(row, items, rollouts, seconds)
            if self.accelerator.num_processes > 1:
                signals = torch.tensor(self.stop, device=self.accelerator.device)
                self.stop = int(self.accelerator.gather(signals).max())
            if self.stop or self.args.save_interval and self.step % self.args.save_interval == 0:
                self.checkpoint()
        if self.stop:
            told = f"stopped by {signal.Signals(self.stop).name} after update {self.step} of {self.updates}"
            raise Stopped(f"{told}; {self.how_to_go_on()}", self.stop)

    def how_to_go_on(self):
        return f"go on with: python {Path(sys.argv[0]).name} --resume {self.folder}"

    def record(self, row, items, rollouts, seconds):
        phases = {f"time/{phase}": seconds.get(phase, 0.0) for phase in ("sample", "reward", "evaluate", "update")}
        held_out, tokens = {self.held_out: row.pop(self.held_out, None)}, row.pop("new_tokens")
        done = row["global_step"] - (self.rows[-1]["global_step"] if self.rows else 0)
        per_second = {"samples_per_second": done, "new_tokens_per_second": tokens}
        row |= phases | {name: amount / sum(phases.values()) for name, amount in per_second.items()} | held_out
        self.rows.append(row)
        self.write_metrics()
        with open(self.folder / "samples.jsonl", "a", encoding="utf-8") as file:
            for k in range(min(SAMPLES, len(items))):
                sample = {"update": self.step, "global_step": row["global_step"]}
                sample |= joint_sample(k, items[k], rollouts, self.args.num_turns)
                self.samples.append(sample)
                file.write(json.dumps(sample, ensure_ascii=False, default=str) + "\n")
        del self.samples[:-200]  # what the end shows
        self.bar.set_postfix_str(f"reward {row['reward_mean']:.2f}, {row['samples_per_second']:.0f} samples/s")
        if self.wandb:
            self.tell_wandb({key: value for key, value in row.items() if value is not None}, row["global_step"])
        if time.time() - self.drawn_at > 50 * self.drawing:  # drawing may take 2 % of the time
            self.draw()

    def checkpoint(self, learning=False):
        """Save the run as it is after `step` updates, or (`learning`) in the midst of the next. Raises WriteError."""
        states = gather_object([self.random]) if self.accelerator.num_processes > 1 else [self.random]
        if self.main_process:
            counts = [{"skipped": agent.skipped, "parts": agent.parts} for agent in self.agents]
            state = {"step": self.step, "learning": learning, "agents": counts, "totals": self.totals}
            state |= {"elapsed": time.time() - self.started, "wandb": self.wandb_id, "random": states}
            with writing(self.folder):
                for name in ("metrics.csv", "samples.jsonl", ""):
                    sync(self.folder / name)
            whole = functools.partial(self.save, checkpoint=True)
            write_checkpoint(self.folder / "checkpoints", self.step, whole, state, self.args.keep_checkpoints)
        self.saved = self.step

    def add_up(self):
        """Add this update's seconds to the totals; what they were."""
        seconds, self.seconds = self.seconds, {}
        for phase, spent in seconds.items():
            self.totals[phase] = self.totals.get(phase, 0.0) + spent
        return seconds

    def write_metrics(self):
        """Append the last row to metrics.csv; write the file anew where a column has come."""
        if len(self.rows) == 1 or self.rows[-1].keys() - set(self.columns):
            self.write_all_metrics()
        else:
            with open(self.folder / "metrics.csv", "a", newline="") as file:
                csv.writer(file).writerow(in_columns(self.rows[-1], self.columns))

    def write_all_metrics(self):
        self.columns = list(dict.fromkeys(key for row in self.rows for key in row))
        text = io.StringIO(newline="")
        csv.writer(text).writerows([self.columns, *(in_columns(row, self.columns) for row in self.rows)])
        write_whole(self.folder / "metrics.csv", text.getvalue())

    def draw(self):
        start = time.time()
        draw_curves(self.rows, self.folder / "curves.png", self.folder.name, self.held_out, self.optimum)
        self.drawn_at, self.drawing = time.time(), time.time() - start

    def __exit__(self, kind, error, trace):
        alone, failed = self.accelerator.num_processes == 1, kind not in (None, Stopped)
        try:
            if self.bar is not None:
                self.bar.close()
            if self.saved < self.step and kind is not WriteError and (alone or not failed):
                self.checkpoint(learning="update" in self.seconds)
            if self.main_process and kind is not WriteError:
                self.finish(kind)
            if self.main_process and failed and self.saved:
                print(self.how_to_go_on(), flush=True)
        finally:
            self.release()
        if kind is RuntimeError and "probability tensor" in str(error):
            raise UserError("the probabilities of tokens are not finite: lower the learning rates") from error
        if kind is RuntimeError and self.args.deterministic and "deterministic" in str(error):
            raise UserError(f"--deterministic: {one_line(error)}") from error

    def finish(self, kind):
        """Write and show what a run leaves; `kind` is the type of the error that ended it, or None."""
        with self.time("log, save"), writing(self.folder):
            self.save(self.folder, checkpoint=False)
        self.add_up()
        if self.rows:
            with writing(self.folder):
                self.draw()
            print(side_by_side(self.samples[-2:]))
            print(time_table(self.totals, time.time() - self.started))
            print(self.outcome())
        print(f"{'stopped early; ' if kind else ''}the run is in {self.folder}", flush=True)
        if self.wandb and self.samples:
            import wandb

            columns = ["global_step", "item", *(f"agent_{i}" for i in range(len(self.samples[0]["completions"])))]
            rows = [
                [s["global_step"], one_line(s["item"]), *map(as_text, s["completions"]), s["reward"]]
                for s in self.samples
            ]
            self.tell_wandb({"samples": wandb.Table(columns=[*columns, "reward"], data=rows)})
        if self.wandb:
            with contextlib.suppress(Exception):
                self.wandb.finish(exit_code=int(kind is not None))

    def release(self):
        """Give back the signals, torch's algorithms and the folder."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        torch.use_deterministic_algorithms(False)
        if self.lock:
            self.lock.close()

    def start_wandb(self, config):
        """Start Weights & Biases, or go on with its run; where it can't be reached, log into the folder, and say so."""
        import wandb

        args = self.args
        known = {"project": args.wandb_project_name, "entity": args.wandb_entity, "tags": list(args.wandb_tags)}
        known |= {"name": args.wandb_run_name or self.folder.name, "config": config, "dir": self.folder}
        known |= {"id": self.wandb_id, "resume": "allow" if self.wandb_id else None}
        for mode in (None, "offline"):
            try:
                self.wandb = wandb.init(**known, mode=mode)
                self.wandb_id = self.wandb.id
                return
            except Exception as error:
                told = f"--track: Weights & Biases does not start ({one_line(error)})"
                tqdm.write(f"{told}; {'the run goes on without it' if mode else 'logging offline, for wandb sync'}")

    def tell_wandb(self, values, step=None):
        """Log to Weights & Biases; where it fails, do without it from now on, and say so."""
        try:
            self.wandb.log(values, step=step)
        except Exception as error:
            tqdm.write(f"--track: Weights & Biases fails ({one_line(error)}); the run goes on without it")
            with contextlib.suppress(Exception):
                self.wandb.finish(exit_code=1)
            self.wandb = None

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


def lock(folder):
    """Take a folder for this process, until the file returned is closed. Raises UserError where another has it."""
    file = open(folder / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise UserError(f"another run is under way in {folder}") from error
    return file


@contextlib.contextmanager
def writing(folder):
    """Within it, a disk that does not take what is written becomes a WriteError of one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{folder} can't be written: {one_line(error)}") from error


def write_whole(path, text):
    """Write a file aside, then rename it: it is never half there."""
    aside = path.with_name(path.name + ".writing")
    with open(aside, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    sync(aside)
    os.replace(aside, path)


def in_columns(row, columns):
    return ["" if row.get(key) is None else f"{row[key]:.9g}" for key in columns]


def read_rows(path):
    """The whole rows of a metrics.csv: numbers by name, None where there is none."""
    columns, *rows = [*csv.reader(whole_lines(path))] or [[]]
    return [{key: float(x) if x else None for key, x in zip(columns, row, strict=True)} for row in rows]


def read_lines(path):
    """The whole lines of a file, each a JSON value."""
    return [json.loads(line) for line in whole_lines(path)]


def whole_lines(path):
    """The lines of a file, if there is one, but for a last one that was cut off."""
    return [line.decode() for line in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []


def versions():
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def git_commit():
    """The commit of this code, with `+` after it where a .py or a file in utils/ differs; None: no checkout."""
    here = Path(__file__).resolve().parent
    try:
        say = {"cwd": here, "capture_output": True, "text": True, "check": True}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **say).stdout.strip()
        differing = ["git", "status", "--porcelain", "-uno", "--", ":(top)*.py", ":(top)utils"]
        return commit + "+" * bool(subprocess.run(differing, **say).stdout.strip())
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
