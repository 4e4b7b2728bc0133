"""Multi-Agent Actor-Critic (MAAC) for N language models that answer together and are scored together, in one file.

Agent i with history h_i and action a_t, a whole response, ascends, with its own actor theta_i,

    J(theta_i) = E[ log pi(a_t|h_i,t) A_t + beta H(pi) ],    A_t = delta_t,
    delta_t    = r_t + gamma V(h_{t+1}) - V(h_t),    V = 0 after the last turn,

while the team's one critic phi, which reads what all agents read, h = (h_1, ..., h_N), descends (V(h_t) - G_t)^2, with
G_t = r_t + gamma V_old(h_{t+1}). The A_t of J is a constant, standardised over the rollout, and the same for all. MAAC
is IAC (iac_llm.py) with a central critic, a model of its own, and one step of it for a joint mini-batch.
r is the team's reward, such that what episodes of a rollout earn is standardised, less a KL penalty, the sum of the
agents'. One V can't fit rewards of each agent's own: where a task has them, all agents ascend their mean.
With --critic-type q the critic reads the joint response too: A_t = Q(h_t, a_t) - V(h_t), V being the same critic
without responses, and both descend to G_t = r_t + gamma Q_old(h_{t+1}, a_{t+1}) (SARSA). CoMLRL's A_t is G_t - Q(h_t,
a_t), the error of a critic that has seen the responses: the better it is, the more of that is noise.

    python maac_llm.py --num-agents 2
    torchrun --nproc-per-node 2 maac_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --mixed-precision bf16

Simplified: models stay in eval mode, without dropout, so that sampling and learning see the same probabilities; with
--top-p or --top-k the log-probabilities are still those of all tokens.
From the paper's Algorithm 1, while CoMLRL's code has neither: one step of the critic for all agents, ac_epochs.
Added here: many prompts at a time, an entropy bonus, a KL penalty of the joint response, held-out items.
Source: CoLLM-CC (arXiv 2601.21972), CoMLRL's page on Multi-Agent Actor-Critic; central critics: arXiv 1706.02275.

Shapes: B episodes of a rollout, T turns of an episode, P prompt tokens (left-padded), L response tokens (right-padded),
K actions of a turn, 1, R turns of a rollout that were played, D units of a hidden state. With several
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
from utils.metrics import by_critic, mean_reward, update_metrics
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
    mini_batch_size: PositiveInt = 16  # joint samples in an optimiser step, over all processes
    micro_batch_size: PositiveInt | None = None  # joint samples in a forward pass; none: a process's mini-batch


@flags
class MAACArgs:
    """What is MAAC's own."""

    critic_type: Literal["v", "q"] = "v"  # the critic reads what all agents read; q: what they answer, too
    rollout_buffer_size: PositiveInt = 32  # joint samples (episodes of the team) in a rollout, over all processes
    ac_epochs: PositiveInt = 1  # passes over a rollout; there is no ratio to correct later ones


@flags
class OptimizerArgs:
    """The optimisers (AdamW), one for each model."""

    actor_learning_rate: NonNegativeFloat = 5e-4  # learning rate of the actors
    critic_learning_rate: NonNegativeFloat = 1e-3  # learning rate of the critic
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
    models.CentralCriticArgs,  # what the critic starts from
    models.LoadingArgs,  # --mixed-precision, --shard ...
    SamplingArgs,
    engine.VllmArgs,  # --use-vllm, --sampler-correction
    AlgorithmArgs,
    MAACArgs,
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


# --- The team: agents, critic, optimisers -----------------------------------------------------------------------------


class Agent:
    """An agent's models, their optimiser and schedule."""

    def __init__(self, reference, tokenizer, updates, args):
        self.tokenizer = tokenizer
        self.reference = reference  # the initial policy, frozen, and shared by the agents of one model
        self.actor = copy.deepcopy(reference).requires_grad_(True)
        if args.shard:
            sharding.shard_agent(self)
        self.optimizers = build_optimizers(self.actor.parameters(), args.actor_learning_rate, args)
        self.schedules = [build_schedule(optimizer, updates, args) for optimizer in self.optimizers]
        self.num_skipped = 0  # gradients in a row that were not finite
        self.engine = engine.get_engine(self.actor, args, "max_new_tokens") if args.use_vllm else None


