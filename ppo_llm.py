"""PPO for language models on LoRA adapters: one agent or a team on one shared base, one turn or many, in one file.

For each agent, with E the mean over sampled tokens a, and h all tokens before a, the actor descends

    E[ max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) ] + beta E[ exp(d) - d - 1 ] - c E[ H(pi) ],
    rho = pi(a|h) / pi_old(a|h),    d = log pi_ref(a|h) - log pi(a|h),

and the critic, as a mean over actions, vf_coef / 2 max((V - G)^2, (clip(V, V_old - eps, V_old + eps) - G)^2).
A is generalised advantage estimation over actions, G = A + V_old; after that A is less its mean, and divided by its
deviation, or by 98 % of the divisor before, if that is larger. An action is a token, or a whole turn, whose tokens all
have the turn's A (--action-granularity). With --turn-level-clip rho is of a turn, the product of its tokens', and the
first mean is over turns. With vLLM and --sampler-correction the terms of the first mean are weighted by
min(pi_old / pi of vLLM, 2).

    python ppo_llm.py                                   guess a number in at most six turns
    python ppo_llm.py --task tldr --num-agents 2        two agents summarise, one turn
    torchrun --nproc-per-node 2 ppo_llm.py              two processes, each with half of the episodes

An episode is one transcript for each agent: prompt, response, observation, response ... On a task the observation is
that part of the next prompt which was not there before. Only what the agent sampled, the end of its turn included, is
learned, and one forward pass reads all turns. What comes after an episode is worth 0 where it ends, or has used up
--max-turns; where it is truncated, by the environment or for lack of room, it is worth V after the last token. N agents
share one frozen base; each has its own LoRA adapters (actor, critic, reference) and value head.

Simplified: the base stays in eval mode; LoRA's dropout, if any, is on only while learning. Sampling follows --top-p,
--top-k, --min-p, --min-output-tokens and --repetition-penalty; pi, pi_old and pi_ref follow --temperature alone.
Source: AgileRL's page on LLMPPO; PPO (arXiv 1707.06347); GAE (arXiv 1506.02438); LoRA (arXiv 2106.09685).

Shapes: B episodes of a rollout, T turns of an episode, P tokens of a prompt (left-padded), L tokens after it
(right-padded), K actions of an episode (L tokens, or T turns). With several processes B counts one process's episodes;
distributed.total and distributed.mean are over all processes, and gradients are averaged.
To read: main, play, learn, ppo_loss.
"""

import functools
import math
import random
import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
import transformers
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import set_seed

from utils import adapters, causal_lm, distributed, engine, envs, models, sharding, stages, tasks
from utils.cli import UserError, command_line, flags, needs, not_with
from utils.metrics import mean_reward, update_metrics
from utils.prompts import end_tokens, pad_left, render, reply
from utils.rollouts import Rows, check_transcripts
from utils.run import FolderArgs, Run

# --- Args: the flags --------------------------------------------------------------------------------------------------
# A flag's comment is its help. It has no effect without the flags that `needs` names, or with those of `not_with`.


@flags
class TrainingArgs:
    """How long, from which seed."""

    seed: NonNegativeInt = 1  # seed of everything random: the same seed gives the same run
    num_train_epochs: PositiveInt | None = None  # passes over the training set; none: 3, or what --max-steps takes
    max_steps: PositiveInt | None = None  # joint samples after which the run ends, in whole updates; none: no such end
    evaluation_interval: NonNegativeInt = 25  # updates between evaluations; 0: never
    eval_loop: PositiveInt | None = None  # held-out episodes in an evaluation; none: 256 games, all items of a task


@flags
class PolicyArgs:
    """The agents: adapters on one base. Here and below, what AgileRL's LLMPPO has too has its name."""

    model: str = "utils/tiny_lm"  # folder or hub name of the base, whose weights stay as they are
    num_agents: PositiveInt = 1  # agents in the team; more than one takes a --task
    use_separate_reference_adapter: bool = True  # the reference is a copy of the actor as it was; off: the base
    # passes over the training set between copies of the actor to the reference; 0: never
    reference_update_interval: NonNegativeInt = needs("use_separate_reference_adapter", "beta", default=0)
    gradient_checkpointing: bool = False  # keep less of the forward pass, and compute it again for the backward pass
    # torch.compile's mode
    torch_compiler: Literal["default", "reduce-overhead", "max-autotune"] | None = not_with("static_cache")
    # positions from a row's first token; off: from its padding (rotary only)
    calc_position_embeddings: bool = not_with("use_vllm", "static_cache", default=True)


@flags
class GenerationArgs:
    """Sampling: how episodes are played."""

    rollout_buffer_size: PositiveInt = 64  # episodes between two updates, over all processes
    num_generations: PositiveInt = 1  # games of each seed, or joint samples of each item, in a rollout
    max_turns: PositiveInt | None = None  # turns of an episode; none: 6 in an environment, 1 on a task
    # on a task: end an episode after a turn with a raw reward, the agents' mean, above this
    early_termination_threshold: float | None = needs("task", default=None)
    max_output_tokens: PositiveInt | None = None  # longest response; none: 8 tokens in an environment, 72 on a task
    min_output_tokens: NonNegativeInt = 0  # a response may not end before so many
    max_model_len: PositiveInt | None = None  # most tokens of a transcript: an episode stops before; none: the model's
    temperature: PositiveFloat = 1.0  # the logits are divided by it
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sample from the likeliest tokens that sum up to it
    top_k: NonNegativeInt = 0  # sample from so many likeliest tokens; 0: from all
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0  # sample from tokens at least this share as likely as the best
    repetition_penalty: PositiveFloat = 1.0  # above 1: what stands in the transcript is less likely to come again
    # prompts sampled at once; none: all
    hf_generate_chunk_size: PositiveInt | None = not_with("use_vllm", default=None)


@flags
class PPOArgs:
    """The algorithm."""

    # what is an action; auto: a token, or a turn where one of the next two flags is given
    action_granularity: Literal["turn", "token", "auto"] = "auto"
    turn_value_reduction: Literal["first_value", "mean", "final_value"] = "first_value"  # V of a turn, from its tokens'
    turn_level_clip: bool = False  # the ratio of a turn, not of each of its tokens; takes turns as actions
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0  # discount factor between actions
    # lambda of GAE; none: 0.95, or, of several turns, 0.85 for tokens and 0.7 for turns
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    adv_whitening: bool = True  # standardise advantages over the rollout
    clip_coef: PositiveFloat = 0.2  # eps: clip range of the ratio, and of a value's change
    beta: NonNegativeFloat = 0.01  # weight of the KL penalty to the reference; 0: no pass through the reference
    vf_coef: NonNegativeFloat = 0.5  # weight of the value loss
    ent_coef: NonNegativeFloat = 0.0  # c, the weight of the entropy bonus
    update_epochs: PositiveInt = 2  # passes over a rollout
    batch_size: PositiveInt = 16  # episodes in an optimiser step, over all processes
    micro_batch_size_per_gpu: PositiveInt | None = None  # episodes in a forward pass; none: its share of --batch-size


