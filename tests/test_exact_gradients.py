"""The mean gradient of each script's loss is the exact policy gradient of a game that is small enough to enumerate.

Two agents, each a GPT-2 of 16 tokens, answer with two tokens; none of the tokens ends a response. The expected reward J
of an episode is a sum over the 16^4 joint responses of a turn, and autograd differentiates it. A second turn has one of
three states, which the joint response leads to and which its prompts and rewards depend on. In ippo_llm and iac_llm an
agent then reads the prompt of that state alone; in ppo_llm it reads its whole transcript: the first prompt, its first
response and, appended to them, the prompt of that state (without a chat template there are empty lines around it, which
are no tokens here). So a response in the second turn has 256 * 3 histories for each first state, and the sum over 16^8
pairs of joint responses is a product of matrices for each two states. With gamma 1 the gradient of J by an agent's
parameters is

    E[ sum_t grad log pi(a_t|h_t) A_t ],

A_t from generalised advantage estimation, for lambda 1 and any values V(h_t), which do not know a_t; and for any lambda
(IAC's is 0) and the true values V(h_t) = E[ rewards from t on | h_t ], means over the future and over what the other
agent has said and will say, of which an agent knows no more than the state that it led to.
maac_llm's one critic has V and Q of the state, which is all that is read here, and all that the future depends on.
magrpo_llm has no values: it compares the joint samples of a tree, with the mean of the others (rloo), with nothing
(raw), or with the mean of all, which makes the gradient (K - 1) / K as long.
A loss divides the sum over an episode by its number of actions or of tokens, which is the same for all episodes here.

`main` of each script does one update with its own sampling, rewards, masks, advantages, mini-batches and losses. Only
the critic's values are replaced, and the optimiser's steps, so that every mini-batch is the first.
"""

import contextlib
import copy
import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.functional import pad
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils.models import adapters

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),  # peft, about GPT-2's layers
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # there are no steps before it
]

NUM_AGENTS = 2
NUM_TOKENS = 16
LENGTH = 2  # tokens of a response
NUM_RESPONSES = NUM_TOKENS**LENGTH
FIRST_STATES = [0, 1]  # one for each item
SECOND_STATES = [2, 3, 4]
NUM_STATES = 5

GAME_SEED = 6  # of a game with strong gradients: weak ones take more episodes to be seen
SAMPLING_SEED = 1
EPISODES = 8192
PATHS = 16384  # episodes of magrpo_llm, which share their first turns
MINI_BATCH = 128  # episodes; gradients of mini-batches tell the standard error of their mean
LEAST_COSINE = 0.99
GENERATIONS = 2  # of magrpo_llm's trees


# --- The game ---------------------------------------------------------------------------------------------------------


def build_tokenizer():
    """A word of one letter for each token but 0, which pads and is not read; there is no end token."""
    vocabulary = {word: k for k, word in enumerate("_abcdefghijklmno")}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="_")


