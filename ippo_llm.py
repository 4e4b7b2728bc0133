"""Independent PPO (IPPO) for N language models that answer together and are scored together, in one file.

Agent i with history h and action a_t ascends, with its own actor theta_i,

    J(theta_i) = E[ log pi(a_t|h_t) A_t + beta H(pi) ],    A_t = sum_l (gamma lambda)^l delta_{t+l},
    delta_t    = r_t + gamma V(h_{t+1}) - V(h_t),    V = 0 after the last action,

while its own critic phi_i descends (V(h_t) - G_t)^2, clipped, with
G_t = A_t + V_old(h_t). The A_t of J is a constant, standardised over the rollout. As on CoMLRL's page there is no ratio
and no clipping of the policy: after a rollout's first mini-batch each is a little off-policy, uncorrected. An action is
a token, or a whole response (--action-granularity).
r is the team's reward, such that what episodes of a rollout earn is standardised, on the last token of a turn, less a
KL penalty on each token. The other agents are a part of the environment. The critic is a model of its own
(--use-separate-critic), or a value head on the actor; with a head, the value loss also trains the actor's body.

    python ippo_llm.py --num-agents 2 --use-separate-critic
    torchrun --nproc-per-node 2 ippo_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --mixed-precision bf16

Simplified: models stay in eval mode, without dropout, so that sampling and learning see the same probabilities; with
--top-p or --top-k the log-probabilities are still those of all tokens.
From CoMLRL's page, while its code has none of these: GAE over tokens, gamma, lambda, the entropy bonus, ppo_epochs.
Added here: many prompts at a time, several turns, a KL penalty, tokens or turns as actions, held-out items.
Source: IPPO (arXiv 2011.09533), GAE (arXiv 1506.02438), CoMLRL's page on Multi-Agent PPO.

Shapes: B episodes of a rollout, T turns of an episode, P prompt tokens (left-padded), L response tokens (right-padded),
K actions of a turn (L tokens, or 1), R turns of a rollout that were played, D units of a hidden state. With several
processes B counts one process's episodes; distributed.total and distributed.mean are over all processes, and gradients
are averaged.
"""

import copy
import re
import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import datasets
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch.nn.functional import pad
from torch.optim.lr_scheduler import LambdaLR
from transformers import TopKLogitsWarper, TopPLogitsWarper, set_seed

from utils import causal_lm, distributed, engine, models, sharding, tasks
from utils.cli import UserError, command_line, flags, needs, not_with
from utils.metrics import mean_reward, update_metrics
from utils.prompts import end_tokens, pad_left, render
from utils.rollouts import Rows
from utils.run import FolderArgs, Run
from utils.tasks.made_text import posts
from utils.tasks.words import STOPWORDS, TRANSITIONS

# --- Args: the flags --------------------------------------------------------------------------------------------------
# A flag's comment is its help. It has no effect without the flags that `needs` names, or with those of `not_with`.


@flags
class TrainingArgs:
    """How long, from which seed."""

    seed: NonNegativeInt = 1  # seed of everything random: the same seed gives the same run
    num_train_epochs: PositiveInt | None = None  # passes over the training set; none: 3, or what --max-steps takes
    max_steps: PositiveInt | None = None  # joint samples after which the run ends, in whole updates; none: no such end
    eval_interval: NonNegativeInt = 12  # updates between evaluations on the held-out items; 0: never


@flags
class AgentArgs:
    """The agents. Here and below, what CoMLRL has too has its name."""

    model: tuple[str, ...] = ("utils/tiny_lm",)  # folder or hub name that agents start from: one for all, or one each
    num_agents: PositiveInt = 2  # agents in the team, each with its own copy of its model