@flags
class OptimizationArgs:
    """The optimiser (AdamW), one for each agent."""

    lr_actor: NonNegativeFloat = 3e-3  # learning rate of the actors' adapters
    lr_critic: NonNegativeFloat | None = None  # of the critics' adapters and value heads; none: --lr-actor
    cosine_lr_schedule: bool = True  # lower the learning rates to 0 along a cosine
    warmup_proportion: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of the updates over which they rise first
    max_grad_norm: PositiveFloat = 0.5  # an agent's gradient is clipped to this norm


@flags
class Args(
    TrainingArgs,
    envs.EnvArgs,  # --env
    tasks.TaskArgs,  # --task, --dataset, --train-size ...
    FolderArgs,  # --output-dir, --resume, --save-interval ...
    PolicyArgs,
    models.LoadingArgs,  # --mixed-precision, --shard ...
    stages.LoraArgs,  # --lora-rank ...
    stages.StageArgs,  # --load-checkpoint ...
    GenerationArgs,
    engine.VllmArgs,  # --use-vllm, --sampler-correction
    PPOArgs,
    OptimizationArgs,
):
    """All flags."""


# Flags that may change when a run is resumed, beside those that take less memory
MAY_CHANGE = ("gradient_checkpointing", "merge_adapters", "save_optimizer", "save_base", "shard", "vllm_config")


def resolve_args(args, task=None, model=None, env=None):
    """The flags with what depends on others, and on the model, filled in; `task`, `model` and `env` are main's.

    Raises UserError for flags that do not go together.
    """
    if task is not None and args.task is None:
        args = replace(args, task=getattr(task, "__name__", "task"))
    if env is not None and args.env is None:
        args = replace(args, env=getattr(env, "__name__", "env"))
    args = replace(args, model=models.name_of(args, model))
    config = models.check_models("model", "model_config", args, model, quantized=True)[0]
    max_turns = args.max_turns or (1 if args.task else 6)
    granularity = args.action_granularity
    if granularity == "auto":
        of_turns = args.turn_level_clip or args.turn_value_reduction != "first_value"
        granularity = "turn" if of_turns else "token"
    gae_lambda = args.gae_lambda
    if gae_lambda is None:
        gae_lambda = 0.95 if max_turns == 1 else {"token": 0.85, "turn": 0.7}[granularity]
    args = replace(
        args,
        max_turns=max_turns,
        action_granularity=granularity,
        gae_lambda=gae_lambda,
        max_output_tokens=args.max_output_tokens or (72 if args.task else 8),
        max_model_len=engine.max_length(config, args),
        train_size=args.train_size or (None if args.task else 4800),
        lr_critic=args.lr_actor if args.lr_critic is None else args.lr_critic,
    )
    check_args(args)
    tasks.prompt_limit(config, args, "max_output_tokens")
    return args


def check_args(args):
    """Raise UserError for flags that do not go together, before anything is loaded or written."""
    of_task = dict.fromkeys(("dataset", "eval_size", "max_prompt_length", "long_prompts"), "task")
    distributed.check_flags(args, multiples=("batch_size",), needs=of_task)
    engine.check_vllm_args(args)
    stages.check_stage(args)
    divisor = args.num_generations * distributed.world_size()
    if args.rollout_buffer_size % divisor:
        takes = f"a multiple of generations x processes, {divisor}"
        raise UserError(f"--rollout-buffer-size takes {takes}, got {args.rollout_buffer_size}")
    if args.shard and args.torch_compiler:
        raise UserError("--shard takes a base that is not compiled: leave out --torch-compiler")
    if args.env and args.task:
        raise UserError(f"--env {args.env} and --task {args.task} are two things to train on; give one")
    if args.num_agents > 1 and args.task is None:
        raise UserError(f"--num-agents {args.num_agents} takes a --task; an environment has one player")
    if args.early_termination_threshold is not None and args.max_turns == 1:
        raise UserError("--early-termination-threshold takes several turns (--max-turns)")
    if args.min_output_tokens > args.max_output_tokens:
        most = f"--max-output-tokens, {args.max_output_tokens}"
        raise UserError(f"--min-output-tokens takes at most {most}, got {args.min_output_tokens}")
    if args.action_granularity == "token" and (args.turn_level_clip or args.turn_value_reduction != "first_value"):
        raise UserError("--turn-level-clip and --turn-value-reduction take --action-granularity turn")


# --- The environment: a game in several turns -------------------------------------------------------------------------

MAX_NUMBER = 16
MAX_GUESSES = 6


class Env:
    """A game of guessing a secret number, uniform from 1 to 16, with Gymnasium's reset and step on text.

    A guess earns its expected value (see guess_value), so that luck is neither paid nor punished, and each but the
    first costs 1/6: the sooner the better. An answer that is no number of one to three digits ends the game with -1.
    """

    def reset(self, seed=None):
        rng = random.Random(None if seed is None else f"guess {seed}")
        self.secret = rng.randint(1, MAX_NUMBER)
        self.num_guesses = 0
        self.low = 1  # the secret is from low to high, by the observations so far
        self.high = MAX_NUMBER
        return f"I think of a number from 1 to {MAX_NUMBER}. Guess it.", {}

    def step(self, answer):
        """Returns observation, reward, terminated, truncated, info."""
        self.num_guesses += 1
        answer = answer.strip()
        if not (answer.isascii() and answer.isdigit() and len(answer) <= 3):
            return "not a number", -1.0, True, False, {}

        guess = int(answer)
        reward = guess_value(self.low, guess, self.high)
        if self.num_guesses > 1:
            reward -= 1 / MAX_GUESSES

        if guess == self.secret:
            return "met", reward, True, False, {}
        if guess < self.secret:
            observation = "higher"
            self.low = max(self.low, guess + 1)
        else:
            observation = "lower"
            self.high = min(self.high, guess - 1)
        if self.num_guesses == MAX_GUESSES:
            return "out of turns", reward, True, False, {}
        return observation, reward, False, False, {}


