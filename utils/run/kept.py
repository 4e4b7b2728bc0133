"""What agents had learned after the last update that was logged, while they learn from the next one."""

import torch
from torch.distributed.tensor import DTensor

from utils.models.weights import optimizers_of


class Kept:
    """Parameters and moments of the agents' optimisers as they were at some time, in the CPU's memory.

    `exchange` puts them in the place of those of now, and these in theirs: a second time, and all is as it was.
    """

    def __init__(self, agents):
        self.optimizers = [optimizer for agent in agents for optimizer in optimizers_of(agent)]
        self.copies = {}

    def tensors(self):
        """What the optimisers change, of sharded tensors the part of this process, by place."""
        found = {}
        for k, optimizer in enumerate(self.optimizers):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for j, parameter in enumerate(parameters):
                for name, x in {"parameter": parameter, **optimizer.state.get(parameter, {})}.items():
                    if isinstance(x, torch.Tensor):
                        found[k, j, name] = x.detach().to_local() if isinstance(x, DTensor) else x.detach()
        return found

    def take(self):
        """Keep what there is now, in place of what was kept."""
        for place, x in self.tensors().items():
            if place not in self.copies:
                self.copies[place] = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
            self.copies[place].copy_(x, non_blocking=True)

    def exchange(self):
        for place, x in self.tensors().items():
            kept = self.copies.get(place)
            self.copies[place] = x.to("cpu", copy=True)
            if kept is None:  # a moment that was not there yet is 0, as the optimiser makes it
                x.zero_()
            else:
                x.copy_(kept)
