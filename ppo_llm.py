"""PPO for language models on LoRA adapters: one agent or a team on one shared base, one turn or many, in one file.

Agent i with its actor theta_i, its critic phi_i, the actor of the rollout (old) and a reference (ref) descends, for an
action a after all tokens h before it,

    E[ max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) ] + beta E[ exp(d) - d - 1 ] - c E[ H(pi) ],
    rho = pi(a|h) / pi_old(a|h),    d = log pi_ref(a|h) - log pi(a|h),

while its critic descends vf_coef / 2 E[ max((V - G)^2, (clip(V, V_old - eps, V_old + eps) - G)^2) ], G = A + V_old.
A is generalised advantage estimation over the turns of an episode, or over its tokens (--action-granularity), and is
standardised after G is taken. With turns as actions, each token of a turn has the turn's A.

    python ppo_llm.py                                   guess a number in at most six turns
    python ppo_llm.py --task tldr --num-agents 2        two agents summarise, one turn
    torchrun --nproc-per-node 2 ppo_llm.py              two processes, each with half of the episodes

An episode in an environment is one transcript: prompt, response, observation, response ... Only what the agent sampled,
the end of its turn included, is an action, and one forward pass learns from all turns. After its end, and after its
last turn, an episode is worth 0; where it is truncated, by the environment or for lack of room, V of its end. N agents
share one frozen base; each has its own LoRA adapters (actor, critic, reference) and value head.

Simplified: the base stays in eval mode; LoRA's dropout, if any, is on only while learning. With --top-p, --top-k,
--min-p or --repetition-penalty pi_old is still the distribution without them.
Source: AgileRL's page on LLMPPO; PPO (arXiv 1707.06347); GAE (arXiv 1506.02438); LoRA (arXiv 2106.09685).

Shapes: B episodes of a rollout, T turns of an episode, R transcripts of an episode (1 in an environment, T on a task,
where each turn has a prompt of its own), P tokens of a transcript before its first response (left-padded), L after that
(right-padded). What belongs to tokens is [B, R, L], and as [B, R * L] one chain; what belongs to turns is [B, T].
"""

import copy
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
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from utils import adapters, distributed, engine, sharding, stages, tasks
from utils.causal_lm import check_padding
from utils.cli import Settings, UserError, check_needs, command_line, flag_name, flags
from utils.envs import EnvArgs, Games, load_env
from utils.faults import Faults
from utils.lora import LoraArgs, check_lora_args
from utils.metrics import average, explained_variance, sampler_metrics, team_metrics
from utils.models import check_model, from_pretrained, loading, place
from utils.prompts import end_tokens, render, reply
from utils.run import FolderArgs, Run, run_folder

# --- Args: the flags --------------------------------------------------------------------------------------------------


@flags
class TrainingArgs:
    """How long, from which seed."""

    seed: NonNegativeInt = 1  # seed of everything random: the same seed gives the same run
    num_train_epochs: PositiveInt = 3  # passes over the training set
    max_steps: PositiveInt | None = None  # joint samples after which the run ends, in whole updates; none: no such end
    evaluation_interval: NonNegativeInt = 25  # updates between evaluations; 0: never
    eval_loop: PositiveInt | None = None  # held-out episodes in an evaluation; none: 256 games, all items of a task


@flags
class PolicyArgs:
    """The agents: adapters on one base."""

    model: str = "utils/tiny_lm"  # folder or hub name of the base, whose weights stay as they are
    model_config: Settings = field(default_factory=dict)  # settings that the base is loaded with, JSON values by name
    num_agents: PositiveInt = 1  # agents in the team; more than one takes a --task
    use_separate_reference_adapter: bool = True  # the reference is a copy of the actor as it was; off: the base
    reference_update_interval: NonNegativeInt = 0  # passes over the training set between copies of the actor to it
    dtype: Literal["float32", "bfloat16"] = "float32"  # data type of the base's weights
    mixed_precision: Literal["no", "bf16"] = "no"  # autocast to this type in the forward pass, not attention on a CPU
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"  # attention kernel
    trust_remote_code: bool = False  # run code that comes with a hub model
    shard: bool = False  # let each of several processes hold a part of the base, in place of the whole (FSDP)
    gradient_checkpointing: bool = False  # keep less of the forward pass, and compute it again for the backward pass
    torch_compiler: Literal["default", "reduce-overhead", "max-autotune"] | None = None  # torch.compile's mode
    calc_position_embeddings: bool = True  # positions from a row's first token; off: from its padding (rotary only)


@flags
class GenerationArgs:
    """Sampling: how episodes are played."""

    rollout_buffer_size: PositiveInt = 64  # episodes between two updates, over all processes
    max_turns: PositiveInt | None = None  # turns of an episode; none: 6 in an environment, 1 on a task
    early_termination_threshold: float | None = None  # on a task: end an episode after a mean reward above this
    max_output_tokens: PositiveInt | None = None  # longest response; none: 8 tokens in an environment, 72 on a task
    min_output_tokens: NonNegativeInt = 0  # a response may not end before so many
    max_model_len: PositiveInt | None = None  # most tokens of a transcript: an episode stops before; none: the model's
    temperature: PositiveFloat = 1.0  # the logits are divided by it
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sample from the likeliest tokens that sum up to it
    top_k: NonNegativeInt = 0  # sample from so many likeliest tokens; 0: from all
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0  # sample from tokens at least this share as likely as the best
    repetition_penalty: PositiveFloat = 1.0  # above 1: what stands in the transcript is less likely to come again
    hf_generate_chunk_size: PositiveInt | None = None  # prompts sampled at once; none: all


@flags
class PPOArgs:
    """The algorithm."""

    action_granularity: Literal["turn", "token", "auto"] = "auto"  # what is an action; auto: turn if --max-turns > 1
    turn_value_reduction: Literal["first_value", "mean", "final_value"] = "first_value"  # V of a turn, from its tokens'
    turn_level_clip: bool = False  # the ratio of a turn, not of each of its tokens; takes turns as actions
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0  # discount factor between actions
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | None = None  # lambda of GAE; none: 0.7 for turns, 0.95 for tokens
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
    EnvArgs,
    tasks.TaskArgs,
    FolderArgs,
    PolicyArgs,
    LoraArgs,
    stages.StageArgs,
    GenerationArgs,
    engine.VllmArgs,
    PPOArgs,
    OptimizationArgs,
):
    """All flags."""


MOST_WEIGHT = 2.0  # at which sampler_weights are truncated
# Flags that may be others when a run is resumed
MAY_CHANGE = "gradient_checkpointing micro_batch_size_per_gpu save_optimizer save_base shard vllm_config".split()
NO_LIMIT = 2**31 - 1  # of --max-model-len, for a model without one


