"""LoRA adapters of many agents on one frozen base: made, saved and loaded; safetensors and JSON only.

In one peft.PeftModel agent i has the adapters agent_<i>_actor, agent_<i>_critic and, where the reference is separate,
agent_<i>_reference. The base's weights are neither changed nor written. A run's folder has, for each agent,

    agent_<i>/actor/, critic/, reference/    adapters in peft's own format: PeftModel.from_pretrained opens them
    agent_<i>/value_head.safetensors, base.json, the tokenizer, and optimizer.safetensors with optimizer.json
"""

import contextlib
import copy
import json
import math
import os
import shutil
import warnings
from pathlib import Path

import peft
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from utils.checkpoint import (
    BASE,
    HEAD,
    check_shapes,
    fingerprint,
    load_head,
    load_optimizer,
    read_json,
    read_tensors,
    remove,
    save_optimizer,
    save_tensors,
)
from utils.cli import UserError, one_line

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields of a LoRA configuration that say where it comes from, or how new weights start: they may differ.
ORIGIN = "auto_mapping base_model_name_or_path inference_mode peft_type peft_version revision task_type "
ORIGIN += "init_lora_weights loftq_config eva_config corda_config lora_ga_config megatron_config megatron_core"


# --- Adapters on a model ----------------------------------------------------------------------------------------------


def lora_config(args, model):
    """A peft.LoraConfig from the flags. Raises UserError for a target that is no linear layer of the model."""
    head = model.get_output_embeddings()
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, Conv1D))}
    names = sorted({name.split(".")[-1] for name, layer in linear.items() if layer is not head})
    for target in args.lora_target_modules:
        if not any(targeted(name, [target]) for name in linear):
            takes = f"names of linear layers ({', '.join(names)}; none: all of these)"
            raise UserError(f"--lora-target-modules takes {takes}, and the model has no {target}")
    shape = {"r": args.lora_rank, "lora_alpha": args.lora_alpha, "lora_dropout": args.lora_dropout}
    targets = [*args.lora_target_modules] or names
    return peft.LoraConfig(**shape, target_modules=targets, bias="none", task_type=peft.TaskType.CAUSAL_LM)


def targeted(name, targets):
    """Whether peft's list of targets has the module of that name."""
    return any(name == target or name.endswith("." + target) for target in targets)


def add_adapters(base, config, names):
    """A PeftModel of `base`, frozen, with an adapter for each name; agent_<i>_reference is frozen, as agent_<i>_actor.

    A new adapter changes nothing (B = 0); A is drawn from torch's global generator, to which references make no odds.
    """
    mode, base = base.training, base.requires_grad_(False)
    references = [name for name in names if name.endswith("_reference")]
    fresh = [name for name in names if name not in references]
    model = peft.get_peft_model(base, copy.deepcopy(config), adapter_name=fresh[0])
    for name in fresh[1:]:
        model.add_adapter(name, copy.deepcopy(config))
    with torch.random.fork_rng(devices=[]):
        for name in references:
            model.add_adapter(name, copy.deepcopy(config))
            copy_adapter(model, name.removesuffix("_reference") + "_actor", name)
    for name in names:
        for parameter in adapter_parameters(model, name):
            parameter.requires_grad_(name in fresh)
    return model.train(mode)  # new layers come in training mode


def adapter_parameters(model, name):
    """The parameters of the adapter of that name, in the model's order."""
    return [parameter for key, parameter in model.named_parameters() if f".{name}." in key]


@torch.no_grad()
def copy_adapter(model, source, target):
    """Give adapter `target` the weights of adapter `source`."""
    for old, new in zip(adapter_parameters(model, target), adapter_parameters(model, source), strict=True):
        old.copy_(new)


