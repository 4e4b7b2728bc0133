"""How fast a script samples and learns, and how much of that is the model's own work.

    python -m benchmark.random_lm small
    python -m benchmark.speed small
    python -m benchmark.speed small --script ppo_llm --agents 1

Agents that start from a model's folder answer prompts and learn from them in one pass, a few times over; ppo_llm's
adapters are of rank 8 on the attention's four projections. Prints one JSON line: joint samples and new tokens per
second (median iteration), samples per second of the first iteration and of all, and the share of the time that is not
spent inside a forward pass, a backward pass or an optimiser step.
"""

import argparse
import json
import statistics
import tempfile
import time
from types import SimpleNamespace

import datasets
import torch
from transformers import AutoModelForCausalLM

import ippo_llm
import ppo_llm
from benchmark.peer_speed import model_folder, prompts, reward_func
from utils.cli import UserError


def train_dataset(size, seed):
    return datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts(size)])


TASK = SimpleNamespace(
    train_dataset=train_dataset, formatters=lambda item: item["prompt"], reward_func=reward_func, __name__="speed"
)


class Stopwatch:
    """Seconds spent in the functions that it was told to `watch`; calls within calls count once."""

    def __init__(self):
        self.seconds, self.running = 0.0, False

    def watch(self, owner, name):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            if self.running:
                return original(*args, **kwargs)
            self.running, start = True, time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.running, self.seconds = False, self.seconds + time.perf_counter() - start

        setattr(owner, name, watched)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=model_folder, help="a model's folder")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--script", choices=["ippo_llm", "ppo_llm"], default="ippo_llm")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="ppo_llm's transcripts in an optimiser step")
    parser.add_argument("--micro-batch-size", type=int, help="ppo_llm's transcripts in a forward pass")
    parser.add_argument("--critic", choices=["separate", "head"], default="separate", help="of ippo_llm's agents")
    flags = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(flags.folder)
    inside = Stopwatch()
    for owner, name in ((type(model), "forward"), (type(model.base_model), "forward"), (torch.Tensor, "backward")):
        inside.watch(owner, name)
    inside.watch(torch.optim.AdamW, "step")
    same = {"num_agents": flags.agents, "train_size": flags.prompts, "num_train_epochs": flags.iterations}
    same |= {"rollout_buffer_size": flags.prompts}
    try:
        with tempfile.TemporaryDirectory() as folder:
            if flags.script == "ppo_llm":
                own = {"model": flags.folder, "max_output_tokens": flags.new_tokens, "evaluation_interval": 0}
                own |= {"batch_size": flags.batch_size, "micro_batch_size_per_gpu": flags.micro_batch_size}
                own |= {"update_epochs": 1, "lora_rank": 8, "lora_alpha": 16.0}
                own |= {"lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}
                _, run = ppo_llm.main(ppo_llm.Args(**same, **own, output_dir=folder), TASK)
            else:
                own = {"model": (flags.folder,), "max_new_tokens": flags.new_tokens, "eval_interval": 0}
                own |= {"use_separate_critic": flags.critic == "separate"}
                _, run = ippo_llm.main(ippo_llm.Args(**same, **own, output_dir=folder), TASK)
    except UserError as error:
        parser.error(str(error))
    speeds = {key: [row[key] for row in run.rows] for key in ("samples_per_second", "new_tokens_per_second")}
    spent = sum(seconds for phase, seconds in run.totals.items())
    result = {name: getattr(flags, name) for name in ("script", "agents", "prompts", "new_tokens")}
    result |= {"critic": flags.critic} if flags.script == "ippo_llm" else {}
    result |= {f"joint_{key}": round(statistics.median(values), 1) for key, values in speeds.items()}
    result |= {"first_iteration_samples_per_second": round(speeds["samples_per_second"][0], 1)}
    result |= {"all_iterations_samples_per_second": round(statistics.harmonic_mean(speeds["samples_per_second"]), 1)}
    result |= {"share_outside_model_calls": round(1 - inside.seconds / spent, 4)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
