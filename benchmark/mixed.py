"""Sampling for a team: all agents' prompts in one batch of mixed adapters, or agent by agent.

    python -m benchmark.random_lm small
    python -m benchmark.mixed small

Prints, for teams and batches of several sizes, the seconds of each way (medians), and their ratio.
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_llm
from benchmark import speed
from benchmark.peer_speed import model_folder
from utils.adapters import add_adapters, lora_config


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=model_folder, help="a model's folder")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    flags = parser.parse_args()
    args = ppo_llm.Args(max_output_tokens=flags.new_tokens, min_output_tokens=flags.new_tokens, max_model_len=512)
    tokenizer = AutoTokenizer.from_pretrained(flags.folder)
    base = AutoModelForCausalLM.from_pretrained(flags.folder).eval()
    names = [f"agent_{i}_actor" for i in range(4)]
    model = add_adapters(base, lora_config(args, base), names)
    generator = torch.Generator().manual_seed(1)
    print("| agents | prompts each | one batch (s) | agent by agent (s) | times as fast |\n|---|---|---|---|---|")
    for agents in (2, 4):
        for rows in (1, 8, 64):
            prompts = [tokenizer(item["prompt"]).input_ids for item in speed.train_dataset(rows, 0)]
            seconds = {"mixed": [], "single": []}
            for _ in range(flags.repeats + 1):
                start = time.perf_counter()
                adapters = [name for name in names[:agents] for _ in prompts]
                ppo_llm.generate(model, adapters, prompts * agents, args, tokenizer, generator)
                between = time.perf_counter()
                for name in names[:agents]:
                    ppo_llm.generate(model, [name] * rows, prompts, args, tokenizer, generator)
                seconds["mixed"].append(between - start)
                seconds["single"].append(time.perf_counter() - between)
            mixed, single = (statistics.median(times[1:]) for times in seconds.values())  # the first warms up
            print(f"| {agents} | {rows} | {mixed:.2f} | {single:.2f} | {single / mixed:.2f} |", flush=True)


if __name__ == "__main__":
    main()