def resolve_args(args, task=None, model=None, env=None):
    """The flags with what depends on others filled in. Raises UserError for flags that do not go together."""
    if task is not None and args.task is None:
        args = replace(args, task=getattr(task, "__name__", "task"))
    if env is not None and args.env is None:
        args = replace(args, env=getattr(env, "__name__", "env"))
    max_turns = args.max_turns or (1 if args.task else 6)
    granularity = args.action_granularity
    if granularity == "auto":
        granularity = "turn" if max_turns > 1 else "token"
    gae_lambda = args.gae_lambda
    if gae_lambda is None:
        gae_lambda = 0.7 if granularity == "turn" else 0.95
    if model is None:
        config = check_model(args.model, "--model", args.trust_remote_code, args.model_config, "--model-config")
    elif args.model_config:
        raise UserError("--model-config has no effect on a model that is loaded")
    else:
        config = model.config
    if "quantization_config" in args.model_config or hasattr(config, "quantization_config"):
        for flag in ("shard", "use_vllm"):
            if getattr(args, flag):
                raise UserError(f"{flag_name(flag)} takes a base that is not quantized")
    room = engine.max_length(config, args) or args.max_model_len or NO_LIMIT
    own_batch_size = math.ceil(args.batch_size / distributed.world_size())
    args = replace(
        args,
        max_turns=max_turns,
        action_granularity=granularity,
        gae_lambda=gae_lambda,
        max_output_tokens=args.max_output_tokens or (72 if args.task else 8),
        max_model_len=min(args.max_model_len or room, room),
        train_size=args.train_size or (None if args.task else 4800),
        lr_critic=args.lr_actor if args.lr_critic is None else args.lr_critic,
        micro_batch_size_per_gpu=args.micro_batch_size_per_gpu or own_batch_size,
    )
    if args.task and args.max_prompt_length is None and args.max_model_len < NO_LIMIT:
        args = replace(args, max_prompt_length=max(1, args.max_model_len - args.max_output_tokens))
    check_args(args)
    return args


def check_args(args):
    """Raise UserError for flags that do not go together, before anything is loaded or written."""
    processes = distributed.world_size()
    if args.shard and processes == 1:
        raise UserError("--shard takes several processes, and this is one: start them with torchrun, or add --no-shard")
    if args.shard and args.torch_compiler:
        raise UserError("--shard takes a base that is not compiled: leave out --torch-compiler")
    if args.rollout_buffer_size % processes:
        takes = f"a multiple of {processes} processes"
        raise UserError(f"--rollout-buffer-size takes {takes}, got {args.rollout_buffer_size}")
    if args.batch_size % processes:
        raise UserError(f"--batch-size takes a multiple of {processes} processes, got {args.batch_size}")
    if args.env and args.task:
        raise UserError(f"--env {args.env} and --task {args.task} are two things to train on; give one")
    if args.num_agents > 1 and args.task is None:
        raise UserError(f"--num-agents {args.num_agents} takes a --task; an environment has one player")
    if args.task is None and args.train_size < args.rollout_buffer_size:
        least = f"--rollout-buffer-size, {args.rollout_buffer_size}"
        raise UserError(f"--train-size takes at least {least}, got {args.train_size}")
    if args.turn_level_clip and args.action_granularity != "turn":
        raise UserError("--turn-level-clip takes turns as actions (--action-granularity turn)")
    if args.turn_value_reduction != "first_value" and args.action_granularity != "turn":
        raise UserError("--turn-value-reduction takes turns as actions (--action-granularity turn)")
    if args.early_termination_threshold is not None and args.max_turns == 1:
        raise UserError("--early-termination-threshold takes several turns (--max-turns)")
    check_order(args, "min_output_tokens", "max_output_tokens")
    check_order(args, "max_output_tokens", "max_model_len")
    if args.max_prompt_length and args.max_prompt_length + args.max_output_tokens > args.max_model_len:
        room = f"--max-model-len {args.max_model_len} less --max-output-tokens {args.max_output_tokens}"
        raise UserError(f"--max-prompt-length takes at most {room}, got {args.max_prompt_length}")
    check_needs(args, {"dataset": "task", "eval_size": "task", "early_termination_threshold": "task"})
    check_needs(args, {"max_prompt_length": "task", "long_prompts": "task"})
    check_needs(args, {"load_optimizer": "load_checkpoint", "merge_lora_configs": "load_checkpoint"})
    check_needs(args, {"keep_reference": "load_checkpoint", "fresh_critic": "load_checkpoint"})
    check_needs(args, {"keep_reference": "use_separate_reference_adapter"})
    check_needs(args, {"keep_reference": "beta"})
    check_needs(args, {"reference_update_interval": "use_separate_reference_adapter"})
    check_needs(args, {"reference_update_interval": "beta"})
    check_lora_args(args)
    engine.check_vllm_args(args)
    if args.use_vllm and args.hf_generate_chunk_size:
        raise UserError("--hf-generate-chunk-size has no effect with --use-vllm: --vllm-config has max_num_seqs")
    if args.use_vllm and not args.calc_position_embeddings:
        raise UserError("--no-calc-position-embeddings has no effect with --use-vllm, which has no padding")
    if args.load_checkpoint is not None:
        stages.check_checkpoint(args)


def check_order(args, lower, upper):
    """Raise UserError where the flag `lower` is above the flag `upper`."""
    least = getattr(args, lower)
    most = getattr(args, upper)
    if least and most and least > most:
        raise UserError(f"{flag_name(lower)} takes at most {flag_name(upper)}, {most}, got {least}")


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
    """One agent's LoRA adapters on the shared base, by name, its value head and its optimiser."""

    def __init__(self, i, model, tokenizer, updates, args):
        self.number = i
        self.engine = None  # vLLM's, shared by all agents
        self.model = model  # a peft.PeftModel, shared by all agents
        self.base_name = args.model
        self.tokenizer = tokenizer
        self.actor = f"agent_{i}_actor"
        self.critic = f"agent_{i}_critic"
        self.reference = f"agent_{i}_reference" if args.use_separate_reference_adapter else None  # None: the base
        width = model.get_base_model().config.get_text_config().hidden_size
        self.value_head = nn.Linear(width, 1).to(model.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        critic_parameters = [*adapters.parameters(model, self.critic), *self.value_head.parameters()]
        actor_group = {"params": adapters.parameters(model, self.actor), "lr": args.lr_actor}
        critic_group = {"params": critic_parameters, "lr": args.lr_critic}
        self.optimizers = [torch.optim.AdamW([actor_group, critic_group], weight_decay=0.0)]
        self.schedules = [build_schedule(self.optimizers[0], updates, stages.updates_before(args), args)]
        self.faults = Faults("--micro-batch-size-per-gpu", "--lr-actor", halves=not args.shard)


def build_schedule(optimizer, updates, updates_before, args):
    """Learning rates that rise over the first --warmup-proportion of the updates, then follow a cosine down to 0.

    The updates of an earlier run count: the schedule is one of both runs together, and goes on where the first ended.
    """
    total = updates_before + updates
    warmup = round(args.warmup_proportion * total)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    last = updates_before - 1
    if args.cosine_lr_schedule:
        return transformers.get_cosine_schedule_with_warmup(optimizer, warmup, total, last_epoch=last)
    return transformers.get_constant_schedule_with_warmup(optimizer, warmup, last_epoch=last)


def load_base(args, device, model=None, tokenizer=None):
    """The base, in eval mode, and its tokenizer: copies of `model` and `tokenizer`, or what --model names."""
    if model is None:
        with loading("--model", args.model) as path:
            model = from_pretrained(
                AutoModelForCausalLM,
                path,
                dtype=getattr(torch, args.dtype),
                attn_implementation=args.attn_implementation,
                trust_remote_code=args.trust_remote_code,
                **args.model_config,
            )
    else:
        model = copy.deepcopy(model)
    tokenizer = copy.deepcopy(tokenizer) if tokenizer else load_tokenizer(args.model, args)
    add_padding(tokenizer)
    model.to(device).eval()
    check_padding(model, args.model)
    return model, tokenizer


def load_tokenizer(name, args):
    """A model's tokenizer. Raises UserError."""
    with loading("--model", name) as path:
        options = place(args.model_config)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code, **options)


