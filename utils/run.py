"""The run folder: flags, metrics, samples, curves, checkpoints, the agents; and the run under way that writes it."""

import contextlib
import csv
import dataclasses
import importlib.metadata
import io
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
from pydantic import NonNegativeInt, PositiveInt
from tqdm import tqdm

from utils import distributed, tasks
from utils.checkpoint import (
    checkpoints,
    load_agents,
    newest_whole,
    random_state,
    restore_random_state,
    save_agents,
    write_checkpoint,
)
from utils.cli import Stopped, TaskError, UserError, find_run, flag_name, flags, flags_of, one_line
from utils.files import (
    WriteError,
    in_columns,
    lock,
    read_json,
    read_lines,
    read_rows,
    sync,
    whole_lines,
    write_whole,
    writing,
)
from utils.fork import START, copy_fork, fork_of, progress
from utils.metrics import by_agent, count_new_tokens, team_metrics
from utils.report import draw_curves, side_by_side, time_table
from utils.tracking import Tracker

SPARE = 50  # drawing curves, and saving where no interval is given, is done once in so many times its own seconds
SAMPLES = 2  # joint samples written of each update
EPOCHS = 3  # passes over the training set, where no flag says how long a run is
SHOWN = 200  # of the last joint samples, kept to be shown at the end
PHASES = ("sample", "reward", "learn")  # whose seconds are in metrics.csv, and make the speeds
COLUMNS = {
    "global_step",
    "epoch",
    "samples_per_second",
    "new_tokens_per_second",
    *(f"time/{phase}" for phase in PHASES),
}
PACKAGES = "torch transformers peft datasets tokenizers safetensors numpy pydantic tyro wandb matplotlib tqdm"


@flags
class FolderArgs:
    """The run's folder, what is kept in it, and where else it is logged."""

    output_dir: str | None = None  # folder of the run; none: runs/<script>__<task>__<seed>__<time>
    overwrite: bool = False  # replace the run that is already in --output-dir
    # updates between checkpoints, in <run>/checkpoints; none: such that they take 2 % of the time; 0: only at the end
    save_interval: NonNegativeInt | None = None
    keep_checkpoints: PositiveInt = 2  # how many of the newest checkpoints stay
    resume: str | None = None  # go on with a run, from its newest whole checkpoint: its folder, or latest
    # begin where another run was, with its flags, of which some may differ: RUN, or RUN/checkpoints/update_<n>
    fork: str | None = None
    # save and end after this update; --resume goes on to the end, or to another one
    pause_at: PositiveInt | None = None
    deterministic: bool = False  # take only algorithms of torch that give the same bits every time, on a GPU too
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "llm-teams"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team or user
    wandb_run_name: str | None = None  # Weights & Biases run name; none: the run folder's name
    wandb_tags: tuple[str, ...] = ()  # Weights & Biases tags


# Flags of how a run is kept and watched, and not of what it learns
OF_FOLDER = {field.name for field in dataclasses.fields(FolderArgs)} - {"deterministic", "fork"}

# Flags that change how large advantages are
OF_REWARDS = "task env dataset num_turns max_turns reward_normalization action_granularity gamma".split()

# --- The folder -------------------------------------------------------------------------------------------------------


