"""Independent PPO (IPPO) for N language models that answer together and are scored together, in one file.

Agent i with history h and token a_t ascends, with its own actor theta_i and its own critic phi_i,

    J(theta_i) = E[ log pi(a_t|h_t) * sum_l (gamma lambda)^l delta_{t+l} + beta H(pi) ],
    delta_t    = r_t + gamma V(h_{t+1}) - V(h_t),    V = 0 after the last action,

without PPO's ratio and clipping of the policy: nothing corrects for the steps that earlier mini-batches of a rollout
made. r has the team's reward on an agent's last token and a KL penalty on each; the other agents are a part of the
environment.
The critic is a model of its own (--use-separate-critic) or a value head on the actor, whose body it then trains too.

    python ippo_llm.py --num-agents 2 --use-separate-critic
    torchrun --nproc-per-node 2 ippo_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --mixed-precision bf16

Simplified: models stay in eval mode (no dropout: a token is as likely when it is learned from as when it was sampled);
with --top-p or --top-k the log-probabilities are still those of all tokens.
CoMLRL documents these, and does not implement them: GAE over tokens, gamma, lambda, the entropy bonus, ppo_epochs.
Added to its page: many prompts at a time, several turns, a KL penalty, turns as actions, held-out items.
Source: IPPO (arXiv 2011.09533), GAE (arXiv 1506.02438), CoMLRL's page on Multi-Agent PPO.

Shapes: B episodes of a rollout, T turns of an episode, P prompt tokens (left-padded), L response tokens (right-padded,
the end token included). What belongs to a rollout is [B, T, L]; its mask is 1 on sampled tokens, 0 on padding and in
turns that were not played.
"""

import copy
import math
import re
import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import datasets
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn
from torch.nn.functional import pad
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, TopKLogitsWarper, TopPLogitsWarper, set_seed

from utils import checkpoint, distributed, engine, sharding, tasks
from utils.causal_lm import check_padding, forward
from utils.cli import Settings, UserError, check_needs, command_line, flags
from utils.faults import Faults
from utils.metrics import average, explained_variance, sampler_metrics, team_metrics
from utils.models import check_model, from_pretrained, loading, per_agent, place
from utils.prompts import end_tokens, render
from utils.run import FolderArgs, Run, run_folder
from utils.tasks.made_text import posts
from utils.tasks.words import STOPWORDS, TRANSITIONS

# --- Args: the flags --------------------------------------------------------------------------------------------------


@flags
class TrainingArgs:
    """How long, from which seed."""

    seed: NonNegativeInt = 1  # seed of everything random: the same seed gives the same run
    num_train_epochs: PositiveInt = 3  # passes over the training set
    max_steps: PositiveInt | None = None  # joint samples after which the run ends, in whole updates; none: no such end
    eval_interval: NonNegativeInt = 12  # updates between evaluations on the held-out items; 0: never


@flags
class ModelArgs:
    """The agents and their models."""

    model: tuple[str, ...] = ("utils/tiny_lm",)  # folder or hub name that agents start from: one for all, or one each
    model_config: Settings = field(default_factory=dict)  # settings that actors are loaded with, JSON values by name
    num_agents: PositiveInt = 2  # agents in the team, each with its own copy of its model
    use_separate_critic: bool = False  # give each agent a critic model of its own, instead of a value head on its actor
    critic_model_name_or_path: tuple[str, ...] = ()  # what separate critics start from, one or one each; none: --model
    critic_model_config: Settings = field(default_factory=dict)  # settings that critics of that name are loaded with
    critic_value_head_hidden_dim: PositiveInt | None = None  # hidden units of a separate critic's head; none: linear
    value_head_hidden_dim: PositiveInt | None = None  # hidden units of the value head on an actor; none: linear
    dtype: Literal["float32", "bfloat16"] = "float32"  # data type of the models' weights
    mixed_precision: Literal["no", "bf16"] = "no"  # autocast to this type in the forward pass, not attention on a CPU
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"  # attention kernel
    trust_remote_code: bool = False  # run code that comes with a hub model
    shard: bool = False  # let each of several processes hold a part of every model, in place of whole ones (FSDP)


@flags
class SamplingArgs:
    """Sampling: how a rollout is made."""

    num_generations: PositiveInt = 1  # joint samples of each item in a rollout
    num_turns: PositiveInt = 1  # turns of an episode; more than one takes a task with an external_transition
    early_termination_threshold: float | None = None  # end an episode after a turn with a mean reward above this
    per_device_train_batch_size: PositiveInt | None = None  # items answered at once on a device; none: the rollout
    max_new_tokens: PositiveInt = 72  # longest response in tokens; a longer one is cut and counts as finished
    do_sample: bool = True  # sample; --no-do-sample: take the likeliest token
    temperature: PositiveFloat = 1.0  # the logits are divided by it
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sample from the likeliest tokens that sum up to it
    top_k: NonNegativeInt = 0  # sample from so many likeliest tokens; 0: from all


@flags
class AlgorithmArgs:
    """The algorithm: rewards, advantages and losses."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0  # discount factor
    kl_coef: NonNegativeFloat = 0.03  # each token's reward is less kl_coef * (log pi - log pi of the initial model)
    reward_normalization: bool = True  # standardise rewards over the rollout
    reward_norm_eps: PositiveFloat = 1e-3  # the least standard deviation that rewards are divided by
    advantage_normalization: bool = True  # standardise advantages over the rollout
    entropy_coef: NonNegativeFloat = 0.0  # beta, the weight of the entropy bonus
    value_loss_coef: NonNegativeFloat = 0.02  # weight of the value loss
    value_clip_range: PositiveFloat | None = 0.2  # most that a value's loss lets it change; none: no clipping
    mini_batch_size: PositiveInt = 16  # joint samples in an optimiser step, over all processes


@flags
class IPPOArgs:
    """What is IPPO's own."""

    action_granularity: Literal["token", "turn"] = "token"  # an action is one token, or one whole response
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95  # lambda of generalised advantage estimation
    rollout_buffer_size: PositiveInt = 64  # joint samples (episodes of the team) in a rollout, over all processes
    ppo_epochs: PositiveInt = 1  # passes over a rollout; there is no ratio to correct later ones


