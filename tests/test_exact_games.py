"""The expected update of each seat of a game is the exact gradient of its own return, where rewards are opposite too.

Two seats move one after the other, in three turns. Seat 0 reads a card, and answers with two tokens of two kinds. Seat
1 reads one of two signals of that answer, and answers. After some pairs of answers the game ends there. After the
others seat 0 reads a signal of the answer of seat 1, and answers once more. Each turn pays both seats, by tables of
random numbers: opposite ones, or those of any two players. What a seat earns before it first acts, it does not learn
from, and it is no part of the gradient.

The game has 68 plays. A script's own `play` and `learn` are given each of them once, as an episode and as a mini-batch
of its own, and no gradient becomes a step: the ratio is 1. Summed with the probabilities of the plays, which are
computed in double precision, the gradients are the expected update, without the noise of sampling. The returns J_i of
the seats are sums over the plays too, and autograd differentiates each by its own seat's parameters. A loss is a mean
over the tokens or turns of an episode, whose number a play's gradient is multiplied by.
"""

import contextlib
import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from test_exact_gradients import build_model, build_tokenizer, exact_copy, flatten

import iac_llm
import ippo_llm
import ppo_llm
from utils import distributed
from utils.models.weights import optimizers_of

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # peft, about GPT-2's layers

NUM_TOKENS = 2
LENGTH = 2  # tokens of an answer
ANSWERS = [*itertools.product(range(NUM_TOKENS), repeat=LENGTH)]
CARDS = ["a", "a a"]
SIGNALS = [["a a a", "a"], ["a", "a a a"]]  # of the other's answer, as each seat reads them
LARGEST_ERROR = 1e-4  # of an update, by the length of the exact gradient: the scripts compute in float32


# --- The game ---------------------------------------------------------------------------------------------------------


@dataclass
class Play:
    """One course of the game: the card, and the rows of the answers among all 4, two or three of them."""

    card: int
    rows: tuple

    def transcript(self, seat):
        """(ids, turns) of what a seat reads and writes; turn 0: it reads."""
        read = [CARDS[self.card], SIGNALS[1][self.rows[0] % 2], SIGNALS[0][self.rows[1] % 2]]
        ids, turns = [], []
        for turn in range(1 + seat, 1 + len(self.rows), 2):
            prompt = ["_a".index(word) for word in read[turn - 1].split()]
            ids += [*prompt, *ANSWERS[self.rows[turn - 1]]]
            turns += [0] * len(prompt) + [turn] * LENGTH
        return ids, turns


def goes_on(rows):
    return len(rows) < 2 or len(rows) == 2 and sum(rows) % 3 == 0


def enumerate_plays():
    plays = []
    for card, *rows in itertools.product(range(len(CARDS)), range(4), range(4)):
        ends = [(*rows, last) for last in range(4)] if goes_on(rows) else [tuple(rows)]
        plays += [Play(card, end) for end in ends]
    return plays


PLAYS = enumerate_plays()


class Game:
    """Its rewards, and the environment whose episodes are PLAYS; `paid` may be replaced, which changes what it pays."""

    def __init__(self, opposite):
        generator = torch.Generator().manual_seed(1)
        shapes = [(2, 2, *[4] * turn) for turn in (1, 2, 3)]  # seat, card, answers
        self.tables = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        if opposite:
            self.tables = [torch.stack([table[0], -table[0]]) for table in self.tables]
        self.paid = lambda turn, rewards: rewards

    def rewards(self, play, turn):
        """What a turn of a play pays the two seats."""
        return [float(own[play.card][play.rows[:turn]]) for own in self.tables[turn - 1]]

    def TeamEnv(self, task, items, args):
        self.turn = 0
        return SimpleNamespace(reset=self.observe, step=self.step)

    def observe(self):
        """Whose turn it is reads; in turn k these are the plays that have so many answers."""
        self.turn += 1
        acts = (self.turn - 1) % 2
        observations = [{}, {}]
        self.acting = [b for b, play in enumerate(PLAYS) if len(play.rows) >= self.turn]
        for b in self.acting:
            play = PLAYS[b]
            text = SIGNALS[acts][play.rows[self.turn - 2] % 2] if self.turn > 1 else CARDS[play.card]
            observations[acts][b] = [{"role": "user", "content": text}]
        return observations

    def step(self, actions):
        paid = {b: self.paid(self.turn, self.rewards(PLAYS[b], self.turn)) for b in self.acting}
        rewards = [{b: paid[b][seat] for b in self.acting} for seat in (0, 1)]
        return self.observe(), rewards, set()

    def answers(self):
        """What is written in this turn, in the place of sampled answers: ids, by episode."""
        return [[*ANSWERS[PLAYS[b].rows[self.turn - 1]]] for b in self.acting]


# --- What is exact: by enumeration ------------------------------------------------------------------------------------


