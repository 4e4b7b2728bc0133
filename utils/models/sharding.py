"""Models shared out over the processes that train them, by torch's FSDP2: each holds an equal part of every weight.

So it does of gradients and of the optimiser's moments. Layers are gathered for a forward or a backward pass, one after
the other, and let go; all processes have to make the same passes.
"""

import contextlib
import warnings

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from utils import distributed


def shard_model(model, whole=()):
    """Let each process keep its part of a transformers model's weights, in place: of each layer, then of the rest.

    The parameters in `whole` stay so. It comes before the optimiser of the others is made, and after the model was
    copied: a sharded model can't be.
    """
    mesh = init_device_mesh(model.device.type, (distributed.world_size(),))
    options = {"mesh": mesh, "reshard_after_forward": True, "ignored_params": {*whole}}
    for module in reversed(list(model.modules())):  # what is inside comes first
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, **options)
    fully_shard(model, **options)
    model.call = lambda function: function()
    register_fsdp_forward_method(model, "call")
    # It warns of outputs that are views, for those who write into them; nothing here does
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def call_inside(model, function):
    """What function() computes by a call of a module inside `model`, past the model's own forward.

    Of a sharded model, what belongs to no layer is gathered for it too, and for the backward pass.
    """
    return model.call(function) if isinstance(model, FSDPModule) else function()


@contextlib.contextmanager
def whole_models(models):
    """Within it each process has the whole weights of these models: it samples without the others, in its own steps."""
    modules = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def whole(x):
    """A sharded tensor whole, in every process, all of which call it; any other tensor as it is."""
    if not isinstance(x, DTensor):
        return x
    with distributed.among_processes():
        return x.detach().full_tensor()


def whole_tensors(tensors):
    """{name: tensor} with sharded ones whole, in the memory of the main process; all processes call it.

    A tensor under two names stays one. The other processes have None for what is sharded.
    """
    copies = {}
    for x in tensors.values():
        if isinstance(x, DTensor) and id(x) not in copies:
            copy = whole(x)
            copies[id(x)] = copy.cpu() if distributed.is_main() else None
    return {name: copies.get(id(x), x.detach()) for name, x in tensors.items()}


def share(x, like):
    """This process's part of a tensor that all processes have, sharded as `like` is; x itself where that is whole."""
    if not isinstance(like, DTensor):
        return x
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
