"""PPO for language models on LoRA adapters: one agent or a team on one base, one turn or many, in one file.

Each agent has its own actor and critic: adapters on a base that agents share (--lora-rank 0: whole models). With
--no-use-separate-critic the critic is a value head on the actor, and the critic's loss trains the actor too. Turn k is
the environment's k-th step, action a_t the t-th token an agent samples (in turn k), h_t all it read and wrote before:

    r_t     = the agent's rewards from a_t to a_{t+1}  0 before an answer's last token; --reward-normalization scales it
    m_k     = mean of its undiscounted sum of r from turn k on, over the rollout's episodes in which it acts in turn k
    V(h_t)  = critic(h_t) + m_k                        m_k is not in PPO and not trained: the critic learns what is left
    delta_t = r_t + gamma V_old(h_{t+1}) - V_old(h_t)  old: before the update; t counts its actions through all turns
    A_t     = sum_l (gamma lambda)^l delta_{t+l}       GAE, arXiv 1506.02438
    A'      = (A - mean) / s                           over the rollout's actions; s = max(std, 0.98 * last update's s)
    rho     = pi(a_t|h_t) / pi_old(a_t|h_t)            its clip, and that of V, have eps = clip_coef
    d       = log pi_ref(a_t|h_t) - log pi(a_t|h_t)    pi_ref: the initial policy or an older actor
    actor     minimises  mean of  max(-A' rho, -A' clip(rho, 1 - eps, 1 + eps)) + kl_loss_coef (exp(d) - d - 1)
                                  - entropy_coef H(pi(.|h_t))
    critic    minimises  mean of  value_loss_coef / 2 max((V(h_t) - R_t)^2, (V_clip - R_t)^2),
                                  R_t = A_t + V_old(h_t), V_clip = V_old(h_t) + clip(V(h_t) - V_old(h_t), -eps, eps)

Old:   pi_old, V_old, m, A' and R are computed once per rollout. In PPO s = std; --no-advantage-normalization: A' = A.
End:   V_old(h_{t+1}) = 0 after an agent's last action, also where --num-turns ends a task or a one-player game. If the
       episode was cut (by its environment, for lack of room, or a match of several players by --num-turns), this V is
       critic(all read and written) + m_after: the mean of what later actions earn, where the agent still has some.
Means: the actor's is over a mini-batch's sampled tokens, the critic's over its actions.
Turns: with --action-granularity turn a whole answer is one action, with one r, V, delta, A and R. All its tokens have
       its A', while rho, d and H stay per token. Its V is that of its first token (--turn-value-reduction has others).
       With --turn-level-clip it has one rho, the product over its tokens, and the mean of max(...) is over answers.

    python ppo_llm.py                                                                      guess a number
    python ppo_llm.py --task tldr --num-agents 2 --max-new-tokens 72 --gae-lambda 0.95     two agents summarise
    torchrun --nproc-per-node 2 ppo_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --actor-learning-rate 5e-4

log pi and H use logits / temperature; --top-p, --top-k, --min-p and penalties act in sampling only. Models stay in eval
mode, but --lora-dropout is on in passes with gradients. torchrun splits the episodes; means and gradients are over all.
Shapes: N agents; B rows per process, one per episode, in self-play one per episode and seat of the agent; S columns of
tokens, the last all padding; T last turn. A forward pass has M of the B rows, n `places` in them, and hidden size D.
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
from utils.cli import Fraction, command_line, flags, needs, not_with  # not_with("x=1&y=2"): an error while both hold
from utils.clock import timed
from utils.envs.guess import guess_value, optimum  # noqa: F401  optimum: Env's best score, which utils plots
from utils.opponents import OpponentArgs, make_opponents  # --self-play: one agent in every seat of a game
from utils.run import FolderArgs, Run

PER_TOKEN = ("action_granularity=token", "action_granularity=auto&num_turns=1")  # flags that make an action a token


@flags
class Args(tasks.TaskArgs, FolderArgs, OpponentArgs, models.ModelArgs, models.CriticArgs, models.SamplingArgs):
    """Flags; the comments are the help. needs("x"): an error if set while x is off. The base classes have more."""

    seed: NonNegativeInt = 1  # same seed, same number of processes: same run (on a GPU only with --deterministic)
    model: tuple[str, ...] = ("utils/tiny_lm",)  # folder, hub name or GGUF of initial models: one for all, or one each
    num_agents: PositiveInt = 1  # agents of the team, or players of --env
    use_separate_critic: bool = True  # the critic has its own adapters or model; else it is a value head on the actor
    lora_rank: NonNegativeInt = 16  # LoRA rank of adapters on a base that agents share; 0: full fine-tuning
    use_separate_reference_adapter: bool = True  # the reference is a copy, which can be updated; else the initial model
    # every so many updates the actor is copied to the reference; 0: never
    reference_update_interval: NonNegativeInt = needs("use_separate_reference_adapter", "kl_loss_coef", default=0)
    num_train_epochs: PositiveInt = 3  # passes over the training set
    max_episodes: PositiveInt | None = None  # stop after the update that reaches this many, all processes together
    eval_interval: NonNegativeInt = 25  # updates between evaluations, also after the first and last; 0: none

    # Rollouts
    rollout_buffer_size: PositiveInt = 64  # episodes per update, all processes together
    num_generations: PositiveInt = 1  # episodes per training item, in neighbouring rows; not compared as in GRPO
    num_turns: PositiveInt = 6  # most turns of an episode (your own TeamEnv must keep to it)
    max_new_tokens: PositiveInt = 8  # longest answer, in tokens
    do_sample: bool = True  # --no-do-sample: greedy answers
    temperature: PositiveFloat = 1.0  # logits are divided by it: to sample, and in log pi and H

    # Advantages
    # what is an action; auto: a turn if the agent acts after turn 1 in any episode of the rollout, else a token
    action_granularity: Literal["token", "turn", "auto"] = "token"
    # V of an answer: V before its first token, or the mean over its tokens, or V before its last; the last two bias A
    turn_value_reduction: Literal["first_value", "mean", "final_value"] = not_with(*PER_TOKEN, default="first_value")
    gamma: Fraction = 1.0  # discount factor, from action to action
    gae_lambda: Fraction = 0.85  # lambda of GAE, from action to action, as gamma; 0.95 for long answers in one turn
    reward_normalization: bool = False  # divide rewards by the std of episodes' sums (by 1 where that is 0)
    reward_norm_eps: PositiveFloat = needs("reward_normalization", default=1e-3)  # added to that std
    turn_baseline: bool = True  # one m_k per turn; else a single mean over all turns
    advantage_normalization: bool = True  # centre and scale advantages over the rollout's actions

    # Optimisation
    update_epochs: PositiveInt = 2  # passes over a rollout
    clip_coef: PositiveFloat = 0.2  # eps of both clips: the ratio's around 1; V's around V_old, in (normalised) rewards
    # one ratio per turn, the product over its tokens, is clipped; else one per token
    turn_level_clip: bool = not_with(*PER_TOKEN, default=False)
    kl_loss_coef: NonNegativeFloat = 0.01  # weight of the KL penalty to the reference
    mini_batch_size: PositiveInt = 16  # transcripts per optimiser step, all processes (one per episode and own seat)
    micro_batch_size: PositiveInt = 16  # transcripts per forward pass, in each process
    entropy_coef: NonNegativeFloat = 0.0  # weight of the mean entropy, in nats per token
    entropy_coef_end: NonNegativeFloat | None = needs("entropy_coef")  # entropy_coef nears it, linearly over the run
    value_loss_coef: NonNegativeFloat = 0.5  # weight of the critic's loss
    actor_learning_rate: NonNegativeFloat = 3e-3  # for the tiny default model; large ones take less: docs/models.md
    critic_learning_rate: NonNegativeFloat = 3e-3  # of critics and value heads
    cosine_lr_schedule: bool = True  # lower the learning rates to 0 along a cosine
    warmup_proportion: Fraction = 0.0  # share of the updates in which the learning rates first rise
    max_grad_norm: PositiveFloat = 0.5  # clip of the norm of each optimiser's gradient


# --- The default game (--env takes another one, --task a task) --------------------------------------------------------
# An Env plays one episode; truncated=True cuts it. utils.envs.Games plays B of them: `play` calls it in the place of
# TeamEnv below, which is for tasks (--task NAME or FILE.py). A task's functions and their arguments: docs/tasks.md.


class Env:
    """A game of guessing a secret number, uniform from 1 to 16, with Gymnasium's reset and step on text.

    A guess earns its expected worth, so that luck is not paid: half the probability that it is right, plus half its
    expected information as a share of 4 bits (see guess_value). Each guess after the first costs 1/6, and the sixth is
    the last. An answer that is not a number of one to three digits ends the game with -1.
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
        reward = guess_value(self.low, guess, self.high)  # (P(right) + expected bits / 4) / 2
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
    """An actor, a reference (pi_ref), a critic (a value head on the actor or on a critic model), two optimisers."""

    def __init__(self, i, initial, num_updates, args):
        self.tokenizer = initial.tokenizer  # initial: what the agent starts from, by models.load in main
        self.end_ids = initial.end_ids  # tokens that end an answer
        self.longest_prompt = initial.longest_prompt  # most tokens of a context that leaves room for max_new_tokens
        self.actor = initial.trainable_copy(f"agent_{i}_actor")  # all weights, or with --lora-rank new adapters
        own_reference = args.use_separate_reference_adapter
        self.reference = initial.frozen_copy(f"agent_{i}_reference") if own_reference else initial.policy
        self.critic = initial.trainable_critic(f"agent_{i}_critic") if args.use_separate_critic else None
        self.value_head = models.ValueHead(self.critic or self.actor, args)  # [n, D] to [n]; 0 at first
        self.optimizers = [
            models.adamw([self.actor], args.actor_learning_rate, args),
            models.adamw([self.value_head, self.critic], args.critic_learning_rate, args),  # skips a critic of None
        ]
        self.schedules = [models.lr_schedule(optimizer, num_updates, args) for optimizer in self.optimizers]
        self.state = {"std": 0.0}  # the last update's s, which scales A'; saved in checkpoints
        self.num_updates = num_updates


