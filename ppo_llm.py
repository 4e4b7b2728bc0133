"""PPO for language models on LoRA adapters: one agent or a team on one base, one turn or many, in one file.

Each agent has its own actor and critic: adapters on a base that agents share (--lora-rank 0: whole models). With
--no-use-separate-critic the critic is a head on the actor, whose loss trains the actor too. h_t is all that an agent
has read and written before it samples a_t, its action, a token of turn k:

    r_t     = what it earns from a_t until its next action   --reward-normalization: / std of an episode's sum of r
    m_k     = mean of what it earns from turn k on     undiscounted, over the rollout's episodes where it acts in turn k
    V(h_t)  = critic(h_t) + m_k                        m_k is an addition to PPO: the critic learns what is left
    delta_t = r_t + gamma V_old(h_{t+1}) - V_old(h_t)  t + 1: its next action
    A_t     = sum_l (gamma lambda)^l delta_{t+l}       GAE, arXiv 1506.02438
    rho     = pi(a_t|h_t) / pi_old(a_t|h_t),  d = log pi_ref(a_t|h_t) - log pi(a_t|h_t)
    actor     minimises  mean of  max(-A' rho, -A' clip(rho, 1 - eps, 1 + eps)) + kl_loss_coef (exp(d) - d - 1)
                                  - entropy_coef H(pi(.|h_t))
    critic    minimises  mean of  value_loss_coef / 2 max((V(h_t) - R_t)^2, (V_clip - R_t)^2),
                                  R_t = A_t + V_old(h_t), V_clip: V(h_t) within eps of V_old(h_t)

Old:   pi_old, V_old, m, A and R are from before the optimiser steps; pi_ref is the reference.
End:   after its last action, of turn k, V_old = 0. If the episode is cut, by its environment or for lack of room, it is
       critic(all read and written) + mean of what it earns from its next action on, in episodes that have one, or m_k.
A':    (A - mean) / s over the rollout's actions, s = max(std, 0.98 s of the last update), which is not in PPO either;
       A without --advantage-normalization.
Means: over a mini-batch; max(...), KL and H over its sampled tokens, the critic's over its actions.
Turns: with --action-granularity turn an action is an answer in r, V, delta and A, and its tokens all have its A', while
       rho, d and H stay those of tokens; its V is that of its first token, unless --turn-value-reduction says
       otherwise. With --turn-level-clip rho is the product over an answer's tokens, max(...) of answers.

    python ppo_llm.py                                                                      guess a number
    python ppo_llm.py --task tldr --num-agents 2 --max-new-tokens 72 --gae-lambda 0.95     two agents summarise
    torchrun --nproc-per-node 2 ppo_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --actor-learning-rate 5e-4

log pi is of logits / temperature, without --top-p or penalties. Models stay in eval mode; --lora-dropout acts in passes
with gradients only. With torchrun each process plays a share of the episodes; means and gradients are over all.
Shapes: N agents, B episodes of one process (in self-play times the agent's seats), S tokens of the longest transcript
and one more, padded on the right, n of them read for V or log pi in M rows, T turns, D units of a hidden state.
Sources: AgileRL's page on LLMPPO, PPO (arXiv 1707.06347), LoRA (arXiv 2106.09685).
"""

import random
import sys
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch.nn.functional import pad
from transformers import set_seed

from utils import distributed, models, tasks
from utils.cli import Fraction, command_line, flags, needs, not_with  # needs(x): only with x; not_with(x): only without
from utils.clock import timed
from utils.envs.guess import guess_value, optimum  # noqa: F401  optimum: a line of the plot; drop it with this reward
from utils.opponents import make_opponents
from utils.run import FolderArgs, Run