@flags
class SamplingArgs:
    """Sampling: how a rollout is made."""

    num_generations: PositiveInt = 1  # joint samples of each item in a rollout
    num_turns: PositiveInt = 1  # turns of an episode; more than one takes a task with an external_transition
    # end an episode after a turn with a raw reward, the agents' mean, above this
    early_termination_threshold: float | None = None
    # items sampled at once on a device; none: the rollout
    per_device_train_batch_size: PositiveInt | None = not_with("use_vllm", default=None)
    max_new_tokens: PositiveInt = 72  # longest response in tokens; a longer one is cut and counts as finished
    do_sample: bool = True  # sample; --no-do-sample: take the likeliest token
    temperature: PositiveFloat = 1.0  # the logits are divided by it
    # sample from the likeliest tokens that sum up to it
    top_p: Annotated[float, Field(gt=0, le=1)] = needs("do_sample", default=1.0)
    top_k: NonNegativeInt = needs("do_sample", default=0)  # sample from so many likeliest tokens; 0: from all


@flags
class AlgorithmArgs:
    """The algorithm: rewards, advantages and losses."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0  # discount factor
    kl_coef: NonNegativeFloat = 0.03  # each token's reward is less kl_coef * (log pi - log pi of the initial model)
    reward_normalization: bool = True  # standardise rewards over the rollout
    # the least standard deviation that rewards are divided by
    reward_norm_eps: PositiveFloat = needs("reward_normalization", default=1e-3)
    advantage_normalization: bool = True  # standardise advantages over the rollout
    entropy_coef: NonNegativeFloat = 0.0  # beta, the weight of the entropy bonus
    value_loss_coef: NonNegativeFloat | None = None  # weight of the value loss; none: 0.5, of separate critics 0.02
    value_clip_range: PositiveFloat | None = 0.2  # no gain for a value that moves further to its target; none: any
    mini_batch_size: PositiveInt = 16  # joint samples in an optimiser step, over all processes
    micro_batch_size: PositiveInt | None = None  # joint samples in a forward pass; none: a process's mini-batch


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
    tasks.TaskArgs,  # --task, --dataset, --train-size ...
    FolderArgs,  # --output-dir, --resume, --save-interval ...
    AgentArgs,
    models.CriticArgs,  # --use-separate-critic, and what critics start from
    models.LoadingArgs,  # --mixed-precision, --shard ...
    SamplingArgs,
    engine.VllmArgs,  # --use-vllm, --sampler-correction
    AlgorithmArgs,
    IPPOArgs,
    OptimizerArgs,
):
    """All flags."""


def check_args(args):
    """Raise UserError for flags that do not go together, before anything is loaded or written."""
    distributed.check_flags(args, multiples=("mini_batch_size",))
    engine.check_vllm_args(args)
    divisor = args.num_generations * distributed.world_size()
    if args.rollout_buffer_size % divisor:
        takes = f"a multiple of generations x processes, {divisor}"
        raise UserError(f"--rollout-buffer-size takes {takes}, got {args.rollout_buffer_size}")
    if args.early_termination_threshold is not None and args.num_turns == 1:
        raise UserError("--early-termination-threshold has no effect with --num-turns 1")


# --- The task: data, prompts, reward ----------------------------------------------------------------------------------

# A task is the functions below. With several turns it also has external_transition: it is called with what its
# signature names (agent_completions, item ...), and returns the agents' next prompts, or None to end the episode.
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
    """An agent's models, their optimisers and schedules."""

    def __init__(self, i, reference, tokenizer, updates, args):
        self.tokenizer = tokenizer
        self.reference = reference  # the initial policy, frozen, and shared by the agents of one model
        self.actor = copy.deepcopy(reference).requires_grad_(True)
        self.critic = models.load_critic(i, reference, args)  # None: a head on the actor
        self.value_head = models.ValueHead(self.critic or reference, args)  # values begin at 0
        if args.shard:
            sharding.shard_agent(self)
        self.optimizers = build_optimizers(self, args)
        self.schedules = [build_schedule(optimizer, updates, args) for optimizer in self.optimizers]
        self.num_skipped = 0  # gradients in a row that were not finite
        self.deviation = 0.0  # that the advantages of the last rollout were divided by
        self.engine = engine.get_engine(self.actor, args, "max_new_tokens") if args.use_vllm else None


