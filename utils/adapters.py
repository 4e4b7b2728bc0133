"""LoRA adapters of many agents on one frozen base, for ppo_llm.py; read from safetensors and JSON only.

In one peft.PeftModel agent i has the adapters agent_<i>_actor, agent_<i>_critic and, where the reference is separate,
agent_<i>_reference. The base's weights are neither changed nor written. A run's folder has, for each agent,

    agent_<i>/actor/, critic/, reference/    adapters in peft's own format: PeftModel.from_pretrained opens them
    agent_<i>/value_head.safetensors, base.json, the tokenizer, and optimizer.safetensors with optimizer.json
    base/                                    with --save-base: the base's weights and the tokenizer

A run starts from such a folder, or from a plain peft folder: adapter_config.json and adapter_model.safetensors.
"""

import contextlib
import copy
import dataclasses
import json
import math
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Annotated, Literal

import peft
import pydantic
import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import get_pattern_key
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
    is_of_adapter,
    load_head,
    load_optimizer,
    plain,
    read_json,
    read_tensors,
    remove,
    save_optimizer,
    save_tensors,
)
from utils.cli import UserError, flag_name, flags, one_line
from utils.models import locate

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
ROLES = ("actor", "critic", "reference")
# In these models peft refuses adapters on layers of these names, whose weights their kernels read by themselves.
STATE_SPACES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
REFUSED = {"conv1d", "out_proj"}
MAGNITUDE = ".lora_magnitude_vector"  # how a tensor's name ends that DoRA has beside A and B
SHORT_FORM = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")  # flags that --lora-config replaces
# Fields of a LoRA configuration that say where it comes from, how new weights start, or how the base has its own: they
# may differ.
ORIGIN = "auto_mapping base_model_name_or_path inference_mode peft_type peft_version revision task_type fan_in_fan_out "
ORIGIN += "init_lora_weights loftq_config eva_config corda_config lora_ga_config megatron_config megatron_core"


@flags
class LoraArgs:
    """The adapters, and the run that they start from."""

    lora_rank: PositiveInt = 16  # rank r of the adapters
    lora_alpha: PositiveFloat = 32.0  # the adapters' output is scaled by alpha / r
    lora_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0  # dropout on what the adapters read, while learning
    lora_target_modules: tuple[str, ...] = ()  # linear layers that get an adapter, by name; none: all but the output's
    lora_config: str | None = None  # JSON file with the fields of a peft.LoraConfig, in place of the four flags above
    load_checkpoint: str | None = None  # run or peft folder to start from: its actors are now actors and references
    load_optimizer: bool = False  # with --load-checkpoint: go on with its optimisers and their schedule too
    keep_reference: bool = False  # with --load-checkpoint: its references stay the references
    fresh_critic: bool = False  # with --load-checkpoint: the critics and their value heads are new
    merge_lora_configs: bool = False  # with --load-checkpoint: take a LoRA configuration that differs, merged
    save_optimizer: bool = True  # keep the optimisers' state with the run's agents; a checkpoint always has it
    save_base: bool = False  # write the base's weights too, once, at the end


# --- A LoRA configuration ---------------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(strict=True, allow_inf_nan=False))
class LoraFields:
    """The fields of a peft.LoraConfig that are taken; any other is to be as peft has it by default."""

    r: PositiveInt = 8
    lora_alpha: PositiveFloat = 8.0
    lora_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, PositiveInt] = Field(default_factory=dict)
    alpha_pattern: dict[str, PositiveFloat] = Field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: Literal[True, False, "gaussian"] = True

    def patterns(self):
        """All that peft reads as regular expressions."""
        patterns = [*self.rank_pattern, *self.alpha_pattern, *(self.modules_to_save or [])]
        for value in (self.target_modules, self.exclude_modules, self.layers_pattern):
            if isinstance(value, str):
                patterns.append(value)
        return patterns


