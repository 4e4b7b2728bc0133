"""LoRA adapters of many agents on one frozen base, for ppo_llm.py; read from safetensors and JSON only.

What utils ask of an agent: `model`, a peft.PeftModel, `base_name` and `tokenizer`, which all agents share; `actor`, an
Adapter; if there are any, `critic` and `reference`, Adapters too, and `value_head`; and `optimizers`, `schedules` and
`num_skipped`, as utils/checkpoint.py has them. In the model agent i has the adapters agent_<i>_actor, agent_<i>_critic
and, where the reference is separate, agent_<i>_reference. The base's weights are neither changed nor written. A run's
folder has, for each agent,

    agent_<i>/actor/, critic/, reference/    adapters in peft's own format: PeftModel.from_pretrained opens them
    agent_<i>/value_head.safetensors, base.json, the tokenizer, and optimizer.safetensors with optimizer.json
    base/                                    with --save-base: the base's weights and the tokenizer

A run starts from such a folder, or from a plain peft folder: adapter_config.json and adapter_model.safetensors.
"""

import collections
import contextlib
import copy
import json
import shutil
from pathlib import Path

import peft
import torch
from peft.tuners import lora
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from utils import causal_lm, sharding
from utils.checkpoint import (
    BASE,
    HEAD,
    check_shapes,
    fingerprint,
    is_of_adapter,
    load_head,
    load_optimizer,
    plain,
    put,
    read_json,
    read_tensors,
    save_optimizer,
    save_tensors,
)
from utils.cli import UserError, one_line
from utils.distributed import is_main
from utils.lora import rank_of, read_config, scaling_of, targeted

WEIGHTS = "adapter_model.safetensors"
MERGEABLE = (lora.Linear, lora.Embedding)  # layers of peft that merge to the sum of what they add
ROLES = ("actor", "critic", "reference")
MAGNITUDE = ".lora_magnitude_vector"  # how a tensor's name ends that DoRA has beside A and B


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
        raise UserError(f"peft refuses the adapters: {one_line(error)}") from error
    for name in fresh[1:]:
        model.add_adapter(name, copy.deepcopy(config))
    with torch.random.fork_rng(devices=[]):
        for name in references:
            model.add_adapter(name, copy.deepcopy(config))
            copy_adapter(model, name.removesuffix("_reference") + "_actor", name)
    for name in names:
        for parameter in parameters(model, name):
            parameter.requires_grad_(name in fresh)
    model.mergeable = []  # build_agents decides it
    switches = (lora.LoraLayer, AuxiliaryTrainingWrapper)
    model.switches = [module for module in model.modules() if isinstance(module, switches)]
    model.learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model.train(mode)  # new layers come in training mode


def parameters(model, name):
    """The parameters of the adapter of that name, in the model's order."""
    return [parameter for key, parameter in model.named_parameters() if f".{name}." in key]


@torch.no_grad()
def copy_adapter(model, source, target):
    """Give adapter `target` the weights of adapter `source`."""
    for old, new in zip(parameters(model, target), parameters(model, source), strict=True):
        old.copy_(new)


class Adapter(str):
    """The name of an adapter, and the PeftModel that has it; the empty name is the base without any."""

    def __new__(cls, model, name):
        adapter = super().__new__(cls, name)
        adapter.model = model
        return adapter


@contextlib.contextmanager
def active(model, name):
    """Within it the base has the adapter of that name (none, or an empty name: no adapter).

    peft's set_adapter walks through the whole model, and lets only the adapter that is on learn. Here all learn that
    did before, so that losses of several adapters can be added up and differentiated together.
    """
    if not name:
        with model.disable_adapter():
            yield
        let_learn(model)
        return
    if model.active_adapter != name:
        for module in model.switches:
            has_it = isinstance(module, lora.LoraLayer) or name in module._adapters
            module.set_adapter([name] if has_it else [])
        model.active_adapter = model.base_model.active_adapter = name
        let_learn(model)
    yield


def let_learn(model):
    """Let the parameters learn that did when the adapters were added, and a reference that is on not."""
    for parameter in model.learning:
        parameter.requires_grad_(True)
    if model.active_adapter.endswith("_reference"):
        for parameter in parameters(model, model.active_adapter):
            parameter.requires_grad_(False)


def mergeable_layers(model, args):
    """Where W + BA, computed once, serves for passes without gradients: in full precision, on whole plain layers.

    Rounded to bfloat16 it would lose what is small in BA. A weight that another layer has too can't be changed.
    """
    if not args.merge_adapters or args.shard or args.torch_compiler:
        return []
    if model.dtype != torch.float32 or args.mixed_precision != "no":
        return []
    if getattr(model.config, "quantization_config", None):
        return []
    parameters = [x for _, x in model.named_parameters(remove_duplicate=False)]
    owners = collections.Counter(map(id, parameters))
    for layer in lora_layers(model):
        plain_layer = isinstance(layer, MERGEABLE) and not layer.lora_variant  # DoRA is one
        if not plain_layer or owners[id(layer.get_base_layer().weight)] > 1:
            return []
    return called_layers(model)


@torch.no_grad()
def called_layers(model):
    """The layers with adapters that a pass calls: of one whose weight the model reads by itself no adapter has effect.

    Such is dt_proj of Mamba, Falcon-Mamba and Jamba.
    """
    called = set()
    layers = lora_layers(model)
    hooks = [layer.register_forward_hook(lambda layer, *_: called.add(layer)) for layer in layers]
    causal_lm.forward(model.get_base_model(), torch.ones(1, 2, dtype=torch.long, device=model.device))
    for hook in hooks:
        hook.remove()
    return [layer for layer in layers if layer in called]


