"""Independent Actor-Critic (IAC) for a team of language models, in one file.

Each agent has its own actor and critic; the other agents are part of its environment. The critic is a value head on the
actor (its loss trains the actor too) or a model of its own (--use-separate-critic). h_t is all that an agent has read
and written before its t-th answer a_t, in turn k of the episode; log pi sums over the tokens of a_t. H is entropy:

    c_k     = what it earns from its answer in turn k until its next answer; what it earns before its first is lost
    e_k     = c_k / (s + reward_norm_eps)              s = max(std of sum_k c_k over episodes it acts in, 0.98 * last s)
    m_k     = mean, over the episodes in which it acts in turn k, of its sum of e_j over j >= k (undiscounted, no KL)
    V(h_t)  = critic(h_t) + m_k
    r_t     = e_k - kl_coef (log pi_old - log pi_ref)  of the answer a_t
    A_t     = r_t + gamma V_old(h_{t+1}) - V_old(h_t)  the TD error; t + 1: its next answer; V_old = 0 after the last
    A'_t    = (A_t - mean) / (std + advantage_norm_eps), both over the rollout
    actor     maximises  (mean of log pi(a_t|h_t) A'_t) + entropy_coef * (mean over sampled tokens of H)
    critic    minimises  value_loss_coef * mean of  max((V(h_t) - R_t)^2, (V_clip - R_t)^2),
                         R_t = A_t + V_old(h_t), V_clip: V(h_t) within value_clip_range of V_old(h_t)

Means in losses are over a mini-batch's answers or tokens. pi_old, V_old, m, A', R are from before the optimiser steps:
steps after the first are off-policy. pi_ref is the initial model. As on CoMLRL's page the policy loss has no ratio and
no clip (ppo_llm.py has both); s, m_k and the KL penalty are additions. Without normalisation e_k = c_k and A' = A.

    python iac_llm.py --num-agents 2 --use-separate-critic
    torchrun --nproc-per-node 2 iac_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --lora-rank 16

log pi is of logits / temperature, without --top-p or penalties. Models stay in eval mode; --lora-dropout acts in passes
with gradients only. With torchrun each process plays a share of the episodes; means and gradients are over all.
Shapes: N agents, B episodes of one process, a row each, S columns of tokens, padded on the right, n sampled tokens of
the M rows of a pass, T last turn, D hidden units. Sources: CoLLM-DC (arXiv 2601.21972), CoMLRL's Multi-Agent page.
"""

import sys
from dataclasses import dataclass, field
from statistics import fmean

import datasets
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch.nn.functional import pad
from transformers import set_seed

from utils import distributed, models, tasks
from utils.cli import Fraction, PositiveOrInf, command_line, flags, needs
from utils.clock import timed
from utils.run import FolderArgs, Run
from utils.tasks.made_text import posts
from utils.tasks.tldr import pair_reward


