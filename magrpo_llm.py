"""Group-relative policy gradients (MAGRPO) for N language models that are scored together, in one file.

Agent i with history h and action a_t, a whole response, ascends, with its own actor theta_i,

    J(theta_i) = E[ log pi(a_t|h_t) A_t + beta H(pi) ],    A_t = R_t - mean of the group's R_t,

without a critic: the team answers each item K times (--num-generations), and what the K joint samples earn is compared.
In several turns they are a tree: each joint sample has K of the next turn, and so K^t in turn t,

    R_t = r_t + gamma mean of its children's R_{t+1},

r the team's reward, on a turn, less the KL penalty of its tokens. The A_t of J is a constant. --advantage-mode: rloo
compares with the mean of the other samples, max with the best, raw with nothing. As in the paper there is no ratio and
no clipping of the policy, and A_t is not divided by the deviation. The other agents are a part of the environment.

    python magrpo_llm.py --num-agents 2
    torchrun --nproc-per-node 2 magrpo_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --mixed-precision bf16

Simplified: models stay in eval mode, without dropout, so that sampling and learning see the same probabilities; with
--top-p or --top-k the log-probabilities are still those of all tokens.
Unlike CoMLRL, each sampled token is learned, the end too, and no padding; later turns are learned with the first.
Added here: many items at a time, discounting, an entropy bonus, magrpo_epochs, held-out items.
Source: MAGRPO (arXiv 2508.04652), RLOO (arXiv 2402.14740), CoMLRL's page on Multi-Agent REINFORCE.

Shapes: B episodes of a rollout, which are the paths through its trees, T turns of an episode, P prompt tokens
(left-padded), L response tokens (right-padded), R responses of a rollout. With several processes B counts one process's
episodes; distributed.total and distributed.mean are over all processes, and gradients are averaged.
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

    # K, joint samples of an item, and of each of these in the next turn
    num_generations: Annotated[int, Field(ge=2)] = 4
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
    # what a sample's return is less: the group's mean, the mean of the others, the best of the group, nothing
    advantage_mode: Literal["mean", "rloo", "max", "raw"] = not_with("advantage_normalization", default="mean")
    # standardise a group's advantages; then all modes are the same
    advantage_normalization: bool = False
    entropy_coef: NonNegativeFloat = 0.0  # beta, the weight of the entropy bonus
    mini_batch_size: PositiveInt = 16  # joint samples in an optimiser step, over all processes
    micro_batch_size: PositiveInt | None = None  # joint samples in a forward pass; none: a process's mini-batch


@flags
class MAGRPOArgs:
    """What is MAGRPO's own."""

    rollout_buffer_size: PositiveInt = 64  # episodes in a rollout, over all processes: paths through the items' trees
    magrpo_epochs: PositiveInt = 1  # passes over a rollout; there is no ratio to correct later ones


@flags
class OptimizerArgs:
    """The optimisers (AdamW), one for each model."""

    actor_learning_rate: NonNegativeFloat = 5e-4  # learning rate of the actors
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
    models.LoadingArgs,  # --mixed-precision, --shard ...
    SamplingArgs,
    engine.VllmArgs,  # --use-vllm, --sampler-correction
    AlgorithmArgs,
    MAGRPOArgs,
    OptimizerArgs,
):
    """All flags."""


def check_args(args):
    """Raise UserError for flags that do not go together, before anything is loaded or written."""
    distributed.check_flags(args, multiples=("mini_batch_size",))
    engine.check_vllm_args(args)
    processes = distributed.world_size()
    if args.rollout_buffer_size % (args.num_generations**args.num_turns * processes):
        counts = f"{args.num_generations} ^ {args.num_turns} x {processes}"
        takes = f"a multiple of generations ^ turns x processes, {counts}"
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


# --- The agent: models, optimiser -------------------------------------------------------------------------------------


class Agent:
    """An agent's models, its optimiser and schedule."""

    def __init__(self, reference, tokenizer, updates, args):
        self.tokenizer = tokenizer
        self.reference = reference  # the initial policy, frozen, and shared by the agents of one model
        self.actor = copy.deepcopy(reference).requires_grad_(True)
        if args.shard:
            sharding.shard_agent(self)
        self.optimizers = build_optimizers(self, args)
        self.schedules = [build_schedule(optimizer, updates, args) for optimizer in self.optimizers]
        self.num_skipped = 0  # gradients in a row that were not finite
        self.engine = engine.get_engine(self.actor, args, "max_new_tokens") if args.use_vllm else None


