import copy
import os

import pytest
import torch
from helpers import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils.tasks import tldr

os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side, one thread each, and so do the processes that they start
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="session")
def loaded_model():
    """The embedded model, frozen, as a reference is: not to be changed."""
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture
def model(loaded_model):
    return copy.deepcopy(loaded_model)


@pytest.fixture
def prompts(tokenizer):
    """Five prompts of different lengths."""
    requests = ["Guess it.", "I think of a number from 1 to 50. Guess it.", "Summarise this post in about 16 words."]
    requests += [item["prompt"] + "\n\n" + requests[2] for item in tldr.eval_dataset(2, 0)]
    chats = [[{"role": "user", "content": request}] for request in requests]
    return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
