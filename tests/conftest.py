import contextlib
import copy
import os

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

import ippo_llm
from utils.models import locate
from utils.stats import standardise
from utils.tasks import tldr

TINY = locate("utils/tiny_lm")
os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side, one thread each, and so do the processes that they start
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="session")
def loaded_model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture
def model(loaded_model):
    return copy.deepcopy(loaded_model)


@pytest.fixture(scope="session")
def accelerator():
    return Accelerator()


@pytest.fixture
def prompts(tokenizer):
    """Five prompts of different lengths."""
    asks = ["Guess it.", "I think of a number from 1 to 50. Guess it.", "Summarise this post in about 16 words."]
    asks += [item["prompt"] + "\n\n" + asks[2] for item in tldr.eval_dataset(2, 0)]
    chats = [[{"role": "user", "content": ask}] for ask in asks]
    return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]


@pytest.fixture
def clock():
    """A stand-in for Run.time."""
    return lambda phase: contextlib.nullcontext()


def make_args(tmp_path=None, script=ippo_llm, **flags):
    """Args of a run that takes seconds."""
    small = {"rollout_buffer_size": 8, "mini_batch_size": 4, "train_size": 40, "num_train_epochs": 1, "eval_size": 4}
    small |= {"eval_interval": 3, "max_new_tokens": 24, "output_dir": str(tmp_path / "run") if tmp_path else None}
    return script.Args(**(small | flags))


def randomise_value_head(agent, seed=0):
    """A new value head says 0 everywhere; tests want one that does not."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in agent.value_head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return agent


def estimate(agent, reference, rollout, rewards, args, accelerator, advantages=None):
    """What main does between sampling and learning, for rewards [R]; one turn each unless the rollout has episodes."""
    if rollout.episodes is None:
        rollout.episodes = torch.arange(len(rewards))
    rollout.processed_rewards = rewards
    metrics = ippo_llm.evaluate(agent, reference, rollout, args, accelerator)
    rewards, values, mask = rollout.chains()
    advantages = advantages or (lambda *chain: ippo_llm.gae(*chain, args.gamma, args.gae_lambda))
    advantages, returns = advantages(rewards, values, mask)
    if args.advantage_normalization:
        advantages = standardise(advantages, mask, accelerator)
    rollout.advantages, rollout.returns = rollout.unchain(advantages, mask), rollout.unchain(returns, mask)
    return metrics
