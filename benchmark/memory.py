"""Peak resident memory of a training run: one agent, a team on one shared base, and a team that is fine-tuned in full.

    python -m benchmark.random_lm large --layers 8 --width 512 --vocabulary 8192
    python -m benchmark.memory large --agents 4

Those that are fine-tuned in full have a critic model each. Each run is a process of its own, which trains for two
updates of 16 joint samples; prints a row for each.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import ippo_llm
import ppo_llm
from benchmark import speed
from benchmark.peer_speed import model_folder


def reward_func(*completions):
    return [float(sum(map(len, texts))) for texts in zip(*completions)]


TASK = SimpleNamespace(**(vars(speed.TASK) | {"reward_func": reward_func}))


def train(script, agents, folder, output_dir):
    flags = {
        "model": folder,
        "num_agents": agents,
        "train_size": 32,
        "num_train_epochs": 1,
        "rollout_buffer_size": 16,
        "mini_batch_size": 4,
        "micro_batch_size": 4,
        "max_new_tokens": 64,
        "eval_interval": 0,
        "use_separate_critic": True,
        "output_dir": output_dir,
    }
    if script == "ppo_llm":
        ppo_llm.main(ppo_llm.Args(**flags, num_turns=1, lora_rank=8), TASK)
    else:
        ippo_llm.main(ippo_llm.Args(**flags), TASK)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=model_folder, help="a model's folder")
    parser.add_argument("--agents", type=int, default=4, help="agents in the team (default %(default)s)")
    parser.add_argument("--one", nargs=2, metavar=("SCRIPT", "AGENTS"), help="train, and print the bytes, of one run")
    flags = parser.parse_args()
    if flags.one:
        script, agents = flags.one
        with tempfile.TemporaryDirectory() as output_dir:
            train(script, int(agents), flags.folder, output_dir)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    print("| run | peak resident memory | times the first |\n|---|---|---|")
    first = None
    for script, agents in (("ppo_llm", 1), ("ppo_llm", flags.agents), ("ippo_llm", flags.agents)):
        command = [sys.executable, "-m", "benchmark.memory", flags.folder, "--one", script, str(agents)]
        child = subprocess.run(command, capture_output=True, text=True)
        if child.returncode:
            parser.error(f"{script}, {agents} agents: {(child.stderr.splitlines() or ['it was killed'])[-1]}")
        peak = int(child.stdout.split()[-1])
        first = first or peak
        name = f"`{script}.py`, {agents} agent{'s' * (agents > 1)}" + ", in full, critics too" * (script == "ippo_llm")
        print(f"| {name} | {peak / 2**20:.0f} MiB | {peak / first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
