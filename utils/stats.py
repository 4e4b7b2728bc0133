"""Numbers over the ones of a mask, the same whether the rows lie in one process or in many; gradients; memory."""

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from tqdm import tqdm

from utils.cli import UserError


def masked_mean(x, mask, accelerator):
    """Mean of x over the mask's ones; averaged over processes, it and its gradient are those of all rows together."""
    return (x * mask).sum() / accelerator.reduce(mask.sum(), "mean")


def standardise(x, mask, accelerator, least=0.0):
    """(x - mean) / deviation over the mask's ones, 0 elsewhere; x itself where its deviation is at most `least`."""
    count = accelerator.reduce(mask.sum(), "sum")
    centred = x - accelerator.reduce((x * mask).sum(), "sum") / count
    deviation = (accelerator.reduce((centred**2 * mask).sum(), "sum") / count).sqrt()
    return centred / deviation * mask if deviation > least else x


def sums_by(groups, x):
    """Sum of x over the rows of each group, [G]; groups and x are [R], groups numbered from 0 to G - 1."""
    return x.new_zeros(int(groups.max()) + 1).index_add(0, groups, x)


def explained_variance(returns, values, mask):
    """1 - Var(returns - values) / Var(returns) over the mask's ones: 1 for a perfect critic, 0 for a constant one."""
    returns, values = returns[mask > 0], values[mask > 0]
    return 1 - (returns - values).var(correction=0) / returns.var(correction=0)


def clip_gradients(optimizer, max_grad_norm, accelerator):
    """Average the gradients of an optimiser's parameters over the processes, then clip them; their norm before that."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if accelerator.num_processes > 1:
        for parameter in parameters:
            parameter.grad = accelerator.reduce(parameter.grad, "mean")
    return torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)


def with_less_memory(agent, attempt, flag):
    """attempt(), which adds up a gradient in agent.parts parts; where memory runs out, once more in twice as many.

    Raises UserError, naming the flag to lower, where memory has run out before.
    """
    try:
        return attempt()
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        if agent.parts > 1:
            raise UserError(f"out of memory in an update, also with half of {flag} at once: lower {flag}") from error
    agent.parts *= 2
    for optimizer in agent.optimizers:
        optimizer.zero_grad()
    clear_device_cache(garbage_collection=True)
    tqdm.write(f"out of memory in an update: from now on half of {flag} at once")
    return with_less_memory(agent, attempt, flag)