def add_padding(tokenizer):
    """Give a tokenizer a padding token where it has none: its end token. Raises UserError where it has neither."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise UserError("--model: its tokenizer has neither a padding token nor an end token")


def build_agents(args, device, updates, model=None, tokenizer=None):
    """N agents on one base, from --load-checkpoint where it is given. Raises UserError."""
    base, tokenizer = load_base(args, device, model, tokenizer)
    roles = ["actor", "critic"]
    if args.use_separate_reference_adapter:
        roles.append("reference")
    names = [f"agent_{i}_{role}" for i in range(args.num_agents) for role in roles]
    config = stages.build_config(base, args)
    model = adapters.add_adapters(base, config, names)
    agents = [Agent(i, model, tokenizer, updates, args) for i in range(args.num_agents)]
    if args.load_checkpoint:
        stages.load_stage(agents, args)
    if args.shard:
        adapters.shard_base(model)
    if args.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    if args.torch_compiler:
        base.base_model.compile(mode=args.torch_compiler, dynamic=True)
    if args.use_vllm:
        attach_engine(agents, config, args)
    return agents


def attach_engine(agents, config, args):
    """Give the agents an engine of vLLM, for adapters of that configuration. Raises UserError."""
    base = agents[0].model.get_base_model()
    if base.device.type == "cuda" and args.dtype == "float32" and args.mixed_precision == "no":
        raise UserError("--use-vllm takes adapters in bfloat16 on a GPU: add --mixed-precision bf16")
    for name in engine.NOT_IN_VLLM:
        if getattr(config, name):
            raise UserError(f"--use-vllm takes no adapters with {name}, which vLLM does not have")
    longest = args.max_model_len if args.max_model_len < NO_LIMIT else None
    rank = max([config.r, *config.rank_pattern.values()])
    with sharding.whole_models([base]):
        shared = engine.get_engine(base, args, longest, rank, len(agents))
    for agent in agents:
        agent.engine = shared


# --- Rollouts: every agent plays, the environment or the task scores --------------------------------------------------


@dataclass
class Transcript:
    """An agent's side of a game, or of one turn of a task: token ids, and what was sampled of them."""

    prompts: list  # a string for each turn: the prompt, then the observations
    prompt_ids: list  # of the first
    turn: int = 0  # the turn to be played
    responses: list = field(default_factory=list)  # a string for each turn
    response_ids: list = field(default_factory=list)  # of the responses, and of the observations between them
    turn_of_token: list = field(default_factory=list)  # the turn in which each of response_ids was sampled, or -1
    logprobs: list = field(default_factory=list)  # log pi of each of response_ids, 0: observed
    truncated: bool = False  # cut short: its end is worth V, in place of 0

    @property
    def ids(self):
        return self.prompt_ids + self.response_ids

    def add_response(self, ids, logprobs, text):
        self.response_ids += ids
        self.turn_of_token += [self.turn] * len(ids)
        self.logprobs += logprobs
        self.responses.append(text)
        self.turn += 1

    def add_observation(self, ids):
        self.response_ids += ids
        self.turn_of_token += [-1] * len(ids)
        self.logprobs += [0.0] * len(ids)


@dataclass
class Rollout:
    """What one agent did in B episodes of up to T turns, in R transcripts each; the mask is 0 where none played."""

    prompt_ids: torch.Tensor  # [B, R, P]
    prompt_mask: torch.Tensor  # [B, R, P] 1 on tokens
    response_ids: torch.Tensor  # [B, R, L] responses, and the observations between them
    response_mask: torch.Tensor  # [B, R, L] 1 on tokens
    turn_of_token: torch.Tensor  # [B, R, L] the turn in which a token was sampled, -1 where none was
    logprobs: torch.Tensor  # [B, R, L] log pi_old(a|h)
    sampler_logprobs: torch.Tensor  # [B, R, L] the same of the sampler, where pi_old is computed anew
    reference_logprobs: torch.Tensor  # [B, R, L] log pi_ref(a|h)
    rewards: torch.Tensor  # [B, T] as the environment or reward_func gave them
    processed_rewards: torch.Tensor  # [B, T] as reward_processor left them, which is what is learned from
    truncated: torch.Tensor  # [B] 1 where an episode was cut short: its end is worth V, in place of 0
    prompts: list  # B lists of a string for each turn played
    responses: list  # B lists of a string for each turn played
    items: list  # B items or seeds; none where there was no episode to play

    @property
    def mask(self):
        """[B, R, L] 1 on sampled tokens: observations and padding are holes."""
        return (self.turn_of_token >= 0).float()

    @property
    def has_tokens(self):
        """[B, R] whether a transcript has tokens; a forward pass reads only these."""
        return self.response_mask.any(-1)

    @property
    def played(self):
        """[B, T] whether a turn was played."""
        lengths = torch.tensor([len(texts) for texts in self.responses], device=self.rewards.device)
        return torch.arange(self.rewards.shape[1], device=lengths.device) < lengths[:, None]

    def select(self, rows):
        """The episodes of these rows, trimmed to their longest prompt and their longest response."""
        P = int(self.prompt_mask[rows].sum(-1).max())
        L = int(self.response_mask[rows].sum(-1).max())
        return Rollout(
            prompt_ids=self.prompt_ids[rows, :, -P:],
            prompt_mask=self.prompt_mask[rows, :, -P:],
            response_ids=self.response_ids[rows, :, :L],
            response_mask=self.response_mask[rows, :, :L],
            turn_of_token=self.turn_of_token[rows, :, :L],
            logprobs=self.logprobs[rows, :, :L],
            sampler_logprobs=self.sampler_logprobs[rows, :, :L],
            reference_logprobs=self.reference_logprobs[rows, :, :L],
            rewards=self.rewards[rows],
            processed_rewards=self.processed_rewards[rows],
            truncated=self.truncated[rows],
            prompts=[self.prompts[row] for row in rows.tolist()],
            responses=[self.responses[row] for row in rows.tolist()],
            items=[self.items[row] for row in rows.tolist() if self.items],
        )


