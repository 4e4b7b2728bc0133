"""Attention on a CPU: in float32, whatever a model computes in."""

import math
import subprocess
import sys

import pytest
import torch
from processes import ROOT
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from utils.models import causal_lm

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


def test_without_autocast_float32_is_as_transformers_has_it():
    inputs = make_inputs(torch.float32)
    assert torch.equal(causal_lm.attend(nn.Module(), *inputs)[0], sdpa_attention_forward(nn.Module(), *inputs)[0])


@pytest.mark.parametrize("bias_type", [torch.float32, torch.bfloat16])
def test_a_mask_of_floats_is_added(bias_type):
    query, key, value, mask = make_inputs(torch.bfloat16)
    bias = torch.zeros(1, 1, 7, 7, dtype=bias_type).masked_fill(~mask, -math.inf)
    assert torch.equal(
        causal_lm.attend(nn.Module(), query, key, value, bias)[0],
        causal_lm.attend(nn.Module(), query, key, value, mask)[0],
    )


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


IMPORTED = """
import ippo_llm, iac_llm, maac_llm, magrpo_llm, ppo_llm
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from utils.models import causal_lm
print(ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward)
model = AutoModelForCausalLM.from_pretrained("utils/tiny_lm")
causal_lm.prepare(model, "the model")
print(ALL_ATTENTION_FUNCTIONS["sdpa"] is causal_lm.attend)
"""


def test_it_is_registered_when_a_model_is_prepared_and_not_by_an_import():
    process = subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True)
    assert process.stdout.splitlines() == ["True", "True"], process.stderr


# --- On a GPU ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "tokens, mask_heads, in_groups", [(1, 1, True), (1, 6, False), (2, 1, False), (1, None, False)]
)
def test_other_attention_is_as_transformers_has_it(tokens, mask_heads, in_groups, monkeypatch):
    seen = []
    monkeypatch.setattr(causal_lm, "attend_in_groups", lambda *_: seen.append("groups"))
    monkeypatch.setattr(causal_lm, "sdpa_attention_forward", lambda *_, **options: seen.append("transformers"))
    query = torch.zeros(2, 6, tokens, 8, device="meta")
    key = torch.zeros(2, 2, 7, 8, device="meta")
    mask = mask_heads and torch.zeros(2, mask_heads, tokens, 7, device="meta")
    causal_lm.attend(nn.Module(), query, key, key, mask, scaling=0.5)
    assert seen == ["groups" if in_groups else "transformers"]