@flags
class Args(tasks.TaskArgs, FolderArgs, models.ModelArgs, models.CriticArgs, models.SamplingArgs):
    """Flags; comments are the help. needs(x): refused without x. Inherited: task, folder, models, AdamW, sampling."""

    seed: NonNegativeInt = 1  # the same seed and number of processes give the same run; on a GPU with --deterministic
    model: tuple[str, ...] = ("utils/tiny_lm",)  # folder, hub name or GGUF of initial models: one for all, or one each
    num_agents: PositiveInt = 2  # agents of the team, or players of --env
    use_separate_critic: bool = False  # the critic is a value head on a model of its own; else on the actor
    lora_rank: NonNegativeInt = 0  # LoRA rank of adapters on a base that agents share; 0: full fine-tuning
    num_train_epochs: PositiveInt = 3  # passes over the training set
    max_episodes: PositiveInt | None = None  # ends the run with the update that reaches as many, of all processes
    eval_interval: NonNegativeInt = 12  # updates between evaluations, also after the first and last; 0: none

    # Rollouts
    rollout_buffer_size: PositiveInt = 32  # episodes of an update, in all processes together
    num_generations: PositiveInt = 1  # episodes per item, neighbouring rows; not compared with each other
    num_turns: PositiveInt = 1  # longest episode, in steps of the environment; the default task has one turn
    max_new_tokens: PositiveInt = 72  # longest answer, in tokens
    do_sample: bool = True  # --no-do-sample: greedy answers
    temperature: PositiveFloat = 1.0  # logits are divided by it: to sample, and in log pi and H
    top_p: Fraction = needs("do_sample", default=1.0)  # nucleus sampling
    top_k: NonNegativeInt = needs("do_sample", default=0)  # sample from so many likeliest tokens; 0: from all

    # Advantages
    gamma: Fraction = 1.0  # discount factor, from an agent's answer to its next
    reward_normalization: bool = True  # divide rewards by the deviation s of what episodes earn
    reward_norm_eps: PositiveFloat = needs("reward_normalization", default=1e-3)  # added to s
    kl_coef: NonNegativeFloat = 0.03  # normalised reward taken off for each nat of log pi_old - log pi_ref
    advantage_normalization: bool = True  # standardise advantages over the rollout
    advantage_norm_eps: PositiveFloat = needs("advantage_normalization", default=0.3)  # added to std: damps small A

    # Optimisation
    update_epochs: PositiveInt = 1  # passes over a rollout
    mini_batch_size: PositiveInt = 16  # episodes of an optimiser step, of all processes
    micro_batch_size: PositiveInt = 16  # episodes of a forward pass, of one process
    entropy_coef: NonNegativeFloat = 0.0  # weight of the mean entropy, in nats per token
    value_loss_coef: NonNegativeFloat = 0.5  # weight of the critic's loss
    value_clip_range: PositiveOrInf = 0.2  # PPO's clip of V around V_old, in normalised rewards; inf: no clip
    actor_learning_rate: NonNegativeFloat = 5e-4  # for the tiny default model; large ones take less: docs/models.md
    critic_learning_rate: NonNegativeFloat = 1e-3  # of critics and value heads
    anneal_lr: bool = True  # lower the learning rates to 0 over the second half of the run
    max_grad_norm: PositiveFloat = 0.5  # clip of the norm of each optimiser's gradient


# --- The default task (--task takes another one) ----------------------------------------------------------------------
# A task is these functions. TeamEnv calls the last three through tasks.load_task, which hands each only what it names
# (prompts, turns ...: docs/tasks.md), checks what it returns, and copies a team's one list of rewards for each agent.


def train_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"train {seed}"))


def eval_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"eval {seed}"))


def formatters(item, agent):
    """An agent's first prompt, a chat: agent 0, 1, 2, ... is to write about 16, 32, 64, ... words."""
    request = f"Summarise this post in about {16 * 2**agent} words."
    return [{"role": "user", "content": f"{item['prompt']}\n\n{request}"}]


def reward_func(*completions, items):
    """completions[i][j] is agent i's answer to items[j]. Returns rewards[j] of the team, or rewards[i][j] of agent i.

    Opposite: [r, [-x for x in r]]. Here: 0 to 3 points for lengths, words, subject of agents i and i + 1, their mean.
    """
    rewards = []
    for item, *texts in zip(items, *completions):
        if len(texts) == 1:  # a single writer is compared with the post
            texts.append(item["prompt"])
        rewards.append(fmean(pair_reward(short, long) for short, long in zip(texts, texts[1:])))
    return rewards


def external_transition(item, agent_completions):
    """N next prompts after N answers to an item; of them agents read what is new. None: the episode ends, as here."""
    return None


# --- Agents and their environment -------------------------------------------------------------------------------------


class Agent:
    """An actor, the frozen model that it starts from, a critic (a head, and its own model if any), two optimisers."""

    def __init__(self, i, initial, num_updates, args):
        self.tokenizer = initial.tokenizer
        self.end_ids = initial.end_ids  # tokens that end an answer
        self.longest_prompt = initial.longest_prompt  # most tokens of a context that leaves room for max_new_tokens
        self.reference = initial.policy  # frozen; the agents that start from one model share it
        self.actor = initial.trainable_copy(f"agent_{i}_actor")  # all weights, or with --lora-rank new adapters
        self.critic = initial.trainable_critic(f"agent_{i}_critic") if args.use_separate_critic else None
        self.value_head = models.ValueHead(self.critic or self.actor, args)  # hidden states [n, D] to [n]; 0 at first
        self.optimizers = [
            models.adamw([self.actor], args.actor_learning_rate, args),
            models.adamw([self.value_head, self.critic], args.critic_learning_rate, args),  # the critic may be None
        ]
        self.schedules = [models.lr_schedule(optimizer, num_updates, args) for optimizer in self.optimizers]
        self.state = {"s": 0.0}  # the last s; what is in here is saved with the run