@flags
class OptimizerArgs:
    """The optimisers (AdamW), one for each model."""

    actor_learning_rate: NonNegativeFloat = 5e-4  # learning rate of the actors
    critic_learning_rate: NonNegativeFloat = 1e-3  # learning rate of separate critics and of value heads
    anneal_lr: bool = True  # lower the learning rates to 0, linearly over the second half of the run
    weight_decay: NonNegativeFloat = 0.0  # AdamW's weight decay
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # decay of the first moment
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999  # decay of the second moment
    adam_epsilon: PositiveFloat = 1e-8  # term added to the denominator
    max_grad_norm: PositiveFloat = 0.5  # gradients are clipped to this norm, each optimiser's by itself


@flags
class Args(
    TrainingArgs,
    tasks.TaskArgs,
    FolderArgs,
    ModelArgs,
    SamplingArgs,
    engine.VllmArgs,
    AlgorithmArgs,
    IPPOArgs,
    OptimizerArgs,
):
    """All flags."""


CRITIC_FLAG = "--critic-model-name-or-path"
MOST_WEIGHT = 2.0  # at which sampler_weights are truncated


def check_args(args):
    """Raise UserError for flags that do not go together, before anything is loaded or written."""
    processes = distributed.world_size()
    if args.shard and processes == 1:
        raise UserError("--shard takes several processes, and this is one: start them with torchrun, or add --no-shard")
    divisor = args.num_generations * processes
    if args.rollout_buffer_size % divisor:
        takes = f"a multiple of generations x processes, {divisor}"
        raise UserError(f"--rollout-buffer-size takes {takes}, got {args.rollout_buffer_size}")
    if args.mini_batch_size % processes:
        raise UserError(f"--mini-batch-size takes a multiple of {processes} processes, got {args.mini_batch_size}")
    needs = {
        "critic_model_name_or_path": "use_separate_critic",
        "critic_model_config": "critic_model_name_or_path",
        "critic_value_head_hidden_dim": "use_separate_critic",
        "reward_norm_eps": "reward_normalization",
        "top_p": "do_sample",
        "top_k": "do_sample",
    }
    check_needs(args, needs)
    engine.check_vllm_args(args)
    if args.use_vllm and args.per_device_train_batch_size:
        raise UserError("--per-device-train-batch-size has no effect with --use-vllm: --vllm-config has max_num_seqs")
    if args.value_head_hidden_dim and args.use_separate_critic:
        raise UserError("--value-head-hidden-dim has no effect with --use-separate-critic")
    if args.early_termination_threshold is not None and args.num_turns == 1:
        raise UserError("--early-termination-threshold has no effect with --num-turns 1")


def check_models(args, model=None):
    """The configuration of each agent's model; `model` stands in for what --model names.

    Raises UserError for a model that is not to be had.
    """
    if args.critic_model_name_or_path:
        for name in per_agent(CRITIC_FLAG, args.critic_model_name_or_path, args.num_agents):
            settings = args.critic_model_config
            check_model(name, CRITIC_FLAG, args.trust_remote_code, settings, "--critic-model-config")
    if model is not None:
        if args.model_config:
            raise UserError("--model-config has no effect on a model that is loaded")
        return [model.config] * args.num_agents
    configs = []
    for name in per_agent("--model", args.model, args.num_agents):
        config = check_model(name, "--model", args.trust_remote_code, args.model_config, "--model-config")
        if "quantization_config" in args.model_config or hasattr(config, "quantization_config"):
            raise UserError(f"--model {name}: quantized weights can't learn; ppo_llm.py takes them, under adapters")
        configs.append(config)
    return configs


# --- The task: data, prompts, reward ----------------------------------------------------------------------------------

columns = ("prompt",)  # what a row of --dataset must have
MIN_WORDS = 8
MAX_WORDS = 256


def train_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"train {seed}"))


def eval_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"eval {seed}"))


def formatters(item, agent):
    """The prompt of an agent, as a chat: agent 0, 1, 2, ... is to write about 16, 32, 64, ... words."""
    request = f"Summarise this post in about {16 * 2**agent} words."
    return [{"role": "user", "content": f"{item['prompt']}\n\n{request}"}]


def reward_func(*completions, items):
    """The team's reward for N lists of B summaries: B floats, the mean of pair_reward over neighbouring writers."""
    texts = list(completions)
    if len(texts) == 1:  # a single writer is compared with the post
        texts.append([item["prompt"] for item in items])
    rewards = []
    for chain in zip(*texts):
        pair_rewards = [pair_reward(short, long) for short, long in zip(chain, chain[1:])]
        rewards.append(sum(pair_rewards) / len(pair_rewards))
    return rewards


