"""The mean gradient of each script's loss is the exact policy gradient of a game that is small enough to enumerate.

Two agents, a GPT-2 of 16 tokens each, answer with two tokens; none of them ends a response. The expected reward J of an
episode is a sum over all 16^4 joint responses of a turn, which autograd differentiates. A second turn begins in one of
three states that the joint response leads to, and prompts and rewards depend on no more of the past, so that the sum
over 16^8 joint responses is two sums over 16^4. With gamma 1 the gradient of J by agent i's parameters is

    E[ sum_t grad log pi(a_t|h_t) A_t ]

for lambda 1 and any V(h_t) that does not know a_t, and for any lambda with the true V(h_t) = E[ rewards from t on | h_t ],
an expectation over the other agent and the future. A loss divides its sum over an episode by the episode's number of
actions or tokens, which is a constant here. Sampling, rewards, masks, advantages, mini-batches and losses are the
scripts' own; only the critic's values are replaced.
"""

import contextlib
import copy
import itertools
from types import SimpleNamespace

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import iac_llm
import ippo_llm
import ppo_llm
from utils import adapters

NUM_TOKENS = 16
NUM_AGENTS = 2
LENGTH = 2  # tokens of a response
NUM_RESPONSES = NUM_TOKENS**LENGTH
FIRST_STATES = [0, 1]  # one for each item
NEXT_STATES = [2, 3, 4]
STATES = FIRST_STATES + NEXT_STATES
SEED = 0
EPISODES = 8192
MINI_BATCH = 128
LEAST_COSINE = 0.99


# --- The game ---------------------------------------------------------------------------------------------------------


def build_tokenizer():
    """Fifteen words of a letter each and one for padding, which is not read; no end token."""
    vocabulary = {word: k for k, word in enumerate("_abcdefghijklmno")}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="_")


def build_model():
    """A random GPT-2 of one layer, whose policy is far from uniform."""
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=NUM_TOKENS,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_inner=16,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


class Game:
    """A task of two agents, whose prompts and joint reward depend on the state, and the next state on the responses.

    A response's row is 16 times its first token plus its second. `rewards` is [S, 256, 256], `next_states` [256, 256].
    """

    def __init__(self, tokenizer):
        generator = torch.Generator().manual_seed(SEED)
        self.prompts = []  # of each state, one for each agent
        for state in STATES:
            lengths = [1 + (state + agent) % 4 for agent in range(NUM_AGENTS)]
            ids = [torch.randint(1, NUM_TOKENS, (length,), generator=generator) for length in lengths]
            self.prompts.append(tokenizer.batch_decode(ids))

        tables = torch.zeros(len(STATES), *[NUM_TOKENS] * 4, dtype=torch.float64)
        for first, second in itertools.combinations_with_replacement(range(1, 5), 2):
            shape = [len(STATES)] + [1] * 4  # what a token earns by itself, and half as much with each of the others
            shape[first] = NUM_TOKENS
            shape[second] = NUM_TOKENS
            weight = 1.0 if first == second else 0.5
            tables = tables + weight * torch.randn(shape, generator=generator, dtype=torch.float64)
        rows = torch.arange(NUM_RESPONSES)
        next_states = NEXT_STATES[0] + (rows[:, None] + rows) % len(NEXT_STATES)

        responses = torch.cartesian_prod(*[torch.arange(NUM_TOKENS)] * LENGTH)
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        self.row_of = {text: row for row, text in enumerate(texts)}
        rows = torch.tensor([self.row_of[text] for text in texts])  # what reads alike earns alike
        self.rewards = tables.view(len(STATES), NUM_RESPONSES, NUM_RESPONSES)[:, rows][:, :, rows]
        self.next_states = next_states[rows][:, rows]

    def train_dataset(self, size, seed):
        return datasets.Dataset.from_dict({"state": [k % len(FIRST_STATES) for k in range(size)]})

    def formatters(self, item, agent):
        return self.prompts[item["state"]][agent]

    def reward_func(self, *completions, items, turns, turn):
        rewards = []
        for k, (item, texts) in enumerate(zip(items, zip(*completions))):
            state = item["state"] if turn == 0 else self.next_state([history[k][0] for history in turns])
            first, second = [self.row_of[text] for text in texts]
            rewards.append(self.rewards[state, first, second])
        return rewards

    def external_transition(self, agent_completions):
        return self.prompts[self.next_state(agent_completions)]

    def next_state(self, texts):
        first, second = [self.row_of[text] for text in texts]
        return int(self.next_states[first, second])

    def state_of(self, prompt, agent):
        return [prompts[agent] for prompts in self.prompts].index(prompt)


