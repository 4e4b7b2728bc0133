"""LoRA adapters of many agents on one frozen base, for ppo_llm.py; read from safetensors and JSON only.

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
from typing import Annotated

import peft
import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from utils import causal_lm
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
from utils.cli import UserError, flags, one_line

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ROLES = ("actor", "critic", "reference")
# In these models peft refuses adapters on layers of these names, whose weights their kernels read by themselves.
STATE_SPACES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
REFUSED = {"conv1d", "out_proj"}
# Fields of a LoRA configuration that say where it comes from, or how new weights start: they may differ.
ORIGIN = "auto_mapping base_model_name_or_path inference_mode peft_type peft_version revision task_type "
ORIGIN += "init_lora_weights loftq_config eva_config corda_config lora_ga_config megatron_config megatron_core"


@flags
class LoraArgs:
    """The adapters, and the run that they start from."""

    lora_rank: PositiveInt = 16  # rank r of the adapters
    lora_alpha: PositiveFloat = 32.0  # the adapters' output is scaled by alpha / r
    lora_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0  # dropout on what the adapters read, while learning
    lora_target_modules: tuple[str, ...] = ()  # linear layers that get an adapter, by name; none: all but the output's
    load_checkpoint: str | None = None  # run to start from: its actors become the actors and the references
    load_optimizer: bool = False  # with --load-checkpoint: go on with its optimisers too
    merge_lora_configs: bool = False  # with --load-checkpoint: take a LoRA configuration that differs, merged


# --- Adapters on a model ----------------------------------------------------------------------------------------------


def lora_config(model, args):
    """A peft.LoraConfig from the flags. Raises UserError for a target that is no linear layer of the model."""
    head = model.get_output_embeddings()
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, Conv1D))}
    names = {name.split(".")[-1] for name, layer in linear.items() if layer is not head}
    if model.config.model_type in STATE_SPACES:
        names -= REFUSED
    names = sorted(names)
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
    try:
        model = peft.get_peft_model(base, copy.deepcopy(config), adapter_name=fresh[0])
    except ValueError as error:
        raise UserError(f"--lora-target-modules: {one_line(error)}") from error
    for name in fresh[1:]:
        model.add_adapter(name, copy.deepcopy(config))
    with torch.random.fork_rng(devices=[]):
        for name in references:
            model.add_adapter(name, copy.deepcopy(config))
            copy_adapter(model, name.removesuffix("_reference") + "_actor", name)
    for name in names:
        for parameter in parameters(model, name):
            parameter.requires_grad_(name in fresh)
    return model.train(mode)  # new layers come in training mode


def parameters(model, name):
    """The parameters of the adapter of that name, in the model's order."""
    return [parameter for key, parameter in model.named_parameters() if f".{name}." in key]


@torch.no_grad()
def copy_adapter(model, source, target):
    """Give adapter `target` the weights of adapter `source`."""
    for old, new in zip(parameters(model, target), parameters(model, source), strict=True):
        old.copy_(new)


@contextlib.contextmanager
def active(model, name):
    """Within it the base has the adapter of that name (None: none)."""
    if name is None:
        with model.disable_adapter():
            yield
        return
    if model.active_adapter != name:
        model.set_adapter(name)
    yield


def forward(model, name, **inputs):
    """The base's output, as causal_lm.forward gives it, under the adapter of that name (None: under none)."""
    with active(model, name):
        return causal_lm.forward(model.get_base_model(), **inputs)


def hidden_states(model, name, **inputs):
    """The base's last hidden states, [R, keep, D], under the adapter of that name."""
    with active(model, name):
        return causal_lm.forward(model.get_base_model().base_model, **inputs).hidden_states


def set_training(model, training):
    """Switch LoRA's dropout and gradient checkpointing, which are for learning; the base stays in eval mode.

    What was computed with them on is to be differentiated before they are switched off.
    """
    for name, module in model.named_modules():
        if "lora_dropout" in name or isinstance(module, GradientCheckpointingLayer):
            module.training = training


def adapter_state(model, name):
    """The adapter's tensors under the names that peft's files have."""
    return peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


# --- Out --------------------------------------------------------------------------------------------------------------


