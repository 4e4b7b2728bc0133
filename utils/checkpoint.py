"""Checkpoints: written aside and renamed, checked by SHA-256, read without running code; and the agents' own folders.

What utils ask of an agent that is a model, here and in utils/run.py:

    actor         a transformers model, which is written and read
    tokenizer     beside it
    optimizers    a list of AdamW
    schedules     a list of torch's learning-rate schedules, stepped once an update
    num_skipped   gradients running that were not finite
    deviation     that advantages were divided by; both may be left out, and so may
    critic        a transformers model, or None
    value_head    a module
    reference     the initial model; with it a run is not resumed with another one

What agents of adapters have in their place, utils/adapters.py says. A central critic, which is among the agents, has no
actor, and the folder critic.

<run>/checkpoints/update_<n> is the state of a run after n updates: folders agent_<i> with agents and optimisers,
state.json with counts and random generators, manifest.json with size and SHA-256 of every other file.
"""

import hashlib
import json
import math
import os
import random
import shutil
from pathlib import Path

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from utils.cli import UserError, one_line
from utils.distributed import is_main, say
from utils.files import WriteError, read_json, sync
from utils.models import loading
from utils.sharding import share, whole, whole_tensors

MANIFEST = "manifest.json"
STATE = "state.json"
HEAD = "value_head.safetensors"
BASE = "base.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for each parameter


