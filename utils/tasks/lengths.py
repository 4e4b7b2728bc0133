"""Prompts that are too long for a model: their items are left out before training, or they lose tokens on the left."""

import datasets

from utils.cli import UserError
from utils.distributed import say
from utils.tasks.episodes import Episodes

AT_ONCE = 1000  # items whose prompts are tokenized at once


def fit_prompts(task, args, readers, least, train_items, held_out):
    """The items to train on, and those held out, without those of which an agent's first prompt is too long.

    `readers` has of each agent its tokenizer, and the most tokens of a prompt, or None. With --long-prompts truncate
    all items stay. Raises UserError where fewer than `least` are left to train on.
    """
    limits = sorted({most for _, most in readers if most is not None})
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
        episodes = Episodes(task, [items[k] for k in numbers], len(readers), num_turns=1)
        too_long = set()
        for agent, (tokenizer, most) in enumerate(readers):
            prompts = episodes.prompts(agent, tokenizer)
            rows = tokenizer(prompts, add_special_tokens=False).input_ids
            too_long |= {k for k, ids in zip(numbers, rows) if most is not None and len(ids) > most}
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