class TeamEnv:
    """A task as an environment of N players in B episodes: here all agents act in each turn, then all earn.

    Your own: --env FILE.py with a class TeamEnv of this __init__, where an item is {"seed": int}. Agent i acts in
    episode b if dict i has b, with messages or a string, and else waits. An episode in no dict has ended; end all
    within --num-turns steps. If one agent has no room for an answer, b is in no later action, and earns no more.
    Optional: `failed`, a set of episodes to learn nothing from. Two agents that act in turn, with opposite rewards:

        reset()                  -> [{b: chat}, {}]                                     agent 0 is to act
        step([{b: answer}, {}])  -> [{}, {b: chat}], [{b: 0.0}, {b: 0.0}], set()        agent 1 is to act
        step([{}, {b: answer}])  -> [{}, {}], [{b: 1.0}, {b: -1.0}], set()              the end
    """

    def __init__(self, task, items, args):
        self.task, self.items, self.args, self.turn = task, items, args, 0
        self.histories = [[[] for _ in range(args.num_agents)] for _ in items]  # [b][i]: chat, answer, chat ...

    def reset(self):
        """The first observations, N dicts {episode: chat}: what each agent reads before it acts."""
        chats = {}
        for b, item in enumerate(self.items):
            chats[b] = [self.task.formatters(item, i) for i in range(self.args.num_agents)]
        return self.observe(chats)

    def observe(self, chats):
        """Add {episode: N chats} to the histories; returns them as N dicts, one for each agent."""
        for b in chats:
            for own_history, chat in zip(self.histories[b], chats[b]):
                own_history.append(chat)
        return [{b: chats[b][i] for b in chats} for i in range(self.args.num_agents)]

    def step(self, actions):
        """Score the actions of a turn, N dicts {episode: answer}.

        Returns the next observations; the rewards, N dicts {episode: float}, also of agents that wait; and the set of
        episodes that it cuts: paid for this step and no more; what is observed there is read, not answered. Here: none.
        """
        self.turn += 1
        episodes = list(actions[0])  # those that go on; all agents act in them
        for b in episodes:
            for own_history, answers in zip(self.histories[b], actions):
                own_history.append(answers[b])
        items = [self.items[b] for b in episodes]
        histories = [self.histories[b] for b in episodes]
        completions = [list(answers.values()) for answers in actions]
        rewards = self.task.reward_func(*completions, items=items, histories=histories)  # N lists, one per agent
        next_chats = {}
        for b, item, history in zip(episodes, items, histories):
            if self.turn < self.args.num_turns:
                chats = self.task.external_transition(item, [answers[b] for answers in actions], history=history)
                if chats is not None:  # None: the episode ends
                    next_chats[b] = chats
        return self.observe(next_chats), [dict(zip(episodes, own_rewards)) for own_rewards in rewards], set()


# --- Rollouts ---------------------------------------------------------------------------------------------------------


@dataclass
class Transcript:
    """The tokens that one agent read and wrote in one episode, in order."""

    ids: list = field(default_factory=list)
    turns: list = field(default_factory=list)  # 1, 2, ...: the turn in which the agent sampled the token; 0: it read it
    rewards: list = field(default_factory=list)  # on an answer's last token, all that it earns until its next; else 0
    answers: list = field(default_factory=list)  # the text of each turn in which it acted
    earned: dict = field(default_factory=dict)  # {turn: reward}, also of turns in which others acted

    def extend(self, ids, turn=0):
        self.ids += ids
        self.turns += [turn] * len(ids)
        self.rewards += [0.0] * len(ids)


@dataclass
class Rollout:
    """B transcripts of one agent, padded on the right: ids with the padding token, the other tensors with 0."""

    ids: torch.Tensor  # [B, S]
    attention_mask: torch.Tensor  # [B, S] 1 on tokens, 0 on padding; for lengths
    turns: torch.Tensor  # [B, S] the turn in which the agent sampled the token; 0: it did not
    mask: torch.Tensor  # [B, S] True on tokens that the agent sampled, its end tokens included: where turns > 0
    rewards: torch.Tensor  # [B, S] on an answer's last token, all that is earned from it until the next
    answers: list  # B lists of texts, one for each turn in which the agent acted
    earned: list  # B dicts {turn: reward}, also of turns in which others acted; for metrics
    truncated: torch.Tensor  # [B] True where the episode was cut; for metrics: learn takes a cut for an end


