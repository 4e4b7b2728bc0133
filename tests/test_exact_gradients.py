"""The mean gradient of each script's loss is the exact policy gradient of a game that is small enough to enumerate.

Two agents, each a GPT-2 of 16 tokens, answer with two tokens; none of the tokens ends an answer. The expected reward J
of an episode is a sum over the 16^4 joint answers of a turn, and autograd differentiates it. A second turn has one of
three states, which the joint answer leads to and which its prompts and rewards depend on. An agent reads its whole
transcript: the first prompt, its first answer, and the prompt of the second state. So an answer in the second turn has
256 * 3 histories for each first state, and the sum over 16^8 pairs of joint answers is a product of matrices for each
two states. With gamma 1 the gradient of J by an agent's parameters is

    E[ sum_t grad log pi(a_t|h_t) A_t ],

A_t from generalised advantage estimation, for lambda 1 and any values V(h_t), which do not know a_t; and for any lambda
(IAC's is 0) and the true values V(h_t) = E[ rewards from t on | h_t ], means over the future and over what the other
agent has said and will say, of which an agent knows no more than the state that it led to. maac_llm's critic knows all
that both have read and written. magrpo_llm has no values: it compares the episodes of an item, with the mean of the
others (rloo), with nothing (raw), or with the mean of all, which makes the gradient (K - 1) / K as long.
A loss divides the sum over an episode by its number of actions or of tokens, which is the same for all episodes here.

`main` of each script does one update with its own sampling, rewards, masks, advantages, mini-batches and losses. Only
the critic's values are replaced, and no gradient becomes a step, so that every mini-batch is the first. Next to true
values the baseline of a turn is 0; next to any values it stays.
"""

import contextlib
import copy
import functools
import inspect
import itertools
from dataclasses import dataclass

import datasets
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils import distributed
from utils.models.weights import optimizers_of

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # peft, about GPT-2's layers

NUM_AGENTS = 2
NUM_TOKENS = 16
LENGTH = 2  # tokens of an answer
NUM_ANSWERS = NUM_TOKENS**LENGTH
FIRST_STATES = [0, 1]  # one for each item
SECOND_STATES = [2, 3, 4]
NUM_STATES = 5

GAME_SEED = 6  # of a game with strong gradients: weak ones take more episodes to be seen
SAMPLING_SEED = 1
EPISODES = 8192
MINI_BATCH = 128  # episodes; gradients of mini-batches tell the standard error of their mean
LEAST_COSINE = 0.99
GENERATIONS = 2  # of an item, in magrpo_llm


# --- The game ---------------------------------------------------------------------------------------------------------


class Tokenizer(PreTrainedTokenizerFast):
    """It remembers the few texts of a game, of which it would read thousands."""

    def __call__(self, text, **options):
        texts = self.__dict__.setdefault("texts", {})
        key = (text, *options.items())
        if key not in texts:
            texts[key] = super().__call__(text, **options)
        return texts[key]


