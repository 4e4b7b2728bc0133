"""Train AgileRL's LLMPPO or TRL's PPO on our model, prompts and rewards, and write a run folder like ours.

    python -m venv peer; . peer/bin/activate           # one environment for each
    pip install torch==2.13.0 tyro==1.0.17 pydantic peft datasets matplotlib wandb
    pip install agilerl==2.58.0 transformers==5.14.1 openenv==0.4.2 uvicorn websockets     # in one
    pip install trl==1.12.0                                                                # in the other
    python -m benchmark.peer_ppo agilerl --seed 1 --output-dir runs/agilerl_1
    python -m benchmark.peer_ppo trl --seed 1 --output-dir runs/trl_1

AgileRL's own train_llm_rollout plays our environment `guess` with adapters of the same shape as ours. TRL's trainer
fine-tunes an agent, in full, on our task `code` or another of one turn, whose reward stands in the place of a reward
model. The tokens that are read, sampling, the samples between two updates, mini-batches and epochs are as in
ppo_llm.py, as are AgileRL's learning rates; TRL's is that of ippo_llm.py. The rest is the peer's default. TRL is on the
GPU where there is one. A row is an update. Its seconds: `sample` is generate(), `reward` our task's functions, `learn`
what is left of the clock; of AgileRL `learn` is learn() and `sample` what is left.
"""

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

import ippo_llm
from benchmark.peer_run import PeerRun, reference_logprob, single_agent_rewards
from utils import models, tasks
from utils.cli import UserError
from utils.envs import guess
from utils.models.loading import locate
from utils.tasks.items import make_items

MAX_GUESSES = 6  # of a game, as in ppo_llm.py
EPOCHS = 2  # passes over the samples of an update
SINGLE = {"dtype": torch.float32}  # as ours; else it would be the file's, which is float16, or bfloat16


