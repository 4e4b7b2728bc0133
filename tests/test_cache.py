"""Caches, with room and of fixed size (--static-cache), give what transformers' own give; and so does attention."""

import math

import pytest
import torch
from torch import nn

import ippo_llm
from benchmark import architectures
from utils import models
from utils.cli import UserError, check_needs
from utils.models import causal_lm

STEPS = causal_lm.ROOM + 6


@torch.no_grad()
def write_on(model, steps=STEPS):
    """The logits of each step of greedy sampling, with rows dropped on the way, and where layer 0 had its keys."""
    input_ids = torch.arange(3, 23).view(4, 5)
    mask = torch.ones_like(input_ids)
    mask[1, :2] = 0
    cache = None
    logits = []
    places = []
    for t in range(steps):
        out = causal_lm.forward(model, input_ids, mask, cache, keep=1, use_cache=True)
        cache = out.cache
        logits.append(out.logits)
        places.append(getattr(cache, "cache", cache).layers[0].keys.data_ptr())
        rows = torch.arange(len(mask))
        if t in (3, 40):
            rows = rows[1:]
            cache.reorder_cache(rows)
        input_ids = out.logits[rows, -1:].argmax(-1)
        mask = torch.nn.functional.pad(mask[rows], (0, 1), value=1)
    return logits, places


def test_it_is_that_of_transformers_to_the_bit(model, monkeypatch):
    ours, _ = write_on(model)
    monkeypatch.setattr(causal_lm, "give_room", lambda cache: cache)
    theirs, _ = write_on(model)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_it_is_copied_where_rows_are_dropped_or_room_is_used_up(model):
    _, places = write_on(model)
    moves = [t for t in range(1, STEPS) if places[t] != places[t - 1]]
    assert moves == [1, 4, 41, causal_lm.ROOM + 2]  # room comes with the first new token, for ROOM more


def test_what_a_cache_gave_before_stays():
    layer = causal_lm.RoomyLayer(*torch.ones(2, 1, 1, 3, 2))
    keys, values = layer.update(*torch.ones(2, 1, 1, 1, 2))
    layer.update(*torch.zeros(2, 1, 1, 1, 2))
    assert keys.shape == values.shape == (1, 1, 4, 2)
    assert keys.min() == values.min() == 1


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2", "qwen3_next", "static"])
def test_rows_that_are_alike_are_read_once_and_go_on_apart(model, kind, monkeypatch):
    if kind == "static":
        monkeypatch.setattr(model, "static_cache", True, raising=False)
    elif kind != "llama":
        model = architectures.make_model(kind)
        causal_lm.prepare(model, kind)
    prompts = torch.arange(3, 18).view(3, 5)
    rows = torch.tensor([0, 0, 1, 0, 2, 1])
    next_ids = torch.arange(20, 26).view(6, 1)
    read = []
    model.get_input_embeddings().register_forward_hook(lambda _, given, __: read.append(given[0].shape))
    masks = [torch.ones(6, length, dtype=torch.long) for length in (5, 6, 7)]
    for mask in masks:
        mask[rows == 1, :2] = 0

    def forward(ids, mask, cache=None):
        return causal_lm.forward(model, ids, mask, cache, keep=1, use_cache=True)

    with torch.no_grad():
        first = forward(prompts[rows], masks[0])
        then = forward(next_ids, masks[1], first.cache)
        kept = torch.tensor([1, 2, 3, 5])
        then.cache.reorder_cache(kept)
        last = forward(next_ids[kept] + 1, masks[2][kept], then.cache)
        assert (3, 5) in read and (6, 5) not in read
        for row in range(6):
            alone = forward(prompts[rows[[row]]], masks[0][[row]])
            torch.testing.assert_close(first.logits[[row]], alone.logits, atol=1e-5, rtol=1e-5)
            alone = forward(next_ids[[row]], masks[1][[row]], alone.cache)
            torch.testing.assert_close(then.logits[[row]], alone.logits, atol=1e-5, rtol=1e-5)
            if row in kept:
                alone = forward(next_ids[[row]] + 1, masks[2][[row]], alone.cache).logits[0]
                torch.testing.assert_close(last.logits[kept.tolist().index(row)], alone, atol=1e-5, rtol=1e-5)


# --- Of fixed size (--static-cache) -----------------------------------------------------------------------------------


def test_one_of_fixed_size_gives_the_same_and_grows(model, monkeypatch):
    ours, _ = write_on(model)
    monkeypatch.setattr(causal_lm, "FIXED_ROOM", 30)
    monkeypatch.setattr(model, "static_cache", True, raising=False)
    fixed, places = write_on(model)
    torch.testing.assert_close(fixed, ours, atol=1e-4, rtol=1e-4)
    moves = [t for t in range(1, STEPS) if places[t] != places[t - 1]]
    assert moves == [36, 68]  # there is room for 40 columns (5 + 30, rounded up to 8s), then for 72