def collate(episodes, rewards, processed_rewards, items, agent, args):
    """B lists of up to R transcripts, with B lists of rewards for each turn played, as a rollout.

    With no episodes it is a rollout of one, of no turn, so that a process without any takes part in all that follows.
    """
    pad_id = agent.tokenizer.pad_token_id
    if not episodes:
        blank = Transcript([], [pad_id])
        blank.add_observation([pad_id])
        episodes = [[blank]]
        rewards = [[]]
        processed_rewards = [[]]
    transcripts = [transcript for episode in episodes for transcript in episode]
    B = len(episodes)
    R = args.max_turns if args.task else 1
    T = args.max_turns
    P = max(len(transcript.prompt_ids) for transcript in transcripts)
    L = max(len(transcript.response_ids) for transcript in transcripts)
    device = agent.model.device
    logprobs = torch.zeros(B, R, L, device=device)
    rollout = Rollout(
        prompt_ids=torch.full((B, R, P), pad_id, device=device),
        prompt_mask=torch.zeros(B, R, P, dtype=torch.long, device=device),
        response_ids=torch.full((B, R, L), pad_id, device=device),
        response_mask=torch.zeros(B, R, L, dtype=torch.long, device=device),
        turn_of_token=torch.full((B, R, L), -1, device=device),
        logprobs=logprobs,
        sampler_logprobs=logprobs,  # the same tensor, until main computes pi_old anew
        reference_logprobs=torch.zeros(B, R, L, device=device),
        rewards=torch.zeros(B, T, device=device),
        processed_rewards=torch.zeros(B, T, device=device),
        truncated=torch.zeros(B, device=device),
        prompts=[[] for _ in episodes],
        responses=[[] for _ in episodes],
        items=items,
    )
    for b, episode in enumerate(episodes):
        num_turns = len(rewards[b])
        rollout.rewards[b, :num_turns] = torch.tensor(rewards[b])
        rollout.processed_rewards[b, :num_turns] = torch.tensor(processed_rewards[b])
        for r, transcript in enumerate(episode):
            write_row(rollout, b, r, transcript)
    return rollout


def write_row(rollout, b, r, transcript):
    """Write a transcript into row r of episode b of a rollout."""
    start = rollout.prompt_ids.shape[-1] - len(transcript.prompt_ids)
    end = len(transcript.response_ids)
    rollout.prompt_ids[b, r, start:] = torch.tensor(transcript.prompt_ids)
    rollout.prompt_mask[b, r, start:] = 1
    rollout.response_ids[b, r, :end] = torch.tensor(transcript.response_ids)
    rollout.response_mask[b, r, :end] = 1
    rollout.turn_of_token[b, r, :end] = torch.tensor(transcript.turn_of_token)
    rollout.logprobs[b, r, :end] = torch.tensor(transcript.logprobs)
    rollout.truncated[b] = float(transcript.truncated)
    rollout.prompts[b] += transcript.prompts
    rollout.responses[b] += transcript.responses


def encode_prompt(prompt, tokenizer, args):
    """Token ids of a prompt, a string. Raises UserError where it has none, or too many."""
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    if not ids:
        raise UserError(f"a prompt has no tokens: {prompt!r}")
    if args.long_prompts == "truncate":
        ids = tasks.truncate(ids, args.max_prompt_length, tokenizer)
    if len(ids) + args.max_output_tokens > args.max_model_len:
        sizes = f"--max-output-tokens {args.max_output_tokens} after a prompt of {len(ids)}"
        raise UserError(f"{sizes} exceeds --max-model-len {args.max_model_len}")
    if args.max_prompt_length and len(ids) > args.max_prompt_length:
        raise UserError(f"a prompt of {len(ids)} tokens exceeds --max-prompt-length {args.max_prompt_length}")
    return ids


def autocast(model, args):
    """Within it forward passes run in --mixed-precision."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=args.mixed_precision == "bf16")


def choose_tokens(ids, logits, args, generator):
    """Next tokens [B] after ids [B, t], from logits [B, vocabulary] that are divided by the temperature.

    With no generator, the likeliest.
    """
    if generator is None:
        return logits.argmax(-1)
    if args.top_k:
        logits = transformers.TopKLogitsWarper(args.top_k)(ids, logits)
    if args.top_p < 1:
        logits = transformers.TopPLogitsWarper(args.top_p)(ids, logits)
    if args.min_p:
        logits = transformers.MinPLogitsWarper(args.min_p)(ids, logits)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def continue_prompts(agent, prompts, args, generator):
    """Let an agent continue prompts, lists of ids, token by token: new ids, -1 after an end, and log pi, each [B, L].

    Rows that have ended are dropped from the batch and from the cache: only rows that still run are computed.
    """
    device = agent.model.device
    end_ids = torch.tensor(end_tokens(agent.model, agent.tokenizer), device=device)
    penalise = transformers.RepetitionPenaltyLogitsProcessor(args.repetition_penalty)
    P = max(len(prompt) for prompt in prompts)
    padding = [P - len(prompt) for prompt in prompts]  # with the row's first token: --repetition-penalty meets no other
    ids = torch.tensor([[prompt[0]] * n + prompt for prompt, n in zip(prompts, padding)], device=device)
    attention_mask = (torch.arange(P, device=device) >= torch.tensor(padding, device=device)[:, None]).long()
    response_ids = torch.full((len(prompts), args.max_output_tokens), -1, device=device)
    logprobs = torch.zeros(response_ids.shape, device=device)
    rows = torch.arange(len(prompts), device=device)
    input_ids = ids
    cache = None
    for t in range(args.max_output_tokens):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "cache": cache}
        inputs["positions"] = args.calc_position_embeddings
        out = adapters.forward(agent.model, agent.actor, **inputs, keep=1, use_cache=True)
        logits = penalise(ids, out.logits[:, -1].float()) / args.temperature
        if t < args.min_output_tokens:
            logits[:, end_ids] = -torch.inf
        tokens = choose_tokens(ids, logits, args, generator)
        response_ids[rows, t] = tokens
        logprobs[rows, t] = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)

        running = ~torch.isin(tokens, end_ids)
        if not running.any():
            break
        cache = out.cache
        if not running.all():
            cache.reorder_cache(running.nonzero().squeeze(1))
        rows = rows[running]
        input_ids = tokens[running, None]
        ids = torch.cat([ids[running], input_ids], 1)
        attention_mask = pad(attention_mask[running], (0, 1), value=1)
    return response_ids, logprobs


@torch.no_grad()
def sample(agent, prompts, args, generator):
    """Let an agent continue B prompts, lists of ids: B lists of new ids, of their log pi, and B texts."""
    if args.use_vllm:
        return sample_in_one_batch([agent], [prompts], args, generator)[0]
    response_ids = []
    logprobs = []
    chunk_size = args.hf_generate_chunk_size or len(prompts)
    with autocast(agent.model, args):
        for start in range(0, len(prompts), chunk_size):
            chunk = continue_prompts(agent, prompts[start : start + chunk_size], args, generator)
            for row_ids, row_logprobs in zip(*chunk):
                sampled = row_ids >= 0
                response_ids.append(row_ids[sampled].tolist())
                logprobs.append(row_logprobs[sampled].tolist())
    texts = agent.tokenizer.batch_decode(response_ids, skip_special_tokens=True)
    return response_ids, logprobs, texts


def sample_team(agents, prompts, args, generator):
    """Let each of N agents continue B prompts of its own: N results of `sample`. vLLM computes them in one batch."""
    if args.use_vllm:
        return sample_in_one_batch(agents, prompts, args, generator)
    return [sample(agent, own_prompts, args, generator) for agent, own_prompts in zip(agents, prompts)]


@torch.no_grad()
def hand_over(agent, args):
    """Give vLLM the agent's adapter. Raises UserError where it then has another."""
    model = agent.model
    agent.engine.load_adapter(agent.number, lambda path: adapters.save_adapter(path, model, agent.actor, args.model))
    with autocast(model, args):
        agent.engine.check(lambda ids: next_logits(agent, ids), agent.number)


