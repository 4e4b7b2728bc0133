"""The run's folder: its flags, who may write there, and what made the run (config.json)."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from utils.cli import UserError, find_run, flag_name, flags, flags_of, one_line
from utils.distributed import say
from utils.files import erase, read_json, whole_lines, write_whole

PACKAGES = "torch transformers peft datasets tokenizers safetensors numpy pydantic tyro wandb matplotlib tqdm"


@flags
class FolderArgs:
    """The run's folder, what is kept in it, and where else it is logged."""

    output_dir: str | None = None  # folder of the run; none: runs/<script>[__<task>]__<seed>__<time>
    overwrite: bool = False  # replace the run that is already in --output-dir
    # updates between checkpoints, of which the first comes after update 1; none: 2 % of the time; 0: only at the end
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

# Flags of how it is computed, and whom it meets beside, which may differ where a run is resumed; those of its length
# may be larger
OF_MACHINE = set(
    """micro_batch_size hf_generate_chunk_size shard vllm_config gradient_checkpointing merge_adapters save_optimizer
    save_base reward_timeout eval_against""".split()
)
OF_LENGTH = ("num_train_epochs", "max_episodes")

# --- Which folder, and whether the run may write there ----------------------------------------------------------------


def run_folder(args, script):
    """The folder that the run of a script's file will write, not made yet, or goes on in (--resume).

    Raises UserError where the flags of a resumed run differ from those that began it and may not, where a run is in the
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
        check_same_flags(folder, args)
        return folder
    parts = [name, args.seed, time.strftime("%Y%m%d-%H%M%S")]
    played = getattr(args, "env", None) or args.task
    if played is not None:
        parts.insert(1, Path(played).stem)
    if args.output_dir is None:
        if args.overwrite:
            raise UserError("--overwrite has no effect without --output-dir")
        return Path("runs", "__".join(map(str, parts)))
    folder = Path(args.output_dir)
    if os.path.exists(folder) and not folder.is_dir():
        raise UserError(f"--output-dir takes a folder, and {folder} is a file")
    try:
        taken = outputs(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"--output-dir can't be {one_line(folder, 80)}: {one_line(error)}") from error
    if taken and not is_run(folder):
        names = ", ".join(sorted(path.name for path in taken))
        raise UserError(f"--output-dir can't be {folder}: a run would replace {names} there, and no run has left that")
    if taken and not args.overwrite:
        raise UserError(f"--output-dir takes a folder without a run in it; {folder} has one (--overwrite replaces it)")
    if taken:
        check_kept(folder, taken, args)
    return folder


def check_kept(folder, taken, args):
    """Raise UserError where what the run begins from is `taken` by an earlier run, and --overwrite would remove it."""
    removed = [path.resolve() for path in taken]
    for name in ("model", "critic_model_name_or_path", "load_checkpoint", "opponent_run", "eval_against"):
        paths = getattr(args, name, None) or ()
        for path in (paths,) if isinstance(paths, str) else paths:
            if name in ("eval_against", "opponent_run") and path == "random":  # a player, and no folder
                continue
            own = Path(path).resolve()
            if own == folder.resolve() or any(own.is_relative_to(each) for each in removed):
                there = f"{flag_name(name)} {path} is in {folder}"
                raise UserError(f"{there}, and --overwrite would remove it: give another --output-dir")


def check_same_flags(folder, args):
    """Raise UserError, with all of them, where flags differ from those of the run in a folder and may not."""
    differing = []
    for name, there in flags_of(folder, type(args)).items():
        here = getattr(args, name)
        is_longer = name in OF_LENGTH and there is not None and (here is None or here > there)
        if here != there and name not in OF_FOLDER | OF_MACHINE and not is_longer:
            differing.append(f"{flag_name(name)} {there} there, {here} here")
    if differing:
        goes_on = f"--resume {folder} goes on with that run's flags, and --fork {folder} takes others"
        raise UserError(f"{goes_on}; these differ: {'; '.join(differing)}")


def check_same_task(folder, task):
    """Raise UserError where a run was made from Python with another task, or other rows, than are here."""
    own_task = read_json(folder / "config.json").get("task", task)
    if own_task != task:
        goes_on = "main(Args(resume=..., and all its flags), task=..., train_dataset=...) goes on with what it had"
        raise UserError(f"--resume: {folder} is a run of {own_task}, and here is {task}; {goes_on}")


def check_same_length(folder, args, num_updates):
    """Raise UserError where a run has more or fewer updates than it had by the same flags: its items are others."""
    config = read_json(folder / "config.json")
    length = config.get("num_updates", num_updates)
    if length != num_updates and all(config["args"].get(name) == getattr(args, name) for name in OF_LENGTH):
        with_these = f"with the items that are here it has {num_updates}: its data have changed"
        raise UserError(f"--resume: {folder} is a run of {length} updates, and {with_these}")


def is_run(folder):
    """Whether a folder has the config.json of a run."""
    try:
        return {"script", "args"} <= read_json(folder / "config.json").keys()
    except UserError:
        return False


def check_untrained(folder, step=0):
    """Raise UserError where a run without checkpoints has learned since update `step`: to begin anew would lose it."""
    updates = len(whole_lines(folder / "metrics.csv")[1:])
    agents = sorted(path.name for path in folder.glob("agent_[0-9]*"))
    if updates > step + 1 or agents:  # of the first alone, which was not saved, there is nothing but a row
        there = ", ".join([f"{updates} updates in metrics.csv", *agents])
        anew = f"--output-dir {folder} --overwrite begins anew"
        raise UserError(f"--resume: {folder} has no checkpoint to go on from; it has {there}, which are kept; {anew}")


def outputs(folder):
    """What an earlier run left in a folder, links that lead nowhere too."""
    names = "checkpoints metrics.csv samples.jsonl curves.png agent_[0-9]* critic base config.json".split()
    found = [path for name in names for path in folder.glob(name)]
    return found + [folder / name for name in names if (folder / name).is_symlink() and folder / name not in found]


def empty(folder, keep=()):
    """Remove what an earlier run left, the flags last: without them the rest would be nobody's run."""
    for path in outputs(folder):
        if path.name not in keep:
            erase(path)