def parse_config(content, source):
    """A peft.LoraConfig from a dict of its fields. Raises UserError, which begins with `source`."""
    defaults = peft.LoraConfig().to_dict()
    takes = [field.name for field in dataclasses.fields(LoraFields)]
    for name in sorted(defaults.keys() - {*takes, *ORIGIN.split()}):
        value = content.get(name, defaults[name])
        if (value or None) != (defaults[name] or None):
            raise UserError(f"{source}: {name} takes {defaults[name]} here, got {one_line(value, 80)}")
    values = {name: value for name, value in content.items() if name in takes}
    try:
        fields = LoraFields(**values)
        for pattern in fields.patterns():
            re.compile(pattern)
        return peft.LoraConfig(**vars(fields), task_type=peft.TaskType.CAUSAL_LM)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{source}: {first['loc'][0]}: {first['msg']}, got {one_line(first['input'], 80)}") from None
    except re.error as error:
        raise UserError(f"{source}: {one_line(pattern, 80)} is no regular expression: {error}") from None
    except ValueError as error:
        raise UserError(f"{source}: {one_line(error)}") from None


def read_config_file(args):
    """The peft.LoraConfig in the file --lora-config. Raises UserError."""
    source = f"--lora-config {args.lora_config}"
    try:
        content = read_json(Path(args.lora_config))
    except UserError as error:
        raise UserError(f"--lora-config: {error}") from error
    unknown = sorted(content.keys() - peft.LoraConfig().to_dict().keys())
    if unknown:
        raise UserError(f"{source}: a peft.LoraConfig has no {one_line(', '.join(unknown), 80)}")
    if content.get("peft_type") not in (None, "LORA"):
        raise UserError(f"{source}: peft_type takes LORA, got {one_line(content['peft_type'], 80)}")
    return parse_config(content, source)


def check_lora_args(args):
    """Raise UserError for flags of the adapters that do not go together, before a model is loaded."""
    if args.lora_config is not None:
        for name in SHORT_FORM:
            if getattr(args, name) != getattr(LoraArgs, name):
                raise UserError(f"--lora-config takes the place of {flag_name(name)}; give one of the two")
        read_config_file(args)
    if args.load_checkpoint is not None:
        check_checkpoint(args)


def lora_config(model, args):
    """A peft.LoraConfig from the flags, its targets resolved. Raises UserError where the model can't follow."""
    if args.lora_config is not None:
        config = read_config_file(args)
        return resolve_modules(model, config, f"--lora-config {args.lora_config}")
    config = peft.LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=[*args.lora_target_modules] or None,
        bias="none",
        task_type=peft.TaskType.CAUSAL_LM,
    )
    return resolve_modules(model, config, "--lora-target-modules")


def resolve_modules(model, config, source):
    """Give a configuration its targets as a set of names: last names, where all layers that are called so are meant.

    Without targets they are all linear layers but the output's. Returns it. Raises UserError, which begins with
    `source`, for targets that are no linear layers, and for modules_to_save that the model does not have.
    """
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, (nn.Linear, Conv1D))]
    all_linear = {last_name(name) for name in linear if modules[name] is not model.get_output_embeddings()}
    if model.config.model_type in STATE_SPACES:
        all_linear -= REFUSED
    takes = f"takes names of linear layers ({', '.join(sorted(all_linear))}; none: all of these)"
    config.target_modules = config.target_modules or all_linear
    if isinstance(config.target_modules, set):
        for target in sorted(config.target_modules):
            if not any(name == target or name.endswith("." + target) for name in linear):
                raise UserError(f"{source} {takes}, and the model has no {target}")
    for saved in config.modules_to_save or []:
        if not any(name.endswith(saved) for name in modules):
            raise UserError(f"{source}: modules_to_save takes names of modules, and the model has no {saved}")

    targets = {name for name in modules if name and targeted(model, config, name)}
    if not targets or not targets <= {*linear}:
        meant = min(targets - {*linear}, default="no layer")
        raise UserError(f"{source} {takes}, and {in_words(config.target_modules)} means {meant}")
    config.target_modules = set()
    for last in {last_name(name) for name in targets}:
        layers = {name for name in linear if last_name(name) == last}
        config.target_modules |= {last} if layers <= targets else layers & targets
    config.exclude_modules = None
    config.layers_to_transform = None
    config.layers_pattern = None
    return config