def lora_layers(model):
    return [module for module in model.switches if isinstance(module, lora.LoraLayer)]


@contextlib.contextmanager
def merged(model, name):
    """Within it the adapter of that name is in the base's weights, of `mergeable_layers`: passes take less time.

    It serves passes without gradients, of this adapter alone. The layers that have adapters are in memory twice. Then
    the base has the tensors that it had.
    """
    layers = model.mergeable if name else []
    kept = []
    with active(model, name):
        try:
            for layer in layers:
                for parameter in layer.get_base_layer().parameters():
                    kept.append((parameter, parameter.data))
                    parameter.data = parameter.data.clone()
                layer.merge(adapter_names=[name])
            yield
        finally:
            for parameter, data in kept:
                parameter.data = data
            for layer in layers:
                layer.merged_adapters.clear()


def forward(model, name, **inputs):
    """The base's output, as causal_lm.forward gives it, under the adapter of that name (none: without any)."""
    with active(model, name):
        return causal_lm.forward(model.get_base_model(), **inputs)


def hidden_states(model, name, **inputs):
    """The base's last hidden states, [R, keep, D], under the adapter of that name."""
    base = model.get_base_model()
    with active(model, name):
        return sharding.call_inside(base, lambda: causal_lm.forward(base.base_model, **inputs).hidden_states)


def checkpoint_gradients(model):
    """Keep less of forward passes; what is computed again in the backward pass is under the adapter of the forward."""

    def contexts():
        name = model.active_adapter
        return contextlib.nullcontext(), active(model, name)

    options = {"use_reentrant": False, "context_fn": contexts}
    model.get_base_model().gradient_checkpointing_enable(options)


def shard_base(model):
    """Let each process keep its part of the base, in place. The adapters stay whole: they are small."""
    whole = [parameter for name, parameter in model.named_parameters() if is_of_adapter(name)]
    sharding.shard_model(model.get_base_model(), whole)


@contextlib.contextmanager
def training(model):
    """Within it LoRA's dropout and gradient checkpointing, which are for learning, are on; the base stays in eval mode.

    What is computed in it is to be differentiated in it.
    """
    modules = []
    for name, module in model.named_modules():
        if "lora_dropout" in name or isinstance(module, GradientCheckpointingLayer):
            modules.append(module)
    for module in modules:
        module.training = True
    try:
        yield
    finally:
        for module in modules:
            module.training = False


def adapter_state(model, name):
    """The adapter's tensors under the names that peft's files have."""
    return peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


def save_agents(folder, agents, checkpoint=False, with_optimizer=True, with_base=False):
    """Write a folder agent_<i> for each agent: adapters, value head, tokenizer, the base's name, the optimiser's state.

    A folder is whole or not there: it is written aside, then renamed. A checkpoint always has the optimiser's state,
    and never the base, which goes to the folder `base`. Where the base is sharded, all processes call it, to send their
    parts; the main one writes.
    """
    model = agents[0].model
    base = {"base": str(agents[0].base_name), "fingerprint": fingerprint(model)}
    if is_main():
        for i, agent in enumerate(agents):
            save_agent(Path(folder) / f"agent_{i}", i, agent, base, checkpoint or with_optimizer)
    if with_base and not checkpoint:
        save_base(Path(folder) / "base", model, agents[0].tokenizer)


def save_agent(final, i, agent, base, with_optimizer):
    """Write the folder of agent i aside, then rename it; `base` is what tells its base from others."""
    aside = final.with_name(final.name + ".writing")
    shutil.rmtree(aside, ignore_errors=True)
    for role in ROLES:
        if f"agent_{i}_{role}" in agent.model.peft_config:
            save_adapter(aside / role, agent.model, f"agent_{i}_{role}", agent.base_name)
    if hasattr(agent, "value_head"):
        save_tensors(agent.value_head.state_dict(), aside / HEAD)
    agent.tokenizer.save_pretrained(aside)
    (aside / BASE).write_text(json.dumps(base, indent=2))
    if with_optimizer:
        save_optimizer(aside, agent.optimizers[0], updates=agent.schedules[0].last_epoch)
    put(aside, final)


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
    base = model.get_base_model()
    state = sharding.whole_tensors(base.state_dict(keep_vars=True))
    if not is_main():
        return
    aside = final.with_name(final.name + ".writing")
    shutil.rmtree(aside, ignore_errors=True)
    weights = {plain(name): x for name, x in state.items() if not is_of_adapter(name)}
    base.save_pretrained(aside, state_dict=weights)
    tokenizer.save_pretrained(aside)
    put(aside, final)


def check_base(path, model, base_name, base_fingerprint=None):
    """Raise UserError unless the agent's folder is of this base, whose fingerprint may be given."""
    saved = read_json(path / BASE)
    there = saved.get("fingerprint") if isinstance(saved.get("fingerprint"), dict) else {}
    for name, here in (base_fingerprint or fingerprint(model)).items():
        if there.get(name) != here:
            reason = "the weights differ" if name == "sha256" else f"{name} {there.get(name)} there, {here} here"
            raise UserError(f"{path} is of the base {saved.get('base')}, not of {base_name}: {reason}")


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
        if hasattr(agent, "value_head"):
            load_head(path / HEAD, agent.value_head)
        load_optimizer(path, agent.optimizers[0])