class TeamEnv:
    """Plays B episodes of a task with N agents. This one: in each turn all agents answer, then all are rewarded.

    Your own: --env FILE.py with a class TeamEnv that has this __init__, reset and step; its items are {"seed": int}. If
    observations[i] has a key b, agent i reads that chat (messages or a string) and answers in episode b; else it waits.
    An episode ends when no observations have it or step cuts it: do not pay it after that. `play` does not limit turns:
    keep to --num-turns. It cuts b where an agent has no room to answer: actions lack b from then on, earlier pay stays.
    Optional: `failed`, a set of episodes to learn nothing from. Example: agents that alternate, with opposite rewards:

        reset()                  -> [{b: chat}, {}]                                     agent 0 is to act
        step([{b: answer}, {}])  -> [{}, {b: chat}], [{b: 0.0}, {b: 0.0}], set()        agent 1 is to act
        step([{}, {b: answer}])  -> [{}, {}], [{b: 1.0}, {b: -1.0}], set()              the end
    """

    def __init__(self, task, items, args):
        self.task, self.items, self.args, self.turn = task, items, args, 0  # task: a Task of utils/tasks/task.py
        self.histories = [[[] for _ in range(args.num_agents)] for _ in items]  # [b][i]: chat, answer, chat ...

    def reset(self):
        """The first observations, N dicts {episode: chat}: what each agent reads before it acts."""
        agents = range(self.args.num_agents)
        return self.record([{b: self.task.formatters(item, i) for b, item in enumerate(self.items)} for i in agents])

    def record(self, texts):
        """Append N dicts {episode: chat or answer} to the histories; returns them."""
        for i, own_texts in enumerate(texts):
            for b, text in own_texts.items():
                self.histories[b][i].append(text)
        return texts

    def step(self, actions):
        """Play one turn, given the actions, N dicts {episode: answer}.

        Returns the next observations; the rewards, N dicts {episode: float}, also for agents that waited (missing: 0);
        and the set of episodes that it cuts (here none): this turn's rewards count, new chats are read, not answered.
        """
        self.turn += 1
        self.record(actions)
        episodes = [*actions[0]]  # those that go on, the same of all agents
        items = [self.items[b] for b in episodes]
        histories = [self.histories[b] for b in episodes]
        completions = [[action[b] for b in episodes] for action in actions]  # N lists, one per agent
        rewards = self.task.reward_func(*completions, items=items, histories=histories)  # N lists, the same for a team
        next_chats = [{} for _ in actions]
        if self.turn < self.args.num_turns:
            for b, *answers in zip(episodes, *completions):
                chats = self.task.external_transition(self.items[b], answers, history=self.histories[b])
                for own_chats, chat in zip(next_chats, chats or []):  # None: the episode ends
                    own_chats[b] = chat
        return self.record(next_chats), [dict(zip(episodes, own_rewards)) for own_rewards in rewards], set()


