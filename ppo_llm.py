"""PPO for language models on LoRA adapters: one agent or a team on one shared base, one turn or many, in one file.

Agent i with its actor theta_i, its critic phi_i, the actor of the rollout (old) and a reference (ref) descends

    E[ max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) ] + beta E[ exp(d) - d - 1 ] - c E[ H(pi) ],
    rho = pi(a|h) / pi_old(a|h),    d = log pi_ref(a|h) - log pi(a|h),

while its critic descends vf_coef / 2 E[ max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) ], R = A + V_old.
A is generalised advantage estimation over the turns of an episode, or over its tokens (--action-granularity).

    python ppo_llm.py                                   guess a number in at most six turns
    python ppo_llm.py --task tldr --num-agents 2        two agents summarise, one turn

An episode in an environment is one transcript: prompt, response, observation, response ... Only what the agent sampled,
the end of its turn included, is an action, and one forward pass learns from all turns. N agents share one frozen base;
each has its own LoRA adapters (actor, critic, reference) and value head.

Simplified: one process. The base stays in eval mode; LoRA's dropout, if any, draws the same masks for pi_old and pi.
Source: AgileRL's page on LLMPPO; PPO (arXiv 1707.06347); GAE (arXiv 1506.02438); LoRA (arXiv 2106.09685).
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from utils.adapters import (
    adapter_parameters,
    add_adapters,
    check_checkpoint,
    copy_adapter,
    learning,
    load_adapters,
    lora_config,
    reference_of,
    resume_adapters,
    save_adapters,
    stage_config,
)
from utils.cli import UserError, command_line
from utils.envs import Games, load_env
from utils.episodes import Episodes, team_metrics
from utils.models import check_model, load_model, load_tokenizer
from utils.prompts import encode, end_tokens, reply
from utils.ranges import Count, Natural, NonNegative, Portion, Positive, Share, check_ranges
from utils.run import FolderArgs, Run, run_folder
from utils.stats import clip_gradients, explained_variance, standardise, sums_by, with_less_memory
from utils.tasks import batches, extra_metrics, load_datasets, load_task


@dataclass
class TrainingArgs:
    """The run: what is trained on what."""

    seed: Natural = 1  # seed of everything random: the same seed gives the same run
    env: str | None = None  # environment: guess (if there is no --task), grid, FILE.py, or package.module:callable
    task: str | None = None  # a task in place of an environment: its name, or a FILE.py
    dataset: str | None = None  # data in place of the task's own: a hub dataset's name, a folder, or a .jsonl file
    train_size: Count | None = None  # items of the task (none: 1536), or seeds of the environment (none: 3200)
    eval_size: Count = 64  # held-out items of the task
    evaluation_interval: Natural = 25  # updates between evaluations; 0: never
    eval_loop: Count = 256  # held-out episodes in an evaluation, played near-deterministically
    num_train_epochs: Count = 3  # passes over the training set
    load_checkpoint: str | None = None  # run to start from: its actors become the actors and the references
    load_optimizer: bool = False  # with --load-checkpoint: go on with its optimisers too
    merge_lora_configs: bool = False  # with --load-checkpoint: take a LoRA configuration that differs, merged


@dataclass
class PolicyArgs:
    """The agents: adapters on one base."""

    model: str = "utils/tiny_lm"  # folder or hub name of the base, whose weights stay as they are
    num_agents: Count = 1  # agents in the team; more than one takes a --task
    lora_rank: Count = 16  # rank r of the adapters
    lora_alpha: Positive = 32.0  # the adapters' output is scaled by alpha / r
    lora_dropout: Share = 0.0  # dropout on what the adapters read, while learning
    lora_target_modules: tuple[str, ...] = ()  # linear layers that get an adapter, by name; none: all but the output's
    use_separate_reference_adapter: bool = True  # the reference is a copy of the actor as it was; off: the base
    reference_update_interval: Natural = 0  # passes over the training set between copies of the actor to it; 0: never
    dtype: Literal["float32", "bfloat16"] = "float32"  # data type of the base's weights
    mixed_precision: Literal["no", "bf16"] = "no"  # autocast to this type in the forward pass
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"  # attention kernel
    trust_remote_code: bool = False  # run code that comes with a hub model
    gradient_checkpointing: bool = False  # keep less of the forward pass, and compute it again for the backward pass
    torch_compiler: Literal["default", "reduce-overhead", "max-autotune"] | None = None  # torch.compile's mode
    calc_position_embeddings: bool = True  # number the tokens of a padded row from its first; off: from the padding


@dataclass
class GenerationArgs:
    """Sampling: how episodes are played."""

    rollout_buffer_size: Count = 64  # episodes between two updates
    max_turns: Count | None = None  # turns of an episode; none: 6 in an environment, 1 on a task
    early_termination_threshold: float | None = None  # on a task: end an episode after a mean reward above this
    max_output_tokens: Count | None = None  # longest response in tokens; none: 8 in an environment, 72 on a task
    min_output_tokens: Natural = 0  # a response may not end before so many
    max_model_len: Count | None = None  # longest transcript in tokens, truncated there; none: what the model takes
    temperature: Positive = 1.0  # the logits are divided by it
    top_p: Portion = 1.0  # sample from the likeliest tokens whose probabilities sum up to it
    top_k: Natural = 0  # sample from so many likeliest tokens; 0: from all
    min_p: Share = 0.0  # sample from tokens at least this share as likely as the likeliest
    repetition_penalty: Positive = 1.0  # above 1: what stands in the transcript is less likely to come again
    hf_generate_chunk_size: Count | None = None  # prompts sampled at once; none: all


@dataclass
class PPOArgs:
    """The algorithm."""

    action_granularity: Literal["turn", "token", "auto"] = "token"  # what is an action; auto: token if max_turns is 1
    turn_value_reduction: Literal["first_value", "mean", "final_value"] = "first_value"  # V of a turn, of its tokens
    turn_level_clip: bool = False  # the ratio of a turn, not of each of its tokens; takes turns as actions
    gamma: Share = 1.0  # discount factor between actions
    gae_lambda: Share = 0.95  # lambda of generalised advantage estimation
    adv_whitening: bool = True  # standardise advantages over the rollout
    clip_coef: Positive = 0.2  # eps: how far the ratio, and a value, is followed
    beta: NonNegative = 0.01  # weight of the KL penalty to the reference
    vf_coef: NonNegative = 0.5  # weight of the value loss
    ent_coef: NonNegative = 0.0  # c, the weight of the entropy bonus
    update_epochs: Count = 2  # passes over a rollout
    batch_size: Count = 16  # transcripts in an optimiser step
    micro_batch_size_per_gpu: Count | None = None  # transcripts in a forward pass; none: --batch-size


@dataclass
class OptimizationArgs:
    """The optimiser (AdamW), one for each agent."""

    lr_actor: NonNegative = 3e-3  # learning rate of the actors' adapters
    lr_critic: NonNegative | None = None  # of the critics' adapters and value heads; none: --lr-actor
    cosine_lr_schedule: bool = True  # lower the learning rates to 0 along a cosine
    warmup_proportion: Share = 0.0  # share of the updates over which they rise first
    max_grad_norm: Positive = 0.5  # an agent's gradient is clipped to this norm


@dataclass
class Args(TrainingArgs, FolderArgs, PolicyArgs, GenerationArgs, PPOArgs, OptimizationArgs):
    """All flags."""

    @property
    def num_turns(self):
        return self.max_turns or (1 if self.task else 6)

    @property
    def by_turns(self):
        return self.action_granularity == "turn" or (self.action_granularity == "auto" and self.num_turns > 1)


def check_args(args, processes):
    """Raise UserError for flags that do not go together, before anything is loaded or written."""
    if processes > 1:
        raise UserError(f"ppo_llm.py takes one process, got {processes}")
    if args.train_size < args.rollout_buffer_size:
        least = f"--rollout-buffer-size, {args.rollout_buffer_size}"
        raise UserError(f"--train-size takes at least {least}, got {args.train_size}")
    if args.env and args.task:
        raise UserError(f"--env {args.env} and --task {args.task} are two things to train on; give one")
    if args.num_agents > 1 and not args.task:
        raise UserError(f"--num-agents {args.num_agents} takes a --task; an environment has one player")
    for one, other in (("min_output_tokens", "max_output_tokens"), ("max_output_tokens", "max_model_len")):
        least, most = getattr(args, one), getattr(args, other)
        if most and least > most:
            one, other = (f"--{name.replace('_', '-')}" for name in (one, other))
            raise UserError(f"{one} takes at most {other}, {most}, got {least}")
    if args.turn_level_clip and not args.by_turns:
        raise UserError("--turn-level-clip takes turns as actions (--action-granularity turn)")
    needs = {"load_optimizer": "load_checkpoint", "merge_lora_configs": "load_checkpoint", "dataset": "task"}
    needs |= {"reference_update_interval": "use_separate_reference_adapter", "early_termination_threshold": "task"}
    for flag, other in needs.items():
        if getattr(args, flag) not in (None, False) and not getattr(args, other):
            raise UserError(f"--{flag.replace('_', '-')} takes a --{other.replace('_', '-')}")


# --- Transcripts ------------------------------------------------------------------------------------------------------


@dataclass
class Transcript:
    """An agent's side of an episode, or of a turn of it: token ids, and the turn in which it wrote each, or -1."""

    episode: int
    ids: list
    turns: list = field(default_factory=list)
    prompts: list = field(default_factory=list)  # of each turn: what was asked,
    texts: list = field(default_factory=list)  # answered,
    rewards: list = field(default_factory=list)  # earned,
    processed: list = field(default_factory=list)  # and, after reward_processor, is to learn from
    truncated: bool = False  # cut short: what might have come is worth V of the last token

    def __post_init__(self):
        self.turns = [-1] * len(self.ids)

    def write(self, ids, turn=-1):
        self.ids, self.turns = self.ids + ids, self.turns + [turn] * len(ids)