def run_folder(args, script, subject=None, may_change=(), may_grow=("num_train_epochs", "max_steps")):
    """The folder that the run will write, not made yet, or goes on in (--resume).

    `script` is the path of the script's file, `subject` the task's name, if it is in the folder's. A run that is
    resumed takes the flags that began it, but for those of how it is kept and watched, those that `may_change`, and
    larger values (None: no bound) of those that `may_grow`. Raises UserError where flags differ, where a run is in the
    folder, without --overwrite, and where something else has the names of what a run writes.
    """
    name = Path(script).stem
    if args.resume:
        folder = find_run(args.resume, name)
        owner = Path(read_json(folder / "config.json").get("script", name)).stem
        if owner != name:
            raise UserError(f"--resume {args.resume} is a run of {owner}.py, and goes on with that script")
        if args.overwrite:
            raise UserError(f"--resume {args.resume} keeps what is done, and --overwrite would not: give one of them")
        its_own = (None, str(folder), flags_of(folder, type(args))["output_dir"])
        if args.output_dir not in its_own and Path(args.output_dir).resolve() != folder.resolve():
            raise UserError(f"--resume {args.resume} goes on in that folder: leave out --output-dir {args.output_dir}")
        check_same_flags(folder, args, may_change, may_grow)
        return folder
    parts = [name, args.seed, time.strftime("%Y%m%d-%H%M%S")]
    if subject is not None:
        parts.insert(1, Path(subject).stem)
    folder = Path(args.output_dir or "runs/" + "__".join(map(str, parts)))
    if os.path.exists(folder) and not folder.is_dir():
        raise UserError(f"--output-dir takes a folder, and {folder} is a file")
    try:
        taken = outputs(folder)
    except OSError as error:
        raise UserError(f"--output-dir can't be {one_line(folder, 80)}: {error.strerror}") from error
    if taken and not is_run(folder):
        names = ", ".join(sorted(path.name for path in taken))
        raise UserError(f"--output-dir can't be {folder}: a run would replace {names} there, and no run has left that")
    if taken and not args.overwrite:
        raise UserError(f"--output-dir takes a folder without a run in it; {folder} has one (--overwrite replaces it)")
    return folder


def check_same_flags(folder, args, may_change, may_grow):
    """Raise UserError, with all of them, where flags differ from those of the run in a folder and may not."""
    free = {*OF_FOLDER, "reward_timeout", *may_change}
    differing = []
    for name, there in flags_of(folder, type(args)).items():
        here = getattr(args, name)
        if name == "num_train_epochs" and here != there:
            here, there = here or EPOCHS, there or EPOCHS
        longer = name in may_grow and there is not None and (here is None or here > there)
        if here != there and name not in free and not longer:
            differing.append(f"{flag_name(name)} {there} there, {here} here")
    if differing:
        raise UserError(f"--resume {folder} goes on with that run's flags, and these differ: {'; '.join(differing)}")


def is_run(folder):
    """Whether a folder has the config.json of a run."""
    try:
        return {"script", "args"} <= read_json(folder / "config.json").keys()
    except UserError:
        return False


def check_untrained(folder):
    """Raise UserError where a run without checkpoints has learned: to begin anew would lose that."""
    updates = len(whole_lines(folder / "metrics.csv")[1:])
    agents = sorted(path.name for path in folder.glob("agent_[0-9]*"))
    if updates > 1 or agents:  # of the first alone, which was not saved, there is nothing but a row
        there = ", ".join([f"{updates} updates in metrics.csv", *agents])
        anew = f"--output-dir {folder} --overwrite begins anew"
        raise UserError(f"--resume: {folder} has no checkpoint to go on from; it has {there}, which are kept; {anew}")


def outputs(folder):
    """What an earlier run left in a folder."""
    names = [
        "checkpoints",
        "metrics.csv",
        "samples.jsonl",
        "curves.png",
        "agent_[0-9]*",
        "critic",
        "base",
        "config.json",
    ]
    return [path for name in names for path in folder.glob(name)]


# --- The run ----------------------------------------------------------------------------------------------------------


def length(args, num_items, items_per_update, begun=START):
    """(passes over the items, updates) of a run: `max_steps` ends its epochs, and, given alone, says how many.

    `begun` is where it was forked.
    """
    epochs = args.num_train_epochs or EPOCHS
    held = begun["step"] + (epochs * num_items - begun["items"]) // items_per_update
    if not args.max_steps:
        return epochs, held
    updates = begun["step"] + math.ceil((args.max_steps - begun["samples"]) / args.rollout_buffer_size)
    if args.num_train_epochs is None:
        items = begun["items"] + (updates - begun["step"]) * items_per_update
        return max(1, math.ceil(items / num_items)), updates
    if updates > held:
        samples = begun["samples"] + (held - begun["step"]) * args.rollout_buffer_size
        ends = f"{flag_name('num_train_epochs')} {epochs} ends the run after {samples}"
        distributed.say(f"{ends} of {flag_name('max_steps')} {args.max_steps} samples")
    return epochs, min(updates, held)