@flags
class Args(tasks.TaskArgs, FolderArgs, models.ModelArgs, models.CriticArgs, models.SamplingArgs):
    """Flags; comments are the help. needs(x): refused without x. Inherited: task, folder, models, AdamW, sampling."""

    seed: NonNegativeInt = 1  # the same seed and number of processes give the same run; on a GPU with --deterministic
    model: tuple[str, ...] = ("utils/tiny_lm",)  # folder, hub name or GGUF of initial models: one for all, or one each
    num_agents: PositiveInt = 1  # agents of the team, or players of --env
    self_play: bool = not_with("num_agents=1", default=False)  # one agent in all seats, which learns from all
    # earlier copies to keep, which fill all seats but one, drawn anew in each update; the learner's seat rotates
    opponents: NonNegativeInt = needs("self_play", default=0)
    opponent_interval: PositiveInt = needs("opponents", default=10)  # updates between copies; the oldest leaves
    opponent_run: str | None = needs("self_play")  # folder of another run, whose final agents are the opponents
    use_separate_critic: bool = True  # a critic has adapters, or a model, of its own; else a value head on the actor
    lora_rank: NonNegativeInt = 16  # LoRA rank of adapters on a base that agents share; 0: full fine-tuning
    use_separate_reference_adapter: bool = True  # the reference has adapters of its own; else it is the initial model
    # updates between copies of the actor to the reference; 0: never
    reference_update_interval: NonNegativeInt = needs("use_separate_reference_adapter", default=0)
    num_train_epochs: PositiveInt = 3  # passes over the training set
    max_episodes: PositiveInt | None = None  # ends the run with the update that reaches as many, of all processes
    eval_interval: NonNegativeInt = 25  # updates between evaluations, also after the first and last; 0: none

    # Rollouts
    rollout_buffer_size: PositiveInt = 64  # episodes of an update, in all processes together
    num_generations: PositiveInt = 1  # episodes per item, neighbouring rows; not compared with each other
    num_turns: PositiveInt = 6  # longest episode, in steps of the environment
    max_new_tokens: PositiveInt = 8  # longest answer, in tokens
    do_sample: bool = True  # --no-do-sample: greedy answers
    temperature: PositiveFloat = 1.0  # logits are divided by it: to sample, and in log pi and H
    top_p: Fraction = needs("do_sample", default=1.0)  # nucleus sampling
    top_k: NonNegativeInt = needs("do_sample", default=0)  # sample from so many likeliest tokens; 0: from all

    # Advantages
    # what is an action; auto: a turn if --num-turns is above 1, else a token
    action_granularity: Literal["token", "turn", "auto"] = "token"
    # V of an answer: of its first token, which has read none of it; mean over its tokens, or last: A is biased then
    turn_value_reduction: Literal["first_value", "mean", "final_value"] = not_with(
        "action_granularity=token", "action_granularity=auto&num_turns=1", default="first_value"
    )
    gamma: Fraction = 1.0  # discount factor, from action to action
    gae_lambda: Fraction = 0.85  # 0.95 for long answers in one turn
    reward_normalization: bool = False  # divide rewards by the standard deviation of what episodes earn
    reward_norm_eps: PositiveFloat = needs("reward_normalization", default=1e-3)  # added to that standard deviation
    turn_baseline: bool = True  # m_k is of each turn; else one mean over all turns
    advantage_normalization: bool = True  # centre and scale advantages over the rollout's actions

    # Optimisation
    update_epochs: PositiveInt = 2  # passes over a rollout
    clip_coef: PositiveFloat = 0.2  # eps, of the ratio, and of V in units of (normalised) reward
    # the ratio of a turn, not of a token
    turn_level_clip: bool = not_with("action_granularity=token", "action_granularity=auto&num_turns=1", default=False)
    kl_loss_coef: NonNegativeFloat = 0.01  # weight of the KL penalty to the reference
    mini_batch_size: PositiveInt = 16  # transcripts of an optimiser step, of all processes (in self-play N an episode)
    micro_batch_size: PositiveInt = 16  # transcripts of a forward pass, of one process
    entropy_coef: NonNegativeFloat = 0.0  # weight of the mean entropy, in nats per token
    entropy_coef_end: NonNegativeFloat | None = needs("entropy_coef")  # where its line over the run ends
    value_loss_coef: NonNegativeFloat = 0.5  # weight of the critic's loss
    actor_learning_rate: NonNegativeFloat = 3e-3  # for the tiny default model; large ones take less: docs/models.md
    critic_learning_rate: NonNegativeFloat = 3e-3  # of critics and value heads
    cosine_lr_schedule: bool = True  # lower the learning rates to 0 along a cosine
    warmup_proportion: Fraction = 0.0  # share of the updates over which they rise first
    max_grad_norm: PositiveFloat = 0.5  # clip of the norm of each optimiser's gradient


