"""Independent PPO (IPPO) for N language models that answer together and are scored together, in one file.

Agent i with history h and token a_t ascends, with its own actor theta_i and its own critic phi_i,

    J(theta_i) = E[ log pi(a_t|h_t) * sum_l (gamma lambda)^l delta_{t+l} + beta H(pi) ],
    delta_t    = r_t + gamma V(h_{t+1}) - V(h_t),

on-policy: no importance ratio, no clipping of the policy. The other agents are a part of its environment.

    python ippo_llm.py --num-agents 2 --use-separate-critic
    accelerate launch --num_processes 2 ippo_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --mixed-precision bf16

Simplified: one turn; models stay in eval mode (no dropout: a token is as likely when it is learned from as when it was
sampled). Added to CoMLRL's code, which documents but does not do them: GAE over tokens, gamma, lambda, the entropy
bonus, ppo_epochs. Added to its page: many prompts at a time, a KL penalty, turns as actions, rewards on held-out items.
Source: IPPO (arXiv 2011.09533), GAE (arXiv 1506.02438), CoMLRL's page on Multi-Agent PPO.
"""

import copy
import re
import sys
from dataclasses import dataclass
from typing import Literal

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TopKLogitsWarper, TopPLogitsWarper

from utils.checkpoint import check_models, load_critic, load_model, load_tokenizer, save_agents
from utils.cli import UserError, command_line, require
from utils.made_text import posts
from utils.prompts import encode_prompts, end_tokens, format_prompts
from utils.run import Run, run_folder
from utils.stats import clip_gradients, explained_variance, masked_mean, standardise
from utils.tasks import batches, extra_metrics, load_dataset, load_task, score
from utils.words import STOPWORDS, TRANSITIONS


@dataclass
class RunArgs:
    """The run: what is trained on what, and where it is written."""

    seed: int = 1  # seed of everything random: the same seed gives the same run
    task: str = "tldr"  # `tldr` (the task in this script) or a task FILE.py of your own
    output_dir: str | None = None  # folder of the run; none: runs/<script>__<task>__<seed>__<time>
    overwrite: bool = False  # replace the run that is already in --output-dir
    train_size: int = 1536  # items in the training set, passed to the task
    eval_size: int = 64  # held-out items, passed to the task
    eval_interval: int = 12  # updates between evaluations on the held-out items; 0: never
    save_interval: int = 0  # updates between copies of the agents in <run>/checkpoints; 0: only at the end
    num_train_epochs: int = 3  # passes over the training set
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "llm-teams"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team or user
    wandb_run_name: str | None = None  # Weights & Biases run name; none: the run folder's name
    wandb_tags: tuple[str, ...] = ()  # Weights & Biases tags


@dataclass
class ModelArgs:
    """The agents and their models."""

    model: str = "utils/tiny_lm"  # folder or hub name of the model that every agent starts from
    num_agents: int = 2  # agents in the team, each with its own copy of the model
    num_turns: int = 1  # turns of an episode; this script plays one
    use_separate_critic: bool = False  # give each agent a critic model of its own, instead of a value head on its actor
    critic_model_name_or_path: str | None = None  # model that separate critics start from; none: --model
    critic_value_head_hidden_dim: int | None = None  # hidden units of a separate critic's value head; none: linear
    value_head_hidden_dim: int | None = None  # hidden units of the value head on an actor; none: linear
    dtype: Literal["float32", "bfloat16"] = "float32"  # data type of the models' weights
    mixed_precision: Literal["no", "bf16"] = "no"  # autocast to this type in the forward pass
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"  # attention kernel
    trust_remote_code: bool = False  # run code that comes with a hub model


@dataclass
class SamplingArgs:
    """Sampling: how a rollout is made."""

    rollout_buffer_size: int = 64  # joint samples (one answer of every agent) between two updates, over all processes
    num_generations: int = 1  # joint samples of each item in a rollout
    per_device_train_batch_size: int | None = None  # items answered at once on a device; none: the whole rollout
    max_new_tokens: int = 72  # longest response in tokens; a longer one is cut and counts as finished
    do_sample: bool = True  # sample; --no-do-sample: take the likeliest token
    temperature: float = 1.0  # the logits are divided by it
    top_p: float = 1.0  # sample from the likeliest tokens whose probabilities sum up to it
    top_k: int = 0  # sample from so many likeliest tokens; 0: from all


