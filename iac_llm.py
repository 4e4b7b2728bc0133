"""Independent Actor-Critic (IAC) for N language models that answer together and are scored together, in one file.

Agent i with history h and action a_t ascends, with its own actor theta_i and its own critic phi_i,

    J(theta_i) = E[ log pi(a_t|h_t) * delta_t + beta H(pi) ],
    delta_t    = r_t + gamma V(h_{t+1}) - V(h_t),

on-policy: no importance ratio, no clipping of the policy. Its critic's target is r_t + gamma V(h_{t+1}), detached. The
other agents are a part of its environment.

    python iac_llm.py --num-agents 2 --use-separate-critic
    accelerate launch --num_processes 2 iac_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --mixed-precision bf16

Simplified: models stay in eval mode (no dropout: a token is as likely when it is learned from as when it was sampled).
Added to CoMLRL's code, which documents but does not do them: the entropy bonus, ac_epochs, gamma, tokens as actions.
Added to its page: many prompts at a time, several turns, a KL penalty, turns as actions (the default), held-out items.
The default task, prompts and reward, is utils/tasks/tldr.py.
Source: CoMLRL's page on Multi-Agent Actor-Critic; temporal differences: Sutton (1988), Machine Learning 3, 9-44.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TopKLogitsWarper, TopPLogitsWarper

from utils.checkpoint import load_agents, save_agents
from utils.cli import UserError, command_line
from utils.episodes import Episodes, episode_rewards, team_metrics
from utils.models import check_models, load_team
from utils.prompts import encode_prompts, end_tokens
from utils.ranges import Count, Decay, Natural, NonNegative, Portion, Positive, Share, check_ranges
from utils.run import FolderArgs, Run, run_folder
from utils.stats import clip_gradients, explained_variance, masked_mean, standardise, sums_by, with_less_memory
from utils.tasks import batches, extra_metrics, load_datasets, load_task


@dataclass
class RunArgs:
    """The run: what is trained on what."""

    seed: Natural = 1  # seed of everything random: the same seed gives the same run
    task: str = "tldr"  # a task by name (arxiv, code, number, reasoning, tldr), or a FILE.py of your own
    dataset: str | None = None  # data in place of the task's own: a hub dataset's name, a folder, or a .jsonl file
    train_size: Count = 1536  # items in the training set, passed to the task
    eval_size: Count = 64  # held-out items, passed to the task
    eval_interval: Natural = 12  # updates between evaluations on the held-out items; 0: never
    num_train_epochs: Count = 3  # passes over the training set


@dataclass
class ModelArgs:
    """The agents and their models."""

    model: tuple[str, ...] = ("utils/tiny_lm",)  # folder or hub name that agents start from: one for all, or one each
    num_agents: Count = 2  # agents in the team, each with its own copy of its model
    use_separate_critic: bool = False  # give each agent a critic model of its own, instead of a value head on its actor
    critic_model_name_or_path: tuple[str, ...] = ()  # what separate critics start from, one or one each; none: --model
    critic_value_head_hidden_dim: Count | None = None  # hidden units of a separate critic's value head; none: linear
    value_head_hidden_dim: Count | None = None  # hidden units of the value head on an actor; none: linear
    dtype: Literal["float32", "bfloat16"] = "float32"  # data type of the models' weights
    mixed_precision: Literal["no", "bf16"] = "no"  # autocast to this type in the forward pass
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"  # attention kernel
    trust_remote_code: bool = False  # run code that comes with a hub model


@dataclass
class SamplingArgs:
    """Sampling: how a rollout is made."""

    num_generations: Count = 1  # joint samples of each item in a rollout
    num_turns: Count = 1  # turns of an episode; more than one takes a task with an external_transition
    early_termination_threshold: float | None = None  # end an episode after a turn with a mean reward above this
    per_device_train_batch_size: Count | None = None  # items answered at once on a device; none: the whole rollout
    max_new_tokens: Count = 72  # longest response in tokens; a longer one is cut and counts as finished
    do_sample: bool = True  # sample; --no-do-sample: take the likeliest token
    temperature: Positive = 1.0  # the logits are divided by it
    top_p: Portion = 1.0  # sample from the likeliest tokens whose probabilities sum up to it
    top_k: Natural = 0  # sample from so many likeliest tokens; 0: from all


@dataclass
class AlgorithmArgs:
    """The algorithm: rewards, advantages and losses."""

    gamma: Share = 1.0  # discount factor
    kl_coef: NonNegative = 0.03  # penalty on the reward for each nat a token is likelier than under the initial model
    reward_normalization: bool = True  # standardise rewards over the rollout
    reward_norm_eps: NonNegative = 1e-3  # leave rewards as they are where their standard deviation is below this
    advantage_normalization: bool = True  # standardise advantages over the rollout
    entropy_coef: NonNegative = 0.0  # beta, the weight of the entropy bonus
    value_loss_coef: NonNegative = 0.02  # weight of the value loss
    value_clip_range: Positive | None = 0.2  # a value's loss is clipped this far from its old value; none: not at all
    mini_batch_size: Count = 16  # joint samples in an optimiser step, over all processes


@dataclass
class IACArgs:
    """What is IAC's own."""

    action_granularity: Literal["token", "turn"] = "turn"  # an action is one token, or one whole response
    rollout_buffer_size: Count = 32  # joint samples (episodes of the team) between two updates, over all processes
    ac_epochs: Count = 1  # passes over a rollout; there is no ratio to correct later ones


