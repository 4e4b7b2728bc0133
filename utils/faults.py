"""What can go wrong in an update of an agent: memory that runs out, and gradients that are not finite."""

import gc

import torch
from tqdm import tqdm

from utils.cli import UserError
from utils.distributed import say

MOST_SKIPPED = 3  # gradients running that are not finite


class Faults:
    """The faults of one agent. An error names the flags that help: one of a size, one of a learning rate.

    `halves`: where memory runs out, a mini-batch is done again in halves. Models that are shared out over processes
    can't do so, as all processes have to make the same passes.
    """

    def __init__(self, size_flag, rate_flag, halves=True):
        self.size_flag = size_flag
        self.rate_flag = rate_flag
        self.halves = halves
        self.num_parts = 1  # parts of a mini-batch that are computed one after the other
        self.num_skipped = 0  # gradients running that were not finite

    def backward(self, agent, minibatch, args, *losses):
        """Add up the gradient of a mini-batch, of one loss after the other; returns their metrics, detached.

        `loss, metrics = losses[k](agent, part, args)` for each part of minibatch.split(num_parts), of which loss and
        metrics, {name: tensor}, are shares that add up. Where memory runs out, it is done once more in twice as many
        parts, and so are later mini-batches. Raises UserError where memory has run out before, or without `halves`.
        """
        try:
            return self.add_up(agent, minibatch, args, losses)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if not self.halves:
                raise UserError(f"out of memory in an update: lower {self.size_flag}") from error
            if self.num_parts > 1:
                half = f"half of {self.size_flag} at once"
                raise UserError(f"out of memory in an update, also with {half}: lower {self.size_flag}") from error
        self.num_parts *= 2
        for optimizer in agent.optimizers:
            optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        tqdm.write(f"out of memory in an update: from now on half of {self.size_flag} at once")
        return self.backward(agent, minibatch, args, *losses)

    def add_up(self, agent, minibatch, args, losses):
        sums = {}
        for part in minibatch.split(self.num_parts):
            for compute_loss in losses:
                loss, metrics = compute_loss(agent, part, args)
                loss.backward()
                for name, share in metrics.items():
                    sums[name] = sums.get(name, 0.0) + share.detach()
        return sums

    def finite(self, gradient_norms):
        """Whether the norms, scalars, are finite; if not, says that the step is left out.

        Raises UserError for the third time running.
        """
        if torch.stack(gradient_norms).isfinite().all():
            self.num_skipped = 0
            return True
        self.num_skipped += 1
        if self.num_skipped >= MOST_SKIPPED:
            raise UserError(f"three gradients running were not finite: lower {self.rate_flag} or the temperature")
        say("a gradient was not finite: its mini-batch is skipped")
        return False

    def state_dict(self):
        """The counts, as JSON values."""
        return {"parts": self.num_parts, "skipped": self.num_skipped}

    def load_state_dict(self, state):
        self.num_parts = state["parts"]
        self.num_skipped = state["skipped"]


def is_out_of_memory(error):
    """Whether it says that a GPU's or the CPU's memory has run out."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text
