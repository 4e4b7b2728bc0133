"""What several tests need: short runs, agents with values, and a rollout on its way from sampling to learning."""

import csv
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import ippo_llm
import ppo_llm
from utils.models import locate
from utils.tasks import tldr

TINY = locate("utils/tiny_lm")


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


def make_ppo_args(tmp_path=None, **flags):
    """Args of a run of ppo_llm that takes seconds, not yet resolved."""
    small = {
        "rollout_buffer_size": 8,
        "train_size": 16,
        "num_train_epochs": 1,
        "eval_size": 8,
        "eval_loop": 4,
        "max_turns": 3,
        "max_output_tokens": 5,
        "max_model_len": 200,
        "batch_size": 8,
        "lr_actor": 1e-2,
        "lora_rank": 8,
        "lora_alpha": 16.0,
        "update_epochs": 1,
        "output_dir": str(tmp_path / "run") if tmp_path else None,
    }
    return ppo_llm.Args(**(small | flags))


def make_agent(args, model, tokenizer, critic="head", seed=0, script=ippo_llm):
    """An agent of ippo_llm or iac_llm whose values are not 0; `critic` is head or separate."""
    critic_model = model.base_model if critic == "separate" else None
    return randomise_value_head(script.Agent(model, critic_model, tokenizer, args), seed)


def randomise_value_head(agent, seed=0):
    """A new value head gives 0 everywhere; this one does not."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in agent.value_head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return agent


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def all_parameters(agent):
    """The parameters that an agent's optimisers change."""
    return [p for optimizer in agent.optimizers for group in optimizer.param_groups for p in group["params"]]


def gradients(agent):
    """Copies of the gradients of what an agent's optimisers change; 0 where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in all_parameters(agent)]


def state_of(agent):
    """Copies of all that learning may change in an agent of ippo_llm or iac_llm."""
    return [parameter.detach().clone() for parameter in all_parameters(agent)]


def learning_targets(agent, rollout, args, script=ippo_llm):
    """What main does between sampling and learning: (values, advantages, returns, action_mask), [B, T, K] each."""
    reference_logprobs = script.compute_reference_logprobs(agent, rollout, args)
    values = script.compute_values(agent, rollout, args)
    rewards = script.token_rewards(rollout, reference_logprobs, args)
    rewards, values, action_mask = script.group_actions(rewards, values, rollout.mask, args)
    if script is ippo_llm:
        advantages, returns = ippo_llm.gae(rewards, values, action_mask, args.gamma, args.gae_lambda)
    else:
        advantages, returns = script.td_error(rewards, values, action_mask, args.gamma)
    if args.advantage_normalization:
        advantages = script.standardise(advantages, action_mask)
    return values, advantages, returns, action_mask


def set_rewards(rollout, rewards):
    """Give a rollout of one turn the rewards [B]."""
    rollout.rewards[:, 0] = rewards
    rollout.processed_rewards[:, 0] = rewards
    return rollout


def whole_minibatch(rollout, targets, script=ippo_llm):
    """A rollout as one mini-batch, in its own order."""
    minibatch = script.Batch(rollout, *targets)
    minibatch.num_tokens = rollout.mask.sum()
    minibatch.num_actions = targets[-1].sum()
    return minibatch


def task_of(**attributes):
    """The default task of ippo_llm with some of its names replaced."""
    names = ("train_dataset", "eval_dataset", "formatters", "reward_func")
    return SimpleNamespace(**({name: getattr(tldr, name) for name in names} | attributes))


def make_model(folder, tokenizer):
    """The folder of another model, a fifth as wide as the embedded one, with another chat template."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.chat_template = "{% for message in messages %}Q: {{ message['content'] }} A: {% endfor %}"
    other.save_pretrained(folder)
    return str(folder)


def read_metrics(folder):
    """The rows of a run's metrics.csv, dicts of strings."""
    with open(Path(folder) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))
