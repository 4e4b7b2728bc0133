"""Memory of each of two processes that train an agent and its critic: with whole models, and with --shard.

    python -m benchmark.random_lm large --layers 8 --width 512 --vocabulary 8192
    python -m benchmark.sharding large

Both runs are on the CPU, two updates of 16 joint samples. Prints a row for each kind of tensor that a process holds
between updates, gradients as they are before a step, and for the most memory that it ever had. For that glibc is told
to give freed blocks of 64 KiB and more back: by itself it keeps most, and the peak says little of what was in use.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile

from torch.optim.optimizer import register_optimizer_step_pre_hook

import ippo_llm
from benchmark.memory import TASK
from benchmark.peer_speed import model_folder
from utils import distributed

KINDS = ("weights", "gradients", "moments of AdamW", "peak resident memory")


def num_bytes(tensors):
    """Of what this process holds of these tensors."""
    count = 0
    for x in tensors:
        local = x.to_local() if hasattr(x, "to_local") else x
        count += local.nbytes
    return count


def train(folder, shard):
    """Two updates in one of the processes: its bytes, of each of KINDS."""
    gradients = {}  # by optimiser

    def count_gradients(optimizer, *_):
        parameters = [x for group in optimizer.param_groups for x in group["params"]]
        gradients[id(optimizer)] = num_bytes([x.grad for x in parameters if x.grad is not None])

    register_optimizer_step_pre_hook(count_gradients)
    with tempfile.TemporaryDirectory() as output_dir:
        args = ippo_llm.Args(
            model=(folder,),
            num_agents=1,
            use_separate_critic=True,
            shard=shard,
            train_size=32,
            num_train_epochs=1,
            rollout_buffer_size=16,
            mini_batch_size=4,
            micro_batch_size=2,
            max_new_tokens=64,
            eval_interval=0,
            output_dir=output_dir,
        )
        (agent,), _ = ippo_llm.main(args, TASK)
    weights = []
    for model in (agent.reference.model, agent.actor.model, agent.critic.model, agent.value_head):
        weights += model.parameters()
    moments = []
    for optimizer in agent.optimizers:
        for state in optimizer.state.values():
            moments += [state["exp_avg"], state["exp_avg_sq"]]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [num_bytes(weights), sum(gradients.values()), num_bytes(moments), peak]


def measure(folder, *flags):
    """The bytes of each of KINDS, of the process that has the most, in two processes."""
    launcher = "torch.distributed.run --standalone --nproc-per-node 2 -m benchmark.sharding".split()
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", *launcher, folder, "--one", *flags]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        raise SystemExit(f"a process failed: {child.stderr[-2000:]}")
    return json.loads(child.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=model_folder, help="a model's folder")
    parser.add_argument("--one", action="store_true", help="be one of the processes, and print the bytes")
    parser.add_argument("--shard", action="store_true", help="with --one: share out the models")
    flags = parser.parse_args()
    if flags.one:
        processes = distributed.gather_objects(train(flags.folder, flags.shard))
        distributed.say(json.dumps([max(counts) for counts in zip(*processes)]))
        return
    print("| each of two processes | whole models | `--shard` | share |\n|---|---|---|---|")
    rows = zip(KINDS, measure(flags.folder), measure(flags.folder, "--shard"))
    for kind, whole, sharded in rows:
        print(f"| {kind} | {whole / 2**20:.1f} MiB | {sharded / 2**20:.1f} MiB | {sharded / whole:.3f} |")


if __name__ == "__main__":
    main()