# --- What made the run ------------------------------------------------------------------------------------------------


def write_config(folder, args, script, num_updates, fork, task):
    """Write config.json; what it says."""
    config = {
        "command": sys.argv,
        "script": str(Path(script).resolve()),
        "args": dataclasses.asdict(args),
        "task": task,
        "num_updates": num_updates,
        "fork": fork,
        "versions": versions(),
        "git_commit": git_commit(script),
        "code": code_of(args, script),
    }
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return config


def code_of(args, script):
    """The SHA-256 of the script's file, and of those of a task or an environment, by name."""
    files = [script, *(own for own in (args.task, args.env) if own and own.endswith(".py"))]
    paths = [Path(file) for file in files if os.path.isfile(file)]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def say_what_changed(folder, args, script):
    """Say which files of a run's code are not what they were when it was last begun or resumed."""
    digests = read_json(folder / "config.json").get("code", {})
    names = [name for name, digest in code_of(args, script).items() if digests.get(name, digest) != digest]
    if names:
        has = "has" if len(names) == 1 else "have"
        since = f"since {folder} was begun, or last resumed"
        say(f"{', '.join(names)} {has} changed {since}: it goes on with what is here")


def versions():
    """The versions of Python and of the packages that are there, by name."""
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def git_commit(script):
    """The commit of this code; None: no checkout.

    With `+` after it where a .py or a file in utils/ differs, or where the script is in no commit.
    """
    here = Path(__file__).resolve().parent
    options = {"cwd": here, "capture_output": True, "text": True, "check": True}
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **options).stdout.strip()
        differing = ["git", "status", "--porcelain", "-uno", "--", ":(top)*.py", ":(top)utils"]
        is_tracked = ["git", "ls-files", "--error-unmatch", str(Path(script).resolve())]
        has_changed = subprocess.run(differing, **options).stdout.strip()
        return commit + "+" * bool(has_changed or subprocess.run(is_tracked, **options | {"check": False}).returncode)
    except (OSError, subprocess.CalledProcessError):
        return None