# --- The default game (--env takes another one, --task a task) --------------------------------------------------------
# Without --task and --env play gets a utils.envs.Games, a TeamEnv of B of these; truncated=True cuts an episode. The
# class TeamEnv is for tasks, whose functions (docs/tasks.md) may take less than it gives: reward_func(*completions).


class Env:
    """A game of guessing a secret number, uniform from 1 to 16, with Gymnasium's reset and step on text.

    A guess earns half its probability to be right, plus half of the share of all 4 bits that it tells on average (see
    guess_value): luck is not paid. Each after the first costs 1/6; the sixth is the last. An answer that is no number
    of one to three digits ends the game with -1.
    """

    def reset(self, seed=None):
        """Returns observation, info."""
        self.secret = random.Random(None if seed is None else f"guess {seed}").randint(1, 16)
        self.num_guesses = 0
        self.low = 1  # the secret is from low to high, by the observations so far
        self.high = 16
        return "I think of a number from 1 to 16. Guess it.", {}

    def step(self, answer):
        """Returns observation, reward, terminated, truncated, info."""
        self.num_guesses += 1
        answer = answer.strip()
        if not (answer.isascii() and answer.isdigit() and len(answer) <= 3):
            return "not a number", -1.0, True, False, {}
        guess = int(answer)
        reward = guess_value(self.low, guess, self.high)  # (probability to be right + expected bits / 4) / 2
        if self.num_guesses > 1:
            reward -= 1 / 6
        if guess == self.secret:
            return "met", reward, True, False, {}
        if guess < self.secret:
            observation = "higher"
            self.low = max(self.low, guess + 1)
        else:
            observation = "lower"
            self.high = min(self.high, guess - 1)
        return observation, reward, self.num_guesses == 6, False, {}


# --- Agents and their environment -------------------------------------------------------------------------------------


class Agent:
    """An actor, a reference, which no optimiser changes, a critic (a head, and its own model if any), optimisers."""

    def __init__(self, i, initial, num_updates, args):
        self.tokenizer = initial.tokenizer
        self.end_ids = initial.end_ids  # tokens that end an answer
        self.longest_prompt = initial.longest_prompt  # most tokens of a context that leaves room for max_new_tokens
        self.actor = initial.trainable_copy(f"agent_{i}_actor")  # all weights, or with --lora-rank new adapters
        own_reference = args.use_separate_reference_adapter
        self.reference = initial.frozen_copy(f"agent_{i}_reference") if own_reference else initial.policy
        self.critic = initial.trainable_critic(f"agent_{i}_critic") if args.use_separate_critic else None
        self.value_head = models.ValueHead(self.critic or self.actor, args)  # hidden states [n, D] to [n]; 0 at first
        self.optimizers = [
            models.adamw([self.actor], args.actor_learning_rate, args),
            models.adamw([self.value_head, self.critic], args.critic_learning_rate, args),  # the critic may be None
        ]
        self.schedules = [models.lr_schedule(optimizer, num_updates, args) for optimizer in self.optimizers]
        self.state = {"std": 0.0}  # the last divisor of advantages; what is in here is saved with the run
        self.num_updates = num_updates


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
    truncated: torch.Tensor  # [B] True where the episode was cut


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


def policy_forward(policy, rollout, places, rows, args):
    """log pi(a_t|h_t) and the entropy of pi(.|h_t), [M, S], and the hidden states they come from, [n, D].

    They are computed at the n `places` [B, S] of these rows that are True. Elsewhere they are 0.
    """
    places = places[rows]
    # For a place in column t the logits, [n, vocabulary], and hidden states, [n, D], of column t - 1, which predict
    # token t: a full pass's logits[:, :-1][places[:, 1:]], the only ones computed
    out = policy.read(rollout.ids[rows], before=places)
    pi = models.Categorical(out.logits, args.temperature)  # n distributions
    logprobs = pi.log_prob(rollout.ids[rows][places])
    entropy = pi.entropy() if args.entropy_coef else pi.entropy().detach()  # without the bonus a metric only
    return models.unflatten(logprobs, places), models.unflatten(entropy, places), out.hidden_states