@contextlib.contextmanager
def learning(model, adapter, seed, args):
    """Within it an adapter is set, its dropout (with masks of that seed) and gradient checkpointing on, if so asked."""
    model.set_adapter(adapter)
    modules = [module for name, module in model.named_modules() if "lora_dropout" in name] if args.lora_dropout else []
    if args.gradient_checkpointing:
        modules += [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in modules:
        module.training = True
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
    for module in modules:
        module.training = False


@contextlib.contextmanager
def reference_of(agent, model):
    """Within it the model is the agent's reference: its adapter, or the base."""
    if agent.reference:
        model.set_adapter(agent.reference)
        yield
    else:
        with model.disable_adapter():
            yield


def adapter_state(model, name):
    """The adapter's tensors under the names that peft's files have."""
    return peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


# --- Out --------------------------------------------------------------------------------------------------------------


def save_adapters(folder, model, heads, tokenizer, base_name, optimizers=None):
    """Write a folder agent_<i> for each value head: the agent's adapters, the head, the tokenizer, the base's name.

    With N optimizers their states are written too. A folder is whole or not there: it is written aside, then renamed.
    """
    base = {"base": str(base_name), "fingerprint": fingerprint(model)}
    for i, head in enumerate(heads):
        final = Path(folder) / f"agent_{i}"
        aside = final.with_name(final.name + ".writing")
        shutil.rmtree(aside, ignore_errors=True)
        for part in ("actor", "critic", "reference"):
            name = f"agent_{i}_{part}"
            if name in model.peft_config:
                config = copy.deepcopy(model.peft_config[name])
                config.base_model_name_or_path, config.inference_mode = str(base_name), True
                config.target_modules = sorted(config.target_modules)
                config.save_pretrained(aside / part)
                save_tensors(adapter_state(model, name), aside / part / WEIGHTS)
        save_tensors(head.state_dict(), aside / HEAD)
        tokenizer.save_pretrained(aside)
        (aside / BASE).write_text(json.dumps(base, indent=2))
        if optimizers:
            save_optimizer(aside, optimizers[i])
        remove(final)
        os.replace(aside, final)


# --- In ---------------------------------------------------------------------------------------------------------------


def check_checkpoint(folder, num_agents):
    """The folders of a run's agents. Raises UserError unless they are num_agents, with all of their files."""
    paths, folder = [], Path(folder)
    while (folder / f"agent_{len(paths)}").is_dir():
        paths.append(folder / f"agent_{len(paths)}")
    if not paths:
        there = "it has no agent_0" if folder.is_dir() else "there is no such folder"
        raise UserError(f"--load-checkpoint takes a folder with agent_0 and so on in it, got {folder}: {there}")
    if len(paths) != num_agents:
        agents = f"{len(paths)} agent{'s' * (len(paths) != 1)}"
        raise UserError(f"--load-checkpoint {folder} has {agents}, and --num-agents is {num_agents}")
    for path in paths:
        for part in parts(path):
            for file in (path / part / CONFIG, path / part / WEIGHTS, path / BASE):
                if not file.is_file():
                    raise UserError(f"{path} is incomplete: there is no {file}")
    return paths


def parts(path):
    """The adapters that are loaded from an agent's folder."""
    return ("actor", "critic") if (path / "critic").is_dir() else ("actor",)


def read_config(path):
    """The peft.LoraConfig in an adapter's folder. Raises UserError unless it has one, with targets by name."""
    content, known = read_json(path / CONFIG), peft.LoraConfig.__dataclass_fields__
    needed = {"peft_type": str, "r": int, "lora_alpha": (int, float), "target_modules": list}
    for name, kind in needed.items():
        value = content.get(name)
        if not isinstance(value, kind) or not value or name == "peft_type" and value != "LORA":
            raise UserError(f"{path / CONFIG} is no LoRA configuration: {name} is {one_line(value, 80)}")
    for name in ("rank_pattern", "alpha_pattern"):
        if content.get(name):
            raise UserError(
                f"{path / CONFIG} has the {name} {one_line(content[name], 80)}: one rank and alpha for all is taken"
            )
    return peft.LoraConfig(**{name: value for name, value in content.items() if name in known})


def check_base(path, model, base_name, live=None):
    """Raise UserError unless the agent's folder is of this base; `live` is the base's fingerprint, if known."""
    saved = read_json(path / BASE)
    there = saved.get("fingerprint") if isinstance(saved.get("fingerprint"), dict) else {}
    for name, here in (live or fingerprint(model)).items():
        if there.get(name) != here:
            why = "the weights differ" if name == "sha256" else f"{name} {there.get(name)} there, {here} here"
            raise UserError(f"{path} is of the base {saved.get('base')}, not of {base_name}: {why}")


def compare(folder, config, args):
    """`config` merged with a checkpoint's LoRA configuration, and how these differ, by field, in words.

    Raises UserError where they differ, unless args.merge_lora_configs.
    """
    merged, differing = copy.deepcopy(config), {}
    for path in check_checkpoint(folder, args.num_agents):
        for saved in [read_config(path / part) for part in parts(path)]:
            for field, here in config.to_dict().items():
                there = getattr(saved, field)
                if field not in ORIGIN.split() and (there or None) != (here or None):
                    differing[field] = f"{field} {shown(there)} there, {shown(here)} here"
            merged.r, merged.target_modules = max(merged.r, saved.r), {*merged.target_modules, *saved.target_modules}
    both = "; ".join(differing.values())
    if differing and not args.merge_lora_configs:
        raise UserError(f"--load-checkpoint {folder} takes its LoRA configuration, or --merge-lora-configs: {both}")
    if args.load_optimizer and differing.keys() - {"lora_dropout"}:
        raise UserError(f"--load-optimizer takes the LoRA configuration of {folder}, not a merged one: {both}")
    return merged, differing


def shown(value):
    return ",".join(sorted(value)) if isinstance(value, set) else value


def stage_config(folder, config, args):
    """The configuration to make adapters with that are to hold a checkpoint's (None: none): `config`, or a wider one.

    Raises UserError where the two differ, unless args.merge_lora_configs. Then, with a warning, the rank is the larger,
    the targets are both's, and any other field is as in `config`.
    """
    merged, differing = compare(folder, config, args) if folder else (config, {})
    if differing:
        both = f"the LoRA configuration of {folder} differs: {'; '.join(differing.values())}"
        used = f"r {merged.r}, target_modules {shown(merged.target_modules)}, all else as here"
        warnings.warn(f"{both}; now {used}", stacklevel=2)
    return merged


def load_adapters(folder, model, heads, args, base_name, optimizers=()):
    """Start from an earlier stage: agent i's actor becomes its actor and its reference; its critic and head are loaded.

    A critic that the stage lacks is a copy of its actor. The policies are the stage's, also in adapters that are wider
    than its own (`stage_config`). With args.load_optimizer the optimizers are restored too. Raises UserError.
    """
    paths, live = check_checkpoint(folder, args.num_agents), fingerprint(model)
    compare(folder, model.peft_config["agent_0_actor"], args)
    for i, (path, head) in enumerate(zip(paths, heads, strict=True)):
        check_base(path, model, base_name, live)
        load_adapter(path / "actor", model, f"agent_{i}_actor", args.merge_lora_configs)
        for part in ("critic", "reference"):
            if (name := f"agent_{i}_{part}") in model.peft_config:
                copy_adapter(model, f"agent_{i}_actor", name)
                if part in parts(path):
                    load_adapter(path / part, model, name, args.merge_lora_configs)
        if (path / HEAD).is_file():
            load_head(path / HEAD, head)
    if args.load_optimizer:
        load_optimizers(folder, optimizers)


def load_adapter(path, model, name, merge=False):
    """Give an adapter the weights in a folder. Raises UserError.

    With `merge` an adapter may be wider: the weights are its top left, beside them are zeros, and where the folder's
    adapter has no weights B is 0. Where the scaling (alpha / r) is another, B is multiplied by the ratio of the two.
    """
    saved, tensors, loaded, shapes = read_config(path), read_tensors(path / WEIGHTS), {}, {}
    scaling = saved.lora_alpha / (math.sqrt(saved.r) if saved.use_rslora else saved.r)
    width = model.peft_config[name].r
    r = min(saved.r, width) if merge else width
    for key, weight in adapter_state(model, name).items():
        module, is_b = key.rsplit(".lora_", 1)[0], ".lora_B." in key
        if merge and not targeted(module, saved.target_modules):
            loaded[key] = torch.zeros_like(weight) if is_b else weight
            continue
        shapes[key] = (weight.shape[0], r) if is_b else (r, weight.shape[1])
        if key in tensors and [*tensors[key].shape] == [*shapes[key]]:
            ratio = scaling / model.get_submodule(module).scaling[name] if is_b else 1
            loaded[key] = nn.functional.pad(tensors[key], (0, width - r) if is_b else (0, 0, 0, width - r)) * ratio
    check_shapes(path / WEIGHTS, tensors, shapes)
    peft.set_peft_model_state_dict(model, loaded, adapter_name=name)


def load_optimizers(folder, optimizers):
    """Restore the moments and steps of N AdamW optimizers from an earlier stage, where they are saved; else warn.

    Learning rates and other settings stay the optimizers' own. Raises UserError where a state does not fit.
    """
    paths = check_checkpoint(folder, len(optimizers))
    for path in paths:
        if not (path / "optimizer.safetensors").is_file() or not (path / "optimizer.json").is_file():
            warnings.warn(f"{path} has no optimizer's state: the optimizers are new", stacklevel=2)
            return
    for path, optimizer in zip(paths, optimizers):
        load_optimizer(path, optimizer)


def resume_adapters(folder, model, heads, optimizers, base_name):
    """Give the agents what save_adapters wrote in a checkpoint, to the bit. Raises UserError."""
    live = fingerprint(model)
    for i, (head, optimizer) in enumerate(zip(heads, optimizers, strict=True)):
        path = Path(folder) / f"agent_{i}"
        check_base(path, model, base_name, live)
        for part in ("actor", "critic", "reference"):
            if (name := f"agent_{i}_{part}") in model.peft_config:
                load_adapter(path / part, model, name)
        load_head(path / HEAD, head)
        load_optimizer(path, optimizer)