def pair_reward(short, long):
    """Points from 0 to 3 for two texts, the second longer and richer (arXiv 2508.04652); each level opens the next.

    0.5  both texts have 8 to 256 words
    1.0  the second is 1.6 to 3.2 times as long, in characters; linear to 0 at 1.1 and 5.0, outside of it stop
    0.5  it has at least 2 times as many different words; linear to 0 at 1.3, below it stop
    0.4  it has transition words: 40 % for one of the twelve categories, 5 % for each further one
    0.6  a common subject: the Jaccard index of their content words
    """
    for text in (short, long):
        if not MIN_WORDS <= len(text.split()) <= MAX_WORDS:
            return 0.0
    reward = 0.5

    length_ratio = len(long) / len(short)
    length_points = min(1.0, (length_ratio - 1.1) / (1.6 - 1.1), (5.0 - length_ratio) / (5.0 - 3.2))
    if length_points < 0:
        return reward
    reward += length_points

    short_words = set(re.findall(r"\w+", short.lower()))
    long_words = set(re.findall(r"\w+", long.lower()))
    word_ratio = len(long_words) / max(1, len(short_words))
    word_points = min(1.0, (word_ratio - 1.3) / (2.0 - 1.3))
    if word_points < 0:
        return reward
    reward += 0.5 * word_points

    categories = 0
    for phrases in TRANSITIONS.values():
        if re.search(rf"\b({phrases})\b", long.lower()):
            categories += 1
    if categories > 0:
        reward += 0.4 * min(1.0, 0.4 + 0.05 * (categories - 1))

    short_content = short_words - STOPWORDS
    long_content = long_words - STOPWORDS
    union = short_content | long_content
    jaccard_index = len(short_content & long_content) / max(1, len(union))
    return reward + 0.6 * jaccard_index


# --- The agent: models, critic, optimisers ----------------------------------------------------------------------------


class Agent:
    """An actor with its critic, which is a model of its own or a head on the actor, and their optimisers."""

    def __init__(self, reference, critic, tokenizer, args):
        self.tokenizer = tokenizer
        self.reference = reference  # the initial policy, frozen, and shared by the agents of one model
        self.actor = copy.deepcopy(reference).requires_grad_(True)
        self.critic = copy.deepcopy(critic).requires_grad_(True) if critic else None
        if args.shard:
            sharding.shard_model(self.actor)
        if args.shard and critic:
            sharding.shard_model(self.critic)
        hidden_dim = args.critic_value_head_hidden_dim if critic else args.value_head_hidden_dim
        self.value_head = build_value_head(critic or reference, hidden_dim)
        self.optimizers = build_optimizers(self, args)
        self.schedules = []
        self.engine = get_engine(self.actor, args) if args.use_vllm else None
        self.faults = Faults("--mini-batch-size", "--actor-learning-rate", halves=not args.shard)


def get_engine(actor, args):
    """vLLM's engine for models such as this one."""
    longest = args.max_prompt_length and args.max_prompt_length + args.max_new_tokens
    with sharding.whole_models([actor]):
        return engine.get_engine(actor, args, longest)


def build_value_head(model, hidden_dim):
    """Hidden states [..., D] to values [..., 1], through one hidden layer where `hidden_dim` is given."""
    width = model.config.get_text_config().hidden_size
    layers = []
    if hidden_dim:
        layers = [nn.Linear(width, hidden_dim), nn.Tanh()]
        width = hidden_dim
    last = nn.Linear(width, 1)
    nn.init.zeros_(last.weight)  # values start at 0, the mean of standardised rewards
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last).to(model.device)


