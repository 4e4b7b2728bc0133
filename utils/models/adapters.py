"""LoRA adapters of many agents on one frozen base; read from safetensors and JSON only.

An adapter is a name in a peft.PeftModel that agents share: agent_<i>_actor, agent_<i>_critic, agent_<i>_reference. The
base's weights are neither changed nor written. `active` switches, and merges where that is faster.
"""

import collections
import contextlib
import copy
import shutil

import peft
import torch
from peft.tuners import lora
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from utils.cli import UserError, one_line
from utils.distributed import is_main
from utils.files import put, read_json
from utils.models import causal_lm, sharding
from utils.models.lora import rank_of, read_config, scaling_of, targeted
from utils.models.tensors import BASE, check_shapes, fingerprint, is_of_adapter, plain, read_tensors, save_tensors

WEIGHTS = "adapter_model.safetensors"
MERGEABLE = (lora.Linear, lora.Embedding)  # layers of peft that merge to the sum of what they add
MAGNITUDE = ".lora_magnitude_vector"  # how a tensor's name ends that DoRA has beside A and B
FIRST = "first"  # an adapter that a new PeftModel has until another one is added


def wrap(base, config, args=None):
    """A PeftModel of `base`, frozen, to which adapters of this configuration may be added. Raises UserError.

    `args`: a script's flags, where it is to be called.
    """
    base.requires_grad_(False)
    mode = base.training
    try:
        with torch.random.fork_rng(devices=[]):
            model = peft.get_peft_model(base, copy.deepcopy(config), adapter_name=FIRST)
    except ValueError as error:
        raise UserError(f"peft refuses the adapters: {one_line(error)}") from error
    model.lora_config = config
    model.args = args
    model.frozen = set()  # names of adapters that do not learn
    model.mergeable = None  # layers, found when an adapter is first merged
    model.merged = None  # the name of the adapter that is in the base's weights
    model.merged_version = None  # of the adapter's weights, as they were
    model.kept = []  # the base's own: (layer, name, parameter)
    model.was_training = False
    if args is not None and args.gradient_checkpointing:
        checkpoint_gradients(model)
    return model.train(mode)


def add(model, name, learns=True):
    """Add an adapter that changes nothing yet (B = 0; A is drawn from torch's global generator, if it learns)."""
    unmerge(model)
    mode = model.training
    with contextlib.nullcontext() if learns else torch.random.fork_rng(devices=[]):
        model.add_adapter(name, copy.deepcopy(model.lora_config))
    if not learns:
        model.frozen.add(name)
    if FIRST in model.peft_config:
        model.set_adapter(name)
        model.delete_adapter(FIRST)
    switches = (lora.LoraLayer, AuxiliaryTrainingWrapper)
    model.switches = [module for module in model.modules() if isinstance(module, switches)]
    model.learning = []
    model.by_adapter = {each: parameters(model, each) for each in model.peft_config}
    for each, own in model.by_adapter.items():
        for parameter in own:
            parameter.requires_grad_(each not in model.frozen)
            model.learning += [] if each in model.frozen else [parameter]
    model.mergeable = None
    model.train(mode)  # new layers come in training mode


def parameters(model, name):
    """The parameters of the adapter of that name, in the model's order."""
    return [parameter for key, parameter in model.named_parameters() if f".{name}." in key]


@torch.no_grad()
def copy_adapter(model, source, target):
    """Give adapter `target` the weights of adapter `source`."""
    unmerge(model)
    for old, new in zip(parameters(model, target), parameters(model, source), strict=True):
        old.copy_(new)


@contextlib.contextmanager
def active(model, name):
    """Within it the base has the adapter of that name (an empty name: none).

    In passes without gradients it is merged, where that is possible. peft's set_adapter walks through the whole model,
    and lets only the adapter that is on learn. Here all learn that did before, so that losses of several adapters can
    be added up and differentiated together.
    """
    has_gradient = torch.is_grad_enabled()
    set_training(model, has_gradient)
    if has_gradient or model.merged != name or model.merged_version != version(model, name):
        unmerge(model)
    if not name:
        with model.disable_adapter():
            yield
        let_learn(model)
        return
    switch(model, name)
    if not has_gradient and model.merged is None:
        merge(model, name)
    yield


def switch(model, name):
    """Let the adapter of that name be on."""
    if model.active_adapter != name:
        for module in model.switches:
            has_it = isinstance(module, lora.LoraLayer) or name in module._adapters
            module.set_adapter([name] if has_it else [])
        model.active_adapter = model.base_model.active_adapter = name
        let_learn(model)


def let_learn(model):
    """Let the parameters learn that did when the adapters were added, and no others."""
    for parameter in model.learning:
        parameter.requires_grad_(True)
    if model.active_adapter in model.frozen:
        for parameter in model.by_adapter[model.active_adapter]:
            parameter.requires_grad_(False)


def set_training(model, mode):
    """Let LoRA's dropout and gradient checkpointing, which are for learning, be on or off; all else is in eval mode."""
    if getattr(model, "was_training", False) == mode:
        return
    model.was_training = mode
    for name, module in model.named_modules():
        if "lora_dropout" in name or causal_lm.is_checkpointed(module):
            module.training = mode


@torch.no_grad()
def merge(model, name):
    """Put an adapter into the base's weights, where it can be: passes without gradients then take less time.

    The layers that have adapters are in memory twice.
    """
    if model.mergeable is None:
        model.mergeable = []  # while it is found out, nothing is merged
        model.mergeable = mergeable_layers(model, model.args)
        switch(model, name)
    model.merged = name  # from here on there is something to be undone, also where memory runs out
    model.merged_version = None
    for layer in model.mergeable:
        base_layer = layer.get_base_layer()
        for key, parameter in [*base_layer.named_parameters(recurse=False)]:
            model.kept.append((base_layer, key, parameter))  # itself unchanged: a backward pass may need it yet
            setattr(base_layer, key, nn.Parameter(parameter.clone(), requires_grad=False))
        layer.merge(adapter_names=[name])
    model.merged_version = version(model, name)


def version(model, name):
    """A number that changes whenever the weights of an adapter do."""
    return sum(parameter._version for parameter in model.by_adapter[name])


def unmerge(model):
    """Give the base the parameters back that it had."""
    if model.merged is None:
        return
    for base_layer, key, parameter in model.kept:
        setattr(base_layer, key, parameter)
    for layer in model.mergeable:
        layer.merged_adapters.clear()
    model.kept = []
    model.merged = None


def mergeable_layers(model, args):
    """Where W + BA, computed once, serves for passes without gradients: in full precision, on whole plain layers.

    Rounded to bfloat16 it would lose what is small in BA. A weight that another layer has too can't be changed.
    """
    if not args.merge_adapters or args.shard or args.torch_compiler:
        return []
    if model.dtype != torch.float32 or causal_lm.is_in_bfloat16(model):
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


def checkpoint_gradients(model):
    """Keep less of forward passes; what is computed again in the backward pass is under the adapter of the forward."""

    def contexts():
        name = model.active_adapter
        return contextlib.nullcontext(), active(model, name)

    causal_lm.checkpoint_gradients(model.get_base_model(), context_fn=contexts)


def shard_base(model):
    """Let each process keep its part of the base, in place. The adapters stay whole: they are small."""
    whole = [parameter for name, parameter in model.named_parameters() if is_of_adapter(name)]
    sharding.shard_model(model.get_base_model(), whole)


def adapter_state(model, name):
    """The adapter's tensors under the names that peft's files have."""
    return peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


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
    unmerge(model)
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