@dataclass
class AlgorithmArgs:
    """The algorithm: rewards, advantages and losses."""

    gamma: float = 1.0  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    action_granularity: Literal["token", "turn"] = "token"  # an action is one token, or one whole response
    kl_coef: float = 0.03  # penalty on the reward for each nat a token is likelier than under the initial model
    reward_normalization: bool = True  # standardise rewards over the rollout
    reward_norm_eps: float = 1e-3  # leave rewards as they are where their standard deviation is below this
    advantage_normalization: bool = True  # standardise advantages over the rollout
    entropy_coef: float = 0.0  # beta, the weight of the entropy bonus
    value_loss_coef: float = 0.02  # weight of the value loss
    value_clip_range: float | None = 0.2  # a value's loss is clipped this far from its old value; none: not at all
    ppo_epochs: int = 1  # passes over a rollout
    mini_batch_size: int = 16  # joint samples in an optimiser step, over all processes


@dataclass
class OptimizerArgs:
    """The optimisers (AdamW), one for each model."""

    actor_learning_rate: float = 5e-4  # learning rate of the actors
    critic_learning_rate: float = 1e-3  # learning rate of separate critics and of value heads
    anneal_lr: bool = True  # lower the learning rates to 0, linearly over the second half of the run
    weight_decay: float = 0.0  # AdamW's weight decay
    adam_beta1: float = 0.9  # decay of the first moment
    adam_beta2: float = 0.999  # decay of the second moment
    adam_epsilon: float = 1e-8  # term added to the denominator
    max_grad_norm: float = 0.5  # gradients are clipped to this norm, each optimiser's by itself


@dataclass
class Args(RunArgs, ModelArgs, SamplingArgs, AlgorithmArgs, OptimizerArgs):
    """All flags."""


def check(args, processes):
    """Raise UserError for a flag out of range, before anything is loaded or written."""
    inf, share = float("inf"), args.num_generations * processes
    counts = "num_agents rollout_buffer_size mini_batch_size num_generations ppo_epochs num_train_epochs max_new_tokens"
    sizes = "per_device_train_batch_size value_head_hidden_dim critic_value_head_hidden_dim"
    weights = "kl_coef entropy_coef value_loss_coef reward_norm_eps weight_decay"
    for flags, holds, takes in [
        (counts, lambda x: x >= 1, "1 or more"),
        ("train_size eval_size", lambda x: x >= processes, f"{processes} or more"),
        ("eval_interval save_interval top_k seed", lambda x: x >= 0, "0 or more"),
        (sizes, lambda x: x is None or x >= 1, "1 or more, or none"),
        ("num_turns", lambda x: x == 1, "1, for this script plays one turn"),
        ("gamma gae_lambda", lambda x: 0 <= x <= 1, "a number from 0 to 1"),
        ("adam_beta1 adam_beta2", lambda x: 0 <= x < 1, "a number from 0 to below 1"),
        ("top_p", lambda x: 0 < x <= 1, "a number above 0, at most 1"),
        ("temperature", lambda x: 0 < x < inf, "a number above 0; for the likeliest tokens there is --no-do-sample"),
        ("max_grad_norm adam_epsilon", lambda x: 0 < x < inf, "a number above 0"),
        ("value_clip_range", lambda x: x is None or 0 < x < inf, "a number above 0, or none"),
        (f"{weights} actor_learning_rate critic_learning_rate", lambda x: 0 <= x < inf, "a number of 0 or more"),
        ("rollout_buffer_size", lambda x: x % share == 0, f"a multiple of generations x processes, {share}"),
        ("mini_batch_size", lambda x: x % processes == 0, f"a multiple of the {processes} processes"),
    ]:
        require(args, flags, holds, takes)


# --- The default task: edit it in place, or copy it to a file of your own for --task FILE.py --------------------------
# Writer 1 summarises a post briefly, each further writer at about twice the length of the one before; none sees what
# another writes. A single writer's text is held against the post. Rule and numbers: arXiv 2508.04652.

MIN_WORDS, MAX_WORDS = 8, 256


def train_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"train {seed}"))


def eval_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"eval {seed}"))


def formatters(item, agent):
    """Agent 0, 1, 2, ... is asked for 16, 32, 64, ... words."""
    return [{"role": "user", "content": f"{item['post']}\n\nSummarise this post in about {16 * 2**agent} words."}]


