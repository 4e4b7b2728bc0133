"""Train CoMLRL's own released trainer on our model, prompts, items and rewards, and write a run folder like ours.

    python -m venv peer; . peer/bin/activate           # one environment for iac, maac and magrpo, another for ippo
    pip install torch transformers datasets wandb openai tqdm accelerate matplotlib safetensors pydantic tyro==1.0.17
    pip install --no-deps comlrl==1.4.3                # for ippo comlrl==1.2.6, the last release that has it
    python -m benchmark.peer_comlrl iac --task tldr --seed 1 --output-dir runs/peer_iac_1

Two agents get the prompts that our scripts give them, token for token, about the same items in the same order.
Sampling, learning rates, buffers and mini-batches are as in our scripts; the rest, the value loss's weight among it, is
the peer's default, or --config '{"name": value}'. MAGRPO takes four joint samples of each item, and so a quarter of the
items, in one turn. A row is the joint samples between two updates. Its seconds: `sample` is generate(), `reward` our
task's functions, `learn` what is left of the clock.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import ippo_llm
from benchmark.peer_run import PeerRun, reference_logprob
from utils import models, tasks
from utils.cli import UserError
from utils.models.loading import locate


class Peer:
    """A trainer of the peer's, with our task behind its callbacks; it plays one episode at a time."""

    def __init__(self, flags):
        self.flags, self.done, self.seconds, self.rewards, self.samples = flags, 0, {}, [], []
        self.tokenizer = AutoTokenizer.from_pretrained(flags.model)
        self.reference = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()
        own = {"task": flags.task, "num_agents": flags.num_agents, "num_turns": flags.num_turns, "seed": flags.seed}
        self.args = ippo_llm.Args(**own, num_train_epochs=flags.num_train_epochs, rollout_buffer_size=1)
        self.task = tasks.load_task(None, self.args, default=ippo_llm)
        dataset = self.task.given.train_dataset(flags.train_size, flags.seed)
        items = [item for (item,) in tasks.shuffled_batches(dataset, self.args)]
        config = dict(num_agents=flags.num_agents, num_turns=flags.num_turns, max_new_tokens=flags.max_new_tokens)
        config |= dict(temperature=1.0, top_p=1.0, top_k=0, num_train_epochs=1)  # `items` has all epochs
        if flags.algorithm in ("iac", "ippo"):
            config |= dict(use_separate_critic=flags.critic == "separate")
        if flags.algorithm != "magrpo":
            config |= dict(critic_learning_rate=flags.critic_learning_rate)
        single = {"dtype": torch.float32}  # as ours; else it would be the file's, which is float16
        known = dict(reward_func=self.reward, formatters=[partial(self.ask, agent) for agent in range(2)])
        known |= dict(tokenizer=self.tokenizer, train_dataset=items)
        known["model_config"] = {"model_kwargs": single, "critic_model_kwargs": single}
        if flags.algorithm == "ippo":
            from comlrl.trainers.ippo import IPPOConfig, IPPOTrainer

            config |= dict(rollout_buffer_size=64, mini_batch_size=16, actor_learning_rate=flags.actor_learning_rate)
            self.size = (config | flags.config)["rollout_buffer_size"]  # joint samples between two updates
            self.trainer = IPPOTrainer(model=flags.model, args=IPPOConfig(**config | flags.config), **known)
            actors = self.trainer.actor_models
        else:
            config |= dict(agent_learning_rate=flags.actor_learning_rate, external_prompt_passthrough=True)
            config |= dict(early_termination_threshold=None)  # by default a turn of a reward above -0.2 is the last
            known |= dict(agent_model=flags.model, external_transition=self.transition)
            make = self.magrpo_trainer if flags.algorithm == "magrpo" else self.actor_critic_trainer
            self.trainer = make(config, known)
            self.trainer.verbose, actors = False, self.trainer.agents
        for actor in actors:
            actor.generate = partial(self.timed, "sample", actor.generate)
        if flags.algorithm != "magrpo":
            self.trainer._collect_rollouts = partial(self.collect, self.trainer._collect_rollouts)

    def actor_critic_trainer(self, config, known):
        from comlrl.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer

        self.size = 32
        config |= dict(rollout_buffer_size=self.size * self.flags.num_turns, train_batch_size=16)  # it counts turns
        if self.flags.algorithm == "maac":
            return MAACTrainer(critic_model=self.flags.model, args=MAACConfig(**config | self.flags.config), **known)
        known["critic_model"] = self.flags.model if self.flags.critic == "separate" else None
        return IACTrainer(args=IACConfig(**config | self.flags.config), **known)

    def magrpo_trainer(self, config, known):
        from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer

        self.size, generations = 64, 4
        config |= dict(num_generations=generations, rollout_buffer_size=self.size // generations)  # it counts items
        config |= dict(train_batch_size=16 // generations)
        items = known.pop("train_dataset")
        known["train_dataset"] = items[: len(items) // generations]
        known["model_config"] = known["model_config"]["model_kwargs"]
        trainer = MAGRPOTrainer(args=MAGRPOConfig(**config | self.flags.config), **known)
        trainer._train_step_returns = partial(self.collect_group, trainer._train_step_returns)
        trainer._generate_completions_with_external_prompts = partial(
            self.keep_samples, trainer._generate_completions_with_external_prompts
        )
        return trainer

    def train(self, run):
        self.run, self.start = run, time.perf_counter()
        self.trainer.train()
        if self.rewards:
            self.write_row()

    def timed(self, phase, function, *args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        return result

    def collect_group(self, original, item):
        if len(self.rewards) == self.size:  # and the update is done
            self.write_row()
        original(item)

    def keep_samples(self, original, actor, items, agent_idx, **settings):
        made = original(actor, items, agent_idx=agent_idx, **settings)
        (prompt,) = made["prompt_input_ids"]
        for tokens, length in zip(made["completion_input_ids"][0], made["response_lens"]):
            sample = dict(full_input_ids=torch.cat([prompt, tokens]), prompt_len=len(prompt), response_len=length)
            self.samples.append(SimpleNamespace(agent_idx=agent_idx, **sample))
        return made

    def collect(self, original, item):
        if len(self.rewards) == self.size:
            self.write_row()
        samples = original(item)
        self.samples += samples
        self.rewards.append(self.total)
        return samples

    def ask(self, agent, item):
        if agent == 0:
            self.begin(item)
        return self.prompts()[agent]

    def begin(self, item):
        self.item, self.total = item, 0.0
        self.transcripts = [[] for _ in range(self.flags.num_agents)]  # ids of each agent
        self.env = ippo_llm.TeamEnv(self.task, [item], self.args)
        self.read(self.env.reset())

    def read(self, observations):
        for ids, observed in zip(self.transcripts, observations):
            ids += models.encode(observed[0], ids, self)

    def prompts(self):
        return [self.tokenizer.decode(ids) for ids in self.transcripts]

    def reward(self, first, second):
        rewards = self.timed("reward", self.score, [*first, *second])
        self.total += sum(rewards) / 2
        if self.flags.algorithm == "magrpo":
            self.rewards.append(self.total)
            self.begin(self.item)  # the next joint sample is of this item too, or another begins
        return rewards

    def score(self, answers):
        """Each agent's reward of a turn; what comes next is read then."""
        observations, rewards, _ = self.env.step([{0: answer} for answer in answers])
        for ids, answer in zip(self.transcripts, answers):
            ids += [*self.tokenizer(answer, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        if self.flags.num_turns > 1:  # the peer takes no None from external_transition; this ends the episode, or not
            goes_on = any(observations)
            if goes_on:
                self.read(observations)
            self.trainer.args.early_termination_threshold = None if goes_on else float("-inf")
        return [earned[0] for earned in rewards]

    def transition(self, **_):
        return self.prompts()

    def write_row(self):
        elapsed, spent = time.perf_counter() - self.start, self.seconds
        self.done += len(self.rewards)
        row = {"global_step": self.done, "epoch": self.done / self.flags.train_size}
        row |= {"reward_mean": statistics.fmean(self.rewards), "reward_std": statistics.pstdev(self.rewards)}
        rows = []
        for sample in self.samples:
            ids = sample.full_input_ids[: sample.prompt_len + sample.response_len]
            rows.append((ids, torch.arange(len(ids)) >= sample.prompt_len))
        row["reference_logprob"] = reference_logprob(self.reference, rows)  # not timed
        for agent in range(2):
            lengths = [sample.response_len for sample in self.samples if sample.agent_idx == agent]
            row[f"agent_{agent}/response_length"] = statistics.fmean(lengths)
        row |= {"time/sample": spent["sample"], "time/reward": spent["reward"]}
        row["time/learn"] = elapsed - spent["sample"] - spent["reward"]
        row["samples_per_second"] = len(self.rewards) / elapsed
        row["new_tokens_per_second"] = sum(sample.response_len for sample in self.samples) / elapsed
        self.run.write(row)
        self.rewards, self.samples, self.seconds, self.start = [], [], {}, time.perf_counter()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=["iac", "ippo", "maac", "magrpo"])
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
    if flags.algorithm == "magrpo" and flags.num_turns > 1:
        parser.error("magrpo takes one turn here")
    flags.model = locate(flags.model)
    run = PeerRun("peer_comlrl", flags)
    set_seed(flags.seed)
    try:
        peer = Peer(flags)
    except ImportError as error:
        raise UserError(f"{sys.executable} has not the CoMLRL that {flags.algorithm} takes: {error}") from error
    run.write_config(dataclasses.asdict(peer.trainer.args) | vars(flags) | flags.config, "comlrl")
    peer.train(run)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"peer_comlrl: error: {error}")