def build_optimizers(agent, args):
    """One AdamW for an actor and its value head; two, the critic's own, where the critic is a model."""
    critic_parameters = list(agent.value_head.parameters())
    if agent.critic:
        critic_parameters += agent.critic.parameters()
    actor_group = {"params": list(agent.actor.parameters()), "lr": args.actor_learning_rate}
    critic_group = {"params": critic_parameters, "lr": args.critic_learning_rate}
    settings = {
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    if agent.critic:
        return [torch.optim.AdamW([actor_group], **settings), torch.optim.AdamW([critic_group], **settings)]
    return [torch.optim.AdamW([actor_group, critic_group], **settings)]


def load_model(auto_class, flag, name, settings, args, device):
    """A frozen model in eval mode, from a folder or the hub. Raises UserError, naming the flag."""
    with loading(flag, name) as path:
        model = from_pretrained(
            auto_class,
            path,
            dtype=getattr(torch, args.dtype),
            attn_implementation=args.attn_implementation,
            trust_remote_code=args.trust_remote_code,
            **settings,
        )
    model.to(device).eval().requires_grad_(False)
    check_padding(model, name)
    return model


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
    """N agents from what the flags name, or from copies of `model` and `tokenizer`. Raises UserError."""
    references = {}  # by name: agents of one name share a reference
    tokenizers = {}
    critics = {None: None}
    agents = []
    names = per_agent("--model", args.model, args.num_agents)
    critic_names = per_agent(CRITIC_FLAG, args.critic_model_name_or_path or (None,), args.num_agents)
    for name, critic_name in zip(names, critic_names):
        if name not in references:
            if model is None:
                references[name] = load_model(AutoModelForCausalLM, "--model", name, args.model_config, args, device)
            else:
                references[name] = copy.deepcopy(model).to(device).eval().requires_grad_(False)
                check_padding(references[name], "the model")
            tokenizers[name] = copy.deepcopy(tokenizer) if tokenizer else load_tokenizer(name, args)
            add_padding(tokenizers[name])
        if critic_name not in critics:
            critics[critic_name] = load_model(
                AutoModel, CRITIC_FLAG, critic_name, args.critic_model_config, args, device
            )
        critic = critics[critic_name]
        if critic is not None:
            check_vocabulary(critic, critic_name, tokenizers[name])
        elif args.use_separate_critic:
            critic = references[name].base_model
        agents.append(Agent(references[name], critic, tokenizers[name], args))
    if args.shard:
        for reference in references.values():
            sharding.shard_model(reference)
    for agent in agents:
        for optimizer in agent.optimizers:
            agent.schedules.append(LambdaLR(optimizer, lambda step: remaining_lr(step, updates, args)))
    return agents


def prompt_readers(args, configs, tokenizer=None):
    """Of each agent its tokenizer, and the most tokens of a prompt, or None. Raises UserError."""
    names = per_agent("--model", args.model, args.num_agents)
    tokenizers = {name: tokenizer or load_tokenizer(name, args) for name in names}
    return [(tokenizers[name], prompt_limit(config, args)) for name, config in zip(names, configs)]


def check_vocabulary(critic, name, tokenizer):
    """Raise UserError where a critic does not know all tokens of the actor it judges."""
    size = critic.config.get_text_config().vocab_size
    if size < len(tokenizer):
        raise UserError(f"{CRITIC_FLAG} {name} knows {size} tokens, the actor's tokenizer has {len(tokenizer)}")


def remaining_lr(step, updates, args):
    """The share of the learning rates that is left after `step` updates."""
    return min(1.0, 2.0 * (1.0 - step / updates)) if args.anneal_lr else 1.0


# --- Rollouts: every agent answers, the team is scored ----------------------------------------------------------------


@dataclass
class Rollout:
    """What one agent did in B episodes of up to T turns; a turn that was not played is 0 in all tensors."""

    prompt_ids: torch.Tensor  # [B, T, P]
    prompt_mask: torch.Tensor  # [B, T, P] 1 on tokens
    response_ids: torch.Tensor  # [B, T, L]
    mask: torch.Tensor  # [B, T, L] 1 on sampled tokens, up to and including the first end token
    logprobs: torch.Tensor  # [B, T, L] log pi(a_t|h_t), of the logits divided by the temperature
    sampler_logprobs: torch.Tensor  # [B, T, L] vLLM's, of the distribution that it sampled from; 0 without vLLM
    values: torch.Tensor  # [B, T, L] V(h_t) of a value head on the actor; 0 where the critic is a model of its own
    rewards: torch.Tensor  # [B, T] as reward_func gave them
    processed_rewards: torch.Tensor  # [B, T] as reward_processor left them, which is what is learned from
    prompts: list  # B lists of a string for each turn played
    responses: list  # B lists of a string for each turn played

    @property
    def played(self):
        """[B, T] whether a turn was played."""
        return self.mask.any(-1)

    def select(self, rows):
        """The episodes of these rows, trimmed to their longest prompt and their longest response."""
        P = int(self.prompt_mask[rows].sum(-1).max())
        L = int(self.mask[rows].sum(-1).max())
        return Rollout(
            prompt_ids=self.prompt_ids[rows, :, -P:],
            prompt_mask=self.prompt_mask[rows, :, -P:],
            response_ids=self.response_ids[rows, :, :L],
            mask=self.mask[rows, :, :L],
            logprobs=self.logprobs[rows, :, :L],
            sampler_logprobs=self.sampler_logprobs[rows, :, :L],
            values=self.values[rows, :, :L],
            rewards=self.rewards[rows],
            processed_rewards=self.processed_rewards[rows],
            prompts=[self.prompts[row] for row in rows.tolist()],
            responses=[self.responses[row] for row in rows.tolist()],
        )


def check_length(length, config, args):
    """Raise UserError for a prompt of so many tokens that is too long for the flags, or for the model."""
    if args.max_prompt_length and length > args.max_prompt_length:
        raise UserError(f"a prompt of {length} tokens exceeds --max-prompt-length {args.max_prompt_length}")
    room = engine.max_length(config, args)
    if room and length + args.max_new_tokens > room:
        sizes = f"--max-new-tokens {args.max_new_tokens} after a prompt of {length}"
        raise UserError(f"{sizes} exceeds the model's {room} positions")


def prompt_limit(config, args):
    """The most tokens of a prompt, or None. Raises UserError where the model has no room for so many."""
    check_length(args.max_prompt_length or 1, config, args)
    room = engine.max_length(config, args)
    return args.max_prompt_length or (room and room - args.max_new_tokens)


def encode(prompts, agent, args):
    """Token ids and mask of B prompts, each [B, P], left-padded. Raises UserError where one is too long."""
    ids = agent.tokenizer(prompts, add_special_tokens=False).input_ids
    if args.long_prompts == "truncate":
        most = prompt_limit(agent.actor.config, args)
        ids = [tasks.truncate(row, most, agent.tokenizer) for row in ids]
    check_length(max(len(row) for row in ids), agent.actor.config, args)
    batch = agent.tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    return batch.input_ids.to(agent.actor.device), batch.attention_mask.to(agent.actor.device)


def choose(logits, args, generator):
    """Next tokens [B] from logits [B, vocabulary], already divided by the temperature."""
    if not args.do_sample:
        return logits.argmax(-1)
    if args.top_k:
        logits = TopKLogitsWarper(args.top_k)(None, logits)
    if args.top_p < 1:
        logits = TopPLogitsWarper(args.top_p)(None, logits)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def autocast(model, args):
    """Within it forward passes run in --mixed-precision."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=args.mixed_precision == "bf16")


def sample_tokens(agent, rollout, rows, args, generator):
    """Let an agent answer the prompts of these rows of a rollout of one turn, token by token, into the rollout.

    Rows that have ended are dropped from the batch and from the cache: only rows that still run are computed.
    """
    actor = agent.actor
    end_ids = torch.tensor(end_tokens(actor, agent.tokenizer), device=actor.device)
    input_ids = rollout.prompt_ids[rows, 0]
    attention_mask = rollout.prompt_mask[rows, 0]
    cache = None
    for t in range(args.max_new_tokens):
        out = forward(actor, input_ids, attention_mask, cache, keep=1, use_cache=True, hidden=agent.critic is None)
        logits = out.logits[:, -1].float() / args.temperature
        tokens = choose(logits, args, generator)
        rollout.response_ids[rows, 0, t] = tokens
        rollout.mask[rows, 0, t] = 1.0
        rollout.logprobs[rows, 0, t] = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        if agent.critic is None:
            rollout.values[rows, 0, t] = read_values(agent.value_head, out.hidden_states[:, -1])

        running = ~torch.isin(tokens, end_ids)
        if not running.any():
            break
        cache = out.cache
        if not running.all():
            cache.reorder_cache(running.nonzero().squeeze(1))
        rows = rows[running]
        input_ids = tokens[running, None]
        attention_mask = pad(attention_mask[running], (0, 1), value=1)


def hand_over(agent, args):
    """Give vLLM the agent's weights. Raises UserError where it then has others."""
    agent.engine.load_weights(agent.actor)
    with autocast(agent.actor, args):
        agent.engine.check(lambda ids: forward(agent.actor, ids, keep=1).logits[:, -1])


def sample_with_vllm(agent, rollout, args, generator):
    """Let an agent answer all prompts of a rollout of one turn, into the rollout, but for logprobs and values."""
    hand_over(agent, args)
    settings = {
        "max_tokens": args.max_new_tokens,
        "stop_token_ids": end_tokens(agent.actor, agent.tokenizer),
        "temperature": args.temperature if args.do_sample else 0.0,
        "top_p": args.top_p,
        "top_k": args.top_k,
    }
    prompts = []
    for ids, mask in zip(rollout.prompt_ids[:, 0], rollout.prompt_mask[:, 0]):
        prompts.append(ids[mask > 0].tolist())
    responses, logprobs = agent.engine.sample(prompts, settings, generator)
    for row, ids in enumerate(responses):
        L = len(ids)
        rollout.response_ids[row, 0, :L] = torch.tensor(ids)
        rollout.mask[row, 0, :L] = 1.0
        rollout.sampler_logprobs[row, 0, :L] = torch.tensor(logprobs[row])


def write_logprobs_and_values(agent, rollout, args):
    """Write what vLLM does not know into a rollout: log pi(a_t|h_t), and V(h_t) of a value head on the actor."""
    for rows in row_parts(rollout, args):
        part = rollout.select(rows)
        L = part.mask.shape[-1]
        log_pi, hidden_states = forward_policy(agent.actor, part, args)
        rollout.logprobs[rows, :, :L] = take_logprobs(log_pi, part)
        if agent.critic is None:
            rollout.values[rows, :, :L] = scatter(read_values(agent.value_head, hidden_states), part.played)


@torch.no_grad()
def sample(agent, prompts, args, generator):
    """Let an agent answer B prompts, strings: a rollout of one turn, without rewards. Raises UserError."""
    B = len(prompts)
    prompt_ids, prompt_mask = encode(prompts, agent, args)
    blank = torch.zeros(B, 1, args.max_new_tokens, device=prompt_ids.device)
    rollout = Rollout(
        prompt_ids=prompt_ids[:, None],
        prompt_mask=prompt_mask[:, None],
        response_ids=torch.full_like(blank, agent.tokenizer.pad_token_id, dtype=torch.long),
        mask=blank.clone(),
        logprobs=blank.clone(),
        sampler_logprobs=blank.clone(),
        values=blank.clone(),
        rewards=blank[..., 0].clone(),
        processed_rewards=blank[..., 0].clone(),
        prompts=[[prompt] for prompt in prompts],
        responses=[],
    )
    if args.use_vllm:
        sample_with_vllm(agent, rollout, args, generator)
    else:
        chunk_size = (args.per_device_train_batch_size or B) * args.num_generations
        with autocast(agent.actor, args):
            for rows in torch.arange(B, device=blank.device).split(chunk_size):
                sample_tokens(agent, rollout, rows, args, generator)
    texts = agent.tokenizer.batch_decode(rollout.response_ids[:, 0], skip_special_tokens=True)
    rollout.responses = [[text] for text in texts]
    if args.use_vllm:  # of a rollout that is whole
        write_logprobs_and_values(agent, rollout, args)
    return rollout.select(torch.arange(B))


def act(agent, prompts, args, generator=None):
    """An agent's responses, B strings, to B prompts, strings or chats; with no generator those of the likeliest tokens.

    Raises UserError.
    """
    if generator is None:
        args = replace(args, do_sample=False, top_p=1.0, top_k=0)
    texts = [render(prompt, agent.tokenizer) for prompt in prompts]
    rollout = sample(agent, texts, args, generator)
    return [turns[0] for turns in rollout.responses]


def join(turns, rows, B, T):
    """One agent's rollouts of single turns as one of B episodes; `rows` has the episodes that played in each turn."""
    tensors = {}
    for name in ("prompt_ids", "prompt_mask"):
        tensors[name] = stack([getattr(turn, name) for turn in turns], rows, (B, T), padding="left")
    for name in ("response_ids", "mask", "logprobs", "sampler_logprobs", "values", "rewards", "processed_rewards"):
        tensors[name] = stack([getattr(turn, name) for turn in turns], rows, (B, T), padding="right")
    prompts = [[] for _ in range(B)]
    responses = [[] for _ in range(B)]
    for turn, episodes in zip(turns, rows):
        for row, episode in enumerate(episodes):
            prompts[episode] += turn.prompts[row]
            responses[episode] += turn.responses[row]
    return Rollout(**tensors, prompts=prompts, responses=responses)


def stack(xs, rows, shape, padding):
    """Tensors [B_t, 1, ...] of the episodes that played in each turn, as one [B, T, ...], 0 elsewhere."""
    if xs[0].dim() == 2:
        return stack([x[..., None] for x in xs], rows, shape, padding).squeeze(-1)
    width = max(x.shape[-1] for x in xs)
    stacked = xs[0].new_zeros(*shape, width)
    for t, x in enumerate(xs):
        columns = slice(width - x.shape[-1], None) if padding == "left" else slice(x.shape[-1])
        stacked[rows[t], t, columns] = x[:, 0]
    return stacked


def play(agents, task, items, args, generator, phase):
    """Play an episode of each of B items, turn by turn: every agent answers, the team is scored. N rollouts.

    `phase` is called with the name of what takes the time. Raises TaskError where the task fails.
    """
    episodes = tasks.Episodes(
        task, items, args.num_agents, args.num_turns, args.early_termination_threshold, args.reward_timeout
    )
    turns = []  # of each turn the agents' N rollouts
    rows = []  # of each turn the episodes that played
    while episodes.running:
        rows.append(list(episodes.running))
        phase("sample")
        rollouts = []
        for i, agent in enumerate(agents):
            prompts = episodes.prompts(i, agent.tokenizer)
            rollouts.append(sample(agent, prompts, args, generator))
        phase("reward")
        score_turn(episodes, rollouts)
        turns.append(rollouts)
    return [join(agent_turns, rows, len(items), args.num_turns) for agent_turns in zip(*turns)]


def score_turn(episodes, rollouts):
    """Give the N rollouts of a turn the task's rewards, and let the task say who goes on, and from which prompts."""
    prompts = []
    responses = []
    for rollout in rollouts:
        prompts.append([texts[0] for texts in rollout.prompts])
        responses.append([texts[0] for texts in rollout.responses])
    rewards, processed_rewards = episodes.score(responses, prompts)  # task.reward_func: N lists of B floats
    for i, rollout in enumerate(rollouts):
        rollout.rewards[:, 0] = torch.tensor(rewards[i])
        rollout.processed_rewards[:, 0] = torch.tensor(processed_rewards[i])


# --- Learning: log-probabilities, values, rewards, advantages, the loss -----------------------------------------------


def model_inputs(rollout):
    """What a model reads to predict every response token of the turns that were played, a row each."""
    played = rollout.played
    mask = torch.cat([rollout.prompt_mask[played], rollout.mask[played].long()], 1)
    ids = torch.cat([rollout.prompt_ids[played], rollout.response_ids[played]], 1)
    return {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]}  # nothing is predicted from the last token