def build_model():
    """A random GPT-2 of one layer, whose policy is far from uniform."""
    torch.manual_seed(GAME_SEED)
    config = GPT2Config(
        vocab_size=NUM_TOKENS,
        n_positions=12,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_inner=16,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


class Game:
    """A task whose prompts and joint rewards depend on the state, and the second state on the joint response.

    A response's row is 16 times its first token plus its second. `rewards` is [S, 256, 256], `next_states` [256, 256].
    """

    def __init__(self, tokenizer):
        generator = torch.Generator().manual_seed(GAME_SEED)
        self.prompts = []  # of each state, a string for each agent
        for state in range(NUM_STATES):
            lengths = [1 + (state + agent) % 4 for agent in range(NUM_AGENTS)]
            ids = [torch.randint(1, NUM_TOKENS, (length,), generator=generator) for length in lengths]
            self.prompts.append(tokenizer.batch_decode(ids))

        responses = torch.cartesian_prod(torch.arange(NUM_TOKENS), torch.arange(NUM_TOKENS))
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        self.row_of = {text: row for row, text in enumerate(texts)}
        rows = torch.tensor([self.row_of[text] for text in texts])  # what reads alike counts alike
        self.rewards = draw_rewards(generator)[:, rows][:, :, rows]
        self.next_states = SECOND_STATES[0] + (rows[:, None] + rows) % len(SECOND_STATES)
        self.prompt_ids = [[tokenizer(prompt).input_ids for prompt in prompts] for prompts in self.prompts]

    def train_dataset(self, size, seed):
        return datasets.Dataset.from_dict({"state": [k % len(FIRST_STATES) for k in range(size)]})

    def formatters(self, item, agent):
        return self.messages(item["state"])[agent]

    def reward_func(self, *completions, items, turns, turn):
        rewards = []
        for k, item in enumerate(items):
            state = item["state"] if turn == 0 else self.next_state([history[k][0] for history in turns])
            rows = [self.row_of[texts[k]] for texts in completions]
            rewards.append(self.rewards[state, rows[0], rows[1]])
        return rewards

    def external_transition(self, agent_completions):
        return self.messages(self.next_state(agent_completions))

    def next_state(self, texts):
        rows = [self.row_of[text] for text in texts]
        return int(self.next_states[rows[0], rows[1]])

    def messages(self, state):
        return [[{"role": "user", "content": prompt}] for prompt in self.prompts[state]]

    def state_of(self, prompt, agent):
        return [prompts[agent] for prompts in self.prompts].index(prompt.strip())


def draw_rewards(generator):
    """Rewards [S, 256, 256]: a token is worth something by itself, and something with each other one in a state."""
    rewards = torch.zeros(NUM_STATES, *[NUM_TOKENS] * 4, dtype=torch.float64)
    worth = torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)
    for k in range(4):
        rewards += worth.view(-1, *[1] * (3 - k))
    for i, k in itertools.combinations(range(1, 5), 2):
        shape = [NUM_STATES, 1, 1, 1, 1]
        shape[i] = NUM_TOKENS
        shape[k] = NUM_TOKENS
        rewards += 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return rewards.view(NUM_STATES, NUM_RESPONSES, NUM_RESPONSES)


# --- What is exact: by enumeration ------------------------------------------------------------------------------------


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


def policy(agent, histories):
    """pi(response|history) [H, 256] of an agent, differentiable, from the ids of histories [H, S]: no padding."""
    model = getattr(agent, "model", agent.actor)
    H = len(histories)
    tokens = torch.arange(NUM_TOKENS).repeat(H)[:, None]
    ids = torch.cat([histories.repeat_interleave(NUM_TOKENS, 0), tokens], 1)  # each history with each first token
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.view(H, NUM_TOKENS, -1, NUM_TOKENS)
    first = logits[:, 0, -2].softmax(-1)
    second = logits[:, :, -1].softmax(-1)
    return (first[..., None] * second).flatten(1)


def first_policy(agent, i, game):
    """pi(response|first state) [S1, 256] of agent i."""
    prompts = [torch.tensor([game.prompt_ids[state][i]]) for state in FIRST_STATES]
    return torch.cat([policy(agent, prompt) for prompt in prompts])


def second_policy(agent, i, game, whole_transcript):
    """pi(second response|first state, own first response, second state) [S1, 256, S2, 256] of agent i.

    It reads the whole transcript, or the prompt of the second state alone.
    """
    responses = torch.cartesian_prod(torch.arange(NUM_TOKENS), torch.arange(NUM_TOKENS))
    policies = []
    for state in FIRST_STATES:
        of_state = []
        for next_state in SECOND_STATES:
            prompt = torch.tensor([game.prompt_ids[next_state][i]])
            if whole_transcript:
                begin = torch.tensor([game.prompt_ids[state][i]]).expand(NUM_RESPONSES, -1)
                history = torch.cat([begin, responses, prompt.expand(NUM_RESPONSES, -1)], 1)
                of_state.append(policy(agent, history))
            else:
                of_state.append(policy(agent, prompt).expand(NUM_RESPONSES, -1))
        policies.append(torch.stack(of_state, 1))
    return torch.stack(policies)


def expected_rewards(seconds, game):
    """The expected rewards from a joint response in a first state on, its own included: [S1, 256, 256].

    `seconds` are the agents' second policies, None of a game of one turn.
    """
    rewards = game.rewards[FIRST_STATES]
    if seconds is None:
        return rewards
    futures = torch.einsum("iasx,sxy,ibsy->isab", seconds[0], game.rewards[SECOND_STATES], seconds[1])
    return rewards + (futures * leads_to(game)).sum(1)