def guess_value(low, guess, high):
    """What a guess is worth where the secret is uniform from low to high; 0 for a number that is ruled out.

    Half the probability to meet the secret, and half the entropy of the observation, as a share of all 4 bits.
    """
    if not low <= guess <= high:
        return 0.0
    candidates = high - low + 1
    outcomes = (guess - low, 1, high - guess)  # candidates that are lower, met, higher
    entropy = sum(count / candidates * math.log2(candidates / count) for count in outcomes if count > 0)
    return 0.5 / candidates + 0.5 * entropy / math.log2(MAX_NUMBER)


@functools.cache
def optimal_score(candidates, guesses):
    """The expected sum of rewards of optimal play with so many candidates and guesses left."""
    if candidates == 0 or guesses == 0:
        return 0.0
    scores = []
    for guess in range(1, candidates + 1):
        score = guess_value(1, guess, candidates)
        if guesses > 1:
            for remaining in (guess - 1, candidates - guess):
                probability = remaining / candidates
                score += probability * (optimal_score(remaining, guesses - 1) - 1 / MAX_GUESSES)
        scores.append(score)
    return max(scores)


def optimum(max_turns):
    """The expected score of optimal play in so many turns: 29 / 48 = 0.604 for five or more.

    Guessing the middle of what is left meets one of the 16 secrets at turn 1, 2 at turn 2, 4 at turn 3, 8 at turn 4 and
    the last at turn 5, after 3.375 turns on average. A secret that is met has given all 4 bits, so the values add up to
    1 on average, and the score is 1 - (3.375 - 1) / 6.
    """
    return optimal_score(MAX_NUMBER, min(MAX_GUESSES, max_turns))


# --- The agent: adapters on a shared base -----------------------------------------------------------------------------