def last_name(name):
    return name.split(".")[-1]


def targeted(model, config, name):
    """Whether peft gives the base's layer of that name an adapter; `model` may have adapters already."""
    if config.target_modules == "all-linear":
        every = copy.copy(config)
        every.target_modules = {name}
        is_output = model.get_submodule(name) is model.get_output_embeddings()
        is_linear = isinstance(model.get_submodule(name), (nn.Linear, Conv1D, BaseTunerLayer))
        return is_linear and not is_output and bool(check_target_module_exists(every, name))
    return bool(check_target_module_exists(config, name))


def rank_of(config, name):
    """The rank of an adapter on the layer of that name."""
    return config.rank_pattern.get(get_pattern_key(config.rank_pattern, name), config.r)


def scaling_of(config, name):
    """What an adapter's output is multiplied by on the layer of that name: alpha / r, or alpha / sqrt(r)."""
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha)
    rank = rank_of(config, name)
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


# --- Adapters on a model ----------------------------------------------------------------------------------------------


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


def save_agents(folder, agents, checkpoint=False, with_optimizer=True, with_base=False):
    """Write a folder agent_<i> for each agent: adapters, value head, tokenizer, the base's name, the optimiser's state.

    A folder is whole or not there: it is written aside, then renamed. A checkpoint always has the optimiser's state,
    and never the base, which goes to the folder `base`.
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
        if checkpoint or with_optimizer:
            save_optimizer(aside, agent.optimizers[0], updates=agent.schedules[0].last_epoch)
        remove(final)
        os.replace(aside, final)
    if with_base and not checkpoint:
        save_base(Path(folder) / "base", model, agents[0].tokenizer)


def save_adapter(folder, model, name, base_name):
    """Write an adapter in peft's own format."""
    config = copy.deepcopy(model.peft_config[name])
    config.base_model_name_or_path = str(base_name)
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)
    save_tensors(adapter_state(model, name), folder / WEIGHTS)


def save_base(final, model, tokenizer):
    """Write the base without its adapters as a plain Hugging Face folder, aside, then rename it."""
    aside = final.with_name(final.name + ".writing")
    shutil.rmtree(aside, ignore_errors=True)
    base = model.get_base_model()
    weights = {plain(name): x for name, x in base.state_dict().items() if not is_of_adapter(name)}
    base.save_pretrained(aside, state_dict=weights)
    tokenizer.save_pretrained(aside)
    remove(final)
    os.replace(aside, final)


# --- In ---------------------------------------------------------------------------------------------------------------


def check_checkpoint(args):
    """The folder of each agent in --load-checkpoint; a plain peft folder is that of all.

    Raises UserError unless there are num_agents, with all files that are to be loaded.
    """
    folder = Path(args.load_checkpoint)
    paths = find_agents(folder, args.num_agents)
    for path in paths:
        if args.keep_reference and not (path / "reference").is_dir():
            raise UserError(f"--keep-reference takes a checkpoint with references, and {path} has no reference")
        if not is_plain(path) and not (path / BASE).is_file():
            raise UserError(f"{path} is incomplete: there is no {path / BASE}")
        for role in saved_roles(path, args):
            check_files(path, adapter_folder(path, role))
    return paths


def find_agents(folder, num_agents):
    """The folder of each of num_agents agents in a run's folder, or in a plain peft folder. Raises UserError."""
    if is_plain(folder):
        return [folder] * num_agents
    paths = []
    while os.path.isdir(folder / f"agent_{len(paths)}"):
        paths.append(folder / f"agent_{len(paths)}")
    if not paths:
        reason = "it has no agent_0" if os.path.isdir(folder) else "there is no such folder"
        takes = f"a folder with agent_0 and so on in it, or a peft folder, with {CONFIG}"
        raise UserError(f"--load-checkpoint takes {takes}, got {folder}: {reason}")
    if len(paths) != num_agents:
        there = "1 agent" if len(paths) == 1 else f"{len(paths)} agents"
        raise UserError(f"--load-checkpoint {folder} has {there}, and the team has {num_agents}")
    return paths


