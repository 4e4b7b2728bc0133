"""What utils.population runs in Ray: the members of a population, and the scheduler that says who forks whom.

A generation of a member is a run of its own, a process of the script, whose folder is <output-dir>/generation_<g>/
member_<k>: the first begins anew, each later one is a fork of the generation before, of the same member or of a winner.
So no folder is written any more once another run is forked from it, and what Ray keeps is only which folder that is.
"""

import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from utils.benchmark import Failed, last_line, with_python
from utils.cli import UserError, flag_name, one_line
from utils.files import can_go_on, read_json

FACTORS = (0.8, 1.2)  # by which a value is multiplied
LOST = -math.inf  # the score of a member whose run failed: behind all others
DIE_TOGETHER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: a run does not outlive who waits for it
os.execvp(sys.argv[1], sys.argv[1:])
"""


# --- Values -----------------------------------------------------------------------------------------------------------


def draw(rng, low, high, whole):
    """A value from a range, log-uniform, of four digits."""
    return rounded(math.exp(rng.uniform(math.log(low), math.log(high))), low, high, whole)


def explore(rng, value, low, high, whole, resample_probability):
    """A value drawn anew, or 0.8 or 1.2 times the value, but within its range."""
    if rng.random() < resample_probability:
        return draw(rng, low, high, whole)
    factor = rng.choice(FACTORS)
    other = value * factor
    if whole and round(other) == value:
        other = value + (1 if factor > 1 else -1)
    return rounded(other, low, high, whole)


def rounded(value, low, high, whole):
    value = round(value) if whole else float(f"{value:.4g}")
    return min(max(value, low), high)


# --- A generation of a member -----------------------------------------------------------------------------------------


def folder_of(generation, member):
    """Where a generation of a member is, below the population's folder."""
    return f"generation_{generation:03d}/member_{member}"


def last_update(generation, plan):
    return min(generation * plan["generation"], plan["num_updates"])


def play(plan, generation, member, parent, values):
    """What came of a generation of a member, whose process it starts and waits for; None: the population is to stop.

    `parent` is the member of the generation before that is forked, `values` are the hyperparameters. Whatever goes
    wrong is told in the record, as `error`; its `fitness` is then None.
    """
    started = time.time()
    record = {"generation": generation, "member": member, "parent": parent, "folder": folder_of(generation, member)}
    record |= {"hyperparameters": values, "fitness": None, "error": None}
    folder = Path(plan["folder"]) / record["folder"]
    try:
        end = last_update(generation, plan)
        fork = None if parent is None else fork_of(plan, generation, parent)
        code = run_script(plan, folder, fork, values, end)
        if code is None:
            return None
        if code:
            record["error"] = why(code, folder)
        else:
            check_length(plan, folder)
            record["fitness"] = fitness(plan, folder, last_update(generation - 1, plan), end)
    except (OSError, UserError) as error:
        record["error"] = one_line(error)
    return record | {"seconds": round(time.time() - started, 1)}


def fork_of(plan, generation, parent):
    """The checkpoint at the end of the generation before."""
    run = Path(plan["folder"]) / folder_of(generation - 1, parent)
    return run / "checkpoints" / f"update_{last_update(generation - 1, plan):06d}"


def run_script(plan, folder, fork, values, end):
    """The exit code of a run up to an update, or None where the population is to stop."""
    stop = Path(plan["folder"]) / "stop"
    if stop.exists():
        return None
    where = ["--output-dir", str(folder)]
    if (folder / "config.json").is_file():
        where = ["--resume", str(folder)] if can_go_on(folder) else [*where, "--overwrite"]
    if fork and where[0] != "--resume":
        where += ["--fork", str(fork)]
    own = [word for name, value in values.items() for word in (flag_name(name), repr(value))]
    argv = [*with_python(plan["words"], plan["python"]), *own, "--pause-at", str(end), *where]
    folder.parent.mkdir(parents=True, exist_ok=True)
    stopped = False
    with open(f"{folder}.log", "a") as log:
        says = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "cwd": plan["cwd"]}
        says["env"] = os.environ | {"OMP_NUM_THREADS": "1"}
        argv = [sys.executable, "-c", DIE_TOGETHER, *argv]
        with subprocess.Popen(argv, **says, start_new_session=True) as process:
            while process.poll() is None:
                time.sleep(0.1)
                if stop.exists() and not stopped:
                    process.terminate()
                    stopped = True
    return None if stopped else process.returncode