def scatter(x, played):
    """[*, L] of the turns that were played, a row each, as [B, T, L], 0 elsewhere."""
    scattered = x.new_zeros(*played.shape, x.shape[-1])
    scattered[played] = x
    return scattered


def forward_policy(model, rollout, args):
    """log pi(.|h_t) of all tokens at --temperature, [*, L, vocabulary], and last hidden states [*, L, D]."""
    L = rollout.mask.shape[-1]
    with autocast(model, args):
        out = forward(model, **model_inputs(rollout), keep=L, hidden=True)
    log_pi = (out.logits.float() / args.temperature).log_softmax(-1)
    return log_pi, out.hidden_states


def take_logprobs(log_pi, rollout):
    """log pi(a_t|h_t) [B, T, L] of the tokens that were sampled."""
    played = rollout.played
    tokens = rollout.response_ids[played][..., None]
    return scatter(log_pi.gather(-1, tokens).squeeze(-1), played)


def take_entropy(log_pi, rollout):
    """The entropy of pi(.|h_t) in nats, [B, T, L], over the whole vocabulary."""
    return scatter(-(log_pi.exp() * log_pi).sum(-1), rollout.played)


def read_values(value_head, hidden_states):
    """[..., D] hidden states to [...] values, in float32."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        return value_head(hidden_states.float()).squeeze(-1)


def critic_values(agent, rollout, args):
    """V(h_t) [B, T, L] of a separate critic, read at the positions whose logits predict a_t."""
    L = rollout.mask.shape[-1]
    with autocast(agent.critic, args):
        out = forward(agent.critic, **model_inputs(rollout), keep=L)
        return scatter(read_values(agent.value_head, out.hidden_states), rollout.played)


def row_parts(rollout, args):
    """The rows of a rollout, as many at a time as this process has of a mini-batch.

    All processes have as many episodes, so that with --shard they make as many passes.
    """
    rows = torch.arange(len(rollout.mask), device=rollout.mask.device)
    return rows.split(args.mini_batch_size // distributed.world_size())


@torch.no_grad()
def compute_reference_logprobs(agent, rollout, args):
    """log pi_ref(a_t|h_t) [B, T, L] of the initial policy."""
    logprobs = torch.zeros_like(rollout.mask)
    for rows in row_parts(rollout, args):
        part = rollout.select(rows)
        L = part.mask.shape[-1]
        log_pi, _ = forward_policy(agent.reference, part, args)
        logprobs[rows, :, :L] = take_logprobs(log_pi, part)
    return logprobs


@torch.no_grad()
def compute_values(agent, rollout, args):
    """V(h_t) [B, T, L]; those of a value head on the actor were computed while it sampled."""
    if agent.critic is None:
        return rollout.values
    values = torch.zeros_like(rollout.mask)
    for rows in row_parts(rollout, args):
        part = rollout.select(rows)
        L = part.mask.shape[-1]
        values[rows, :, :L] = critic_values(agent, part, args)
    return values


def masked_mean(x, mask):
    """This process's share of the mean of x over the mask's ones: averaged over the processes, it is the mean."""
    return (x * mask).sum() / distributed.mean(mask.sum())


def standardise(x, mask, eps=1e-6):
    """(x - mean) / max(deviation, eps) over the mask's ones in all processes, 0 elsewhere."""
    count = distributed.total(mask.sum())
    mean = distributed.total((x * mask).sum()) / count
    deviation = (distributed.total(((x - mean) ** 2 * mask).sum()) / count).sqrt()
    return (x - mean) / deviation.clamp(min=eps) * mask