def test_a_script_samples_the_same(model, tokenizer, monkeypatch):
    sizes = []
    run_step = causal_lm.Step.run

    def watched(step, *given, **options):
        sizes.append(len(step.rows))
        return run_step(step, *given, **options)

    monkeypatch.setattr(causal_lm.Step, "run", watched)
    answers = []
    for flag in (False, True):
        args = ippo_llm.Args(num_agents=1, static_cache=flag, max_new_tokens=30, lora_rank=4)
        (initial,) = models.load(args, model, tokenizer)
        agent = ippo_llm.Agent(0, initial, 1, args)
        agent.end_ids = torch.arange(0, 768, 9)  # so that rows end at different times
        contexts = [[5] * n for n in (3, 9, 4, 6)]
        answers.append(ippo_llm.generate(agent, contexts, args, torch.Generator().manual_seed(1)))
        assert bool(sizes) == flag
    assert answers[0] == answers[1]
    assert len(set(sizes)) > 1  # of rows that go on


def test_in_mixed_precision_keys_and_values_are_cast_once(model):
    causal_lm.prepare(model, "the model", "bf16", static_cache=True)
    step = causal_lm.forward(model, torch.ones(1, 3, dtype=torch.long), use_cache=True).cache
    logits, _ = write_on(model, steps=5)
    model.static_cache = False
    plain, _ = write_on(model, steps=5)
    assert all(causal_lm.mean_error(*pair) < 0.02 for pair in zip(logits, plain, strict=True))
    assert {layer.keys.dtype for layer in step.cache.layers} == {torch.bfloat16}


@pytest.mark.parametrize(
    "name, reason",
    [
        ("mistral", "its cache has layers of other kinds: DynamicSlidingWindowLayer"),
        ("mamba", "transformers has no such cache for it"),
        ("rwkv", "it takes no padding"),
    ],
)
def test_a_model_without_such_a_cache_is_refused(name, reason):
    with pytest.raises(UserError, match=f"^--static-cache: {name} can't be sampled from so: {reason}$"):
        causal_lm.prepare(architectures.make_model(name), name, static_cache=True)


def test_steps_that_compute_something_else_are_refused(model, monkeypatch):
    monkeypatch.setattr(causal_lm.FixedLayer, "get_seq_length", lambda layer: 0)  # the tokens before are not seen
    with pytest.raises(UserError, match="so: its outputs are off by"):
        causal_lm.prepare(model, "the model", static_cache=True)


@pytest.mark.parametrize("flag", ["use_vllm", "shard", "torch_compiler"])
def test_it_has_no_effect_beside(flag):
    value = "default" if flag == "torch_compiler" else True
    name = flag.replace("_", "-")
    with pytest.raises(UserError, match=f"--static-cache has no effect with --{name}|--{name} .*--static-cache"):
        check_needs(ippo_llm.Args(static_cache=True, **{flag: value}))


# --- Attention: on a CPU in float32; on a GPU without copies of keys that heads share ---------------------------------

SHAPE = (2, 3, 7, 8)  # rows, heads, tokens, head width


def make_inputs(dtype):
    """Query, key, value, and a mask that lets each token see those before it."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(3)]
    return [*tensors, torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()]


def attend_in_loops(query, key, value):
    """Attention in float64, a token at a time: [rows, tokens, heads, head width]."""
    output = torch.zeros(SHAPE, dtype=torch.float64)
    for row in range(2):
        for head in range(3):
            for t in range(7):
                scores = key[row, head, : t + 1].double() @ query[row, head, t].double() / math.sqrt(8)
                output[row, head, t] = scores.softmax(0) @ value[row, head, : t + 1].double()
    return output.transpose(1, 2)


@pytest.mark.parametrize("autocast", [True, False])
def test_it_is_that_of_float64_but_for_rounding_once(autocast):
    inputs = make_inputs(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, _ = causal_lm.attend(nn.Module(), *inputs)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, attend_in_loops(*inputs[:3]).to(torch.bfloat16))


def test_autocast_does_not_round_what_comes_in_float32():
    inputs = make_inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = causal_lm.attend(nn.Module(), *inputs)
    torch.testing.assert_close(output.double(), attend_in_loops(*inputs[:3]), atol=1e-6, rtol=0)


def test_a_model_attends_in_float32_and_multiplies_in_bfloat16(model, monkeypatch):
    attend = torch.nn.functional.scaled_dot_product_attention
    types = []
    causal_lm.prepare(model, "the model", mixed_precision="bf16")

    def watched(query, key, value, *args, **kwargs):
        types.append((query.dtype, key.dtype, value.dtype, torch.is_autocast_enabled("cpu")))
        return attend(query, key, value, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    out = causal_lm.forward(model, torch.arange(12).view(2, 6))
    assert out.logits.dtype == torch.bfloat16
    assert set(types) == {(torch.float32, torch.float32, torch.float32, False)}


def test_the_step_of_a_token_shares_keys_among_heads():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 1, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 7, 8, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[1, ..., :3] = False
    output = causal_lm.attend_in_groups(query, key, value, mask, scaling=0.5)
    for row in range(2):
        for head in range(6):
            seen = mask[row, 0, 0]
            scores = 0.5 * key[row, head // 3, seen] @ query[row, head, 0]
            torch.testing.assert_close(output[row, 0, head], scores.softmax(0) @ value[row, head // 3, seen])
