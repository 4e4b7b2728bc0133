"""The exact score of agents in a small game of OpenSpiel: how much a best answer to them would win.

At every information state the model is read after what its seat would have read and written there. A legal answer's
probability is that of its tokens, with any token that ends it; they are normalised over the legal answers, and what is
left is the mass on illegal ones. OpenSpiel then has the policy as a table. NashConv is the sum over the seats of what
a best response would win more; exploitability is NashConv by the number of seats. Where all seats earn the same, it is
the expected return that counts, beside that of the best play.
"""

import itertools
import math
from dataclasses import dataclass

import torch

from utils import models
from utils.cli import UserError
from utils.envs.open_spiel import text_of
from utils.models.transcripts import encode_after

MOST_STATES = 20_000  # information states
MOST_PLANS = 10_000  # of a seat, in the search for the best play
CHUNK = 64  # rows that are read at once


@dataclass
class Score:
    """What a policy is worth."""

    exploitability: float | None  # None: all seats earn the same
    nash_conv: float | None
    returns: list  # of each seat, expected
    optimum: float | None  # the return at best, where all seats earn the same
    illegal: float  # mean over the information states of the mass on illegal answers
    most_illegal: float
    num_states: int


# --- Information states -----------------------------------------------------------------------------------------------


@dataclass
class Place:
    """An information state: whose move it is, its legal actions, and the transcript before the answer."""

    seat: int
    actions: list
    before: list  # ids of the transcript before what is read here
    context: list  # ids
    answers: list  # of each legal answer the lists of ids that it may be written with


def seats_of(agents, num_seats):
    """The agent in each seat: one each, or one in all of them (--self-play). A team's critic is left out."""
    seats = agents[:num_seats]
    return seats * (num_seats // len(seats))


def find_places(game, seats, args, most=MOST_STATES):
    """{information state: Place} of a game, for the agents in its seats.

    It does not depend on weights. Raises UserError where there are more than `most`, or none, and where an answer takes
    more tokens than the agents may write.
    """
    if not game.get_type().provides_information_state_string or "rng_seed" in game.get_parameters():
        raise UserError(f"{game} has no information states, or chance of its own, and so no exact score")
    places = {}
    stack = [(game.new_initial_state(), [[] for _ in seats])]
    visited = 0
    while stack:
        state, written = stack.pop()  # written: of each seat, the ids of its transcript so far
        visited += 1
        if len(places) > most or visited > 50 * most:
            raise UserError(f"{game} has more than {most} information states, too many to score exactly")
        if state.is_terminal():
            continue
        if state.is_chance_node():
            stack += [(state.child(action), written) for action, _ in state.chance_outcomes()]
            continue
        seat = state.current_player()
        agent = seats[seat]
        name = state.information_state_string()
        before = written[seat]
        if name in places:
            place = places[name]
            if place.before != before or place.seat != seat:
                raise UserError(f"{game}: a seat forgets what it has read or done, and so it has no exact score")
        else:
            chat = [{"role": "user", "content": text_of(state, seat)}]
            context = before + models.encode(chat, before, agent)
            if len(context) > agent.longest_prompt:
                raise UserError(f"{game}: what a seat reads leaves no room for an answer (--max-model-len)")
            actions = state.legal_actions()
            place = places[name] = Place(seat, actions, before, context, answers_of(len(actions), agent, args))
        for action, answer in zip(place.actions, place.answers):
            after = [*written]
            after[seat] = place.context + answer[0]
            stack.append((state.child(action), after))
    return places


def answers_of(num_actions, agent, args):
    """The ids of the numbers 1, 2 ...: as tokenized, without a tokenizer's own space, after a space: [number - 1][way].

    Each has the token that ends an answer, unless --max-new-tokens ends it.
    """
    ends = agent.end_ids.tolist()
    if not ends:
        raise UserError("the model has no end token, and so no exact score")
    end = agent.tokenizer.eos_token_id if agent.tokenizer.eos_token_id in ends else ends[0]
    answers = []
    for k in range(1, num_actions + 1):
        ids, spaced = (agent.tokenizer(text, add_special_tokens=False).input_ids for text in (str(k), f" {k}"))
        bare = encode_after("\n", str(k), agent.tokenizer)  # some tokenizers put a space before whatever is first
        least = min(len(ids), len(bare))
        if least > args.max_new_tokens:
            raise UserError(f"--max-new-tokens {args.max_new_tokens} is too few to answer {k}, which has {least}")
        ways = dict.fromkeys(map(tuple, (ids, bare, spaced)))  # each once
        spellings = [way for way in ways if len(way) <= args.max_new_tokens]
        answers.append([[*spelling, end][: args.max_new_tokens] for spelling in spellings])
    return answers


# --- Probabilities ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def log_probabilities(agent, rows, args):
    """log pi of answers after contexts, a list of floats for (context, answer) lists of ids.

    What a seat reads later begins with what it has read before: a row that another one begins with is read with that.
    """
    found = [0.0] * len(rows)
    device = agent.actor.device
    reads = sorted(join_prefixes(rows), key=lambda read: len(read[0]))  # rows of like length: less padding
    for start in range(0, len(reads), CHUNK):
        chunk = reads[start : start + CHUNK]
        width = len(chunk[-1][0]) + 1
        pad = agent.tokenizer.pad_token_id
        ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in chunk], device=device)
        where = torch.zeros_like(ids, dtype=torch.bool)
        for row, (_, spans) in enumerate(chunk):
            for _, first, end in spans:
                where[row, first:end] = True
        logits = agent.actor.read(ids, before=where).logits.float() / args.temperature
        of_vocabulary = logits.log_softmax(-1)
        logprobs = of_vocabulary.gather(1, ids[where][:, None]).squeeze(1)
        is_end = torch.isin(ids[where], agent.end_ids)  # an answer may end with any of them
        logprobs = torch.where(is_end, of_vocabulary[:, agent.end_ids].logsumexp(-1), logprobs)
        logprobs = models.unflatten(logprobs, where)
        for row, (_, spans) in enumerate(chunk):
            for k, first, end in spans:
                found[k] = float(logprobs[row, first:end].sum())
    return found