def build_tokenizer(words="_abcdefghijklmno"):
    """A word of one letter for each token but 0, which pads and is not read; there is no end token."""
    vocabulary = {word: k for k, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(tokenizer_object=tokenizer, pad_token="_")


def build_model(num_tokens=NUM_TOKENS):
    """A random GPT-2 of one layer, whose policy is far from uniform."""
    torch.manual_seed(GAME_SEED)
    config = GPT2Config(
        vocab_size=num_tokens,
        n_positions=64,
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
    """A task whose prompts and joint rewards depend on the state, and the second state on the joint answer.

    A answer's row is 16 times its first token plus its second. `rewards` is [S, 256, 256], `next_states` [256, 256].
    """

    def __init__(self, tokenizer):
        generator = torch.Generator().manual_seed(GAME_SEED)
        self.prompts = []  # of each state, a string for each agent
        for state in range(NUM_STATES):
            lengths = [1 + (state + agent) % 4 for agent in range(NUM_AGENTS)]
            ids = [torch.randint(1, NUM_TOKENS, (length,), generator=generator) for length in lengths]
            self.prompts.append(tokenizer.batch_decode(ids))

        answers = torch.cartesian_prod(torch.arange(NUM_TOKENS), torch.arange(NUM_TOKENS))
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
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
    return rewards.view(NUM_STATES, NUM_ANSWERS, NUM_ANSWERS)


# --- What is exact: by enumeration ------------------------------------------------------------------------------------


def exact_copy(actor):
    """The actor's model in double precision, with its adapter on, and its parameters."""
    actor = copy.deepcopy(actor)
    actor.model.double()
    if actor.adapter is not None:
        actor.model.set_adapter(actor.adapter)
    return actor


def policy(actor, histories):
    """pi(answer|history) [H, 256] of an actor, differentiable, from the ids of histories [H, S]: no padding."""
    H = len(histories)
    tokens = torch.arange(NUM_TOKENS).repeat(H)[:, None]
    ids = torch.cat([histories.repeat_interleave(NUM_TOKENS, 0), tokens], 1)  # each history with each first token
    logits = actor.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.view(H, NUM_TOKENS, -1, NUM_TOKENS)
    first = logits[:, 0, -2].softmax(-1)
    second = logits[:, :, -1].softmax(-1)
    return (first[..., None] * second).flatten(1)


def first_policy(actor, i, game):
    """pi(answer|first state) [S1, 256] of agent i."""
    prompts = [torch.tensor([game.prompt_ids[state][i]]) for state in FIRST_STATES]
    return torch.cat([policy(actor, prompt) for prompt in prompts])


def second_policy(actor, i, game):
    """pi(second answer|first state, own first answer, second state) [S1, 256, S2, 256] of agent i."""
    answers = torch.cartesian_prod(torch.arange(NUM_TOKENS), torch.arange(NUM_TOKENS))
    policies = []
    for state in FIRST_STATES:
        of_state = []
        for next_state in SECOND_STATES:
            begin = torch.tensor([game.prompt_ids[state][i]]).expand(NUM_ANSWERS, -1)
            prompt = torch.tensor([game.prompt_ids[next_state][i]]).expand(NUM_ANSWERS, -1)
            of_state.append(policy(actor, torch.cat([begin, answers, prompt], 1)))
        policies.append(torch.stack(of_state, 1))
    return torch.stack(policies)


def expected_rewards(seconds, game):
    """The expected rewards from a joint answer in a first state on, its own included: [S1, 256, 256].

    `seconds` are the agents' second policies, None of a game of one turn.
    """
    rewards = game.rewards[FIRST_STATES]
    if seconds is None:
        return rewards
    return rewards + second_values(seconds, game)


def second_values(seconds, game):
    """The expected rewards of the second turn after a joint answer in a first state: [S1, 256, 256]."""
    futures = torch.einsum("iasx,sxy,ibsy->isab", seconds[0], game.rewards[SECOND_STATES], seconds[1])
    return (futures * leads_to(game)).sum(1)


def leads_to(game):
    """1 where a joint answer leads to a second state: [S2, 256, 256]."""
    return torch.stack([game.next_states == state for state in SECOND_STATES]).double()


def true_values(firsts, seconds, game, i):
    """V(h) of agent i before a answer, and after each first token of it: [S1, 17] and [S1, 256, S2, 17]."""
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
    """The expected reward before a answer, and after each first token: [..., 17] from [..., 256] of answers."""
    shape = (*rewards.shape[:-1], NUM_TOKENS, NUM_TOKENS)
    shares = (probabilities * rewards).view(shape).sum(-1)  # of the first tokens in the value before them
    after = shares / probabilities.view(shape).sum(-1)
    return torch.cat([shares.sum(-1, keepdim=True), after], -1).float()


def joint_values(firsts, seconds, game):
    """V of what both agents have read and written, before each turn: [S1], and [S1, 256, 256]."""
    values = [torch.einsum("ia,ib,iab->i", *firsts, expected_rewards(seconds, game)).float()]
    return values if seconds is None else [*values, second_values(seconds, game).float()]


def arbitrary_values():
    """V(h) without any sense, in the shapes of true_values."""
    generator = torch.Generator().manual_seed(GAME_SEED)
    S1, S2 = len(FIRST_STATES), len(SECOND_STATES)
    shapes = [(S1, 1 + NUM_TOKENS), (S1, NUM_ANSWERS, S2, 1 + NUM_TOKENS)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def enumerate_game(agents, game, num_turns):
    """Of each agent the exact gradient [P] of J, and its true values; last the true values of the team."""
    actors = [exact_copy(agent.actor) for agent in agents]
    firsts = [first_policy(actor, i, game) for i, actor in enumerate(actors)]
    seconds = None
    if num_turns == 2:
        seconds = [second_policy(actor, i, game) for i, actor in enumerate(actors)]
    J = torch.einsum("ia,ib,iab->i", *firsts, expected_rewards(seconds, game)).mean()  # over the items
    gradients = []
    for actor in actors:
        gradients.append(flatten(torch.autograd.grad(J, actor.parameters(), retain_graph=True)))
    with torch.no_grad():
        values = [true_values(firsts, seconds, game, i) for i in range(NUM_AGENTS)]
        return gradients, [*values, joint_values(firsts, seconds, game)]


def flatten(tensors):
    return torch.cat([x.flatten() for x in tensors]).double()


# --- What is sampled: by the scripts ----------------------------------------------------------------------------------

PLAIN = {"reward_normalization": False, "advantage_normalization": False}
FLAGS = {
    ippo_llm: PLAIN | {"kl_coef": 0.0},
    iac_llm: PLAIN | {"kl_coef": 0.0},
    maac_llm: PLAIN | {"kl_coef": 0.0},
    magrpo_llm: {"kl_coef": 0.0, "num_generations": GENERATIONS, "train_size": EPISODES // GENERATIONS},
    ppo_llm: PLAIN | {"kl_loss_coef": 0.0, "update_epochs": 1, "lora_rank": 2, "lora_alpha": 2.0},
}


def make_args(script, num_turns, folder, **flags):
    """Args of one update, without evaluations."""
    sizes = {"train_size": EPISODES, "rollout_buffer_size": EPISODES, "mini_batch_size": MINI_BATCH}
    sizes |= {"micro_batch_size": 8 * MINI_BATCH, "num_train_epochs": 1, "eval_interval": 0, "num_agents": NUM_AGENTS}
    lengths = {"num_turns": num_turns, "max_new_tokens": LENGTH}
    return script.Args(**(sizes | lengths | FLAGS[script] | flags), output_dir=str(folder), seed=SAMPLING_SEED)


class Team:
    """In place of a Run: one update of all items. Its agents are made to differ, also from their references."""

    def __init__(self, game, num_turns):
        self.game = game
        self.num_turns = num_turns
        self.gradients = [[] for _ in range(NUM_AGENTS)]  # of mini-batches, [P] each

    @contextlib.contextmanager
    def start(self, learners, generator):
        self.agents = learners[:NUM_AGENTS]
        noise = torch.Generator().manual_seed(GAME_SEED)
        with torch.no_grad():
            for agent in self.agents:
                for parameter in agent.actor.parameters():
                    parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
        self.exact_gradients, self.true_values = enumerate_game(self.agents, self.game, self.num_turns)
        yield self

    def updates(self):
        return [0]

    def is_due(self, *_):
        return False

    def log(self, *_, **__):
        """It writes nothing."""

    def record(self, optimizer, max_norm):
        """Note an actor's gradient, in place of clipping it, and let there be none for the step."""
        parameters = optimizer.param_groups[0]["params"]
        for agent, gradients in zip(self.agents, self.gradients):
            if optimizer is optimizers_of(agent)[0]:
                gradients.append(flatten([parameter.grad for parameter in parameters]))
        optimizer.zero_grad()
        return torch.tensor(0.0)


ROLLOUTS = {}  # of each script and number of turns; all that else differs is what is learned from them


def learn(script, num_turns, values, folder, **flags):
    """Let a script's `main` do one update with "true" or "arbitrary" values, and without steps; returns a Team."""
    game = Game(build_tokenizer())
    team = Team(game, num_turns)
    play = script.play

    def play_once(*arguments):
        if (script, num_turns) not in ROLLOUTS:
            ROLLOUTS[script, num_turns] = play(*arguments)
        team.rollouts = ROLLOUTS[script, num_turns]
        return team.rollouts

    @functools.cache
    def values_of(i):
        if i is None:
            return look_up_jointly(team.true_values[-1], game, team.rollouts)
        tables = arbitrary_values() if values == "arbitrary" else team.true_values[i]
        return look_up(tables, game, team.rollouts[i], i)

    def critic_forward(learner, rollout, *arguments):
        rows = arguments[1 if script is ppo_llm else 0]  # PPO's are behind the places that are read
        own_values = values_of(team.agents.index(learner) if learner in team.agents else None)[rows]
        if script is iac_llm:
            own_values = of_turns(own_values, rollout.turns[rows], num_turns)
        m = arguments[-1]
        if script in (ippo_llm, ppo_llm):
            m = m[rows] if script is ppo_llm else m[rollout.turns[rows]]
        return own_values + m + 0 * learner.value_head[-1].bias  # it has a gradient, of 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Run", lambda *_: team)
        patch.setattr(inspect, "signature", functools.cache(inspect.signature))  # of each call of the game's functions
        patch.setattr(script, "play", play_once)
        patch.setattr(distributed, "average_and_clip_gradients", team.record)
        if script is magrpo_llm:  # episodes of one item depend on one another, those of different mini-batches do not
            patch.setattr(torch, "randperm", lambda size, **_: torch.arange(size))
        else:
            patch.setattr(script, "critic_forward", critic_forward)
        if values == "true":
            patch.setattr(distributed, "mean_std", lambda x, mask: x.new_tensor([0.0, 1.0]))
            patch.setattr(distributed, "masked_mean", lambda x, mask, dim=(): torch.zeros_like(x.sum(dim)))
        args = make_args(script, num_turns, folder, **flags)
        script.main(args, task=game, model=build_model(), tokenizer=build_tokenizer())
    return team


def read_transcripts(game, rollout, i):
    """Of each turn the states [B] and answers [B, 2] in the transcripts of agent i, and the answers' columns."""
    states, answers, columns = [], [], []
    prompts = [own[i] for own in game.prompt_ids]
    for ids, turns, mask in zip(rollout.ids.tolist(), rollout.turns.tolist(), rollout.attention_mask.tolist()):
        own_states, own_columns = [], []
        pieces = itertools.groupby(range(sum(mask)), key=lambda column: turns[column])
        for turn, piece in pieces:
            piece = [*piece]
            if turn:
                own_columns.append(piece)
            else:
                own_states.append(prompts.index([ids[column] for column in piece]))
        states.append(own_states)
        columns.append(own_columns)
    columns = torch.tensor(columns)  # [B, T, 2]
    answers = rollout.ids.gather(1, columns.flatten(1)).view(columns.shape)
    return torch.tensor(states).T, answers.transpose(0, 1), columns


def row_of(answers):
    """The row among 256 of answers [B, 2]."""
    return NUM_TOKENS * answers[:, 0] + answers[:, 1]


def look_up(tables, game, rollout, i):
    """V(h) [B, S] before each token that agent i sampled; 100 elsewhere, where it is not to count."""
    states, answers, columns = read_transcripts(game, rollout, i)
    history_values = [tables[0][states[0]]]
    if len(states) == 2:
        history_values.append(tables[1][states[0], row_of(answers[0]), states[1] - SECOND_STATES[0]])
    values = torch.full(rollout.ids.shape, 100.0)
    for t, found in enumerate(history_values):  # [B, 17]
        values.scatter_(1, columns[:, t, :1], found[:, :1])
        values.scatter_(1, columns[:, t, 1:], found.gather(1, 1 + answers[t][:, :1]))
    return values


def of_turns(values, turns, num_turns):
    """Those of the first token of each turn, [B, T + 1]; 100 where they are not to count."""
    table = torch.full((len(values), num_turns + 1), 100.0)
    for b, k in itertools.product(range(len(values)), range(1, num_turns + 1)):
        columns = [t for t, turn in enumerate(turns[b].tolist()) if turn == k]
        if columns:
            table[b, k] = values[b, columns[0]]
    return table


def look_up_jointly(tables, game, rollouts):
    """V [B, T + 1] of what the team has read and written before each turn."""
    (states, own, _), (_, other, _) = [read_transcripts(game, rollout, i) for i, rollout in enumerate(rollouts)]
    values = [torch.full(states[0].shape, 100.0), tables[0][states[0]]]
    if len(states) == 2:
        values.append(tables[1][states[0], row_of(own[0]), row_of(other[0])])
    return torch.stack(values, 1)


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
        assert len(gradients) == EPISODES // MINI_BATCH
        comparisons.append(compare(gradients, -exact / divisor))
    return comparisons


def actions(num_turns, granularity):
    """Of an episode."""
    return num_turns * LENGTH if granularity == "token" else num_turns


def params(*short, slow=()):
    """Cases: of the short form, and those that only -m slow runs."""
    return [pytest.param(*case) for case in short] + [pytest.param(*case, marks=pytest.mark.slow) for case in slow]


@pytest.mark.parametrize(
    "num_turns, gae_lambda, values",
    params((2, 0.5, "true"), slow=[(2, 1.0, "arbitrary"), (1, 0.5, "true"), (1, 1.0, "arbitrary")]),
)
def test_ippo_follows_the_exact_gradient(num_turns, gae_lambda, values, tmp_path):
    team = learn(ippo_llm, num_turns, values, tmp_path, gae_lambda=gae_lambda)
    for comparison in compare_agents(team, actions(num_turns, "token")):
        assert comparison.equal, comparison


@pytest.mark.parametrize("num_turns", params((2,), slow=[(1,)]))
def test_iac_with_true_values_follows_the_exact_gradient(num_turns, tmp_path):
    team = learn(iac_llm, num_turns, "true", tmp_path)
    for comparison in compare_agents(team, num_turns):
        assert comparison.equal, comparison


@pytest.mark.parametrize("num_turns", params((2,), slow=[(1,)]))
def test_maac_with_true_values_follows_the_exact_gradient(num_turns, tmp_path):
    team = learn(maac_llm, num_turns, "true", tmp_path)
    for comparison in compare_agents(team, num_turns):
        assert comparison.equal, comparison


@pytest.mark.parametrize(
    "num_turns, mode, length",
    params(
        (2, "rloo", 1.0),
        slow=[(2, "mean", 1 - 1 / GENERATIONS), (1, "rloo", 1.0), (2, "raw", 1.0)],
    ),
)
def test_magrpo_follows_the_exact_gradient(num_turns, mode, length, tmp_path):
    team = learn(magrpo_llm, num_turns, None, tmp_path, advantage_mode=mode)
    for comparison in compare_agents(team, num_turns / length):
        assert comparison.equal, comparison


@pytest.mark.parametrize(
    "num_turns, granularity, turn_level_clip, gae_lambda, values",
    params(
        (2, "turn", True, 0.5, "true"),
        slow=[
            (2, "token", False, 0.5, "true"),
            (2, "turn", False, 0.5, "true"),
            (1, "token", False, 1.0, "arbitrary"),
            (2, "token", False, 1.0, "arbitrary"),
            (2, "turn", True, 1.0, "arbitrary"),
            (1, "turn", True, 0.5, "true"),
        ],
    ),
)
def test_ppo_follows_the_exact_gradient(num_turns, granularity, turn_level_clip, gae_lambda, values, tmp_path):
    flags = {"action_granularity": granularity, "gae_lambda": gae_lambda, "turn_level_clip": turn_level_clip}
    team = learn(ppo_llm, num_turns, values, tmp_path, **flags)
    num_ratios = actions(num_turns, "turn" if turn_level_clip else "token")  # its loss is a mean over ratios
    for comparison in compare_agents(team, num_ratios):
        assert comparison.equal, comparison


# --- What is wrong is seen --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_log_probability_without_gradient_is_seen(tmp_path, monkeypatch):
    policy_forward = ippo_llm.policy_forward

    def detached_after_the_first_token(policy, rollout, rows, args):
        logprobs, *others = policy_forward(policy, rollout, rows, args)
        turns = rollout.turns[rows]
        is_later = torch.cat([turns[:, :1] < 0, turns[:, 1:] == turns[:, :-1]], 1)
        return torch.where(is_later, logprobs.detach(), logprobs), *others

    monkeypatch.setattr(ippo_llm, "policy_forward", detached_after_the_first_token)
    team = learn(ippo_llm, 2, "true", tmp_path, gae_lambda=0.5)
    for comparison in compare_agents(team, actions(2, "token")):
        assert not comparison.equal, comparison