class Critic:
    """The team's critic, a model of its own, its optimiser and schedule."""

    def __init__(self, reference, tokenizer, updates, args):
        self.tokenizer = models.load_critic_tokenizer(tokenizer, args)
        self.critic = models.load_critic(0, reference, args)
        self.value_head = models.ValueHead(self.critic, args)  # values begin at 0
        if args.shard:
            sharding.shard_model(self.critic)
        parameters = [*self.value_head.parameters(), *self.critic.parameters()]
        self.optimizers = build_optimizers(parameters, args.critic_learning_rate, args)
        self.schedules = [build_schedule(optimizer, updates, args) for optimizer in self.optimizers]
        self.num_skipped = 0  # gradients in a row that were not finite
        self.deviation = 0.0  # that the advantages of the last rollout were divided by


def build_optimizers(parameters, learning_rate, args):
    """AdamW."""
    settings = {
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    return [torch.optim.AdamW(parameters, lr=learning_rate, **settings)]


def build_schedule(optimizer, updates, args):
    """Learning rates that are held for half of the updates, then lowered to 0 (--anneal-lr)."""

    def remaining(step):
        return min(1.0, max(0.0, 2.0 * (1.0 - step / updates))) if args.anneal_lr else 1.0

    return LambdaLR(optimizer, remaining)


def build_agents(args, device, updates, model=None, tokenizer=None):
    """N agents, last their critic, from what the flags name, or copies of `model` and `tokenizer`. Raises UserError."""
    tokenizers = models.load_tokenizers(args, tokenizer, model)
    references = models.load_models("model", "model_config", args, device, model)
    agents = []
    for i in range(args.num_agents):
        agents.append(Agent(references[i], tokenizers[i], updates, args))
    agents.append(Critic(references[0], tokenizers[0], updates, args))
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


def forward_policy(policy, rollout, args):
    """log pi(.|h_t) at --temperature, [R, L, vocabulary]."""
    L = rollout.logprobs.shape[-1]
    out = causal_lm.forward(policy, **model_inputs(rollout), keep=L)
    logits = out.logits.float() / args.temperature
    return logits.log_softmax(-1)


def read_together(critic, rollouts, args):
    """What the critic reads, as a rollout: a text of each turn and one token after it, at which V is read, [B, T, W].

    A text has what agent 0, 1, 2, ... read in that turn. With --critic-type q there are T turns more, in whose texts is
    also what they answered.
    """
    T = rollouts[0].played.shape[1]
    played = rollouts[0].played.repeat(1, 2 if args.critic_type == "q" else 1)
    texts = []
    for k, t in played.nonzero().tolist():
        parts = [f"Agent {i} reads:\n{rollout.prompts[k][t % T]}" for i, rollout in enumerate(rollouts)]
        if t >= T:
            parts += [f"Agent {i} writes:\n{rollout.responses[k][t % T]}" for i, rollout in enumerate(rollouts)]
        texts.append("\n\n".join(parts))
    rows = tasks.encode_texts(texts, critic.tokenizer, critic.critic.config)
    ids, attention_mask = pad_left(rows, critic.tokenizer, played.device)
    one = played[..., None].float()
    return replace(
        rollouts[0],
        ids=scatter(pad(ids, (0, 1)), played),
        attention_mask=scatter(pad(attention_mask, (0, 1), value=1), played),
        response_mask=one,
        logprobs=one,
        sampler_logprobs=None,
    )


def read_values(critic, rollout):
    """V [B, T, 1], with --critic-type q V and Q [B, 2 T, 1], of what the critic reads."""
    hidden_states = causal_lm.forward(critic.critic, **model_inputs(rollout), keep=1, hidden=True).hidden_states
    return scatter(critic.value_head(hidden_states), rollout.played)


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


@torch.no_grad()
def compute_values(critic, rollout, args):
    """V, or V and Q, before the update."""
    return rollout.map(lambda part: read_values(critic, part), forward_size(args))


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


def joint_rewards(batches, args):
    """[B, T, 1]: the mean of the agents' rewards of a turn, less kl_coef (log pi - log pi_ref) of all its tokens."""
    rewards = sum(batch.rewards for batch in batches) / args.num_agents
    if args.reward_normalization:
        played = batches[0].played.float()
        rewards, _ = standardise_returns(rewards, played, args.gamma, args.reward_norm_eps)
    for batch in batches:
        if batch.reference_logprobs is not None:
            kl = (batch.logprobs - batch.reference_logprobs) * batch.response_mask
            rewards = rewards - args.kl_coef * kl.sum(-1)
    return rewards[..., None]


def sampler_weights(rollout, args):
    """[B, T, L] weights of tokens in the policy's loss: pi_old / pi of vLLM, at most 2, where it sampled; else 1."""
    if args.use_vllm and args.sampler_correction and args.do_sample:
        return (rollout.logprobs - rollout.sampler_logprobs).exp().clamp(max=2.0)
    return torch.ones_like(rollout.logprobs)


def td_error(rewards, values, mask, gamma):
    """Temporal-difference errors along chains of actions: A_t = delta_t = r_t + gamma V_{t+1} - V_t.

    V = 0 after the last action. All are [B, T, 1]; turns with mask 0 are skipped. Returns (advantages, returns), with
    returns = r_t + gamma V_{t+1} the critic's targets; 0 where the mask is 0.
    """
    returns = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        returns[:, t] = rewards[:, t] + gamma * next_value
        next_value = torch.where(mask[:, t] > 0, values[:, t], next_value)
    return (returns - values) * mask, returns * mask


def estimate(rewards, values, mask, args):
    """(advantages, returns) of rewards [B, T, 1] and of V [B, T, 1] or, with --critic-type q, V and Q [B, 2 T, 1]."""
    if args.critic_type == "v":
        return td_error(rewards, values, mask, args.gamma)
    values, action_values = values.chunk(2, dim=1)
    _, returns = td_error(rewards, action_values, mask, args.gamma)
    return (action_values - values) * mask, returns.repeat(1, 2, 1)


@dataclass
class Batch(Rollout):
    """An agent's rollout, or what the critic reads, and what the loss of either needs; counts are of the mini-batch."""

    action_mask: torch.Tensor  # [B, T, K] 1 on turns that were played
    reference_logprobs: torch.Tensor | None = None  # [B, T, L] an actor's log pi_ref(a_t|h_t); None with --kl-coef 0
    weights: torch.Tensor | None = None  # [B, T, L] of an actor's tokens in the policy's loss
    advantages: torch.Tensor | None = None  # [B, T, K] an actor's
    old_values: torch.Tensor | None = None  # [B, T, K] before the update: V(h_t), of a q critic then Q
    returns: torch.Tensor | None = None  # [B, T, K] the critic's targets
    num_tokens: torch.Tensor | None = None  # sampled tokens, on average over the processes
    num_actions: torch.Tensor | None = None  # actions, on average over the processes


def minibatches(batches, args, generator):
    """The mini-batches of all batches: the same episodes of each, in a new random order, with all of their turns."""
    order = torch.randperm(len(batches[0].ids), generator=generator, device=generator.device)
    size = args.mini_batch_size // distributed.world_size()
    for rows in order.split(size):
        joint = [batch.select(rows) for batch in batches]
        for minibatch in joint:
            minibatch.num_tokens = distributed.mean(minibatch.response_mask.sum())
            minibatch.num_actions = distributed.mean(minibatch.action_mask.sum())
        yield joint


def maac_loss(agent, part, args):
    """A micro-batch's share of the mini-batch's loss and of its metrics: sums, divided by the mini-batch's counts."""
    mask = part.response_mask
    logprobs, entropy = policy_and_entropy(agent, part, args)
    entropy = (entropy * mask).sum() / part.num_tokens
    log_ratio = (logprobs - part.logprobs).detach()
    approx_kl = ((log_ratio.exp() - 1 - log_ratio) * mask).sum() / part.num_tokens

    action_logprobs = (part.weights * logprobs * mask).sum(-1, keepdim=True)
    policy_loss = -(action_logprobs * part.advantages * part.action_mask).sum() / part.num_actions

    loss = policy_loss - args.entropy_coef * entropy
    metrics = {
        "policy_loss": policy_loss.detach(),
        "entropy": entropy.detach(),
        "approx_kl": approx_kl,
    }
    return loss, metrics


def value_loss(critic, part, args):
    """A micro-batch's share of the mini-batch's loss of the critic, and of its metrics."""
    value_error = (read_values(critic, part) - part.returns) ** 2
    loss = (value_error * part.action_mask).sum() / part.num_actions
    return loss, {"value_loss": loss.detach()}


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


def learn(agents, critic, rollouts, args, generator):
    """The team's update from its N rollouts; returns metrics of each agent, and of the critic, scalars by name.

    The generator draws the mini-batches. The rollouts are those of play, or have `rewards` [B, T] from anywhere. Passes
    over them: each reference's if --kl-coef is above 0, and the critic's; then, in each epoch, the actors' and the
    critic's, with gradients. Where vLLM sampled, the actors' too at first, for their log-probabilities.
    """
    mask = rollouts[0].played[..., None].float()  # of all agents
    batches = []
    for agent, rollout in zip(agents, rollouts):
        if args.use_vllm:  # whose log-probabilities differ from the actor's by rounding
            rollout = replace(rollout, logprobs=compute_logprobs(agent.actor, rollout, args))
        reference_logprobs = compute_logprobs(agent.reference, rollout, args) if args.kl_coef > 0 else None
        batch = Batch(
            **vars(rollout),
            reference_logprobs=reference_logprobs,
            action_mask=mask,
            weights=sampler_weights(rollout, args),
        )
        batches.append(batch)
    rewards = joint_rewards(batches, args)
    joint_rollout = read_together(critic, rollouts, args)
    values = compute_values(critic, joint_rollout, args)
    advantages, returns = estimate(rewards, values, mask, args)
    if args.advantage_normalization:
        advantages = standardise(advantages, mask, remember_deviation(critic, advantages, mask))
    for batch in batches:
        batch.advantages = advantages
    joint_mask = joint_rollout.response_mask
    batches.append(Batch(**vars(joint_rollout), old_values=values, returns=returns, action_mask=joint_mask))

    learners = [*agents, critic]
    losses = [[] for _ in learners]
    steps = [[] for _ in learners]
    for _ in range(args.ac_epochs):
        for joint in minibatches(batches, args, generator):
            for k, learner in enumerate(learners):
                loss_function = value_loss if learner is critic else maac_loss
                for part in joint[k].split(forward_size(args)):
                    loss, metrics = loss_function(learner, part, args)
                    loss.backward()  # gradients of micro-batches add up
                    losses[k].append(metrics)
                steps[k].append(optimizer_step(learner, args))
    for learner in learners:
        for schedule in learner.schedules:
            schedule.step()
    with_sampler = args.use_vllm and args.do_sample
    *metrics, critic_metrics = [update_metrics(*each, with_sampler) for each in zip(batches, losses, steps)]
    return metrics, critic_metrics


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
    """Train a team; returns its agents, last their critic, and its Run. Raises UserError for what the user can fix.

    `task` (any object with a task's names), `model` (loaded; it is copied) and `tokenizer` replace what the flags name;
    `train_dataset` and `eval_dataset`, rows of a datasets.Dataset or a list of dicts, replace the task's own.
    """
    args = args or Args()
    args = replace(args, model=models.name_of(args, model))
    device = distributed.start()
    check_args(args)
    readers = tasks.readers(args, "max_new_tokens", model, tokenizer)
    models.check_critic(args)
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
    team = build_agents(args, device, run.num_updates, model, tokenizer)
    *agents, critic = team
    generator = distributed.generator(args.seed, device)
    with run.start(team, generator):  # which resumes (--resume), and saves however it ends
        if held_out_items and run.step == 0 and args.eval_interval:
            run.phase("evaluate")
            run.untrained = evaluate(agents, task, held_out_items, args)
        for step, items in run.updates(train_items):  # this process's items of an update
            # 1. Every agent answers; the team is scored, turn by turn.
            items = [item for item in items for _ in range(args.num_generations)]
            rollouts = play(agents, task, items, args, generator, run.phase)

            # 2. The critic reads what all agents read; all learn from what it makes of it.
            run.phase("learn")
            metrics, critic_metrics = learn(agents, critic, rollouts, args, generator)

            # 3. Metrics, held-out items, samples.
            held_out = None
            if held_out_items and run.is_due(step, args.eval_interval):
                run.phase("evaluate")
                held_out = evaluate(agents, task, held_out_items, args)
            extra_metrics = tasks.extra_metrics(task, rollouts) | by_critic(critic_metrics)
            run.log(items, rollouts, metrics, extra_metrics, held_out)
    return team, run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
