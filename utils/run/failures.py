"""What errors of torch say to the user: what ran out of memory, and which flag takes less."""

import torch

from utils import distributed
from utils.cli import UserError, flag_name, one_line


def explain(error, args, phases, how_to_go_on):
    """The UserError for an error that ended a run in some phases, the innermost first; None: it has none.

    `how_to_go_on` is the command that resumes the run, None where nothing is saved.
    """
    text = str(error)
    if is_out_of_memory(error):
        return UserError(out_of_memory(args, phases, how_to_go_on))
    if type(error) is not RuntimeError:
        return None
    if "probability tensor" in text:
        return UserError("the probabilities of tokens are not finite: lower the learning rates")
    if args.deterministic and "deterministic" in text:
        return UserError(f"--deterministic: {one_line(error)}")
    if "by peer" in text:  # a connection that ends while a sharded model computes
        return distributed.ProcessError(f"another process of this run has ended: {one_line(error)}")
    return None


def is_out_of_memory(error):
    """Whether it says that a GPU's or the CPU's memory has run out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def out_of_memory(args, phases, how_to_go_on):
    """What ran out of memory, which flag takes less, and how to go on with half of it."""
    episodes = args.rollout_buffer_size // distributed.world_size()
    if "learn" in phases:
        what = "out of memory in learning"
        name = "micro_batch_size"
        mini_batch = getattr(args, "mini_batch_size", args.rollout_buffer_size) // distributed.world_size()
        size = min(args.micro_batch_size, mini_batch, episodes)
    elif "play" in phases or "evaluate" in phases:
        what = f"out of memory in {'playing' if 'play' in phases else 'evaluation'}"
        if getattr(args, "use_vllm", False):
            return f"{what}: a lower gpu_memory_utilization in --vllm-config leaves more"
        name = "hf_generate_chunk_size"
        size = min(getattr(args, name, None) or episodes, episodes)
    else:
        return "out of memory"
    if not hasattr(args, name):
        return f"{what}: a smaller --rollout-buffer-size takes less"
    if size <= 1:
        return f"{what}, with {flag_name(name)} 1"
    half = f"{flag_name(name)} {size // 2}"
    what += f": {half} takes less"
    return f"{what}; {how_to_go_on} {half}" if how_to_go_on else what
