"""Processes that train together, one for each device: which of them this is, and means and sums over all of them."""

import atexit
import contextlib
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from utils.cli import UserError, check_needs, flag_name, one_line, printable

# Under which names MPI's launchers announce a process: its rank, its rank on this machine, the number of processes
MPI = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
]


class ProcessError(UserError):
    """Another process of the run has ended, or does not answer."""

    exit_code = 1


def start():
    """The device of this process, cuda:LOCAL_RANK or cpu. The first call starts the group of several processes.

    RANK, LOCAL_RANK and WORLD_SIZE come from torchrun, accelerate launch or MPI. Raises UserError where a launcher
    announces several processes in another way, and where the machine has fewer GPUs than processes.
    """
    if "WORLD_SIZE" not in os.environ:
        take_over_mpi()
        refuse_other_launchers()
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    device = device_of(int(os.environ.get("LOCAL_RANK", 0)) if several else 0)
    if several and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(stop)
    return device


def stop():
    """Leave the group, which an engine of vLLM leaves too when it ends."""
    if dist.is_initialized():
        dist.destroy_process_group()


def take_over_mpi():
    """Set the variables of torchrun from those of MPI, where there are any."""
    for rank_name, local_rank_name, size_name in MPI:
        if size_name in os.environ:
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


def wants_cpu():
    """Whether accelerate launch --cpu asks for the CPU, also on a machine with GPUs."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"


def device_of(local_rank):
    """The device of a process by its rank on this machine. Raises UserError."""
    if wants_cpu() or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(f"each process takes a GPU; of {torch.cuda.device_count()} there is none for rank {local_rank}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def check_flags(args, multiples=(), needs=None):
    """Raise UserError for flags that have no effect, and for those that this number of processes can't follow.

    `multiples` are the names of flags that take a multiple of the number of processes; `needs`, {name: other}, has
    flags that need another one here.
    """
    check_needs(args, needs)
    processes = world_size()
    if args.shard and processes == 1:
        raise UserError("--shard takes several processes, and this is one: start them with torchrun, or add --no-shard")
    if args.rollout_buffer_size == 1 and getattr(args, "reward_normalization", False):
        mend = "take more, or --no-reward-normalization --no-advantage-normalization"
        raise UserError(f"--rollout-buffer-size 1: a reward less its own mean is 0, and teaches nothing; {mend}")
    for name in multiples:
        if getattr(args, name) % processes:
            takes = f"a multiple of {processes} processes"
            raise UserError(f"{flag_name(name)} takes {takes}, got {getattr(args, name)}")


def check_restarts(args):
    """Have a run that torchrun starts again go on in its folder, by --resume. Raises UserError where it has no name."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and not (args.output_dir or args.resume):
        raise UserError(
            "torchrun --max-restarts takes --output-dir, in which the run goes on where it is started again"
        )
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if again and args.output_dir and os.path.exists(os.path.join(args.output_dir, "config.json")):
        args.resume = args.output_dir
        args.overwrite = False


def seconds_to_stop():
    """How long torchrun waits for a process that it has told to end; None where it has not started this one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))


def generator(seed, device):
    """A random generator of torch of this process's own: those of the same seed differ by the rank."""
    return torch.Generator(device).manual_seed(seed + 1_000_003 * rank())


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


def total(x):
    """The sum of a tensor of one shape over the processes; x itself with one process. Carries no gradient.

    Raises ProcessError where another process has ended, as all exchange between the processes does.
    """
    if world_size() == 1:
        return x
    summed = x.detach().clone(memory_format=torch.contiguous_format)
    with among_processes():
        dist.all_reduce(summed)
    return summed


def mean(x):
    """The mean of a tensor of one shape over the processes; x itself with one process. Carries no gradient."""
    return x if world_size() == 1 else total(x) / world_size()


def mean_by_name(numbers):
    """The means of numbers or scalar tensors by name, each over the processes that have it, as floats."""
    here = {name: float(x) for name, x in numbers.items()}
    if world_size() == 1:
        return here
    everywhere = gather_objects(here)
    means = {}
    for name in dict.fromkeys(name for there in everywhere for name in there):
        found = [there[name] for there in everywhere if name in there]
        means[name] = sum(found) / len(found)
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


def average_gradients(parameters):
    """Average gradients over the processes, in place. Where only some processes have one, it is 0 in the others.

    Those of sharded parameters are averages already.
    """
    if world_size() == 1:
        return
    parameters = [x for x in parameters if not isinstance(x, DTensor)]
    if not parameters:
        return
    here = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=parameters[0].device)
    for parameter, processes in zip(parameters, total(here).tolist()):
        if processes > 0:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(mean(parameter.grad))


def say(text):
    """Print a line above the progress bar, on the main process only."""
    if is_main():
        tqdm.write(printable(text))
