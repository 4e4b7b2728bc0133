"""Multi-Agent Actor-Critic (MAAC) for a team of language models, in one file.

Each agent has its own actor. The team has one critic: a copy of agent 0's model (with --lora-rank: adapters on it), or
--critic-model-name-or-path. The critic reads h_t, all that agents have read and written before they answer in turn t;
agent i reads its own part h_t^i and gives answer a_t^i. log pi sums over an answer's tokens. `learn` computes in order:

    c_t     = mean over agents of the reward that each gets in turn t         (0 in a zero-sum game: take iac_llm.py)
    e_t     = c_t / (s + reward_norm_eps)              s = max(std of sum_t c_t over episodes, 0.98 * last s)
    m_t     = mean of sum_{j >= t} e_j over the rollout's episodes that have a turn t (undiscounted, without KL)
    V(h_t)  = critic(h_t) + m_t                        m_t is not trained: the critic learns what is left
    r_t     = e_t - kl_coef * sum_{i acts} (log pi_old(a_t^i|h_t^i) - log pi_ref(a_t^i|h_t^i))  old: before the update
    A_t     = r_t + gamma V_old(h_{t+1}) - V_old(h_t)  the team's TD error; V_old = 0 after the last turn or a cut
    A'_t    = (A_t - mean) / (std + advantage_norm_eps), both over the rollout
    actor i   maximises  (mean over turns of log pi(a_t^i|h_t^i) A'_t) + entropy_coef * (mean over its tokens of H)
    critic    minimises  mean over turns of (V(h_t) - (r_t + gamma V_old(h_{t+1})))^2

Means over turns are over a mini-batch's pairs (episode, turn) in which any agent acts; an agent that waits adds 0.
H is over agent i's sampled tokens. pi_old, V_old, m, r, A' are computed once per rollout: optimiser steps after the
first are off-policy. pi_ref is the initial model. As on CoMLRL's page the policy loss has no ratio, no clip (PPO has
both); s, m_t and the KL penalty are additions. Without normalisation e_t = c_t and A' = A.

    python maac_llm.py --num-agents 2
    torchrun --nproc-per-node 2 maac_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --lora-rank 16

log pi and H use logits / temperature; --top-p, --top-k, --min-p and penalties act in sampling only. Models stay in eval
mode, but --lora-dropout is on in passes with gradients. torchrun splits the episodes; means and gradients are over all.
Shapes: N agents; B episodes (rows) per process; S token columns, padded on the right; T last turn. A forward pass has M
of the B rows, n sampled tokens in them. Sources: CoLLM-CC (arXiv 2601.21972), CoMLRL's Multi-Agent Actor-Critic page.
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
from utils.cli import Fraction, command_line, flags, needs
from utils.clock import timed
from utils.run import FolderArgs, Run
from utils.tasks.made_text import posts
from utils.tasks.tldr import pair_reward


@flags
class Args(tasks.TaskArgs, FolderArgs, models.ModelArgs, models.CriticModelArgs, models.SamplingArgs):
    """Flags; the comments are the help. needs("x"): an error if set while x is off. The base classes have more."""

    seed: NonNegativeInt = 1  # same seed, same number of processes: same run (on a GPU only with --deterministic)
    model: tuple[str, ...] = ("utils/tiny_lm",)  # folder, hub name or GGUF of initial models: one for all, or one each
    num_agents: PositiveInt = 2  # agents of the team, or players of --env
    lora_rank: NonNegativeInt = 0  # LoRA rank of adapters on a base that agents share; 0: full fine-tuning
    num_train_epochs: PositiveInt = 3  # passes over the training set
    max_episodes: PositiveInt | None = None  # stop after the update that reaches this many, all processes together
    eval_interval: NonNegativeInt = 12  # updates between evaluations, also after the first and last; 0: none

    # Rollouts
    rollout_buffer_size: PositiveInt = 32  # episodes per update, all processes together
    num_generations: PositiveInt = 1  # episodes per item, in neighbouring rows; not compared as in GRPO
    num_turns: PositiveInt = 1  # most turns of an episode (your own TeamEnv must keep to it); the default task has one
    max_new_tokens: PositiveInt = 72  # longest answer, in tokens
    do_sample: bool = True  # --no-do-sample: greedy answers
    temperature: PositiveFloat = 1.0  # logits are divided by it: to sample, and in log pi and H

    # Advantages
    gamma: Fraction = 1.0  # discount factor per turn
    reward_normalization: bool = True  # divide rewards by the deviation s of what episodes earn
    reward_norm_eps: PositiveFloat = needs("reward_normalization", default=1e-3)  # added to s
    kl_coef: NonNegativeFloat = 0.03  # weight of the KL penalty in r_t, in normalised rewards per nat
    advantage_normalization: bool = True  # standardise advantages over the rollout
    advantage_norm_eps: PositiveFloat = needs("advantage_normalization", default=0.3)  # added to std: damps small A

    # Optimisation
    update_epochs: PositiveInt = 1  # passes over a rollout
    mini_batch_size: PositiveInt = 16  # episodes per optimiser step, all processes together
    micro_batch_size: PositiveInt = 16  # episodes per forward pass, in each process
    entropy_coef: NonNegativeFloat = 0.0  # weight of the mean entropy, in nats per token
    actor_learning_rate: NonNegativeFloat = 5e-4  # for the tiny default model; large ones take less: docs/models.md
    critic_learning_rate: NonNegativeFloat = 1e-3  # of the critic and its value head
    anneal_lr: bool = True  # lower the learning rates to 0 over the second half of the run
    max_grad_norm: PositiveFloat = 0.5  # clip of the norm of each optimiser's gradient


# --- The default task (--task takes another one) ----------------------------------------------------------------------
# A task is these functions. It needs reward_func, and train_dataset or --dataset; without formatters an item's "prompt"
# is read. TeamEnv calls the last three through utils/tasks/task.py: each gets what its signature names (docs/tasks.md).


def train_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"train {seed}"))


def eval_dataset(size, seed):
    return datasets.Dataset.from_list(posts(size, f"eval {seed}"))


def formatters(item, agent):
    """An agent's first prompt, a chat: agent 0, 1, 2, ... is to write about 16, 32, 64, ... words."""
    request = f"Summarise this post in about {16 * 2**agent} words."
    return [{"role": "user", "content": f"{item['prompt']}\n\n{request}"}]