def token_rewards(rollout, reference_logprobs, args):
    """[B, T, L]: a turn's reward on its last token, and -kl_coef (log pi - log pi_ref) on every token."""
    rewards = rollout.processed_rewards
    if args.reward_normalization:
        rewards = standardise(rewards, rollout.played.float(), args.reward_norm_eps)
    last = rollout.mask - pad(rollout.mask[..., 1:], (0, 1))  # 1 on the last token of each turn
    log_ratio = (rollout.logprobs - reference_logprobs) * rollout.mask
    return -args.kl_coef * log_ratio + last * rewards[..., None]


def group_actions(rewards, values, mask, args):
    """What belongs to tokens, [B, T, L], as what belongs to actions, [B, T, K]: tokens (K = L) or turns (K = 1).

    A turn's reward is the sum over its tokens, its value that of its prompt, which is read before its first token.
    """
    if args.action_granularity == "token":
        return rewards, values, mask
    return rewards.sum(-1, keepdim=True), values[..., :1], mask[..., :1]


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
    """Episodes of a rollout, and what their actions are to learn: tokens (K = L) or turns (K = 1)."""

    rollout: Rollout
    old_values: torch.Tensor  # [B, T, K] V(h_t) before the update
    advantages: torch.Tensor  # [B, T, K]
    returns: torch.Tensor  # [B, T, K] the critic's targets
    action_mask: torch.Tensor  # [B, T, K] 1 on actions
    num_tokens: torch.Tensor | None = None  # sampled tokens of the whole mini-batch, on average over the processes
    num_actions: torch.Tensor | None = None  # actions of the whole mini-batch, on average over the processes

    def select(self, rows):
        """The episodes of these rows, trimmed as Rollout.select does."""
        rollout = self.rollout.select(rows)
        L = rollout.mask.shape[-1]
        return replace(
            self,
            rollout=rollout,
            old_values=self.old_values[rows, :, :L],
            advantages=self.advantages[rows, :, :L],
            returns=self.returns[rows, :, :L],
            action_mask=self.action_mask[rows, :, :L],
        )

    def split(self, num_parts):
        """The batch in parts, whose losses add up to its own; Faults.backward does so where memory runs out."""
        for rows in torch.arange(len(self.action_mask), device=self.action_mask.device).chunk(num_parts):
            yield self.select(rows)


