"""Where a run begins that is forked from another one (--fork): at its newest checkpoint, or at one that is named."""

import os
import re
import shutil
from pathlib import Path

from utils.cli import UserError, find_run, flag_name, flags_of, one_line, run_of
from utils.files import STATE, checkpoints, put, read_json, whole_lines
from utils.run.checkpoint import check_whole, newest_whole

COPY = "fork.writing"  # of what is forked, until it is whole
OF_AGENTS = """model model_config num_agents self_play opponents opponent_interval use_separate_critic
critic_model_name_or_path critic_model_config critic_value_head_hidden_dim value_head_hidden_dim
use_separate_reference_adapter lora_rank lora_alpha lora_dropout lora_target_modules lora_config
load_checkpoint load_optimizer keep_reference fresh_critic merge_lora_configs""".split()
OF_DATA = ["task", "env", "dataset"]  # where these differ, items are read from the first on
OF_REWARDS = [*OF_DATA, "reward_normalization"]  # where these differ, what agents earn is of another size
OF_UPDATE = ["rollout_buffer_size", "num_generations"]  # what an update is: those of the run are counted on


def fork_of(args, script, folder, free, task):
    """What config.json says of a run that is forked into `folder`: from where, and what is changed. `task` is its name.

    {"run", "checkpoint", "step": its updates, "changed": {flag: [there, here]}, "first": first_of it}. `free` are the
    flags that may differ unsaid. Raises UserError where a flag of the agents or of an update's length differs,
    and where there is nothing to fork.
    """
    run = find_run(run_of(args.fork), script, "--fork")
    if run.resolve() == folder.resolve():
        raise UserError(f"--fork {args.fork} is the folder that the run would write; give another --output-dir")
    changed = {}
    fixed = []
    for name, there in flags_of(run, type(args), "--fork").items():
        here = getattr(args, name)
        if here != there and name not in (*free, "fork"):
            changed[name] = [there, here]
            if name in OF_AGENTS or name in OF_UPDATE:
                fixed.append(f"{flag_name(name)} {there} there, {here} here")
    if fixed:
        raise UserError(f"--fork {args.fork} goes on with what that run has, and these differ: {'; '.join(fixed)}")
    path, step = find_checkpoint(args.fork, run)
    config = read_json(run / "config.json")
    has_own_data = changed.keys() & OF_DATA
    names = [re.sub(r" in \S+\.py", "", name) for name in (config.get("task", task), task)]  # a script may be renamed
    if not has_own_data and names[0] != names[1]:  # of Python's objects, which flags do not name
        changed["task"] = [config["task"], task]
        has_own_data = True
    fork = {"run": str(run), "checkpoint": path.name, "step": step, "changed": changed}
    return fork | {"first": step if has_own_data else first_of(config.get("fork"))}


def first_of(fork):
    """The update that has a run's first items: 0, or where it, or a run that it was forked from, took other data."""
    if fork is None:
        return 0
    return fork.get("first", fork["step"] if fork["changed"].keys() & OF_DATA else 0)


def find_checkpoint(fork, run):
    """(the checkpoint that is forked, its updates). Raises UserError where there is none that is whole."""
    if run_of(fork) == fork:
        path, state = newest_whole(run / "checkpoints")
        if path is None:
            raise UserError(f"--fork {fork} has no checkpoint yet")
        return path, state["step"]
    check_whole(Path(fork))
    return Path(fork), read_json(Path(fork) / STATE)["step"]


def copy_fork(fork, folder):
    """Have a copy of the checkpoint of a fork, and of the metrics and samples of its run, in a folder, aside there.

    Raises UserError.
    """
    run, name = Path(fork["run"]), fork["checkpoint"]
    aside = folder / COPY
    try:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(run / "checkpoints" / name, aside / name)
        check_whole(aside / name)
        lines = whole_lines(run / "metrics.csv")[: fork["step"] + 1]
        (aside / "metrics.csv").write_bytes(b"".join(line + b"\n" for line in lines))
        if os.path.isfile(run / "samples.jsonl"):
            shutil.copyfile(run / "samples.jsonl", aside / "samples.jsonl")
    except (OSError, UserError) as error:
        reason = one_line(error)
        if run / "checkpoints" / name not in checkpoints(run / "checkpoints"):
            reason = "that run goes on, and has removed it for a newer one; try again, or let it keep more"
        raise UserError(f"--fork: {run}/checkpoints/{name} can't be copied: {reason}") from error


def put_fork(fork, folder):
    """Give the names of a run's own to what copy_fork has copied, the checkpoint last."""
    aside = folder / COPY
    (folder / "checkpoints").mkdir()
    for path in (aside / "metrics.csv", aside / "samples.jsonl"):
        if path.is_file():
            os.replace(path, folder / path.name)
    put(aside / fork["checkpoint"], folder / "checkpoints" / f"update_{fork['step']:06d}")
    shutil.rmtree(aside)