def next_logits(agent, ids):
    """The actor's logits after ids [R, S]: [R, vocabulary]."""
    return adapters.forward(agent.model, agent.actor, input_ids=ids, keep=1).logits[:, -1]


def sample_in_one_batch(agents, prompts, args, generator):
    """As sample_team, by vLLM, with the adapters that it was handed."""
    settings = {
        "max_tokens": args.max_output_tokens,
        "min_tokens": args.min_output_tokens,
        "stop_token_ids": end_tokens(agents[0].model, agents[0].tokenizer),
        "temperature": args.temperature if generator else 0.0,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
    }
    batch = []
    numbers = []
    for agent, own_prompts in zip(agents, prompts):
        batch += own_prompts
        numbers += [agent.number] * len(own_prompts)
    response_ids, logprobs = agents[0].engine.sample(batch, settings, generator, numbers)
    texts = agents[0].tokenizer.batch_decode(response_ids, skip_special_tokens=True)
    results = []
    for own_prompts in prompts:
        start = sum(len(texts) for _, _, texts in results)
        rows = slice(start, start + len(own_prompts))
        results.append((response_ids[rows], logprobs[rows], texts[rows]))
    return results


def act(agent, prompts, args, generator=None):
    """An agent's responses, B strings, to B prompts, strings or chats; with no generator those of the likeliest tokens.

    `args` are those of a Run, with what depends on others filled in. Raises UserError.
    """
    texts = [render(prompt, agent.tokenizer) for prompt in prompts]
    prompt_ids = [encode_prompt(text, agent.tokenizer, args) for text in texts]
    if args.use_vllm:
        hand_over(agent, args)
    _, _, responses = sample(agent, prompt_ids, args, generator)
    return responses


def play(agents, task, items, args, generator, phase):
    """Play an episode of each of B items, turn by turn: every agent answers, the team is scored. N rollouts.

    `task` is a task, or a function that makes an environment; `phase` is called with the name of what takes the time.
    With no generator the likeliest tokens are taken. Raises TaskError where task or environment fail.
    """
    if args.use_vllm:
        for agent in agents:
            hand_over(agent, args)
    models = [] if args.use_vllm else [agents[0].model]  # vLLM has weights of its own
    with sharding.whole_models(models):
        if args.task:
            return play_task(agents, task, items, args, generator, phase)
        return [play_environment(agents[0], task, items, args, generator, phase)]


def play_environment(agent, make_environment, items, args, generator, phase):
    """Play a game of each of B items, {"seed": k}. Games that an error ended are reported and left out."""
    games = Games(make_environment, [item["seed"] for item in items], args.max_turns, args.reward_timeout)
    transcripts = {}
    while games.running:
        running = list(games.running)
        phase("sample")
        for k in running:
            if k in transcripts:
                transcripts[k].prompts.append(games.observations[k])
            else:
                prompt = render([{"role": "user", "content": games.observations[k]}], agent.tokenizer)
                transcripts[k] = Transcript([prompt], encode_prompt(prompt, agent.tokenizer, args))
        response_ids, logprobs, texts = sample(agent, [transcripts[k].ids for k in running], args, generator)
        phase("reward")
        games.step(texts)
        for row, k in enumerate(running):
            transcripts[k].add_response(response_ids[row], logprobs[row], texts[row])
            observe(games, k, transcripts[k], agent.tokenizer, args)

    for k, error in games.dropped.items():
        tqdm.write(f"the episode of seed {items[k]['seed']} is dropped: {error}")
    kept = [k for k in transcripts if k not in games.dropped]
    episodes = [[transcripts[k]] for k in kept]
    rewards = [games.rewards[k] for k in kept]
    return collate(episodes, rewards, rewards, [items[k] for k in kept], agent, args)


def observe(games, k, transcript, tokenizer, args):
    """Write down what game k says next; where no room is left for another response, stop it as truncated."""
    if k in games.dropped or games.ended[k] in ("terminated", "horizon"):
        return
    observation_ids = reply(games.observations[k], transcript.response_ids[-1], tokenizer)
    room = args.max_model_len - len(transcript.ids) - len(observation_ids)
    if room >= 0:
        transcript.add_observation(observation_ids)
    if games.ended[k] is None and room < args.max_output_tokens:
        games.stop(k)
    transcript.truncated = games.ended[k] == "truncated"


def play_task(agents, task, items, args, generator, phase):
    """Play an episode of each of B items of a task, where each turn is a transcript of its own."""
    episodes = tasks.Episodes(
        task, items, args.num_agents, args.max_turns, args.early_termination_threshold, args.reward_timeout
    )
    transcripts = [[[] for _ in items] for _ in agents]
    rewards = [[[] for _ in items] for _ in agents]
    processed_rewards = [[[] for _ in items] for _ in agents]
    while episodes.running:
        running = list(episodes.running)
        prompts = []
        prompt_ids = []
        phase("sample")
        for i, agent in enumerate(agents):
            prompts.append(episodes.prompts(i, agent.tokenizer))
            prompt_ids.append([encode_prompt(prompt, agent.tokenizer, args) for prompt in prompts[i]])
        responses = []
        for i, result in enumerate(sample_team(agents, prompt_ids, args, generator)):
            response_ids, logprobs, texts = result
            responses.append(texts)
            for row, k in enumerate(running):
                transcript = Transcript([prompts[i][row]], prompt_ids[i][row], turn=len(transcripts[i][k]))
                transcript.add_response(response_ids[row], logprobs[row], texts[row])
                transcripts[i][k].append(transcript)
        phase("reward")
        turn_rewards, turn_processed_rewards = episodes.score(responses, prompts)
        for i in range(len(agents)):
            for row, k in enumerate(running):
                rewards[i][k].append(turn_rewards[i][row])
                processed_rewards[i][k].append(turn_processed_rewards[i][row])
    rollouts = []
    for i, agent in enumerate(agents):
        rollouts.append(collate(transcripts[i], rewards[i], processed_rewards[i], items, agent, args))
    return rollouts


# --- Learning: log-probabilities, values, rewards, advantages, the losses ---------------------------------------------


def transcript_inputs(rollout, args):
    """What a model reads: the rows that have tokens, all of them."""
    rows = rollout.has_tokens
    return {
        "input_ids": torch.cat([rollout.prompt_ids[rows], rollout.response_ids[rows]], 1),
        "attention_mask": torch.cat([rollout.prompt_mask[rows], rollout.response_mask[rows]], 1),
        "positions": args.calc_position_embeddings,
    }


def scatter(x, played):
    """[*, L] of the rows that were played as [B, R, L], 0 elsewhere."""
    scattered = x.new_zeros(*played.shape, x.shape[-1])
    scattered[played] = x
    return scattered


def forward_adapter(agent, adapter, rollout, args):
    """log pi(.|h), [*, L, vocabulary], before each of a transcript's L tokens, of an adapter (None: of the base)."""
    L = rollout.response_ids.shape[-1]
    with autocast(agent.model, args):
        out = adapters.forward(agent.model, adapter, **transcript_inputs(rollout, args), keep=L + 1)
    return (out.logits[:, :-1].float() / args.temperature).log_softmax(-1)