# --- Rollouts ---------------------------------------------------------------------------------------------------------


@dataclass
class Transcript:
    """The tokens that one agent read and wrote in one episode, in order."""

    ids: list = field(default_factory=list)
    turns: list = field(default_factory=list)  # 1, 2, ...: the turn in which the agent sampled the token; 0: it read it
    rewards: list = field(default_factory=list)  # on an answer's last token: rewards until its next answer; else 0
    answers: list = field(default_factory=list)  # the text of each turn in which it acted
    earned: dict = field(default_factory=dict)  # {turn: reward}, also of turns in which others act

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
    rewards: torch.Tensor  # [B, S] on an answer's last token: rewards until the next answer; else 0
    answers: list  # B lists of texts, one for each turn in which the agent acted
    earned: list  # B dicts {turn: reward}, also of turns in which others act; for metrics
    truncated: torch.Tensor  # [B] True where the episode was cut


@models.in_chunks_or_by_vllm  # splits contexts by --hf-generate-chunk-size, skips an empty list; or vLLM samples
@torch.no_grad()
def generate(agent, contexts, args, generator):
    """Continue each list of token ids; returns lists of sampled ids, with the end token of those that have ended."""
    ids, attention_mask = models.pad_left(contexts, agent)  # [contexts, S] each
    process_logits = models.logits_processors(agent, ids, args)  # --top-p, --top-k, --min-p ...
    sampled = [[] for _ in contexts]
    rows = torch.arange(len(contexts))  # contexts whose answer goes on
    cache = None
    for _ in range(args.max_new_tokens):
        out = agent.actor.next_token(ids, attention_mask, cache)  # with a cache it reads the last id alone
        logits = process_logits(ids, out.logits / args.temperature)  # [contexts, vocabulary]
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
    """Play one episode for each of B items, which may repeat; returns N Rollouts, in all of which row b is episode b.

    Example: a transcript at the start of turn 2, in a task that shows the other's answer; c is the reward of turn 1:

        ids      <user> prompt <assistant> own answer <end> <user> the other's answer <assistant>
        turns    0      0      0           1   1      1     0      0   0       0      0
        rewards  0      0      0           0   0      c     0      0   0       0      0
    """
    env = getattr(task, "TeamEnv", TeamEnv)(task, items, args)  # the task's own class, as games have, or the above
    transcripts = [[Transcript() for _ in items] for _ in agents]  # [i][b]; `own` below: those of one agent
    observations = env.reset()
    truncated = set()  # episodes that were cut: by env.step, or because an agent had no room to answer
    turn = 0
    with models.sampling(agents, args):  # hands vLLM the current weights, gathers sharded ones
        while any(observations):
            turn += 1
            for agent, own, observed in zip(agents, transcripts, observations):  # 1. They read
                for b, chat in observed.items():
                    # Messages go through the chat template, which adds the end token that the last answer may lack
                    own[b].extend(models.encode(chat, own[b].ids, agent))  # without what the model has no room for
                    if len(own[b].ids) > agent.longest_prompt:  # no room to answer; always so where ids were left out
                        truncated.add(b)  # for all agents, before anyone answers
            actions = []
            for agent, own, observed in zip(agents, transcripts, observations):  # 2. They answer
                episodes = [b for b in observed if b not in truncated]
                sampled = generate(agent, [own[b].ids for b in episodes], args, generator)
                texts = models.decode(sampled, agent, args)  # --skip-special-tokens
                for b, ids, text in zip(episodes, sampled, texts):
                    own[b].extend(ids, turn)
                    own[b].answers.append(text)
                actions.append(dict(zip(episodes, texts)))
            if not any(actions):  # no episode goes on
                break
            observations, rewards, cut = env.step(actions)
            for own, own_rewards in zip(transcripts, rewards):  # 3. They earn
                for b in own_rewards.keys() - truncated:
                    own[b].earned[turn] = own_rewards[b]  # also before its first answer
                    if own[b].answers:  # its last token ends its latest answer: it reads only right before it answers
                        own[b].rewards[-1] += own_rewards[b]
            truncated |= cut  # only now: this turn's rewards still count
    for b in getattr(env, "failed", ()):  # a game of --env raised an error: nothing is learned from its episode
        for own in transcripts:
            own[b] = Transcript()
    return [Rollout(**models.pad_right(own, agent, truncated)) for agent, own in zip(agents, transcripts)]