@dataclass
class OptimizerArgs:
    """The optimisers (AdamW), one for each model."""

    actor_learning_rate: NonNegative = 5e-4  # learning rate of the actors
    critic_learning_rate: NonNegative = 1e-3  # learning rate of separate critics and of value heads
    anneal_lr: bool = True  # lower the learning rates to 0, linearly over the second half of the run
    weight_decay: NonNegative = 0.0  # AdamW's weight decay
    adam_beta1: Decay = 0.9  # decay of the first moment
    adam_beta2: Decay = 0.999  # decay of the second moment
    adam_epsilon: Positive = 1e-8  # term added to the denominator
    max_grad_norm: Positive = 0.5  # gradients are clipped to this norm, each optimiser's by itself


@dataclass
class Args(RunArgs, FolderArgs, ModelArgs, SamplingArgs, AlgorithmArgs, IACArgs, OptimizerArgs):
    """All flags."""


def check(args, processes):
    """Raise UserError for flags that do not go together, before anything is loaded or written."""
    share = args.num_generations * processes
    if args.rollout_buffer_size % share:
        takes = f"a multiple of generations x processes, {share}"
        raise UserError(f"--rollout-buffer-size takes {takes}, got {args.rollout_buffer_size}")
    if args.mini_batch_size % processes or min(args.train_size, args.eval_size) < processes:
        takes = f"a multiple of the processes, {processes}, --train-size and --eval-size as many or more"
        raise UserError(f"--mini-batch-size takes {takes}, got {args.mini_batch_size}")


