"""Processes that train together, one for each device: which of them this is, and means and sums over all of them."""

import atexit
import builtins
import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from utils.cli import UserError, check_needs, one_line, printable
from utils.files import can_go_on

# Under which names MPI's launchers announce a process: its rank, and the number of processes; both on this machine
MPI = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
]


class ProcessError(UserError):
    """Another process of the run has ended, or does not answer."""

    exit_code = 1


class NotFinite(UserError):
    """The gradient is not finite, in all processes at once, and no weight has it yet."""

    exit_code = 1


def start(args, trains=True):
    """Start the group of several processes, and check the flags. Raises UserError.

    RANK, LOCAL_RANK and WORLD_SIZE come from torchrun, accelerate launch or MPI. Refused are flags that do not go
    together, a launcher that announces several processes in another way, and fewer GPUs than processes.
    """
    if "WORLD_SIZE" not in os.environ:
        take_over_mpi()
        refuse_other_launchers()
    here = device()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(f"WORLD_SIZE is set, and {', '.join(missing)} not: start with torchrun, or unset it")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if here.type == "cuda" else "gloo")
        atexit.register(stop)
    if trains:
        check_restarts(args)
        check_flags(args)


def stop():
    """Leave the group, which an engine of vLLM leaves too when it ends."""
    if dist.is_initialized():
        dist.destroy_process_group()


def take_over_mpi():
    """Set the variables of torchrun from those of MPI, where there are any. Raises UserError."""
    for rank_name, size_name, local_rank_name, local_size_name in MPI:
        if size_name in os.environ and local_rank_name in os.environ:
            one_machine = os.environ.get(local_size_name, os.environ[size_name]) == os.environ[size_name]
            if not one_machine and "MASTER_ADDR" not in os.environ:
                raise UserError("MPI starts processes on several machines: set MASTER_ADDR to the one of rank 0")
            os.environ["RANK"] = os.environ.get(rank_name, "0")
            os.environ["LOCAL_RANK"] = os.environ.get(local_rank_name, "0")
            os.environ["WORLD_SIZE"] = os.environ[size_name]
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "29500")


def refuse_other_launchers():
    """Raise UserError where one of several processes would take itself for the only one."""
    if "WORLD_SIZE" in os.environ:
        return
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1:
        raise UserError(f"srun starts {tasks} processes that do not know of each other: start one torchrun a machine")
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ:
        raise UserError("accelerate launch starts one process of several here: add --multi_gpu, also on CPUs")


def device():
    """The device of this process: cuda:LOCAL_RANK, or cpu, as of accelerate launch --cpu. Raises UserError."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if several else 0
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(f"each process takes a GPU; of {torch.cuda.device_count()} there is none for rank {local_rank}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def check_flags(args):
    """Raise UserError for flags that do not go together, or that this number of processes can't follow.

    A class of flags that has a method `check` is asked too.
    """
    check_needs(args)
    for group in type(args).__mro__:
        if "check" in vars(group):
            group.check(args)
    processes = world_size()
    if args.shard and processes == 1:
        raise UserError("--shard takes several processes, and this is one: start them with torchrun, or add --no-shard")
    is_compared = getattr(args, "advantage_mode", "mean") != "raw" or getattr(args, "advantage_normalization", False)
    if args.rollout_buffer_size == 1 and is_compared:
        raise UserError("--rollout-buffer-size 1: what an episode earns is compared with what others do, so take more")
    divisor = getattr(args, "num_generations", 1) * processes
    if args.rollout_buffer_size % divisor:
        takes = f"a multiple of generations x processes, {divisor}"
        raise UserError(f"--rollout-buffer-size takes {takes}, got {args.rollout_buffer_size}")
    if getattr(args, "mini_batch_size", 0) % processes:
        raise UserError(f"--mini-batch-size takes a multiple of {processes} processes, got {args.mini_batch_size}")


def check_restarts(args):
    """Have a run that torchrun starts again go on in its folder, by --resume. Raises UserError where it has no name."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and not (args.output_dir or args.resume):
        raise UserError(
            "torchrun --max-restarts takes --output-dir, in which the run goes on where it is started again"
        )
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if again and not args.resume and os.path.exists(os.path.join(args.output_dir, "config.json")):
        args.overwrite = not can_go_on(Path(args.output_dir))  # it was killed before there was a checkpoint
        args.resume = None if args.overwrite else args.output_dir


def launcher():
    """The words that start a script as this process was started; None: on several machines, which takes more."""
    if world_size() == 1:
        return ["python"]
    own = os.environ.get("LOCAL_WORLD_SIZE", str(world_size()))
    return ["torchrun", "--nproc-per-node", own] if int(own) == world_size() else None


def seconds_to_stop():
    """How long torchrun waits for a process that it has told to end; None where it has not started this one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))


def generator(seed):
    """A random generator of torch, on this process's device: those of the same seed differ by the rank."""
    return torch.Generator(device()).manual_seed(seed + 1_000_003 * rank())