# --- Learning ---------------------------------------------------------------------------------------------------------


def sum_by(index, x, last):
    """The sums of x [B, S] by index [B, S], [B, last + 1]: entry [b, k] is the sum of x[b] where index[b] == k."""
    return x.new_zeros(len(x), last + 1).scatter_add(1, index, x)


def policy_forward(policy, rollout, places, rows, args):
    """log pi(a_t|h_t) and the entropy of pi(.|h_t), [M, S], and the hidden states they come from, [n, D].

    `places` [B, S] is True where they are wanted, n times in the M rows; elsewhere the first two are 0.
    """
    places = places[rows]
    # out.logits [n, vocabulary] are logits[:, :-1][places[:, 1:]] of a full pass: column t - 1 predicts token t. With
    # the padding on the right a causal model needs no attention mask
    out = policy.read(rollout.ids[rows], before=places)
    pi = models.Categorical(out.logits, args.temperature)  # n distributions
    logprobs = pi.log_prob(rollout.ids[rows][places])
    entropy = pi.entropy() if args.entropy_coef else pi.entropy().detach()  # without the bonus a metric only
    return models.unflatten(logprobs, places), models.unflatten(entropy, places), out.hidden_states


def critic_forward(agent, rollout, places, rows, hidden_states, m):
    """V(h_t) = critic(h_t) + m, [M, S]; m [B, S] alone where not `places`. hidden_states [n, D] are the actor's."""
    places = places[rows]
    if agent.critic is not None:
        hidden_states = agent.critic.read(rollout.ids[rows], before=places).hidden_states
    return models.unflatten(agent.value_head(hidden_states), places) + m[rows]