def log_probabilities(actor, seat):
    """log pi of all that a seat writes in each play [P], differentiable, in double precision and without padding."""
    of_length = defaultdict(list)
    for b, play in enumerate(PLAYS):
        of_length[len(play.transcript(seat)[0])].append(b)
    logs = {}
    for episodes in of_length.values():
        ids, turns = (torch.tensor(x) for x in zip(*[PLAYS[b].transcript(seat) for b in episodes]))
        logits = actor.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        logs |= dict(zip(episodes, (logprobs * (turns[:, 1:] > 0)).sum(1)))
    return torch.stack([logs[b] for b in range(len(PLAYS))])


def enumerate_game(actors, game):
    """The probabilities of PLAYS [P], and of each seat the gradient of its own return by its own actor."""
    actors = [exact_copy(actor) for actor in actors]
    logs = [log_probabilities(actor, seat) for seat, actor in enumerate(actors)]
    probabilities = (logs[0] + logs[1]).exp() / len(CARDS)
    assert probabilities.sum().item() == pytest.approx(1)
    gradients = []
    for seat, actor in enumerate(actors):
        returns = [sum(game.rewards(play, turn)[seat] for turn in range(1, 1 + len(play.rows))) for play in PLAYS]
        J = probabilities @ torch.tensor(returns, dtype=torch.float64)
        gradients.append(flatten(torch.autograd.grad(J, actor.parameters(), retain_graph=True)))
    return probabilities.detach(), gradients


def true_values(seat, probabilities, game):
    """{(ids that a seat has read and written, their turns): what it earns from there on, expected}."""
    weighted, mass = defaultdict(float), defaultdict(float)
    for play, probability in zip(PLAYS, probabilities.tolist()):
        ids, turns = play.transcript(seat)
        for t, turn in enumerate(turns):
            if turn:
                to_come = sum(game.rewards(play, later)[seat] for later in range(turn, 1 + len(play.rows)))
                weighted[*ids[:t], *turns[:t]] += probability * to_come
                mass[*ids[:t], *turns[:t]] += probability
    return {history: weighted[history] / mass[history] for history in mass}


# --- What the scripts do ----------------------------------------------------------------------------------------------

PLAIN = {"reward_normalization": False, "advantage_normalization": False}
FLAGS = {
    ippo_llm: PLAIN | {"kl_coef": 0.0},
    iac_llm: PLAIN | {"kl_coef": 0.0},
    ppo_llm: PLAIN | {"kl_loss_coef": 0.0, "update_epochs": 1, "lora_rank": 2, "lora_alpha": 2.0},
}