def reward_func(*completions, items):
    """Joint reward of N lists of B texts: the mean of `pair_reward` over neighbours in the chain, B floats."""
    chain = [*completions] if len(completions) > 1 else [*completions, [item["post"] for item in items]]
    pairs = [[pair_reward(*pair) for pair in zip(shorter, longer)] for shorter, longer in zip(chain, chain[1:])]
    return [sum(rewards) / len(rewards) for rewards in zip(*pairs)]


def pair_reward(short, long):
    """Points from 0 to 3 for two texts about one thing, the second longer and richer; each level opens the next."""
    if not all(MIN_WORDS <= len(text.split()) <= MAX_WORDS for text in (short, long)):
        return 0.0
    ratio = len(long) / len(short)
    length_points = min(1.0, (ratio - 1.1) / (1.6 - 1.1), (5.0 - ratio) / (5.0 - 3.2))
    if length_points < 0:
        return 0.5
    words = [set(re.findall(r"\w+", text.lower())) for text in (short, long)]
    unique_points = 0.5 * min(1.0, (len(words[1]) / max(1, len(words[0])) - 1.3) / (2.0 - 1.3))
    if unique_points < 0:
        return 0.5 + length_points
    found = sum(bool(re.search(rf"\b({phrases})\b", long.lower())) for phrases in TRANSITIONS.values())
    transitions = min(1.0, 0.4 + 0.05 * (found - 1)) if found else 0.0
    content = [text_words - STOPWORDS for text_words in words]
    overlap = len(content[0] & content[1]) / max(1, len(content[0] | content[1]))  # Jaccard index
    return 0.5 + length_points + unique_points + 0.4 * transitions + 0.6 * overlap