def critic_forward(agent, rollout, places, rows, hidden_states):
    """critic(h_t) = V(h_t) - m_k there, [M, S], else 0: from the actor's hidden_states, or from the critic's own."""
    places = places[rows]
    if agent.critic is not None:
        hidden_states = agent.critic.read(rollout.ids[rows], before=places).hidden_states
    return models.unflatten(agent.value_head(hidden_states), places)


def gae(rewards, values, mask, is_cut_end, gamma, gae_lambda):
    """Generalised advantage estimation along each row; columns with mask 0 are skipped, and V = 0 after the last.

    A cut end has a V, which is the next value of what stands before it. All tensors are [B, S]. Returns (advantages,
    returns), with returns = A + V the critic's targets; both are 0 where mask is 0.
    """
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * gae_lambda * next_advantage
        next_value = torch.where((mask[:, t] > 0) | is_cut_end[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t] > 0, advantages[:, t], next_advantage)
    return advantages * mask, (advantages + values) * mask


def mean_rewards_to_go(rewards, turns, is_cut_end, args):
    """m [B, S], the part of V that is not the critic's: m_k on the tokens of turn k, m_after at a cut end, 0 elsewhere.

    m_k: what is earned from turn k on, a mean over the episodes, own one included, in which the agent acts in turn k.
    m_after, of its last turn k: what is earned from its next action on (not before it, when others act), a mean over
    episodes in which it acts in turn k and again; m_k if there are none. --no-turn-baseline: both are one mean, over
    all turns. In self-play with seats that move one after the other a turn is of one seat, and so is its m_k.
    """
    last_turn = distributed.max(turns)  # T
    acted = (sum_by(turns, (turns > 0).float(), last_turn) > 0).float()  # [B, T + 1] 1 in column k: in turn k
    rewards_to_go = sum_by(turns, rewards, last_turn).flip(1).cumsum(1).flip(1)  # [B, T + 1] earned from turn k on
    m = distributed.masked_mean(rewards_to_go, acted, dim=0)  # [T + 1] m_k in column k, 0 in column 0
    own_last_turn = turns.amax(1, keepdim=True)  # [B, 1]
    acts_again = acted * (torch.arange(last_turn + 1, device=turns.device) < own_last_turn)  # in turn k and later
    rewards_after = pad(rewards_to_go[:, 1:], (0, 1))  # [B, T + 1] earned from its first action after turn k on
    m_after = distributed.masked_mean(rewards_after, acts_again, dim=0)
    any_acts_again = distributed.masked_mean(acts_again, acted, dim=0) > 0  # [T + 1] in any process
    m_after = m_after.where(any_acts_again, m)
    if not args.turn_baseline:
        m = m_after = distributed.masked_mean(rewards_to_go, acted).expand_as(m)
    return m[turns] * (turns > 0) + m_after[own_last_turn] * is_cut_end


