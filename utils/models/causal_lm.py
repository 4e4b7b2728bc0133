"""Causal language models of any architecture, called in one way: rows padded on both sides, a cache that drops rows.

A few architectures read padding on the left as text, or have no cache for rows of different lengths. `check_padding`
finds them by trying. Their rows are moved to the left, so that all padding is behind them, where a causal model can't
see it; and each new token is computed from its whole row. That is slower, with the same result.
"""

import contextlib
import functools
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from utils.cli import UserError, one_line
from utils.distributed import say


@dataclass
class Output:
    """What a model computes at the last `keep` positions of its rows, or at n places: n stands for [R, keep] then."""

    logits: torch.Tensor | None  # [R, keep, vocabulary]; None: the model has no output layer
    hidden_states: torch.Tensor | None = None  # [R, keep, D] of the last layer; None: they were not asked for
    cache: Any = None  # its reorder_cache(rows), or a Policy's select(keep), leaves rows in it; None: not asked for


@dataclass
class Tokens:
    """The cache of a model that keeps none: the tokens themselves, [R, S]."""

    ids: torch.Tensor

    def reorder_cache(self, rows):
        self.ids = self.ids[rows]


def forward(
    model, input_ids, attention_mask=None, cache=None, *, keep=None, use_cache=False, hidden=False, positions=True
):
    """The output of input_ids [R, S], with an attention_mask, 0 on padding, of them and of the tokens in the cache.

    Without a mask nothing is padding. `keep`: so many of the last positions are computed; None: all. `hidden`: hidden
    states too, which a model without an output layer always gives. `positions`: they are counted from a row's first
    token; without, from its padding.
    """
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if keep is None:
        keep = input_ids.shape[1]
    if getattr(model, "recomputes", False):
        return forward_unpadded(model, input_ids, attention_mask, cache, keep, hidden)
    if isinstance(cache, Step):
        return cache.run(input_ids, attention_mask, hidden)
    names = parameter_names(type(model))
    tokens, mask, copies = input_ids, attention_mask, None
    if cache is None and use_cache:
        tokens, mask, copies = read_once(input_ids, attention_mask)
    options = {"attention_mask": mask, "use_cache": use_cache}
    if positions and "position_ids" in names:
        options["position_ids"] = count_positions(mask)[:, -tokens.shape[1] :]
    cache_name = "cache_params" if "cache_params" in names else "past_key_values"
    if cache is not None:
        options[cache_name] = cache
        if cache_name == "cache_params":  # a state space has read its padding, and takes no mask any more
            options["attention_mask"] = None
    out = call(model, tokens, keep, hidden, options)
    logits, hidden_of_last, new_cache = out.get("logits"), hidden_states(out), out.get(cache_name)
    if copies is not None:
        logits, hidden_of_last = (None if x is None else x[copies] for x in (logits, hidden_of_last))
        new_cache.reorder_cache(copies)
    if cache is None and use_cache:
        static_cache = getattr(model, "static_cache", False)
        new_cache = Step(model, new_cache, attention_mask) if static_cache else give_room(new_cache)
    return Output(last(logits, keep), last(hidden_of_last, keep), new_cache)


def read_once(input_ids, attention_mask):
    """The rows that differ, [U, S], their mask, and the place in them of each row [R]; None: all rows differ.

    So several answers to a prompt are sampled from one reading of it.
    """
    rows, copies = torch.stack([input_ids, attention_mask], 1).unique(dim=0, return_inverse=True)
    return (input_ids, attention_mask, None) if len(rows) == len(input_ids) else (rows[:, 0], rows[:, 1], copies)