def check_files(path, folder):
    """Raise UserError unless an agent's folder has an adapter's files in `folder`."""
    for file in (folder / CONFIG, folder / WEIGHTS):
        if not file.is_file():
            pickle = f"; {PICKLE} is a pickle, which is not read" if (folder / PICKLE).is_file() else ""
            raise UserError(f"{path} is incomplete: there is no {file}{pickle}")
    read_config(folder)


def is_plain(path):
    """Whether a folder is an adapter in peft's format itself."""
    return os.path.isfile(path / CONFIG)  # False too for what can be no name


def adapter_folder(path, role):
    """Where an agent's folder has the adapter of a role."""
    return path if is_plain(path) else path / role


def saved_roles(path, args):
    """The adapters that are loaded from an agent's folder."""
    roles = ["actor"]
    if (path / "critic").is_dir() and not args.fresh_critic:
        roles.append("critic")
    if args.keep_reference:
        roles.append("reference")
    return roles


def read_config(path):
    """The peft.LoraConfig in an adapter's folder. Raises UserError unless it has one that is taken."""
    content = read_json(path / CONFIG)
    for name in ("peft_type", "r", "target_modules"):
        value = content.get(name)
        if not value or name == "peft_type" and value != "LORA":
            raise UserError(f"{path / CONFIG} is no LoRA configuration: {name} is {one_line(value, 80)}")
    config = parse_config(content, path / CONFIG)
    config.base_model_name_or_path = content.get("base_model_name_or_path")
    return config


def check_base(path, model, base_name, base_fingerprint=None):
    """Raise UserError unless the agent's folder is of this base, whose fingerprint may be given."""
    saved = read_json(path / BASE)
    there = saved.get("fingerprint") if isinstance(saved.get("fingerprint"), dict) else {}
    for name, here in (base_fingerprint or fingerprint(model)).items():
        if there.get(name) != here:
            reason = "the weights differ" if name == "sha256" else f"{name} {there.get(name)} there, {here} here"
            raise UserError(f"{path} is of the base {saved.get('base')}, not of {base_name}: {reason}")


def warn_of_other_base(path, base_name):
    """Warn where a plain peft folder names another base: it has no fingerprint of it, only shapes are checked."""
    there = read_config(path).base_model_name_or_path
    if there and os.path.realpath(locate(str(there))) != os.path.realpath(locate(str(base_name))):
        warnings.warn(f"{path} is of the base {one_line(there, 80)} by its name, not of {base_name}", stacklevel=2)


def compare_configs(model, config, args):
    """`config` merged with the LoRA configurations of --load-checkpoint, and how these differ, by field, in words.

    `model` is the base, without adapters. Raises UserError where they differ, unless --merge-lora-configs.
    """
    folder = args.load_checkpoint
    merged = copy.deepcopy(config)
    differences = {}
    for path in dict.fromkeys(check_checkpoint(args)):
        for role in saved_roles(path, args):
            saved_folder = adapter_folder(path, role)
            saved = resolve_modules(model, read_config(saved_folder), saved_folder / CONFIG)
            differences |= describe_differences(saved, config)
            if saved.use_dora and not config.use_dora:
                raise UserError(f"{saved_folder / CONFIG} has use_dora, and takes a --lora-config with use_dora")
            merged = merge_configs(model, merged, saved)
    text = "; ".join(differences.values())
    if differences and not args.merge_lora_configs:
        raise UserError(f"--load-checkpoint {folder} takes its LoRA configuration, or --merge-lora-configs: {text}")
    if args.load_optimizer and differences.keys() - {"lora_dropout"}:
        raise UserError(f"--load-optimizer takes the LoRA configuration of {folder}, not a merged one: {text}")
    return merged if differences else config, text