def reward_func(*completions, items):
    """completions[i][b] is agent i's answer to items[b]. Returns rewards[b] of the team, or rewards[i][b] of agent i.

    For two agents with opposite rewards return [r, [-x for x in r]]. Here the team gets the mean over pairs of agents
    i and i + 1 of pair_reward: 0 to 3 points for lengths, different words, transition words and a common subject.
    """
    rewards = []
    for item, *texts in zip(items, *completions):
        if len(texts) == 1:  # a single writer is compared with the post
            texts.append(item["prompt"])
        rewards.append(fmean(pair_reward(short, long) for short, long in zip(texts, texts[1:])))
    return rewards


def external_transition(item, agent_completions):
    """Returns an item's N next prompts, or None to end its episode, as here. Of a prompt only what is new is read."""
    return None


# --- Agents and their environment -------------------------------------------------------------------------------------


class Agent:
    """An actor, the frozen model that it starts from, and an optimiser."""

    def __init__(self, i, initial, num_updates, args):
        self.tokenizer = initial.tokenizer  # initial: what the agent starts from, by models.load in main
        self.end_ids = initial.end_ids  # tokens that end an answer
        self.longest_prompt = initial.longest_prompt  # most tokens of a context that leaves room for max_new_tokens
        self.reference = initial.policy  # pi_ref, frozen; agents that start from one model share it
        self.actor = initial.trainable_copy(f"agent_{i}_actor")  # all weights, or with --lora-rank new adapters
        self.optimizer = models.adamw([self.actor], args.actor_learning_rate, args)
        self.schedule = models.lr_schedule(self.optimizer, num_updates, args)


class Critic:
    """The team's critic (`critic`, a model, and its value head), its optimiser, and s of the reward normalisation."""

    def __init__(self, initial, num_updates, args):
        self.critic = initial.trainable_critic("critic")  # from agent 0's model or --critic-model-name-or-path
        self.value_head = models.ValueHead(self.critic, args)  # hidden states to values, at first all 0
        self.optimizer = models.adamw([self.value_head, self.critic], args.critic_learning_rate, args)
        self.schedule = models.lr_schedule(self.optimizer, num_updates, args)
        self.state = {"s": 0.0}  # s of the last update; checkpoints have this dict


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
    rewards: torch.Tensor  # [B, S] on an answer's last token: rewards until the next answer; else 0; not read by learn
    answers: list  # B lists of texts, one for each turn in which the agent acted
    earned: list  # B dicts {turn: reward}, also of turns in which others act; learn reads these
    truncated: torch.Tensor  # [B] True where the episode was cut; unused here: learn takes a cut for an end


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


def policy_forward(policy, rollout, rows, args):
    """log pi and the entropy H of each sampled token, both [M, S], 0 in all other columns."""
    mask = rollout.mask[rows]
    # The rows are read up to the last sampled token; the output layer computes only logits[:, :-1][mask[:, 1:]], which
    # predict the n sampled tokens. Padding is on the right, so a causal model needs no attention mask
    out = policy.read(rollout.ids[rows], before=mask)
    pi = models.Categorical(out.logits, args.temperature)  # n distributions
    logprobs = pi.log_prob(rollout.ids[rows][mask])
    entropy = pi.entropy() if args.entropy_coef else pi.entropy().detach()  # without the bonus a metric only
    return models.unflatten(logprobs, mask), models.unflatten(entropy, mask)