def take_logprobs(log_pi, rollout):
    """log pi(a|h) [B, R, L] of the tokens that are there, sampled or observed."""
    has_tokens = rollout.has_tokens
    tokens = rollout.response_ids[has_tokens][..., None]
    return scatter(log_pi.gather(-1, tokens).squeeze(-1), has_tokens)


def take_entropy(log_pi, rollout):
    """The entropy of pi(.|h) in nats, [B, R, L], over the whole vocabulary."""
    return scatter(-(log_pi.exp() * log_pi).sum(-1), rollout.has_tokens)


def critic_values(agent, rollout, args):
    """V before each of a transcript's L tokens, then V after the last: [B, R, L + 1]."""
    L = rollout.response_ids.shape[-1]
    with autocast(agent.model, args):
        inputs = transcript_inputs(rollout, args)
        hidden_states = adapters.hidden_states(agent.model, agent.critic, **inputs, keep=L + 1)
    values = agent.value_head(hidden_states.float()).squeeze(-1)
    return scatter(values, rollout.has_tokens)


def masked_mean(x, mask):
    """This process's share of the mean of x over the mask's ones: averaged over the processes, it is the mean."""
    return (x * mask).sum() / distributed.mean(mask.sum())


def row_parts(rollout, args):
    """The rows of a rollout, as many at a time as a forward pass reads.

    With --shard all processes make as many passes: one that has fewer parts takes its first row again.
    """
    rows = torch.arange(len(rollout.rewards), device=rollout.rewards.device)
    parts = list(rows.split(args.micro_batch_size_per_gpu))
    if args.shard:
        most = max(distributed.gather_objects(len(parts)))
        parts += [rows[:1]] * (most - len(parts))
    return parts


@torch.no_grad()
def compute_logprobs(agent, adapter, rollout, args):
    """log pi(a|h) [B, R, L] of an adapter (None: the base), a part of the rollout at a time."""
    logprobs = torch.zeros_like(rollout.logprobs)
    for rows in row_parts(rollout, args):
        part = rollout.select(rows)
        L = part.response_ids.shape[-1]
        logprobs[rows, :, :L] = take_logprobs(forward_adapter(agent, adapter, part, args), part)
    return logprobs


@torch.no_grad()
def compute_values(agent, rollout, args):
    """V before each of a transcript's L tokens, then V after the last: [B, R, L + 1]."""
    values = pad(torch.zeros_like(rollout.logprobs), (0, 1))
    for rows in row_parts(rollout, args):
        part = rollout.select(rows)
        L = part.response_ids.shape[-1]
        values[rows, :, : L + 1] = critic_values(agent, part, args)
    return values


def samples_exactly(agent, args):
    """Whether the log-probabilities of the sampler are those of learning, to 1e-5: full precision, nothing left out.

    vLLM's, and those of a quantized base, are of kernels that round by the number of rows.
    """
    if args.use_vllm or getattr(agent.model.config, "quantization_config", None):
        return False
    full_precision = args.dtype == "float32" and args.mixed_precision == "no"
    full_support = args.top_p == 1 and args.top_k == 0 and args.min_p == 0 and args.min_output_tokens == 0
    return full_precision and full_support and args.repetition_penalty == 1 and args.calc_position_embeddings


def standardise(x, mask, eps=1e-6):
    """(x - mean) / max(deviation, eps) over the mask's ones in all processes, 0 elsewhere."""
    count = distributed.total(mask.sum())
    mean = distributed.total((x * mask).sum()) / count
    deviation = (distributed.total(((x - mean) ** 2 * mask).sum()) / count).sqrt()
    return (x - mean) / deviation.clamp(min=eps) * mask


def first_tokens(rollout):
    """[B, R, L] 1 on the first token of each turn."""
    previous_turn = pad(rollout.turn_of_token[..., :-1], (1, 0), value=-1)
    return rollout.mask * (rollout.turn_of_token != previous_turn)


def last_tokens(rollout):
    """[B, R, L] 1 on the last token of each turn."""
    next_turn = pad(rollout.turn_of_token[..., 1:], (0, 1), value=-1)
    return rollout.mask * (rollout.turn_of_token != next_turn)


def to_turns(x, rollout, reduction="sum"):
    """Numbers of tokens, [B, R, L], as one for each turn, [B, T, 1]: their sum, or what `reduction` says."""
    mask = rollout.mask
    if reduction == "first_value":
        mask = first_tokens(rollout)
    if reduction == "final_value":
        mask = last_tokens(rollout)
    turns = rollout.turn_of_token.clamp(min=0).flatten(1)
    blank = torch.zeros_like(rollout.rewards)
    sums = blank.scatter_add(1, turns, (x * mask).flatten(1))
    if reduction == "mean":
        sums = sums / blank.scatter_add(1, turns, mask.flatten(1)).clamp(min=1)
    return sums[..., None]


def to_tokens(x, rollout):
    """Numbers of turns, [B, T, 1], repeated at the turns' tokens, [B, R, L]."""
    turns = rollout.turn_of_token.clamp(min=0).flatten(1)
    return x.squeeze(-1).gather(1, turns).view_as(rollout.turn_of_token) * rollout.mask


def bootstrap_rewards(rollout, values, args):
    """The rewards of turns, [B, T]; the last turn of a truncated episode gets gamma times the V of its end too."""
    end = rollout.response_mask.sum(-1, keepdim=True)
    end_value = values.gather(-1, end)[:, -1, 0]  # only games are truncated, and they have one transcript
    future = args.gamma * rollout.truncated * end_value
    last_turn = (rollout.played.sum(1, keepdim=True) - 1).clamp(min=0)
    return rollout.processed_rewards.scatter_add(1, last_turn, future[:, None])


def action_values(values, rollout, args):
    """V of actions, [B, R, L] of tokens or [B, T, 1] of turns, from V [B, R, L + 1]."""
    values = values[..., :-1]
    if args.action_granularity == "turn":
        return to_turns(values, rollout, args.turn_value_reduction)
    return values * rollout.mask