# --- Checkpoints ------------------------------------------------------------------------------------------------------


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
        for old in [path for path in checkpoints(folder) if path.name <= final.name][:-keep]:
            remove(old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise WriteError(f"{final} can't be written, earlier ones are as they were: {one_line(error)}") from error


def checkpoints(folder):
    """The folders of checkpoints, oldest first, whole or not."""
    return sorted(path for path in folder.glob("update_*") if path.is_dir() and path.suffix == "")


def put(aside, final):
    """Give a folder the name `final`, in the place of an older folder, if there is one, which is removed after it."""
    gone = move_aside(final)
    os.replace(aside, final)
    shutil.rmtree(gone, ignore_errors=True)


def remove(path):
    """Remove a folder, if it is there: first its name, so that no half of it is ever seen."""
    shutil.rmtree(move_aside(path), ignore_errors=True)


def move_aside(path):
    """Give a folder, if it is there, a name under which it is removed, and return that."""
    gone = path.with_name(path.name + ".removing")
    shutil.rmtree(gone, ignore_errors=True)
    if path.exists():
        os.replace(path, gone)
    return gone


def files_in(folder):
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def digest(path):
    """Size in bytes and SHA-256 of a file."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            sha256.update(part)
        return {"bytes": file.tell(), "sha256": sha256.hexdigest()}


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
    if of_gpu and isinstance(of_gpu[0], list):  # of all GPUs that the process saw, in checkpoints of earlier versions
        of_gpu = of_gpu[device.index] if on_gpu and device.index < len(of_gpu) else []
    fits = len(state["generator"]) == len(generator.get_state())
    if fits:
        generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
    if on_gpu and of_gpu:
        torch.cuda.set_rng_state(torch.tensor(of_gpu, dtype=torch.uint8), device)
    if not fits or on_gpu and not of_gpu:
        say(f"the random state that was saved does not fit {device}: other random numbers are drawn than there")


# --- Agents that are models -------------------------------------------------------------------------------------------


def save_agents(folder, agents, checkpoint=False):
    """Write each agent's `actor` and `tokenizer` as a Hugging Face folder agent_<i>; value head and critic beside them.

    A checkpoint has their optimizers too, and the fingerprints of their references, the initial models. A folder is
    whole or not there: it is written aside, then renamed. Where models are sharded, all processes call it, to send
    their parts; the main one writes.
    """
    for i, agent in enumerate(agents):
        final = Path(folder) / folder_name(i, agent)
        aside = final.with_name(final.name + ".writing")
        if is_main():
            shutil.rmtree(aside, ignore_errors=True)
        for name, model in models_of(agent).items():
            save_model(model, aside / name)
        if checkpoint:
            base = {"fingerprint": fingerprint(agent.reference) if hasattr(agent, "reference") else None}
            for k, optimizer in enumerate(agent.optimizers):
                save_optimizer(aside, optimizer, f"optimizer_{k}")
        if not is_main():
            continue
        agent.tokenizer.save_pretrained(aside)
        if hasattr(agent, "value_head"):
            save_tensors(agent.value_head.state_dict(), aside / HEAD)
        if checkpoint:
            (aside / BASE).write_text(json.dumps(base))
        put(aside, final)


def folder_name(i, agent):
    """The folder of agent i, or of a central critic."""
    return f"agent_{i}" if hasattr(agent, "actor") else "critic"


def models_of(agent):
    """The models of an agent, or of a central critic, by their places in its folder."""
    if not hasattr(agent, "actor"):
        return {"": agent.critic}
    models = {"": agent.actor}
    if getattr(agent, "critic", None) is not None:
        models["critic"] = agent.critic
    return models


def save_model(model, path):
    """Write a model as a Hugging Face folder."""
    weights = whole_tensors(model.state_dict(keep_vars=True))
    if is_main():
        model.save_pretrained(path, state_dict=weights)


def load_agents(folder, agents):
    """Give the agents what save_agents wrote in a checkpoint. Raises UserError where it is of other models."""
    for i, agent in enumerate(agents):
        path = Path(folder) / folder_name(i, agent)
        here = fingerprint(agent.reference) if hasattr(agent, "reference") else None
        if read_json(path / BASE).get("fingerprint") != here:
            raise UserError(f"the run of {folder} began with another model than agent {i} has here")
        for name, model in models_of(agent).items():
            load_weights(path / name, model)
        if hasattr(agent, "value_head"):
            load_head(path / HEAD, agent.value_head)
        for k, optimizer in enumerate(agent.optimizers):
            load_optimizer(path, optimizer, f"optimizer_{k}")


def load_weights(path, model):
    """Give a model the weights in a Hugging Face folder of its own kind. Raises UserError."""
    with loading("--resume", path):
        saved = type(model).from_pretrained(path, dtype=model.dtype, use_safetensors=True)  # no pickles
        weights = model.state_dict()
        model.load_state_dict({name: share(x, weights[name]) for name, x in saved.state_dict().items()})


def load_head(path, head):
    """Give a value head the tensors in a file. Raises UserError."""
    tensors = read_tensors(path)
    check_shapes(path, tensors, {name: x.shape for name, x in head.state_dict().items()})
    head.load_state_dict(tensors)


# --- Parts ------------------------------------------------------------------------------------------------------------


def fingerprint(model):
    """What tells one base from another: its shape, and a SHA-256 of up to 65,536 elements of each weight, as bfloat16.

    It is the same in float32, float16 and bfloat16, with adapters and without.
    """
    sha256 = hashlib.sha256()
    for name, weight in sorted(model.named_parameters(), key=lambda item: plain(item[0])):
        if not is_of_adapter(name):
            sample = whole(weight).detach().flatten()[:: math.ceil(weight.numel() / 65536)].to("cpu", torch.bfloat16)
            sha256.update(plain(name).encode() + sample.view(torch.int16).numpy().tobytes())
    config = model.config.get_text_config()
    shape = {name: getattr(config, name, None) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    return {"model_type": config.model_type, **shape, "sha256": sha256.hexdigest()}


def is_of_adapter(name):
    """Whether a parameter of that name is an adapter's, a module that it has a copy of included."""
    return ".lora_" in name or ".modules_to_save." in name


def plain(name):
    """A parameter's name in the base without adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")


def save_tensors(tensors, path):
    save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, path, metadata={"format": "pt"})


def group_sizes(optimizer):
    return [len(group["params"]) for group in optimizer.param_groups]


def read_tensors(path):
    """The tensors in a safetensors file, by name. Raises UserError."""
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} is no whole safetensors file: {one_line(error)}") from error


def check_shapes(path, tensors, shapes):
    """Raise UserError unless the tensors are those of the shapes, by name."""
    there = {name: [*x.shape] for name, x in tensors.items()}
    here = {name: [*shape] for name, shape in shapes.items()}
    for name in [*here, *there]:
        if there.get(name) != here.get(name):
            differing = f"{name} is {there.get(name, 'not')} there, {here.get(name, 'not')} here"
            raise UserError(f"{path} does not fit: {differing}")


def save_optimizer(folder, optimizer, name="optimizer", **counts):
    """Write the moments and steps of an AdamW optimizer as <name>.safetensors, the sizes of its groups beside them.

    `counts`, numbers by name, stand beside the sizes.
    """
    tensors = {}
    for k, moments in optimizer.state_dict()["state"].items():
        for moment, x in moments.items():
            tensors[f"{k}.{moment}"] = x
    tensors = whole_tensors(tensors)
    if not is_main():
        return
    save_tensors(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps({"groups": group_sizes(optimizer), **counts}))


def load_optimizer(folder, optimizer, name="optimizer"):
    """Restore what save_optimizer wrote; learning rates and other settings stay. Raises UserError where it can't."""
    path = folder / f"{name}.json"
    there = read_json(path).get("groups")
    here = group_sizes(optimizer)
    if here != there:
        raise UserError(f"{path} does not fit: {there} parameters there, {here} here")
    path = folder / f"{name}.safetensors"
    tensors = read_tensors(path)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = {}
    moments = {}
    for k, parameter in enumerate(parameters):
        if f"{k}.step" in tensors:  # a parameter that never had a gradient has no state
            shapes |= {f"{k}.step": (), f"{k}.exp_avg": parameter.shape, f"{k}.exp_avg_sq": parameter.shape}
            moments[k] = {moment: tensors.get(f"{k}.{moment}") for moment in MOMENTS}
    check_shapes(path, tensors, shapes)
    for k in moments:
        for moment in MOMENTS[1:]:
            moments[k][moment] = share(moments[k][moment], parameters[k])
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