class Recorder:
    """In place of a Run: one update, or several, in which every actor's gradient is noted and becomes no step."""

    def __init__(self, game, num_updates=1):
        self.game = game
        self.num_updates = num_updates
        self.gradients = defaultdict(list)  # of each agent, of each mini-batch
        self.rollouts = []  # of each update

    @contextlib.contextmanager
    def start(self, agents, generator):
        self.agents = agents
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for agent in agents:
                for parameter in agent.actor.parameters():
                    parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
        actors = [agent.actor for agent in agents * (2 // len(agents))]  # --self-play: one agent has both seats
        self.probabilities, self.exact = enumerate_game(actors, self.game)
        yield self

    def updates(self):
        return range(self.num_updates)

    def is_due(self, *_):
        return False

    def log(self, items, rollouts, *_, **__):
        self.rollouts.append(rollouts)

    def record(self, optimizer, max_norm):
        parameters = optimizer.param_groups[0]["params"]
        for i, agent in enumerate(self.agents):
            if optimizer is optimizers_of(agent)[0]:
                self.gradients[i].append(flatten([parameter.grad for parameter in parameters]))
        optimizer.zero_grad()
        return torch.tensor(0.0)


def learn(script, game, folder, values="own", num_updates=1, **flags):
    """Let a script's `main` learn from all plays, by values of its "own" critic or "true" ones; returns a Recorder."""
    recorder = Recorder(game, num_updates)
    play = script.play

    def play_all(players, task, items, args, generator):
        assert len(items) == len(PLAYS)
        return play(players, task, PLAYS, args, generator)

    def generate(agent, contexts, args, generator):
        return game.answers() if contexts else []

    def critic_forward(learner, rollout, *arguments):
        rows = arguments[1 if script is ppo_llm else 0]  # PPO's are behind the places that are read
        table = values_of(recorder.agents.index(learner))
        turns = rollout.turns[rows]
        own_values = torch.full(rollout.ids[rows].shape, 100.0)
        turn_values = torch.full((len(turns), 1 + int(rollout.turns.max())), 100.0)
        for k, t in reversed((turns > 0).nonzero().tolist()):  # a turn's first token comes last
            own_values[k, t] = table[*rollout.ids[rows][k, :t].tolist(), *turns[k, :t].tolist()]
            turn_values[k, turns[k, t]] = own_values[k, t]
        if script is iac_llm:
            own_values = turn_values
        return own_values + 0 * learner.value_head[-1].bias  # it has a gradient, of 0

    @functools.cache
    def values_of(seat):
        return true_values(seat, recorder.probabilities, game)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Run", lambda *_: recorder)
        patch.setattr(script, "play", play_all)
        patch.setattr(script, "generate", generate)
        patch.setattr(distributed, "average_and_clip_gradients", recorder.record)
        patch.setattr(torch, "randperm", lambda size, **_: torch.arange(size))
        if values == "true":
            patch.setattr(script, "critic_forward", critic_forward)
            no_baseline = lambda x, mask, dim=(): torch.zeros_like(x.sum(dim))  # noqa: E731
            patch.setattr(distributed, "masked_mean", no_baseline)
        sizes = {"rollout_buffer_size": len(PLAYS), "train_size": len(PLAYS), "mini_batch_size": 1, "eval_interval": 0}
        sizes |= {"micro_batch_size": 64, "num_agents": 2, "num_turns": 3, "max_new_tokens": LENGTH}
        sizes |= {"num_train_epochs": num_updates, "output_dir": str(folder)}
        args = script.Args(**(sizes | FLAGS[script] | flags))
        script.main(args, game, build_model(NUM_TOKENS), build_tokenizer("_a"))
    return recorder


def expected_update(gradients, probabilities, seat, is_by_turn):
    """The mean of the gradients of the plays, [D] each, as an ascent on sums over their tokens or turns."""
    transcripts = [play.transcript(seat) for play in PLAYS]
    counts = [len({*turns} - {0}) if is_by_turn else sum(turn > 0 for turn in turns) for _, turns in transcripts]
    return -((probabilities * torch.tensor(counts)) @ torch.stack(gradients))


def error_of(update, exact):
    return float((update - exact).norm() / exact.norm())


def errors(recorder, is_by_turn=False):
    """Of each seat how far its expected update is from the exact gradient, by the length of that."""
    distances = []
    for seat, rollout in enumerate(recorder.rollouts[0]):
        for play, row, numbers in zip(PLAYS, rollout.ids.tolist(), rollout.turns.tolist()):
            ids, turns = play.transcript(seat)
            assert row[: len(ids)] == ids and numbers[: len(ids)] == turns
        update = expected_update(recorder.gradients[seat], recorder.probabilities, seat, is_by_turn)
        distances.append(error_of(update, recorder.exact[seat]))
    return distances


# --- The two compared -------------------------------------------------------------------------------------------------

either_game = pytest.mark.parametrize("opposite", [True, False])


@either_game
@pytest.mark.parametrize(
    "script, values, flags",
    [
        (ppo_llm, "own", {"gae_lambda": 1.0}),
        (ppo_llm, "true", {"gae_lambda": 0.5}),
        (ppo_llm, "true", {"gae_lambda": 0.5, "action_granularity": "turn", "turn_level_clip": True}),
        (ippo_llm, "own", {"gae_lambda": 1.0}),
        (ippo_llm, "true", {"gae_lambda": 0.5}),
        (iac_llm, "true", {}),
    ],
)
def test_each_seat_follows_the_gradient_of_its_own_return(script, values, flags, opposite, tmp_path):
    game = Game(opposite)
    if script is ppo_llm and "action_granularity" not in flags:
        flags = flags | {"action_granularity": "token"}
    recorder = learn(script, game, tmp_path, values, **flags)
    found = errors(recorder, is_by_turn=script is iac_llm or "turn_level_clip" in flags)
    assert max(found) < LARGEST_ERROR, found


def test_one_agent_in_both_seats_follows_the_gradients_of_both(tmp_path):
    """Each seat's gradient is by its own answers alone: that of the sum of opposite returns would be 0."""
    recorder = learn(ppo_llm, Game(opposite=True), tmp_path, self_play=True, gae_lambda=1.0, action_granularity="token")
    gradients = recorder.gradients[0]
    updates = []
    for seat, own in enumerate((gradients[: len(PLAYS)], gradients[len(PLAYS) :])):
        updates.append(expected_update(own, recorder.probabilities, seat, is_by_turn=False))
        assert error_of(updates[seat], recorder.exact[seat]) < LARGEST_ERROR
    assert sum(updates).norm() > 0.1 * updates[0].norm()


def test_against_earlier_copies_it_follows_the_gradient_of_the_seat_that_it_has(tmp_path):
    flags = {"gae_lambda": 1.0, "action_granularity": "token", "self_play": True, "opponents": 1}
    recorder = learn(ppo_llm, Game(opposite=True), tmp_path, num_updates=2, **flags)
    gradients = recorder.gradients[0]
    assert len(gradients) == 2 * len(PLAYS)
    for seat, own in enumerate((gradients[: len(PLAYS)], gradients[len(PLAYS) :])):  # seat 0 in update 0
        update = expected_update(own, recorder.probabilities, seat, is_by_turn=False)
        assert error_of(update, recorder.exact[seat]) < LARGEST_ERROR


@pytest.mark.parametrize(
    "paid",
    [
        lambda turn, rewards: [reward * (turn % 2 != seat) for seat, reward in enumerate(rewards)],
        lambda turn, rewards: rewards[::-1],
    ],
    ids=["what is earned while the other acts is lost", "rewards of the other seat"],
)
def test_wrong_rewards_are_seen(paid, tmp_path):
    flags = {"gae_lambda": 1.0, "action_granularity": "token"}
    game = Game(opposite=True)
    game.paid = paid
    assert min(errors(learn(ppo_llm, game, tmp_path, **flags))) > 100 * LARGEST_ERROR