def prepare_actions(rollout, values, args):
    """Rewards, values and mask of actions, [B, R, L] each of tokens or [B, T, 1] of turns, from V [B, R, L + 1].

    A turn's reward lies on its last token.
    """
    rewards = bootstrap_rewards(rollout, values, args)[..., None]
    values = action_values(values, rollout, args)
    if args.action_granularity == "turn":
        return rewards, values, rollout.played.float()[..., None]
    return to_tokens(rewards, rollout) * last_tokens(rollout), values, rollout.mask


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
class Batch:
    """Episodes of a rollout, and what their actions are to learn: [B, R, L] of tokens, or [B, T, 1] of turns."""

    rollout: Rollout
    old_values: torch.Tensor
    advantages: torch.Tensor  # 0 on all that is no action
    returns: torch.Tensor  # the critic's targets
    action_mask: torch.Tensor  # 1 on actions
    part_size: int  # episodes in a forward pass
    num_tokens: torch.Tensor | None = None  # sampled tokens of the whole mini-batch, on average over the processes
    num_actions: torch.Tensor | None = None  # actions of the whole mini-batch, on average over the processes
    num_passes: int = 1  # forward passes, at least: with --shard all processes make as many

    def select(self, rows):
        """The episodes of these rows, trimmed as Rollout.select does: turns have nothing to trim."""
        rollout = self.rollout.select(rows)
        L = rollout.response_ids.shape[-1]
        return replace(
            self,
            rollout=rollout,
            old_values=self.old_values[rows, :, :L],
            advantages=self.advantages[rows, :, :L],
            returns=self.returns[rows, :, :L],
            action_mask=self.action_mask[rows, :, :L],
        )

    def blank(self):
        """The first episode without its actions: a mini-batch from which nothing is learned."""
        first = self.select(torch.zeros(1, dtype=torch.long, device=self.action_mask.device))
        rollout = first.rollout
        return replace(
            first,
            rollout=replace(rollout, turn_of_token=torch.full_like(rollout.turn_of_token, -1)),
            advantages=torch.zeros_like(first.advantages),
            action_mask=torch.zeros_like(first.action_mask),
        )

    def split(self, num_parts):
        """Parts whose losses add up to the batch's own: micro-batches, `num_parts` times as many as planned."""
        part_size = math.ceil(min(self.part_size, len(self.action_mask)) / num_parts)
        parts = torch.arange(len(self.action_mask), device=self.action_mask.device).split(part_size)
        for rows in parts:
            yield self.select(rows)
        for _ in range(self.num_passes - len(parts)):
            yield self.blank()


def minibatches(batch, args, generator):
    """The mini-batches of a rollout's batch, in a new random order; an episode's turns stay together.

    All processes have as many as the one with the most episodes; those that one lacks are blank.
    """
    order = torch.randperm(len(batch.action_mask), generator=generator, device=generator.device)
    size = args.batch_size // distributed.world_size()
    most = max(distributed.gather_objects(len(order)))
    for start in range(0, most, size):
        rows = order[start : start + size]
        minibatch = batch.select(rows) if len(rows) else batch.blank()
        minibatch.num_tokens = distributed.mean(minibatch.rollout.mask.sum())
        minibatch.num_actions = distributed.mean(minibatch.action_mask.sum())
        if args.shard:
            minibatch.num_passes = math.ceil(min(size, most - start) / batch.part_size)
        yield minibatch


def sampler_weights(rollout, args):
    """The weight of each ratio in the actor's loss: pi_old / pi of vLLM, at most 2; 1 without vLLM.

    [B, R, L] of tokens, or [B, T, 1] of turns, whose pi is the product of their tokens'.
    """
    log_ratio = (rollout.logprobs - rollout.sampler_logprobs) * rollout.mask
    if not args.use_vllm or not args.sampler_correction:
        log_ratio = torch.zeros_like(log_ratio)
    if args.turn_level_clip:
        log_ratio = to_turns(log_ratio, rollout)
    return log_ratio.exp().clamp(max=MOST_WEIGHT)


def ppo_loss(agent, minibatch, args):
    """The actor's loss of a mini-batch, or a part's share in it, and its metrics: means over its tokens.

    With --turn-level-clip the policy's loss is the mean over its turns.
    """
    rollout = minibatch.rollout
    log_pi = forward_adapter(agent, agent.actor, rollout, args)
    logprobs = take_logprobs(log_pi, rollout)
    if args.ent_coef == 0:
        log_pi = log_pi.detach()  # the entropy is a metric only
    entropy = (take_entropy(log_pi, rollout) * rollout.mask).sum() / minibatch.num_tokens
    log_ratio = (logprobs - rollout.logprobs) * rollout.mask
    approx_kl = (log_ratio.exp() - 1 - log_ratio).detach().sum() / minibatch.num_tokens
    k3 = torch.zeros_like(entropy)
    if args.beta > 0:
        d = (rollout.reference_logprobs - logprobs) * rollout.mask
        k3 = (d.exp() - d - 1).sum() / minibatch.num_tokens

    advantages = minibatch.advantages
    num_ratios = minibatch.num_tokens
    if args.turn_level_clip:  # the ratio of a turn is the product of its tokens'
        log_ratio = to_turns(log_ratio, rollout)
        num_ratios = minibatch.num_actions
    elif args.action_granularity == "turn":
        advantages = to_tokens(advantages, rollout)

    rho = log_ratio.exp()
    clipped_rho = rho.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    ratio_losses = torch.max(-advantages * rho, -advantages * clipped_rho)
    policy_loss = (sampler_weights(rollout, args) * ratio_losses).sum() / num_ratios
    clip_fraction = (rho != clipped_rho).float().sum() / num_ratios

    loss = policy_loss + args.beta * k3 - args.ent_coef * entropy
    metrics = {
        "policy_loss": policy_loss,
        "entropy": entropy,
        "k3": k3,
        "approx_kl": approx_kl,
        "clip_fraction": clip_fraction,
    }
    return loss, metrics


def value_loss(agent, minibatch, args):
    """The critic's loss of a mini-batch, or a part's share in it, and its metric: the mean over its actions."""
    rollout = minibatch.rollout
    values = action_values(critic_values(agent, rollout, args), rollout, args)
    change = (values - minibatch.old_values).clamp(-args.clip_coef, args.clip_coef)
    error = (values - minibatch.returns) ** 2
    clipped_error = (minibatch.old_values + change - minibatch.returns) ** 2
    loss = 0.5 * (torch.max(error, clipped_error) * minibatch.action_mask).sum() / minibatch.num_actions
    return args.vf_coef * loss, {"value_loss": loss}


def optimizer_step(agent, args):
    """Descend the gradient, clipped, once; returns metrics. One that is not finite changes nothing."""
    optimizer = agent.optimizers[0]
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    distributed.average_gradients(parameters)
    norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
    finite = agent.faults.finite([norm])
    if finite:
        optimizer.step()
    optimizer.zero_grad()
    return {"grad_norm": norm, "skipped": torch.tensor(0.0 if finite else 1.0)}


def describe_drift(rollout, reference_logprobs):
    """How far an agent is from its reference: metrics, means over tokens in nats."""
    return {
        "kl": masked_mean(rollout.logprobs - reference_logprobs, rollout.mask),
        "reference_logprob": masked_mean(reference_logprobs, rollout.mask),
    }


def describe_update(batch, history, args):
    """What an agent's update was like: metrics of the rollout, and means over its optimiser steps."""
    rollout = batch.rollout
    metrics = {"response_length": rollout.mask.sum() / distributed.mean(rollout.played.sum())}
    metrics |= average(history)
    metrics["explained_variance"] = explained_variance(batch.returns, batch.old_values, batch.action_mask)
    if args.use_vllm:
        metrics |= sampler_metrics(rollout, MOST_WEIGHT)
    return metrics


def describe_episodes(task, items, rollouts, args):
    """Metrics of the task's own, or how many games were truncated and how many dropped.

    Averaged over the processes, they are the numbers of games in all of them.
    """
    if args.task:
        return tasks.extra_metrics(task, rollouts)
    processes = distributed.world_size()
    dropped = len(items) - len(rollouts[0].items)
    return {"truncated": processes * rollouts[0].truncated.sum(), "dropped": float(processes * dropped)}


