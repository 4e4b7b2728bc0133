"""Every causal language model is an agent, whole or as adapters on it: it computes what each transcript alone gives."""

import re

import pytest
import torch
from processes import ROOT
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from benchmark import architectures
from utils.cli import UserError
from utils.models import causal_lm
from utils.models.loading import from_pretrained

UNPADDED = {"minimax", "recurrent_gemma", "rwkv"}  # that take no padding on the left, or no cache
APART = {"glm4_moe", "deepseek_v3", "qwen3_next"}  # whose experts have adapters in one tensor, which are not merged
SHORT = "llama gemma2 gemma3_text gpt2 bloom opt mixtral qwen3_next mamba mamba2 recurrent_gemma rwkv".split()  # kinds


def cases():
    for name in architectures.ARCHITECTURES:
        yield pytest.param(name, marks=[] if name in SHORT else [pytest.mark.rest])


@pytest.mark.parametrize("kind", architectures.RANKS)
@pytest.mark.parametrize("name", cases())
def test_an_architecture(name, kind, tmp_path):
    result = architectures.check(name, tmp_path, kind)
    assert result["read"] < 1e-4 and result["sampled"] < 1e-4 and result["gradient"] < 1e-4
    assert result["change"] > 1e-5
    assert result["saved"] < 1e-5
    assert result["recomputes"] == (name in UNPADDED)
    assert result["merged"] == (kind == "adapters" and name not in APART)


def test_the_page_has_all_of_them():
    page = (ROOT / "docs/architectures.md").read_text()
    names = page.partition("as transformers writes them:")[2]
    assert re.findall(r"`(\w+)`", names) == [*architectures.ARCHITECTURES]


@pytest.mark.parametrize("asked", ["sdpa", "flash_attention_2"])
def test_a_model_without_the_attention_comes_with_its_own(asked, tmp_path, capsys):
    architectures.save_model("bloom", tmp_path)
    model = from_pretrained(AutoModelForCausalLM, tmp_path, attn_implementation=asked, dtype=torch.float32)
    assert model.config._attn_implementation == "eager"
    assert capsys.readouterr().out.count(f"has no {asked} attention: it is loaded with eager") == 1


def test_an_attention_that_is_not_installed_is_an_error_still(tmp_path):
    architectures.save_model("llama", tmp_path)
    with pytest.raises(ImportError, match="FlashAttention2"):
        from_pretrained(AutoModelForCausalLM, tmp_path, attn_implementation="flash_attention_2")


@torch.no_grad()
def test_logits_of_attention_are_capped_where_the_model_caps_them(capsys):
    """By a cap that is far below the logits, so that it shows."""
    model = architectures.make_model("gemma2").eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 1e3
        layer.self_attn.attn_logit_softcapping = 2.0
    ids = torch.arange(3, 11).view(1, 8)
    model.set_attn_implementation("eager")
    right = model(ids).logits
    model.set_attn_implementation("sdpa")
    assert (model(ids).logits - right).abs().max() > 0.01
    causal_lm.prepare(model, "gemma2")
    assert torch.equal(model(ids).logits, right)
    assert capsys.readouterr().out.count("gemma2 caps the logits of its attention, and sdpa does not") == 1


def test_flash_attention_has_the_mixed_precision_from_the_first_pass(monkeypatch):
    """FlashAttention is not installed here: in its place attention that refuses float32 as it does."""
    in_half = []  # whether passes are in mixed precision: transformers then casts what FlashAttention gets

    def attend(module, query, key, value, attention_mask, **kwargs):
        in_half.append(torch.is_autocast_enabled("cpu"))
        return causal_lm.attend(module, query, key, value, attention_mask, **kwargs)

    model = architectures.make_model("llama").eval()
    AttentionInterface.register("standin", attend)
    AttentionMaskInterface.register("standin", AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation("standin")
    monkeypatch.setattr(causal_lm, "FLASH", "standin")
    with pytest.raises(
        UserError, match="^llama: standin does not compute in float32: it takes --mixed-precision bf16 "
    ):
        causal_lm.prepare(model, "llama")
    causal_lm.prepare(model, "llama", "bf16")
    assert {*in_half} == {True} and not getattr(model, "recomputes", False)


@pytest.mark.parametrize("name", ["llama", "mamba2", "qwen3_next", "rwkv", "minimax"])
def test_padding_is_tried_in_half_precision_too(name, capsys):
    model = architectures.make_model(name).to(torch.bfloat16)
    causal_lm.check_padding(model, name)
    assert getattr(model, "recomputes", False) == (name in UNPADDED)
    assert (f"{name} takes no padding" in capsys.readouterr().out) == (name in UNPADDED)