def build_optimizers(agent, args):
    """AdamW, one for each model."""
    settings = {
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    groups = [[{"params": [*agent.actor.parameters()], "lr": args.actor_learning_rate}]]
    critic_group = {"params": [*agent.value_head.parameters()], "lr": args.critic_learning_rate}
    if agent.critic:
        critic_group["params"] += agent.critic.parameters()
        groups.append([critic_group])
    else:  # the value head learns with the actor
        groups[0].append(critic_group)
    return [torch.optim.AdamW(group, **settings) for group in groups]


def build_schedule(optimizer, updates, args):
    """Learning rates that are held for half of the updates, then lowered to 0 (--anneal-lr)."""

    def remaining(step):
        return min(1.0, max(0.0, 2.0 * (1.0 - step / updates))) if args.anneal_lr else 1.0

    return LambdaLR(optimizer, remaining)


def build_agents(args, device, updates, model=None, tokenizer=None):
    """N agents from what the flags name, or from copies of `model` and `tokenizer`. Raises UserError."""
    tokenizers = models.load_tokenizers(args, tokenizer, model)
    references = models.load_models("model", "model_config", args, device, model)
    agents = []
    for i in range(args.num_agents):
        agents.append(Agent(i, references[i], tokenizers[i], updates, args))
    if args.shard:
        sharding.shard_models(references)
    return agents


# --- Rollouts: every agent answers, the team is scored ----------------------------------------------------------------


@dataclass
class Rollout(Rows):
    """What one agent did in B episodes of up to T turns; a turn that was not played is 0 in all tensors.

    From Rows: select, split and map take some of the episodes, without the columns that are padding in all of them (map
    pads again what it returns); stack joins turns. The samples of one item (--num-generations) are neighbours.
    """

    ids: torch.Tensor  # [B, T, P + L] prompt and response
    attention_mask: torch.Tensor  # [B, T, P + L] 1 on tokens, 0 on padding
    response_mask: torch.Tensor  # [B, T, L] 1 on sampled tokens, the end token included
    logprobs: torch.Tensor  # [B, T, L] log pi(a_t|h_t) at --temperature; where vLLM sampled: its own, until learn
    sampler_logprobs: torch.Tensor  # [B, T, L] those of the sampler
    values: torch.Tensor  # [B, T, L] V(h_t) of a value head, as read in sampling; 0: not read
    rewards: torch.Tensor  # [B, T] what is learned from: the raw rewards, or what reward_processor made of them
    raw_rewards: torch.Tensor  # [B, T] what is reported: the rewards as reward_func gave them
    prompts: list  # B lists of a string for each turn played
    responses: list  # B lists of a string for each turn played
    num_long_prompts: int = field(default=0, kw_only=True)  # the team's, of later turns: cut, or the end of an episode

    @property
    def played(self):
        """[B, T] whether a turn was played."""
        return self.response_mask.any(-1)

    @property
    def response_ids(self):
        """[B, T, L] the sampled tokens."""
        return self.ids[..., -self.response_mask.shape[-1] :]


def prompt_limit(agent, args):
    """How many tokens a prompt may have."""
    return tasks.prompt_limit(agent.actor.config, args, "max_new_tokens")


def choose_tokens(logits, args, generator, greedy):
    """Next tokens [B] from logits [B, vocabulary], already divided by the temperature."""
    if greedy:
        return logits.argmax(-1)
    if args.top_k:
        logits = TopKLogitsWarper(args.top_k)(None, logits)
    if args.top_p < 1:
        logits = TopPLogitsWarper(args.top_p)(None, logits)
    probabilities = logits.softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def take_logprobs(log_pi, tokens):
    """log pi [...] of the tokens [...], from log pi [..., vocabulary] of all tokens."""
    return log_pi.gather(-1, tokens[..., None]).squeeze(-1)


def sample_tokens(agent, rollout, rows, args, generator, greedy):
    """Let an agent answer the prompts in these rows of a rollout of one turn, token by token, into the rollout.

    Rows that have ended are dropped from the batch and from the cache: only rows that still run are computed.
    """
    end_ids = torch.tensor(end_tokens(agent.actor, agent.tokenizer), device=rows.device)
    P = rollout.ids.shape[-1] - args.max_new_tokens
    input_ids = rollout.ids[rows, 0, :P]
    cache = None
    for t in range(args.max_new_tokens):
        mask = rollout.attention_mask[rows, 0, : P + t]
        out = causal_lm.forward(
            agent.actor, input_ids, mask, cache, keep=1, use_cache=True, hidden=agent.critic is None
        )
        logits = out.logits[:, -1].float() / args.temperature
        tokens = choose_tokens(logits, args, generator, greedy)
        rollout.ids[rows, 0, P + t] = tokens
        rollout.attention_mask[rows, 0, P + t] = 1
        rollout.response_mask[rows, 0, t] = 1.0
        rollout.logprobs[rows, 0, t] = take_logprobs(logits.log_softmax(-1), tokens)
        if agent.critic is None:
            rollout.values[rows, 0, t] = agent.value_head(out.hidden_states[:, -1])

        running = ~torch.isin(tokens, end_ids)
        if not running.any():
            break
        cache = out.cache
        if not running.all():
            cache.reorder_cache(running.nonzero().squeeze(1))
        rows = rows[running]
        input_ids = tokens[running, None]


@torch.no_grad()
def sample(agent, prompts, args, generator, greedy=False):
    """Let an agent answer B prompts, strings: a rollout of one turn, without rewards. Raises UserError.

    `greedy`: the likeliest tokens, as with --no-do-sample.
    """
    greedy = greedy or not args.do_sample
    L = args.max_new_tokens
    prompt_ids = prompt_limit(agent, args).encode(prompts, agent.tokenizer)
    ids, attention_mask = pad_left(prompt_ids, agent.tokenizer, agent.actor.device)
    blank = torch.zeros(len(prompts), 1, L, device=ids.device)
    rollout = Rollout(
        ids=pad(ids, (0, L), value=agent.tokenizer.pad_token_id)[:, None],
        attention_mask=pad(attention_mask, (0, L))[:, None],
        response_mask=blank.clone(),
        logprobs=blank.clone(),
        sampler_logprobs=blank.clone(),
        values=blank.clone(),
        rewards=blank[..., 0].clone(),
        raw_rewards=blank[..., 0].clone(),
        prompts=[[prompt] for prompt in prompts],
        responses=[[] for _ in prompts],
    )
    rows = torch.arange(len(prompts), device=ids.device)
    if agent.engine:
        agent.engine.hand_over(agent.actor)
        end_ids = end_tokens(agent.actor, agent.tokenizer)
        responses = agent.engine.sample(prompt_ids, L, end_ids, args, generator, greedy)
        rollout.write_responses(*responses)
    else:
        size = args.per_device_train_batch_size or len(rows)  # of items
        with causal_lm.autocast(agent.actor):  # forward would cast the weights for each token; here once
            for chunk in rows.split(size * args.num_generations):
                sample_tokens(agent, rollout, chunk, args, generator, greedy)
    rollout.sampler_logprobs = rollout.logprobs
    texts = agent.tokenizer.batch_decode(rollout.response_ids[:, 0], skip_special_tokens=True)
    rollout.responses = [[text] for text in texts]
    return rollout.select(rows)  # without columns of padding


def act(agent, prompts, args, generator=None, greedy=False):
    """An agent's responses, B strings, to B prompts, strings or chats; no generator: torch's own. Raises UserError."""
    texts = [render(prompt, agent.tokenizer) for prompt in prompts]
    rollout = sample(agent, texts, args, generator, greedy)
    return [turns[0] for turns in rollout.responses]


def play(agents, task, items, args, generator, phase=lambda name: None):
    """Play an episode of each of B items, turn by turn: every agent answers, the team is scored. N rollouts.

    An episode ends after --num-turns turns, after one with a reward above --early-termination-threshold, or where
    external_transition returns None, or a prompt that is too long (--long-prompts). tasks.Episodes keeps what each
    agent has read and written, calls the task's functions of these names, and checks what they return; a reward_func
    that raises is asked once more. `phase` is called with the name of what takes the time. Raises TaskError where the
    task fails.
    """
    threshold = args.early_termination_threshold
    readers = [(agent.tokenizer, prompt_limit(agent, args)) for agent in agents]
    episodes = tasks.Episodes(task, items, args.num_agents, args.num_turns, args.reward_timeout, readers)
    running = list(range(len(items)))  # the episodes that go on
    rows = []  # of each turn the episodes that played it
    turns = []  # of each turn the agents' N rollouts
    with sharding.whole_models([agent.actor for agent in agents]):
        for turn in range(args.num_turns):
            if not running:
                break
            phase("sample")
            prompts = []  # N lists of strings: the formatters', then external_transition's
            rollouts = []
            for i, agent in enumerate(agents):
                prompts.append(episodes.prompts(i, running, agent.tokenizer))
                rollouts.append(sample(agent, prompts[i], args, generator))
            rows.append(running)
            turns.append(rollouts)

            phase("reward")
            responses = [[texts[0] for texts in rollout.responses] for rollout in rollouts]
            raw_rewards, rewards = episodes.reward_func(running, prompts, responses)  # each [N][len(running)]
            for i, rollout in enumerate(rollouts):
                rollout.raw_rewards[:, 0] = torch.tensor(raw_rewards[i])
                rollout.rewards[:, 0] = torch.tensor(rewards[i])

            running = []
            for k, agent_rewards in zip(rows[-1], zip(*raw_rewards)):
                team_reward = sum(agent_rewards) / args.num_agents  # as reward_func gave it
                good_enough = threshold is not None and team_reward > threshold
                if good_enough or turn + 1 == args.num_turns:
                    continue
                next_prompts = episodes.external_transition(k)
                if next_prompts is not None:
                    episodes.add_prompts(k, next_prompts)
                    running.append(k)
    shape = (len(items), args.num_turns)
    rollouts = [Rollout.stack(agent_turns, rows, shape) for agent_turns in zip(*turns)]
    rollouts[0].num_long_prompts = episodes.num_long_prompts
    return rollouts


# --- Learning: log-probabilities, values, rewards, advantages, the loss -----------------------------------------------


def model_inputs(rollout):
    """What a model reads to predict every response token, a row for each turn that was played."""
    played = rollout.played
    ids = rollout.ids[played][:, :-1]  # nothing is predicted from the last token
    return {"input_ids": ids, "attention_mask": rollout.attention_mask[played][:, :-1]}


def scatter(x, played):
    """[R, L], a row for each turn that was played, as [B, T, L], 0 elsewhere."""
    scattered = x.new_zeros(*played.shape, x.shape[-1])
    scattered[played] = x
    return scattered


def forward_policy(policy, rollout, args, hidden=False):
    """log pi(.|h_t) at --temperature, [R, L, vocabulary], and, if they are asked for, last hidden states [R, L, D]."""
    L = rollout.logprobs.shape[-1]
    out = causal_lm.forward(policy, **model_inputs(rollout), keep=L, hidden=hidden)
    logits = out.logits.float() / args.temperature
    return logits.log_softmax(-1), out.hidden_states


def read_values(agent, rollout, hidden_states=None):
    """V(h_t) [B, T, L], read where a_t is predicted, of hidden states [R, L, D]; none: the critic model makes them."""
    if hidden_states is None:
        L = rollout.logprobs.shape[-1]
        critic = agent.critic or agent.actor
        hidden_states = causal_lm.forward(critic, **model_inputs(rollout), keep=L, hidden=True).hidden_states
    return scatter(agent.value_head(hidden_states), rollout.played)


def policy_and_values(agent, rollout, args):
    """log pi(a_t|h_t), the entropy of pi(.|h_t) over all tokens in nats, and V(h_t), each [B, T, L]."""
    log_pi, hidden_states = forward_policy(agent.actor, rollout, args, hidden=agent.critic is None)
    tokens = rollout.response_ids[rollout.played]
    logprobs = scatter(take_logprobs(log_pi, tokens), rollout.played)
    if args.entropy_coef == 0:
        log_pi = log_pi.detach()  # the entropy is a metric only
    entropy = scatter(-(log_pi.exp() * log_pi).sum(-1), rollout.played)
    return logprobs, entropy, read_values(agent, rollout, hidden_states)


def forward_size(args):
    """Episodes in a forward pass."""
    return args.micro_batch_size or args.mini_batch_size // distributed.world_size()


@torch.no_grad()
def compute_logprobs(policy, rollout, args):
    """log pi(a_t|h_t) [B, T, L] of a policy."""

    def compute(part):
        log_pi, _ = forward_policy(policy, part, args)
        return scatter(take_logprobs(log_pi, part.response_ids[part.played]), part.played)

    return rollout.map(compute, forward_size(args))


@torch.no_grad()
def compute_values(agent, rollout, args):
    """V(h_t) [B, T, L] before the update. A value head's were read in sampling, unless vLLM sampled."""
    if agent.critic is None and not args.use_vllm:
        return rollout.values
    return rollout.map(lambda part: read_values(agent, part), forward_size(args))


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


def standardise_returns(rewards, played, gamma, least):
    """Rewards of turns [B, T], such that their discounted sums over an episode are standardised, and the potential.

    Their mean comes off as gamma Phi_{t+1} - Phi_t, with a potential (Ng et al. 1999): Phi_t is what episodes earn from
    turn t on. So each turn has mean 0 if all are played, and an episode that ends early pays for what it leaves out.
    """
    discounts = gamma ** torch.arange(rewards.shape[1], device=rewards.device)
    mean, deviation = moments((discounts * rewards).sum(1), played[:, 0])
    turn_means = distributed.total(rewards.sum(0)) / distributed.total(played[:, 0].sum())
    potential = [0.0]
    for turn_mean in reversed(turn_means.tolist()):
        potential.insert(0, turn_mean + gamma * potential[0])
    potential = rewards.new_tensor(potential[:-1]) * played
    scale = divisor(mean, deviation, least)
    return (rewards + (gamma * pad(potential[:, 1:], (0, 1)) - potential)) / scale, potential / scale


def token_rewards(rollout, reference_logprobs, args):
    """[B, T, L]: a turn's reward on its last token, and -kl_coef (log pi - log pi_ref) on every token."""
    turn_rewards, played = rollout.rewards, rollout.played.float()
    potential = torch.zeros_like(turn_rewards)
    if args.reward_normalization:
        turn_rewards, potential = standardise_returns(turn_rewards, played, args.gamma, args.reward_norm_eps)
    next_mask = pad(rollout.response_mask[..., 1:], (0, 1))
    last_tokens = rollout.response_mask - next_mask
    rewards = last_tokens * turn_rewards[..., None]
    if args.action_granularity == "token":  # and gamma Phi_t - Phi_t on each token before it
        rewards = rewards + next_mask * (args.gamma - 1) * potential[..., None]
    if reference_logprobs is not None:
        rewards = rewards - args.kl_coef * (rollout.logprobs - reference_logprobs) * rollout.response_mask
    return rewards


def sampler_weights(rollout, args):
    """[B, T, L] weights of tokens in the policy's loss: pi_old / pi of vLLM, at most 2, where it sampled; else 1."""
    if args.use_vllm and args.sampler_correction and args.do_sample:
        return (rollout.logprobs - rollout.sampler_logprobs).exp().clamp(max=2.0)
    return torch.ones_like(rollout.logprobs)


def sum_over_actions(x, rollout, args):
    """Rewards or log-probabilities of tokens, [B, T, L], as those of actions, [B, T, K]: a turn's are the sum."""
    if args.action_granularity == "token":
        return x
    return (x * rollout.response_mask).sum(-1, keepdim=True)


def first_of_actions(x, args):
    """Values or the mask of tokens, [B, T, L], as those of actions, [B, T, K]: a turn's is that of its first token."""
    return x if args.action_granularity == "token" else x[..., :1]


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
    """A rollout, and what the loss needs beside it; the counts are of the mini-batch, also in its micro-batches."""

    reference_logprobs: torch.Tensor | None  # [B, T, L] log pi_ref(a_t|h_t); None with --kl-coef 0
    old_values: torch.Tensor  # [B, T, K] V(h_t) before the update
    advantages: torch.Tensor  # [B, T, K]
    returns: torch.Tensor  # [B, T, K] the critic's targets
    action_mask: torch.Tensor  # [B, T, K] 1 on actions: on sampled tokens, or on turns that were played
    weights: torch.Tensor  # [B, T, L] of tokens in the policy's loss
    num_tokens: torch.Tensor | None = None  # sampled tokens, on average over the processes
    num_actions: torch.Tensor | None = None  # actions, on average over the processes


def minibatches(batch, args, generator):
    """The mini-batches of a rollout's batch, in a new random order; an episode's turns stay together."""
    order = torch.randperm(len(batch.ids), generator=generator, device=generator.device)
    size = args.mini_batch_size // distributed.world_size()
    for rows in order.split(size):
        minibatch = batch.select(rows)
        minibatch.num_tokens = distributed.mean(minibatch.response_mask.sum())
        minibatch.num_actions = distributed.mean(minibatch.action_mask.sum())
        yield minibatch


def ippo_loss(agent, part, args):
    """A micro-batch's share of the mini-batch's loss and of its metrics: sums, divided by the mini-batch's counts."""
    mask = part.response_mask
    logprobs, entropy, values = policy_and_values(agent, part, args)
    entropy = (entropy * mask).sum() / part.num_tokens
    log_ratio = (logprobs - part.logprobs).detach()
    approx_kl = ((log_ratio.exp() - 1 - log_ratio) * mask).sum() / part.num_tokens

    action_logprobs = sum_over_actions(part.weights * logprobs, part, args)
    policy_loss = -(action_logprobs * part.advantages * part.action_mask).sum() / part.num_actions

    values = first_of_actions(values, args)
    value_error = (values - part.returns) ** 2
    if args.value_clip_range is not None:
        change = (values - part.old_values).clamp(-args.value_clip_range, args.value_clip_range)
        clipped_error = (part.old_values + change - part.returns) ** 2
        value_error = torch.max(value_error, clipped_error)
    value_loss = (value_error * part.action_mask).sum() / part.num_actions

    default = 0.02 if args.use_separate_critic else 0.5  # a critic has its own AdamW; 0.5 would always be clipped
    value_loss_coef = default if args.value_loss_coef is None else args.value_loss_coef
    loss = policy_loss - args.entropy_coef * entropy + value_loss_coef * value_loss
    metrics = {
        "policy_loss": policy_loss.detach(),
        "value_loss": value_loss.detach(),
        "entropy": entropy.detach(),
        "approx_kl": approx_kl,
    }
    return loss, metrics


def optimizer_step(agent, args):
    """Clip each optimiser's gradient, and step; returns metrics. Where one is not finite, none steps.

    Raises UserError when this happens three times in a row.
    """
    norms = []
    for optimizer in agent.optimizers:
        parameters = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        distributed.average_gradients(parameters)
        norms.append(sharding.clip_gradients(parameters, args.max_grad_norm))
    finite = torch.stack(norms).isfinite().all()
    for optimizer in agent.optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad()
    agent.num_skipped = 0 if finite else agent.num_skipped + 1
    if agent.num_skipped >= 3:
        raise UserError(
            "three gradients in a row were not finite: lower --actor-learning-rate and --critic-learning-rate"
        )
    return {"grad_norm": norms[0], "skipped": 1.0 - finite.float()}


def learn(agent, rollout, args, generator):
    """One agent's update from its rollout; returns metrics, scalars by name. The generator draws the mini-batches.

    The rollout is one of play, or of sample with `rewards` [B, T] from anywhere. Passes over it: the reference's if
    --kl-coef is above 0, and a critic model's; then, in each epoch, the actor's and a critic model's, with gradients.
    Where vLLM sampled, the actor's too at first, for its log-probabilities, and for the values of its head.
    """
    if args.use_vllm:  # whose log-probabilities differ from the actor's by rounding
        rollout = replace(rollout, logprobs=compute_logprobs(agent.actor, rollout, args))
    reference_logprobs = compute_logprobs(agent.reference, rollout, args) if args.kl_coef > 0 else None
    rewards = token_rewards(rollout, reference_logprobs, args)
    values = compute_values(agent, rollout, args)
    action_rewards = sum_over_actions(rewards, rollout, args)
    old_values = first_of_actions(values, args)
    action_mask = first_of_actions(rollout.response_mask, args)
    advantages, returns = gae(action_rewards, old_values, action_mask, args.gamma, args.gae_lambda)
    if args.advantage_normalization:
        advantages = standardise(advantages, action_mask, remember_deviation(agent, advantages, action_mask))
    batch = Batch(
        **vars(rollout),
        reference_logprobs=reference_logprobs,
        old_values=old_values,
        advantages=advantages,
        returns=returns,
        action_mask=action_mask,
        weights=sampler_weights(rollout, args),
    )

    losses = []
    steps = []
    for _ in range(args.ppo_epochs):
        for minibatch in minibatches(batch, args, generator):
            for part in minibatch.split(forward_size(args)):
                loss, metrics = ippo_loss(agent, part, args)
                loss.backward()  # gradients of micro-batches add up
                losses.append(metrics)
            steps.append(optimizer_step(agent, args))
    for schedule in agent.schedules:
        schedule.step()
    return update_metrics(batch, losses, steps, with_sampler=args.use_vllm and args.do_sample)


# --- main: sample, score, learn, log ----------------------------------------------------------------------------------


def evaluate(agents, task, items, args):
    """The team's mean raw reward on held-out items, sampled with the flags of training and the same noise each time."""
    rank = distributed.rank()
    own_items = items[rank :: distributed.world_size()]
    generator = torch.Generator(agents[0].actor.device).manual_seed(args.seed + rank)
    some_items = own_items or items[:1]  # all processes play, also one without items, whose episode does not count
    rollouts = play(agents, task, some_items, args, generator)
    return mean_reward(rollouts, count=len(own_items) > 0)


def main(args=None, task=None, model=None, tokenizer=None, train_dataset=None, eval_dataset=None):
    """Train a team; returns its agents and its Run. Raises UserError for what the user can fix.

    `task` (any object with a task's names), `model` (loaded; it is copied) and `tokenizer` replace what the flags name;
    `train_dataset` and `eval_dataset`, rows of a datasets.Dataset or a list of dicts, replace the task's own.
    """
    args = args or Args()
    args = replace(args, model=models.name_of(args, model))
    device = distributed.start()
    check_args(args)
    readers = tasks.readers(args, "max_new_tokens", model, tokenizer)
    models.check_critics(args, readers)
    task = tasks.load_task(task or args.task or sys.modules[__name__], args.num_agents, args.num_turns)
    size = args.rollout_buffer_size // args.num_generations  # items of an update
    train_items, held_out_items = tasks.load_data(task, args, readers, size, train_dataset, eval_dataset)
    run = Run(
        args,
        script=__file__,
        subject=args.task,
        num_items=len(train_items),
        items_per_update=size,
        may_change=("shard", "vllm_config"),  # where a run is resumed, beside the memory's flags
        memory_flags={  # of each phase the flag that takes less, and what it is where it is None
            "sample": ("per_device_train_batch_size", size),
            "learn": ("micro_batch_size", args.mini_batch_size),
        },
        optimum=tasks.optimum(task, train_items, args.num_agents, args.num_turns),
    )

    set_seed(args.seed)
    agents = build_agents(args, device, run.num_updates, model, tokenizer)
    generator = distributed.generator(args.seed, device)
    with run.start(agents, generator):  # which resumes (--resume), and saves however it ends
        if held_out_items and run.step == 0 and args.eval_interval:
            run.phase("evaluate")
            run.untrained = evaluate(agents, task, held_out_items, args)
        for step, items in run.updates(train_items):  # this process's items of an update
            # 1. Every agent answers; the team is scored, turn by turn.
            items = [item for item in items for _ in range(args.num_generations)]
            rollouts = play(agents, task, items, args, generator, run.phase)

            # 2. Each agent learns alone.
            run.phase("learn")
            metrics = [learn(agent, rollout, args, generator) for agent, rollout in zip(agents, rollouts)]

            # 3. Metrics, held-out items, samples.
            held_out = None
            if held_out_items and run.is_due(step, args.eval_interval):
                run.phase("evaluate")
                held_out = evaluate(agents, task, held_out_items, args)
            run.log(items, rollouts, metrics, tasks.extra_metrics(task, rollouts), held_out)
    return agents, run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