class Agent:
    """One agent's LoRA adapters on the shared base, its value head and its optimiser."""

    def __init__(self, i, model, tokenizer, updates, args):
        self.engine = None  # vLLM's, shared by all agents
        self.model = model  # a peft.PeftModel, shared by all agents
        self.base_name = args.model
        self.tokenizer = tokenizer
        self.actor = adapters.Adapter(model, f"agent_{i}_actor")
        self.critic = adapters.Adapter(model, f"agent_{i}_critic")
        own_reference = f"agent_{i}_reference" if args.use_separate_reference_adapter else ""  # else the base
        self.reference = adapters.Adapter(model, own_reference)
        width = model.get_base_model().config.get_text_config().hidden_size
        self.value_head = nn.Linear(width, 1).to(model.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        actor_group = {"params": adapters.parameters(model, self.actor), "lr": args.lr_actor}
        critic_group = {"params": adapters.parameters(model, self.critic), "lr": args.lr_critic}
        critic_group["params"] += self.value_head.parameters()
        optimizer = torch.optim.AdamW([actor_group, critic_group], weight_decay=0.0)
        self.optimizers = [optimizer]
        self.schedules = [build_schedule(optimizer, updates, args)]
        self.num_skipped = 0  # gradients in a row that were not finite
        self.deviation = 0.0  # that the advantages of the last rollout were divided by


def build_schedule(optimizer, updates, args):
    """Learning rates that rise over the first --warmup-proportion of the updates, then follow a cosine down to 0.

    The updates of an earlier run count (--load-optimizer): the schedule is one of both runs together, and goes on where
    the first ended.
    """
    updates_before = stages.updates_before(args)
    total = updates_before + updates
    warmup = round(args.warmup_proportion * total)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    last = updates_before - 1
    if args.cosine_lr_schedule:
        return transformers.get_cosine_schedule_with_warmup(optimizer, warmup, total, last_epoch=last)
    return transformers.get_constant_schedule_with_warmup(optimizer, warmup, last_epoch=last)


def build_agents(args, device, updates, model=None, tokenizer=None):
    """N agents on one base, from --load-checkpoint where it is given. Raises UserError."""
    args = resolve_args(args, model=model)
    base = models.load_models("model", "model_config", args, device, model)[0]
    tokenizer = models.load_tokenizers(args, tokenizer, model)[0]
    roles = ["actor", "critic"]
    if args.use_separate_reference_adapter:
        roles.append("reference")
    names = [f"agent_{i}_{role}" for i in range(args.num_agents) for role in roles]
    model = adapters.add_adapters(base, stages.build_config(base, args), names)
    agents = [Agent(i, model, tokenizer, updates, args) for i in range(args.num_agents)]
    if args.load_checkpoint:
        stages.load_stage(agents, args)
    if args.shard:
        adapters.shard_base(model)
    if args.gradient_checkpointing:
        adapters.checkpoint_gradients(model)
    model.mergeable = adapters.mergeable_layers(model, args)
    if args.torch_compiler:
        base.base_model.compile(mode=args.torch_compiler, dynamic=True)
    if args.use_vllm:
        shared = engine.get_adapter_engine(model, args, args.max_model_len, args.num_agents)
        for agent in agents:
            agent.engine = shared
    return agents


# --- Rollouts: every agent plays, the environment or the task scores --------------------------------------------------


@dataclass
class Transcript:
    """An agent's side of an episode: token ids, what was sampled of them, and what it earned."""

    prompts: list = field(default_factory=list)  # a string for each turn: the prompt, then observations
    prompt_ids: list = field(default_factory=list)  # tokens of the first prompt
    responses: list = field(default_factory=list)  # a string for each turn
    response_ids: list = field(default_factory=list)  # of the responses, and of the observations between them
    turn_of_token: list = field(default_factory=list)  # the turn in which each of response_ids was sampled, or -1
    logprobs: list = field(default_factory=list)  # log pi of each of response_ids, 0: observed
    rewards: list = field(default_factory=list)  # each turn's, as it is learned from
    raw_rewards: list = field(default_factory=list)  # each turn's, as the environment or reward_func gave it
    truncated: bool = False  # whether it was cut short: then it is worth V after its last token, else 0

    @property
    def ids(self):
        return self.prompt_ids + self.response_ids

    def add_response(self, ids, logprobs, text):
        self.turn_of_token += [len(self.responses)] * len(ids)
        self.response_ids += ids
        self.logprobs += logprobs
        self.responses.append(text)

    def add_observation(self, ids):
        self.turn_of_token += [-1] * len(ids)
        self.response_ids += ids
        self.logprobs += [0.0] * len(ids)


@dataclass
class Rollout(Rows):
    """What one agent did in B episodes of up to T turns, a transcript each; rewards of turns not played are 0.

    From Rows: select, split and map take some of the episodes, without the columns that are padding in all of them. The
    samples of one item, or the games of one seed (--num-generations), are neighbours.
    """

    ids: torch.Tensor  # [B, P + L] the prompt, then responses and observations in turn
    attention_mask: torch.Tensor  # [B, P + L] 1 on tokens, 0 on padding
    turn_of_token: torch.Tensor  # [B, L] the turn in which a token was sampled; -1: it was observed, or is padding
    logprobs: torch.Tensor  # [B, L] log pi_old(a|h), as sampled; learn computes them anew unless samples_exactly
    sampler_logprobs: torch.Tensor  # [B, L] as sampled
    rewards: torch.Tensor  # [B, T] what is learned from: the raw rewards, or what reward_processor made of them
    raw_rewards: torch.Tensor  # [B, T] what is reported: the rewards as the environment or reward_func gave them
    truncated: torch.Tensor  # [B] 1 where an episode was cut short: it is worth V after its last token, else 0
    prompts: list  # B lists of a string for each turn played
    responses: list  # B lists of a string for each turn played

    @property
    def response_mask(self):
        """[B, L] 1 on sampled tokens: observations and padding are holes."""
        return (self.turn_of_token >= 0).float()

    @property
    def response_ids(self):
        """[B, L] the tokens after the prompt."""
        return self.ids[:, -self.turn_of_token.shape[-1] :]

    @property
    def played(self):
        """[B, T] whether a turn was played."""
        turns = torch.arange(self.rewards.shape[1], device=self.rewards.device)
        return (self.turn_of_token[..., None] == turns).any(1)


def collate(transcripts, agent, args):
    """B transcripts of an agent as a rollout."""
    device = agent.model.device

    def pad_right(name, value, width=1):
        rows = [torch.tensor(getattr(transcript, name)) for transcript in transcripts]
        padded = pad_sequence(rows, batch_first=True, padding_value=value).to(device)
        missing = max(0, width - padded.shape[1])
        return pad(padded, (0, missing), value=value)

    prompt_ids = [transcript.prompt_ids for transcript in transcripts]
    prompt_ids, prompt_mask = pad_left(prompt_ids, agent.tokenizer, device)
    response_ids = pad_right("response_ids", agent.tokenizer.pad_token_id).long()
    columns = torch.arange(response_ids.shape[1])
    lengths = torch.tensor([len(transcript.response_ids) for transcript in transcripts])
    token_mask = (columns < lengths[:, None]).long().to(device)
    logprobs = pad_right("logprobs", 0.0)
    return Rollout(
        ids=torch.cat([prompt_ids, response_ids], 1),
        attention_mask=torch.cat([prompt_mask, token_mask], 1),
        turn_of_token=pad_right("turn_of_token", -1).long(),
        logprobs=logprobs,
        sampler_logprobs=logprobs,
        rewards=pad_right("rewards", 0.0, args.max_turns),
        raw_rewards=pad_right("raw_rewards", 0.0, args.max_turns),
        truncated=torch.tensor([float(transcript.truncated) for transcript in transcripts], device=device),
        prompts=[transcript.prompts for transcript in transcripts],
        responses=[transcript.responses for transcript in transcripts],
    )


def make_rollout(agent, ids, action_masks, turn_ids, rewards, args):
    """A rollout for `learn` of B transcripts of one's own; pi_old is the agent's actor as it is.

    Lists of B lists: token ids; 1 on those that an actor sampled; each token's turn, from 0; each turn's reward.
    Raises UserError.
    """
    check_transcripts(ids, action_masks, turn_ids, rewards)
    transcripts = []
    for row_ids, mask, turns, row_rewards in zip(ids, action_masks, turn_ids, rewards):
        start = mask.index(1)
        transcript = Transcript(prompt_ids=row_ids[:start], response_ids=row_ids[start:])
        for turn, sampled in zip(turns[start:], mask[start:]):
            transcript.turn_of_token.append(turn if sampled else -1)
            transcript.logprobs.append(0.0)
        transcript.rewards = [float(reward) for reward in row_rewards]
        transcript.raw_rewards = transcript.rewards
        transcripts.append(transcript)
    rollout = collate(transcripts, agent, args)
    rollout.logprobs = compute_logprobs(agent.actor, rollout, args)
    rollout.sampler_logprobs = rollout.logprobs
    return rollout


def encode(prompts, agent, args):
    """Token ids of B prompts, strings, a list for each. Raises UserError where one is too long."""
    limit = tasks.prompt_limit(agent.model.config, args, "max_output_tokens")
    return limit.encode(prompts, agent.tokenizer)


def choose_tokens(logits, args, generator, greedy):
    """Next tokens [B] from logits [B, vocabulary], already divided by the temperature."""
    if greedy:
        return logits.argmax(-1)
    if args.top_k:
        logits = transformers.TopKLogitsWarper(args.top_k)(None, logits)
    if args.top_p < 1:
        logits = transformers.TopPLogitsWarper(args.top_p)(None, logits)
    if args.min_p:
        logits = transformers.MinPLogitsWarper(args.min_p)(None, logits)
    probabilities = logits.softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def take_logprobs(log_pi, tokens):
    """log pi [...] of the tokens [...], from log pi [..., vocabulary] of all tokens."""
    return log_pi.gather(-1, tokens[..., None]).squeeze(-1)


def sample_tokens(agent, transcripts, args, generator, greedy):
    """Let an agent add a response to each of B transcripts, token by token.

    Rows that have ended are dropped from the batch and from the cache: only rows that still run are computed.
    """
    device = agent.model.device
    end_ids = torch.tensor(end_tokens(agent.model, agent.tokenizer), device=device)
    penalise = transformers.RepetitionPenaltyLogitsProcessor(args.repetition_penalty)
    ids, mask = pad_left([transcript.ids for transcript in transcripts], agent.tokenizer, device)
    first_ids = ids.gather(1, mask.argmax(1, keepdim=True))
    ids = torch.where(mask > 0, ids, first_ids)  # in place of padding, which --repetition-penalty would meet
    response_ids = torch.full((len(ids), args.max_output_tokens), -1, device=device)  # -1 after the end
    logprobs = torch.zeros(response_ids.shape, device=device)
    rows = torch.arange(len(ids), device=device)
    input_ids = ids
    cache = None
    for t in range(args.max_output_tokens):
        inputs = {"input_ids": input_ids, "attention_mask": mask, "positions": args.calc_position_embeddings}
        out = adapters.forward(agent.model, agent.actor, **inputs, cache=cache, keep=1, use_cache=True)
        logits = penalise(ids, out.logits[:, -1].float())
        logits = logits / args.temperature
        if t < args.min_output_tokens:
            logits[:, end_ids] = -torch.inf
        tokens = choose_tokens(logits, args, generator, greedy)
        response_ids[rows, t] = tokens
        logprobs[rows, t] = take_logprobs(logits.log_softmax(-1), tokens)

        running = ~torch.isin(tokens, end_ids)
        if not running.any():
            break
        cache = out.cache
        if not running.all():
            cache.reorder_cache(running.nonzero().squeeze(1))
        rows = rows[running]
        input_ids = tokens[running, None]
        ids = torch.cat([ids[running], input_ids], 1)
        mask = pad(mask[running], (0, 1), value=1)

    for transcript, row_ids, row_logprobs in zip(transcripts, response_ids, logprobs):
        sampled = row_ids >= 0
        text = agent.tokenizer.decode(row_ids[sampled], skip_special_tokens=True)
        transcript.add_response(row_ids[sampled].tolist(), row_logprobs[sampled].tolist(), text)


@torch.no_grad()
def respond(agents, transcripts, args, generator, greedy=False):
    """Let each of N agents add a response to each of its transcripts; `transcripts` is N lists."""
    if agents[0].engine:  # vLLM, which has the agents' adapters already
        agents[0].engine.respond(agents, transcripts, args.max_output_tokens, args, generator, greedy)
        return
    for agent, own in zip(agents, transcripts):
        size = args.hf_generate_chunk_size or len(own)
        # forward would cast what learns for each token; here once
        with causal_lm.autocast(agent.model), adapters.merged(agent.model, agent.actor):
            for start in range(0, len(own), size):
                sample_tokens(agent, own[start : start + size], args, generator, greedy)


def sample(agent, prompts, args, generator, greedy=False):
    """Let an agent answer B prompts, strings: a rollout of one turn, without rewards. Raises UserError.

    `greedy`: the likeliest tokens.
    """
    transcripts = []
    for prompt, ids in zip(prompts, encode(prompts, agent, args)):
        transcripts.append(Transcript([prompt], ids))
    if agent.engine:
        agent.engine.hand_over_adapters([agent])
    respond([agent], [transcripts], args, generator, greedy)
    return collate(transcripts, agent, args)


def act(agent, prompts, args, generator=None, greedy=False):
    """An agent's responses, B strings, to B prompts, strings or chats; no generator: torch's own. Raises UserError.

    `args` are those of a Run, with what depends on others filled in.
    """
    texts = [render(prompt, agent.tokenizer) for prompt in prompts]
    rollout = sample(agent, texts, args, generator, greedy)
    return [turns[0] for turns in rollout.responses]


def observe(transcript, message, agent, args):
    """Append what is said next to a transcript, if it fits. Returns whether another response fits after it."""
    ids = reply(message, transcript.response_ids[-1], agent.tokenizer)
    longest = args.max_model_len or math.inf
    room = longest - len(transcript.ids) - len(ids)
    if room >= 0:
        transcript.add_observation(ids)
    return room >= args.max_output_tokens


def play(agents, task, items, args, generator, phase=lambda name: None, greedy=False):
    """Play an episode of each of B items, turn by turn: every agent answers, the team is scored. N rollouts.

    `task` is a task, or, without --task, a function that makes an environment. An episode ends after --max-turns turns,
    after one with a reward above --early-termination-threshold, where external_transition returns None, and where the
    environment terminates it. It is truncated where the environment says so, also in the last turn, and where a
    transcript has no room for another response. Where an environment fails, its episode has no turn in the rollouts.
    `phase` is called with the name of what takes the time; `greedy`: the likeliest tokens. Raises TaskError where a
    task fails, or all environments do.
    """
    threshold = args.early_termination_threshold
    if args.task:
        episodes = tasks.Episodes(task, items, args.num_agents, args.max_turns, args.reward_timeout)
    else:
        episodes = envs.Games(task, items, args.reward_timeout)
    # Tasks and games have the same methods, which call the user's functions and check what these return:
    #   prompts              what an agent reads first: the formatters' prompts, or observations after a reset
    #   reward_func          raw and processed rewards; a game makes its step; a task that fails is asked twice
    #   external_transition  the next prompts, or the observation; None: the episode has ended
    #   messages             what is new in the last prompts, a string for each agent
    #   truncated, dropped   episodes that an environment cut short, or in which it failed
    running = [k for k in range(len(items)) if k not in episodes.dropped]  # the episodes that go on
    transcripts = [[Transcript() for _ in items] for _ in agents]
    for i, agent in enumerate(agents):
        prompts = episodes.prompts(i, running, agent.tokenizer)
        for k, prompt, ids in zip(running, prompts, encode(prompts, agent, args)):
            transcripts[i][k] = Transcript([prompt], ids)
    if agents[0].engine:
        agents[0].engine.hand_over_adapters(agents)
    with sharding.whole_models([] if agents[0].engine else [agents[0].model]):
        for turn in range(args.max_turns):
            if not running:
                break
            phase("sample")
            playing = [[own[k] for k in running] for own in transcripts]
            respond(agents, playing, args, generator, greedy)

            phase("reward")
            prompts = [[transcript.prompts[-1] for transcript in own] for own in playing]
            responses = [[transcript.responses[-1] for transcript in own] for own in playing]
            raw_rewards, rewards = episodes.reward_func(running, prompts, responses)  # each [N][len(running)]
            for i, own in enumerate(playing):
                for row, transcript in enumerate(own):
                    transcript.raw_rewards.append(raw_rewards[i][row])
                    transcript.rewards.append(rewards[i][row])

            answered = running
            running = []
            for k, agent_rewards in zip(answered, zip(*raw_rewards)):
                team_reward = sum(agent_rewards) / args.num_agents  # as reward_func gave it
                good_enough = threshold is not None and team_reward > threshold
                truncated = k in episodes.truncated
                if (good_enough or turn + 1 == args.max_turns) and not truncated:
                    continue  # worth 0 from here on
                next_prompts = episodes.external_transition(k)
                if next_prompts is None:
                    continue  # worth 0 from here on
                episodes.add_prompts(k, next_prompts)
                messages = episodes.messages(k)
                has_room = []
                for own, message, agent in zip(transcripts, messages, agents):
                    has_room.append(observe(own[k], message, agent, args))
                if truncated or not all(has_room):
                    for own in transcripts:
                        own[k].truncated = True
                    continue  # worth V
                for own, message in zip(transcripts, messages):
                    own[k].prompts.append(message)
                running.append(k)
    episodes.finish()
    for k in episodes.dropped:
        for own in transcripts:
            own[k] = Transcript(prompt_ids=[agents[0].tokenizer.pad_token_id])
    return [collate(own, agent, args) for own, agent in zip(transcripts, agents)]


# --- Learning: log-probabilities, values, rewards, advantages, the losses ---------------------------------------------


def model_inputs(rollout, args):
    """What a model reads: whole transcripts."""
    positions = args.calc_position_embeddings
    return {"input_ids": rollout.ids, "attention_mask": rollout.attention_mask, "positions": positions}


def forward_policy(policy, rollout, args):
    """log pi(.|h) [B, L, vocabulary] before each of the L tokens after a prompt, of an adapter on the base."""
    L = rollout.logprobs.shape[-1]
    out = adapters.forward(policy.model, policy, **model_inputs(rollout, args), keep=L + 1)
    logits = out.logits[:, :-1].float() / args.temperature
    return logits.log_softmax(-1)


def critic_values(agent, rollout, args):
    """V before each of the L tokens after a prompt, then V after the last: [B, L + 1]."""
    L = rollout.logprobs.shape[-1]
    inputs = model_inputs(rollout, args)
    hidden_states = adapters.hidden_states(agent.model, agent.critic, **inputs, keep=L + 1)
    return agent.value_head(hidden_states.float()).squeeze(-1)


def forward_size(args):
    """Episodes in a forward pass."""
    return args.micro_batch_size_per_gpu or args.batch_size // distributed.world_size()


@torch.no_grad()
def compute_logprobs(policy, rollout, args):
    """log pi(a|h) [B, L] of the tokens after a prompt, sampled or observed, of an adapter on the base."""

    def compute(part):
        log_pi = forward_policy(policy, part, args)
        return take_logprobs(log_pi, part.response_ids)

    with adapters.merged(policy.model, policy):
        return rollout.map(compute, forward_size(args))


@torch.no_grad()
def compute_values(agent, rollout, args):
    """V before each of the L tokens after a prompt, then V after the last: [B, L + 1]."""
    with adapters.merged(agent.model, agent.critic):
        return rollout.map(lambda part: critic_values(agent, part, args), forward_size(args))


def samples_exactly(agent, args):
    """Whether the sampler's log-probabilities are those of learning, to 1e-5: full precision, nothing left out.

    The kernels of vLLM, and of a quantized base, round in another way when a batch has another size.
    """
    if args.use_vllm or getattr(agent.model.config, "quantization_config", None):
        return False
    full_precision = agent.model.dtype == torch.float32 and args.mixed_precision == "no"
    full_support = args.top_p == 1 and args.top_k == 0 and args.min_p == 0 and args.min_output_tokens == 0
    return full_precision and full_support and args.repetition_penalty == 1 and args.calc_position_embeddings


def moments(x, mask):
    """(mean, standard deviation) of x where the mask is 1, in all processes."""
    count = distributed.total(mask.sum())
    mean = distributed.total((x * mask).sum()) / count
    variance = distributed.total(((x - mean) ** 2 * mask).sum()) / count
    return mean, variance.sqrt()


def divisor(mean, deviation, least):
    """max(deviation, least); infinite where the deviation is one of rounding: what was divided by it would be noise."""
    is_rounding = deviation <= 1e-6 * mean.abs().clamp(min=1)
    return deviation.clamp(min=least).masked_fill(is_rounding, torch.inf)


def standardise(x, mask, least=0.0):
    """(x - mean) / max(deviation, least) where the mask is 1, in all processes; 0 elsewhere, or if all are equal."""
    mean, deviation = moments(x, mask)
    return (x - mean) / divisor(mean, deviation, least) * mask


def remember_deviation(learner, advantages, mask):
    """The deviation of the advantages, or 98 % of the one before, where that is larger; the learner keeps it.

    Advantages are divided by it. Where nearly all episodes earn the same, what is left of them is the critic's noise.
    """
    deviation = float(moments(advantages, mask)[1])
    learner.deviation = max(0.98 * learner.deviation, deviation)
    return learner.deviation


def earn_the_same(rewards, played):
    """Whether the rewards [B, T] of all episodes, in all processes, have one sum: then none is better than another."""
    mean, deviation = moments(rewards.sum(1), played[:, 0].float())
    return bool(divisor(mean, deviation, 0.0).isinf())


def first_tokens(rollout):
    """[B, L] 1 on the first token of each turn."""
    previous_turn = pad(rollout.turn_of_token[:, :-1], (1, 0), value=-1)
    return rollout.response_mask * (rollout.turn_of_token != previous_turn)


def last_tokens(rollout):
    """[B, L] 1 on the last token of each turn."""
    next_turn = pad(rollout.turn_of_token[:, 1:], (0, 1), value=-1)
    return rollout.response_mask * (rollout.turn_of_token != next_turn)


def to_turns(x, rollout, reduction="sum"):
    """Numbers of tokens, [B, L], as one for each turn, [B, T]: their sum, or what `reduction` says."""
    mask = rollout.response_mask
    if reduction == "first_value":
        mask = first_tokens(rollout)
    if reduction == "final_value":
        mask = last_tokens(rollout)
    turns = rollout.turn_of_token.clamp(min=0)
    blank = torch.zeros_like(rollout.rewards)
    sums = blank.scatter_add(1, turns, x * mask)
    if reduction == "mean":
        sums = sums / blank.scatter_add(1, turns, mask).clamp(min=1)
    return sums


def to_tokens(x, rollout):
    """Numbers of turns, [B, T], repeated at the turns' tokens, [B, L]."""
    return x.gather(1, rollout.turn_of_token.clamp(min=0)) * rollout.response_mask


def bootstrap_rewards(rollout, values, args):
    """[B, T] the rewards, plus gamma V after the last token on the last turn of a truncated episode."""
    L = rollout.logprobs.shape[-1]
    end = rollout.attention_mask[:, -L:].sum(1, keepdim=True)
    future = args.gamma * rollout.truncated[:, None] * values.gather(1, end)
    num_turns = rollout.played.sum(1, keepdim=True)
    last_turn = (num_turns - 1).clamp(min=0)
    return rollout.rewards.scatter_add(1, last_turn, future)


def values_of_actions(values, rollout, args):
    """V of actions, [B, K], from V [B, L + 1]: before a token, or of a turn, from those of its tokens."""
    values = values[:, :-1]
    if args.action_granularity == "token":
        return values * rollout.response_mask
    return to_turns(values, rollout, args.turn_value_reduction)


def to_actions(rewards, values, rollout, args):
    """Rewards of turns, [B, T], and V [B, L + 1] as rewards, values and mask of actions, [B, K].

    With tokens as actions a turn's reward is its last token's.
    """
    values = values_of_actions(values, rollout, args)
    if args.action_granularity == "token":
        rewards = to_tokens(rewards, rollout) * last_tokens(rollout)
        return rewards, values, rollout.response_mask
    return rewards, values, rollout.played.float()


def gae(rewards, values, mask, gamma, gae_lambda):
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) along chains of actions.

    A_t = sum_l (gamma lambda)^l delta_{t+l} with delta_t = r_t + gamma V_{t+1} - V_t and V = 0 after the last action.
    All are [B, C], or [B, T, K], where an episode's turns follow one another; positions with mask 0 are skipped.
    Returns (advantages, returns), with returns = A + V the critic's targets; 0 where the mask is 0.
    """
    shape = rewards.shape
    rewards = rewards.flatten(1)
    values = values.flatten(1)
    mask = mask.flatten(1)
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * gae_lambda * next_advantage
        next_value = torch.where(mask[:, t] > 0, values[:, t], next_value)
        next_advantage = torch.where(mask[:, t] > 0, advantages[:, t], next_advantage)
    returns = advantages + values
    return (advantages * mask).view(shape), (returns * mask).view(shape)


@dataclass
class Batch(Rollout):
    """A rollout, and what the losses need beside it; the counts are of the mini-batch, also in its micro-batches."""

    reference_logprobs: torch.Tensor | None  # [B, L] log pi_ref(a|h); None with --beta 0
    old_values: torch.Tensor  # [B, K] V(h) before the update
    advantages: torch.Tensor  # [B, K]
    returns: torch.Tensor  # [B, K] the critic's targets
    action_mask: torch.Tensor  # [B, K] 1 on actions: on sampled tokens, or on turns that were played
    num_tokens: torch.Tensor | None = None  # sampled tokens, on average over the processes
    num_actions: torch.Tensor | None = None  # actions, on average over the processes


def minibatches(batch, args, generator):
    """The mini-batches of a rollout's batch, in a new random order; an episode's turns stay together."""
    order = torch.randperm(len(batch.ids), generator=generator, device=generator.device)
    size = args.batch_size // distributed.world_size()
    for rows in order.split(size):
        minibatch = batch.select(rows)
        num_tokens = distributed.mean(minibatch.response_mask.sum())
        num_actions = distributed.mean(minibatch.action_mask.sum())
        minibatch.num_tokens = num_tokens.clamp(min=1e-3)  # 0 where all are dropped
        minibatch.num_actions = num_actions.clamp(min=1e-3)
        yield minibatch


def ppo_loss(agent, part, args):
    """The actor's loss of a micro-batch, and its metrics: sums over it, divided by the counts of its mini-batch.

    The policy's loss and the clip fraction are means over tokens, with --turn-level-clip over turns.
    """
    mask = part.response_mask
    log_pi = forward_policy(agent.actor, part, args)
    logprobs = take_logprobs(log_pi, part.response_ids)
    if args.ent_coef == 0:
        log_pi = log_pi.detach()  # the entropy is a metric only
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    entropy = (entropy * mask).sum() / part.num_tokens
    log_ratio = (logprobs - part.logprobs) * mask
    approx_kl = log_ratio.exp() - 1 - log_ratio
    approx_kl = approx_kl.sum() / part.num_tokens
    k3 = torch.zeros_like(entropy)
    if args.beta > 0:
        d = (part.reference_logprobs - logprobs) * mask
        k3 = (d.exp() - d - 1).sum() / part.num_tokens

    sampler_log_ratio = (part.logprobs - part.sampler_logprobs) * mask
    if args.turn_level_clip:  # the ratio of a turn is the product of its tokens'
        log_ratio = to_turns(log_ratio, part)
        sampler_log_ratio = to_turns(sampler_log_ratio, part)
        advantages = part.advantages
        num_ratios = part.num_actions
    elif args.action_granularity == "turn":  # each token has its turn's advantage
        advantages = to_tokens(part.advantages, part)
        num_ratios = part.num_tokens
    else:
        advantages = part.advantages
        num_ratios = part.num_tokens

    rho = log_ratio.exp()
    clipped_rho = rho.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    ratio_losses = torch.max(-advantages * rho, -advantages * clipped_rho)
    if args.use_vllm and args.sampler_correction:  # the weight of a ratio is pi_old / pi of vLLM, at most 2
        weights = sampler_log_ratio.exp()
        ratio_losses = weights.clamp(max=2.0) * ratio_losses
    policy_loss = ratio_losses.sum() / num_ratios
    clip_fraction = (rho != clipped_rho).float().sum() / num_ratios

    loss = policy_loss + args.beta * k3 - args.ent_coef * entropy
    metrics = {
        "policy_loss": policy_loss.detach(),
        "entropy": entropy.detach(),
        "k3": k3.detach(),
        "approx_kl": approx_kl.detach(),
        "clip_fraction": clip_fraction,
    }
    return loss, metrics


def value_loss(agent, part, args):
    """The critic's loss of a micro-batch, and its metric: a sum over it, divided by the actions of its mini-batch."""
    values = values_of_actions(critic_values(agent, part, args), part, args)
    change = (values - part.old_values).clamp(-args.clip_coef, args.clip_coef)
    error = (values - part.returns) ** 2
    clipped_error = (part.old_values + change - part.returns) ** 2
    error = torch.max(error, clipped_error)
    loss = 0.5 * (error * part.action_mask).sum() / part.num_actions
    return args.vf_coef * loss, {"value_loss": loss.detach()}