def gae(rewards, values, mask, gamma, gae_lambda):
    """Generalised advantage estimation along each row; columns with mask 0 are skipped, and V = 0 after the last.

    All tensors are [B, S]. Returns (advantages, returns), with returns = A + V the critic's targets; 0 where mask is 0.
    """
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * gae_lambda * next_advantage
        next_value = torch.where(mask[:, t] > 0, values[:, t], next_value)  # skips where mask is 0
        next_advantage = torch.where(mask[:, t] > 0, advantages[:, t], next_advantage)
    return advantages * mask, (advantages + values) * mask


def mean_rewards_to_go(rewards, turns, last_turn, is_cut_end, args):
    """m [B, S], the part of V that is not the critic's: m_k on the tokens of turn k, m_after at a cut end; else unused.

    m_k: the mean, over rows (a token's own too) in which the agent acts in turn k, of what it earns from turn k on.
    m_after stands for what an episode that was cut, k the agent's last turn, would still have earned: the mean, over
    rows in which it acts in turn k and again later, of what its actions after turn k earn; m_k if there are none.
    With --no-turn-baseline both are one mean over all turns and rows. A row is an episode, in self-play a seat in one.
    """
    acted = (sum_by(turns, (turns > 0).float(), last_turn) > 0).float()  # [B, T + 1] 1 in column k: acted in turn k
    rewards_to_go = sum_by(turns, rewards, last_turn).flip(1).cumsum(1).flip(1)  # [B, T + 1] earned from turn k on
    if not args.turn_baseline:
        return distributed.masked_mean(rewards_to_go, acted).expand_as(turns)
    m_k = distributed.masked_mean(rewards_to_go, acted, dim=0)  # [T + 1] m_k of every k; 0 is no turn
    own_last_turn = turns.amax(1, keepdim=True)  # [B, 1]
    acts_again = acted.scatter(1, own_last_turn, 0.0)  # acted in turn k, which is not the row's last one
    rewards_after = pad(rewards_to_go[:, 1:], (0, 1))  # [B, T + 1] earned from its first action after turn k on
    m_after = distributed.masked_mean(rewards_after, acts_again, dim=0)
    m_after = m_after.where(distributed.sum(acts_again.sum(0)) > 0, m_k)  # if it never acts again, in any process
    return torch.where(is_cut_end, m_after[own_last_turn], m_k[turns])