# --- The agent --------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """R responses of one agent: P prompt tokens, left-padded, then L response tokens, right-padded, EOS included.

    A row is a turn of one of B episodes, in order of episode, then turn. An action is a token (K = L) or, valued at the
    last prompt token, the whole response (K = 1). An episode's actions, over its turns, are one chain.
    """

    prompt_ids: torch.Tensor  # [R, P]
    prompt_mask: torch.Tensor  # [R, P]
    response_ids: torch.Tensor  # [R, L]
    mask: torch.Tensor  # [R, L] 1 on sampled tokens, up to and including the first EOS
    logprobs: torch.Tensor  # [R, L] log pi(a_t|h_t), of the logits divided by the temperature
    prompts: list  # R strings
    texts: list  # R responses
    episodes: torch.Tensor | None = None  # [R] from 0 to B - 1
    rewards: torch.Tensor | None = None  # [R] as reward_func gave them
    processed_rewards: torch.Tensor | None = None  # [R] as reward_processor left them
    action_mask: torch.Tensor | None = None  # [R, K]
    action_rewards: torch.Tensor | None = None  # [R, K]
    values: torch.Tensor | None = None  # [R, K] V(h_t)
    advantages: torch.Tensor | None = None  # [R, K]
    returns: torch.Tensor | None = None  # [R, K] the critic's targets

    def select(self, rows):
        """The given rows as a mini-batch, trimmed to its longest prompt and its longest response."""
        P, L = int(self.prompt_mask[rows].sum(1).max()), int(self.mask[rows].sum(1).max())
        tensors = {name: x[rows] for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        cut = {name: x[:, -P:] if "prompt" in name else x[:, :L] if x.dim() > 1 else x for name, x in tensors.items()}
        return Rollout(**cut, prompts=[], texts=[])

    def chains(self):
        """The actions' rewards, values and mask with each episode's in one row, each [B, C], padded on the right."""
        actions = self.action_mask > 0
        lengths = sums_by(self.episodes, actions.sum(1))
        mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
        empty = torch.zeros(mask.shape, device=lengths.device)
        rewards, values = (empty.masked_scatter(mask, x[actions]) for x in (self.action_rewards, self.values))
        return rewards, values, mask.float()

    def unchain(self, x, mask):
        """[B, C] of chains, with their mask, back to [R, K]."""
        return torch.zeros_like(self.action_mask).masked_scatter(self.action_mask > 0, x[mask > 0])


def join(turns):
    """The rollouts of an agent's turns as one."""
    order = torch.cat([turn.episodes for turn in turns]).argsort(stable=True)
    joined = {}
    for name, first in vars(turns[0]).items():
        parts = [getattr(turn, name) for turn in turns]
        if isinstance(first, list):
            texts = sum(parts, [])
            joined[name] = [texts[row] for row in order.tolist()]
        elif first is not None:
            if first.dim() > 1:
                short = [max(x.shape[1] for x in parts) - x.shape[1] for x in parts]
                sides = [(n, 0) if "prompt" in name else (0, n) for n in short]
                parts = [nn.functional.pad(x, side) for x, side in zip(parts, sides)]
            joined[name] = torch.cat(parts)[order]
    return Rollout(**joined)


class Agent(nn.Module):
    """An actor with its critic, which is a model of its own or a head on the actor, and their optimisers."""

    def __init__(self, args, model, tokenizer, critic=None):
        super().__init__()
        self.tokenizer = tokenizer
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
        self.skipped, self.parts = 0, 1  # mini-batches running whose gradient was not finite; parts of a mini-batch

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
def sample(agent, prompts, args, generator):
    """Let an agent answer B prompts (strings) together: a Rollout, with the values of a critic that is a head.

    Only rows that still run are computed. Raises UserError where a prompt leaves the model no room for the response.
    """
    actor, tokenizer, device = agent.actor, agent.tokenizer, agent.actor.device
    B, L = len(prompts), args.max_new_tokens
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
    response_ids, mask, logprobs = response_ids[:, :L], mask[:, :L], logprobs[:, :L]
    return Rollout(prompt_ids, prompt_mask, response_ids, mask, logprobs, prompts, texts, values=values)


def play(agents, task, items, args, generator, time, accelerator):
    """Play an episode of each of B items: turn by turn every agent answers, and the team is scored. N rollouts."""
    episodes, turns = Episodes(task, items, args), []
    while episodes.running:
        numbers = torch.tensor(episodes.running, device=accelerator.device)
        with time("sample"), accelerator.autocast():
            prompts = [episodes.prompts(i, agent.tokenizer) for i, agent in enumerate(agents)]
            turn = [sample(agent, asked, args, generator) for agent, asked in zip(agents, prompts)]
        with time("reward"):
            rewards = episodes.play([rollout.texts for rollout in turn], prompts)
        for rollout, given, processed in zip(turn, *rewards):
            rollout.episodes, rollout.rewards = numbers, torch.tensor(given, device=numbers.device)
            rollout.processed_rewards = torch.tensor(processed, device=numbers.device)
        turns.append(turn)
    return [join(rollouts) for rollouts in zip(*turns)]


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


def td_error(rewards, values, mask, gamma):
    """Temporal-difference errors of actions, all [B, L]; a mask's row is 1s, then 0s.

    A_t = delta_t = r_t + gamma V_{t+1} - V_t, with V = 0 after the last action.
    Returns (advantages, returns), with returns = r_t + gamma V_{t+1} the critic's targets; 0 where the mask is 0.
    """
    values = values * mask
    returns = (rewards + gamma * nn.functional.pad(values[:, 1:], (0, 1))) * mask
    return returns - values, returns


