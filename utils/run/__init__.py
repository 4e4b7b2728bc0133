"""A run under way, and the folder that it writes: metrics, samples, curves, checkpoints, the agents."""

import contextlib
import copy
import itertools
import math
import os
import shlex
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import set_seed

from utils import distributed
from utils.cli import SharedError, Stopped, TaskError, UserError
from utils.clock import clock
from utils.files import WriteError, checkpoints, lock, read_json, sync, writing
from utils.models.policy import warn_of_learning_rate
from utils.models.stages import load_stage
from utils.models.weights import (
    check_saved,
    fingerprint_of,
    initial_of,
    load_agents,
    optimizers_of,
    save_agents,
    schedules_of,
)
from utils.run.checkpoint import newest_whole, random_state, restore_random_state, write_checkpoint
from utils.run.failures import explain
from utils.run.folder import (
    OF_FOLDER,
    FolderArgs,
    check_same_length,
    check_same_task,
    check_untrained,
    empty,
    outputs,
    run_folder,
    say_what_changed,
    write_config,
)
from utils.run.fork import COPY, OF_REWARDS, copy_fork, first_of, fork_of, put_fork
from utils.run.kept import Kept
from utils.run.log import Log, joint_samples
from utils.run.metrics import agent_metrics, count_tokens, say_what_cancels, seat_metrics, team_metrics
from utils.run.report import EVAL_REWARD, EXACT_SCORES, outcome, side_by_side, time_table
from utils.run.signals import Signals
from utils.timers import at_rest

__all__ = ["FolderArgs", "Run"]

SPARE = 50  # saving, where no interval is given, is done once in so many times the seconds that it takes
PHASES = ("play", "reward", "learn")  # whose seconds are in metrics.csv, and make the speeds
COLUMNS = {"global_step", "epoch", "samples_per_second", "new_tokens_per_second", EVAL_REWARD}
COLUMNS |= {f"time/{phase}" for phase in PHASES} | {*EXACT_SCORES}