@models.in_chunks_or_by_vllm  # called on --hf-generate-chunk-size contexts at a time; with --use-vllm vLLM samples
@torch.no_grad()
def generate(agent, contexts, args, generator):
    """Continue each list of token ids; returns lists of sampled ids, with the end token of those that have ended."""
    ids, attention_mask = models.pad_left(contexts, agent)
    process_logits = models.logits_processors(agent, ids, args)  # --top-p, --top-k, --min-p ...
    sampled = [[] for _ in contexts]
    rows = torch.arange(len(contexts))  # contexts whose answer goes on
    cache = None
    for _ in range(args.max_new_tokens):
        out = agent.actor.next_token(ids, attention_mask, cache)  # with a cache it reads the last id alone
        logits = process_logits(ids, out.logits / args.temperature)
        if args.do_sample:
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
        else:
            tokens = logits.argmax(-1)
        for row, token in zip(rows.tolist(), tokens.tolist()):
            sampled[row].append(token)
        goes_on = ~torch.isin(tokens, agent.end_ids)
        if not goes_on.any():
            break
        rows = rows[goes_on.cpu()]  # answers that have ended leave the batch
        cache = out.cache.select(goes_on)
        ids = torch.cat([ids, tokens[:, None]], 1)[goes_on]
        attention_mask = pad(attention_mask[goes_on], (0, 1), value=1)
    return sampled


@timed
def play(agents, task, items, args, generator):
    """Play an episode of each of B items, some alike; returns each agent's Rollout. Episode b is row b of every agent.

    A transcript as turn 2 begins, in which the agents read each other's answers; c is what turn 1 has earned:

        ids      <user> prompt <assistant> own answer <end> <user> the other's answer <assistant>
        turns    0      0      0           1   1      1     0      0   0       0      0
        rewards  0      0      0           0   0      c     0      0   0       0      0
    """
    env = getattr(task, "TeamEnv", TeamEnv)(task, items, args)  # the task's own class, as games have, or the above
    transcripts = [[Transcript() for _ in items] for _ in agents]  # [i][b]; below, `own` are those of one agent
    observations = env.reset()
    truncated = set()  # episodes that were cut, by the environment or for lack of room
    turn = 0
    with models.sampling(agents, args):  # gives vLLM the weights as they are now, and gathers those that are sharded
        while any(observations):
            turn += 1
            for agent, own, observed in zip(agents, transcripts, observations):  # 1. They read
                for b, chat in observed.items():
                    # The chat in its template, after an end token if the last answer lacks one, up to the model's limit
                    own[b].extend(models.encode(chat, own[b].ids, agent))
                    if len(own[b].ids) > agent.longest_prompt:  # no room for an answer:
                        truncated.add(b)  # the episode is cut for all agents, before anyone answers
            actions = []
            for agent, own, observed in zip(agents, transcripts, observations):  # 2. They answer
                episodes = [b for b in observed if b not in truncated]
                sampled = generate(agent, [own[b].ids for b in episodes], args, generator)  # after h_t; [] if it waits
                texts = models.decode(sampled, agent, args)  # without special tokens
                for b, ids, text in zip(episodes, sampled, texts):
                    own[b].extend(ids, turn)
                    own[b].answers.append(text)
                actions.append(dict(zip(episodes, texts)))
            if not any(actions):  # all episodes with observations are cut
                break
            observations, rewards, cut = env.step(actions)
            for own, own_rewards in zip(transcripts, rewards):  # 3. They earn
                for b in own_rewards.keys() - truncated:
                    own[b].earned[turn] = own_rewards[b]  # also before its first answer
                    if own[b].answers:  # then [-1] ends its latest answer: it has read nothing since
                        own[b].rewards[-1] += own_rewards[b]
            truncated |= cut  # after they have earned in the turn in which the environment cuts
    for b in getattr(env, "failed", ()):  # a game of --env raised an error: nothing is learned from its episode
        for own in transcripts:
            own[b] = Transcript()
    return [Rollout(**models.pad_right(own, agent, truncated)) for agent, own in zip(agents, transcripts)]


# --- Learning ---------------------------------------------------------------------------------------------------------


def sum_by(index, x, last):
    """[B, last + 1]: column k holds, row by row, the sum of x [B, S] over the places where index [B, S] is k."""
    return x.new_zeros(len(x), last + 1).scatter_add(1, index, x)