def minibatches(batch, args, generator):
    """The mini-batches of a rollout's batch, in a new random order; an episode's turns stay together."""
    order = torch.randperm(len(batch.action_mask), generator=generator, device=generator.device)
    for rows in order.split(args.mini_batch_size // distributed.world_size()):
        minibatch = batch.select(rows)
        minibatch.num_tokens = distributed.mean(minibatch.rollout.mask.sum())
        minibatch.num_actions = distributed.mean(minibatch.action_mask.sum())
        yield minibatch


def sampler_weights(rollout, args):
    """The weight of each token in the policy's loss, [B, T, L]: pi_old / pi of vLLM, at most 2; 1 without vLLM."""
    if not args.use_vllm or not args.sampler_correction or not args.do_sample:
        return torch.ones_like(rollout.logprobs)
    return (rollout.logprobs - rollout.sampler_logprobs).exp().clamp(max=MOST_WEIGHT)


def ippo_loss(agent, minibatch, args):
    """The loss of a mini-batch, or a part's share in it, and its metrics: means over its tokens or actions."""
    rollout = minibatch.rollout
    action_mask = minibatch.action_mask
    log_pi, hidden_states = forward_policy(agent.actor, rollout, args)
    logprobs = take_logprobs(log_pi, rollout)
    if args.entropy_coef == 0:
        log_pi = log_pi.detach()  # the entropy is a metric only
    entropy = (take_entropy(log_pi, rollout) * rollout.mask).sum() / minibatch.num_tokens
    if agent.critic:
        values = critic_values(agent, rollout, args)
    else:
        values = scatter(read_values(agent.value_head, hidden_states), rollout.played)

    log_ratio = (logprobs - rollout.logprobs).detach()
    approx_kl = ((log_ratio.exp() - 1 - log_ratio) * rollout.mask).sum() / minibatch.num_tokens
    weighted_logprobs = sampler_weights(rollout, args) * logprobs
    if args.action_granularity == "turn":  # log pi of a response is the sum over its tokens
        weighted_logprobs = (weighted_logprobs * rollout.mask).sum(-1, keepdim=True)
        values = values[..., :1]

    policy_loss = -(weighted_logprobs * minibatch.advantages * action_mask).sum() / minibatch.num_actions

    value_error = (values - minibatch.returns) ** 2
    if args.value_clip_range is not None:
        change = (values - minibatch.old_values).clamp(-args.value_clip_range, args.value_clip_range)
        clipped_error = (minibatch.old_values + change - minibatch.returns) ** 2
        value_error = torch.max(value_error, clipped_error)
    value_loss = (value_error * action_mask).sum() / minibatch.num_actions

    loss = policy_loss - args.entropy_coef * entropy + args.value_loss_coef * value_loss
    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "approx_kl": approx_kl}
    return loss, metrics


def optimizer_step(agent, args):
    """Clip the gradients, then step every optimiser; returns metrics. Where one is not finite, none steps."""
    norms = []
    for optimizer in agent.optimizers:
        parameters = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        distributed.average_gradients(parameters)
        norms.append(sharding.clip_gradients(parameters, args.max_grad_norm))
    finite = agent.faults.finite(norms)
    for optimizer in agent.optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad()
    return {"grad_norm": norms[0], "skipped": torch.tensor(0.0 if finite else 1.0)}


