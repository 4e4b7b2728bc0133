"""Run a command on several tasks and seeds, each in a process of its own, some at a time, and keep a record of it.

    python -m utils.benchmark --command "python ippo_llm.py --use-separate-critic" --tasks tldr number --seeds 1 2 3

Of tldr, seed 1, <output-dir>/<name>/tldr__1/ is the run folder, and tldr__1.log beside it has what the run printed.
A run that fails is named, and the others go on. Given again, the command leaves finished runs as they are, and goes on
with those that were stopped. <output-dir>/manifest.json says of every run how it was made: command, commit, versions,
machine, wall time, and a digest of its metrics (those of time aside) that is the same wherever the metrics are.

Where CUDA_VISIBLE_DEVICES names several GPUs, workers take one each, in turns, or one for each process of a run.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import PositiveInt
from tqdm import tqdm

from utils.cli import Stopped, UserError, command_line, flags, one_line
from utils.files import can_go_on, read_json, write_whole, writing
from utils.same import timeless

LONGEST_NAME = 200  # bytes of a folder's name, of which file systems take 255
OWN = ("--seed", "--output-dir", "--resume", "--overwrite")  # flags that a run gets from here


class Failed(UserError):
    """A run failed; the others went on."""

    exit_code = 1


@flags
class BenchmarkArgs:
    """What is run, how often, and where."""

    command: str = ""  # required: a script and its flags but for task, seed and folder: "python iac_llm.py --kl-coef 0"
    tasks: tuple[str, ...] = ()  # values of --task; none: what the command says, or the script's own
    seeds: tuple[int, ...] = (1, 2, 3)  # values of --seed
    workers: PositiveInt = 1  # runs at a time
    nproc_per_node: PositiveInt = 1  # processes of each run, started by torchrun on this machine
    threads: PositiveInt = 1  # threads of each process on the CPU; another number changes a run, in its last digits
    name: str | None = None  # name of the command's folder; none: made from the command
    output_dir: str = "runs/benchmark"  # folder of the runs and of manifest.json
    slurm_template: bool = False  # print a Slurm job script that makes the same runs, and run nothing


@flags
class Args(BenchmarkArgs):
    """All flags."""


@dataclass
class Job:
    """A run to make: its folder is <output-dir>/<name>."""

    name: str
    argv: list  # the command, task and seed included, folder not
    python: str = sys.executable  # what runs it, where its first word is python
    num_processes: int = 1  # each takes a GPU
    resumable: bool = True  # whether the command knows --resume; else --overwrite begins a stopped run anew
    process: subprocess.Popen | None = field(default=None, repr=False)
    slot: int = 0
    started: float = 0.0


def words_of(command, taken=()):
    """(the words of a command, its script). Raises UserError for one that names no script, or flags that are taken."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"--command {command} is no command line: {error}") from error
    script = next((word for word in words if word.endswith(".py")), None)
    if not words:
        raise UserError('--command is missing; it takes "python SCRIPT.py --flags"')
    if script is None or not os.path.isfile(script):
        raise UserError(f'--command takes "python SCRIPT.py --flags"; {command} names no script here')
    for word in words:
        flag = word.split("=")[0].replace("_", "-")
        if flag in (*OWN, *taken):
            raise UserError(f"--command has {flag}, which each run gets from here")
    return words, script


def with_python(words, python):
    """The words of a command as a list, with `python`, a path, in the place of a first word such as python3."""
    return [python if re.fullmatch(r"python[\d.]*", words[0]) else words[0], *words[1:]]


def known_flags(words, more=()):
    """What a command's --help names: {flag: INT, FLOAT ..., or nothing}. Raises UserError.

    Those that the command has, and `more`, have to be there.
    """
    argv = [*with_python(words, sys.executable), "--help"]
    try:
        process = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise UserError(f"--command: {argv[0]} can't be run: {error.strerror}") from error
    if process.returncode != 0:
        error = (process.stderr.strip() or "it says nothing").splitlines()[-1]
        raise UserError(f"--command: {shlex.join(words)} --help fails: {error}")
    known = {}
    for flag, takes in re.findall(r"(--[a-z][a-z0-9-]*)(?: (?:\{None\}\|)?([A-Z]+)\b)?", process.stdout):
        known[flag] = known.get(flag) or takes
    for word in [*words, *more]:
        flag = word.split("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in known:
            raise UserError(f"--command: the script has no {flag}")
    return known


def jobs_of(args):
    """A Job for every task and seed. Raises UserError for a command that can't be run so."""
    words, script = words_of(args.command, ("--task",) if args.tasks else ())
    own_words = [word.strip("-") for word in words[words.index(script) + 1 :]]
    name = args.name or re.sub(r"[^\w.-]+", "_", "_".join([Path(script).stem, *own_words]))
    if name != Path(name).name or name == "..":
        raise UserError(f"--name takes the name of a folder, got {name}")
    if len(name.encode()) > LONGEST_NAME:
        raise UserError(f"--name takes at most {LONGEST_NAME} bytes, got {len(name.encode())}: give a shorter one")
    check_seeds(args.seeds)
    if args.nproc_per_node > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc_per_node}"]
        words[words.index(script) : words.index(script)] = launcher
    jobs = {}
    for task in args.tasks or (None,):
        for seed in args.seeds:
            folder = f"{name}/{Path(task).stem if task else 'run'}__{seed}"
            if folder in jobs:
                raise UserError(f"--tasks names {folder} twice")
            argv = [*words, *(["--task", task] if task else []), "--seed", str(seed)]
            jobs[folder] = Job(folder, argv, num_processes=args.nproc_per_node)
    return [*jobs.values()]