def describe_differences(saved, config):
    """How two LoRA configurations differ: {field: words}."""
    differences = {}
    for name in config.to_dict():
        there = in_words(getattr(saved, name))
        here = in_words(getattr(config, name))
        if name not in ORIGIN.split() and (there or None) != (here or None):
            differences[name] = f"{name} {there} there, {here} here"
    return differences


def merge_configs(model, config, saved):
    """A configuration into which adapters of both fit: on each layer the larger rank, the targets and modules of both.

    Any other field is that of `config`.
    """
    merged = copy.deepcopy(config)
    merged.r = max(config.r, saved.r)
    merged.target_modules = config.target_modules | saved.target_modules
    merged.modules_to_save = sorted({*(config.modules_to_save or []), *(saved.modules_to_save or [])}) or None
    merged.rank_pattern = {}
    for name, _ in model.named_modules():
        rank = max(rank_of(config, name), rank_of(saved, name))
        if rank != merged.r and targeted(model, merged, name):
            merged.rank_pattern[name] = rank
    return merged


def in_words(value):
    return ",".join(sorted(value)) if isinstance(value, (set, list)) else value


def build_config(model, args):
    """A peft.LoraConfig from the flags, merged with that of --load-checkpoint; warns where they differ.

    Raises UserError for flags that the model can't follow, and where the two differ without --merge-lora-configs.
    """
    config = lora_config(model, args)
    if args.load_checkpoint:
        folder = args.load_checkpoint
        config, differences = compare_configs(model, config, args)
        if differences:
            merged = f"r {config.r}, target_modules {in_words(config.target_modules)}"
            if config.modules_to_save:
                merged += f", modules_to_save {in_words(config.modules_to_save)}"
            text = f"the LoRA configuration of {folder} differs: {differences}; now {merged}, all else as here"
            warnings.warn(text, stacklevel=2)
    return config


def load_stage(agents, args):
    """Start from --load-checkpoint: agent i's actor becomes actor and reference; its critic and head are loaded.

    A critic that the checkpoint lacks is a copy of its actor, and a head that it lacks is new. The policies are the
    checkpoint's, also in adapters that are wider than its own (`build_config`). Raises UserError.
    """
    model = agents[0].model
    base_fingerprint = fingerprint(model)
    paths = check_checkpoint(args)
    for path in dict.fromkeys(paths):
        if is_plain(path):
            warn_of_other_base(path, agents[0].base_name)
        else:
            check_base(path, model, agents[0].base_name, base_fingerprint)
    for path, agent in zip(paths, agents):
        load_adapter(adapter_folder(path, "actor"), model, agent.actor, args.merge_lora_configs)
        copies = {"critic": agent.critic, "reference": agent.reference}
        if args.fresh_critic:
            del copies["critic"]
        for role, name in copies.items():
            if name in model.peft_config:
                copy_adapter(model, agent.actor, name)
                if role in saved_roles(path, args):
                    load_adapter(path / role, model, name, args.merge_lora_configs)
        if not is_plain(path) and not args.fresh_critic and (path / HEAD).is_file():
            load_head(path / HEAD, agent.value_head)
    if args.load_optimizer:
        load_optimizers(paths, agents)
        if args.fresh_critic:
            forget_critics(agents)


def load_adapter(path, model, name, merge=False):
    """Give an adapter the weights in a folder. Raises UserError.

    With `merge` an adapter may be wider: the weights are its top left, beside them are zeros, and where the folder's
    adapter has no weights B is 0, and a module of modules_to_save stays as it is. Where the scaling (alpha / r) is
    another, B is multiplied by the ratio of the two.
    """
    config = read_config(path)
    tensors = read_tensors(path / WEIGHTS)
    base = model.get_base_model()
    state = adapter_state(model, name)
    shapes = {}
    for key, weight in state.items():
        if not merge or is_saved(base, config, key):
            shapes[key] = saved_shape(base, config, name, key, weight) if merge else weight.shape
    check_shapes(path / WEIGHTS, without_base(tensors, shapes, base), shapes)
    for key, weight in state.items():
        is_b = ".lora_B." in key
        if key in shapes:
            state[key] = widen(tensors[key], weight.shape)
            if is_b:
                state[key] *= scaling_of(config, layer_name(key)) / base.get_submodule(layer_name(key)).scaling[name]
        elif is_b:
            state[key] = torch.zeros_like(weight)
    peft.set_peft_model_state_dict(model, state, adapter_name=name)
    for key in state.keys() - shapes.keys():
        if key.endswith(MAGNITUDE):
            neutralise_magnitude(base.get_submodule(layer_name(key)), name)