def leads_to(game):
    """1 where a joint response leads to a second state: [S2, 256, 256]."""
    return torch.stack([game.next_states == state for state in SECOND_STATES]).double()


def true_values(firsts, seconds, game, i):
    """V(h) of agent i before a response, and after each first token of it: [S1, 17] and [S1, 256, S2, 17]."""
    rewards = [expected_rewards(seconds, game), game.rewards[SECOND_STATES], leads_to(game)]
    if i == 1:
        rewards = [x.transpose(-1, -2) for x in rewards]
    team_rewards, second_rewards, transitions = rewards
    other = firsts[1 - i]
    values = [values_of_tokens(firsts[i], torch.einsum("ib,iab->ia", other, team_rewards))]
    if seconds is not None:
        belief = torch.einsum("ib,sab->iasb", other, transitions)  # in what the other agent has said
        belief = belief / belief.sum(-1, keepdim=True)
        others_next = torch.einsum("iasb,ibsy->iasy", belief, seconds[1 - i])
        values.append(values_of_tokens(seconds[i], torch.einsum("iasy,sxy->iasx", others_next, second_rewards)))
    return values


def values_of_tokens(probabilities, rewards):
    """The expected reward before a response, and after each first token: [..., 17] from [..., 256] of responses."""
    shape = (*rewards.shape[:-1], NUM_TOKENS, NUM_TOKENS)
    shares = (probabilities * rewards).view(shape).sum(-1)  # of the first tokens in the value before them
    after = shares / probabilities.view(shape).sum(-1)
    return torch.cat([shares.sum(-1, keepdim=True), after], -1).float()


def joint_values(firsts, seconds, game):
    """Of each turn's states V [S] and Q [S, 256, 256]; what agents do in the second does not depend on the first."""
    Q = expected_rewards(seconds, game)
    tables = [(torch.einsum("ia,ib,iab->i", *firsts, Q), Q)]
    if seconds is not None:
        policies = [second[0, 0] for second in seconds]
        Q = game.rewards[SECOND_STATES]
        tables.append((torch.einsum("sx,sy,sxy->s", *policies, Q), Q))
    return tables