def update_reference(agent, step, num_items, args):
    """Copy the actor to the reference after every --reference-update-interval passes over the training set."""
    epochs = step * args.rollout_buffer_size // num_items
    epochs_before = (step - 1) * args.rollout_buffer_size // num_items
    interval = args.reference_update_interval
    if interval and epochs // interval > epochs_before // interval:
        adapters.copy_adapter(agent.model, agent.actor, agent.reference)


# --- main: sample, score, learn, log ----------------------------------------------------------------------------------


def load_env_data(args, env, train_dataset, eval_dataset):
    """A function that makes an environment, its optimum (or None), and items to train on and to hold out: seeds."""
    if train_dataset is not None or eval_dataset is not None:
        raise UserError("train_dataset= and eval_dataset= are the data of a task; give task= or --task")
    make_environment, optimum = load_env(env or args.env or sys.modules[__name__], args.max_turns)
    first = 1_000_000 * args.seed
    train_items = [{"seed": first + k} for k in range(args.train_size)]
    held_out_items = [{"seed": first + 500_000 + k} for k in range(args.eval_loop or 256)]
    return make_environment, optimum, train_items, held_out_items


def load_task_data(args, task, tokenizer, train_dataset, eval_dataset):
    """A task, its optimum (or None), and items to train on and to hold out."""
    task = tasks.load_task(task or args.task, args.num_agents, args.max_turns)
    optimum = task.optimum(args.num_agents, args.max_turns) if hasattr(task, "optimum") else None
    data = tasks.load_items(task, args, args.seed, args.rollout_buffer_size, train_dataset, eval_dataset)
    readers = [(tokenizer or load_tokenizer(args.model, args), args.max_prompt_length)] * args.num_agents
    train_items, held_out_items = tasks.fit_prompts(task, args, readers, args.rollout_buffer_size, *data)
    size = args.eval_loop or len(held_out_items)
    if args.evaluation_interval and size > len(held_out_items):
        count = len(held_out_items)
        distributed.say(f"--eval-loop {size}: the task has {count} held-out items, and those are taken")
    return task, optimum, train_items, [*held_out_items][:size]


def evaluate(agents, task, items, args):
    """The mean score of the likeliest answers to held-out items, of which each process plays its share."""
    own_items = items[distributed.rank() :: distributed.world_size()]
    rollouts = play(agents, task, own_items, args, generator=None, phase=lambda name: None)
    return team_metrics(rollouts)["reward_mean"]


def build_run(args, folder, agents, generator, updates, updates_per_epoch, optimum):
    """The run's folder, with what it is to keep and to restore."""
    save = functools.partial(adapters.save_agents, with_optimizer=args.save_optimizer, with_base=args.save_base)
    return Run(
        folder,
        args,
        script=__file__,
        agents=agents,
        save=save,
        load=adapters.load_agents,
        save_together=args.shard,
        generator=generator,
        updates=updates,
        samples_per_update=args.rollout_buffer_size,
        updates_per_epoch=updates_per_epoch,
        held_out_metric="fitness",
        optimum=optimum,
    )


def count_updates(num_items, args):
    """The updates of the run: those of its epochs, or, where these are fewer, those of --max-steps."""
    updates = args.num_train_epochs * num_items // args.rollout_buffer_size
    if args.max_steps:
        updates = min(updates, math.ceil(args.max_steps / args.rollout_buffer_size))
    return updates


def main(args=None, task=None, model=None, tokenizer=None, train_dataset=None, eval_dataset=None, env=None):
    """Train an agent or a team; returns its agents and its Run. Raises UserError for what the user can fix.

    `task` (any object with a task's names), `model` (loaded; it is copied), `tokenizer` and `env` (a class, a function
    that makes an environment, or a module with one) replace what the flags name; `train_dataset` and `eval_dataset`,
    rows of a datasets.Dataset or a list of dicts, replace the task's own.
    """
    device = distributed.start()
    args = resolve_args(args or Args(), task, model, env)
    if args.task:
        data = load_task_data(args, task, tokenizer, train_dataset, eval_dataset)
    else:
        data = load_env_data(args, env, train_dataset, eval_dataset)
    task, optimum, train_items, held_out_items = data
    folder = run_folder(args, __file__, args.task or args.env, MAY_CHANGE)
    updates = count_updates(len(train_items), args)
    updates_per_epoch = len(train_items) / args.rollout_buffer_size

    set_seed(args.seed)
    agents = build_agents(args, device, updates, model, tokenizer)
    generator = torch.Generator(device).manual_seed(args.seed + 1_000_003 * distributed.rank())
    with build_run(args, folder, agents, generator, updates, updates_per_epoch, optimum) as run:
        size = args.rollout_buffer_size
        data = tasks.batches(train_items, size, args.num_train_epochs, args.seed, run.step, updates)
        for step, items in run.updates(data):
            # 1. Every agent plays, and the environment or the task scores.
            items = items[distributed.rank() :: distributed.world_size()]
            rollouts = play(agents, task, items, args, generator, run.phase)

            # 2. Each agent learns alone.
            drifts = []
            agent_metrics = {}
            for i, (agent, rollout) in enumerate(zip(agents, rollouts)):
                run.phase("evaluate")
                if not samples_exactly(agent, args):
                    rollout.logprobs = compute_logprobs(agent, agent.actor, rollout, args)
                if args.beta > 0:
                    rollout.reference_logprobs = compute_logprobs(agent, agent.reference, rollout, args)
                values = compute_values(agent, rollout, args)
                rewards, values, action_mask = prepare_actions(rollout, values, args)
                advantages, returns = gae(rewards, values, action_mask, args.gamma, args.gae_lambda)
                if args.adv_whitening:
                    advantages = standardise(advantages, action_mask)

                run.phase("update")
                batch = Batch(rollout, values, advantages, returns, action_mask, args.micro_batch_size_per_gpu)
                history = []
                adapters.set_training(agent.model, True)
                for _ in range(args.update_epochs):
                    for minibatch in minibatches(batch, args, generator):
                        metrics = agent.faults.backward(agent, minibatch, args, ppo_loss, value_loss)  # .backward()
                        history.append(metrics | optimizer_step(agent, args))
                adapters.set_training(agent.model, False)
                agent.schedules[0].step()
                update_reference(agent, step, len(train_items), args)

                if args.beta > 0:
                    drifts.append(describe_drift(rollout, rollout.reference_logprobs))
                for name, x in describe_update(batch, history, args).items():
                    agent_metrics[f"agent_{i}/{name}"] = x

            # 3. Metrics, held-out episodes, samples.
            metrics = team_metrics(rollouts) | average(drifts) | agent_metrics
            metrics |= describe_episodes(task, items, rollouts, args)
            held_out = None
            interval = args.evaluation_interval
            if held_out_items and interval and (step % interval == 0 or step in (1, updates)):
                run.phase("held-out")
                held_out = evaluate(agents, task, held_out_items, args)
            new_tokens = sum(rollout.mask.sum() for rollout in rollouts)
            run.log(metrics, rollouts[0].items, rollouts, new_tokens, held_out)
    return agents, run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