def describe_drift(rollout, reference_logprobs):
    """How far an agent is from its initial policy: metrics, means over tokens in nats."""
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
    if args.use_vllm and args.do_sample:
        metrics |= sampler_metrics(rollout, MOST_WEIGHT)
    return metrics


# --- main: sample, score, learn, log ----------------------------------------------------------------------------------


def count_updates(num_items, args):
    """The updates of the run: those of its epochs, or, where these are fewer, those of --max-steps."""
    updates = args.num_train_epochs * num_items * args.num_generations // args.rollout_buffer_size
    if args.max_steps:
        updates = min(updates, math.ceil(args.max_steps / args.rollout_buffer_size))
    return updates


def build_run(args, folder, agents, generator, updates, updates_per_epoch, optimum):
    """The run's folder, with what it is to keep and to restore."""
    return Run(
        folder,
        args,
        script=__file__,
        agents=agents,
        save=checkpoint.save_agents,
        load=checkpoint.load_agents,
        save_together=args.shard,
        generator=generator,
        updates=updates,
        samples_per_update=args.rollout_buffer_size,
        updates_per_epoch=updates_per_epoch,
        optimum=optimum,
    )


def evaluate(agents, task, items, args):
    """The team's mean reward on held-out items, sampled with the same noise each time.

    It is this process's share: averaged over the processes, it is the mean.
    """
    rank = distributed.rank()
    processes = distributed.world_size()
    own_items = [items[k] for k in range(rank, len(items), processes)]
    if not own_items:
        return 0.0
    generator = torch.Generator(agents[0].actor.device).manual_seed(args.seed + rank)
    rollouts = play(agents, task, own_items, args, generator, phase=lambda name: None)
    rewards = torch.stack([rollout.rewards for rollout in rollouts]).mean(0)  # [B, T]
    return sum(rewards.unbind(1)).mean() * (len(own_items) * processes / len(items))


def main(args=None, task=None, model=None, tokenizer=None, train_dataset=None, eval_dataset=None):
    """Train a team; returns its agents and its Run. Raises UserError for what the user can fix.

    `task` (any object with a task's names), `model` (loaded; it is copied) and `tokenizer` replace what the flags name;
    `train_dataset` and `eval_dataset`, rows of a datasets.Dataset or a list of dicts, replace the task's own.
    """
    args = args or Args()
    device = distributed.start()
    rank = distributed.rank()
    processes = distributed.world_size()
    check_args(args)
    configs = check_models(args, model)
    task = tasks.load_task(task or args.task or sys.modules[__name__], args.num_agents, args.num_turns)
    folder = run_folder(args, __file__, args.task, may_change=("shard", "vllm_config"))
    items_per_update = args.rollout_buffer_size // args.num_generations
    data = tasks.load_items(task, args, args.seed, items_per_update, train_dataset, eval_dataset)
    readers = prompt_readers(args, configs, tokenizer)
    train_items, held_out_items = tasks.fit_prompts(task, args, readers, items_per_update, *data)
    updates = count_updates(len(train_items), args)
    updates_per_epoch = len(train_items) / items_per_update
    optimum = task.optimum(args.num_agents, args.num_turns) if hasattr(task, "optimum") else None

    set_seed(args.seed)
    agents = build_agents(args, device, updates, model, tokenizer)
    actors = [agent.actor for agent in agents]
    generator = torch.Generator(device).manual_seed(args.seed + 1_000_003 * rank)
    with build_run(args, folder, agents, generator, updates, updates_per_epoch, optimum) as run:
        data = tasks.batches(train_items, items_per_update, args.num_train_epochs, args.seed, run.step, updates)
        for step, items in run.updates(data):
            # 1. Every agent answers; the team is scored, turn by turn.
            items = [item for item in items[rank::processes] for _ in range(args.num_generations)]
            with sharding.whole_models(actors):
                rollouts = play(agents, task, items, args, generator, run.phase)

            # 2. Each agent learns alone.
            drifts = []
            agent_metrics = {}
            for i, (agent, rollout) in enumerate(zip(agents, rollouts)):
                run.phase("evaluate")
                reference_logprobs = compute_reference_logprobs(agent, rollout, args)
                values = compute_values(agent, rollout, args)
                rewards = token_rewards(rollout, reference_logprobs, args)
                rewards, values, action_mask = group_actions(rewards, values, rollout.mask, args)
                advantages, returns = gae(rewards, values, action_mask, args.gamma, args.gae_lambda)
                if args.advantage_normalization:
                    advantages = standardise(advantages, action_mask)

                run.phase("update")
                batch = Batch(rollout, values, advantages, returns, action_mask)
                history = []
                for _ in range(args.ppo_epochs):
                    for minibatch in minibatches(batch, args, generator):
                        metrics = agent.faults.backward(agent, minibatch, args, ippo_loss)  # loss.backward()
                        history.append(metrics | optimizer_step(agent, args))
                for schedule in agent.schedules:
                    schedule.step()

                drifts.append(describe_drift(rollout, reference_logprobs))
                for name, x in describe_update(batch, history, args).items():
                    agent_metrics[f"agent_{i}/{name}"] = x

            # 3. Metrics, held-out items, samples.
            metrics = team_metrics(rollouts) | average(drifts) | agent_metrics | tasks.extra_metrics(task, rollouts)
            held_out = None
            interval = args.eval_interval
            if held_out_items and interval and (step % interval == 0 or step in (1, updates)):
                run.phase("held-out")
                with sharding.whole_models(actors):
                    held_out = evaluate(agents, task, held_out_items, args)
            new_tokens = sum(rollout.mask.sum() for rollout in rollouts)
            run.log(metrics, items, rollouts, new_tokens, held_out)
    return agents, run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
