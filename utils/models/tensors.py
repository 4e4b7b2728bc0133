"""Tensors and optimisers to and from safetensors files, and what tells one base from another."""

import hashlib
import json
import math

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from utils.cli import UserError, one_line
from utils.distributed import is_main
from utils.files import read_json
from utils.models.sharding import share, whole, whole_tensors

BASE = "base.json"
HEAD = "value_head.safetensors"


def load_head(path, head):
    """Give a value head the tensors in a file. Raises UserError."""
    tensors = read_tensors(path)
    check_shapes(path, tensors, {name: x.shape for name, x in head.state_dict().items()})
    head.load_state_dict(tensors)


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


def save_optimizer(folder, optimizer, name):
    """Write an optimizer's state, of tensors, as <name>.safetensors, the sizes of its groups beside it."""
    tensors = {}
    for k, moments in optimizer.state_dict()["state"].items():
        for moment, x in moments.items():
            tensors[f"{k}.{moment}"] = x
    tensors = whole_tensors(tensors)
    if not is_main():
        return
    save_tensors(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps({"groups": group_sizes(optimizer)}))


def load_optimizer(folder, optimizer, name):
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
    for k, parameter in enumerate(parameters):  # one that never had a gradient has no state
        own = {place: x for place, x in tensors.items() if place.startswith(f"{k}.")}
        shapes |= {place: x.shape for place, x in own.items()}
        if own and isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            shapes |= {f"{k}.step": (), f"{k}.exp_avg": parameter.shape, f"{k}.exp_avg_sq": parameter.shape}
        if own:
            in_order = sorted(own, key=lambda place: (not place.endswith(".step"), place))  # that of AdamW
            moments[k] = {place.partition(".")[2]: own[place] for place in in_order}
    check_shapes(path, tensors, shapes)
    for k, own in moments.items():
        like = parameters[k]
        moments[k] = {place: share(x, like) if x.shape == like.shape else x for place, x in own.items()}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