@torch.no_grad()
def evaluate(agent, reference, rollout, args, accelerator):
    """Give a rollout the mask, the rewards and the values of its actions; returns metrics.

    A response's reward lands on its last token, and every token pays kl_coef * (log pi - log pi_ref).
    """
    mask, rewards = rollout.mask, rollout.processed_rewards
    rows = torch.arange(len(rewards), device=rewards.device)
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
    rollout.action_rewards, rollout.values, rollout.action_mask = token_rewards, values, mask
    return {
        "kl": masked_mean(log_ratio, rollout.mask, accelerator),
        "reference_logprob": masked_mean(reference_logprobs, rollout.mask, accelerator),
        "response_length": rollout.mask.sum(1).mean(),
    }


def losses(agent, batch, tokens, actions, args):
    """The loss of rows of a mini-batch, and its parts: their shares of the means over so many tokens and actions."""
    logprobs, entropy, hidden = evaluate_policy(agent.actor, batch, args.temperature)
    values = evaluate_critic(agent, batch) if agent.critic else agent.values(hidden)
    log_ratio = (logprobs - batch.logprobs).detach()
    approx_kl = ((log_ratio.exp() - 1 - log_ratio) * batch.mask).sum() / tokens
    entropy = (entropy * batch.mask).sum() / tokens
    if args.action_granularity == "turn":  # log pi of a response is the sum over its tokens
        logprobs, values = (logprobs * batch.mask).sum(1, keepdim=True), values[:, :1]
    policy_loss = -(logprobs * batch.advantages * batch.action_mask).sum() / actions
    value_error = (values - batch.returns) ** 2
    if args.value_clip_range is not None:
        near = batch.values + (values - batch.values).clamp(-args.value_clip_range, args.value_clip_range)
        value_error = torch.max(value_error, (near - batch.returns) ** 2)
    value_loss = (value_error * batch.action_mask).sum() / actions
    loss = policy_loss - args.entropy_coef * entropy + args.value_loss_coef * value_loss
    parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "approx_kl": approx_kl}
    return {"loss": loss, **parts}


def backward(agent, rollout, rows, counts, args, accelerator):
    """Add up the gradient of a mini-batch, in agent.parts parts; returns the parts of its loss."""
    metrics = {}
    for part in rows.chunk(agent.parts):
        with accelerator.autocast():
            shares = losses(agent, rollout.select(part), *counts, args)
        accelerator.backward(shares.pop("loss"))
        metrics = {name: metrics.get(name, 0.0) + share.detach() for name, share in shares.items()}
    return metrics


