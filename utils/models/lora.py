"""LoRA configurations: from flags, from a file, from a folder; what differs between two, and both merged."""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Literal

import peft
import pydantic
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import get_pattern_key
from pydantic import Field, PositiveFloat, PositiveInt
from torch import nn
from transformers.pytorch_utils import Conv1D

from utils.cli import Fraction, UserError, flag_name, one_line
from utils.files import read_json

CONFIG = "adapter_config.json"
# In these models peft refuses adapters on layers of these names, whose weights their kernels read by themselves.
STATE_SPACES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
REFUSED = {"conv1d", "out_proj"}
SHORT_FORM = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")  # flags that --lora-config replaces
# Fields of a LoRA configuration that say where it comes from, how new weights start, or how the base has its own: they
# may differ.
ORIGIN = """auto_mapping base_model_name_or_path inference_mode peft_type peft_version revision task_type fan_in_fan_out
init_lora_weights loftq_config eva_config corda_config lora_ga_config megatron_config megatron_core""".split()


def as_text(config):
    """A peft.LoraConfig as JSON, without what is as peft has it by default; any other value as it is."""
    if not isinstance(config, peft.LoraConfig):
        return config
    defaults = peft.LoraConfig().to_dict()
    fields = {name: value for name, value in config.to_dict().items() if value != defaults.get(name)}
    return json.dumps(fields, default=lambda value: sorted(value) if isinstance(value, set) else str(value))


def is_wanted(args):
    """Whether the flags ask for adapters."""
    return args.lora_rank > 0 or args.lora_config is not None


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(strict=True, allow_inf_nan=False))
class LoraFields:
    """The fields of a peft.LoraConfig that are taken; any other is to be as peft has it by default."""

    r: PositiveInt = 8
    lora_alpha: PositiveFloat = 8.0
    lora_dropout: Fraction = 0.0
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
    for name in sorted(defaults.keys() - {*takes, *ORIGIN}):
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


def read_config_flag(args):
    """The peft.LoraConfig of --lora-config, a file or JSON. Raises UserError."""
    source = source_of(args)
    try:
        content = json.loads(args.lora_config) if is_json(args.lora_config) else read_json(Path(args.lora_config))
    except (UserError, ValueError, RecursionError) as error:
        raise UserError(f"--lora-config: {one_line(error)}") from error
    unknown = sorted(content.keys() - peft.LoraConfig().to_dict().keys())
    if unknown:
        raise UserError(f"{source}: a peft.LoraConfig has no {one_line(', '.join(unknown), 80)}")
    if content.get("peft_type") not in (None, "LORA"):
        raise UserError(f"{source}: peft_type takes LORA, got {one_line(content['peft_type'], 80)}")
    return parse_config(content, source)


def is_json(text):
    """Whether a --lora-config is JSON itself, and no file's name."""
    return text.lstrip().startswith("{")


def source_of(args):
    """What errors call --lora-config."""
    return "--lora-config" if is_json(args.lora_config) else f"--lora-config {args.lora_config}"


def check_lora_args(args):
    """Raise UserError for flags of the adapters that do not go together, before a model is loaded."""
    if args.lora_config is None:
        return
    default = type(args)()
    for name in SHORT_FORM:
        if getattr(args, name) != getattr(default, name):
            raise UserError(f"--lora-config takes the place of {flag_name(name)}; give one of the two")
    read_config_flag(args)


def lora_config(model, args):
    """A peft.LoraConfig from the flags, its targets resolved. Raises UserError where the model can't follow."""
    if args.lora_config is not None:
        return resolve_modules(model, read_config_flag(args), source_of(args))
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


def describe_differences(saved, config):
    """How two LoRA configurations differ: {field: words}."""
    differences = {}
    for name in config.to_dict():
        there = in_words(getattr(saved, name))
        here = in_words(getattr(config, name))
        if name not in ORIGIN and (there or None) != (here or None):
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
