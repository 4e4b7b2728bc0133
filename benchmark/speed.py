"""How fast a script samples and learns, and how much of that is the model's own work.

    python -m benchmark.random_lm small
    python -m benchmark.speed small
    python -m benchmark.speed small --script ppo_llm --agents 1
    python -m benchmark.speed small --script ppo_llm --agents 2 --no-merge-adapters
    python -m benchmark.speed small --new-tokens 256 --mixed-precision bf16 --static-cache

Agents that start from a model's folder answer prompts and learn from them in one pass, a few times over; ppo_llm's
adapters are of rank 8 on the attention's four projections. Prints one JSON line: joint samples and new tokens per
second (median iteration), samples per second of the first iteration and of all, the processor's seconds of the whole
training, which say more than the clock's where others use the machine, the share of the time that is not spent
inside a forward pass, a backward pass or an optimiser step, and the share of the positions that models compute which
are no padding. On a GPU also the seconds of an iteration by phase, the
milliseconds of one token of all rows, those that it takes to read the model's weights once at the measured speed of a
copy, and the most memory that was in use.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from types import SimpleNamespace

import datasets
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import ippo_llm
import ppo_llm
from benchmark.peer_speed import model_folder, prompts, reward_func
from utils.cli import UserError
from utils.models import causal_lm


def train_dataset(size, seed):
    return datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts(size)])


TASK = SimpleNamespace(
    train_dataset=train_dataset, formatters=lambda item: item["prompt"], reward_func=reward_func, __name__="speed"
)


def train(flags, output_dir):
    """Train with the flags of the command line; returns the Run. Raises UserError."""
    script = {"ippo_llm": ippo_llm, "ppo_llm": ppo_llm}[flags.script]
    of_script = {"use_separate_critic": flags.critic == "separate"}
    if script is ppo_llm:
        of_script |= {"num_turns": 1, "update_epochs": 1, "lora_rank": 8, "lora_alpha": 16.0}
        of_script |= {"lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}
        of_script["merge_adapters"] = flags.merge_adapters
    same = ("mixed_precision", "dtype", "static_cache", "use_vllm", "vllm_config", "mini_batch_size")
    args = script.Args(
        model=flags.folder,
        num_agents=flags.agents,
        train_size=flags.prompts,
        num_train_epochs=flags.iterations,
        rollout_buffer_size=flags.prompts,
        max_new_tokens=flags.new_tokens,
        micro_batch_size=flags.micro_batch_size or flags.mini_batch_size,
        eval_interval=0,
        save_interval=0,
        output_dir=output_dir,
        **{name: getattr(flags, name) for name in same},
        **of_script,
    )
    return script.main(args, TASK)[1]


def on_gpu(run, flags, model):
    """What is measured on a GPU alone."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    bytes_per_second = 2 * source.numel() / statistics.median(seconds)  # read and written
    is_half = flags.dtype == "bfloat16" or flags.mixed_precision == "bf16"
    weights = sum(x.numel() for x in model.parameters()) * (2 if is_half else 4)  # bytes
    phases = {name: round(spent / flags.iterations, 2) for name, spent in run.totals.items()}
    return {
        "gpu": torch.cuda.get_device_name(),
        "seconds_of_an_iteration": phases,
        "ms_of_a_token": round(1000 * phases["play"] / flags.agents / flags.new_tokens, 2),
        "ms_to_read_the_weights": round(1000 * weights / bytes_per_second, 2),
        "gigabytes_per_second": round(bytes_per_second / 1e9),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


class Stopwatch:
    """Seconds spent in the functions that it is to `watch`; calls within calls count once."""

    def __init__(self):
        self.seconds = 0.0
        self.running = False

    def watch(self, owner, name):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            if self.running:
                return original(*args, **kwargs)
            self.running = True
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.running = False
                self.seconds += time.perf_counter() - start

        setattr(owner, name, watched)


class Positions:
    """How many positions of their rows models compute, and on how many of these stands a token that is needed."""

    def __init__(self):
        self.computed, self.needed = 0, 0

    def watch(self):
        read, forward = causal_lm.read, causal_lm.forward

        def watched_read(model, ids, places):
            columns = torch.arange(1, places.shape[1] + 1, device=places.device)
            lengths = (places * columns).amax(1)  # up to the last place of a row
            self.needed += int(lengths.sum())
            self.computed += len(lengths) * int(lengths.max())
            return read(model, ids, places)

        def watched_forward(model, input_ids, attention_mask=None, cache=None, **options):
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            if cache is None:
                _, mask, _ = causal_lm.read_once(input_ids, mask)
            mask = mask[:, -input_ids.shape[1] :]
            self.needed += int(mask.sum())
            self.computed += mask.numel()
            return forward(model, input_ids, attention_mask, cache, **options)

        causal_lm.read, causal_lm.forward = watched_read, watched_forward


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=model_folder, help="a model's folder")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--script", choices=["ippo_llm", "ppo_llm"], default="ippo_llm")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--mini-batch-size", type=int, default=16, help="episodes of an optimiser step")
    parser.add_argument("--micro-batch-size", type=int, help="episodes of a forward pass; none: of a step")
    parser.add_argument("--no-merge-adapters", dest="merge_adapters", action="store_false", help="in ppo_llm")
    parser.add_argument("--critic", choices=["separate", "head"], default="separate")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--static-cache", action="store_true", help="the scripts' --static-cache")
    parser.add_argument("--use-vllm", action="store_true", help="the scripts' --use-vllm")
    parser.add_argument("--vllm-config", type=json.loads, default={}, help="JSON; needs --use-vllm")
    parser.add_argument("--flops", action="store_true", help="count the operations of products and attention too")
    flags = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(flags.folder)
    inside = Stopwatch()
    for owner, name in ((type(model), "forward"), (type(model.base_model), "forward"), (torch.Tensor, "backward")):
        inside.watch(owner, name)
    inside.watch(torch.optim.AdamW, "step")
    positions = Positions()
    positions.watch()
    counter = FlopCounterMode(display=False)
    start = time.process_time()
    try:
        with tempfile.TemporaryDirectory() as folder, counter if flags.flops else contextlib.nullcontext():
            run = train(flags, folder)
    except UserError as error:
        parser.error(str(error))
    cpu_seconds = time.process_time() - start
    samples_per_second = [row["samples_per_second"] for row in run.rows]
    new_tokens_per_second = [row["new_tokens_per_second"] for row in run.rows]
    result = {name: getattr(flags, name) for name in ("script", "agents", "prompts", "new_tokens", "mixed_precision")}
    result["critic"] = flags.critic
    if flags.script == "ppo_llm":
        result["merge_adapters"] = flags.merge_adapters
    result |= {
        "joint_samples_per_second": round(statistics.median(samples_per_second), 1),
        "joint_new_tokens_per_second": round(statistics.median(new_tokens_per_second), 1),
        "first_iteration_samples_per_second": round(samples_per_second[0], 1),
        "all_iterations_samples_per_second": round(statistics.harmonic_mean(samples_per_second), 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "share_outside_model_calls": round(1 - inside.seconds / sum(run.totals.values()), 4),
        "share_of_positions_without_padding": round(positions.needed / positions.computed, 3),
    }
    if flags.flops:
        samples = flags.prompts * flags.iterations
        result["gflop_per_joint_sample"] = round(counter.get_total_flops() / samples / 1e9, 2)
    if torch.cuda.is_available():
        result |= {"static_cache": flags.static_cache, "use_vllm": flags.use_vllm} | on_gpu(run, flags, model)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