def update(agent, rollout, epochs, args, accelerator, generator):
    """Learn from a rollout; returns metrics, means over the mini-batches. A mini-batch has all turns of its episodes.

    A mini-batch whose gradient is not finite changes nothing. Raises UserError after three such running.
    """
    history, episodes = [], rollout.episodes
    for _ in range(epochs):
        order = torch.randperm(int(episodes.max()) + 1, generator=generator, device=generator.device)
        for chosen in order.split(args.mini_batch_size // accelerator.num_processes):
            rows = (chosen[:, None] == episodes).nonzero()[:, 1]
            counts = [accelerator.reduce(x[rows].sum(), "mean") for x in (rollout.mask, rollout.action_mask)]
            attempt = partial(backward, agent, rollout, rows, counts, args, accelerator)
            metrics = with_less_memory(agent, attempt, "--mini-batch-size")
            norms = [clip_gradients(optimizer, args.max_grad_norm, accelerator) for optimizer in agent.optimizers]
            finite = torch.stack(norms).isfinite().all().float()
            for optimizer in agent.optimizers:
                if finite:
                    optimizer.step()
                optimizer.zero_grad()
            agent.skipped = 0 if finite else agent.skipped + 1
            if agent.skipped >= 3:
                raise UserError("three gradients running were not finite: lower --actor-learning-rate or --temperature")
            if not finite:
                accelerator.print("a gradient was not finite: its mini-batch is skipped")
            history.append(metrics | {"grad_norm": norms[0], "skipped": 1 - finite})
    metrics = {name: torch.stack([metrics[name] for metrics in history]).mean() for name in history[0]}
    return metrics | {"explained_variance": explained_variance(rollout.returns, rollout.values, rollout.action_mask)}


def main(args, task=None, model=None, tokenizer=None):
    """Train a team; returns its agents and its Run. Raises UserError for what the user can mend.

    `task` (any object with a task's names), `model` (loaded; it is copied) and `tokenizer` replace what the flags name.
    """
    check_ranges(args)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    device, rank, processes = accelerator.device, accelerator.process_index, accelerator.num_processes
    check(args, processes)
    task = load_task(task or args.task, args.num_agents, args.num_turns)
    folder = run_folder(args, "iac_llm", args.task)
    check_models(args, model)
    items_per_update = args.rollout_buffer_size // args.num_generations
    train_items, held_out = load_datasets(task, args, items_per_update)
    held_out = [*held_out] if args.eval_interval and len(held_out) >= processes else []
    updates = args.num_train_epochs * len(train_items) // items_per_update

    set_seed(args.seed)
    references, tokenizers, critics = load_team(args, device, model, tokenizer)  # references: frozen initial policies
    agents = [Agent(args, *parts) for parts in zip(references, tokenizers, critics)]
    generator = torch.Generator(device).manual_seed(args.seed + 1_000_003 * rank)
    rate = (lambda step: min(1.0, 2.0 * (1.0 - step / updates))) if args.anneal_lr else (lambda step: 1.0)
    for agent in agents:
        agent.schedules = [LambdaLR(optimizer, rate) for optimizer in agent.optimizers]
    optimum = task.optimum(args.num_agents, args.num_turns) if hasattr(task, "optimum") else None
    team = {"agents": agents, "references": references}
    save, load = partial(save_agents, **team), partial(load_agents, **team, args=args)
    with Run(folder, args, updates, agents, save, load, generator, accelerator, optimum) as run:
        data = batches(train_items, items_per_update, args.num_train_epochs, args.seed, run.step)
        for step, items in enumerate(run.progress(data), run.step + 1):
            # 1. Every agent answers, and the team is scored, turn by turn.
            items = [item for item in items[rank::processes] for _ in range(args.num_generations)]
            rollouts = play(agents, task, items, args, generator, run.time, accelerator)

            # 2. Each agent learns alone.
            metrics = []
            for agent, reference, rollout in zip(agents, references, rollouts):
                with run.time("evaluate"):
                    metrics.append(evaluate(agent, reference, rollout, args, accelerator))
                    rewards, values, mask = rollout.chains()
                    advantages, returns = td_error(rewards, values, mask, args.gamma)
                    if args.advantage_normalization:
                        advantages = standardise(advantages, mask, accelerator)
                    rollout.advantages, rollout.returns = (rollout.unchain(x, mask) for x in (advantages, returns))
                with run.time("update"):
                    metrics[-1] |= update(agent, rollout, args.ac_epochs, args, accelerator, generator)
            for schedule in [schedule for agent in agents for schedule in agent.schedules]:
                schedule.step()

            # 3. Metrics, held-out items, samples.
            row = team_metrics(rollouts, args.num_turns, accelerator)
            row |= {name: sum(m.pop(name) for m in metrics) / len(agents) for name in ("kl", "reference_logprob")}
            row |= {f"agent_{i}/{name}": x for i, m in enumerate(metrics) for name, x in m.items()}
            row |= extra_metrics(task, rollouts)
            row["new_tokens"] = sum(rollout.mask.sum() for rollout in rollouts) * processes
            if held_out and (step % args.eval_interval == 0 or step in (1, updates)):
                same = torch.Generator(device).manual_seed(args.seed + rank)  # the same noise at every evaluation
                tests = held_out[rank::processes]
                team = play(agents, task, tests, args, same, lambda _: run.time("held-out"), accelerator)
                row["eval/reward_mean"] = episode_rewards(team).mean()
            row = {k: accelerator.reduce(torch.as_tensor(x, device=device), "mean").item() for k, x in row.items()}
            done = {"global_step": step * args.rollout_buffer_size, "epoch": step * items_per_update / len(train_items)}
            run.log(done | row, items, rollouts)
    return agents, run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