def build_optimizers(agent, args):
    """AdamW."""
    settings = {
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    return [torch.optim.AdamW(agent.actor.parameters(), lr=args.actor_learning_rate, **settings)]


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
        agents.append(Agent(references[i], tokenizers[i], updates, args))
    if args.shard:
        sharding.shard_models(references)
    return agents


# --- Rollouts: every agent answers, the team is scored ----------------------------------------------------------------


@dataclass
class Rollout(Rows):
    """What one agent did in B episodes of up to T turns; a turn that was not played is 0 in all tensors.

    From Rows: select, split and map take some of the episodes, without the columns that are padding in all of them (map
    pads again what it returns); stack joins turns. The K^T episodes of one item are neighbours, and so are those that
    share their first turns: each has them.
    """

    ids: torch.Tensor  # [B, T, P + L] prompt and response
    attention_mask: torch.Tensor  # [B, T, P + L] 1 on tokens, 0 on padding
    response_mask: torch.Tensor  # [B, T, L] 1 on sampled tokens, the end token included
    logprobs: torch.Tensor  # [B, T, L] log pi(a_t|h_t) at --temperature; where vLLM sampled: its own, until learn
    sampler_logprobs: torch.Tensor  # [B, T, L] those of the sampler
    rewards: torch.Tensor  # [B, T] what is learned from: the raw rewards, or what reward_processor made of them
    raw_rewards: torch.Tensor  # [B, T] what is reported: the rewards as reward_func gave them
    prompts: list  # B lists of a string for each turn played
    responses: list  # B lists of a string for each turn played
    num_long_prompts: int = field(default=0, kw_only=True)  # the team's, of later turns: cut, or the end of an episode
    num_new_tokens: int = field(default=0, kw_only=True)  # the team's: those of a turn that paths share, once

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
        out = causal_lm.forward(agent.actor, input_ids, mask, cache, keep=1, use_cache=True)
        logits = out.logits[:, -1].float() / args.temperature
        tokens = choose_tokens(logits, args, generator, greedy)
        rollout.ids[rows, 0, P + t] = tokens
        rollout.attention_mask[rows, 0, P + t] = 1
        rollout.response_mask[rows, 0, t] = 1.0
        rollout.logprobs[rows, 0, t] = take_logprobs(logits.log_softmax(-1), tokens)

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


def play(agents, task, items, args, generator, num_generations=1, phase=lambda name: None):
    """Play B episodes, turn by turn: every agent answers, the team is scored. N rollouts.

    `items` has each item num_generations^T times: so many episodes are the paths through its tree, in which each joint
    sample is followed by num_generations of the next turn. A path ends after --num-turns turns, after one with a reward
    above --early-termination-threshold, or where external_transition returns None, or a prompt that is too long
    (--long-prompts). tasks.Episodes keeps what each agent has read and written, calls the task's functions of these
    names, and checks what they return; a reward_func that raises is asked once more. `phase` is called with the name of
    what takes the time. Raises TaskError where the task fails.
    """
    threshold = args.early_termination_threshold
    readers = [(agent.tokenizer, prompt_limit(agent, args)) for agent in agents]
    episodes = tasks.Episodes(task, items, args.num_agents, args.num_turns, args.reward_timeout, readers)
    running = list(range(0, len(items), num_generations**args.num_turns))  # the first episode of all that go on alike
    num_new_tokens = 0
    rows = []  # of each turn the episodes that played it
    turns = []  # of each turn the agents' N rollouts
    with sharding.whole_models([agent.actor for agent in agents]):
        for turn in range(args.num_turns):
            if not running:
                break
            num_paths = num_generations ** (args.num_turns - 1 - turn)  # episodes that share a joint sample
            running = [episodes.fork(k, k + j * num_paths) for k in running for j in range(num_generations)]
            phase("sample")
            prompts = []  # N lists of strings: the formatters', then external_transition's
            rollouts = []
            for i, agent in enumerate(agents):
                prompts.append(episodes.prompts(i, running, agent.tokenizer))
                rollouts.append(sample(agent, prompts[i], args, generator))
                num_new_tokens += int(rollouts[i].response_mask.sum())

            phase("reward")
            responses = [[texts[0] for texts in rollout.responses] for rollout in rollouts]
            raw_rewards, rewards = episodes.reward_func(running, prompts, responses)  # each [N][len(running)]
            for i, rollout in enumerate(rollouts):
                rollout.raw_rewards[:, 0] = torch.tensor(raw_rewards[i])
                rollout.rewards[:, 0] = torch.tensor(rewards[i])
            copies = torch.arange(len(running)).repeat_interleave(num_paths)
            rows.append([k + j for k in running for j in range(num_paths)])
            turns.append([rollout.select(copies) for rollout in rollouts])

            answered = running
            running = []
            for k, agent_rewards in zip(answered, zip(*raw_rewards)):
                team_reward = sum(agent_rewards) / args.num_agents  # as reward_func gave it
                good_enough = threshold is not None and team_reward > threshold
                if good_enough or turn + 1 == args.num_turns:
                    continue
                next_prompts = episodes.external_transition(k, num_paths)
                if next_prompts is not None:
                    episodes.add_prompts(k, next_prompts)
                    running.append(k)
    shape = (len(items), args.num_turns)
    rollouts = [Rollout.stack(agent_turns, rows, shape) for agent_turns in zip(*turns)]
    rollouts[0].num_long_prompts = episodes.num_long_prompts
    rollouts[0].num_new_tokens = num_new_tokens
    return rollouts


# --- Learning: log-probabilities, returns, advantages, the loss -------------------------------------------------------


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


def forward_policy(policy, rollout, args):
    """log pi(.|h_t) at --temperature, [R, L, vocabulary]."""
    L = rollout.logprobs.shape[-1]
    out = causal_lm.forward(policy, **model_inputs(rollout), keep=L)
    logits = out.logits.float() / args.temperature
    return logits.log_softmax(-1)


def policy_and_entropy(agent, rollout, args):
    """log pi(a_t|h_t), and the entropy of pi(.|h_t) over all tokens in nats, each [B, T, L]."""
    log_pi = forward_policy(agent.actor, rollout, args)
    tokens = rollout.response_ids[rollout.played]
    logprobs = scatter(take_logprobs(log_pi, tokens), rollout.played)
    if args.entropy_coef == 0:
        log_pi = log_pi.detach()  # the entropy is a metric only
    entropy = scatter(-(log_pi.exp() * log_pi).sum(-1), rollout.played)
    return logprobs, entropy


def forward_size(args):
    """Episodes in a forward pass."""
    return args.micro_batch_size or args.mini_batch_size // distributed.world_size()


@torch.no_grad()
def compute_logprobs(policy, rollout, args):
    """log pi(a_t|h_t) [B, T, L] of a policy."""

    def compute(part):
        log_pi = forward_policy(policy, part, args)
        return scatter(take_logprobs(log_pi, part.response_ids[part.played]), part.played)

    return rollout.map(compute, forward_size(args))


def turn_rewards(rollout, reference_logprobs, args):
    """[B, T]: the rewards of turns, less kl_coef (log pi - log pi_ref) of their tokens."""
    if reference_logprobs is None:
        return rollout.rewards
    kl = ((rollout.logprobs - reference_logprobs) * rollout.response_mask).sum(-1)
    return rollout.rewards - args.kl_coef * kl


def sampler_weights(rollout, args):
    """[B, T, L] weights of tokens in the policy's loss: pi_old / pi of vLLM, at most 2, where it sampled; else 1."""
    if args.use_vllm and args.sampler_correction and args.do_sample:
        return (rollout.logprobs - rollout.sampler_logprobs).exp().clamp(max=2.0)
    return torch.ones_like(rollout.logprobs)


def tree_returns(rewards, num_generations, gamma):
    """R_t = r_t + gamma mean of its children's R_{t+1}, [B, T] as the rewards, B all paths through trees.

    The reward of a sample that several paths share is read in the first of them.
    """
    returns = torch.zeros_like(rewards)
    T = rewards.shape[1]
    for t in reversed(range(T)):
        paths = num_generations ** (T - 1 - t)  # that share a sample of turn t
        sample_returns = rewards[::paths, t]
        if t + 1 < T:
            children = returns[:, t + 1].view(-1, paths)
            sample_returns = sample_returns + gamma * children.mean(1)
        returns[:, t] = sample_returns.repeat_interleave(paths)
    return returns


def group_advantages(returns, num_generations, mode, normalized=False):
    """What R_t is above what its group is taken to be worth, [B, T]; a group is the samples that have a history."""
    advantages = torch.zeros_like(returns)
    T = returns.shape[1]
    for t in range(T):
        paths = num_generations ** (T - 1 - t)  # that share a sample of turn t
        group = returns[::paths, t].view(-1, num_generations)
        mean = group.mean(1, keepdim=True)
        baselines = {
            "mean": mean,
            "rloo": (num_generations * mean - group) / (num_generations - 1),
            "max": group.max(1, keepdim=True).values,
            "raw": torch.zeros_like(mean),
        }
        advantage = group - baselines[mode]
        if normalized:
            advantage = advantage - advantage.mean(1, keepdim=True)
            deviation = advantage.std(1, correction=0, keepdim=True)
            is_rounding = deviation <= 1e-6 * mean.abs().clamp(min=1)  # what was divided by it would be noise
            advantage = advantage / deviation.masked_fill(is_rounding, torch.inf)
        advantages[:, t] = advantage.flatten().repeat_interleave(paths)
    return advantages


def paths_of_samples(played, num_generations):
    """[B, T]: how often an episode's turn counts. What several share counts for all in the first of them.

    A last turn counts in each, once: so there is no episode without a turn to learn.
    """
    paths = torch.zeros_like(played, dtype=torch.float32)
    T = played.shape[1]
    for t in range(T):
        num_paths = num_generations ** (T - 1 - t)
        paths[::num_paths, t] = num_paths
    is_last = played & ~pad(played[:, 1:], (0, 1))
    return torch.where(is_last, 1.0, paths * played)


@dataclass
class Batch(Rollout):
    """A rollout, without the turns that do not count, and what the loss needs; the counts are of the mini-batch.

    A turn that paths share counts for each of them in the policy's loss, and once in the entropy.
    """

    reference_logprobs: torch.Tensor | None  # [B, T, L] log pi_ref(a_t|h_t); None with --kl-coef 0
    advantages: torch.Tensor  # [B, T]
    paths: torch.Tensor  # [B, T] how often a turn counts
    weights: torch.Tensor  # [B, T, L] of tokens in the policy's loss
    num_tokens: torch.Tensor | None = None  # sampled tokens, on average over the processes
    num_actions: torch.Tensor | None = None  # turns of as many episodes, of the mean length in the rollout


def minibatches(batch, args, generator):
    """The mini-batches of a rollout's batch, in a new random order; an episode's turns stay together."""
    num_turns = distributed.mean(batch.paths.sum()) / len(batch.ids)  # of an episode
    order = torch.randperm(len(batch.ids), generator=generator, device=generator.device)
    size = args.mini_batch_size // distributed.world_size()
    for rows in order.split(size):
        minibatch = batch.select(rows)
        minibatch.num_tokens = distributed.mean(minibatch.response_mask.sum())
        minibatch.num_actions = num_turns * len(rows)  # its own would weigh a group's members by who is with them
        yield minibatch


def magrpo_loss(agent, part, args):
    """A micro-batch's share of the mini-batch's loss and of its metrics: sums, divided by the mini-batch's counts."""
    mask = part.response_mask
    logprobs, entropy = policy_and_entropy(agent, part, args)
    entropy = (entropy * mask).sum() / part.num_tokens
    log_ratio = (logprobs - part.logprobs).detach()
    approx_kl = ((log_ratio.exp() - 1 - log_ratio) * mask).sum() / part.num_tokens

    action_logprobs = (part.weights * logprobs * mask).sum(-1)
    policy_loss = -(action_logprobs * part.advantages * part.paths).sum() / part.num_actions

    loss = policy_loss - args.entropy_coef * entropy
    metrics = {
        "policy_loss": policy_loss.detach(),
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
        raise UserError("three gradients in a row were not finite: lower --actor-learning-rate")
    return {"grad_norm": norms[0], "skipped": 1.0 - finite.float()}


def learn(agent, rollout, args, generator):
    """One agent's update from its rollout; returns metrics, scalars by name. The generator draws the mini-batches.

    The rollout is one of play, or of sample with `rewards` [B, T] from anywhere. Passes over it: the reference's if
    --kl-coef is above 0; then, in each epoch, the actor's, with gradients. Where vLLM sampled, the actor's too at
    first, for its log-probabilities.
    """
    paths = paths_of_samples(rollout.played, args.num_generations)
    response_mask = rollout.response_mask * (paths > 0)[..., None]
    rollout = replace(rollout, response_mask=response_mask)  # what paths share goes through models once
    if args.use_vllm:  # whose log-probabilities differ from the actor's by rounding
        rollout = replace(rollout, logprobs=compute_logprobs(agent.actor, rollout, args))
    reference_logprobs = compute_logprobs(agent.reference, rollout, args) if args.kl_coef > 0 else None
    returns = tree_returns(turn_rewards(rollout, reference_logprobs, args), args.num_generations, args.gamma)
    batch = Batch(
        **vars(rollout),
        reference_logprobs=reference_logprobs,
        advantages=group_advantages(returns, args.num_generations, args.advantage_mode, args.advantage_normalization),
        paths=paths,
        weights=sampler_weights(rollout, args),
    )

    losses = []
    steps = []
    for _ in range(args.magrpo_epochs):
        for minibatch in minibatches(batch, args, generator):
            for part in minibatch.split(forward_size(args)):
                loss, metrics = magrpo_loss(agent, part, args)
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
    task = tasks.load_task(task or args.task or sys.modules[__name__], args.num_agents, args.num_turns)
    num_paths = args.num_generations**args.num_turns  # episodes of an item
    size = args.rollout_buffer_size // num_paths  # items of an update
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
            items = [item for item in items for _ in range(num_paths)]
            rollouts = play(agents, task, items, args, generator, args.num_generations, run.phase)

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