def why(code, folder):
    """In a line, why a run ended with that exit code."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return one_line(last_line(f"{folder}.log")) or f"exit code {code}, and nothing in {folder}.log"


def check_length(plan, folder):
    """Raise UserError for a run whose own flags give it another length than the population's."""
    there = read_json(folder / "config.json").get("num_updates")
    if plan["num_updates"] not in (None, there):
        raise UserError(f"with these values a run has {there} updates, and not {plan['num_updates']}")


def fitness(plan, folder, begin, end):
    """The last value of the metric in the updates after `begin`, up to `end`. Raises UserError."""
    name = plan["metric"]
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[begin:end]
    values = [float(row[name]) for row in rows if row.get(name)]
    if not values:
        raise UserError(f"no {name} in updates {begin + 1} to {end}")
    if not math.isfinite(values[-1]):
        raise UserError(f"{name} is {values[-1]} in the end")
    return values[-1]


# --- Ray --------------------------------------------------------------------------------------------------------------


class Member(tune.Trainable):
    """A member: each step is a generation. Its checkpoint names the generation, and who was there."""

    def setup(self, config, plan):
        self.plan = plan
        self.begin(config)

    def reset_config(self, config):
        self.begin(config)
        return True

    def begin(self, config):
        self.member, self.values = config["of"]
        self.generation = self.plan["first"] - 1
        self.parent = None

    def step(self):
        generation = self.generation + 1
        record = self.plan["records"].get((generation, self.member))
        if record is None:
            record = play(self.plan, generation, self.member, self.parent, self.values)
        if record is None:
            return {"score": LOST, "record": None}
        self.generation = generation
        self.parent = self.member
        return {"score": LOST if record["fitness"] is None else record["fitness"], "record": record}

    def save_checkpoint(self, folder):
        state = {"generation": self.generation, "parent": self.parent}
        (Path(folder) / "member.json").write_text(json.dumps(state))

    def load_checkpoint(self, folder):
        state = read_json(Path(folder) / "member.json")
        self.generation, self.parent = state["generation"], state["parent"]


class Scheduler(PopulationBasedTraining):
    """Ray's, synchronous, with random numbers of each member and generation alone, and members that are lost."""

    def __init__(self, plan, ranges, quantile_fraction, resample_probability):
        super().__init__(
            time_attr="training_iteration",
            metric="score",
            mode="max",
            perturbation_interval=1,
            quantile_fraction=quantile_fraction,
            custom_explore_fn=lambda config: config,  # Ray takes it, or ranges of its own
            log_config=False,
            synch=True,
        )
        self.plan = plan
        self.ranges = ranges
        self.resample_probability = resample_probability

    def _quantiles(self):
        """(losers, winners): who is lost is a loser, however many they are, and no winner."""
        lower, upper = super()._quantiles()
        lost = [trial for trial, state in self._trial_state.items() if state.last_score == LOST]
        others = [trial for trial in lower if trial not in lost][: max(0, len(lower) - len(lost))]
        winners = [trial for trial in upper if trial not in lost]
        return (lost + others if winners else []), winners

    def _checkpoint_or_exploit(self, trial, controller, upper, lower):
        if trial in lower:
            generation = self.plan["first"] + self._trial_state[trial].last_train_time
            self.rng = random.Random(f"{self.plan['seed']} {generation} {trial.config['of'][0]}")
            upper = [self.rng.choice(upper)]
        super()._checkpoint_or_exploit(trial, controller, upper, lower)

    def _get_new_config(self, trial, winner):
        values = {}
        for name, value in winner.config["of"][1].items():
            values[name] = explore(self.rng, value, *self.ranges[name], self.resample_probability)
        return {"of": [trial.config["of"][0], values]}, {}