class Run:
    """A run, and the folder that it writes: a context, in which `updates` goes through the updates, `log` ends each.

    It begins with its flags, before anything is loaded or written; `start` gives it what learns. Entering the context
    takes the folder and, with --resume, restores all of the newest checkpoint, of `step` updates. SIGTERM, SIGINT and
    SIGHUP end the run after the update under way; what was done before it is saved at once, as a launcher may not wait
    so long. However the loop ends, leaving the context saves, but where one of several processes failed. Of many
    processes only the main one writes, and it decides on the folder.

    Its fields: `step`, updates done; `num_updates`; `rows` of metrics.csv; `totals`, seconds by phase; `folder`;
    `args`.
    """

    def __init__(
        self,
        args,
        script,
        subject,
        num_items,
        items_per_update,
        *,
        may_change=(),
        memory_flags=(),
        held_out_metric="eval/reward_mean",
        optimum=None,
    ):
        """A run over `num_items`, so many of them an update. Raises UserError as `run_folder` does.

        `args` has, beside the folder's flags, seed, num_train_epochs, max_steps and rollout_buffer_size. `script` is
        the path of the script's file, `subject` the task's name, if it is in the folder's. `memory_flags`, {phase:
        (name, size)}, are flags that take less memory where they are lower, and what they stand for, in all processes
        together, where they are None; they may change where a run is resumed, and so may those in `may_change`.
        `optimum` is the expected reward at best, if known.
        """
        self.memory_flags = dict(memory_flags)
        may_change = {*may_change, *(name for name, _ in self.memory_flags.values())}
        distributed.check_restarts(args)
        self.folder = distributed.decide(lambda: run_folder(args, script, subject, may_change))
        self.args = args
        self.script = script
        self.num_items = num_items
        self.items_per_update = items_per_update
        self.fork = distributed.decide(self.read_fork)
        self.num_epochs, self.num_updates = length(args, num_items, items_per_update, self.fork or START)
        if self.fork and not args.resume and self.num_updates <= self.fork["step"]:
            done = f"--fork {args.fork} has done {self.fork['samples']} samples, and that is all by these flags"
            raise UserError(f"{done}: give a larger --max-steps or --num-train-epochs")
        self.held_out_metric = held_out_metric
        self.optimum = optimum

        self.step = 0  # updates done
        self.saved_step = 0  # updates in the newest checkpoint
        self.learning = False  # whether an agent has learned since the last update that was logged
        self.rows = []  # of metrics.csv, dicts
        self.columns = []  # of metrics.csv
        self.samples = []  # the last joint samples, dicts as in samples.jsonl
        self.totals = {}  # seconds by phase, up to the last update that was logged
        self.seconds = {}  # seconds by phase, since then
        self.current_phase = None
        self.phase_start = 0.0
        self.untrained = None  # reward on held-out items before the first update, if they are evaluated
        self.started = time.time()
        self.drawn_at = 0.0
        self.drawing_seconds = 0.0
        self.saved_at = 0.0
        self.saving_seconds = 0.0
        self.signal = 0  # that is to end the run
        self.signal_time = None
        self.terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        if args.deterministic:  # read when a GPU is first used
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.tracker = Tracker()
        self.bar = None
        self.lock = None
        self.handlers = {}  # of signals, as they were
        self.hooks = []  # on the optimisers

    def start(self, agents, generator, save=save_agents, load=load_agents):
        """The run of these agents, to be entered; utils/checkpoint.py says what an agent has.

        `generator` is torch's, of this process. save(folder, agents, checkpoint=bool) writes the agents,
        load(folder, agents) restores them from a checkpoint; with --shard all processes call `save`, of which the main
        one writes, else that one alone calls it.
        """
        self.agents = agents
        self.generator = generator
        self.save = save
        self.load = load
        self.save_together = self.args.shard
        return self

    def __enter__(self):
        try:
            distributed.decide(self.take)
            if self.args.resume or self.fork:
                self.restore()
            self.random = distributed.gather_objects(random_state(self.generator))  # after the last logged update
            distributed.decide(self.begin)
        except BaseException:
            self.release()
            raise
        for agent in self.agents:
            for optimizer in agent.optimizers:
                self.hooks.append(optimizer.register_step_pre_hook(self.before_step))
                self.hooks.append(optimizer.register_step_post_hook(self.after_step))
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                    self.handlers[number] = signal.signal(number, self.on_signal)
        torch.use_deterministic_algorithms(self.args.deterministic)
        return self

    def read_fork(self):
        """What config.json says, or is to say, of where this run was forked; None: it was not. Raises UserError."""
        if self.args.resume:
            return read_json(self.folder / "config.json").get("fork")
        return fork_of(self.args, Path(self.script).stem, self.folder, OF_FOLDER) if self.args.fork else None

    def take(self):
        """Make the folder, and keep other runs out of it; a fork is given its checkpoint. Raises UserError."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = lock(self.folder)
            if self.fork and not (self.args.resume and checkpoints(self.folder / "checkpoints")):
                self.empty()
                self.write_config()
                copy_fork(self.fork, self.folder)

    def restore(self):
        """Take up the newest whole checkpoint; a run that has done nothing yet begins anew. Raises UserError."""
        path, state = distributed.decide(lambda: newest_whole(self.folder / "checkpoints", distributed.say))
        if path is None:
            distributed.decide(lambda: check_untrained(self.folder))
            distributed.say(f"{self.folder} has no checkpoint yet, and begins anew")
            return
        here = distributed.world_size()
        there = len(state["random"])
        if there != here:
            differs = "tokens are sampled and mini-batches are drawn with other random numbers than there"
            distributed.say(f"{self.folder} was a run of {there} processes, and goes on in {here}: {differs}")
        self.load(path, self.agents)
        self.step = state["step"]
        self.saved_step = self.step
        is_new = self.fork is not None and self.step == self.fork["step"]
        is_rescaled = is_new and any(name in self.fork["changed"] for name in OF_REWARDS)
        for agent, counts in zip(self.agents, state["agents"], strict=True):
            agent.num_skipped = counts["skipped"]
            agent.deviation = 0.0 if is_rescaled else counts.get("deviation", 0.0)  # an older checkpoint has none
            for schedule in agent.schedules:
                schedule.last_epoch += self.step - 1  # it stands where the run began
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that no optimiser has made a step yet
                    schedule.step()
        self.totals = state["totals"]
        self.started -= state["elapsed"]
        if not is_new:
            self.tracker.id = state["wandb"]
        has_own_seed = is_new and "seed" in self.fork["changed"]
        if distributed.rank() < there and not has_own_seed:  # a process that is new begins with its own seed
            restore_random_state(state["random"][distributed.rank()], self.generator)
        next_begun = ", and some of the next" if state["learning"] else ""
        distributed.say(f"going on from {path}: {self.step} of {self.num_updates} updates are done{next_begun}")

    def begin(self):
        """Make the folder what it is after `step` updates: flags, rows of metrics, samples; nothing of an older run."""
        with writing(self.folder):
            self.write_begun()

    def write_begun(self):
        samples = []
        if self.step:
            try:
                self.rows = read_rows(self.folder / "metrics.csv")[: self.step]
                samples = [s for s in read_lines(self.folder / "samples.jsonl") if s["update"] <= self.step]
            except (ValueError, KeyError, TypeError) as error:
                where = f"metrics.csv or samples.jsonl in {self.folder} has a line that can't be read"
                raise UserError(f"{where}: {one_line(error)}") from error
        if len(self.rows) < self.step:
            raise UserError(f"{self.folder}/metrics.csv has {len(self.rows)} of the {self.step} updates that are done")
        if not self.step:
            self.empty()
        config = self.write_config()
        if self.step:
            self.write_all_metrics()
            lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
            write_whole(self.folder / "samples.jsonl", "".join(lines))
            self.samples = samples[-SHOWN:]
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        for path in (self.folder / "checkpoints").glob("update_*.*ing"):  # half written, half removed
            shutil.rmtree(path)
        if self.args.track:
            self.tracker.start(self.folder, self.args, config)
        tqdm.write(f"writing {self.folder}")

    def empty(self):
        """Remove what an earlier run left, the flags last: without them the rest would be nobody's run."""
        for path in outputs(self.folder):
            if not (self.args.resume and path.name == "config.json"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def write_config(self):
        """Write config.json; what it says."""
        config = {
            "command": sys.argv,
            "script": str(Path(self.script).resolve()),
            "args": dataclasses.asdict(self.args),
            "num_updates": self.num_updates,
            "items_per_update": self.items_per_update,
            "fork": self.fork,
            "versions": versions(),
            "git_commit": git_commit(),
        }
        write_whole(self.folder / "config.json", json.dumps(config, indent=2) + "\n")
        return config

    def before_step(self, *_):
        if self.signal:
            self.save_early()

    def after_step(self, *_):
        self.learning = True

    def on_signal(self, number, frame):
        if self.signal_time is None:
            self.signal = number
            self.signal_time = time.monotonic()
            if number == signal.SIGHUP:  # nobody reads there any more, and writing there is an error
                for stream in self.terminals:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            if distributed.is_main():
                os.write(2, f"\n{signal.Signals(number).name}: {self.what_follows()}\n".encode())
            if self.current_phase in ("sample", "reward", "evaluate"):  # no weights are half changed
                self.save_early()
        elif time.monotonic() - self.signal_time > 1:  # sooner it is no second one: `timeout` sends its own twice
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def what_follows(self):
        """What a first signal brings, and in how many seconds, where a launcher is known not to wait for longer."""
        seconds = distributed.seconds_to_stop()
        finished = "the update under way is finished and saved" + (f", if {seconds} s suffice" if seconds else "")
        return f"{finished}, then the run stops; once more, and it stops at once"

    def save_early(self):
        """Save what there was before the update under way, or, while it learns, what there is: it may be killed soon.

        Not where models are sharded: all processes would have to be at the same place.
        """
        if distributed.is_main() and self.saved_step < self.step and not self.save_together:
            self.write_checkpoint()

    # --- What the loop calls ---

    def updates(self, items):
        """Yield the number of each update and this process's items of it, with a progress bar."""
        epochs, seed = self.num_epochs, self.args.seed
        _, first_item = self.progress(self.step)
        left = max(0, self.last_update() - self.step)
        batches = tasks.batches(items, self.items_per_update, epochs, seed, first_item, left)
        self.bar = tqdm(
            batches,
            total=self.num_updates,
            initial=self.step,
            unit="update",
            disable=not distributed.is_main(),
            dynamic_ncols=True,
        )
        for step, batch in enumerate(self.bar, self.step + 1):
            yield step, batch[distributed.rank() :: distributed.world_size()]

    def last_update(self):
        """The update after which this process ends, by itself."""
        return min(self.num_updates, self.args.pause_at or self.num_updates)

    def progress(self, step):
        """(joint samples, items of the training set) after so many updates."""
        counts = {"fork": self.fork, "args": vars(self.args), "items_per_update": self.items_per_update}
        return progress(counts, step)

    def is_due(self, step, interval):
        """Whether what comes every `interval` updates, at first and at the end comes after this one; 0: never."""
        return interval > 0 and (step % interval == 0 or step in (1, self.num_updates))

    def phase(self, name):
        """From now on, seconds belong to the phase of that name: "sample", "learn", ...; None: to none."""
        now = time.perf_counter()
        if self.current_phase is not None:
            before = self.seconds.get(self.current_phase, 0.0)
            self.seconds[self.current_phase] = before + now - self.phase_start
        self.current_phase = name
        self.phase_start = now
        if self.bar is not None and not self.rows and name:
            self.bar.set_postfix_str(name)

    def log(self, items, rollouts, agent_metrics, extra_metrics, held_out=None):
        """End an update: write its metrics and its first joint samples, and save where it is time.

        `items` are the B items, `rollouts` one for each agent, `agent_metrics` a dict of each, `extra_metrics` a dict
        of all, {name: scalar tensor or number} of this process: their means over the processes that have them are
        written, and `held_out`, the reward on held-out items, if they were evaluated. Raises TaskError where a name is
        taken, Stopped after a signal, WriteError where the disk does not take it.
        """
        metrics = team_metrics(rollouts) | by_agent(agent_metrics)
        taken = extra_metrics.keys() & {*COLUMNS, *metrics, self.held_out_metric}
        if taken:
            raise TaskError(f"metrics_callback returned {', '.join(sorted(taken))}, which a run has of its own")
        metrics |= extra_metrics
        new_tokens = count_new_tokens(rollouts)
        self.phase(None)
        seconds = self.add_up()
        self.phase("log, save")
        self.step += 1
        self.learning = False
        self.random = distributed.gather_objects(random_state(self.generator))
        samples, num_items = self.progress(self.step)
        row = {
            "global_step": samples,
            "epoch": num_items / self.num_items,
            **distributed.mean_by_name(metrics),
            **{f"time/{phase}": seconds.get(phase, 0.0) for phase in PHASES},
        }
        per_second = {
            "samples_per_second": self.args.rollout_buffer_size,
            "new_tokens_per_second": float(distributed.total(new_tokens.double())),
        }
        spent = sum(seconds.get(phase, 0.0) for phase in PHASES)
        for name, amount in per_second.items():
            row[name] = amount / spent if spent else None
        row[self.held_out_metric] = None if held_out is None else float(held_out)
        if self.step == 1 and self.untrained is not None:
            row[f"{self.held_out_metric}_untrained"] = float(self.untrained)
        if distributed.is_main():
            with writing(self.folder):
                self.record(row, items, rollouts)
        decisions = distributed.gather_objects((self.signal, self.is_save_due()))
        number = max(number for number, _ in decisions)
        if number or decisions[0][1]:  # the main process's
            self.checkpoint()
        self.phase(None)
        if number:
            stopped = f"stopped by {signal.Signals(number).name} after update {self.step} of {self.num_updates}"
            raise Stopped(f"{stopped}; {self.how_to_go_on()}", number)

    # --- What is written ---

    def record(self, row, items, rollouts):
        self.rows.append(row)
        self.write_metrics()
        with open(self.folder / "samples.jsonl", "a", encoding="utf-8") as file:
            played = [k for k in range(len(items)) if rollouts[0].played[k].any()]
            for k in played[:SAMPLES]:
                sample = {"update": self.step, "global_step": row["global_step"]}
                sample |= joint_sample(k, items[k], rollouts)
                self.samples.append(sample)
                file.write(json.dumps(sample, ensure_ascii=False, default=str) + "\n")
        del self.samples[:-SHOWN]
        if self.bar is not None:
            speed = row["samples_per_second"] or 0.0
            self.bar.set_postfix_str(f"reward {row['reward_mean']:.2f}, {speed:.0f} samples/s")
        self.tracker.log({key: value for key, value in row.items() if value is not None}, row["global_step"])
        if time.time() - self.drawn_at > SPARE * self.drawing_seconds:
            self.draw()

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
        writer = csv.writer(text)
        writer.writerow(self.columns)
        writer.writerows(in_columns(row, self.columns) for row in self.rows)
        write_whole(self.folder / "metrics.csv", text.getvalue())

    def draw(self):
        start = time.time()
        draw_curves(self.rows, self.folder / "curves.png", self.folder.name, self.held_out_metric, self.optimum)
        self.drawn_at = time.time()
        self.drawing_seconds = self.drawn_at - start

    def is_save_due(self):
        """Whether a checkpoint comes after this update, by --save-interval."""
        interval = self.args.save_interval
        if interval is None:
            return time.time() - self.saved_at > SPARE * self.saving_seconds
        return interval > 0 and self.step % interval == 0

    def checkpoint(self):
        """Save the run as it is after `step` updates, or in the midst of learning from the next. Raises WriteError."""
        if distributed.is_main():
            self.write_checkpoint()
        elif self.save_together:
            self.save(self.folder, self.agents, checkpoint=True)
        self.saved_step = self.step

    def write_checkpoint(self):
        """Save what all processes have alike, and their random generators, as this process."""
        start = time.time()
        state = {
            "step": self.step,
            "learning": self.learning,
            "agents": [remembered(agent) for agent in self.agents],
            "totals": self.totals,
            "elapsed": time.time() - self.started,
            "wandb": self.tracker.id,
            "random": self.random,
        }
        with writing(self.folder):
            for name in ("metrics.csv", "samples.jsonl", ""):
                sync(self.folder / name)

        def write(path):
            self.save(path, self.agents, checkpoint=True)

        write_checkpoint(self.folder / "checkpoints", self.step, write, state, self.args.keep_checkpoints)
        self.saved_step = self.step
        self.saved_at = time.time()
        self.saving_seconds = self.saved_at - start

    def add_up(self):
        """Add the seconds by phase since the last call to the totals; what they were."""
        seconds = self.seconds
        self.seconds = {}
        for phase, spent in seconds.items():
            self.totals[phase] = self.totals.get(phase, 0.0) + spent
        return seconds

    # --- The end ---

    def __exit__(self, kind, error, trace):
        phase = self.current_phase
        self.phase(None)
        failed = kind not in (None, Stopped)
        alone = distributed.world_size() == 1
        try:
            if self.bar is not None:
                self.bar.close()
            if self.saved_step < self.step and kind is not WriteError and (alone or not failed):
                self.checkpoint()
            savable = not (failed and self.save_together)  # without the others there is no whole agent
            if distributed.is_main() and kind is not WriteError:
                self.finish(kind, savable)
            elif self.save_together and savable:
                self.save(self.folder, self.agents, checkpoint=False)
            if distributed.is_main() and failed and self.saved_step:
                print(self.how_to_go_on(), flush=True)
        finally:
            self.release()
        if is_out_of_memory(error):
            raise UserError(self.out_of_memory(phase)) from error
        if kind is RuntimeError and "probability tensor" in str(error):
            raise UserError("the probabilities of tokens are not finite: lower the learning rates") from error
        if kind is RuntimeError and self.args.deterministic and "deterministic" in str(error):
            raise UserError(f"--deterministic: {one_line(error)}") from error
        if kind is RuntimeError and "by peer" in str(error):  # a connection that ends while a sharded model computes
            raise distributed.ProcessError(f"another process of this run has ended: {one_line(error)}") from error

    def finish(self, kind, savable):
        """Write and show what a run leaves: its agents if they are `savable`.

        `kind` is the type of the error that ended it, or None.
        """
        self.phase("log, save")
        if savable:
            with writing(self.folder):
                self.save(self.folder, self.agents, checkpoint=False)
        self.phase(None)
        self.add_up()
        if self.rows:
            with writing(self.folder):
                self.draw()
            print(side_by_side(self.samples[-2:]))
            print(time_table(self.totals, time.time() - self.started))
            print(self.outcome())
        if kind is None and self.step < self.num_updates:
            print(f"paused after update {self.step} of {self.num_updates}; {self.how_to_go_on()}")
        print(f"{'stopped early; ' if kind else ''}the run is in {self.folder}", flush=True)
        self.tracker.log_samples(self.samples)
        self.tracker.finish(failed=kind is not None)

    def release(self):
        """Give back the signals, torch's algorithms, the optimisers and the folder."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        torch.use_deterministic_algorithms(False)
        for hook in self.hooks:
            hook.remove()
        if self.lock:
            self.lock.close()

    def out_of_memory(self, phase):
        """What ran out of memory, which flag takes less, and how to go on with half of it."""
        what = f"out of memory in the phase {phase}"
        if phase == "evaluate":  # which samples
            phase = "sample"
        if phase not in self.memory_flags:
            return "out of memory"
        if phase == "sample" and getattr(self.args, "use_vllm", False):
            return f"{what}: a lower gpu_memory_utilization in --vllm-config leaves more"
        name, size = self.memory_flags[phase]
        size = size // distributed.world_size()
        size = min(getattr(self.args, name) or size, size)
        if size == 1:
            return f"{what}, with {flag_name(name)} 1"
        half = f"{flag_name(name)} {size // 2}"
        what += f": {half} takes less"
        return f"{what}; {self.how_to_go_on()} {half}" if self.saved_step else what

    def how_to_go_on(self):
        return f"go on with: python {Path(self.script).name} --resume {self.folder}"

    def outcome(self):
        """The reward at first and in the end, and the best that there is, where the task knows it, in a line."""
        rewards = [row["reward_mean"] for row in self.rows]
        last = rewards[-max(1, len(rewards) // 10) :]
        outcome = f"reward: {rewards[0]:.3f} at first, {sum(last) / len(last):.3f} over the last tenth of updates"
        if {(row["reward_mean"], row["reward_std"]) for row in self.rows} == {(rewards[0], 0.0)}:
            outcome += ": every joint sample earned the same"
        held_out = [(k, row.get(self.held_out_metric)) for k, row in enumerate(self.rows, 1)]
        held_out = [pair for pair in held_out if pair[1] is not None]
        if held_out:
            update, reward = held_out[-1]
            outcome += f"; {self.held_out_metric}: "
            untrained = self.rows[0].get(f"{self.held_out_metric}_untrained")
            if untrained is not None:
                outcome += f"{untrained:.3f} untrained, "
            outcome += f"{reward:.3f} {'in the end' if update == self.num_updates else f'after update {update}'}"
        if self.optimum is not None:
            outcome += f"; optimal play: {self.optimum:.3f}"
        return outcome


def remembered(agent):
    """What an agent keeps beside its weights and optimisers."""
    return {"skipped": getattr(agent, "num_skipped", 0), "deviation": getattr(agent, "deviation", 0.0)}


def is_out_of_memory(error):
    """Whether it says that a GPU's or the CPU's memory has run out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def joint_sample(k, item, rollouts):
    """Episode k for samples.jsonl: of each agent its response and reward, or, of several turns, lists of these."""
    num_turns = int(rollouts[0].played[k].sum())
    rewards = [rollout.raw_rewards[k, :num_turns].tolist() for rollout in rollouts]
    responses = [rollout.responses[k] for rollout in rollouts]
    sample = {"reward": sum(map(sum, rewards)) / len(rewards)}
    if rollouts[0].rewards.shape[1] == 1:
        first_rewards = [turns[0] for turns in rewards]
        return sample | {"rewards": first_rewards, "item": item, "completions": [turns[0] for turns in responses]}
    prompts = [rollout.prompts[k] for rollout in rollouts]
    return sample | {"rewards": rewards, "item": item, "prompts": prompts, "completions": responses}


# --- What made the run ------------------------------------------------------------------------------------------------


def versions():
    """The versions of Python and of the packages that are there, by name."""
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def git_commit():
    """The commit of this code, with `+` after it where a .py or a file in utils/ differs; None: no checkout."""
    here = Path(__file__).resolve().parent
    options = {"cwd": here, "capture_output": True, "text": True, "check": True}
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **options).stdout.strip()
        differing = ["git", "status", "--porcelain", "-uno", "--", ":(top)*.py", ":(top)utils"]
        return commit + "+" * bool(subprocess.run(differing, **options).stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return None