def join_prefixes(rows):
    """The ids that are to be read for all rows: [(ids, [(k, first, end) of row k's answer in them])]."""
    reads = []
    order = sorted(range(len(rows)), key=lambda k: rows[k][0] + rows[k][1], reverse=True)
    for k in order:
        context, answer = rows[k]
        ids = context + answer
        span = (k, len(context), len(ids))
        if reads and reads[-1][0][: len(ids)] == ids:  # whatever begins with it stands right before it
            reads[-1][1].append(span)
        else:
            reads.append((ids, [span]))
    return reads


def policy_of(game, seats, args, as_played=False, places=None):
    """(OpenSpiel's TabularPolicy of the agents in a game's seats, [the mass on illegal answers at each state]).

    With `as_played` that mass is spread over the legal actions, as a match does it, in place of normalising. `places`
    are those of find_places, if they are known. Raises UserError.
    """
    from open_spiel.python.policy import TabularPolicy

    places = places or find_places(game, seats, args)
    policy = TabularPolicy(game)  # its states are those of its own search
    illegal = []
    for agent in dict.fromkeys(seats):
        own = {name: place for name, place in places.items() if seats[place.seat] is agent}
        rows = [(place.context, ids) for place in own.values() for answer in place.answers for ids in answer]
        logprobs = iter(log_probabilities(agent, rows, args))
        for name, place in own.items():
            spelled = [torch.tensor([next(logprobs) for _ in answer], dtype=torch.float64) for answer in place.answers]
            logs = torch.stack([each.logsumexp(0) for each in spelled])
            mass = float(1 - logs.exp().sum().clamp(max=1))
            illegal.append(mass)
            probabilities = policy.policy_for_key(name)
            probabilities[:] = 0
            legal = logs.exp() + mass / len(logs) if as_played else logs.softmax(0)
            probabilities[place.actions] = legal.numpy()
    return policy, illegal


# --- Scores -----------------------------------------------------------------------------------------------------------


def score(game, policy, illegal=(0.0,), with_optimum=True):
    """The Score of a policy of OpenSpiel. The search for the best play may be left out: it takes up to some minutes."""
    from open_spiel.python.algorithms import expected_game_score, exploitability

    returns = expected_game_score.policy_value(game.new_initial_state(), [policy] * game.num_players())
    returns = [float(value) for value in returns]
    mass = (sum(illegal) / len(illegal), max(illegal), len(policy.state_lookup))
    if earns_alike(game):
        return Score(None, None, returns, optimum_of(game) if with_optimum else None, *mass)
    nash_conv = float(exploitability.nash_conv(game, policy))
    return Score(nash_conv / game.num_players(), nash_conv, returns, None, *mass)


def earns_alike(game):
    """Whether all seats earn the same in every match of a game; OpenSpiel's own word is for some games only."""
    stack = [game.new_initial_state()]
    while stack:
        state = stack.pop()
        if state.is_terminal():
            if len(set(state.returns())) > 1:
                return False
        elif state.is_chance_node():
            stack += [state.child(action) for action, _ in state.chance_outcomes()]
        else:
            stack += [state.child(action) for action in state.legal_actions()]
    return True


def optimum_of(game):
    """The return of the best play of two seats that earn the same: a search over the plans of one, which the other
    answers best. None: there are more than two seats, or too many plans.
    """
    from open_spiel.python.algorithms.best_response import BestResponsePolicy
    from open_spiel.python.policy import TabularPolicy

    plan = TabularPolicy(game)
    masks = [plan.legal_actions_mask[[plan.state_lookup[name] for name in names]] for names in plan.states_per_player]
    counts = [math.prod(int(mask.sum()) for mask in own) for own in masks]
    seat = counts.index(min(counts))
    if game.num_players() != 2 or counts[seat] > MOST_PLANS:
        return None
    rows = [plan.state_lookup[name] for name in plan.states_per_player[seat]]
    best = -math.inf
    for chosen in itertools.product(*[mask.nonzero()[0] for mask in masks[seat]]):
        plan.action_probability_array[rows] = 0
        plan.action_probability_array[rows, chosen] = 1
        response = BestResponsePolicy(game, 1 - seat, plan)
        best = max(best, response.value(game.new_initial_state()))
    return float(best)