class Unsaved:
    """What Ray writes of it beside its own state, which nobody reads, is nothing."""

    def __getstate__(self):
        return {}


class Recorder(Unsaved, tune.Callback):
    """Hands records to the population as they come."""

    def __init__(self, record):
        self.record = record

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if result["record"] is not None:
            self.record(result["record"])


class Stopper(Unsaved, tune.Stopper):
    """Ends the members after the last generation, and all of them when that is said."""

    def __init__(self, generations, is_stopped):
        self.generations = generations
        self.is_stopped = is_stopped

    def __call__(self, trial_id, result):
        return result["training_iteration"] >= self.generations

    def stop_all(self):
        return self.is_stopped()


def connect(address, workers):
    """Start Ray here, or connect to a cluster; whether that was done, for a Ray that is there already is taken.

    Raises UserError.
    """
    if ray.is_initialized():
        return False
    options = {"logging_level": "CRITICAL", "log_to_driver": False}
    path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    options["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(path)}}
    if address:
        options["address"] = address
    else:
        options |= {"num_cpus": workers, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    try:
        ray.init(**options)
    except Exception as error:  # it raises just that where it has not started within its own 30 s
        raise UserError(f"{f'--address {address}' if address else 'Ray'}: {one_line(error)}") from error
    return True


def gpus_of(at_a_time):
    """GPUs of each member: one, or a part of one where there are fewer than members at a time."""
    share = ray.cluster_resources().get("GPU", 0) / at_a_time
    return min(1.0, math.floor(share * 1000) / 1000)


def check_gpus(gpus):
    """Raise UserError for GPUs of a member that Ray would wait for without end, or does not take."""
    num_gpus = ray.cluster_resources().get("GPU", 0)
    if gpus > num_gpus or gpus > 1 and gpus % 1:
        raise UserError(
            f"--gpus takes a part of one, or a whole number up to the {num_gpus:g} that there are, got {gpus:g}"
        )


def first_update(plan, values, gpus):
    """(exit code, or None where it is to stop; why it failed) of the first update of the first member."""
    folder = Path(plan["folder"]) / folder_of(1, 0)

    def begin():
        code = run_script(plan, folder, None, values, 1)
        return code, why(code, folder) if code else None

    try:
        return ray.get(ray.remote(num_cpus=1, num_gpus=gpus)(begin).remote())
    except (OSError, ray.exceptions.RayError) as error:
        reason = one_line((str(error).strip() or type(error).__name__).splitlines()[-1])
        raise Failed(f"Ray can't go on: {reason}; the same command goes on") from error


def breed(plan, members, ranges, args, gpus, record, is_stopped):
    """Let the members play their generations, and give each record to `record`. Raises Failed where Ray fails."""
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # signals are the population's
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    name = "member_{}".format
    generations = math.ceil(plan["num_updates"] / plan["generation"]) - plan["first"] + 1
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(Member, plan=plan), {"cpu": 1, "gpu": gpus}),
        param_space={"of": tune.grid_search([[*member] for member in enumerate(members)])},
        tune_config=tune.TuneConfig(
            scheduler=Scheduler(plan, ranges, args.quantile_fraction, args.resample_probability),
            reuse_actors=True,
            trial_name_creator=lambda trial: name(trial.config["of"][0]),
            trial_dirname_creator=lambda trial: name(trial.config["of"][0]),
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=plan["folder"],
            stop=Stopper(generations, is_stopped),
            failure_config=tune.FailureConfig(max_failures=-1),
            callbacks=[Recorder(record)],
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    except (OSError, tune.TuneError, ray.exceptions.RayError) as error:
        raise Failed(f"Ray can't go on: {one_line(error)}; the same command goes on") from error
