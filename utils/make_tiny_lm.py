"""Make the embedded language model `utils/tiny_lm/` from nothing, in about three and a half minutes on two cores.

    python -m utils.make_tiny_lm --out runs/my_lm      the same, elsewhere
    python -m utils.make_tiny_lm --overwrite

A Llama of about a million parameters with a word-level byte-level BPE and a chat template, trained on text composed by
made_text.py. It is an ordinary Hugging Face folder: AutoModelForCausalLM and AutoTokenizer open it like any other.
"""

import math
import random
import time
from pathlib import Path

import torch
from pydantic import NonNegativeInt, PositiveInt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from utils.cli import UserError, command_line, flags
from utils.files import disk_errors, writing
from utils.tasks.made_text import games, posts, programs

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@flags
class TinyArgs:
    """How the model is made, and where it goes."""

    out: str = str(Path(__file__).parent / "tiny_lm")  # the folder to write; unless given, the embedded model's
    overwrite: bool = False  # replace the model that is there
    steps: PositiveInt = 1500  # optimiser steps
    seed: NonNegativeInt = 1  # seed of text, weights and order
    layers: PositiveInt = 3  # layers of the model
    heads: PositiveInt = 5  # heads of a layer's attention, each of 32 units


@flags
class Args(TinyArgs):
    """All flags."""


def chats(size, seed):
    """`size` chats, lists of messages: of five, three summaries, one number game, one small program."""
    rng = random.Random(f"chats {seed}")
    summaries = []
    for item in posts(size * 3 // 5, seed):
        # The number of words asked for is noise: the model has to be taught to heed it.
        request = f"{item['prompt']}\n\nSummarise this post in about {rng.randint(1, 20) * 8} words."
        summaries.append([("user", request), ("assistant", item["completion"])])
    code = [[("user", t["prompt"]), ("assistant", t["solution"])] for t in programs(size // 5, seed)]
    chats = [[{"role": role, "content": text} for role, text in chat] for chat in summaries + code]
    chats += [game["messages"] for game in games(size - len(chats), seed)]
    rng.shuffle(chats)
    return chats


def make_tokenizer(texts, vocab_size):
    """A byte-level BPE whose frequent words are one token each; any other text falls back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\w+| ?[^\s\w]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, END, USER, ASSISTANT, SYSTEM]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=special[2:],
        padding_side="left",
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer, chats):
    """Each chat as a list of token ids, with the assistant's tokens marked: [(ids, marks)]."""
    encoded = []
    for chat in chats:
        ids, marks = [], []
        for message in chat:
            head = tokenizer.encode(f"<|{message['role']}|>", add_special_tokens=False)
            body = tokenizer.encode(message["content"] + END, add_special_tokens=False)
            ids += head + body
            marks += [0] * len(head) + [int(message["role"] == "assistant")] * len(body)
        encoded.append((ids, marks))
    return encoded


def batches(encoded, batch_size, rng):
    """Endless right-padded batches of chats of similar length: (ids, mask, marks), each [batch_size, length]."""
    while True:
        order = rng.sample(range(len(encoded)), len(encoded))
        for start in range(0, len(order) - 16 * batch_size + 1, 16 * batch_size):
            pool = sorted(order[start : start + 16 * batch_size], key=lambda k: len(encoded[k][0]))
            groups = [pool[k : k + batch_size] for k in range(0, len(pool), batch_size)]
            for group in rng.sample(groups, len(groups)):
                yield collate([encoded[k] for k in group])


def collate(rows):
    length = max(len(ids) for ids, _ in rows)
    ids, mask, marks = (torch.zeros(len(rows), length, dtype=torch.long) for _ in range(3))  # the pad token's id is 0
    for row, (tokens, marked) in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        marks[row, : len(tokens)] = torch.tensor(marked)
    return ids, mask, marks


def token_losses(model, ids, mask):
    """Cross-entropy of each next token in nats, [batch, length - 1]."""
    logits = model(ids, attention_mask=mask).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


@torch.no_grad()
def held_out_loss(model, tokenizer, size=500, seed="held out"):
    """Mean cross-entropy in nats per token of the assistant's tokens, on chats that training never saw."""
    total = count = 0.0
    encoded = sorted(encode(tokenizer, chats(size, seed)), key=lambda row: len(row[0]))
    for start in range(0, size, 50):
        ids, mask, marks = collate(encoded[start : start + 50])
        total += (token_losses(model, ids, mask) * marks[:, 1:]).sum().item()
        count += marks[:, 1:].sum().item()
    return total / count


def main(args):
    """Make the tokenizer and the model, and write them."""
    start = time.time()
    if (Path(args.out) / "config.json").exists() and not args.overwrite:
        raise UserError(f"--out takes a folder without a model; {args.out} has one (--overwrite replaces it)")
    with writing(args.out):  # before minutes of training
        Path(args.out).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)

    text = chats(20_000, args.seed)
    tokenizer = make_tokenizer((message["content"] for chat in text for message in chat), vocab_size=768)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32 * args.heads,
        intermediate_size=384 * args.heads // 5,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    peak, warmup = 5e-3, 100
    stream = batches(encode(tokenizer, text), 32, random.Random(args.seed))
    for step in range(args.steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / args.steps))
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / warmup) * cosine
        ids, mask, marks = next(stream)
        weights = mask[:, 1:] * (0.2 + 0.8 * marks[:, 1:])  # a prompt is worth learning too, but less
        loss = (token_losses(model, ids, mask) * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step}  loss {loss.item():.3f}  {time.time() - start:.0f} s", flush=True)

    with writing(args.out), disk_errors():
        model.half().save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    loss = held_out_loss(model, AutoTokenizer.from_pretrained(args.out))
    print(f"held-out loss {loss:.3f} nats a token, {time.time() - start:.0f} s, {args.out}")


if __name__ == "__main__":
    command_line(main, Args, __doc__)