# --- The agent --------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """B responses of one agent: P prompt tokens, left-padded, then L response tokens, right-padded, EOS included.

    An action is a token, or (K = 1) the whole response, valued at the last prompt token.
    """

    prompt_ids: torch.Tensor  # [B, P]
    prompt_mask: torch.Tensor  # [B, P]
    response_ids: torch.Tensor  # [B, L]
    mask: torch.Tensor  # [B, L] 1 on sampled tokens, up to and including the first EOS
    logprobs: torch.Tensor  # [B, L] log pi(a_t|h_t), of the logits divided by the temperature
    values: torch.Tensor | None = None  # [B, K] V(h_t); K = L or 1
    action_mask: torch.Tensor | None = None  # [B, K]
    advantages: torch.Tensor | None = None  # [B, K]
    returns: torch.Tensor | None = None  # [B, K] the critic's targets
    rewards: torch.Tensor | None = None  # [B] as reward_func gave them
    texts: list | None = None  # B responses

    def select(self, rows):
        """The given rows as a mini-batch, trimmed to its longest prompt and its longest response."""
        P, L = int(self.prompt_mask[rows].sum(1).max()), int(self.mask[rows].sum(1).max())
        tensors = {name: x[rows] for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        cut = {name: x[:, -P:] if "prompt" in name else x[:, :L] if x.dim() > 1 else x for name, x in tensors.items()}
        return Rollout(**cut)


class Agent(nn.Module):
    """An actor with its critic, which is a model of its own or a head on the actor, and their optimisers."""

    def __init__(self, args, model, critic=None):
        super().__init__()
        self.actor, self.critic = copy.deepcopy(model), copy.deepcopy(critic)
        self.requires_grad_(True)
        hidden_dim = args.critic_value_head_hidden_dim if critic else args.value_head_hidden_dim
        width = (critic or model).config.get_text_config().hidden_size
        layers = [nn.Linear(width, hidden_dim), nn.Tanh()] if hidden_dim else []
        self.value_head = nn.Sequential(*layers, nn.Linear(hidden_dim or width, 1)).to(model.device)
        nn.init.zeros_(self.value_head[-1].weight)  # values start at 0, the mean of standardised rewards
        nn.init.zeros_(self.value_head[-1].bias)
        valued = [*self.value_head.parameters()] + ([*self.critic.parameters()] if critic else [])
        groups = [{"params": [*self.actor.parameters()], "lr": args.actor_learning_rate}]
        groups += [{"params": valued, "lr": args.critic_learning_rate}]
        adam = dict(betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon, weight_decay=args.weight_decay)
        self.optimizers = [torch.optim.AdamW(g, **adam) for g in ([groups[:1], groups[1:]] if critic else [groups])]
        self.skipped = 0  # mini-batches running whose gradient was not finite

    def values(self, hidden):
        """[..., D] hidden states to [...] values."""
        return self.value_head(hidden.float()).squeeze(-1).float()


def choose(logits, args, generator):
    """Next tokens [B] from logits [B, V], already divided by the temperature."""
    if not args.do_sample:
        return logits.argmax(-1)
    if args.top_k:
        logits = TopKLogitsWarper(args.top_k)(None, logits)
    if args.top_p < 1:
        logits = TopPLogitsWarper(args.top_p)(None, logits)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


@torch.no_grad()
def sample(agent, tokenizer, prompts, args, generator):
    """Let an agent answer B prompts (strings) together: a Rollout, with the values of a critic that is a head.

    Only rows that still run are computed. Raises UserError where a prompt leaves the model no room for the response.
    """
    actor, device, B, L = agent.actor, agent.actor.device, len(prompts), args.max_new_tokens
    prompt_ids, prompt_mask = encode_prompts(prompts, tokenizer, actor, args.max_new_tokens)
    ends = torch.tensor(end_tokens(actor, tokenizer), device=device)
    outputs = {"use_cache": True, "logits_to_keep": 1, "output_hidden_states": agent.critic is None}
    response_ids = torch.full((B, L), tokenizer.pad_token_id, device=device)
    mask, logprobs, values = (torch.zeros(B, L, device=device) for _ in range(3))
    for running in torch.arange(B, device=device).split((args.per_device_train_batch_size or B) * args.num_generations):
        inputs, attention, cache = prompt_ids[running], prompt_mask[running], None
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        for t in range(L):
            out = actor(inputs, attention_mask=attention, position_ids=positions, past_key_values=cache, **outputs)
            logits = out.logits[:, -1].float() / args.temperature
            tokens = choose(logits, args, generator)
            response_ids[running, t], mask[running, t] = tokens, 1.0
            logprobs[running, t] = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
            if agent.critic is None:
                values[running, t] = agent.values(out.hidden_states[-1][:, -1])
            alive = ~torch.isin(tokens, ends)
            cache, inputs, positions = out.past_key_values, tokens[:, None], positions[:, -1:] + 1
            attention = torch.cat([attention, attention.new_ones(len(attention), 1)], 1)
            if not alive.all():
                running, inputs, positions, attention = (x[alive] for x in (running, inputs, positions, attention))
                if len(running) == 0:
                    break
                cache.batch_select_indices(alive.nonzero().squeeze(1))
    L = int(mask.sum(1).max())
    values = values[:, :L] if agent.critic is None else None
    texts = tokenizer.batch_decode(response_ids, skip_special_tokens=True)
    return Rollout(prompt_ids, prompt_mask, response_ids[:, :L], mask[:, :L], logprobs[:, :L], values, texts=texts)


def inputs_of(batch):
    """What a model reads to predict every response token: all tokens but the last, with masks and positions."""
    attention = torch.cat([batch.prompt_mask, batch.mask.long()], 1)[:, :-1]
    ids = torch.cat([batch.prompt_ids, batch.response_ids], 1)[:, :-1]
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": attention, "position_ids": positions, "use_cache": False}


def evaluate_policy(actor, batch, temperature):
    """log pi(a_t|h_t) and the entropy of pi(.|h_t) in nats, each [B, L], and the actor's hidden states [B, L, D]."""
    L = batch.mask.shape[1]
    out = actor(**inputs_of(batch), logits_to_keep=L, output_hidden_states=True)
    log_pi = (out.logits.float() / temperature).log_softmax(-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    return log_pi.gather(-1, batch.response_ids[..., None]).squeeze(-1), entropy, out.hidden_states[-1][:, -L:]


def evaluate_critic(agent, batch):
    """V(h_t) [B, L] of a separate critic, read at the positions whose logits predict a_t."""
    return agent.values(agent.critic(**inputs_of(batch)).last_hidden_state[:, -batch.mask.shape[1] :])


# --- Advantages and losses --------------------------------------------------------------------------------------------


def gae(rewards, values, mask, gamma, gae_lambda):
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) of actions, all [B, L]; a mask's row is 1s, then 0s.

    A_t = sum_l (gamma lambda)^l delta_{t+l} with delta_t = r_t + gamma V_{t+1} - V_t and V = 0 after the last action.
    Returns (advantages, returns), with returns = A + V the critic's targets; 0 where the mask is 0.
    """
    values = values * mask
    deltas = (rewards + gamma * nn.functional.pad(values[:, 1:], (0, 1)) - values) * mask
    advantages, following = torch.zeros_like(deltas), torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        following = advantages[:, t] = deltas[:, t] + gamma * gae_lambda * following
    return advantages, advantages + values


@torch.no_grad()
def estimate_advantages(agent, reference, rollout, rewards, args, accelerator):
    """Give a rollout its values, advantages and returns, from rewards [B]; returns metrics.

    A response's reward lands on its last token, and every token pays kl_coef * (log pi - log pi_ref).
    """
    mask, rows = rollout.mask, torch.arange(len(rewards), device=rewards.device)
    reference_logprobs, values = torch.zeros_like(mask), torch.zeros_like(mask)
    for part in rows.split(args.mini_batch_size):
        batch, L = rollout.select(part), int(mask[part].sum(1).max())
        with accelerator.autocast():
            reference_logprobs[part, :L] = evaluate_policy(reference, batch, args.temperature)[0]
            values[part, :L] = evaluate_critic(agent, batch) if agent.critic else batch.values
    if args.reward_normalization:
        rewards = standardise(rewards, torch.ones_like(rewards), accelerator, args.reward_norm_eps)
    log_ratio = (rollout.logprobs - reference_logprobs) * mask
    token_rewards = -args.kl_coef * log_ratio
    token_rewards[rows, mask.sum(1).long() - 1] += rewards
    if args.action_granularity == "turn":  # the response's reward, and the value at the last prompt token
        token_rewards, values, mask = token_rewards.sum(1, keepdim=True), values[:, :1], mask[:, :1]
    advantages, returns = gae(token_rewards, values, mask, args.gamma, args.gae_lambda)
    rollout.values, rollout.action_mask, rollout.advantages, rollout.returns = values, mask, advantages, returns
    if args.advantage_normalization:
        rollout.advantages = standardise(advantages, mask, accelerator)
    return {
        "kl": masked_mean(log_ratio, rollout.mask, accelerator),
        "reference_logprob": masked_mean(reference_logprobs, rollout.mask, accelerator),
        "explained_variance": explained_variance(returns, values, mask),
        "response_length": rollout.mask.sum(1).mean(),
    }


def losses(agent, batch, args, accelerator):
    """The loss of a mini-batch and its parts, scalars: means over actions (entropy and approx_kl: over tokens)."""
    logprobs, entropy, hidden = evaluate_policy(agent.actor, batch, args.temperature)
    values = evaluate_critic(agent, batch) if agent.critic else agent.values(hidden)
    log_ratio = (logprobs - batch.logprobs).detach()
    approx_kl = masked_mean(log_ratio.exp() - 1 - log_ratio, batch.mask, accelerator)
    entropy = masked_mean(entropy, batch.mask, accelerator)
    if args.action_granularity == "turn":  # log pi of a response is the sum over its tokens
        logprobs, values = (logprobs * batch.mask).sum(1, keepdim=True), values[:, :1]
    policy_loss = -masked_mean(logprobs * batch.advantages, batch.action_mask, accelerator)
    value_error = (values - batch.returns) ** 2
    if args.value_clip_range is not None:
        near = batch.values + (values - batch.values).clamp(-args.value_clip_range, args.value_clip_range)
        value_error = torch.max(value_error, (near - batch.returns) ** 2)
    value_loss = masked_mean(value_error, batch.action_mask, accelerator)
    loss = policy_loss - args.entropy_coef * entropy + args.value_loss_coef * value_loss
    return {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": approx_kl,
    }


def update(agent, rollout, args, accelerator, generator):
    """Learn from a rollout; returns metrics, means over the mini-batches.

    A mini-batch whose gradient is not finite changes nothing. Raises UserError after three such running.
    """
    history = []
    for _ in range(args.ppo_epochs):
        order = torch.randperm(len(rollout.mask), generator=generator, device=generator.device)
        for rows in order.split(args.mini_batch_size // accelerator.num_processes):
            with accelerator.autocast():
                metrics = losses(agent, rollout.select(rows), args, accelerator)
            accelerator.backward(metrics.pop("loss"))
            norms = [clip_gradients(optimizer, args.max_grad_norm, accelerator) for optimizer in agent.optimizers]
            finite = torch.stack(norms).isfinite().all().float()
            for optimizer in agent.optimizers:
                if finite:
                    optimizer.step()
                optimizer.zero_grad()
            agent.skipped = 0 if finite else agent.skipped + 1
            if agent.skipped == 3:
                raise UserError("three gradients running were not finite: lower --actor-learning-rate or --temperature")
            if not finite:
                accelerator.print("a gradient was not finite: its mini-batch is skipped")
            history.append(metrics | {"grad_norm": norms[0], "skipped": 1 - finite})
    return {name: torch.stack([metrics[name].detach() for metrics in history]).mean() for name in history[0]}


def main(args, task=None, model=None, tokenizer=None):
    """Train a team; returns its agents and its Run. Raises UserError for what the user can mend.

    `task` (any object with a task's names), `model` (loaded; it is copied) and `tokenizer` replace what the flags name.
    """
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    device, rank, processes = accelerator.device, accelerator.process_index, accelerator.num_processes
    check(args, processes)
    task = load_task(task or args.task, sys.modules[__name__], args.num_agents)
    folder = run_folder(args, "ippo_llm")
    check_models(args, model)
    items_per_update = args.rollout_buffer_size // args.num_generations
    train_items = load_dataset(task, "train_dataset", args.train_size, args.seed, items_per_update)
    held_out = [*load_dataset(task, "eval_dataset", args.eval_size, args.seed)] if args.eval_interval else []
    updates = args.num_train_epochs * len(train_items) // items_per_update

    set_seed(args.seed)
    tokenizer = tokenizer or load_tokenizer(args)
    reference = load_model(args, model).to(device)  # the frozen initial policy
    critic = load_critic(args, reference, tokenizer).to(device) if args.use_separate_critic else None
    agents = [Agent(args, reference, critic) for _ in range(args.num_agents)]
    generator = torch.Generator(device).manual_seed(args.seed + 1_000_003 * rank)

    def play(items, generator, time):
        """Every agent answers the items, then the team is scored: N rollouts, and their processed rewards [N, B]."""
        with time("sample"), accelerator.autocast():
            prompts = [format_prompts(task, items, i, tokenizer) for i in range(args.num_agents)]
            rollouts = [sample(agent, tokenizer, texts, args, generator) for agent, texts in zip(agents, prompts)]
        with time("reward"):
            given, processed = score(task, items, prompts, [rollout.texts for rollout in rollouts])
            for rollout, rewards in zip(rollouts, given):
                rollout.rewards = torch.tensor(rewards, device=device)
        return rollouts, torch.tensor(processed, device=device)

    rate = (lambda step: min(1.0, 2.0 * (1.0 - step / updates))) if args.anneal_lr else (lambda step: 1.0)
    schedules = [LambdaLR(optimizer, rate) for agent in agents for optimizer in agent.optimizers]
    with Run(folder, args, updates, lambda path: save_agents(path, agents, tokenizer), accelerator) as run:
        data = batches(train_items, items_per_update, args.num_train_epochs, args.seed)
        for step, items in enumerate(run.progress(data), 1):
            # 1. Every agent answers, and the team is scored.
            items = [item for item in items[rank::processes] for _ in range(args.num_generations)]
            rollouts, rewards = play(items, generator, run.time)
            joint = accelerator.gather(torch.stack([rollout.rewards for rollout in rollouts], 1)).mean(1)

            # 2. Each agent learns alone.
            metrics = []
            for agent, rollout, reward in zip(agents, rollouts, rewards):
                with run.time("evaluate"):
                    metrics.append(estimate_advantages(agent, reference, rollout, reward, args, accelerator))
                with run.time("update"):
                    metrics[-1] |= update(agent, rollout, args, accelerator, generator)
            for schedule in schedules:
                schedule.step()

            # 3. Metrics, held-out items, samples.
            row = {"reward_mean": joint.mean(), "reward_std": joint.std(correction=0)}
            row |= {name: sum(m.pop(name) for m in metrics) / len(agents) for name in ("kl", "reference_logprob")}
            row |= {f"agent_{i}/{name}": x for i, m in enumerate(metrics) for name, x in m.items()}
            row |= extra_metrics(task, rollouts)
            row["new_tokens"] = sum(rollout.mask.sum() for rollout in rollouts) * processes
            if held_out and (step % args.eval_interval == 0 or step in (1, updates)):
                same = torch.Generator(device).manual_seed(args.seed + rank)  # the same noise at every evaluation
                team, _ = play(held_out[rank::processes], same, lambda _: run.time("held-out"))
                row["eval/reward_mean"] = torch.stack([rollout.rewards for rollout in team]).mean()
            row = {k: accelerator.reduce(torch.as_tensor(x, device=device), "mean").item() for k, x in row.items()}
            done = {"global_step": step * args.rollout_buffer_size, "epoch": step * items_per_update / len(train_items)}
            run.log(done | row, items, rollouts)
    return agents, run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