def critic_forward(critic, joint, rows, m):
    """V(h_t) = critic(h_t) + m_t in column t, [M, T + 1]; m_t alone in turns in which no agent acts. m is [T + 1].

    joint: ids, attention_mask and marks [B, tokens]. A row is, turn by turn, what the acting agents read, an end token,
    and what they write, as the critic's tokens. critic(h_t): the value head's output just before turn t's end token.
    """
    marks = joint.marks[rows]  # [M, tokens] t on the end token of turn t, 0 elsewhere
    out = critic.critic.read(joint.ids[rows], before=marks > 0)
    values = models.unflatten(critic.value_head(out.hidden_states), marks > 0)  # critic(h_t) where marks has t
    return sum_by(marks, values, len(m) - 1) + m


@timed
def learn(agents, critic, rollouts, args, generator):
    """One update of a team; returns a list of the agents' metrics, and the critic's. This function is the algorithm."""
    last_turn = distributed.max(torch.cat([each.turns for each in rollouts], 1))  # T, the last in which any agent acts
    # [B, T + 1] 1 in column t where any agent acted in turn t
    acted = sum(sum_by(each.turns, each.mask.float(), last_turn) for each in rollouts).clamp(max=1)

    # 1. Rewards: c_t, the mean over agents, divided by s, the standard deviation of an episode's sum
    rewards = sum(models.earned_by_turn(each, last_turn) for each in rollouts) / len(agents)  # [B, T + 1] c_t
    if args.reward_normalization:
        _, std = distributed.mean_std(rewards.sum(1), acted.amax(1))  # of episodes in which any agent acted
        critic.state["s"] = max(float(std), 0.98 * critic.state["s"])  # slow to fall: a tiny std would amplify noise
        rewards = rewards / (critic.state["s"] + args.reward_norm_eps)  # from here on e_t

    # 2. m_t of V(h_t) = critic(h_t) + m_t: a mean over the rollout, own episode included, not trained
    rewards_to_go = rewards.flip(1).cumsum(1).flip(1)  # [B, T + 1] sum of e_j from each turn on
    m = distributed.masked_mean(rewards_to_go, acted, dim=0)  # [T + 1] m_t in column t, 0 in column 0

    # 3. pi_old, pi_ref, r_t and V_old: each actor, each reference and the critic read the rollout, without gradients
    metrics = []  # a dict per agent, to which step 6 adds
    old_values = torch.zeros_like(rewards)  # V_old
    turn_rewards = rewards  # e_t, from which the loop subtracts each agent's KL penalty: then r_t
    with torch.no_grad():
        for agent, rollout in zip(agents, rollouts):
            mask = rollout.mask.float()  # [B, S] 1 on tokens that the agent sampled
            old_logprobs = torch.zeros_like(mask)  # log pi_old; for a ratio of your own keep each agent's
            ref_logprobs = torch.zeros_like(mask)  # log pi_ref
            for rows in rollout.attention_mask.sum(1).argsort().split(args.micro_batch_size):  # by length: less padding
                old_logprobs[rows], _ = policy_forward(agent.actor, rollout, rows, args)
                ref_logprobs[rows], _ = policy_forward(agent.reference, rollout, rows, args)
            kl = old_logprobs - ref_logprobs
            turn_rewards = turn_rewards - args.kl_coef * sum_by(rollout.turns, kl, last_turn)
            ref_logprob = distributed.masked_mean(ref_logprobs, mask)
            metrics.append({"kl": distributed.masked_mean(kl, mask), "reference_logprob": ref_logprob})
        # The texts that the critic reads (see critic_forward): {} and {} are the number of an acting agent and what it
        # reads or writes in that turn. If the critic has no room for all before the last answers, the run ends
        joint = models.join_transcripts(agents, rollouts, critic, "Agent {} reads:\n{}\n\n", "Agent {} writes:\n{}\n\n")
        for rows in joint.attention_mask.sum(1).argsort().split(args.micro_batch_size):
            old_values[rows] = critic_forward(critic, joint, rows, m) * acted[rows]  # 0 after an episode's last turn

    # 4. Advantages. Another algorithm puts its own here; num_generations neighbouring rows are of one item
    next_values = pad(old_values[:, 1:], (0, 1))  # V_old(h_{t+1}) in column t, 0 after the last turn
    returns = (turn_rewards + args.gamma * next_values) * acted  # the critic's targets
    advantages = returns - old_values  # A_t
    if args.advantage_normalization:
        mean, std = distributed.mean_std(advantages, acted)
        advantages = (advantages - mean) / (std + args.advantage_norm_eps)  # A'_t; not 0 elsewhere: the loss masks that

    # 5. Optimiser steps: in each epoch the actors and the critic read the rollout again, with gradients
    losses, value_losses = [], []  # of micro-batches; losses has N entries for each, one per agent
    for _ in range(args.update_epochs):
        order = torch.randperm(len(acted), generator=generator, device=acted.device)
        minibatches = order.split(args.mini_batch_size // distributed.world_size())
        for minibatch in minibatches:
            # Gradients are averaged over processes: a sum / the mean count then becomes the total sum / the total count
            turn_count = distributed.mean(acted[minibatch].sum()).clamp(min=1e-6)  # (episode, turn) pairs; 0: no loss
            token_counts = [distributed.mean(each.mask[minibatch].float().sum()).clamp(min=1e-6) for each in rollouts]
            for rows in minibatch[joint.attention_mask[minibatch].sum(1).argsort()].split(args.micro_batch_size):
                for agent, rollout, token_count in zip(agents, rollouts, token_counts):
                    logprobs, entropy = policy_forward(agent.actor, rollout, rows, args)
                    answer_logprobs = sum_by(rollout.turns[rows], logprobs, last_turn)  # log pi(a_t^i|h_t^i), or 0
                    policy_loss = -(answer_logprobs * advantages[rows] * acted[rows]).sum() / turn_count
                    mean_entropy = entropy.sum() / token_count
                    loss = policy_loss - args.entropy_coef * mean_entropy
                    loss.backward()  # gradients of micro-batches add up
                    losses.append(torch.stack([policy_loss, mean_entropy]).detach())
                values = critic_forward(critic, joint, rows, m)
                value_loss = ((values - returns[rows]) ** 2 * acted[rows]).sum() / turn_count
                value_loss.backward()
                value_losses.append(value_loss.detach())

            grad_norms = []
            for learner in *agents, critic:
                grad_norms.append(distributed.average_and_clip_gradients(learner.optimizer, args.max_grad_norm))
                learner.optimizer.step()
                learner.optimizer.zero_grad()
    for learner in *agents, critic:
        learner.schedule.step()

    # 6. Metrics: losses and entropy are means over optimiser steps, grad_norm is of the last, the others of the rollout
    num_steps = args.update_epochs * len(minibatches)
    losses = torch.stack(losses).view(-1, len(agents), 2).sum(0) / num_steps  # [N, 2]: policy loss and entropy
    for agent_metrics, (policy_loss, mean_entropy), grad_norm in zip(metrics, losses, grad_norms):  # not the critic's
        agent_metrics |= {"policy_loss": policy_loss, "entropy": mean_entropy, "grad_norm": grad_norm}
    return metrics, {
        "value_loss": sum(value_losses) / num_steps,
        "grad_norm": grad_norms[-1],
        "explained_variance": distributed.explained_variance(returns, old_values, acted),
    }


# --- main -------------------------------------------------------------------------------------------------------------


@timed
def evaluate(agents, task, items, args):
    """An episode's summed rewards, a mean over agents and held-out episodes with an answer; always the same seed."""
    rollouts = play(agents, task, distributed.share(items), args, distributed.generator(args.seed))
    return tasks.mean_reward(rollouts)


def main(args=None, task=None, model=None, tokenizer=None, train_dataset=None, eval_dataset=None):
    """Train a team; returns its agents followed by the critic, and its Run. Raises UserError for what the user can fix.

    From Python, `task` (or an environment), `model`, `tokenizer` and both datasets may be objects, in place of flags.
    """
    args = args or Args()
    distributed.start(args)
    initials = models.load(args, model, tokenizer)  # per agent: its tokenizer; its frozen model is loaded when used
    task = tasks.load_task(task, args, default=sys.modules[__name__])  # the functions in this file
    train_items, eval_items = tasks.load_items(task, initials, args, train_dataset, eval_dataset)  # --long-prompts
    batches = tasks.shuffled_batches(train_items, args)  # [update]: its items, before num_generations repeats them
    run = Run(args, __file__, task, batches)

    set_seed(args.seed)
    generator = distributed.generator(args.seed)  # another one in each process
    agents = [Agent(i, initial, len(batches), args) for i, initial in enumerate(initials)]
    critic = Critic(initials[0], len(batches), args)

    with run.start([*agents, critic], generator):  # resumes a run; saves it by --save-interval and at the end
        for update in run.updates():
            items = [item for item in distributed.share(batches[update]) for _ in range(args.num_generations)]
            rollouts = play(agents, task, items, args, generator)
            metrics, critic_metrics = learn(agents, critic, rollouts, args, generator)
            eval_reward = evaluate(agents, task, eval_items, args) if run.is_due(update, args.eval_interval) else None
            run.log(items, rollouts, metrics, eval_reward, critic_metrics)  # means over processes
    return [*agents, critic], run


if __name__ == "__main__":
    command_line(main, Args, __doc__)
