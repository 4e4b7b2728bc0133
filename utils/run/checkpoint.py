"""Checkpoints: written aside and renamed, checked by SHA-256, read without running code.

<run>/checkpoints/update_<n> is the state of a run after n updates: what learns, in folders agent_<i>, with optimisers;
state.json with counts and random generators; manifest.json with size and SHA-256 of every other file.
"""

import hashlib
import json
import random
import shutil

import numpy
import torch
from safetensors import SafetensorError

from utils.cli import UserError, one_line
from utils.distributed import say
from utils.files import STATE, WriteError, checkpoints, order, put, read_json, remove, sync

MANIFEST = "manifest.json"


def write_checkpoint(folder, step, write, state, keep):
    """Write <folder>/update_<step>, whole or not at all, then remove those before it but for the `keep` newest.

    write(path) puts the agents there; `state` is a JSON object. Raises WriteError.
    """
    final = folder / f"update_{step:06d}"
    aside = final.with_name(final.name + ".writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write(aside)
        (aside / STATE).write_text(json.dumps(state))
        files = {path.relative_to(aside).as_posix(): digest(path) for path in files_in(aside)}
        (aside / MANIFEST).write_text(json.dumps(files, indent=2))
        for path in (*aside.rglob("*"), aside):
            sync(path)
        put(aside, final)
        sync(folder)
        for old in [path for path in checkpoints(folder) if order(path) <= order(final)][:-keep]:
            remove(old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise WriteError(f"{final} can't be written, earlier ones are as they were: {one_line(error)}") from error


def files_in(folder):
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def digest(path):
    """Size in bytes and SHA-256 of a file."""
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": sha256}


def newest_whole(folder, tell=say):
    """(the newest checkpoint whose files are those of its manifest, its state), or (None, None) where there is none.

    What is passed over is told. Raises UserError where there are checkpoints, and none is whole.
    """
    there = checkpoints(folder)
    for path in reversed(there):
        try:
            check_whole(path)
            return path, read_json(path / STATE)
        except UserError as error:
            tell(f"{error}; looking for an earlier one")
    if there:
        raise UserError(f"no checkpoint in {folder} is whole: there are {len(there)}")
    return None, None


def check_whole(path):
    """Raise UserError unless a checkpoint's files are those of its manifest, to the byte. No other file is parsed."""
    try:
        manifest = read_json(path / MANIFEST)
        files = {file.relative_to(path).as_posix(): file for file in files_in(path) if file != path / MANIFEST}
        for name in sorted({*manifest, *files}):
            if name not in files:
                raise UserError(f"{name} is missing")
            if name not in manifest:
                raise UserError(f"{name} is not of it")
            if digest(files[name]) != manifest[name]:
                raise UserError(f"{name} is not what was written")
        if STATE not in files:
            raise UserError(f"{STATE} is missing")
    except (OSError, UserError) as error:
        raise UserError(f"{path} is not whole: {one_line(error)}") from error


def random_state(generator):
    """The state of this process's random generators, `generator` (torch's) and its device's too, as JSON values."""
    kind, keys, *rest = numpy.random.get_state()
    device = generator.device
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "generator": generator.get_state().tolist(),
        "cuda": torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else [],
    }


def restore_random_state(state, generator):
    """Set this process's random generators; what is of another kind of device is left out, and that is said."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    device = generator.device
    on_gpu = device.type == "cuda"
    of_gpu = state["cuda"]
    fits = len(state["generator"]) == len(generator.get_state())
    if fits:
        generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
    if on_gpu and of_gpu:
        torch.cuda.set_rng_state(torch.tensor(of_gpu, dtype=torch.uint8), device)
    if not fits or on_gpu and not of_gpu:
        say(f"the random state that was saved does not fit {device}: other random numbers are drawn than there")