def read(model, ids, places):
    """The output of ids [b, S], padded on the right, at n places, where `places` [b, S] is True: logits [n, V] and
    hidden states [n, D].

    The output layer computes these places only. No mask is needed: padding is behind the tokens, where a causal model
    does not see it.
    """
    columns = places.any(0).nonzero().squeeze(1)
    if not len(columns):  # n is 0: one column is read, which a shard's other processes wait for
        columns = columns.new_zeros(1)
    width = int(columns[-1]) + 1
    ids, places = ids[:, :width], places[:, columns]
    head = model.get_output_embeddings() if hasattr(model, "lm_head") or model.base_model is not model else None
    inputs = []

    def select(_, arguments):
        """Let the output layer read [1, n, D]."""
        inputs.append(at(arguments[0], columns)[places])
        return inputs[0][None], *arguments[1:]

    hook = head.register_forward_pre_hook(select) if head is not None else None
    try:
        out = call(model, ids, columns, head is None, {"use_cache": False})
    finally:
        if hook is not None:
            hook.remove()
    if inputs:
        return Output(out["logits"][0], inputs[0], None)
    hidden = hidden_states(out)
    if hidden is None:  # the output layer is not called as a module
        hidden = hidden_states(call(model, ids, columns, True, {"use_cache": False}))
    logits = at(out.get("logits"), columns)
    return Output(None if logits is None else logits[places], at(hidden, columns)[places], None)


def at(x, columns):
    """x [b, S, *] at these columns; x itself where the model has left out the others."""
    return x if x is None or x.shape[1] == len(columns) else x[:, columns]


def autocast(model):
    """Within it forward passes run in the model's mixed precision, which `forward` sees to for a single pass."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=is_in_bfloat16(model))


def is_in_bfloat16(model):
    """Whether a model's passes are in bfloat16, by its mixed precision."""
    return getattr(model, "mixed_precision", "no") == "bf16"


@contextlib.contextmanager
def frozen_weights_cast(model):
    """Within it frozen weights of a model in mixed precision are in bfloat16; no pass has to cast them then.

    Weights that learn stay as they are: autocast casts these once, and frozen ones in each pass.
    """
    model.frozen_weights = []  # as they were: (module, weight)
    try:
        if is_in_bfloat16(model):
            dora = {module.get_base_layer() for module in model.modules() if getattr(module, "lora_variant", None)}
            for module in model.modules():
                if type(module) in (nn.Linear, Conv1D) and not module.weight.requires_grad and module not in dora:
                    model.frozen_weights.append((module, module.weight))
                    module.weight = nn.Parameter(module.weight.to(torch.bfloat16), requires_grad=False)
        yield
    finally:
        restore_frozen_weights(model)


def restore_frozen_weights(model):
    """Give a model the frozen weights back that it had before they were cast; passes cast them by themselves then."""
    for module, weight in getattr(model, "frozen_weights", ()):
        module.weight = weight
    model.frozen_weights = []


def forward_unpadded(model, input_ids, attention_mask, cache, keep, hidden):
    """As `forward`, for a model that reads padding as text."""
    ids = input_ids if cache is None else torch.cat([cache.ids, input_ids], 1)
    order = attention_mask.argsort(dim=1, descending=True, stable=True)  # the tokens, then the padding
    options = {"attention_mask": attention_mask.gather(1, order), "use_cache": False}
    out = call(model, ids.gather(1, order), ids.shape[1], hidden, options)
    positions = count_positions(attention_mask)[:, -keep:, None]
    outputs = []
    for x in (out.get("logits"), hidden_states(out)):
        outputs.append(None if x is None else x.gather(1, positions.expand(-1, -1, x.shape[-1])))
    return Output(*outputs, cache=Tokens(ids))


def call(model, input_ids, keep, hidden, options):
    """What transformers' model returns."""
    if "logits_to_keep" in parameter_names(type(model)):
        options["logits_to_keep"] = keep  # the last columns, or a tensor of columns
    if hidden:
        options["output_hidden_states"] = True
    with autocast(model):
        return model(input_ids=input_ids, **options)


@functools.cache
def parameter_names(model_class):
    return set(inspect.signature(model_class.forward).parameters)


def count_positions(attention_mask):
    """Position ids that begin with 0 at a row's first token, left of which is padding."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


def hidden_states(out):
    """Those of the last layer, where a model's output has them, or None."""
    if out.get("last_hidden_state") is not None:
        return out["last_hidden_state"]
    return out["hidden_states"][-1] if out.get("hidden_states") else None


def last(x, keep):
    return None if x is None else x[:, -keep:]


# --- Gradient checkpointing -------------------------------------------------------------------------------------------