@dataclass
class Transcripts:
    """R transcripts of one agent: P tokens up to its first response, left-padded, then L, right-padded.

    Where a task plays several turns, each is a row of its own, in order of episode, then turn. An action is a token
    (K = L), or a turn (K = T, the most turns of an episode); what belongs to an action is repeated at its tokens.
    """

    ids: torch.Tensor  # [R, P + L]
    attention: torch.Tensor  # [R, P + L] 1 on tokens, 0 on padding
    turns: torch.Tensor  # [R, L] the turn in which the agent sampled a token, -1 where it did not
    rows: torch.Tensor  # [R] the episode of each row, from 0 to B - 1
    truncated: torch.Tensor  # [R] 1 where what might have come is worth V of the last token
    turn_rewards: torch.Tensor  # [R, T] 0 where a row has no such turn
    episodes: torch.Tensor  # [M] the episode of each turn played,
    rewards: torch.Tensor  # [M] what it earned,
    prompts: list  # M strings, what was asked,
    texts: list  # and M strings, what was answered
    steps: list | None = None  # the optimiser steps of a pass, each a list of micro-batches, each some rows
    seed: int = 0  # of the dropout's masks
    logprobs: torch.Tensor | None = None  # [R, L] log pi_old
    reference_logprobs: torch.Tensor | None = None  # [R, L] log pi_ref
    values: torch.Tensor | None = None  # [R, L] V_old of the action
    action_rewards: torch.Tensor | None = None  # [R, K]
    advantages: torch.Tensor | None = None  # [R, L]
    returns: torch.Tensor | None = None  # [R, L] the critic's targets

    @property
    def mask(self):
        """[R, L] 1 on sampled tokens."""
        return (self.turns >= 0).float()

    def select(self, rows):
        """The given rows, trimmed to the longest of them on either side."""
        L = self.turns.shape[1]
        P, after = (int(x[rows].sum(1).max()) for x in (self.attention[:, :-L], self.attention[:, -L:]))
        first, last = self.ids.shape[1] - L - P, self.ids.shape[1] - L + after
        known = ("turns", "logprobs", "reference_logprobs", "values", "advantages", "returns")
        cut = {name: getattr(self, name)[rows, :after] for name in known if getattr(self, name) is not None}
        cut |= {name: getattr(self, name)[rows, first:last] for name in ("ids", "attention")}
        return replace(self, **cut)

    def chains(self, *xs, mask):
        """Numbers of actions [R, K] with each episode's in one row, [B, C], padded on the right; their mask, last."""
        lengths = sums_by(self.rows, (mask > 0).sum(1))
        chained = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
        empty = torch.zeros(chained.shape, device=lengths.device)
        return *(empty.masked_scatter(chained, x[mask > 0]) for x in xs), chained.float()