def policy_forward(policy, rollout, rows, args):
    """log pi and H of sampled tokens, in their columns of [M, S], else 0; hidden states that predict them, [n, D]."""
    mask = rollout.mask[rows]
    # Logits [n, vocabulary] that predict sampled tokens: logits[:, :-1][mask[:, 1:]] of a full pass, as column t - 1
    # predicts token t. Columns after the last sampled token are not read. Padding is last, and needs no attention mask
    out = policy.read(rollout.ids[rows], before=mask)
    pi = models.Categorical(out.logits, args.temperature)  # n distributions
    logprobs = pi.log_prob(rollout.ids[rows][mask])
    entropy = pi.entropy() if args.entropy_coef else pi.entropy().detach()  # without the bonus a metric only
    return models.unflatten(logprobs, mask), models.unflatten(entropy, mask), out.hidden_states


def critic_forward(agent, rollout, rows, hidden_states, last_turn):
    """critic(h_t), without m_k, in column k of [M, T + 1], else 0: one of each answer, from where h_t ends."""
    mask = rollout.mask[rows]
    if agent.critic is not None:
        hidden_states = agent.critic.read(rollout.ids[rows], before=mask).hidden_states
    values = models.unflatten(agent.value_head(hidden_states), mask)  # [M, S]
    is_first = mask & (rollout.turns[rows] != pad(rollout.turns[rows, :-1], (1, 0)))  # V there: of all before it
    return sum_by(rollout.turns[rows], values * is_first, last_turn)


def td_error(rewards, values, acted, gamma):
    """The temporal difference error from each turn in which the agent acts to the next one; V = 0 after the last.

    All are [B, T + 1]. Returns (advantages, returns), with returns = A + V the critic's targets; 0 if it did not act.
    """
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    for k in reversed(range(values.shape[1])):
        advantages[:, k] = rewards[:, k] + gamma * next_value - values[:, k]
        next_value = torch.where(acted[:, k] > 0, values[:, k], next_value)
    return advantages * acted, (advantages + values) * acted


