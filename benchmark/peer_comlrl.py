"""Train CoMLRL's own released trainer on our model, prompts, items and rewards, and write a run folder like ours.

    python -m venv peer; . peer/bin/activate           # one environment for iac, another for ippo
    pip install torch transformers datasets wandb openai tqdm accelerate matplotlib safetensors pydantic tyro==1.0.17
    pip install --no-deps comlrl==1.4.3                # iac; for ippo comlrl==1.2.6, the last release that has it
    python -m benchmark.peer_comlrl iac --task tldr --seed 1 --output-dir runs/peer_iac_1

Two agents get the prompts that our scripts give them, token for token, about the same items in the same order.
Sampling, learning rates, buffers and mini-batches are as in our scripts; the rest, the value loss's weight among it, is
the peer's default, or --config '{"name": value}'. A row is the joint samples between two updates. Its seconds: `sample`
is generate(), `reward` our task's functions, `learn` what is left of the clock.
"""

import argparse
import csv
import dataclasses
import importlib.metadata
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from utils.cli import UserError
from utils.files import in_columns, lock, write_whole, writing
from utils.models import locate
from utils.run import git_commit, versions
from utils.tasks import batches, load_task
from utils.tasks.episodes import Episodes


class Peer:
    """A trainer of the peer's, with our task behind its callbacks; it plays one episode at a time."""

    def __init__(self, flags):
        self.flags, self.done, self.seconds, self.rewards, self.samples = flags, 0, {}, [], []
        self.tokenizer = AutoTokenizer.from_pretrained(flags.model)
        self.reference = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()
        self.task = load_task(flags.task, flags.num_agents, flags.num_turns)
        dataset = self.task.train_dataset(flags.train_size, flags.seed)
        items = [item for (item,) in batches(dataset, 1, flags.num_train_epochs, flags.seed)]
        config = dict(num_agents=flags.num_agents, num_turns=flags.num_turns, max_new_tokens=flags.max_new_tokens)
        config |= dict(temperature=1.0, top_p=1.0, top_k=0, num_train_epochs=1)  # `items` has all epochs
        config |= dict(use_separate_critic=flags.critic == "separate", critic_learning_rate=flags.critic_learning_rate)
        single = {"dtype": torch.float32}  # as ours; else it would be the file's, which is float16
        known = dict(reward_func=self.reward, formatters=[partial(self.ask, agent) for agent in range(2)])
        known |= dict(tokenizer=self.tokenizer, train_dataset=items)
        known["model_config"] = {"model_kwargs": single, "critic_model_kwargs": single}
        if flags.algorithm == "iac":
            from comlrl.trainers.actor_critic import IACConfig, IACTrainer

            self.size = 32  # joint samples between two updates; the peer counts turns
            config |= dict(rollout_buffer_size=self.size * flags.num_turns, train_batch_size=16)
            config |= dict(agent_learning_rate=flags.actor_learning_rate, external_prompt_passthrough=True)
            config |= dict(early_termination_threshold=None)  # by default a turn of a reward above -0.2 is the last
            known |= dict(args=IACConfig(**config | flags.config), external_transition=self.transition)
            critic = flags.model if flags.critic == "separate" else None
            self.trainer = IACTrainer(agent_model=flags.model, critic_model=critic, **known)
            self.trainer.verbose, actors = False, self.trainer.agents
        else:
            from comlrl.trainers.ippo import IPPOConfig, IPPOTrainer

            self.size = 64
            config |= dict(rollout_buffer_size=64, mini_batch_size=16, actor_learning_rate=flags.actor_learning_rate)
            self.trainer = IPPOTrainer(model=flags.model, args=IPPOConfig(**config | flags.config), **known)
            actors = self.trainer.actor_models
        for actor in actors:
            actor.generate = partial(self.timed, "sample", actor.generate)
        self.trainer._collect_rollouts = partial(self.collect, self.trainer._collect_rollouts)

    def train(self):
        self.start = time.perf_counter()
        self.trainer.train()
        if self.rewards:
            self.write_row()

    def timed(self, phase, function, *args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        return result

    def collect(self, original, item):
        if len(self.rewards) == self.size:  # and the update is done
            self.write_row()
        samples = original(item)
        self.samples += samples
        self.rewards.append(self.total)
        return samples

    def ask(self, agent, item):
        if agent == 0:  # an episode begins
            self.episode = Episodes(self.task, [item], self.flags.num_agents, self.flags.num_turns)
            self.total = 0.0
        return self.prompts()[agent][0]

    def prompts(self):
        return [self.episode.prompts(agent, [0], self.tokenizer) for agent in range(2)]

    def reward(self, first, second):
        rewards, processed = self.timed("reward", self.score, [first, second])
        self.total += sum(value for (value,) in rewards) / 2
        return [value for (value,) in processed]

    def score(self, responses):
        """Score a turn, then ask for the next prompts: the rewards, and what is learned from."""
        scored = self.episode.reward_func([0], self.prompts(), responses)
        num_turns = self.flags.num_turns
        if num_turns > 1:  # the peer takes no None from external_transition; this ends the episode, or not
            turn = len(self.episode.response_history[0][0])
            prompts = self.episode.external_transition(0) if turn < num_turns else None
            if prompts is not None:
                self.episode.add_prompts(0, prompts)
            self.trainer.args.early_termination_threshold = float("-inf") if prompts is None else None
        return scored

    def transition(self, **_):
        return [prompt for (prompt,) in self.prompts()]

    def write_row(self):
        elapsed, spent = time.perf_counter() - self.start, self.seconds
        self.done += len(self.rewards)
        row = {"global_step": self.done, "epoch": self.done / self.flags.train_size}
        row |= {"reward_mean": statistics.fmean(self.rewards), "reward_std": statistics.pstdev(self.rewards)}
        row["reference_logprob"] = self.reference_logprob()
        for agent in range(2):
            lengths = [sample.response_len for sample in self.samples if sample.agent_idx == agent]
            row[f"agent_{agent}/response_length"] = statistics.fmean(lengths)
        row |= {"time/sample": spent["sample"], "time/reward": spent["reward"]}
        row["time/learn"] = elapsed - spent["sample"] - spent["reward"]
        row["samples_per_second"] = len(self.rewards) / elapsed
        row["new_tokens_per_second"] = sum(sample.response_len for sample in self.samples) / elapsed
        with open(self.flags.output_dir / "metrics.csv", "a", newline="") as file:
            csv.writer(file).writerows([[*row]] * (self.done == len(self.rewards)) + [in_columns(row, row)])
        print(f"{self.done} samples: reward {row['reward_mean']:.3f}, {len(self.rewards) / elapsed:.1f}/s", flush=True)
        self.rewards, self.samples, self.seconds, self.start = [], [], {}, time.perf_counter()

    @torch.no_grad()
    def reference_logprob(self):
        """The mean log-probability of the row's new tokens under the initial model; not timed."""
        found = []
        for sample in self.samples:
            ids = sample.full_input_ids[: sample.prompt_len + sample.response_len]
            logits = self.reference(ids[None], logits_to_keep=sample.response_len + 1).logits[0, :-1]
            found.append(logits.log_softmax(-1).gather(1, ids[sample.prompt_len :, None]))
        return float(torch.cat(found).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=["iac", "ippo"])
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--critic", choices=["separate", "head"], default="head")
    parser.add_argument("--config", type=json.loads, default={}, help="more of the peer's own configuration, as JSON")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in --output-dir")
    known = dict(task="tldr", seed=1, model="utils/tiny_lm", train_size=1536, num_train_epochs=3, max_new_tokens=72)
    known |= dict(num_turns=1, actor_learning_rate=5e-4, critic_learning_rate=1e-3)
    for name, value in known.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.set_defaults(num_agents=2)
    flags = parser.parse_args()
    if not isinstance(flags.config, dict):
        parser.error("--config takes a JSON object")
    flags.model = locate(flags.model)
    metrics = flags.output_dir / "metrics.csv"
    if metrics.exists() and not flags.overwrite:
        sys.exit(f"peer_comlrl: --output-dir takes a folder without a run in it; {flags.output_dir} has one")
    with writing(flags.output_dir):
        flags.output_dir.mkdir(parents=True, exist_ok=True)
        held = lock(flags.output_dir)  # until the end
        metrics.unlink(missing_ok=True)
    set_seed(flags.seed)
    try:
        peer = Peer(flags)
    except ImportError as error:
        raise UserError(f"{sys.executable} has not the CoMLRL that {flags.algorithm} takes: {error}") from error
    args = dataclasses.asdict(peer.trainer.args) | vars(flags) | flags.config | {"output_dir": str(flags.output_dir)}
    config = {
        "command": ["benchmark/peer_comlrl.py", *sys.argv[1:]],
        "args": args,
        "versions": versions(),
        "git_commit": git_commit(),
    }
    config["versions"]["comlrl"] = importlib.metadata.version("comlrl")
    write_whole(flags.output_dir / "config.json", json.dumps(config, indent=2) + "\n")
    peer.train()
    held.close()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"peer_comlrl: error: {error}")