def optimizer_step(agent, args):
    """Clip the gradient, and step; returns metrics. With a gradient that is not finite there is no step.

    Raises UserError when this happens three times in a row.
    """
    optimizer = agent.optimizers[0]
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    distributed.average_gradients(parameters)
    norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
    if norm.isfinite():
        optimizer.step()
        agent.num_skipped = 0
    else:
        agent.num_skipped += 1
    optimizer.zero_grad()
    if agent.num_skipped >= 3:
        raise UserError("three gradients in a row were not finite: lower --lr-actor and --lr-critic")
    return {"grad_norm": norm, "skipped": 1.0 - norm.isfinite().float()}


def learn(agent, rollout, args, generator):
    """One agent's update from its rollout; returns metrics, scalars by name. The generator draws the mini-batches.

    The rollout is one of play, of sample with `rewards` [B, T] from anywhere, or of make_rollout. Passes over it: the
    critic's, the reference's if --beta is above 0, the actor's unless samples_exactly; then, in each epoch, the actor's
    and the critic's, with gradients.
    """
    if not samples_exactly(agent, args):
        rollout = replace(rollout, logprobs=compute_logprobs(agent.actor, rollout, args))
    reference_logprobs = compute_logprobs(agent.reference, rollout, args) if args.beta > 0 else None
    values = compute_values(agent, rollout, args)
    rewards = bootstrap_rewards(rollout, values, args)
    action_rewards, old_values, action_mask = to_actions(rewards, values, rollout, args)
    advantages, returns = gae(action_rewards, old_values, action_mask, args.gamma, args.gae_lambda)
    if args.adv_whitening:
        advantages = standardise(advantages, action_mask, remember_deviation(agent, advantages, action_mask))
        if args.gamma == 1 and earn_the_same(rewards, rollout.played):
            advantages = torch.zeros_like(advantages)  # what there is of them comes from lambda and the critic alone
    batch = Batch(
        **vars(rollout),
        reference_logprobs=reference_logprobs,
        old_values=old_values,
        advantages=advantages,
        returns=returns,
        action_mask=action_mask,
    )

    losses = []
    steps = []
    with adapters.training(agent.model):
        for _ in range(args.update_epochs):
            for minibatch in minibatches(batch, args, generator):
                for part in minibatch.split(forward_size(args)):  # their gradients add up
                    actor_loss, actor_metrics = ppo_loss(agent, part, args)
                    actor_loss.backward()
                    critic_loss, critic_metrics = value_loss(agent, part, args)
                    critic_loss.backward()
                    losses.append(actor_metrics | critic_metrics)
                steps.append(optimizer_step(agent, args))
    for schedule in agent.schedules:
        schedule.step()
    return update_metrics(batch, losses, steps, with_sampler=args.use_vllm)