@timed
def learn(agent, rollout, args, generator):
    """One update of an agent from its rollout; returns metrics. This function is the algorithm."""
    mask = rollout.mask.float()  # [B, S] 1 on sampled tokens; elsewhere 0, as are log pi and H, so a ratio is 1
    lengths = rollout.attention_mask.sum(1)  # [B] rows of like length are read together: less padding
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last_column = mask.shape[1] - 1  # padding in all rows

    # 1. Actions: tokens or turns. The r, V, A and R of an action stand in the column of its last token
    last_turn = distributed.max(rollout.turns)  # T, of all processes
    if args.action_granularity == "token" or (args.action_granularity == "auto" and last_turn < 2):
        action_column = columns  # [B, S] for each sampled token, the column of its action
        action_mask = mask  # [B, S] 1 where an action stands
        value_weights = mask  # [B, S] how much V before a token counts in V of its action
    else:
        is_first = mask * (rollout.turns != pad(rollout.turns[:, :-1], (1, 0)))  # [B, S] 1 on the first token of a turn
        action_mask = mask * (rollout.turns != pad(rollout.turns[:, 1:], (0, 1)))  # 1 on its last
        turn_column = sum_by(rollout.turns, columns * action_mask.long(), last_turn)  # [B, T + 1] of its last token
        action_column = turn_column.gather(1, rollout.turns)  # 0 2 2 0 5 5 0 for turns 0 3 3 0 4 4 0
        tokens_of_turn = sum_by(rollout.turns, mask, last_turn).gather(1, rollout.turns).clamp(min=1)
        reductions = {"first_value": is_first, "mean": mask / tokens_of_turn, "final_value": action_mask}
        value_weights = reductions[args.turn_value_reduction]

    # 2. Cut episodes in which the agent acted: V after all it read and wrote stands at the cut end, the first padding
    is_cut_end = (rollout.truncated & rollout.mask.any(1))[:, None] & (columns == lengths[:, None])  # [B, S]
    places = rollout.mask | is_cut_end  # [B, S] where step 4 computes V: at sampled tokens and cut ends

    # 3. Rewards r_t, and m_k, the mean of what is still earned from turn k on. The critic learns what is left
    rewards = rollout.rewards
    if args.reward_normalization:
        _, std = distributed.mean_std(rewards.sum(1), mask.amax(1))  # of episodes in which the agent acted
        rewards = rewards / (std.where(std > 1e-6, 1.0) + args.reward_norm_eps)  # 1 where all earn the same
    m = mean_rewards_to_go(rewards, rollout.turns, last_turn, is_cut_end, args)  # [B, S] V = critic + m; PPO has m = 0

    # 4. Log-probabilities and values before the update, without gradients: actor, critic model and, for a KL loss, the
    #    reference read the rollout once. With --top-p or vLLM these are not the sampler's; nothing corrects for that
    old_logprobs = torch.zeros_like(mask)  # log pi_old
    ref_logprobs = torch.zeros_like(mask)  # log pi_ref
    old_token_values = torch.zeros_like(mask)
    with torch.no_grad():  # the actor reads cut ends too: a value head on it needs its hidden states there
        for rows in lengths.argsort().split(args.micro_batch_size):
            old_logprobs[rows], _, hidden_states = policy_forward(agent.actor, rollout, places, rows, args)
            if args.kl_loss_coef > 0:
                ref_logprobs[rows], _, _ = policy_forward(agent.reference, rollout, rollout.mask, rows, args)
            old_token_values[rows] = critic_forward(agent, rollout, places, rows, hidden_states, m)
    old_logprobs = old_logprobs.where(rollout.mask, 0.0)  # at a cut end no token was sampled: only V is wanted
    old_values = sum_by(action_column, old_token_values * value_weights, last_column)  # [B, S] of actions; else 0
    # gae takes V = 0 after a row's last action, so in a cut row that action also earns gamma V_old at the cut end
    last_action = (columns * rollout.mask).amax(1, keepdim=True)  # [B, 1] its column
    cut_values = (old_token_values * is_cut_end).sum(1, keepdim=True)  # [B, 1] V_old at the cut end; 0 in other rows
    cut_rewards = args.gamma * cut_values * (columns == last_action)  # [B, S]

    # 5. Advantages A_t, and returns R_t, the critic's targets, in actions' columns. Another algorithm replaces gae;
    #    without a critic: returns = old_values, --value-loss-coef 0, --no-use-separate-critic (no critic model runs)
    advantages, returns = gae(rewards + cut_rewards, old_values, action_mask, args.gamma, args.gae_lambda)
    if args.advantage_normalization:
        mean, std = distributed.mean_std(advantages, action_mask)
        agent.state["std"] = max(float(std), 0.98 * agent.state["std"])  # s, slow to fall: a tiny std amplifies noise
        advantages = (advantages - mean) / (agent.state["std"] + 1e-8)  # A'
    advantages = advantages.gather(1, action_column)  # [B, S] each sampled token has its action's; masks hide the rest

    # 6. Optimiser steps: in each epoch actor and critic model read the rollout again, with gradients
    entropy_coef = args.entropy_coef
    if args.entropy_coef_end is not None:  # last_epoch: updates done
        entropy_coef += (args.entropy_coef_end - entropy_coef) * agent.schedules[0].last_epoch / agent.num_updates
    ratio_mask = action_mask if args.turn_level_clip else mask  # [B, S] 1 on what has a ratio: turns, or tokens
    losses = []  # of micro-batches; those of a mini-batch add up to its loss
    for _ in range(args.update_epochs):
        order = torch.randperm(len(mask), generator=generator, device=mask.device)
        minibatches = order.split(args.mini_batch_size // distributed.world_size())
        for minibatch in minibatches:
            # Gradients are averaged over processes: a sum / the mean count then becomes the total sum / the total count
            num_tokens = distributed.mean(mask[minibatch].sum()).clamp(min=1e-6)  # with no token the loss is 0
            num_actions = distributed.mean(action_mask[minibatch].sum()).clamp(min=1e-6)
            num_ratios = num_actions if args.turn_level_clip else num_tokens
            for rows in minibatch[lengths[minibatch].argsort()].split(args.micro_batch_size):
                logprobs, entropy, hidden_states = policy_forward(agent.actor, rollout, rollout.mask, rows, args)
                log_ratio = logprobs - old_logprobs[rows]  # log rho; both are 0 where no token was sampled
                if args.turn_level_clip:
                    log_ratio = sum_by(action_column[rows], log_ratio, last_column)
                ratio = log_ratio.clamp(max=80).exp()  # exp(89) is inf, whose gradient is NaN even where it is clipped
                clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                surrogate = torch.max(-advantages[rows] * ratio, -advantages[rows] * clipped_ratio)
                policy_loss = (surrogate * ratio_mask[rows]).sum() / num_ratios
                clip_fraction = ((ratio != clipped_ratio) * ratio_mask[rows]).sum() / num_ratios
                kl_loss = torch.zeros_like(policy_loss)
                if args.kl_loss_coef > 0:
                    d = ref_logprobs[rows] - logprobs
                    kl_loss = ((d.exp() - d - 1) * mask[rows]).sum() / num_tokens
                mean_entropy = (entropy * mask[rows]).sum() / num_tokens

                token_values = critic_forward(agent, rollout, rollout.mask, rows, hidden_states, m)
                values = sum_by(action_column[rows], token_values * value_weights[rows], last_column)  # of actions
                change = (values - old_values[rows]).clamp(-args.clip_coef, args.clip_coef)
                clipped_values = old_values[rows] + change  # V_clip
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

    # 7. Metrics: the five in `losses` are means over optimiser steps, grad_norm is of the last, others of the rollout
    losses = torch.stack(losses).sum(0) / (args.update_epochs * len(minibatches))
    policy_loss, value_loss, mean_entropy, kl_loss, clip_fraction = losses
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": mean_entropy,
        "clip_fraction": clip_fraction,
        "grad_norm": grad_norms[0],  # the actor's, before it is clipped
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
    """An episode's summed rewards, a mean over agents and held-out episodes with an answer; always the same seed."""
    rollouts = play(agents, task, distributed.share(items), args, distributed.generator(args.seed))
    return tasks.mean_reward(rollouts)


def main(args=None, task=None, model=None, tokenizer=None, train_dataset=None, eval_dataset=None):
    """Train a team; returns its agents and its Run. Raises UserError for what the user can fix.

    From Python, `task` (or an environment), `model`, `tokenizer` and both datasets may be objects, in place of flags.
    """
    args = args or Args()
    distributed.start(args)
    initials = models.load(args, model, tokenizer)  # per agent: its tokenizer; its frozen model is loaded when used
    task = tasks.load_task(task, args, default=sys.modules[__name__])  # default: this file's Env
    train_items, eval_items = tasks.load_items(task, initials, args, train_dataset, eval_dataset)  # --long-prompts
    batches = tasks.shuffled_batches(train_items, args)  # [update]: its items, before num_generations repeats them
    run = Run(args, __file__, task, batches)

    set_seed(args.seed)
    generator = distributed.generator(args.seed)  # another one in each process
    agents = [Agent(i, initial, len(batches), args) for i, initial in enumerate(initials)]
    players = agents * (args.num_agents // len(agents))  # one per seat; with --self-play the one agent in all
    opponents = make_opponents(agents[0], initials[0], task, args)  # None: no opponents, the players take all seats

    with run.start(agents, generator):  # resumes a run; saves it by --save-interval and at the end
        for update in run.updates():
            for agent in agents:
                if update and args.reference_update_interval and update % args.reference_update_interval == 0:
                    agent.reference.copy_from(agent.actor)
            items = [item for item in distributed.share(batches[update]) for _ in range(args.num_generations)]
            seats = opponents.seats(update) if opponents else players
            rollouts = play(seats, task, items, args, generator)
            own_rollouts = models.join_rollouts(agents, seats, rollouts)  # per agent: the rows of all its seats
            metrics = [learn(agent, rollout, args, generator) for agent, rollout in zip(agents, own_rollouts)]
            if opponents:
                metrics[0] |= opponents.metrics(update, rollouts)
            eval_reward = evaluate(players, task, eval_items, args) if run.is_due(update, args.eval_interval) else None
            run.log(items, rollouts, metrics, eval_reward, seats=seats)  # means over processes
    return agents, run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