def checkpoint_gradients(model, **options):
    """Keep less of forward passes, and compute it again in the backward pass, where layers are in training mode.

    That is what transformers asks. Within its call a layer is in eval mode, for some have dropout of their own.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(f"--gradient-checkpointing: {type(model).__name__} does not support it")
    model.gradient_checkpointing_enable({"use_reentrant": False, **options})
    for module in model.modules():
        if is_checkpointed(module):
            module.register_forward_pre_hook(begin_eval)
            module.register_forward_hook(end_eval, always_call=True)  # also where computing again stops early


def is_checkpointed(module):
    return isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing


def begin_eval(module, inputs):
    module.was_training = module.training
    module.training = False


def end_eval(module, inputs, output):
    module.training = module.was_training


# --- Attention --------------------------------------------------------------------------------------------------------


def attend(module, query, key, value, attention_mask, **kwargs):
    """transformers' attention by SDPA, where that is fast.

    On a CPU it is in float32, whatever autocast says, for torch's kernel takes longer in bfloat16 there; the output has
    the data type of the query. On a GPU the step of a token does not copy keys and values that several heads share.
    """
    if query.device.type == "cpu":
        tensors = [in_float32(x) for x in (query, key, value, attention_mask)]
        kwargs = {name: in_float32(x) for name, x in kwargs.items()}
        with torch.autocast("cpu", enabled=False):
            output, weights = sdpa_attention_forward(module, *tensors, **kwargs)
        return output.to(query.dtype), weights
    is_step = query.shape[2] == 1 and attention_mask is not None and attention_mask.shape[1] == 1
    if is_step and query.shape[1] > key.shape[1] and kwargs.get("position_bias") is None:
        return attend_in_groups(query, key, value, attention_mask, kwargs.get("scaling")), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def attend_in_groups(query, key, value, attention_mask, scaling):
    """The attention of one token, [R, 1, heads, D], whose query is [R, heads, 1, D] and whose keys have fewer heads.

    Heads that share their keys become several tokens of one head, under the same mask.
    """
    groups = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    output = scaled_dot_product_attention(groups, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(len(query), 1, query.shape[1], -1)


def in_float32(x):
    """A tensor of floats in float32; anything else, such as a mask, as it is."""
    return x.float() if torch.is_tensor(x) and x.is_floating_point() else x


def register_attention():
    """Let all models of transformers that are asked for SDPA take `attend`."""
    AttentionInterface.register("sdpa", attend)


# --- A cache with room ------------------------------------------------------------------------------------------------

ROOM = 64  # tokens


class RoomyLayer(DynamicLayer):
    """A layer of a cache with room behind its tokens: a new one is written there, and the others are not copied.

    It serves sampling, without gradients: what it returned before stays as it is, for only the room is written to.
    """

    def __init__(self, keys, values):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.buffers = (keys, values)  # [R, heads, S + room, head width]
        self.keys = keys  # [R, heads, S, head width], the first S of the buffer
        self.values = values

    def update(self, key_states, value_states, *args, **kwargs):
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self.buffers[0].shape[-2]:
            self.buffers = tuple(pad(x[..., :start, :], (0, 0, 0, end + ROOM - start)) for x in self.buffers)
        keys, values = self.buffers
        keys[..., start:end, :] = key_states
        values[..., start:end, :] = value_states
        self.keys = keys[..., :end, :]
        self.values = values[..., :end, :]
        return self.keys, self.values

    def reorder_cache(self, rows):
        S = self.keys.shape[-2]
        keys, values = self.buffers
        self.buffers = (keys[rows], values[rows])
        self.keys = self.buffers[0][..., :S, :]
        self.values = self.buffers[1][..., :S, :]


def give_room(cache):
    """A cache with its plain layers replaced; other layers stay as they are."""
    layers = getattr(cache, "layers", [])
    for k, layer in enumerate(layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            layers[k] = RoomyLayer(layer.keys, layer.values)
    return cache


# --- A cache of fixed size (--static-cache) ---------------------------------------------------------------------------

FIXED_ROOM = 256  # tokens


class FixedLayer(StaticLayer):
    """A layer of a cache of so many columns: it begins with a copy of `keys` and `values`, and has room behind them.

    How many tokens it has is a tensor too, so that a captured step finds its place by itself. In mixed precision, which
    casts keys and values for attention, they are cast once.
    """

    def __init__(self, keys, values, columns, dtype):
        super().__init__(columns)
        self.lazy_initialization(keys.to(dtype), values)
        self.update(keys, values)

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.to(self.dtype), value_states.to(self.dtype), *args, **kwargs)


class Step:
    """The step of one token, whose tensors stay where they are: on a GPU it is captured (a CUDA graph), and replayed.

    `forward` gets it as a cache, and calls `run`. Rows that reorder_cache drops are computed on, and not returned. The
    first step is run as it is, which loads the kernels; the second is captured. Where the room is used up, the layers
    grow, and it is captured anew.
    """

    def __init__(self, model, cache, attention_mask):
        layers = getattr(cache, "layers", [])
        kinds = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
        if kinds or not layers:
            raise UserError(f"its cache has layers of other kinds: {', '.join(sorted(kinds)) or 'none'}")
        self.model = model
        self.cache = cache
        self.rows = torch.arange(len(attention_mask), device=attention_mask.device)  # those that go on
        self.input_ids = attention_mask.new_zeros(len(attention_mask), 1)
        self.attention_mask = attention_mask
        self.grow()

    def reorder_cache(self, rows):
        self.rows = self.rows[rows]

    def grow(self):
        S = self.attention_mask.shape[1]
        columns = (S + FIXED_ROOM + 7) // 8 * 8  # as attention's kernels want them
        half = is_in_bfloat16(self.model)
        for k, layer in enumerate(self.cache.layers):
            dtype = torch.bfloat16 if half else layer.values.dtype
            self.cache.layers[k] = FixedLayer(layer.keys, layer.values, columns, dtype)
        self.attention_mask = pad(self.attention_mask, (0, columns - S))
        self.graph = None
        self.output = None

    def run(self, input_ids, attention_mask, hidden):
        """The output of the rows that go on: input_ids [R, 1], and the attention_mask [R, S] of all their tokens."""
        S = attention_mask.shape[1]
        if S > self.attention_mask.shape[1]:
            self.grow()
        self.input_ids[self.rows] = input_ids
        self.attention_mask[self.rows, :S] = attention_mask

        def compute():  # with the layers, from transformers' own cache
            options = {"keep": 1, "use_cache": True, "hidden": hidden}
            return forward(self.model, self.input_ids, self.attention_mask, self.cache, **options)

        if self.graph is None and self.output is not None and input_ids.device.type == "cuda":
            self.weights = [*self.model.parameters()]  # which it reads: a save may put others in their place
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.output = compute()
            self.graph = graph
        if self.graph is not None:
            self.graph.replay()
        else:
            self.output = compute()
        outputs = (self.output.logits, self.output.hidden_states)
        return Output(*(None if x is None else x[self.rows] for x in outputs), cache=self)


# --- Which models take padding ----------------------------------------------------------------------------------------

PROMPTS = (2, 5, 9)  # lengths that are tried, in tokens
STEPS = 4  # tokens after a prompt
LARGEST_ERROR = 1e-3  # on average, in standard deviations of what is right
LARGEST_ERROR_IN_HALF_PRECISION = 0.05


LARGE = 10_000_000  # parameters, above which passes in bfloat16 are faster on a CPU that has it


def prepare(model, name, mixed_precision="no", static_cache=False):
    """Make a model ready for `forward`: its attention, what it can't do with padding, and its mixed precision.

    `static_cache`: it samples with a cache of fixed size. Raises UserError where it can't.
    """
    register_attention()
    if mixed_precision == "auto":
        mixed_precision = "bf16" if is_faster_in_bfloat16(model) else "no"
    check_attention(model, name, mixed_precision)
    check_padding(model, name)
    model.mixed_precision = mixed_precision
    model.base_model.mixed_precision = mixed_precision
    model.static_cache = static_cache
    if static_cache:
        check_static_cache(model, name)


FLASH = "flash_attention_2"


def check_attention(model, name, mixed_precision):
    """Let a model that caps the logits of its attention, as Gemma 2, have them capped: SDPA has no such thing.

    Raises UserError where FlashAttention would have to compute in float32.
    """
    attention = model.config._attn_implementation
    if attention == "sdpa" and getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
        say(f"{name} caps the logits of its attention, and sdpa does not: it is computed with eager")
    if attention == FLASH:
        if model.dtype == torch.float32 and mixed_precision == "no":
            takes = "--mixed-precision bf16 or --dtype bfloat16"
            raise UserError(f"{name}: {FLASH} does not compute in float32: it takes {takes}")
        model.mixed_precision = mixed_precision  # while padding is tried too


def is_faster_in_bfloat16(model):
    """Whether autocast to bfloat16 saves time: a large model of float32 on a device with products of that type."""
    if model.dtype != torch.float32 or sum(x.numel() for x in model.parameters()) < LARGE:
        return False
    if model.device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


@torch.no_grad()
def check_padding(model, name):
    """Set model.recomputes, and say so, where the model reads padding as text or its cache does not serve such rows."""
    rows = padded_rows(model)
    if rows is None:
        return  # no room to try
    try:
        error = padding_error(model, *rows)
    except Exception:  # of whatever it is that the model does not do
        error = math.inf
    if not error <= largest_error(model):
        model.recomputes = True
        model.base_model.recomputes = True
        say(f"{name} takes no padding: each new token is computed from its whole row, which is slower")


@torch.no_grad()
def check_static_cache(model, name):
    """Raise UserError where steps with a cache of fixed size can't be captured, or compute something else."""
    subject = f"--static-cache: {name} can't be sampled from so"
    if getattr(model, "recomputes", False):
        raise UserError(f"{subject}: it takes no padding")
    if not model._can_compile_fullgraph:  # GPT-Neo and MPT among them, which read columns that are not written yet
        raise UserError(f"{subject}: transformers has no such cache for it")
    rows = padded_rows(model)
    if rows is None:
        return
    try:
        error = padding_error(model, *rows)
    except Exception as failure:  # of whatever it is that can't be captured; then the end of the capture fails too
        raise UserError(f"{subject}: {one_line(failure.__context__ or failure)}") from failure
    if not error <= largest_error(model):
        raise UserError(f"{subject}: its outputs are off by {error:.2g} standard deviations")