def collate(transcripts, pad, T, device):
    """Transcripts of an agent as tensors."""
    starts = [next(t for t, turn in enumerate(transcript.turns) if turn >= 0) for transcript in transcripts]
    P, L = max(starts), max(len(transcript.ids) - start for transcript, start in zip(transcripts, starts))
    ids = torch.full((len(starts), P + L), pad)
    attention, turns = torch.zeros_like(ids), torch.full_like(ids, -1)
    turn_rewards, played = torch.zeros(len(starts), T), []
    for r, (transcript, start) in enumerate(zip(transcripts, starts)):
        span = slice(P - start, P - start + len(transcript.ids))
        ids[r, span], attention[r, span] = torch.tensor(transcript.ids), 1
        turns[r, span] = torch.tensor(transcript.turns)
        for turn, reward in zip(sorted({*transcript.turns} - {-1}), transcript.processed):
            turn_rewards[r, turn] = reward
        played += zip(transcript.prompts, transcript.texts, transcript.rewards, [transcript.episode] * T)
    prompts, texts, rewards, episodes = map(list, zip(*played))
    rows, truncated = (torch.tensor([getattr(x, name) for x in transcripts]) for name in ("episode", "truncated"))
    tensors = (ids, attention, turns[:, P:], rows, truncated.float(), turn_rewards)
    tensors += (torch.tensor(episodes), torch.tensor(rewards))
    return Transcripts(*(x.to(device) for x in tensors), prompts, texts)


