"""What several tests need: small models, curves, metrics."""

import csv
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import ippo_llm
from utils.models.loading import locate

TINY = str(Path(locate("utils/tiny_lm")).resolve())


def make_args(tmp_path=None, script=ippo_llm, **flags):
    """Args of a run of ippo_llm or iac_llm that takes seconds."""
    small = {
        "rollout_buffer_size": 8,
        "mini_batch_size": 4,
        "train_size": 40,
        "num_train_epochs": 1,
        "eval_size": 4,
        "eval_interval": 3,
        "max_new_tokens": 24,
        "output_dir": str(tmp_path / "run") if tmp_path else None,
    }
    return script.Args(**(small | flags))


def make_agent(args, model, tokenizer, critic="head", seed=0, script=ippo_llm):
    """An agent of ippo_llm or iac_llm whose values are not 0; `critic` is head or separate."""
    model.mixed_precision = model.base_model.mixed_precision = args.mixed_precision
    args = replace(args, use_separate_critic=critic == "separate")
    return randomise_value_head(script.Agent(0, model, tokenizer, 10, args), seed)


def randomise_value_head(agent, seed=0):
    """A new value head gives 0 everywhere; this one does not."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in agent.value_head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return agent


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


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