@timed
def learn(agent, rollout, args, generator):
    """One update of an agent from its rollout; returns metrics. This function is the algorithm."""
    mask = rollout.mask.float()  # [B, S] 1 on tokens that the agent sampled, to multiply by
    lengths = rollout.attention_mask.sum(1)
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last_column = mask.shape[1] - 1

    # 1. Actions: tokens, or turns, each in the column of its last token, where what it earns stands
    if args.action_granularity == "token" or (args.action_granularity == "auto" and args.num_turns == 1):
        action_column = columns  # [B, S] of each sampled token: the column in which its action stands
        action_mask = value_weights = mask
    else:
        is_first = mask * (rollout.turns != pad(rollout.turns[:, :-1], (1, 0)))  # [B, S] 1 on the first token of a turn
        is_last = mask * (rollout.turns != pad(rollout.turns[:, 1:], (0, 1)))  # on the last
        ends = columns.where(is_last > 0, last_column)  # on a turn's last token its own column, elsewhere S - 1
        action_column = ends.flip(1).cummin(1).values.flip(1)  # of turns 0 1 1 0 2 2 0: 2 2 2 5 5 5 6
        action_mask = is_last
        tokens_of_turn = sum_by(action_column, mask, last_column).gather(1, action_column).clamp(min=1)
        reductions = {"first_value": is_first, "mean": mask / tokens_of_turn, "final_value": is_last}
        value_weights = reductions[args.turn_value_reduction]  # [B, S] weight of a token's V in V of its turn

    # 2. Cut episodes: V of all that was read and written, in the column behind it. Steps 4 and 5 read it
    was_cut = rollout.truncated & (mask.amax(1) > 0)  # [B] of episodes in which the agent acted
    is_cut_end = was_cut[:, None] & (columns == lengths[:, None])  # pad_right leaves a column behind the longest
    places = rollout.mask | is_cut_end  # [B, S] sampled tokens and cut ends: what step 4 reads

    # 3. Rewards, and m_k, the mean of what is still earned from turn k on. The critic learns what is left
    rewards = rollout.rewards
    if args.reward_normalization:
        _, std = distributed.mean_std(rewards.sum(1), mask.amax(1))  # of episodes in which the agent acted
        rewards = rewards / (std + args.reward_norm_eps)
    m = mean_rewards_to_go(rewards, rollout.turns, is_cut_end, args)  # [B, S] V = critic + m; zeros: plain PPO

    # 4. Log-probabilities, not the sampler's (with --top-p or vLLM they differ), and values before the update: a pass
    #    without gradients of actor, critic model, and reference if there is a KL loss. Step 6: actor, critic each epoch
    old_logprobs = torch.zeros_like(mask)
    ref_logprobs = torch.zeros_like(mask)
    token_values = torch.zeros_like(mask)
    with torch.no_grad():
        for rows in lengths.argsort().split(args.micro_batch_size):  # by length: read leaves out columns of padding
            old_logprobs[rows], _, hidden_states = policy_forward(agent.actor, rollout, places, rows, args)
            if args.kl_loss_coef > 0:
                ref_logprobs[rows], _, _ = policy_forward(agent.reference, rollout, rollout.mask, rows, args)
            token_values[rows] = m[rows] + critic_forward(agent, rollout, places, rows, hidden_states)
    old_logprobs = old_logprobs.where(rollout.mask, 0.0)  # a cut end is no sampled token
    old_values = sum_by(action_column, token_values * value_weights, last_column) + token_values * is_cut_end

    # 5. Advantages, and returns, the critic's targets, in the columns of actions. Another algorithm puts its own here;
    #    one without a critic has returns = old_values (explained_variance says 1 then), and --value-loss-coef 0
    advantages, returns = gae(rewards, old_values, action_mask, is_cut_end, args.gamma, args.gae_lambda)
    if args.advantage_normalization:
        mean, std = distributed.mean_std(advantages, action_mask)
        agent.state["std"] = max(float(std), 0.98 * agent.state["std"])  # slow to fall: a tiny std would amplify noise
        advantages = (advantages - mean) / (agent.state["std"] + 1e-8)
    advantages = advantages.gather(1, action_column)  # now on each sampled token, its action's; masks hide the rest

    # 6. Optimiser steps
    entropy_coef = args.entropy_coef
    if args.entropy_coef_end is not None:  # last_epoch: updates so far
        entropy_coef += (args.entropy_coef_end - entropy_coef) * agent.schedules[0].last_epoch / agent.num_updates
    ratio_mask = action_mask if args.turn_level_clip else mask  # a ratio is of a turn, or of a token
    losses = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(mask), generator=generator, device=mask.device)
        minibatches = order.split(args.mini_batch_size // distributed.world_size())
        for minibatch in minibatches:
            # Per-process counts: gradients are averaged over processes, so sum / mean count becomes total / total count
            num_tokens = distributed.mean(mask[minibatch].sum()).clamp(min=1e-6)
            num_ratios = distributed.mean(ratio_mask[minibatch].sum()).clamp(min=1e-6)
            num_actions = distributed.mean(action_mask[minibatch].sum()).clamp(min=1e-6)
            for rows in minibatch.split(args.micro_batch_size):
                logprobs, entropy, hidden_states = policy_forward(agent.actor, rollout, rollout.mask, rows, args)
                log_ratio = logprobs - old_logprobs[rows]  # both are 0 where no token was sampled
                if args.turn_level_clip:
                    log_ratio = sum_by(action_column[rows], log_ratio, last_column)
                ratio = log_ratio.clamp(max=80).exp()  # exp(89) is inf, whose gradient is NaN even where it is clipped
                clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_error = torch.max(-advantages[rows] * ratio, -advantages[rows] * clipped_ratio)
                policy_loss = (policy_error * ratio_mask[rows]).sum() / num_ratios
                clip_fraction = ((ratio != clipped_ratio) * ratio_mask[rows]).sum() / num_ratios
                kl_loss = torch.zeros_like(policy_loss)
                if args.kl_loss_coef > 0:
                    d = ref_logprobs[rows] - logprobs
                    kl_loss = ((d.exp() - d - 1) * mask[rows]).sum() / num_tokens
                mean_entropy = (entropy * mask[rows]).sum() / num_tokens

                values = m[rows] + critic_forward(agent, rollout, rollout.mask, rows, hidden_states)
                values = sum_by(action_column[rows], values * value_weights[rows], last_column)
                change = (values - old_values[rows]).clamp(-args.clip_coef, args.clip_coef)
                clipped_values = old_values[rows] + change
                error = torch.max((values - returns[rows]) ** 2, (clipped_values - returns[rows]) ** 2)
                value_loss = 0.5 * (error * action_mask[rows]).sum() / num_actions

                loss = policy_loss + args.kl_loss_coef * kl_loss - entropy_coef * mean_entropy
                loss = loss + args.value_loss_coef * value_loss
                loss.backward()  # gradients of micro-batches add up
                losses.append(torch.stack([policy_loss, value_loss, mean_entropy, kl_loss, clip_fraction]).detach())

            grad_norms = []
            for optimizer in agent.optimizers:
                grad_norms.append(distributed.average_and_clip_gradients(optimizer, args.max_grad_norm))
                optimizer.step()
                optimizer.zero_grad()
    for schedule in agent.schedules:
        schedule.step()

    # 7. Metrics; run.log averages over processes. The five in `losses`: means over the steps; grad_norm: of the last
    losses = torch.stack(losses).sum(0) / (args.update_epochs * len(minibatches))
    policy_loss, value_loss, entropy, kl_loss, clip_fraction = losses
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "clip_fraction": clip_fraction,
        "grad_norm": grad_norms[0],  # of the actor
        "explained_variance": distributed.explained_variance(returns, old_values, action_mask),
    }
    if args.kl_loss_coef > 0:
        metrics["kl_loss"] = kl_loss
        metrics["kl"] = distributed.masked_mean(old_logprobs - ref_logprobs, mask)
        metrics["reference_logprob"] = distributed.masked_mean(ref_logprobs, mask)
    return metrics


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
    task = tasks.load_task(task, args, default=sys.modules[__name__])  # Env in this file, as a TeamEnv
    train_items, eval_items = tasks.load_items(task, initials, args, train_dataset, eval_dataset)  # None: task's own
    batches = tasks.shuffled_batches(train_items, args)  # [update]: its rollout_buffer_size / num_generations items
    run = Run(args, __file__, task, batches)

    set_seed(args.seed)
    generator = distributed.generator(args.seed)  # another one in each process
    agents = [Agent(i, initial, len(batches), args) for i, initial in enumerate(initials)]
    players = agents * (args.num_agents // len(agents))  # --self-play: the one agent, once for each seat
    opponents = make_opponents(agents[0], initials[0], args)  # None: players have all seats

    with run.start(agents, generator):  # resumes; saves by --save-interval, and when it ends or is stopped
        for update in run.updates():
            for agent in agents:
                if update and args.reference_update_interval and update % args.reference_update_interval == 0:
                    agent.reference.copy_from(agent.actor)
            items = [item for item in distributed.share(batches[update]) for _ in range(args.num_generations)]
            seats = opponents.seats(update) if opponents else players
            rollouts = play(seats, task, items, args, generator)
            own_rollouts = models.join_rollouts(agents, seats, rollouts)  # an agent's has its seats' rows, in order
            metrics = [learn(agent, rollout, args, generator) for agent, rollout in zip(agents, own_rollouts)]
            if opponents:
                metrics[0] |= opponents.metrics(update, rollouts)
            eval_reward = evaluate(players, task, eval_items, args) if run.is_due(update, args.eval_interval) else None
            run.log(items, rollouts, metrics, eval_reward, seats=seats)
    return agents, run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