def padded_rows(model):
    """Rows to try: ids and mask [3, S], and the outputs of each row alone at its last STEPS; None: there is no room."""
    config = model.config.get_text_config()
    longest = max(PROMPTS)
    if (getattr(config, "max_position_embeddings", None) or math.inf) < longest + STEPS:
        return None
    ids = torch.arange(3 * (longest + STEPS), device=model.device).view(3, -1)
    ids = ids * 7 % config.vocab_size
    mask = torch.ones_like(ids)
    alone = []
    for row, length in enumerate(PROMPTS):
        mask[row, : longest - length] = 0
        tokens = ids[row : row + 1, longest - length :]
        alone.append(values(forward(model, tokens, torch.ones_like(tokens), keep=STEPS)))
    return ids, mask, torch.cat(alone)


def largest_error(model):
    """How far outputs may be off, in standard deviations."""
    half = model.dtype != torch.float32 or is_in_bfloat16(model)
    return LARGEST_ERROR_IN_HALF_PRECISION if half else LARGEST_ERROR


def padding_error(model, ids, mask, alone):
    """How far outputs are at most from those of each row alone, [3, STEPS, *]: in one pass, in steps with a cache."""
    errors = [mean_error(values(forward(model, ids, mask, keep=STEPS)), alone)]
    rows = torch.arange(3, device=ids.device)
    cache = None
    start = 0
    for t in range(STEPS):
        end = ids.shape[1] - STEPS + 1 + t
        out = forward(model, ids[rows, start:end], mask[rows, :end], cache, keep=1, use_cache=True)
        if out.logits is None:  # no tokens are sampled from such a model
            break
        errors.append(mean_error(out.logits[:, 0], alone[rows, t]))
        cache = out.cache
        start = end
        if t == 1:
            rows = rows[[0, 2]]
            cache.reorder_cache(rows)
    return max(errors)


def values(output):
    return output.hidden_states if output.logits is None else output.logits


def mean_error(x, right):
    """The mean distance of x from what is right, in its standard deviations; both are -inf at the same places."""
    is_number = right != -math.inf
    if not torch.equal(x != -math.inf, is_number):
        return math.inf
    return float((x - right)[is_number].float().abs().mean() / right[is_number].float().std())