def update_reference(agent, count, size, num_items, args):
    """Copy the actor to the reference after every --reference-update-interval passes over the training set.

    An update has `size` of its `num_items` items; with it they are `count`.
    """
    interval = args.reference_update_interval * num_items
    if interval and count // interval > (count - size) // interval:
        adapters.copy_adapter(agent.model, agent.actor, agent.reference)


# --- main: sample, score, learn, log ----------------------------------------------------------------------------------


def evaluate(agents, task, items, args):
    """The mean score of held-out episodes, played with the likeliest tokens, as AgileRL's fitness is."""
    own_items = items[distributed.rank() :: distributed.world_size()]
    some_items = own_items or items[:1]  # all processes play, also one without items, whose episode does not count
    rollouts = play(agents, task, some_items, args, generator=None, greedy=True)
    return mean_reward(rollouts, count=len(own_items) > 0)


def main(args=None, task=None, model=None, tokenizer=None, train_dataset=None, eval_dataset=None, env=None):
    """Train an agent or a team; returns its agents and its Run. Raises UserError for what the user can fix.

    `task` (any object with a task's names), `model` (loaded; it is copied), `tokenizer` and `env` (a class, a function
    that makes an environment, or a module with one) replace what the flags name; `train_dataset` and `eval_dataset`,
    rows of a datasets.Dataset or a list of dicts, replace the task's own.
    """
    device = distributed.start()
    args = resolve_args(args or Args(), task, model, env)
    size = args.rollout_buffer_size // args.num_generations  # items of an update
    rows = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    if args.task:
        task = tasks.load_task(task or args.task, args.num_agents, args.max_turns)
        readers = tasks.readers(args, "max_output_tokens", model, tokenizer, quantized=True)
        train_items, held_out_items = tasks.load_data(task, args, readers, size, **rows, most="eval_loop")
        optimum = tasks.optimum(task, train_items, args.num_agents, args.max_turns)
    else:
        task, optimum = envs.load_env(env or args.env or sys.modules[__name__], args.max_turns)
        train_items, held_out_items = envs.game_seeds(args, size, args.eval_loop or 256, **rows)
    run = Run(
        args,
        script=__file__,
        subject=args.task or args.env,
        num_items=len(train_items),
        items_per_update=size,
        may_change=MAY_CHANGE,
        memory_flags={  # of each phase the flag that takes less, and what it is where it is None
            "sample": ("hf_generate_chunk_size", args.rollout_buffer_size),
            "learn": ("micro_batch_size_per_gpu", args.batch_size),
        },
        held_out_metric="fitness",
        optimum=optimum,
    )

    set_seed(args.seed)
    agents = build_agents(args, device, run.num_updates, model, tokenizer)
    generator = distributed.generator(args.seed, device)
    save = functools.partial(adapters.save_agents, with_optimizer=args.save_optimizer, with_base=args.save_base)
    with run.start(agents, generator, save, adapters.load_agents):  # which resumes, and saves however it ends
        if held_out_items and run.step == 0 and args.evaluation_interval:
            run.phase("evaluate")
            run.untrained = evaluate(agents, task, held_out_items, args)
        for step, items in run.updates(train_items):  # this process's items of an update
            # 1. Every agent plays, and the environment or the task scores.
            items = [item for item in items for _ in range(args.num_generations)]
            rollouts = play(agents, task, items, args, generator, run.phase)

            # 2. Each agent learns alone.
            run.phase("learn")
            metrics = [learn(agent, rollout, args, generator) for agent, rollout in zip(agents, rollouts)]
            _, count = run.progress(step)
            for agent in agents:
                update_reference(agent, count, size, len(train_items), args)

            # 3. Metrics, held-out episodes, samples.
            held_out = None
            if held_out_items and run.is_due(step, args.evaluation_interval):
                run.phase("evaluate")
                held_out = evaluate(agents, task, held_out_items, args)
            counts = {} if args.task and args.max_turns == 1 else envs.episode_counts(rollouts[0])
            run.log(items, rollouts, metrics, counts | tasks.extra_metrics(task, rollouts), held_out)
    return agents, run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