def arbitrary_values():
    """V(h) without any sense, in the shapes of true_values."""
    generator = torch.Generator().manual_seed(GAME_SEED)
    S1, S2 = len(FIRST_STATES), len(SECOND_STATES)
    shapes = [(S1, 1 + NUM_TOKENS), (S1, NUM_RESPONSES, S2, 1 + NUM_TOKENS)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def enumerate_game(agents, game, num_turns, whole_transcript):
    """Of each agent the exact gradient [P] of J, and its true values; last the true values of the team."""
    copies = [exact_copy(agent) for agent in agents]
    firsts = [first_policy(agent, i, game) for i, agent in enumerate(copies)]
    seconds = None
    if num_turns == 2:
        seconds = [second_policy(agent, i, game, whole_transcript) for i, agent in enumerate(copies)]
    J = torch.einsum("ia,ib,iab->i", *firsts, expected_rewards(seconds, game)).mean()  # over the items
    gradients = []
    for agent in copies:
        gradients.append(flatten(torch.autograd.grad(J, parameters(agent), retain_graph=True)))
    with torch.no_grad():
        values = [true_values(firsts, seconds, game, i) for i in range(NUM_AGENTS)]
        return gradients, [*values, joint_values(firsts, seconds, game)]


# --- What is sampled: by the scripts ----------------------------------------------------------------------------------

PLAIN = {"kl_coef": 0.0, "advantage_normalization": False}
FLAGS = {
    ippo_llm: PLAIN | {"value_loss_coef": 0.0, "reward_normalization": False},
    iac_llm: PLAIN | {"value_loss_coef": 0.0, "reward_normalization": False},
    maac_llm: PLAIN | {"reward_normalization": False},
    magrpo_llm: PLAIN | {"num_generations": GENERATIONS},
    ppo_llm: {"beta": 0.0, "adv_whitening": False, "update_epochs": 1, "lora_rank": 2, "lora_alpha": 2.0},
}


def make_args(script, num_turns, folder, **flags):
    """Args of one update, without evaluations."""
    flags = FLAGS[script] | flags | {"num_agents": NUM_AGENTS, "output_dir": str(folder), "seed": SAMPLING_SEED}
    episodes = PATHS if script is magrpo_llm else EPISODES
    flags |= {"num_train_epochs": 1, "train_size": episodes, "rollout_buffer_size": episodes}
    if script is ppo_llm:
        flags |= {"max_turns": num_turns, "max_output_tokens": LENGTH, "batch_size": MINI_BATCH}
        return script.Args(**flags, evaluation_interval=0)
    flags |= {"num_turns": num_turns, "max_new_tokens": LENGTH, "mini_batch_size": MINI_BATCH}
    if script is magrpo_llm:
        flags["train_size"] = PATHS // GENERATIONS**num_turns
    return script.Args(**flags, eval_interval=0)


def perturb(agents):
    """Make the agents differ, also from their references: an adapter that is new changes nothing (B = 0)."""
    generator = torch.Generator().manual_seed(GAME_SEED)
    with torch.no_grad():
        for agent in agents:
            for parameter in parameters(agent):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


class Team:
    """The agents of a run: their exact gradients [P] and true values; the gradients of mini-batches, lists of [P]."""

    def __init__(self, agents, exact_gradients, true_values):
        self.agents = agents
        self.gradients = [[] for _ in agents]
        self.exact_gradients = exact_gradients
        self.true_values = true_values

    def record(self, agent):
        """Note an agent's gradient, in place of a step of its optimisers; returns the metrics of a step."""
        if agent in self.agents:  # and not their critic
            gradient = [parameter.grad for parameter in parameters(agent)]
            self.gradients[self.agents.index(agent)].append(flatten(gradient))
        for optimizer in agent.optimizers:
            optimizer.zero_grad()
        return {"grad_norm": torch.tensor(0.0), "skipped": torch.tensor(0.0)}


def flatten(tensors):
    return torch.cat([x.flatten() for x in tensors]).double()


class NoRun:
    """In place of a run's folder: one update, of all items."""

    num_updates = 1

    def __init__(self, *_, **__):
        """It takes what a Run does."""

    def start(self, *_):
        return contextlib.nullcontext(self)

    def updates(self, items):
        yield 1, [*items]

    def progress(self, step):
        return 0, step

    def phase(self, name):
        """It takes no time."""

    def is_due(self, *_):
        return False

    def log(self, *_):
        """It writes nothing."""


ROLLOUTS = {}  # of each script and number of turns; all that else differs is what is learned from them
EXACT = {}  # what enumerate_game gives, of the same


def learn(script, num_turns, values, folder, **flags):
    """Let a script's `main` do one update with "true" or "arbitrary" values, and without steps; returns a Team."""
    game = Game(build_tokenizer())
    build_agents = script.build_agents
    play = script.play
    teams = []

    def build_team(*arguments):
        torch.manual_seed(GAME_SEED)
        learners = build_agents(*arguments)
        agents = learners[:NUM_AGENTS]
        perturb(agents)
        if (script, num_turns) not in EXACT:
            EXACT[script, num_turns] = enumerate_game(agents, game, num_turns, whole_transcript=script is ppo_llm)
        teams.append(Team(agents, *EXACT[script, num_turns]))
        return learners

    def play_once(*arguments):
        if (script, num_turns) not in ROLLOUTS:
            ROLLOUTS[script, num_turns] = play(*arguments)
        return ROLLOUTS[script, num_turns]

    def compute_values(agent, rollout, args):
        i = teams[0].agents.index(agent)
        tables = arbitrary_values() if values == "arbitrary" else teams[0].true_values[i]
        rollout = ROLLOUTS[script, num_turns][i]
        responses = responses_of_ppo(rollout) if script is ppo_llm else rollout.response_ids
        history_values = look_up(tables, game, rollout.prompts, responses, i)
        return in_transcripts(history_values, rollout) if script is ppo_llm else history_values

    def compute_joint_values(critic, read, args):
        rollouts = ROLLOUTS[script, num_turns]
        return look_up_jointly(teams[0].true_values[-1], game, rollouts, args.critic_type)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Run", NoRun)
        patch.setattr(script, "build_agents", build_team)
        patch.setattr(script, "play", play_once)
        if script is maac_llm:
            patch.setattr(script, "compute_values", compute_joint_values)
        elif script is magrpo_llm:  # samples of one tree depend on one another, those of different mini-batches do not
            patch.setattr(torch, "randperm", lambda size, **_: torch.arange(size))
        else:
            patch.setattr(script, "compute_values", compute_values)
        patch.setattr(script, "optimizer_step", lambda agent, args: teams[0].record(agent))
        args = make_args(script, num_turns, folder, **flags)
        script.main(args, task=game, model=build_model(), tokenizer=build_tokenizer())
    return teams[0]


def look_up(tables, game, prompts, responses, i):
    """V(h) [B, T, 2] before each token of an agent's responses, [B, T, 2], to its prompts, B lists of T."""
    states = torch.tensor([[game.state_of(prompt, i) for prompt in row] for row in prompts])
    first = states[:, 0] - FIRST_STATES[0]
    rows = [tables[0][first]]
    if states.shape[1] == 2:
        first_responses = NUM_TOKENS * responses[:, 0, 0] + responses[:, 0, 1]
        rows.append(tables[1][first, first_responses, states[:, 1] - SECOND_STATES[0]])
    history_values = torch.stack(rows, 1)  # [B, T, 17]
    after = history_values.gather(-1, 1 + responses[..., :1])
    return torch.cat([history_values[..., :1], after], -1)


def look_up_jointly(tables, game, rollouts, critic_type):
    """V of the states that were read, [B, T, 1], and, of critic_type q, after them Q of the joint responses."""
    state_values = []
    action_values = []
    for t, (V, Q) in enumerate(tables):
        states = torch.tensor([game.state_of(prompts[t], 0) for prompts in rollouts[0].prompts])
        states -= (FIRST_STATES, SECOND_STATES)[t][0]
        rows = [NUM_TOKENS * rollout.response_ids[:, t, 0] + rollout.response_ids[:, t, 1] for rollout in rollouts]
        state_values.append(V[states])
        action_values.append(Q[states, rows[0], rows[1]])
    values = state_values + action_values if critic_type == "q" else state_values
    return torch.stack(values, 1)[..., None].float()


def responses_of_ppo(rollout):
    """The responses in transcripts, [B, T, 2]."""
    sampled = rollout.response_ids[rollout.turn_of_token >= 0]
    return sampled.view(*rollout.rewards.shape, LENGTH)


def in_transcripts(history_values, rollout):
    """What stands for tokens, [B, T, 2], at their columns in transcripts, [B, L + 1]: elsewhere what is not to count.

    That is before tokens that are observed, and the value of the end, which is for truncated episodes only.
    """
    values = torch.full_like(pad(rollout.logprobs, (0, 1)), 100.0)
    values[pad(rollout.turn_of_token, (0, 1), value=-1) >= 0] = history_values.flatten()
    return values


# --- The two compared -------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """Of the mean of sampled gradients with an exact one."""

    cosine: float
    length: float  # of the mean's component along the exact gradient, as a share of the exact gradient
    length_error: float  # its standard error
    num_beyond: int  # parameters that differ by more than three standard errors
    num_by_chance: int  # the most that do in a thousand sets of gradients whose mean is exact

    @property
    def equal(self):
        same_direction = self.cosine >= LEAST_COSINE and self.num_beyond <= self.num_by_chance
        return same_direction and abs(self.length - 1) <= 4 * self.length_error


def compare(gradients, exact):
    """Compare K sampled gradients, [P] each, with the exact one, [P].

    Parameters depend on one another: where one is beyond three standard errors many are, which is more than independent
    ones would be. What chance does is seen in the samples' deviations from their mean, with random signs.
    """
    gradients = torch.stack(gradients)
    K = len(gradients)
    rounding = 1e-6 * exact.abs().max()
    differences = gradients - exact
    deviations = gradients - gradients.mean(0)
    signs = 2.0 * torch.randint(0, 2, (1000, K), generator=torch.Generator().manual_seed(0)).double() - 1
    by_chance = count_beyond(signs @ deviations / K, (deviations**2).sum(0), K, rounding)
    lengths = gradients @ exact / (exact @ exact)
    return Comparison(
        cosine=torch.cosine_similarity(gradients.mean(0), exact, 0).item(),
        length=lengths.mean().item(),
        length_error=(lengths.std() / K**0.5).item(),
        num_beyond=int(count_beyond(differences.mean(0), (differences**2).sum(0), K, rounding)),
        num_by_chance=int(by_chance.max()),
    )


def count_beyond(means, square_sums, K, rounding):
    """How many means of K samples, [..., P], are beyond three standard errors of 0: [...]."""
    errors = ((square_sums - K * means**2) / (K - 1) / K).clamp(min=0).sqrt()
    return (means.abs() > 3 * errors + rounding).sum(-1)


def compare_agents(team, divisor):
    """A comparison for each agent; a loss divides the sum over an episode by `divisor`, and descends."""
    comparisons = []
    for gradients, exact in zip(team.gradients, team.exact_gradients):
        assert len(gradients) in (EPISODES // MINI_BATCH, PATHS // MINI_BATCH)
        comparisons.append(compare(gradients, -exact / divisor))
    return comparisons


def actions(num_turns, granularity):
    """Of an episode."""
    return num_turns * LENGTH if granularity == "token" else num_turns


TURNS = pytest.mark.parametrize("num_turns", [pytest.param(1, marks=pytest.mark.slow), 2])
ACTIONS = pytest.mark.parametrize("granularity", ["token", "turn"])
UNBIASED = pytest.mark.parametrize("gae_lambda, values", [(1.0, "arbitrary"), (0.5, "true")])


@UNBIASED
@ACTIONS
@TURNS
def test_ippo_follows_the_exact_gradient(num_turns, granularity, gae_lambda, values, tmp_path):
    flags = {"action_granularity": granularity, "gae_lambda": gae_lambda}
    team = learn(ippo_llm, num_turns, values, tmp_path, **flags)
    for comparison in compare_agents(team, actions(num_turns, granularity)):
        assert comparison.equal, comparison


@ACTIONS
@TURNS
def test_iac_with_true_values_follows_the_exact_gradient(num_turns, granularity, tmp_path):
    team = learn(iac_llm, num_turns, "true", tmp_path, action_granularity=granularity)
    for comparison in compare_agents(team, actions(num_turns, granularity)):
        assert comparison.equal, comparison


@pytest.mark.parametrize("critic_type", ["v", "q"])
@TURNS
def test_maac_with_true_values_follows_the_exact_gradient(num_turns, critic_type, tmp_path):
    team = learn(maac_llm, num_turns, "true", tmp_path, critic_type=critic_type)
    for comparison in compare_agents(team, num_turns):
        assert comparison.equal, comparison


@pytest.mark.parametrize("mode, length", [("rloo", 1.0), ("raw", 1.0), ("mean", 1 - 1 / GENERATIONS)])
@TURNS
def test_magrpo_follows_the_exact_gradient(num_turns, mode, length, tmp_path):
    team = learn(magrpo_llm, num_turns, None, tmp_path, advantage_mode=mode)
    for comparison in compare_agents(team, num_turns / length):
        assert comparison.equal, comparison


@UNBIASED
@pytest.mark.parametrize("granularity, turn_level_clip", [("token", False), ("turn", False), ("turn", True)])
@TURNS
def test_ppo_follows_the_exact_gradient(num_turns, granularity, turn_level_clip, gae_lambda, values, tmp_path):
    flags = {"action_granularity": granularity, "gae_lambda": gae_lambda, "turn_level_clip": turn_level_clip}
    team = learn(ppo_llm, num_turns, values, tmp_path, **flags)
    num_ratios = actions(num_turns, "turn" if turn_level_clip else "token")  # its loss is a mean over ratios
    for comparison in compare_agents(team, num_ratios):
        assert comparison.equal, comparison


# --- What is wrong is seen --------------------------------------------------------------------------------------------


def test_a_detached_ratio_is_seen(tmp_path, monkeypatch):
    take_logprobs = ppo_llm.take_logprobs

    def detached_after_the_first_token(log_pi, tokens):
        logprobs = take_logprobs(log_pi, tokens)
        return torch.cat([logprobs[..., :1], logprobs[..., 1:].detach()], -1)

    monkeypatch.setattr(ppo_llm, "take_logprobs", detached_after_the_first_token)
    team = learn(ppo_llm, 2, "true", tmp_path, action_granularity="token", gae_lambda=0.5)
    for comparison in compare_agents(team, actions(2, "token")):
        assert not comparison.equal, comparison