def check_seeds(seeds):
    """Raise UserError unless these are seeds, each once."""
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds takes different numbers of 0 or more, got {' '.join(map(str, seeds)) or 'none'}")


def run_jobs(jobs, output_dir, workers=1, threads=1):
    """Make the runs that are not finished, so many at a time; returns the names of those that failed.

    SIGINT, SIGTERM and SIGHUP let the runs under way save and end, then raise Stopped; a second one ends them at once,
    if a second has passed (some send one twice). Raises UserError for a finished run of another command.
    """
    output_dir, done = Path(output_dir), finished(output_dir)
    with writing(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        there = done.get(job.name, {}).get("command", shlex.join(job.argv))
        if there != shlex.join(job.argv):
            raise UserError(f"{output_dir / job.name} is of another command, {there}: give another --name or folder")
    waiting = deque(job for job in jobs if job.name not in done)
    tqdm.write(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are finished; {workers} at a time, in {output_dir}")
    active, failed, slots, signals, passed_on = [], [], deque(range(workers)), [], 0
    look = {"bar_format": "{desc}", "dynamic_ncols": True, "leave": False, "disable": None}  # None: on a terminal alone
    lines = [tqdm(position=slot, **look) for slot in slots]

    def on_signal(number, _):
        if not signals or time.monotonic() - signals[-1][0] > 1:
            signals.append((time.monotonic(), number))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        while active or (waiting and not signals):
            while waiting and slots and not signals:
                job = waiting.popleft()
                job.slot = slots.popleft()
                start(job, output_dir, threads)
                active.append(job)
            time.sleep(0.2)
            if passed_on < len(signals):
                for job in active:
                    kill(job.process) if passed_on else job.process.terminate()
                passed_on += 1
            for job in active[:]:
                lines[job.slot].set_description_str(f"{job.name}  {last_line(f'{output_dir / job.name}.log')}")
                if job.process.poll() is not None:
                    active.remove(job)
                    slots.append(job.slot)
                    status = "finished" if job.process.returncode == 0 else "stopped" if signals else "failed"
                    if status == "finished" and not is_run(output_dir / job.name):
                        status = "failed"
                    failed += [job.name] if status == "failed" else []
                    record(job, output_dir, status, threads, workers)
    finally:
        for job in active:  # where an error of this process ended the loop
            job.process.terminate()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for line in reversed(lines):
            line.close()
    if signals:
        raise Stopped("the runs under way are saved; the same command goes on with them", signals[0][1])
    return failed


def kill(process):
    """End a run at once, and all that it has started: torchrun's processes are in sessions of their own."""
    numbers = [process.pid]
    for number in numbers:  # of which there are more and more
        for children in Path(f"/proc/{number}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                numbers += map(int, children.read_text().split())
    process.kill()
    for number in numbers[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def start(job, output_dir, threads):
    """Begin a run, or go on with it where some of it is there."""
    folder = output_dir / job.name
    begun = (folder / "config.json").is_file()
    goes_on = begun and job.resumable and can_go_on(folder)
    where = ["--resume", str(folder)] if goes_on else ["--output-dir", str(folder)]
    argv = [*with_python(job.argv, job.python), *where, *(["--overwrite"] if begun and not goes_on else [])]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(gpus) > 1:
        first = job.slot * job.num_processes
        own_gpus = [gpus[(first + k) % len(gpus)] for k in range(job.num_processes)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own_gpus)
    tqdm.write(f"{'going on' if goes_on else 'starting'}  {job.name}")
    job.started = time.time()
    with writing(output_dir):
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = open(f"{folder}.log", "a" if begun else "w")
    with log:
        says = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "env": environment}
        try:  # in a session of its own, so that Ctrl-C comes from here, once
            job.process = subprocess.Popen(argv, **says, start_new_session=True)
        except OSError as error:
            raise UserError(f"{argv[0]} can't be run: {error.strerror}") from error


def last_line(path):
    """The last line that a run printed to its log, most of the time its progress bar."""
    with open(path, "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
        text = log.read().decode(errors="replace")
    return ([""] + [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()])[-1]


def record(job, output_dir, status, threads, workers):
    """Tell how a run ended, and write it to manifest.json."""
    folder, seconds = output_dir / job.name, time.time() - job.started
    with writing(output_dir), locked(output_dir):
        runs = manifest(output_dir)
        earlier = runs.get(job.name, {}).get("seconds", 0.0) if "--resume" in job.process.args else 0.0
        entry = {"command": shlex.join(job.argv), "status": status, "exit_code": job.process.returncode}
        entry |= {"seconds": round(earlier + seconds, 1), "ended": time.strftime("%Y-%m-%d %H:%M:%S")}
        entry |= {"threads": threads, "workers": workers, "machine": machine()}
        if status == "finished":
            config = read_json(folder / "config.json")
            entry |= {"commit": config.get("git_commit"), "versions": config.get("versions"), "metrics": digest(folder)}
        runs[job.name] = entry
        write_manifest(output_dir, runs)
    outcome = f"{status}  {job.name}, {seconds:.0f} s"
    if status == "failed":
        outcome = f"FAILED  {job.name}, {seconds:.0f} s: {one_line(last_line(f'{folder}.log'))} (all in {folder}.log)"
    tqdm.write(outcome)


@contextlib.contextmanager
def locked(output_dir):
    """Within it, no other process writes the manifest."""
    with open(output_dir / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def manifest(output_dir):
    """What manifest.json says of the runs, by name. Raises UserError where it can't be read."""
    path = Path(output_dir) / "manifest.json"
    return read_json(path) if path.is_file() else {}


def is_run(folder):
    return (folder / "config.json").is_file() and (folder / "metrics.csv").is_file()


def finished(output_dir):
    """The manifest's lines of the runs that are finished and there, by name."""
    entries = manifest(output_dir).items()
    return {k: entry for k, entry in entries if entry.get("status") == "finished" and is_run(Path(output_dir) / k)}


def write_manifest(output_dir, runs):
    """Write manifest.json, a line for each run."""
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(runs.items())]
    write_whole(Path(output_dir) / "manifest.json", "{\n" + ",\n".join(lines) + "\n}\n")


def digest(folder):
    """SHA-256 of the metrics of a run, the columns of time and speed aside."""
    return hashlib.sha256(json.dumps(timeless(folder)).encode()).hexdigest()


def machine():
    """The processor, its cores, the system and the GPUs, as far as they tell."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, TypeError):  # TypeError: ARM has no such line
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    found = {"cpu": cpu, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found["gpus"] = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    return found


def slurm_script(args, jobs):
    """A job array for Slurm's sbatch, a run in each job; they record themselves in one manifest."""
    tasks, seeds = (shlex.join(map(str, values)) for values in (args.tasks or ("",), args.seeds))
    own = ["--command", args.command, "--name", Path(jobs[0].name).parts[0], "--output-dir", args.output_dir]
    own += ["--threads", str(args.threads), "--nproc-per-node", str(args.nproc_per_node)]
    task = '--tasks "${tasks[SLURM_ARRAY_TASK_ID / ${#seeds[@]}]}" ' if args.tasks else ""
    return f"""#!/bin/bash
#SBATCH --job-name={own[3]}
#SBATCH --array=0-{len(jobs) - 1}%{args.workers}
#SBATCH --cpus-per-task={args.threads * args.nproc_per_node}
# where there are GPUs, the next line with one # less
##SBATCH --gpus-per-task={args.nproc_per_node}
#SBATCH --mem-per-cpu=4G
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600

tasks=({tasks})
seeds=({seeds})
exec python -m utils.benchmark {shlex.join(own)} \\
    {task}--seeds ${{seeds[SLURM_ARRAY_TASK_ID % ${{#seeds[@]}}]}}
"""


def main(args):
    """Make the runs that the flags name, or print the job script. Exits with code 1 where one failed."""
    jobs = jobs_of(args)
    if args.slurm_template:
        print(slurm_script(args, jobs), end="")
        return
    failed = run_jobs(jobs, args.output_dir, args.workers, args.threads)
    print(f"{len(jobs) - len(failed)} of {len(jobs)} runs are finished; {Path(args.output_dir) / 'manifest.json'}")
    if failed:
        raise Failed(f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}")


if __name__ == "__main__":
    command_line(main, Args, __doc__)
