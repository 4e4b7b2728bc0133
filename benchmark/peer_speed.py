"""How fast other systems sample and learn, on the work that speed.py gives our scripts.

    python -m benchmark.random_lm small
    PEER/bin/python -m benchmark.peer_speed comlrl_ippo small
    PEER/bin/python -m benchmark.peer_speed trl small --prompts 256 --batch-size 16

PEER is an environment with torch==2.13.0 and, for

    comlrl_ippo, comlrl_iac    comlrl==1.2.6, comlrl==1.4.3 (peer_comlrl.py says how to install them); two agents
    agilerl                    agilerl==2.58.0 datasets peft transformers==5.14.1; one agent, LoRA of rank 8
    trl                        trl==1.12.0; one agent with value, reference and reward models, all in full

Prints one JSON line: joint samples and new tokens per second of all that is sampled and learned, once.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


def model_folder(path):
    """The argument `folder` of a command."""
    if not (Path(path) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{path} is no model's folder; python -m benchmark.random_lm makes one")
    return path


def prompts(size):
    return [f"Write a short story, number {k:04d}, about the sea: " for k in range(size)]


def reward_func(*completions):
    """That the last agent's text is twice as long as the first one's."""
    return [-abs(len(last) / max(len(first), 1) - 2.0) for first, *_, last in zip(*completions, completions[-1])]


def comlrl(algorithm, flags):
    """Two agents of CoMLRL's, updated after every eight joint samples: what to run; its new tokens are in the list."""
    from datasets import Dataset

    tokenizer, lengths = AutoTokenizer.from_pretrained(flags.folder), []
    data = {"tokenizer": tokenizer, "train_dataset": Dataset.from_dict({"prompt": prompts(flags.prompts)})}
    config = dict(num_agents=2, max_new_tokens=flags.new_tokens, num_train_epochs=1, rollout_buffer_size=8)
    config |= dict(temperature=1.0, top_p=1.0, top_k=0, use_separate_critic=True, critic_learning_rate=1e-4)
    if algorithm == "ippo":
        from comlrl.trainers.ippo import IPPOConfig, IPPOTrainer

        args = IPPOConfig(**config, actor_learning_rate=1e-4, mini_batch_size=8)
        trainer = IPPOTrainer(model=flags.folder, reward_func=reward_func, args=args, **data)
    else:
        from comlrl.trainers.actor_critic import IACConfig, IACTrainer

        args = IACConfig(**config, agent_learning_rate=1e-4, num_turns=1, eval_interval=0)
        models = {"agent_model": flags.folder, "critic_model": flags.folder}
        trainer = IACTrainer(**models, reward_func=reward_func, args=args, **data)
    collect = trainer._collect_rollouts

    def counted(item):
        samples = collect(item)
        lengths.extend(sample.response_len for sample in samples)
        return samples

    trainer._collect_rollouts = counted
    return trainer.train, lengths


def agilerl(flags):
    """An agent of AgileRL's that samples, and learns once: what to run; its new tokens are in the list."""
    import agilerl

    agilerl.HAS_LLM_DEPENDENCIES = True  # else it asks for vllm and deepspeed too, which a CPU does not need
    from agilerl.algorithms import LLMPPO
    from peft import LoraConfig

    tokenizer, lengths = AutoTokenizer.from_pretrained(flags.folder), []
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    lora.task_type = "CAUSAL_LM"
    known = dict(model_name=flags.folder, pad_token_id=tokenizer.pad_token_id, pad_token=tokenizer.pad_token)
    known |= dict(batch_size=flags.prompts, micro_batch_size_per_gpu=flags.batch_size, update_epochs=1, device="cpu")
    known |= dict(max_output_tokens=flags.new_tokens, max_model_len=512, hf_generate_chunk_size=flags.prompts, top_k=0)
    agent = LLMPPO(**known, lr_actor=1e-4, lr_critic=1e-4, lora_config=lora)

    def run():
        asked = [dict(tokenizer(text, return_tensors="pt"), text="") for text in prompts(flags.prompts)]
        ids, masks, *_ = agent.get_action(asked)
        lengths.extend(int(mask.sum()) for mask in masks)
        agent.learn((ids, masks, torch.tensor([[length / flags.new_tokens] for length in lengths])))

    return run, lengths


def trl(flags):
    """TRL's trainer, which samples all new tokens: what to run, and how many new tokens these are, in a list."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(flags.folder)
    data = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in prompts(flags.prompts)]})
    size = dict(per_device_train_batch_size=flags.batch_size, local_rollout_forward_batch_size=flags.batch_size)
    size |= dict(gradient_accumulation_steps=1, num_mini_batches=1, num_ppo_epochs=1, total_episodes=flags.prompts)
    off = dict(report_to="none", save_strategy="no", num_sample_generations=0, gradient_checkpointing=False, bf16=False)
    off |= dict(use_cpu=True, missing_eos_penalty=None, stop_token=None, output_dir=tempfile.mkdtemp())
    config = PPOConfig(**size, **off, response_length=flags.new_tokens, temperature=1.0, learning_rate=1e-4)
    kinds = dict(model=AutoModelForCausalLM, ref_model=AutoModelForCausalLM)
    kinds |= dict(reward_model=AutoModelForSequenceClassification, value_model=AutoModelForSequenceClassification)
    models = {
        name: kind.from_pretrained(flags.folder, **({} if kind is AutoModelForCausalLM else {"num_labels": 1}))
        for name, kind in kinds.items()
    }
    data = {"processing_class": tokenizer, "train_dataset": data, "eval_dataset": data}
    return PPOTrainer(args=config, **models, **data).train, [flags.prompts * flags.new_tokens]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["comlrl_ippo", "comlrl_iac", "agilerl", "trl"])
    parser.add_argument("folder", type=model_folder, help="a model's folder")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16, help="samples at once, of agilerl and trl")
    parser.add_argument("--flops", action="store_true", help="count the operations of products and attention too")
    flags = parser.parse_args()
    torch.manual_seed(0)
    counter = FlopCounterMode(display=False)
    try:
        if flags.peer.startswith("comlrl"):
            run, lengths = comlrl(flags.peer.removeprefix("comlrl_"), flags)
        else:
            run, lengths = {"agilerl": agilerl, "trl": trl}[flags.peer](flags)
    except ImportError as error:
        parser.error(f"{sys.executable} has not what {flags.peer} takes: {error}")
    start = time.perf_counter()
    with counter if flags.flops else contextlib.nullcontext():
        run()
    seconds = time.perf_counter() - start
    result = {"peer": flags.peer, "prompts": flags.prompts, "seconds": round(seconds, 1)}
    result |= {"joint_samples_per_second": round(flags.prompts / seconds, 2)}
    if flags.flops:
        result["gflop_per_joint_sample"] = round(counter.get_total_flops() / flags.prompts / 1e9, 2)
    print(json.dumps(result | {"new_tokens_per_second": round(sum(lengths) / seconds, 1)}))


if __name__ == "__main__":
    main()