def save_agents(folder, agents, checkpoint=False):
    """Write a folder agent_<i> for each agent: adapters, value head, tokenizer, the base's name, the optimiser's state.

    A folder is whole or not there: it is written aside, then renamed. A checkpoint has the same files.
    """
    model = agents[0].model
    base = {"base": str(agents[0].base_name), "fingerprint": fingerprint(model)}
    for i, agent in enumerate(agents):
        final = Path(folder) / f"agent_{i}"
        aside = final.with_name(final.name + ".writing")
        shutil.rmtree(aside, ignore_errors=True)
        for role in ROLES:
            if f"agent_{i}_{role}" in model.peft_config:
                save_adapter(aside / role, model, f"agent_{i}_{role}", agent.base_name)
        save_tensors(agent.value_head.state_dict(), aside / HEAD)
        agent.tokenizer.save_pretrained(aside)
        (aside / BASE).write_text(json.dumps(base, indent=2))
        save_optimizer(aside, agent.optimizers[0])
        remove(final)
        os.replace(aside, final)


def save_adapter(folder, model, name, base_name):
    """Write an adapter in peft's own format."""
    config = copy.deepcopy(model.peft_config[name])
    config.base_model_name_or_path = str(base_name)
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)
    save_tensors(adapter_state(model, name), folder / WEIGHTS)


# --- In ---------------------------------------------------------------------------------------------------------------


def check_checkpoint(folder, num_agents):
    """The folders of a run's agents. Raises UserError unless they are num_agents, with all of their files."""
    folder = Path(folder)
    paths = []
    while (folder / f"agent_{len(paths)}").is_dir():
        paths.append(folder / f"agent_{len(paths)}")
    if not paths:
        reason = "it has no agent_0" if folder.is_dir() else "there is no such folder"
        raise UserError(f"--load-checkpoint takes a folder with agent_0 and so on in it, got {folder}: {reason}")
    if len(paths) != num_agents:
        there = "1 agent" if len(paths) == 1 else f"{len(paths)} agents"
        raise UserError(f"--load-checkpoint {folder} has {there}, and the team has {num_agents}")
    for path in paths:
        for role in saved_roles(path):
            for file in (path / role / CONFIG, path / role / WEIGHTS, path / BASE):
                if not file.is_file():
                    raise UserError(f"{path} is incomplete: there is no {file}")
    return paths


def saved_roles(path):
    """The adapters that are loaded from an agent's folder."""
    return ("actor", "critic") if (path / "critic").is_dir() else ("actor",)


def read_config(path):
    """The peft.LoraConfig in an adapter's folder. Raises UserError unless it has one, with targets by name."""
    content = read_json(path / CONFIG)
    needed = {"peft_type": str, "r": int, "lora_alpha": (int, float), "target_modules": list}
    for name, kind in needed.items():
        value = content.get(name)
        if not isinstance(value, kind) or not value or name == "peft_type" and value != "LORA":
            raise UserError(f"{path / CONFIG} is no LoRA configuration: {name} is {one_line(value, 80)}")
    for name in ("rank_pattern", "alpha_pattern"):
        if content.get(name):
            pattern = one_line(content[name], 80)
            raise UserError(f"{path / CONFIG} has the {name} {pattern}: one rank and alpha for all is taken")
    fields = peft.LoraConfig.__dataclass_fields__
    return peft.LoraConfig(**{name: value for name, value in content.items() if name in fields})


def check_base(path, model, base_name, base_fingerprint=None):
    """Raise UserError unless the agent's folder is of this base, whose fingerprint may be given."""
    saved = read_json(path / BASE)
    there = saved.get("fingerprint") if isinstance(saved.get("fingerprint"), dict) else {}
    for name, here in (base_fingerprint or fingerprint(model)).items():
        if there.get(name) != here:
            reason = "the weights differ" if name == "sha256" else f"{name} {there.get(name)} there, {here} here"
            raise UserError(f"{path} is of the base {saved.get('base')}, not of {base_name}: {reason}")


def compare_configs(folder, config, num_agents, args):
    """`config` merged with a checkpoint's LoRA configurations, and how these differ, by field, in words.

    Merged, the rank is the larger, the targets are both's, and any other field is as in `config`. Raises UserError
    where they differ, unless --merge-lora-configs.
    """
    merged = copy.deepcopy(config)
    differences = {}
    for path in check_checkpoint(folder, num_agents):
        for role in saved_roles(path):
            saved = read_config(path / role)
            for name, here in config.to_dict().items():
                there = getattr(saved, name)
                if name not in ORIGIN.split() and (there or None) != (here or None):
                    differences[name] = f"{name} {in_words(there)} there, {in_words(here)} here"
            merged.r = max(merged.r, saved.r)
            merged.target_modules = {*merged.target_modules, *saved.target_modules}
    text = "; ".join(differences.values())
    if differences and not args.merge_lora_configs:
        raise UserError(f"--load-checkpoint {folder} takes its LoRA configuration, or --merge-lora-configs: {text}")
    if args.load_optimizer and differences.keys() - {"lora_dropout"}:
        raise UserError(f"--load-optimizer takes the LoRA configuration of {folder}, not a merged one: {text}")
    return merged, text