class Peer:
    """What all of them have in common: a row for each update."""

    def __init__(self, flags):
        self.flags, self.done, self.seconds = flags, 0, {"sample": 0.0, "reward": 0.0, "learn": 0.0}
        self.samples_per_item = 1
        self.tokenizer = AutoTokenizer.from_pretrained(flags.model)
        device = "cuda" if flags.system == "trl" and torch.cuda.is_available() else "cpu"
        self.reference = AutoModelForCausalLM.from_pretrained(flags.model, **SINGLE).eval().to(device)

    def timed(self, phase, function, *args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds[phase] += time.perf_counter() - start
        return result

    def write_row(self, rewards, rows, rest):
        """Write an update: the samples' rewards and rows of reference_logprob; `rest` is the phase not timed."""
        elapsed = time.perf_counter() - self.start
        self.seconds[rest] = elapsed - sum(self.seconds.values())
        self.done += len(rewards)
        row = {"global_step": self.done, "epoch": self.done / self.samples_per_item / self.flags.train_size}
        row |= {"reward_mean": statistics.fmean(rewards), "reward_std": statistics.pstdev(rewards)}
        row["reference_logprob"] = reference_logprob(self.reference, rows)  # not timed
        row |= {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        row["samples_per_second"] = len(rewards) / elapsed
        row["new_tokens_per_second"] = sum(int(mask.sum()) for _, mask in rows) / elapsed
        self.run.write(row)
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.start = time.perf_counter()

    def train(self, run):
        self.run, self.start = run, time.perf_counter()
        self.train_all()


class AgileRL(Peer):
    def __init__(self, flags):
        super().__init__(flags)
        import agilerl

        agilerl.HAS_LLM_DEPENDENCIES = True  # else it asks for vllm and deepspeed too, which a CPU does not need
        from agilerl.algorithms import LLMPPO
        from peft import LoraConfig

        rate = flags.learning_rate
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        batch, mini_batch = flags.rollout_buffer_size, flags.mini_batch_size
        config = dict(batch_size=batch, mini_batch_size=mini_batch, micro_batch_size_per_gpu=mini_batch)
        config |= dict(update_epochs=EPOCHS, lr_actor=rate, lr_critic=rate, temperature=1.0, top_p=1.0, top_k=0)
        config |= dict(max_output_tokens=flags.max_new_tokens, max_model_len=512)
        config |= dict(hf_generate_chunk_size=batch, seed=flags.seed)
        config |= dict(use_liger_loss=False, gradient_checkpointing=False)  # for GPUs, both
        self.args = config | vars(flags)
        pad = dict(pad_token_id=self.tokenizer.pad_token_id, pad_token=self.tokenizer.pad_token)
        known = dict(model_name=flags.model, model_config=dict(SINGLE), lora_config=lora, device="cpu")
        self.agent = LLMPPO(**config, **pad, **known)
        self.agent.learn = partial(self.learn, self.agent.learn)

    def learn(self, original, experiences, **more):
        ids, masks, rewards = experiences  # of each episode: [1, L], [1, L - 1], [turns]
        self.timed("learn", original, experiences, **more)
        rows = [(row[0], torch.cat([torch.tensor([False]), mask[0].bool()])) for row, mask in zip(ids, masks)]
        self.write_row(rewards.sum(1).tolist(), rows, "sample")

    def train_all(self):
        from agilerl.llm_envs import RolloutHarness
        from agilerl.training.llm import train_llm_rollout

        play = partial(RolloutHarness.local, tokenizer=self.tokenizer, max_turns=MAX_GUESSES, max_model_len=512)
        budget = dict(max_steps=10**9, evaluation_interval=10**9, verbose=False)  # it counts turns
        self.agent.set_reference_policy = self.stop_when_done
        try:
            train_llm_rollout([self.agent], MAX_GUESSES, lambda: play(guess.Env()), **budget)
        except Enough:
            pass

    def stop_when_done(self, epochs):
        """Called before each rollout."""
        if self.done >= self.flags.train_size * self.flags.num_train_epochs:
            raise Enough


class Enough(Exception):
    """All games are played."""


class TRL(Peer):
    def __init__(self, flags):
        super().__init__(flags)
        from datasets import Dataset
        from trl.experimental.ppo import PPOConfig, PPOTrainer

        self.args_of_task = ippo_llm.Args(task=flags.task or "code", dataset=flags.dataset, num_agents=1)
        self.task = tasks.load_task(None, self.args_of_task, default=ippo_llm)
        made = make_items(self.task.given, self.task.name, flags.dataset, "train", flags.train_size, flags.seed)
        items = list(made)
        prompts = [models.encode(self.task.formatters(item, 0), [], self) for item in items]
        self.items = {tuple(ids): item for ids, item in zip(prompts, items)}
        batch, has_gpu = flags.rollout_buffer_size, torch.cuda.is_available()
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id == self.tokenizer.eos_token_id:
            raise UserError(f"--model {flags.model} pads with its end token, which TRL takes out of prompts too")
        config = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=1)  # of a rollout
        config |= dict(num_mini_batches=batch // flags.mini_batch_size, local_rollout_forward_batch_size=batch)
        config |= dict(num_ppo_epochs=EPOCHS, total_episodes=flags.train_size * flags.num_train_epochs)
        config |= dict(response_length=flags.max_new_tokens, temperature=1.0)
        config |= dict(stop_token="eos", missing_eos_penalty=None)
        config |= dict(learning_rate=flags.learning_rate, seed=flags.seed, num_sample_generations=0)
        config |= dict(use_cpu=not has_gpu, bf16=has_gpu)
        self.args = config | vars(flags)
        self.folder = tempfile.TemporaryDirectory()
        off = dict(report_to="none", save_strategy="no", gradient_checkpointing=False)
        policy, reference = (AutoModelForCausalLM.from_pretrained(flags.model, **SINGLE) for _ in range(2))
        value = AutoModelForSequenceClassification.from_pretrained(flags.model, num_labels=1, **SINGLE)
        data = Dataset.from_dict({"input_ids": prompts})
        self.trainer = PPOTrainer(
            args=PPOConfig(**config, **off, output_dir=self.folder.name),
            processing_class=self.tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=RewardModel(partial(self.timed, "reward", self.score)),
            value_model=value,
            train_dataset=data,
            eval_dataset=data,
        )
        policy.generate = partial(self.generate, policy.generate)
        self.trainer.log = self.log

    def generate(self, original, input_ids, **settings):
        self.prompt_length = input_ids.shape[1]
        return self.timed("sample", original, input_ids=input_ids, **settings)

    def score(self, ids, mask):
        """The rewards of prompts and responses [B, L]."""
        start = self.prompt_length
        rows = [(row[:start][kept[:start]], row[start:][kept[start:]]) for row, kept in zip(ids, mask.bool())]
        items = [self.items[tuple(prompt.tolist())] for prompt, _ in rows]
        answers = [self.tokenizer.decode(response, skip_special_tokens=True) for _, response in rows]
        self.rewards = single_agent_rewards(ippo_llm, self.task, items, answers, self.args_of_task)
        self.rows = [(torch.cat(row).cpu(), torch.arange(sum(map(len, row))) >= len(row[0])) for row in rows]
        return torch.tensor(self.rewards, device=ids.device)

    def log(self, *_, **__):
        """Called after each update."""
        self.write_row(self.rewards, self.rows, "learn")

    def train_all(self):
        self.trainer.train()


class RewardModel(nn.Module):
    """A function of ids and mask [B, L] as TRL asks a reward model for its scores."""

    base_model_prefix = "body"

    def __init__(self, score):
        super().__init__()
        self.body, self.score = Body(score), nn.Identity()


class Body(nn.Module):
    def __init__(self, score):
        super().__init__()
        self.rewards = score

    def forward(self, input_ids, attention_mask, **_):
        rewards = self.rewards(input_ids, attention_mask)
        return SimpleNamespace(hidden_states=[rewards[:, None, None].expand(*input_ids.shape, 1)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=["agilerl", "trl"])
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--env", choices=["guess"], help="what agilerl is trained on")
    parser.add_argument("--task", help="what trl is trained on, of one turn; none: code")
    parser.add_argument("--dataset", help="of a task that makes several, such as reasoning")
    parser.add_argument("--max-new-tokens", type=int, help="none: 8 of agilerl's answers, 48 of trl's")
    parser.add_argument("--rollout-buffer-size", type=int, default=64, help="samples between two updates")
    parser.add_argument("--mini-batch-size", type=int, default=16, help="samples of an optimiser step")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in --output-dir")
    parser.add_argument("--train-size", type=int, default=1536, help="games, or items")
    parser.add_argument("--learning-rate", type=float, help="none: 3e-3 of agilerl's adapters, 5e-4 of trl's models")
    parser.add_argument("--num-train-epochs", type=int, default=1)
    parser.add_argument("--model", default="utils/tiny_lm")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    if (flags.env, flags.task)[flags.system == "agilerl"]:
        parser.error("agilerl plays --env guess, and trl is trained on a --task")
    if flags.train_size < flags.rollout_buffer_size:
        parser.error(f"--train-size takes at least the samples of an update, {flags.rollout_buffer_size}")
    if flags.dataset and not flags.task:
        parser.error("--dataset is of a --task")
    if flags.mini_batch_size < 1 or flags.rollout_buffer_size % flags.mini_batch_size:
        parser.error("--rollout-buffer-size takes a multiple of --mini-batch-size")
    flags.max_new_tokens = flags.max_new_tokens or {"agilerl": 8, "trl": 48}[flags.system]
    flags.learning_rate = flags.learning_rate or {"agilerl": 3e-3, "trl": 5e-4}[flags.system]
    flags.model = locate(flags.model)
    run = PeerRun("peer_ppo", flags)
    set_seed(flags.seed)
    try:
        peer = {"agilerl": AgileRL, "trl": TRL}[flags.system](flags)
    except ImportError as error:
        raise UserError(f"{sys.executable} has not what {flags.system} takes: {error}") from error
    run.write_config(peer.args, flags.system)
    peer.train(run)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"peer_ppo: error: {error}")