def explained_variance(returns, values, mask):
    """1 - Var(returns - values) / Var(returns) where the mask is 1: 1 of a perfect critic, 0 of a constant one.

    NaN where the mask is nowhere 1, and where all returns are the same but the values are not.
    """
    if not max(mask):
        return torch.tensor(torch.nan)
    _, error_std = mean_std(returns - values, mask)
    _, returns_std = mean_std(returns, mask)
    explained = 1 - (error_std / returns_std.clamp(min=1e-8)) ** 2
    return explained.where((returns_std > 1e-8) | (error_std == 0), torch.nan)


def share(items):
    """This process's part of a list: neighbours, about as many as others have."""
    return items[rank() * len(items) // world_size() : (rank() + 1) * len(items) // world_size()]


def rank():
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main():
    """Whether this is the process that writes and speaks."""
    return rank() == 0


@contextlib.contextmanager
def among_processes():
    """Within it an error of the exchange between the processes becomes a ProcessError, of one line."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessError(f"another process of this run has ended: {one_line(error)}") from error


# sum, mean and max are called by the module's name


def sum(x):
    """The sum of a tensor of one shape over the processes, without its gradient; x itself with one process.

    Raises ProcessError where another process has ended, as all exchange between the processes does.
    """
    if world_size() == 1:
        return x
    summed = x.detach().clone(memory_format=torch.contiguous_format)
    with among_processes():
        dist.all_reduce(summed)
    return summed


def mean(x):
    """The mean of a tensor of one shape over the processes, without its gradient; x itself with one process."""
    return x if world_size() == 1 else sum(x) / world_size()


def max(x):
    """The largest number, an int, in tensors of any shape over all processes; 0 where they are empty."""
    return builtins.max(gather_objects(int(x.max()) if x.numel() else 0))


def masked_mean(x, mask, dim=()):
    """Mean of x where the mask is 1, over all processes, along a dimension or all; 0 where it is nowhere 1.

    It is computed in float64: where x is the same everywhere, that is exactly its mean, and no rounding is left that an
    optimiser would take for a gradient.
    """
    wide, mask = x.double(), mask.double()
    return (sum((wide * mask).sum(dim)) / sum(mask.sum(dim)).clamp(min=1)).to(x.dtype)


def mean_std(x, mask):
    """Mean and standard deviation of x where the mask is 1, as masked_mean."""
    wide = x.double()
    mean = masked_mean(wide, mask)
    return mean.to(x.dtype), masked_mean((wide - mean) ** 2, mask).sqrt().to(x.dtype)


def mean_by_name(numbers):
    """The means of numbers or scalar tensors by name, each over the processes that have it, as floats."""
    here = {name: float(x) for name, x in numbers.items()}
    if world_size() == 1:
        return here
    everywhere = gather_objects(here)
    means = {}
    for name in dict.fromkeys(name for there in everywhere for name in there):
        found = [there[name] for there in everywhere if name in there]
        means[name] = builtins.sum(found) / len(found)
    return means


def gather(x):
    """The tensors of all processes, [R, ...], each with an R of its own, as one, in order of rank."""
    if world_size() == 1:
        return x
    return torch.cat(gather_objects(x.detach().cpu())).to(x.device)


def gather_objects(x):
    """A list of what each process has, in order of rank."""
    if world_size() == 1:
        return [x]
    gathered = [None] * world_size()
    with among_processes():
        dist.all_gather_object(gathered, x)
    return gathered


def decide(act):
    """What act() returns in the main process, in all of them; its UserError is raised in all of them."""
    decision = None
    if is_main():
        try:
            decision = act()
        except UserError as error:
            decision = error
    decision = gather_objects(decision)[0]
    if isinstance(decision, UserError):
        raise decision
    return decision


def average_and_clip_gradients(optimizer, max_norm):
    """Average the gradients of an optimiser's parameters over the processes, and clip their norm; returns the norm.

    Raises NotFinite where that is not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    average_gradients([x for x in parameters if not isinstance(x, DTensor)])  # those of sharded ones are averages
    norm = gradient_norm(parameters)
    if not norm.isfinite():
        raise NotFinite("the gradient is not finite: lower the learning rates (--actor-learning-rate ...)")
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=False if has_parts(parameters) else None)
    return norm


def average_gradients(parameters):
    """Average gradients over the processes, in place. Where only some processes have one, it is 0 in the others."""
    if world_size() == 1 or not parameters:
        return
    here = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=parameters[0].device)
    for parameter, processes in zip(parameters, sum(here).tolist()):
        if processes > 0:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(mean(parameter.grad))


def has_parts(parameters):
    return any(isinstance(x.grad, DTensor) for x in parameters)


def gradient_norm(parameters):
    """The norm of the gradients of all parameters, sharded and whole ones."""
    wholes = [x.grad for x in parameters if x.grad is not None and not isinstance(x.grad, DTensor)]
    norm = torch.nn.utils.get_total_norm(wholes)
    if not has_parts(parameters):
        return norm
    parts = [x.grad.to_local() for x in parameters if isinstance(x.grad, DTensor)]
    square = sum(torch.nn.utils.get_total_norm(parts) ** 2)
    return (square + norm.to(square) ** 2).sqrt()


def say(text):
    """Print a line above the progress bar, on the main process only."""
    if is_main():
        tqdm.write(printable(text))