# --- What is exact: by enumeration ------------------------------------------------------------------------------------


def policy(model, game, agent, tokenizer):
    """pi(response | state) [S, 256] of an agent's model, differentiable, from prompts without any padding."""
    rows = []
    for prompts in game.prompts:
        prompt_ids = torch.tensor(tokenizer(prompts[agent]).input_ids).expand(NUM_TOKENS, -1)
        ids = torch.cat([prompt_ids, torch.arange(NUM_TOKENS)[:, None]], 1)
        probabilities = model(input_ids=ids).logits[:, -LENGTH:].softmax(-1)
        rows.append((probabilities[0, 0][:, None] * probabilities[:, 1]).flatten())
    return torch.stack(rows)


def action_returns(policies, game, num_turns):
    """The expected sum of rewards from a joint response in a state on, [S, 256, 256]."""
    if num_turns == 1:
        return game.rewards
    state_values = torch.einsum("sa,sb,sab->s", *policies, game.rewards)  # of the second turn
    returns = game.rewards[FIRST_STATES] + state_values[game.next_states]
    return torch.cat([returns, game.rewards[NEXT_STATES]])


def expected_reward(policies, game, num_turns):
    """J: of an episode, over items and joint responses."""
    returns = action_returns(policies, game, num_turns)
    return torch.einsum("sa,sb,sab->s", *policies, returns)[FIRST_STATES].mean()


def true_values(policies, game, num_turns, agent):
    """V(h) [S, 17] of an agent: before its first token, and after each first token that it may take."""
    returns = action_returns(policies, game, num_turns)
    other = policies[1 - agent]
    returns = torch.einsum("sb,sab->sa" if agent == 0 else "sb,sba->sa", other, returns)
    shape = (len(STATES), NUM_TOKENS, NUM_TOKENS)
    probabilities = policies[agent].view(shape)
    expected = (probabilities * returns.view(shape)).sum(-1)  # [S, 16]: times the probability of the first token
    return torch.cat([expected.sum(-1, keepdim=True), expected / probabilities.sum(-1)], 1)


def arbitrary_values():
    """V(h) [S, 17], random."""
    return torch.randn(len(STATES), 1 + NUM_TOKENS, generator=torch.Generator().manual_seed(SEED))


# --- What is sampled: by the scripts ----------------------------------------------------------------------------------

NOTHING_ELSE = {"kl_coef": 0.0, "value_loss_coef": 0.0, "reward_normalization": False, "advantage_normalization": False}
EXACT = {  # no more than the policy gradient
    ippo_llm: NOTHING_ELSE,
    iac_llm: NOTHING_ELSE,
    ppo_llm: {"beta": 0.0, "adv_whitening": False, "update_epochs": 1, "lora_rank": 2, "lora_alpha": 2.0},
}


def make_args(script, num_turns, folder, **flags):
    """Args of one update, without evaluations."""
    flags = EXACT[script] | flags | {"num_agents": NUM_AGENTS, "output_dir": str(folder), "seed": SEED}
    flags |= {"num_train_epochs": 1, "train_size": EPISODES, "rollout_buffer_size": EPISODES}
    if script is ppo_llm:
        flags |= {"max_turns": num_turns, "max_output_tokens": LENGTH, "batch_size": MINI_BATCH}
        return script.Args(**flags, evaluation_interval=0)
    flags |= {"num_turns": num_turns, "max_new_tokens": LENGTH, "mini_batch_size": MINI_BATCH}
    return script.Args(**flags, eval_interval=0)