# --- The agent --------------------------------------------------------------------------------------------------------


class LoraAgent:
    """One agent's adapters on the shared base, by name, its value head and its optimiser."""

    def __init__(self, i, model, args, updates):
        self.actor, self.critic = f"agent_{i}_actor", f"agent_{i}_critic"
        self.reference = f"agent_{i}_reference" if args.use_separate_reference_adapter else None
        base = model.get_base_model()
        self.value_head = nn.Linear(base.config.get_text_config().hidden_size, 1).to(base.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        valued = [*adapter_parameters(model, self.critic), *self.value_head.parameters()]
        lr_critic = args.lr_actor if args.lr_critic is None else args.lr_critic
        groups = [{"params": adapter_parameters(model, self.actor), "lr": args.lr_actor}]
        self.optimizers = [torch.optim.AdamW([*groups, {"params": valued, "lr": lr_critic}], weight_decay=0.0)]
        warmup, steps = round(args.warmup_proportion * updates), updates if args.cosine_lr_schedule else 10**9
        self.schedules = [transformers.get_cosine_schedule_with_warmup(self.optimizers[0], warmup, steps)]
        self.skipped, self.parts = 0, 1  # optimiser steps running whose gradient was not finite; parts of a micro-batch


@torch.no_grad()
def generate(model, adapters, prompts, args, tokenizer, generator, greedy=False):
    """Let B adapters, by name, continue B prompts, lists of ids, together: B lists of new ids, the last may be an end.

    Only rows that still run are computed; rows of several adapters share the base's forward pass.
    """
    device, L, mixed = model.device, args.max_output_tokens, len(set(adapters)) > 1
    ends = torch.tensor(end_tokens(model, tokenizer), device=device)
    penalise = transformers.RepetitionPenaltyLogitsProcessor(args.repetition_penalty)
    warpers = transformers.LogitsProcessorList()
    warpers += [transformers.TopKLogitsWarper(args.top_k)] if args.top_k else []
    warpers += [transformers.TopPLogitsWarper(args.top_p)] if args.top_p < 1 else []
    warpers += [transformers.MinPLogitsWarper(args.min_p)] if args.min_p else []
    model.set_adapter(adapters[0])
    responses = torch.full((len(prompts), L), -1, device=device)
    for running in torch.arange(len(prompts), device=device).split(args.hf_generate_chunk_size or len(prompts)):
        asked, cache = [prompts[k] for k in running.tolist()], None
        P = max(map(len, asked))
        ids = inputs = torch.tensor([[prompt[0]] * (P - len(prompt)) + prompt for prompt in asked], device=device)
        attention = torch.tensor([[0] * (P - len(prompt)) + [1] * len(prompt) for prompt in asked], device=device)
        for t in range(L):
            given = {"adapter_names": [adapters[k] for k in running.tolist()]} if mixed else {}
            if args.calc_position_embeddings:
                given["position_ids"] = positions(attention)[:, -inputs.shape[1] :]
            given |= {"attention_mask": attention, "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            out = model(inputs, **given)
            logits = penalise(ids, out.logits[:, -1].float()) / args.temperature
            if t < args.min_output_tokens:
                logits[:, ends] = -torch.inf
            tokens = logits.argmax(-1)
            if not greedy:
                tokens = torch.multinomial(warpers(ids, logits).softmax(-1), 1, generator=generator).squeeze(1)
            responses[running, t] = tokens
            alive = ~torch.isin(tokens, ends)
            cache, inputs, ids = out.past_key_values, tokens[:, None], torch.cat([ids, tokens[:, None]], 1)
            attention = nn.functional.pad(attention, (0, 1), value=1)
            if not alive.all():
                running, inputs, ids, attention = (x[alive] for x in (running, inputs, ids, attention))
                if len(running) == 0:
                    break
                cache.batch_select_indices(alive.nonzero().squeeze(1))
    return [[token for token in row if token >= 0] for row in responses.tolist()]


def positions(attention):
    return (attention.cumsum(1) - 1).clamp(min=0)


def play_env(model, agent, factory, items, args, tokenizer, generator, time, greedy=False):
    """Play an episode of each of B items, {"seed": k}, in step, the agent's answers sampled as one batch.

    Returns [transcripts] of the episodes that no error ended, numbered anew, their items, and the errors by seed.
    """
    games, transcripts = Games(factory, [item["seed"] for item in items], args.num_turns, args.reward_timeout), {}
    while games.running:
        playing = [*games.running]
        with time("sample"):
            for k in playing:
                if k not in transcripts:
                    text, ids = encode([{"role": "user", "content": games.observations[k]}], args, tokenizer)
                    transcripts[k] = Transcript(k, ids, prompts=[text])
            prompts = [transcripts[k].ids for k in playing]
            answers = generate(model, [agent.actor] * len(playing), prompts, args, tokenizer, generator, greedy)
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        with time("reward"):
            games.step(texts)
        for k, ids, text in zip(playing, answers, texts):
            transcript = transcripts[k]
            transcript.write(ids, turn=len(transcript.texts))
            transcript.texts.append(text)
            if k in games.dropped or games.ended[k] in ("terminated", "horizon"):
                continue
            told = reply(games.observations[k], ids[-1], tokenizer)
            room = args.max_model_len - len(transcript.ids) - len(told)
            if room >= 0:
                transcript.write(told)
                transcript.prompts.append(games.observations[k])
            if room < args.max_output_tokens or games.ended[k] == "truncated":
                transcript.truncated = True
                if k in games.running:
                    games.stop(k)
    kept = [k for k in transcripts if k not in games.dropped]
    for number, k in enumerate(kept):
        transcripts[k].episode, transcripts[k].rewards, transcripts[k].processed = number, *[games.rewards[k]] * 2
    errors = {items[k]["seed"]: error for k, error in games.dropped.items()}
    return [[transcripts[k] for k in kept]], [items[k] for k in kept], errors


def play_task(model, agents, task, items, args, tokenizer, generator, time, greedy=False):
    """Play an episode of each of B items: turn by turn the team answers and is scored.

    Returns N lists of transcripts, a turn each.
    """
    episodes, teams = Episodes(task, items, args), [[] for _ in agents]
    while episodes.running:
        numbers, turn = [*episodes.running], episodes.turn
        with time("sample"):
            prompts = [episodes.prompts(i, tokenizer) for i in range(len(agents))]
            asked = [encode(prompt, args, tokenizer)[1] for of_agent in prompts for prompt in of_agent]
            adapters = [agent.actor for agent in agents for _ in numbers]
            n = len(asked) if len(numbers) <= 4 else len(numbers)  # few rows are faster in one batch, many by agent
            parts = [(adapters[k : k + n], asked[k : k + n]) for k in range(0, len(asked), n)]
            answers = [ids for part in parts for ids in generate(model, *part, args, tokenizer, generator, greedy)]
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        texts = [texts[i * len(numbers) : (i + 1) * len(numbers)] for i in range(len(agents))]
        with time("reward"):
            rewards, processed = episodes.play(texts, prompts)
        for i, team in enumerate(teams):
            for j, k in enumerate(numbers):
                row = i * len(numbers) + j
                transcript = Transcript(k, asked[row], prompts=[prompts[i][j]], texts=[texts[i][j]])
                transcript.rewards, transcript.processed = [rewards[i][j]], [processed[i][j]]
                transcript.write(answers[row], turn)
                team.append(transcript)
    return [sorted(team, key=lambda transcript: transcript.episode) for team in teams]


def transcript_inputs(batch, args):
    """What a model reads: all tokens, with masks and positions."""
    given = {"position_ids": positions(batch.attention)} if args.calc_position_embeddings else {}
    return {"input_ids": batch.ids, "attention_mask": batch.attention, "use_cache": False} | given


def evaluate_actor(model, batch, args):
    """log pi(.|h) before each of the last L tokens, of the adapter that is set, [R, L, V]."""
    L, given = batch.turns.shape[1], transcript_inputs(batch, args)
    logits = model.get_base_model()(**given, logits_to_keep=L + 1).logits[:, :-1]
    return (logits.float() / args.temperature).log_softmax(-1)


def chosen(log_pi, batch):
    """log pi(a|h) of the actions, [R, L], 0 on other tokens."""
    return log_pi.gather(-1, batch.ids[:, -batch.turns.shape[1] :, None]).squeeze(-1) * batch.mask


def evaluate_values(model, agent, batch, args):
    """V of what stands before each of the last L tokens, and, last, of the whole, [R, L + 1]."""
    hidden = model.get_base_model().base_model(**transcript_inputs(batch, args)).last_hidden_state
    return agent.value_head(hidden[:, -batch.turns.shape[1] - 1 :].float()).squeeze(-1).float()


# --- Advantages and losses --------------------------------------------------------------------------------------------


def last_tokens(batch):
    """[R, L] 1 on the last token of each turn."""
    return batch.mask * (batch.turns != nn.functional.pad(batch.turns[:, 1:], (0, 1), value=-1))


def of_actions(x, batch, args, reduction="sum"):
    """Numbers of tokens, [R, L], as those of actions, [R, K]: the same, or of a turn what `reduction` says."""
    if not args.by_turns:
        return x * batch.mask
    turns, mask = batch.turns.clamp(min=0), batch.mask
    if reduction == "first_value":
        mask = mask * (batch.turns != nn.functional.pad(batch.turns[:, :-1], (1, 0), value=-1))
    elif reduction == "final_value":
        mask = last_tokens(batch)
    sums, counts = (y.new_zeros(len(y), args.num_turns).scatter_add(1, turns, y) for y in (x * mask, mask))
    return sums / counts.clamp(min=1) if reduction == "mean" else sums


def of_tokens(x, batch, args):
    """Numbers of actions, [R, K], repeated at their tokens, [R, L]."""
    return (x.gather(1, batch.turns.clamp(min=0)) if args.by_turns else x) * batch.mask


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


def micro_batch_size(agent, args):
    """Transcripts in a forward pass; half as many where memory has run out."""
    return -(-(args.micro_batch_size_per_gpu or args.batch_size) // agent.parts)


@torch.no_grad()
def prepare(model, agent, rollout, args, accelerator, generator):
    """Give a rollout its log-probabilities, and the rewards and values of its actions; returns metrics.

    Computed in the very batches that `learn` takes, under the same dropout: the first ratio is 1 to the bit.
    """
    mask, L = rollout.mask, rollout.turns.shape[1]
    order = torch.randperm(len(mask), generator=generator, device=generator.device)
    rollout.steps = [step.split(micro_batch_size(agent, args)) for step in order.split(args.batch_size)]
    rollout.seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
    rollout.logprobs, rollout.reference_logprobs = torch.zeros_like(mask), torch.zeros_like(mask)
    values = mask.new_zeros(len(mask), L + 1)
    for rows in [rows for step in rollout.steps for rows in step]:
        batch = rollout.select(rows)
        n, seed = batch.turns.shape[1], rollout.seed + int(rows[0])
        with accelerator.autocast():
            with learning(model, agent.actor, seed, args):
                rollout.logprobs[rows, :n] = chosen(evaluate_actor(model, batch, args), batch)
            with learning(model, agent.critic, seed, args):
                values[rows, : n + 1] = evaluate_values(model, agent, batch, args)
            with reference_of(agent, model):
                rollout.reference_logprobs[rows, :n] = chosen(evaluate_actor(model, batch, args), batch)
    ends = rollout.attention[:, -L:].sum(1, keepdim=True)
    ahead = rollout.truncated * values.gather(1, ends).squeeze(1)
    rollout.values = of_tokens(of_actions(values[:, :L], rollout, args, args.turn_value_reduction), rollout, args)
    token_rewards = rollout.turn_rewards.gather(1, rollout.turns.clamp(min=0)) * last_tokens(rollout)
    token_rewards[range(len(mask)), L - 1 - mask.flip(1).argmax(1)] += args.gamma * ahead
    rollout.action_rewards = of_actions(token_rewards, rollout, args)
    log_ratio = rollout.logprobs - rollout.reference_logprobs
    return {
        "kl": log_ratio.sum() / mask.sum(),
        "reference_logprob": rollout.reference_logprobs.sum() / mask.sum(),
        "response_length": mask.sum() / len(rollout.rewards),
    }


def estimate(rollout, args, accelerator):
    """Give a rollout its advantages and its critic's targets."""
    mask = of_actions(rollout.mask, rollout, args).clamp(max=1)
    values = of_actions(rollout.values, rollout, args, "final_value")
    rewards, values, chained = rollout.chains(rollout.action_rewards, values, mask=mask)
    advantages, returns = gae(rewards, values, chained, args.gamma, args.gae_lambda)
    if args.adv_whitening:
        advantages = standardise(advantages, chained, accelerator)
    actions = [torch.zeros_like(mask).masked_scatter(mask > 0, x[chained > 0]) for x in (advantages, returns)]
    rollout.advantages, rollout.returns = (of_tokens(x, rollout, args) for x in actions)


def actor_loss(model, batch, whole, args):
    """The actor's loss and its parts, of a micro-batch: its share of the means over the `whole` optimiser step."""
    log_pi = evaluate_actor(model, batch, args)
    logprobs = chosen(log_pi, batch)
    with torch.set_grad_enabled(args.ent_coef > 0):
        entropy = -(log_pi.exp() * log_pi).sum(-1) * batch.mask
    log_ratio, A = logprobs - batch.logprobs, batch.advantages
    d = batch.reference_logprobs - logprobs
    tokens = actions = whole.mask.sum()
    approx_kl = (log_ratio.exp() - 1 - log_ratio).detach().sum() / tokens
    k3, entropy = ((d.exp() - d - 1) * batch.mask).sum() / tokens, entropy.sum() / tokens
    if args.turn_level_clip:  # the ratio of a turn is the product of its tokens'
        log_ratio, A = of_actions(log_ratio, batch, args), of_actions(A, batch, args, "final_value")
        actions = last_tokens(whole).sum()
    rho, eps = log_ratio.exp(), args.clip_coef
    policy_loss = torch.max(-A * rho, -A * rho.clamp(1 - eps, 1 + eps)).sum() / actions  # A is 0 on padding
    clip_fraction = ((rho - 1).abs() > eps).float().sum() / actions
    parts = {"policy_loss": policy_loss, "entropy": entropy, "k3": k3, "approx_kl": approx_kl}
    return policy_loss + args.beta * k3 - args.ent_coef * entropy, parts | {"clip_fraction": clip_fraction}


def critic_loss(model, agent, batch, whole, args):
    """The value loss of a micro-batch: its share of the mean over the actions of the `whole` optimiser step."""
    values = evaluate_values(model, agent, batch, args)[:, :-1]
    values = of_actions(values, batch, args, args.turn_value_reduction)
    old, returns = (of_actions(x, batch, args, "final_value") for x in (batch.values, batch.returns))
    near = old + (values - old).clamp(-args.clip_coef, args.clip_coef)
    error = torch.max((values - returns) ** 2, (near - returns) ** 2)  # 0 on padding
    return 0.5 * error.sum() / of_actions(whole.mask, whole, args).clamp(max=1).sum()


def accumulate(model, agent, rollout, steps, args, accelerator):
    """Add up the gradient of an optimiser step, micro-batch by micro-batch; returns the parts of its loss."""
    whole, metrics = rollout.select(torch.cat(steps)), {}
    for rows in [part for rows in steps for part in rows.split(micro_batch_size(agent, args))]:
        batch, seed = rollout.select(rows), rollout.seed + int(rows[0])
        with learning(model, agent.actor, seed, args):
            with accelerator.autocast():
                loss, parts = actor_loss(model, batch, whole, args)
            loss.backward()
        with learning(model, agent.critic, seed, args):
            with accelerator.autocast():
                parts["value_loss"] = critic_loss(model, agent, batch, whole, args)
            (args.vf_coef * parts["value_loss"]).backward()
        metrics = {name: metrics.get(name, 0.0) + part.detach() for name, part in parts.items()}
    return metrics


def learn(model, agent, rollout, args, accelerator, generator):
    """Learn from a rollout; returns metrics, means over the optimiser steps.

    A step whose gradient is not finite changes nothing. Raises UserError after three such running.
    """
    history = []
    for _ in range(args.update_epochs):
        for k in torch.randperm(len(rollout.steps), generator=generator, device=generator.device).tolist():
            attempt = partial(accumulate, model, agent, rollout, rollout.steps[k], args, accelerator)
            metrics = with_less_memory(agent, attempt, "--micro-batch-size-per-gpu")
            norm = clip_gradients(agent.optimizers[0], args.max_grad_norm, accelerator)
            if norm.isfinite():
                agent.optimizers[0].step()
            else:
                accelerator.print("a gradient was not finite: its optimiser step is skipped")
            agent.optimizers[0].zero_grad()
            agent.skipped = 0 if norm.isfinite() else agent.skipped + 1
            if agent.skipped >= 3:
                raise UserError("three gradients running were not finite: lower --lr-actor or --temperature")
            history.append(metrics | {"grad_norm": norm, "skipped": 1.0 - norm.isfinite().float()})
    metrics = {name: torch.stack([metrics[name] for metrics in history]).mean() for name in history[0]}
    last = last_tokens(rollout) if args.by_turns else rollout.mask
    return metrics | {"explained_variance": explained_variance(rollout.returns, rollout.values, last)}


def main(args, task=None, model=None, tokenizer=None):
    """Train an agent or a team; returns its agents and its Run. Raises UserError for what the user can mend.

    `task` (any object with a task's names), `model` (loaded; it is copied) and `tokenizer` replace what the flags name.
    """
    check_ranges(args)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    device = accelerator.device
    args = replace(args, task=args.task or (task and getattr(task, "__name__", "task")))
    sizes = {"train_size": 1536 if args.task else 3200, "max_output_tokens": 72 if args.task else 8}
    args = replace(args, **{name: size for name, size in sizes.items() if getattr(args, name) is None})
    check_args(args, accelerator.num_processes)
    if args.task:
        task, factory = load_task(task or args.task, args.num_agents, args.num_turns, "--max-turns"), None
        optimum = task.optimum(args.num_agents, args.num_turns) if hasattr(task, "optimum") else None
        train_items, held_out = load_datasets(task, args, args.rollout_buffer_size)
        held_out = [*held_out][: args.eval_loop]
    else:
        factory, optimum = load_env(args.env or "guess", args.num_turns)
        train_items = [{"seed": 1_000_000 * args.seed + k} for k in range(args.train_size)]
        held_out = [{"seed": 500_000 + 1_000_000 * args.seed + k} for k in range(args.eval_loop)]
    folder = run_folder(args, "ppo_llm", args.task or args.env or "guess")
    if args.load_checkpoint:
        check_checkpoint(args.load_checkpoint, args.num_agents)
    if model is None:
        check_model(args.model, "--model", args.trust_remote_code)
    updates = args.num_train_epochs * len(train_items) // args.rollout_buffer_size

    set_seed(args.seed)
    base = load_model(args, args.model, model).to(device)
    tokenizer = tokenizer or load_tokenizer(args, args.model)
    room = getattr(base.config.get_text_config(), "max_position_embeddings", None) or tokenizer.model_max_length
    check_args(args := replace(args, max_model_len=min(args.max_model_len or room, room)), accelerator.num_processes)
    config = stage_config(args.load_checkpoint, lora_config(args, base), args)
    roles = ["actor", "critic", "reference"][: 3 if args.use_separate_reference_adapter else 2]
    model = add_adapters(base, config, [f"agent_{i}_{role}" for i in range(args.num_agents) for role in roles])
    agents = [LoraAgent(i, model, args, updates) for i in range(args.num_agents)]
    heads, optimizers = [agent.value_head for agent in agents], [agent.optimizers[0] for agent in agents]
    if args.load_checkpoint:
        load_adapters(args.load_checkpoint, model, heads, args, args.model, optimizers)
    if args.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    if args.torch_compiler:
        base.base_model.compile(mode=args.torch_compiler, dynamic=True)
    generator = torch.Generator(device).manual_seed(args.seed)

    def play_all(items, generator, time, greedy=False):
        with accelerator.autocast():
            if factory:
                return play_env(model, agents[0], factory, items, args, tokenizer, generator, time, greedy)
            return play_task(model, agents, task, items, args, tokenizer, generator, time, greedy), items, {}

    def save(path, checkpoint):
        save_adapters(path, model, heads, tokenizer, args.model, optimizers)

    def load(path):
        resume_adapters(path, model, heads, optimizers, args.model)

    with Run(folder, args, updates, agents, save, load, generator, accelerator, optimum, "fitness") as run:
        data = batches(train_items, args.rollout_buffer_size, args.num_train_epochs, args.seed, run.step)
        for step, items in enumerate(run.progress(data), run.step + 1):
            # 1. Every agent plays.
            teams, items, errors = play_all(items, generator, run.time)
            rollouts = [collate(team, tokenizer.pad_token_id, args.num_turns, device) for team in teams]

            # 2. Each agent learns alone.
            metrics = []
            for agent, rollout in zip(agents, rollouts):
                with run.time("evaluate"):
                    metrics.append(prepare(model, agent, rollout, args, accelerator, generator))
                    estimate(rollout, args, accelerator)
                with run.time("update"):
                    metrics[-1] |= learn(model, agent, rollout, args, accelerator, generator)
                agent.schedules[0].step()
                epoch, before = (n * args.rollout_buffer_size // len(train_items) for n in (step, step - 1))
                if args.reference_update_interval and epoch > before and epoch % args.reference_update_interval == 0:
                    copy_adapter(model, agent.actor, agent.reference)

            # 3. Metrics, held-out episodes, samples.
            row = team_metrics(rollouts, args.num_turns, accelerator)
            row |= {name: sum(m.pop(name) for m in metrics) / len(agents) for name in ("kl", "reference_logprob")}
            row |= {f"agent_{i}/{name}": x for i, m in enumerate(metrics) for name, x in m.items()}
            row |= extra_metrics(task, rollouts)
            row |= {"truncated": sum(rollouts[0].truncated), "dropped": len(errors)} if factory else {}
            for seed, error in errors.items():
                accelerator.print(f"update {step}: the episode of seed {seed} is dropped: {error}")
            row["new_tokens"] = sum(rollout.mask.sum() for rollout in rollouts)
            if held_out and args.evaluation_interval and (step % args.evaluation_interval == 0 or step in (1, updates)):
                tests, tested, _ = play_all(held_out, generator, lambda _: run.time("held-out"), greedy=True)
                row["fitness"] = sum(sum(t.rewards) for team in tests for t in team) / len(tests) / len(tested)
            done = {"global_step": (n := step * args.rollout_buffer_size), "epoch": n / len(train_items)}
            run.log(done | {name: float(x) for name, x in row.items()}, items, rollouts)
    return agents, run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