@timed
def learn(agent, rollout, args, generator):
    """One update of an agent from its rollout; returns metrics. This function is the algorithm."""
    mask = rollout.mask.float()  # [B, S] 1 on tokens that the agent sampled, to multiply by
    last_turn = distributed.max(rollout.turns)  # T, the last in which this agent acts, in any episode
    acted = (sum_by(rollout.turns, mask, last_turn) > 0).float()  # [B, T + 1] 1 in column k: it acted in turn k

    # 1. Rewards c_k, in standard deviations of what an episode earns
    rewards = sum_by(rollout.turns, rollout.rewards, last_turn)  # [B, T + 1] c_k in column k
    if args.reward_normalization:
        _, std = distributed.mean_std(rewards.sum(1), mask.amax(1))  # of episodes in which the agent acted
        agent.state["s"] = max(float(std), 0.98 * agent.state["s"])  # slow to fall: a tiny std would amplify noise
        rewards = rewards / (agent.state["s"] + args.reward_norm_eps)  # from here on e_k

    # 2. V(h_t) = m_k + critic(h_t). The mean m_k, own episode included, is not trained; the critic starts at 0
    rewards_to_go = rewards.flip(1).cumsum(1).flip(1)  # sum of e_j from each turn on
    m = distributed.masked_mean(rewards_to_go, acted, dim=0)  # [T + 1] m_k in column k. V = m + critic_forward

    # 3. Before any optimiser step, without gradients: one pass each of actor, reference and, if any, critic model
    old_logprobs = torch.zeros_like(mask)  # computed here, not kept from sampling; for the KL penalty, or a ratio
    ref_logprobs = torch.zeros_like(mask)
    old_values = torch.zeros_like(rewards)
    with torch.no_grad():
        for rows in rollout.attention_mask.sum(1).argsort().split(args.micro_batch_size):  # by length: short passes
            old_logprobs[rows], _, hidden_states = policy_forward(agent.actor, rollout, rows, args)
            ref_logprobs[rows], _, _ = policy_forward(agent.reference, rollout, rows, args)
            old_values[rows] = m + critic_forward(agent, rollout, rows, hidden_states, last_turn)

    # 4. Advantages. Another algorithm puts its own here
    kl = sum_by(rollout.turns, old_logprobs - ref_logprobs, last_turn)
    turn_rewards = rewards - args.kl_coef * kl  # r_t
    advantages, returns = td_error(turn_rewards, old_values, acted, args.gamma)  # A_t, R_t
    if args.advantage_normalization:
        mean, std = distributed.mean_std(advantages, acted)
        advantages = (advantages - mean) / (std + args.advantage_norm_eps)  # A'_t

    # 5. Optimiser steps: in each epoch actor and critic model read the rollout again, with gradients
    losses = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(mask), generator=generator, device=mask.device)
        minibatches = order.split(args.mini_batch_size // distributed.world_size())
        for minibatch in minibatches:
            # Per-process counts: gradients are averaged over processes, so sum / mean count becomes total / total count
            num_tokens = distributed.mean(mask[minibatch].sum()).clamp(min=1e-6)
            num_answers = distributed.mean(acted[minibatch].sum()).clamp(min=1e-6)
            for rows in minibatch.split(args.micro_batch_size):
                logprobs, entropy, hidden_states = policy_forward(agent.actor, rollout, rows, args)
                answer_logprobs = sum_by(rollout.turns[rows], logprobs, last_turn)  # log pi(a_t|h_t)
                policy_loss = -(answer_logprobs * advantages[rows] * acted[rows]).sum() / num_answers
                mean_entropy = (entropy * mask[rows]).sum() / num_tokens

                values = m + critic_forward(agent, rollout, rows, hidden_states, last_turn)
                change = (values - old_values[rows]).clamp(-args.value_clip_range, args.value_clip_range)
                clipped_values = old_values[rows] + change
                error = torch.max((values - returns[rows]) ** 2, (clipped_values - returns[rows]) ** 2)
                value_loss = (error * acted[rows]).sum() / num_answers

                loss = policy_loss - args.entropy_coef * mean_entropy + args.value_loss_coef * value_loss
                loss.backward()  # gradients of micro-batches add up
                losses.append(torch.stack([policy_loss, value_loss, mean_entropy]).detach())

            grad_norms = []
            for optimizer in agent.optimizers:
                grad_norms.append(distributed.average_and_clip_gradients(optimizer, args.max_grad_norm))
                optimizer.step()
                optimizer.zero_grad()
    for schedule in agent.schedules:
        schedule.step()

    # 6. Metrics; run.log averages over processes. Losses, entropy: means over optimiser steps; grad_norm: of the last
    policy_loss, value_loss, entropy = torch.stack(losses).sum(0) / (args.update_epochs * len(minibatches))
    return {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "grad_norm": grad_norms[0],  # of the actor
        "kl": distributed.masked_mean(old_logprobs - ref_logprobs, mask),
        "reference_logprob": distributed.masked_mean(ref_logprobs, mask),
        "explained_variance": distributed.explained_variance(returns, old_values, acted),
    }


# --- main -------------------------------------------------------------------------------------------------------------


@timed
def evaluate(agents, task, items, args):
    """Mean of what an episode earns, over agents (so 0 if opposite) and held-out items in which any acts; one seed."""
    rollouts = play(agents, task, distributed.share(items), args, distributed.generator(args.seed))
    return tasks.mean_reward(rollouts)


def main(args=None, task=None, model=None, tokenizer=None, train_dataset=None, eval_dataset=None):
    """Train a team; returns its agents and its Run. Raises UserError for what the user can fix.

    From Python, `task` (or an environment), `model`, `tokenizer` and data may be objects, in place of what flags name.
    """
    args = args or Args()
    distributed.start(args)
    initials = models.load(args, model, tokenizer)  # of each agent: its model, frozen, and its tokenizer
    task = tasks.load_task(task, args, default=sys.modules[__name__])  # the functions in this file
    train_items, eval_items = tasks.load_items(task, initials, args, train_dataset, eval_dataset)  # None: task's own
    batches = tasks.shuffled_batches(train_items, args)  # [update]: its rollout_buffer_size / num_generations items
    run = Run(args, __file__, task, batches)

    set_seed(args.seed)
    generator = distributed.generator(args.seed)  # another one in each process
    agents = [Agent(i, initial, len(batches), args) for i, initial in enumerate(initials)]

    with run.start(agents, generator):  # resumes; saves by --save-interval, and when it ends or is stopped
        for update in run.updates():
            items = [item for item in distributed.share(batches[update]) for _ in range(args.num_generations)]
            rollouts = play(agents, task, items, args, generator)
            metrics = [learn(agent, rollout, args, generator) for agent, rollout in zip(agents, rollouts)]
            eval_reward = evaluate(agents, task, eval_items, args) if run.is_due(update, args.eval_interval) else None
            run.log(items, rollouts, metrics, eval_reward)
    return agents, run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