class Run:
    """A run of the script in a file, over the batches of items, one for each update, of a task.

    Nothing is written before its context, `start`, is entered. That takes the folder and, with --resume, restores all
    of the newest checkpoint. SIGTERM, SIGINT and SIGHUP end the run after the update under way; what was done before it
    is saved at once, as a launcher may not wait so long. However the loop ends, leaving the context saves, but where
    one of several processes failed. Of many processes only the main one writes, and it decides on the folder.

    What learns are objects with `optimizers` and `schedules`, lists of torch's; the schedules are stepped once an
    update. One may have `state`, a dict of JSON values, which is kept too. What else is saved of them, weights.py says.

    For use from Python: `folder`, `rows` (of metrics.csv), `num_updates`, `step` (updates that are done).
    """

    def __init__(self, args, script, task, batches):
        self.args = args
        self.script = script
        self.batches = batches
        self.task = task
        self.folder = distributed.decide(lambda: run_folder(args, script))  # as the user wrote it
        self.place = None  # where it is, from anywhere: a task may change the working directory
        self.fork = distributed.decide(self.read_fork)
        batches.begin_at(first_of(self.fork))
        self.num_updates = len(batches)
        if self.fork and not args.resume and self.fork["step"] >= self.num_updates:
            done = f"--fork {args.fork} has done {self.fork['step']} updates, and that is all by these flags"
            raise UserError(f"{done}: give a larger --max-episodes or --num-train-epochs")

        self.step = 0  # updates done
        self.saved_step = 0  # updates in the newest checkpoint
        self.saved_at = 0.0
        self.saving_seconds = 0.0
        self.is_learning = False  # whether an optimiser has begun a step since the last update that was logged
        self.totals = {}  # seconds by phase
        self.started = time.time()
        self.bar = None
        self.lock = None
        self.hooks = []  # on the optimisers
        self.signals = Signals(self.on_signal)
        optimum = task.optimum(batches.items)
        self.log_files = Log(self.folder, optimum)
        if args.deterministic:  # read when a GPU is first used
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    @property
    def rows(self):
        return self.log_files.rows

    def read_fork(self):
        """What config.json says, or is to say, of where this run was forked; None: it was not. Raises UserError."""
        if self.args.resume:
            return read_json(self.folder / "config.json").get("fork")
        if not self.args.fork:
            return None
        return fork_of(self.args, Path(self.script).stem, self.folder, OF_FOLDER, self.task.name)

    # --- The beginning ---

    @contextlib.contextmanager
    def start(self, agents, generator):
        """Within it the agents learn: it resumes, and saves however it ends. `generator` is torch's of this process."""
        self.agents = agents
        self.generator = generator
        self.kept = Kept(agents)
        algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        try:
            self.enter()
            try:
                yield self
            except BaseException as error:
                self.leave(error)
                raise
            self.leave(None)
        finally:
            self.release()
            torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])  # as the caller had it

    def enter(self):
        clock.lap()
        if self.args.load_checkpoint:
            load_stage(self.agents, self.args)
        warn_of_learning_rate(self.agents, self.args)
        check_saved(self.agents)
        self.folder = self.log_files.folder = distributed.decide(self.take_folder)
        self.place = self.folder.absolute()
        if distributed.rank():  # what a task draws of a global generator is to differ between the processes
            set_seed(self.args.seed + 1_000_003 * distributed.rank())
        if self.args.resume or self.fork:
            self.restore()
        for agent in self.agents:
            fingerprint_of(initial_of(agent))
        self.keep()
        distributed.decide(self.write_beginning)
        self.log_files.folder = self.place
        for agent in self.agents:
            for optimizer in optimizers_of(agent):
                self.hooks.append(optimizer.register_step_pre_hook(self.before_optimizer_step))
        self.signals.catch()
        if self.args.deterministic:
            torch.use_deterministic_algorithms(True)

    def keep(self):
        """Keep what learning may change before its first step: it is saved as it is after the last logged update."""
        self.is_learning = False
        self.random = distributed.gather_objects(random_state(self.generator))
        self.states = copy.deepcopy([getattr(agent, "state", None) for agent in self.agents])

    def take_folder(self):
        """Make the folder, which is returned, and keep other runs out of it; a fork is given its checkpoint.

        A folder that the user has not named is a new one: another run may have begun in the same second. Raises
        UserError.
        """
        is_named = self.args.output_dir or self.args.resume
        first = self.folder
        with writing(first):
            first.parent.mkdir(parents=True, exist_ok=True)
            for k in itertools.count(2):
                try:
                    self.folder.mkdir(exist_ok=bool(is_named))
                    break
                except FileExistsError:
                    if is_named:
                        raise
                    self.folder = first.with_name(f"{first.name}__{k}")
            self.lock = lock(self.folder)
            if self.fork and not (self.args.resume and checkpoints(self.folder / "checkpoints")):
                self.begin_fork()
        return self.folder

    def begin_fork(self):
        """Give the folder the checkpoint of a fork; what is there is removed once that is here. Raises UserError."""
        if self.args.resume:
            check_untrained(self.folder, self.fork["step"])
        elif not outputs(self.folder):
            self.write_config()
        copy_fork(self.fork, self.folder)
        self.empty_folder()
        self.write_config()
        put_fork(self.fork, self.folder)

    def empty_folder(self):
        empty(self.folder, keep=["config.json"] if self.args.resume else [])

    def write_config(self):
        return write_config(self.folder, self.args, self.script, self.num_updates, self.fork, self.task.name)

    def restore(self):
        """Take up the newest whole checkpoint; a run that has done nothing yet begins anew. Raises UserError."""
        if self.args.resume:
            distributed.decide(lambda: check_same_task(self.folder, self.task.name))
        path, state = distributed.decide(lambda: newest_whole(self.folder / "checkpoints", distributed.say))
        if path is None:
            distributed.decide(lambda: check_untrained(self.folder))
            distributed.say(f"{self.folder} has no checkpoint yet, and begins anew")
            return
        if self.args.resume:
            distributed.decide(lambda: check_same_length(self.folder, self.args, self.num_updates))
        here = distributed.world_size()
        there = len(state["random"])
        if there != here:
            differs = "tokens are sampled and mini-batches are drawn with other random numbers than there"
            distributed.say(f"{self.folder} was a run of {there} processes, and goes on in {here}: {differs}")
        if self.args.resume:
            distributed.decide(lambda: say_what_changed(self.folder, self.args, self.script))
        load_agents(path, self.agents)
        self.step = state["step"]
        self.saved_step = self.step
        is_new_fork = self.fork is not None and self.step == self.fork["step"]
        has_new_rewards = is_new_fork and not self.fork["changed"].keys().isdisjoint(OF_REWARDS)
        for agent, saved in zip(self.agents, state["agents"], strict=True):
            if saved is not None and not has_new_rewards:  # deviations of what was earned there
                agent.state = saved
            for schedule in schedules_of(agent):
                schedule.last_epoch += self.step - 1  # it stands where the run began
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that no optimiser has made a step yet
                    schedule.step()
        self.totals = state["totals"]
        self.started -= state["elapsed"]
        if not is_new_fork:
            self.log_files.tracker.id = state["wandb"]
        has_own_seed = is_new_fork and "seed" in self.fork["changed"]
        if distributed.rank() < there and not has_own_seed:  # a process that is new begins with its own seed
            restore_random_state(state["random"][distributed.rank()], self.generator)
        distributed.say(f"going on from {path}: {self.step} of {self.num_updates} updates are done")

    def write_beginning(self):
        """Make the folder what it is after `step` updates: flags, rows of metrics, samples; nothing of an older run."""
        with writing(self.folder):
            if not self.step:
                self.empty_folder()
            config = self.write_config()
            if self.step:
                self.log_files.read(self.step)
            (self.folder / "checkpoints").mkdir(exist_ok=True)
            for path in (*(self.folder / "checkpoints").glob("update_*.*ing"), self.folder / COPY):
                shutil.rmtree(path, ignore_errors=True)  # half written, half removed
        if self.args.track:
            self.log_files.tracker.start(self.folder, self.args, config)
        tqdm.write(f"writing {self.folder}")

    # --- What the loop calls ---

    def updates(self):
        """The numbers of the updates to be done, from 0, with a progress bar."""
        end = min(self.num_updates, self.args.pause_at or self.num_updates)
        self.bar = tqdm(
            range(self.step, end),
            total=self.num_updates,
            initial=self.step,
            unit="update",
            disable=not distributed.is_main(),
            dynamic_ncols=True,
        )
        yield from self.bar

    def is_due(self, update, interval):
        """Whether what comes every `interval` updates, after the first and the last comes after this one; 0: never."""
        done = update + 1
        return interval > 0 and (done % interval == 0 or done in (1, self.num_updates))

    def log(self, items, rollouts, metrics, eval_reward=None, critic_metrics=None, seats=None):
        """End an update: write its metrics and its first episodes, and save where it is time.

        `items` are those of the B episodes of this process, `rollouts` and `metrics` {name: number or scalar tensor},
        one for each agent; means over the processes are written. `seats` are who played, if not the agents. Raises
        TaskError where the task's metrics have names that are taken, Stopped after a signal, WriteError where the disk
        does not take it.
        """
        scores = self.scores() if eval_reward is not None else {}
        seconds = self.lap()
        with clock.timed("log, save"):
            row = self.row(self.step + 1, items, rollouts, metrics, critic_metrics, seconds)
            self.step += 1
            self.keep()
            row[EVAL_REWARD] = None if eval_reward is None or math.isnan(eval_reward) else float(eval_reward)
            row |= scores
            if distributed.is_main():
                with writing(self.folder):
                    numbers = {"update": self.step, "global_step": row["global_step"]}
                    samples = joint_samples(items, seats or self.agents, rollouts, self.args.num_turns > 1, **numbers)
                    self.log_files.add(row, samples)
                if self.bar is not None:
                    speed = row["samples_per_second"] or 0.0
                    self.bar.set_postfix_str(f"reward {row['reward_mean']:.2f}, {speed:.0f} samples/s")
            decisions = distributed.gather_objects((self.signals.number, self.is_save_due()))
            number = max(number for number, _ in decisions)
            if number or decisions[0][1]:  # the main process's
                self.checkpoint()
        if number and self.step < self.num_updates:
            stopped = f"stopped by {signal.Signals(number).name} after update {self.step} of {self.num_updates}"
            raise Stopped(f"{stopped}; {self.how_to_go_on()}", number)

    @clock.timed("evaluate")
    def scores(self):
        """Exact scores of the agents as they are now, which some games have: {name: float}."""
        return self.task.scores(self.agents)

    def row(self, step, items, rollouts, metrics, critic_metrics, seconds):
        """The row of metrics.csv after so many updates, {name: number or None}. Raises TaskError."""
        num_tokens = int(distributed.sum(sum(map(count_tokens, rollouts))))
        if num_tokens == 0:
            reason = "there was nothing to read, or no room behind it for an answer (--max-new-tokens, --max-model-len)"
            if getattr(self.task, "TeamEnv", None):
                reason += ", or the environment dropped all episodes"
            raise SharedError(f"nobody acted in update {step}: {reason}")
        metrics = team_metrics(rollouts, self.args.num_turns > 1) | agent_metrics(metrics, critic_metrics)
        if step == 1:
            is_zero_sum = getattr(self.task.given, "is_zero_sum", False)
            say_what_cancels(metrics, is_zero_sum, has_critic=critic_metrics is not None)
        if hasattr(self.task, "TeamEnv") and len(rollouts) > 1:  # seats of a game, or of an environment
            metrics |= seat_metrics(rollouts)
        extra = self.task.extra_metrics(rollouts, items)
        taken = extra.keys() & {*COLUMNS, *metrics}
        if taken:
            raise TaskError(f"metrics_callback returned {', '.join(sorted(taken))}, which a run has of its own")
        row = {
            "global_step": step * self.args.rollout_buffer_size,
            "epoch": (step - self.batches.first) * self.batches.items_per_update / self.batches.num_items,
            **distributed.mean_by_name(metrics | extra),
            **{f"time/{phase}": seconds.get(phase, 0.0) for phase in PHASES},
        }
        spent = sum(seconds.get(phase, 0.0) for phase in PHASES)
        row["samples_per_second"] = self.args.rollout_buffer_size / spent if spent else None
        row["new_tokens_per_second"] = num_tokens / spent if spent else None
        return row

    def lap(self):
        """The seconds by phase since the last call, which are added to the totals."""
        seconds = clock.lap()
        for phase, spent in seconds.items():
            self.totals[phase] = self.totals.get(phase, 0.0) + spent
        return seconds

    # --- Saving ---

    def is_save_due(self):
        """Whether a checkpoint comes after this update, by --save-interval; the first one comes after the first."""
        interval = self.args.save_interval
        if interval is None:
            return time.time() - self.saved_at > SPARE * self.saving_seconds
        return interval > 0 and (self.step % interval == 0 or self.step == 1)

    def checkpoint(self):
        """Save the run as it is after `step` updates. Raises WriteError."""
        if distributed.is_main():
            self.write_checkpoint()
        elif self.args.shard:  # all processes send their parts
            save_agents(self.place, self.agents, checkpoint=True)
        self.saved_step = self.step

    @at_rest()
    def write_checkpoint(self):
        """Save what all processes have alike, and their random generators, as this process."""
        start = time.time()
        state = {
            "step": self.step,
            "agents": self.states,
            "totals": self.totals,
            "elapsed": time.time() - self.started,
            "wandb": self.log_files.tracker.id,
            "random": self.random,
        }
        with writing(self.folder):
            for name in ("metrics.csv", "samples.jsonl", ""):
                sync(self.place / name)

        def write(path):
            save_agents(path, self.agents, checkpoint=True)

        write_checkpoint(self.place / "checkpoints", self.step, write, state, self.args.keep_checkpoints)
        self.saved_step = self.step
        self.saved_at = time.time()
        self.saving_seconds = self.saved_at - start

    def on_signal(self):
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()  # which takes no copies
        if not is_capturing and ("play" in clock.phases or "evaluate" in clock.phases):  # no weights are half changed
            with contextlib.suppress(WriteError):  # else the task's code would meet it; `log` saves again
                self.save_early()

    def before_optimizer_step(self, *_):
        if not self.is_learning:
            self.kept.take()
            self.is_learning = True
        if self.signals.number:
            self.save_early()

    def save_early(self):
        """Save what there was before the update under way, which may not be finished: the process may be killed soon.

        Not where models are sharded: all processes would have to be at the same place.
        """
        if not distributed.is_main() or self.saved_step == self.step or self.args.shard:
            return
        if not self.is_learning:
            return self.write_checkpoint()
        with at_rest():
            self.kept.exchange()
            try:
                self.write_checkpoint()
            finally:
                self.kept.exchange()

    # --- The end ---

    def leave(self, error):
        """Save, and show what the run leaves; `error` is what ended it, or None."""
        phases = clock.failed
        if self.bar is not None:
            self.bar.close()
        if self.is_learning:  # a run that goes on learns from this update as a whole
            self.kept.exchange()
        is_together = error is None or isinstance(error, (Stopped, SharedError, distributed.NotFinite))  # all are here
        can_write = not isinstance(error, WriteError)
        try:
            if self.saved_step < self.step and can_write and (is_together or distributed.world_size() == 1):
                self.checkpoint()
        except WriteError:
            can_write = False
            raise
        finally:  # whatever else ends a checkpoint, the agents are not lost
            is_whole = is_together or not self.args.shard  # without the others there is no whole agent
            has_learned = error is None or self.step > 0
            if can_write and is_whole and has_learned and (distributed.is_main() or self.args.shard):
                has_adapters = getattr(self.agents[0].actor, "adapter", None) is not None
                with_optimizer = has_adapters and self.args.save_optimizer
                with clock.timed("log, save"), writing(self.folder):
                    save_agents(self.place, self.agents, with_optimizer=with_optimizer, with_base=self.args.save_base)
        if distributed.is_main():
            self.show(error)
        saved = self.how_to_go_on() if self.saved_step else None
        explained = error and explain(error, self.args, phases, saved)
        if explained:
            raise explained from error

    def show(self, error):
        self.lap()
        if self.rows:
            if not isinstance(error, WriteError):
                with writing(self.folder):
                    self.log_files.draw()
            print(side_by_side(self.log_files.samples[-2:]))
            print(time_table(self.totals, time.time() - self.started))
            print(outcome(self.rows, self.num_updates, self.log_files.optimum))
        if error is None and self.step < self.num_updates:
            print(f"paused after update {self.step} of {self.num_updates}; {self.how_to_go_on()}")
        print(f"{'stopped early; ' if error else ''}the run is in {self.folder}", flush=True)
        if error and not isinstance(error, Stopped) and self.saved_step:
            print(self.how_to_go_on(), flush=True)
        self.log_files.tracker.log_samples(self.log_files.samples)
        self.log_files.tracker.finish(failed=error is not None)

    def release(self):
        """Give back the signals, the optimisers and the folder."""
        self.signals.release()
        for hook in self.hooks:
            hook.remove()
        if self.lock:
            self.lock.close()

    def how_to_go_on(self):
        script = Path(self.script).name
        own = [f"the task in {script}", f"the environment in {script}"]
        if self.task.name in (*own, f"--task {self.args.task}", f"--env {self.args.env}"):
            if Path(sys.argv[0]).name == script:
                script = sys.argv[0]  # as it was called
            launcher = distributed.launcher()
            if launcher is None:
                return f"go on as it was started, with --resume {shlex.quote(str(self.folder))}"
            return f"go on with: {shlex.join([*launcher, script, '--resume', str(self.folder)])}"
        return f"go on from Python with {self.task.name}: main(Args(..., resume={str(self.folder)!r}), ...)"