def in_words(value):
    return ",".join(sorted(value)) if isinstance(value, set) else value


def build_config(model, num_agents, args):
    """A peft.LoraConfig from the flags, merged with that of --load-checkpoint; warns where they differ.

    Raises UserError for flags that the model can't follow, and where the two differ without --merge-lora-configs.
    """
    config = lora_config(model, args)
    if args.load_checkpoint:
        folder = args.load_checkpoint
        config, differences = compare_configs(folder, config, num_agents, args)
        if differences:
            merged = f"r {config.r}, target_modules {in_words(config.target_modules)}, all else as here"
            warnings.warn(f"the LoRA configuration of {folder} differs: {differences}; now {merged}", stacklevel=2)
    return config


def load_stage(agents, args):
    """Start from --load-checkpoint: agent i's actor becomes actor and reference; its critic and head are loaded.

    A critic that the checkpoint lacks is a copy of its actor. The policies are the checkpoint's, also in adapters that
    are wider than its own (`build_config`). With --load-optimizer the optimisers are restored too. Raises UserError.
    """
    model = agents[0].model
    base_fingerprint = fingerprint(model)
    paths = check_checkpoint(args.load_checkpoint, len(agents))
    compare_configs(args.load_checkpoint, model.peft_config[agents[0].actor], len(agents), args)
    for i, (path, agent) in enumerate(zip(paths, agents)):
        check_base(path, model, agent.base_name, base_fingerprint)
        load_adapter(path / "actor", model, agent.actor, args.merge_lora_configs)
        for role in ("critic", "reference"):
            name = f"agent_{i}_{role}"
            if name in model.peft_config:
                copy_adapter(model, agent.actor, name)
                if role in saved_roles(path):
                    load_adapter(path / role, model, name, args.merge_lora_configs)
        if (path / HEAD).is_file():
            load_head(path / HEAD, agent.value_head)
    if args.load_optimizer:
        load_optimizers(paths, agents)


def load_adapter(path, model, name, merge=False):
    """Give an adapter the weights in a folder. Raises UserError.

    With `merge` an adapter may be wider: the weights are its top left, beside them are zeros, and where the folder's
    adapter has no weights B is 0. Where the scaling (alpha / r) is another, B is multiplied by the ratio of the two.
    """
    config = read_config(path)
    tensors = read_tensors(path / WEIGHTS)
    scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    width = model.peft_config[name].r
    r = min(config.r, width) if merge else width
    loaded = {}
    shapes = {}
    for key, weight in adapter_state(model, name).items():
        module = key.rsplit(".lora_", 1)[0]
        is_b = ".lora_B." in key
        if merge and not targeted(module, config.target_modules):
            loaded[key] = torch.zeros_like(weight) if is_b else weight
            continue
        shapes[key] = (weight.shape[0], r) if is_b else (r, weight.shape[1])
        if key in tensors and tuple(tensors[key].shape) == shapes[key]:
            ratio = scaling / model.get_submodule(module).scaling[name] if is_b else 1
            padding = (0, width - r) if is_b else (0, 0, 0, width - r)
            loaded[key] = nn.functional.pad(tensors[key], padding) * ratio
    check_shapes(path / WEIGHTS, tensors, shapes)
    peft.set_peft_model_state_dict(model, loaded, adapter_name=name)


def load_optimizers(paths, agents):
    """Restore the optimisers' moments and steps from agents' folders where all have them; else warn.

    Learning rates and other settings stay the optimisers' own. Raises UserError where a state does not fit.
    """
    for path in paths:
        if not (path / "optimizer.safetensors").is_file() or not (path / "optimizer.json").is_file():
            warnings.warn(f"{path} has no optimizer's state: the optimizers are new", stacklevel=2)
            return
    for path, agent in zip(paths, agents):
        load_optimizer(path, agent.optimizers[0])


def load_agents(folder, agents):
    """Give the agents what save_agents wrote in a checkpoint, to the bit. Raises UserError."""
    model = agents[0].model
    base_fingerprint = fingerprint(model)
    for i, agent in enumerate(agents):
        path = Path(folder) / f"agent_{i}"
        check_base(path, model, agent.base_name, base_fingerprint)
        for role in ROLES:
            if f"agent_{i}_{role}" in model.peft_config:
                load_adapter(path / role, model, f"agent_{i}_{role}")
        load_head(path / HEAD, agent.value_head)
        load_optimizer(path, agent.optimizers[0])