def is_saved(base, config, key):
    """Whether a folder of that configuration has the tensor of that name."""
    if ".lora_" not in key:
        return any(f"{module}." in key for module in config.modules_to_save or [])
    if key.endswith(MAGNITUDE) and not config.use_dora:
        return False
    return targeted(base, config, layer_name(key))


def saved_shape(base, config, name, key, weight):
    """The shape in the folder of a tensor that may be wider in the adapter of that name."""
    if ".lora_A." in key or ".lora_B." in key:
        module = layer_name(key)
        rank = min(rank_of(config, module), base.get_submodule(module).r[name])
        return (rank, weight.shape[1]) if ".lora_A." in key else (weight.shape[0], rank)
    return weight.shape


def layer_name(key):
    """The base's layer that a tensor of an adapter belongs to."""
    return plain(key.rsplit(".lora_", 1)[0])


def widen(tensor, shape):
    """A tensor with zeros after it in every dimension, up to a shape."""
    padding = []
    for there, here in zip(reversed(tensor.shape), reversed(shape)):
        padding += [0, here - there]
    return nn.functional.pad(tensor, padding)


@torch.no_grad()
def neutralise_magnitude(layer, name):
    """Let DoRA on a layer change nothing: its magnitudes are the norms of the weights that they scale."""
    vector = layer.lora_magnitude_vector[name]
    change = layer.lora_B[name].weight @ layer.lora_A[name].weight
    vector.weight.copy_(vector.get_weight_norm(layer.get_base_layer().weight, change, layer.scaling[name]))


def without_base(tensors, shapes, base):
    """The tensors but for those of `base` itself, which peft may write beside an adapter on embeddings or output."""
    weights = {plain(name): x for name, x in base.state_dict().items() if not is_of_adapter(name)}
    kept = {}
    for key, tensor in tensors.items():
        weight = weights.get(plain(key))
        is_base = weight is not None and key not in shapes and weight.shape == tensor.shape
        if not is_base or not torch.equal(tensor.to(weight), weight):
            kept[key] = tensor
    return kept


def load_optimizers(paths, agents):
    """Restore the optimisers' moments and steps from agents' folders where all have them; else warn.

    Learning rates and other settings stay the optimisers' own. Raises UserError where a state does not fit.
    """
    missing = without_optimizer(paths)
    if missing:
        warnings.warn(f"{missing[0]} has no optimizer's state: the optimizers are new", stacklevel=2)
        return
    for path, agent in zip(paths, agents):
        load_optimizer(path, agent.optimizers[0])


def without_optimizer(paths):
    """Those of agents' folders that have no optimiser's state."""
    names = ("optimizer.safetensors", "optimizer.json")
    return [path for path in paths if not all((path / name).is_file() for name in names)]


def forget_critics(agents):
    """Drop the moments of the critics and of their heads."""
    for agent in agents:
        optimizer = agent.optimizers[0]
        for parameter in [*parameters(agent.model, agent.critic), *agent.value_head.parameters()]:
            optimizer.state.pop(parameter, None)


def updates_before(args):
    """At which update the schedule of --load-checkpoint stood, for --load-optimizer to go on from; else 0.

    Raises UserError where the optimiser's file has no such number.
    """
    if not args.load_optimizer:
        return 0
    paths = check_checkpoint(args)
    if without_optimizer(paths):
        return 0
    file = paths[0] / "optimizer.json"
    updates = read_json(file).get("updates", 0)  # 0 in files of the first version
    if not isinstance(updates, int) or not 0 <= updates < 2**31:
        raise UserError(f"{file}: updates takes a number of updates, got {one_line(updates, 80)}")
    return updates


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
