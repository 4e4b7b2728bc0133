"""The embedded model, and the text that it was made from."""

import ast

import torch
from conftest import TINY

from utils.tasks.made_text import games, posts, programs
from utils.make_tiny_lm import collate, encode, held_out_loss, make_tokenizer


def test_it_is_small_and_knows_its_text(loaded_model, tokenizer):
    from pathlib import Path

    assert sum(path.stat().st_size for path in Path(TINY).glob("*.safetensors")) <= 2_000_000
    assert (
        held_out_loss(loaded_model, tokenizer, size=200) < 0.45
    )  # nats a token; one that knows nothing: log 768 = 6.6


def test_any_text_survives_the_tokenizer(tokenizer):
    for words in ("Zürich, 数学 and\ttabs — 12.5 %", "def f(x):\n    return x ** 2\n", " My roommate Anna"):
        assert tokenizer.decode(tokenizer(words).input_ids) == words
    assert len(tokenizer(" station camera without").input_ids) == 3  # frequent words are one token each


def test_its_summaries_are_sentences_of_varied_length(loaded_model, tokenizer):
    from conftest import make_args

    from ippo_llm import Agent, sample
    from utils.tasks.tldr import eval_dataset, formatters

    chats = [formatters(item, 0) for item in eval_dataset(64, 0)]
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    args = make_args(max_new_tokens=64)
    texts = sample(Agent(args, loaded_model, tokenizer), prompts, args, torch.Generator().manual_seed(0)).texts
    counts = sorted(len(text.split()) for text in texts)
    assert counts[6] <= 10 and counts[-7] >= 30
    assert sum(text[0].isupper() and text[-1] in ".?" for text in texts) >= 60


def test_the_made_text_is_what_it_says():
    assert posts(20, 0) == posts(20, 0) != posts(20, 1)
    assert all("{" not in item["prompt"] + item["completion"] for item in posts(500, 0))
    for item in programs(200, 0):
        ast.parse(item["solution"])
    for game in games(200, 0):
        messages = game["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        first, last = messages[0]["content"], None
        low, high = int("think" in first), int(first.split(" to ")[1].split(".")[0])
        for ask, answer in zip(messages[::2], messages[1::2]):  # a move is legal after all that was said
            low = last if ask["content"] == "higher" else low
            high = last if ask["content"] == "lower" else high
            last = int(answer["content"])
            assert low <= last <= high


def test_only_the_assistants_tokens_are_marked():
    chat = [{"role": "user", "content": "lower"}, {"role": "assistant", "content": "7"}]
    tokenizer = make_tokenizer(["lower 7"] * 10, vocab_size=300)
    ids, mask, marks = collate(encode(tokenizer, [chat, chat[:1] * 2 + chat]))
    assert tokenizer.decode(ids[0][marks[0] == 1]) == "7<|end|>" and mask.sum(1).tolist()[0] < mask.sum(1).tolist()[1]
    encoded = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert ids[0][mask[0] == 1].tolist() == encoded  # what is trained on is what the template makes