def parameters(agent):
    """The actor's: a model's, or an adapter's."""
    if isinstance(agent.actor, nn.Module):
        return list(agent.actor.parameters())
    return adapters.parameters(agent.model, agent.actor)


def exact_copy(agent):
    """The actor in double precision."""
    if isinstance(agent.actor, nn.Module):
        return SimpleNamespace(actor=copy.deepcopy(agent.actor).double())
    model = copy.deepcopy(agent.model).double()
    model.set_adapter(agent.actor)
    return SimpleNamespace(model=model, actor=agent.actor)


def randomise(agents):
    """Make the agents differ from one another and from their references; an adapter that is new changes nothing."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for agent in agents:
            for parameter in parameters(agent):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


def flatten(tensors):
    return torch.cat([x.flatten() for x in tensors]).double()


class Team:
    """What a run's agents are: their exact gradients [P] and true values [S, 17]; what they learn: gradients [K, P]."""

    def __init__(self, agents, game, num_turns):
        self.agents = agents
        self.gradients = [[] for _ in agents]
        copies = [exact_copy(agent) for agent in agents]
        policies = []
        for i, agent in enumerate(copies):
            model = getattr(agent, "model", agent.actor)
            policies.append(policy(model, game, i, agents[i].tokenizer))
        reward = expected_reward(policies, game, num_turns)
        self.exact = []
        self.true_values = []
        for i, agent in enumerate(copies):
            self.exact.append(flatten(torch.autograd.grad(reward, parameters(agent), retain_graph=True)))
            self.true_values.append(true_values(policies, game, num_turns, i).detach().float())

    def record_gradient(self, agent, *_):
        """In place of an optimiser's step."""
        gradient = [parameter.grad for parameter in parameters(agent)]
        self.gradients[self.agents.index(agent)].append(flatten(gradient))
        for optimizer in agent.optimizers:
            optimizer.zero_grad()
        return {"grad_norm": torch.tensor(0.0), "skipped": torch.tensor(0.0)}


def no_run(*_, **__):
    """In place of a run's folder."""
    run = SimpleNamespace(step=0, phase=lambda name: None, log=lambda *_: None)
    run.updates = lambda batches: enumerate(batches, 1)
    return contextlib.nullcontext(run)


ROLLOUTS = {}  # of each script and number of turns: what else differs between cases is what is learned from them


def learn(script, num_turns, critic, folder, **flags):
    """Let a script's `main` do one update with other values and no steps: a Team.

    `critic` is "true" or "arbitrary".
    """
    game = Game(build_tokenizer())
    build_agents = script.build_agents
    play = script.play
    team = None

    def build_team(*arguments):
        nonlocal team
        agents = build_agents(*arguments)
        randomise(agents)
        team = Team(agents, game, num_turns)
        return agents

    def play_once(*arguments):
        if (script, num_turns) not in ROLLOUTS:
            ROLLOUTS[script, num_turns] = play(*arguments)
        return ROLLOUTS[script, num_turns]

    def compute_values(agent, rollout, args):
        i = team.agents.index(agent)
        table = arbitrary_values() if critic == "arbitrary" else team.true_values[i]
        states = torch.tensor([[game.state_of(prompt, i) for prompt in prompts] for prompts in rollout.prompts])
        values = torch.stack([table[states, 0], table[states, 1 + rollout.response_ids[..., 0]]], -1)
        if script is ppo_llm:  # the value of an end, which matters to truncated episodes alone
            values = nn.functional.pad(values, (0, 1), value=100.0)
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "build_agents", build_team)
        patch.setattr(script, "play", play_once)
        patch.setattr(script, "compute_values", compute_values)
        patch.setattr(script, "build_run", no_run)
        patch.setattr(script, "optimizer_step", lambda *arguments: team.record_gradient(*arguments))
        args = make_args(script, num_turns, folder, **flags)
        script.main(args, task=game, model=build_model(), tokenizer=build_tokenizer())
    return team
