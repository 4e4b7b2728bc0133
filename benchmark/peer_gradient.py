"""Compare the gradient of magrpo_llm.py with that of TRL's GRPOTrainer, on the samples of TRL's first update.

    python -m benchmark.peer_gradient    # in the environment of benchmark.peer_grpo

One agent on the default task, all weights in float32. TRL is told to sum its loss over the tokens of an answer and to
take the mean over answers (loss_type="luspo"), and not to divide advantages, so that both have one loss; its ratio is 1
in the first update. Printed is the norm of the gradients' difference, in parts of the gradient's norm.
"""

import argparse
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

import magrpo_llm
from benchmark.peer_run import single_agent_rewards
from utils import distributed, models, tasks
from utils.cli import UserError
from utils.models.loading import locate


class KeepGradient(TrainerCallback):
    def on_pre_optimizer_step(self, *_, model, **__):
        self.gradient = gradient_of(model)


def gradient_of(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).cpu()  # TRL's has no GPU


def gradient_of_trl(model, chats, score, args):
    """The gradient of TRL's first update, and its samples: an item's number, sampled ids and the reward of each."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    samples, keep = [], KeepGradient()

    def reward(completion_ids, index, **_):
        rewards = score(completion_ids, index)
        samples.extend(zip(index, completion_ids, rewards))
        return rewards

    with tempfile.TemporaryDirectory() as output_dir:
        config = dict(num_generations=args.num_generations, max_completion_length=args.max_new_tokens, max_steps=1)
        config |= dict(per_device_train_batch_size=args.rollout_buffer_size, seed=args.seed, use_cpu=True, bf16=False)
        config |= dict(loss_type="luspo", scale_rewards="none", beta=0.0, max_grad_norm=0.0)
        config |= dict(report_to="none", save_strategy="no", gradient_checkpointing=False, output_dir=output_dir)
        data = Dataset.from_dict({"prompt": chats, "index": range(len(chats))})
        trainer = GRPOTrainer(model, reward, args=GRPOConfig(**config), train_dataset=data, callbacks=[keep])
        trainer.train()
    return keep.gradient, samples


def gradient_of_ours(agent, prompts, samples, args):
    """The gradient of `learn` of magrpo_llm.py on these samples."""
    transcripts = []
    for k, ids, reward in samples:
        transcript = magrpo_llm.Transcript()
        transcript.extend(prompts[k])
        transcript.extend(ids, turn=1)
        transcript.rewards[-1] = reward
        transcripts.append(transcript)
    gradients = []
    agent.optimizer.register_step_pre_hook(lambda *_: gradients.append(gradient_of(agent.actor.model)))
    rollout = magrpo_llm.Rollout(**models.pad_right(transcripts, agent))
    magrpo_llm.learn(agent, rollout, args, distributed.generator(args.seed))
    return gradients[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="utils/tiny_lm")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    sizes = {"rollout_buffer_size": 32, "mini_batch_size": 32, "train_size": 32}
    others = {"num_agents": 1, "kl_coef": 0.0, "max_grad_norm": 1e9, "mixed_precision": "no"}  # no clip, no bfloat16
    args = magrpo_llm.Args(model=(flags.model,), seed=flags.seed, **sizes, **others)
    (initial,) = models.load(args)
    agent = magrpo_llm.Agent(0, initial, 1, args)
    task = tasks.load_task(None, args, default=magrpo_llm)
    items = list(task.given.train_dataset(args.train_size, args.seed))
    chats = [task.formatters(item, 0) for item in items]

    def score(completion_ids, index):
        answers = [agent.tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids]
        return single_agent_rewards(magrpo_llm, task, [items[k] for k in index], answers, args)

    model = AutoModelForCausalLM.from_pretrained(locate(flags.model), dtype=torch.float32)
    try:
        theirs, samples = gradient_of_trl(model, chats, score, args)
    except ImportError as error:
        raise UserError(f"{sys.executable} has not what TRL takes: {error}") from error
    ours = gradient_of_ours(agent, [models.encode(chat, [], agent) for chat in chats], samples, args)
    difference = (ours - theirs).norm() / theirs.norm()
    rewards = {reward for *_, reward in samples}
    print(f"{len(samples)} samples, {len(rewards)} different rewards, gradient {theirs.norm():.4g}: {difference:.2g}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"peer_gradient: error: {error}")
