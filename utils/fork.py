"""Where a run begins that is forked from another one (--fork): at its newest checkpoint, or at one that is named."""

import os
import shutil
from pathlib import Path

from utils.checkpoint import STATE, check_whole, checkpoints, newest_whole, put
from utils.cli import UserError, find_run, flag_name, flags_of, one_line, run_of
from utils.files import read_json

OF_AGENTS = """model model_config num_agents use_separate_critic critic_model_name_or_path critic_model_config
critic_value_head_hidden_dim value_head_hidden_dim use_separate_reference_adapter lora_rank lora_alpha lora_dropout
lora_target_modules lora_config load_checkpoint load_optimizer keep_reference fresh_critic merge_lora_configs""".split()
OF_DATA = "seed env task dataset train_size max_prompt_length long_prompts".split()
START = {"step": 0, "samples": 0, "items": 0, "changed": {}}  # of a run that is no fork


def fork_of(args, script, folder, of_folder):
    """What config.json says of a run that is forked into `folder`: from where, how far that was, and what is changed.

    {"run", "checkpoint", "step": updates, "samples": joint samples, "items": of the training set, or 0 where that is
    another one, "changed": {flag: [there, here]}}. `of_folder` are the fields of flags that may differ unsaid. Raises
    UserError where a flag of the agents differs, and where there is nothing to fork.
    """
    run = find_run(run_of(args.fork), script, "--fork")
    if run.resolve() == folder.resolve():
        raise UserError(f"--fork {args.fork} is the folder that the run would write; give another --output-dir")
    changed = {}
    fixed = []
    for name, there in flags_of(run, type(args), "--fork").items():
        here = getattr(args, name)
        if here != there and name not in (*of_folder, "fork"):
            changed[name] = [there, here]
            if name in OF_AGENTS:
                fixed.append(f"{flag_name(name)} {there} there, {here} here")
    if fixed:
        raise UserError(f"--fork {args.fork} has the agents of that run, and these flags differ: {'; '.join(fixed)}")
    path, step = find_checkpoint(args.fork, run)
    samples, items = progress(read_json(run / "config.json"), step)
    if any(name in changed for name in OF_DATA):
        items = 0
    counts = {"step": step, "samples": samples, "items": items}
    return {"run": str(run), "checkpoint": path.name, **counts, "changed": changed}


def find_checkpoint(fork, run):
    """(the checkpoint that is forked, its updates). Raises UserError where there is none that is whole."""
    if run_of(fork) == fork:
        path, state = newest_whole(run / "checkpoints")
        if path is None:
            raise UserError(f"--fork {fork} has no checkpoint yet")
        return path, state["step"]
    check_whole(Path(fork))
    return Path(fork), read_json(Path(fork) / STATE)["step"]


def newest(fork):
    """The checkpoint that is forked, not looked into, or None."""
    if run_of(fork) != fork:
        return Path(fork)
    saved = checkpoints(Path(fork) / "checkpoints")
    return saved[-1] if saved else None


def progress(config, step):
    """(joint samples, items of the training set) of a run after so many updates, by its config.json."""
    begun = config.get("fork") or START
    updates = step - begun["step"]
    samples = begun["samples"] + updates * config["args"]["rollout_buffer_size"]
    return samples, begun["items"] + updates * config["items_per_update"]


def copy_fork(fork, folder):
    """Give a folder the checkpoint of a fork, and the metrics and samples of its run. Raises UserError."""
    run, name = Path(fork["run"]), fork["checkpoint"]
    final = folder / "checkpoints" / name
    aside = final.with_name(f"{name}.writing")
    try:
        for file in ("metrics.csv", "samples.jsonl"):
            if os.path.isfile(run / file):
                shutil.copyfile(run / file, folder / file)
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(run / "checkpoints" / name, aside)
        check_whole(aside)
        put(aside, final)
    except (OSError, UserError) as error:
        reason = one_line(error)
        if run / "checkpoints" / name not in checkpoints(run / "checkpoints"):
            reason = "that run goes on, and has removed it for a newer one; try again, or let it keep more"
        raise UserError(f"--fork: {run}/checkpoints/{name} can't be copied: {reason}") from error
