"""What several tests need: small models, metrics."""

import csv
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from utils.models.loading import locate

TINY = str(Path(locate("utils/tiny_lm")).resolve())


def build_model(tokenizer, **settings):
    """Another model, a fifth as wide as the embedded one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        **settings,
    )
    return LlamaForCausalLM(config)


def make_model(folder, tokenizer):
    """The folder of `build_model`, with another chat template."""
    build_model(tokenizer).save_pretrained(folder)
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.chat_template = "{% for message in messages %}Q: {{ message['content'] }} A: {% endfor %}"
    other.save_pretrained(folder)
    return str(folder)


def read_metrics(folder):
    """The rows of a run's metrics.csv, dicts of strings."""
    with open(Path(folder) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


# --- Teams of adapters on a base of some thousand parameters ----------------------------------------------------------


def tiny_base(seed=0, **config):
    """A random Llama."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | config))).eval()


def assert_metrics_are_alike(one, other):
    """The rows of two runs have the same numbers, times aside, to 2e-4."""
    for row, other_row in zip(read_metrics(one), read_metrics(other), strict=True):
        for name in row:
            if row[name] and not name.startswith("time/") and "per_second" not in name:
                expected = pytest.approx(float(row[name]), abs=2e-4, rel=2e-4, nan_ok=True)
                assert float(other_row[name]) == expected, name
