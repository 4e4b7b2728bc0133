"""Prompts that are too long for a model: their items are left out before training, or they lose tokens on the left."""

import warnings
from dataclasses import dataclass

import datasets

from utils.cli import UserError, flag_name
from utils.distributed import say
from utils.engine import max_length
from utils.models import check_models, load_tokenizers
from utils.tasks.episodes import Episodes

AT_ONCE = 1000  # items whose prompts are tokenized at once


@dataclass
class PromptLimit:
    """The most tokens that a prompt may have, None: any number; and why."""

    tokens: int | None
    reason: str
    truncate: bool  # prompts that are longer lose tokens on the left

    def exceeds(self, prompt, tokenizer):
        """Whether a prompt, a string, has more tokens."""
        return self.tokens is not None and len(tokenizer(prompt, add_special_tokens=False).input_ids) > self.tokens

    def encode(self, prompts, tokenizer):
        """Token ids of B prompts, strings: a list for each. Raises UserError where one has too many, or none."""
        if not prompts:
            return []
        rows = tokenizer(prompts, add_special_tokens=False).input_ids
        if self.truncate:
            rows = [truncate(ids, self.tokens, tokenizer) for ids in rows]
        check_prompts(prompts, rows)
        for ids in rows:
            if self.tokens is not None and len(ids) > self.tokens:
                raise UserError(f"a prompt has {len(ids)} tokens, and at most {self.tokens} fit: {self.reason}")
        return rows


def check_prompts(prompts, rows):
    """Raise UserError where one of B prompts, strings, has no token; `rows` are their tokens."""
    for prompt, ids in zip(prompts, rows):
        if not ids:
            raise UserError(f"a prompt has no tokens: {prompt!r}")


def prompt_limit(config, args, new_tokens):
    """The PromptLimit of a model. `new_tokens` is the name of the flag for the longest response.

    Raises UserError where prompts of --max-prompt-length, or of one token, leave no room for it.
    """
    length = getattr(args, new_tokens)
    tokens = args.max_prompt_length
    reason = f"--max-prompt-length {tokens}"
    room = max_length(config, args)
    all_positions = f"the model's {room} positions"
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    if getattr(args, "max_model_len", None) == room != own:
        all_positions = f"{flag_name('max_model_len')} {room}"
    if room and length + (tokens or 1) > room:
        sizes = f"{flag_name(new_tokens)} {length} after a prompt of {tokens or 1}"
        raise UserError(f"{sizes} exceeds {all_positions}")
    if room and tokens is None:
        tokens = room - length
        reason = f"{flag_name(new_tokens)} {length} of {all_positions}"
    return PromptLimit(tokens, reason, args.long_prompts == "truncate")


def encode_texts(texts, tokenizer, config):
    """Token ids of texts that a critic of this configuration is to read: of each a list.

    One with more tokens than it has positions loses those on the left, which is said once.
    """
    rows = tokenizer(texts, add_special_tokens=False).input_ids
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    if room and max(map(len, rows)) > room:
        warnings.warn(f"the critic has {room} positions: of texts with more tokens it reads the last", stacklevel=2)
    return [truncate(ids, room, tokenizer) for ids in rows]


def readers(args, new_tokens, model=None, tokenizer=None, quantized=False):
    """Of each agent its tokenizer and its PromptLimit; `model` and `tokenizer` stand in for what --model names.

    Nothing but tokenizers is loaded. Raises UserError where a model is not to be had.
    """
    configs = check_models("model", "model_config", args, model, quantized)
    limits = [prompt_limit(config, args, new_tokens) for config in configs]
    tokenizers = load_tokenizers(args, tokenizer, model)
    for config, each in zip(configs, tokenizers):
        size = getattr(config.get_text_config(), "vocab_size", None)
        if size and each.pad_token_id >= size:
            pad = f"the tokenizer's padding token, {each.pad_token}, is number {each.pad_token_id}"
            mend = "set its pad_token to one of these, or resize the model's embeddings"
            raise UserError(f"{flag_name('model')}: {pad}, and the model knows {size} tokens: {mend}")
    return list(zip(tokenizers, limits))


def fit_prompts(task, args, readers, least, train_items, held_out):
    """The items to train on, and those held out, without those of which an agent's first prompt is too long.

    `readers` has of each agent its tokenizer and its PromptLimit. With --long-prompts truncate all items stay. Raises
    UserError where fewer than `least` are left to train on.
    """
    limits = sorted({limit.tokens for _, limit in readers if limit.tokens is not None})
    if args.long_prompts == "truncate" and not limits:
        raise UserError("--long-prompts truncate takes --max-prompt-length: the model has room for any prompt")
    if args.long_prompts == "truncate" or not limits:
        return train_items, held_out
    train_fits = find_fits(task, train_items, readers)
    held_out_fits = find_fits(task, held_out, readers)
    total = len(train_items) + len(held_out)
    left_out = total - len(train_fits) - len(held_out_fits)
    if left_out == 0:
        return train_items, held_out
    what = f"{left_out} of {total} items are left out: a prompt has more than {' or '.join(map(str, limits))} tokens"
    if len(train_fits) < least:
        raise UserError(f"{what}; {len(train_fits)} are left to train on, and an update takes {least}")
    say(what)
    return take(train_items, train_fits), take(held_out, held_out_fits)


def find_fits(task, items, readers):
    """The numbers of the items of which no agent's first prompt is too long."""
    fits = []
    for start in range(0, len(items), AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, len(items)))
        episodes = Episodes(task, [items[k] for k in numbers], len(readers))
        too_long = set()
        for agent, (tokenizer, limit) in enumerate(readers):
            prompts = episodes.prompts(agent, range(len(numbers)), tokenizer)
            rows = tokenizer(prompts, add_special_tokens=False).input_ids
            check_prompts(prompts, rows)
            too_long |= {k for k, ids in zip(numbers, rows) if limit.tokens is not None and len(ids) > limit.tokens}
        fits += [k for k in numbers if k not in too_long]
    return fits


def take(items, numbers):
    """The items of these numbers, of a datasets.Dataset or of any sequence."""
    if isinstance(items, datasets.Dataset):
        return items.select(numbers)
    return [items[k] for k in numbers]


def truncate(ids, most, tokenizer):
    """Token ids, of which those on the left go where there are more than `most`; a first special token stays."""
    if most is None or len(ids) <= most:
        return ids
    first = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return first + ids[len(ids) - most + len(first) :]
