"""Train TRL's GRPOTrainer on our model, prompts and rewards, and write a run folder like ours.

    python -m venv peer; . peer/bin/activate
    pip install torch==2.13.0 tyro==1.0.17 pydantic peft datasets matplotlib wandb trl==1.12.0 reasoning-gym==0.1.25
    python -m benchmark.peer_grpo --task reasoning --dataset syllogism --output-dir runs/grpo

One agent with adapters of the same shape as ours, on a task of one turn. The tokens that are read, sampling, groups,
the samples of an update (one step of the optimiser), Adam's settings and a learning rate that stays are as in
`magrpo_llm.py --num-agents 1 --no-anneal-lr`; the rest is TRL's default, a loss over tokens among it, and no KL
penalty. A row is an update. Its seconds: `sample` is generate(), `reward` our task's functions, `learn` what is left of
the clock.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

import magrpo_llm
from benchmark.peer_ppo import SINGLE, Peer
from benchmark.peer_run import PeerRun, single_agent_rewards
from utils import models, tasks
from utils.cli import UserError
from utils.models.loading import locate
from utils.tasks.items import make_items


class GRPO(Peer):
    def __init__(self, flags):
        super().__init__(flags)
        self.samples_per_item = flags.num_generations
        from datasets import Dataset
        from peft import LoraConfig, get_peft_model
        from trl import GRPOConfig, GRPOTrainer

        self.args_of_task = magrpo_llm.Args(task=flags.task, dataset=flags.dataset, num_agents=1)
        self.task = tasks.load_task(None, self.args_of_task, default=magrpo_llm)
        self.items = list(
            make_items(self.task.given, self.task.name, flags.dataset, "train", flags.train_size, flags.seed)
        )
        chats = [self.task.formatters(item, 0) for item in self.items]
        self.prompts = [models.encode(chat, [], self) for chat in chats]
        theirs = self.tokenizer.apply_chat_template(chats[0], add_generation_prompt=True)["input_ids"]
        if theirs != self.prompts[0]:
            raise UserError(f"--model {flags.model} reads other tokens with TRL than with ours")
        batch, micro_batch, has_gpu = flags.rollout_buffer_size, flags.micro_batch_size, torch.cuda.is_available()
        config = dict(num_generations=flags.num_generations, max_completion_length=flags.max_new_tokens)
        config |= dict(per_device_train_batch_size=micro_batch, gradient_accumulation_steps=batch // micro_batch)
        config |= dict(max_steps=flags.train_size * flags.num_generations // batch, temperature=flags.temperature)
        config |= dict(learning_rate=flags.learning_rate, lr_scheduler_type="constant", adam_beta2=0.95)
        config |= dict(max_grad_norm=0.5, seed=flags.seed, use_cpu=not has_gpu, bf16=has_gpu)
        self.args = config | vars(flags)
        self.folder = tempfile.TemporaryDirectory()
        off = dict(report_to="none", save_strategy="no", gradient_checkpointing=False, logging_strategy="no")
        lora = LoraConfig(r=flags.lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        policy = get_peft_model(AutoModelForCausalLM.from_pretrained(flags.model, **SINGLE), lora)
        policy.generate = partial(self.timed, "sample", policy.generate)
        self.trainer = GRPOTrainer(
            model=policy,
            args=GRPOConfig(**config, **off, output_dir=self.folder.name),
            processing_class=self.tokenizer,
            reward_funcs=self.reward,
            train_dataset=Dataset.from_dict({"prompt": chats, "index": range(len(chats))}),
            callbacks=[AfterUpdate(self)],
        )

    def reward(self, completion_ids, index, **_):
        """The rewards of lists of sampled ids, for the items of these numbers."""
        answers = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids]
        items = [self.items[k] for k in index]
        arguments = (magrpo_llm, self.task, items, answers, self.args_of_task)
        self.rewards = self.timed("reward", single_agent_rewards, *arguments)
        whole = [torch.tensor(self.prompts[k] + ids) for k, ids in zip(index, completion_ids)]
        self.rows = [(row, torch.arange(len(row)) >= len(self.prompts[k])) for k, row in zip(index, whole)]
        return self.rewards

    def train_all(self):
        self.trainer.train()


class AfterUpdate(TrainerCallback):
    def __init__(self, peer):
        self.peer = peer

    def on_step_end(self, *_, **__):
        self.peer.write_row(self.peer.rewards, self.peer.rows, "learn")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--task", help="of one turn; none: the default task of magrpo_llm.py")
    parser.add_argument("--dataset", help="of a task that makes several, such as reasoning")
    parser.add_argument("--max-new-tokens", type=int, default=72)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--num-generations", type=int, default=4, help="samples of an item")
    parser.add_argument("--rollout-buffer-size", type=int, default=64, help="samples of an update")
    parser.add_argument("--micro-batch-size", type=int, default=16, help="samples of a forward pass")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in --output-dir")
    parser.add_argument("--train-size", type=int, default=1536, help="items")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--model", default="utils/tiny_lm")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    for name, size in [("micro_batch_size", flags.micro_batch_size), ("num_generations", flags.num_generations)]:
        if size < 1 or flags.rollout_buffer_size % size:
            parser.error(f"--rollout-buffer-size takes a multiple of --{name.replace('_', '-')}")
    if flags.train_size * flags.num_generations < flags.rollout_buffer_size:
        parser.error("--train-size takes at least the items of an update")
    flags.system, flags.num_train_epochs, flags.model = "trl", 1, locate(flags.model)
    run = PeerRun("peer_grpo", flags)
    set_seed(flags.seed)
    try:
        peer = GRPO(flags)
    except ImportError as error:
        raise UserError(f"{sys.executable} has not what TRL takes: {error}") from error
    run.write_config(peer.args, "trl")
    peer.train(run)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"peer_grpo: error: {error}")
