"""Make a language model that knows the moves of a game, of a small one in two minutes: the player to begin from.

    python -m utils.make_game_lm open_spiel:kuhn_poker runs/kuhn_lm

Games are of OpenSpiel and PettingZoo.

A small Llama with the tokens of the embedded model, from nothing, or a model of yours (--model). It reads what seats
read in matches of random moves, and learns to answer with each legal number as often as with any other. A run that
begins from it has few illegal answers, and a KL penalty to it is an entropy bonus over legal moves alone. With
--reading-coef its hidden states tell apart what it has read, on which nothing that it answers depends yet. What is
written is an ordinary Hugging Face folder.
"""

import importlib
import random
import time
from argparse import Namespace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from utils import distributed, models
from utils.cli import UserError, check_needs, command_line, flags, not_with
from utils.files import disk_errors, writing
from utils.models.loading import check_model, load_model, load_tokenizer, without_bars
from utils.models.transcripts import UNLIMITED

LIBRARIES = ("open_spiel", "pettingzoo")  # which say what is legal
TINY = str(Path(__file__).parent / "tiny_lm")


@flags
class GameArgs:
    """What is learned, and where it goes."""

    env: tyro.conf.Positional[str] = ""  # the game, open_spiel:NAME or pettingzoo:NAME
    out: tyro.conf.Positional[str] = ""  # the folder to write; what is there of an earlier time is not replaced
    model: str | None = None  # folder or hub name of the model that learns; none: a new one
    hidden_size: Annotated[int, Field(gt=0, multiple_of=8)] = not_with("model", default=64)  # of a new model
    num_layers: PositiveInt = not_with("model", default=2)  # of a new model
    num_matches: PositiveInt = 64  # matches of a step, all of them new
    steps: PositiveInt = 200  # optimiser steps
    max_moves: PositiveInt = 100  # of a match, of all seats together
    reading_coef: NonNegativeFloat = 0.0  # of a loss by which the hidden state before an answer tells what was read
    learning_rate: PositiveFloat | None = None  # falls to 0 over the run; none: 3e-3 of a new model, 5e-5 of yours
    seed: NonNegativeInt = 1


@flags
class Args(GameArgs):
    """All flags."""


def new_model(args):
    """A small Llama of random weights, with the tokens of the embedded model."""
    config = AutoConfig.from_pretrained(
        TINY,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=args.hidden_size // 4,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def reading_loss(hidden_states, ids, is_last):
    """How far a quarter of the hidden states' units is from a code of what was read, which tells transcripts apart.

    hidden_states [B, S, D], ids [B, S], is_last [B, S] True on tokens before an answer. A code is the sum of random
    vectors, one for each three tokens that follow each other; its units have mean 0 and deviation 1 over the batch.
    """
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2**14, hidden_states.shape[-1] // 4, generator=generator)
    trigrams = (pad(ids, (2, 0)).unfold(1, 3, 1) * ids.new_tensor([613**2, 613, 1])).sum(-1) % len(vectors)  # [B, S]
    codes = vectors.to(ids.device)[trigrams].cumsum(1)[is_last]  # [n, D / 4]; integers have no matrix product on a GPU
    codes = (codes - codes.mean(0)) / (codes.std(0, correction=0) + 1e-6)
    return ((hidden_states[is_last][:, : codes.shape[1]] - codes) ** 2).mean()


def play_match(game, seed, agent, max_moves):
    """A match of random legal moves: of each seat that moves, (ids, weights of their losses), lists."""
    rng = random.Random(f"moves {seed}")
    match = game.begin(seed)
    transcripts = [([], []) for _ in range(game.num_seats)]
    for _ in range(max_moves):
        if match.seat is None:
            break
        ids, weights = transcripts[match.seat]
        read = models.encode([{"role": "user", "content": match.text(match.seat)}], ids, agent)
        answer = rng.choice(match.answers())
        written = [*agent.tokenizer(answer, add_special_tokens=False).input_ids, agent.tokenizer.eos_token_id]
        if len(ids) + len(read) + len(written) > agent.room:
            break
        ids += read + written
        weights += [0.2] * len(read) + [1.0] * len(written)
        match.move(answer)
    return [own for own in transcripts if own[0]]


def main(args):
    """Teach the model, and write it. Raises UserError."""
    check_needs(args)
    library, _, name = args.env.partition(":")
    if library not in LIBRARIES:
        raise UserError(f"the first argument names a game, {':NAME or '.join(LIBRARIES)}:NAME, got {args.env!r}")
    out = Path(args.out)
    if not args.out or out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"the second argument is a folder to write, empty or not there yet, got {args.out!r}")
    game = importlib.import_module(f"utils.envs.{library}").make_game(name, args.env)
    if args.model:
        check_model(args.model, "--model", trust_remote_code=False)
    tokenizer = load_tokenizer(args.model or TINY, "--model")
    if tokenizer.eos_token_id is None:
        raise UserError(f"--model {args.model}: its tokenizer has no eos_token, which ends an answer")
    if args.model:
        model = load_model(args.model, "--model").requires_grad_(True)
    else:
        torch.manual_seed(args.seed)
        model = new_model(args)
    model.to(distributed.device())
    agent = Namespace(tokenizer=tokenizer, room=getattr(model.config, "max_position_embeddings", UNLIMITED))
    if not play_match(game, 0, agent, args.max_moves):
        raise UserError(f"{args.env}: nobody moves in it, or what is read takes more than {agent.room} tokens")
    with writing(out):  # before a minute of training
        out.mkdir(parents=True, exist_ok=True)

    rate = args.learning_rate or (5e-5 if args.model else 3e-3)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    start = time.time()
    for step in range(args.steps):
        seeds = range(step * args.num_matches, (step + 1) * args.num_matches)
        rows = [row for k in seeds for row in play_match(game, args.seed * 2**24 + k, agent, args.max_moves)]
        ids, weights = (
            pad_sequence([torch.tensor(own[k]) for own in rows], batch_first=True).to(model.device) for k in range(2)
        )
        weights = weights[:, 1:]  # 0 on padding
        read = model(ids, output_hidden_states=args.reading_coef > 0)  # padded on the right: no token reads padding
        nats = cross_entropy(read.logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (nats * weights).sum() / weights.sum()
        if args.reading_coef:
            is_last = (weights == 1.0) & (pad(weights, (1, 0))[:, :-1] < 1.0)  # the token before an answer
            loss = loss + args.reading_coef * reading_loss(read.hidden_states[-1][:, :-1], ids[:, :-1], is_last)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step}  loss {loss.item():.3f}  {time.time() - start:.0f} s", flush=True)
    with writing(out), disk_errors(), without_bars():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    command_line(main, Args, __doc__)
