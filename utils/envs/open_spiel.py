"""OpenSpiel's games by name, for teams: --env open_spiel:kuhn_poker, or open_spiel:kuhn_poker(players=3).

A seat reads its own information state, all that it has seen so far, and its legal actions with a number each. It
answers with a number. Simultaneous moves are made one after the other, unseen by the others. An answer that is no such
number costs 1, and a uniformly random legal action is played: the match goes on, so nobody gets out of a loss by an
illegal answer, and the others are paid by the rules. Chance, and actions that stand in, follow from the item's seed.
"""

import contextlib
import os
import random

from utils.cli import UserError, one_line
from utils.distributed import say
from utils.envs.seats import LARGEST_SEED, Game, check_seats

PIN = "open_spiel==2.0.2"
MOST_WATCHED = 2000  # information states of a game that is scored with each evaluation of a run


def load(name, args):
    """The game of that name. Raises UserError."""
    label = f"--env open_spiel:{name}"
    game = make_game(name, label)
    check_seats(label, game.num_seats, args)
    if game.begin(0).seat is None:
        raise UserError(f"{label}: only chance moves in it")
    most = game.game.max_game_length()
    if most > args.num_turns:
        say(f"{label} has matches of up to {most} moves: --num-turns {args.num_turns} cuts them short")
        game.has_told_of_cuts = True
    return game


def make_game(name, label):
    """The Game of a name, for any number of seats. Raises UserError."""
    game = OpenSpiel(load_game(name, label), label)
    try:
        with no_stderr():
            match = game.begin(0)
            if match.seat is not None:
                match.answers()
    except Exception as error:
        raise UserError(f"{label} does not start: {one_line(error)}") from error
    return game


def load_game(name, label):
    """The pyspiel.Game of a name, as a sequential one. Raises UserError."""
    try:
        import pyspiel
    except ImportError as error:
        raise UserError(f"{label} takes a package that is not there: pip install {PIN}") from error
    short_name = name.partition("(")[0]
    if short_name not in pyspiel.registered_names():
        raise UserError(f"{label}: OpenSpiel has no game of that name; see pyspiel.registered_names()")
    try:
        with no_stderr():
            game = pyspiel.load_game(name)
        if game.get_type().dynamics == pyspiel.GameType.Dynamics.SIMULTANEOUS:
            game = pyspiel.convert_to_turn_based(game)
    except Exception as error:  # SpielError, and whatever else its C++ throws
        raise UserError(f"{label}: {one_line(error)}") from error
    kind = game.get_type()
    if kind.dynamics != pyspiel.GameType.Dynamics.SEQUENTIAL:
        raise UserError(f"{label}: it is a mean-field game, and no game of seats")
    if not (kind.provides_information_state_string or kind.provides_observation_string):
        raise UserError(f"{label}: it has no text of what a seat sees")
    has_own_chance = kind.chance_mode == pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC
    if has_own_chance and "rng_seed" not in kind.parameter_specification:
        raise UserError(f"{label}: its chance can't be drawn from a seed")
    return game


@contextlib.contextmanager
def no_stderr():
    """Within it nothing is written to stderr: OpenSpiel's C++ prints there what it then throws."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


class OpenSpiel(Game):
    illegal_cost = 1.0

    def __init__(self, game, label):
        super().__init__(game.num_players())
        self.game = game
        self.label = label
        self.is_zero_sum = str(game.get_type().utility) == "Utility.ZERO_SUM"
        self.places = None  # the information states, found when they are first needed; {}: it has no exact score

    def scores(self, agents, args):
        """{name in metrics.csv: exact score} of the agents as they are; nothing of a game that is too large."""
        from utils.envs import exact  # which reads what this module writes

        seats = exact.seats_of(agents, self.num_seats)
        if self.places is None:
            self.places = {}
            try:
                self.places = exact.find_places(self.game, seats, args, most=MOST_WATCHED)
            except UserError as error:
                say(f"no exact score in metrics.csv: {error}")
        if not self.places:
            return {}
        policy, _ = exact.policy_of(self.game, seats, args, places=self.places)
        found = exact.score(self.game, policy, with_optimum=False)
        if found.exploitability is None:
            return {"eval/return": found.returns[0]}
        return {"eval/exploitability": found.exploitability}

    def begin(self, seed):
        return Match(self.seeded(seed), seed)

    def seeded(self, seed):
        """The game, or one that draws its own chance from a seed."""
        parameters = self.game.get_parameters()
        if "rng_seed" not in parameters:
            return self.game
        import pyspiel

        own_seed = seed % LARGEST_SEED
        return pyspiel.load_game(self.game.get_type().short_name, parameters | {"rng_seed": own_seed})


class Match:
    def __init__(self, game, seed):
        self.state = game.new_initial_state()
        self.chance = random.Random(f"open_spiel {seed}")
        self.stand_in = random.Random(f"open_spiel stand-in {seed}")
        self.play_chance()

    def play_chance(self):
        while self.state.is_chance_node():
            outcomes, probabilities = zip(*self.state.chance_outcomes())
            self.state.apply_action(self.chance.choices(outcomes, probabilities)[0])

    @property
    def seat(self):
        return None if self.state.is_terminal() else self.state.current_player()

    def text(self, seat):
        return text_of(self.state, seat)

    def answers(self):
        """The legal answers, of the seat whose move it is."""
        return [str(k) for k, _ in enumerate(self.state.legal_actions(), 1)]

    def move(self, answer):
        numbers = dict(zip(self.answers(), self.state.legal_actions()))
        answer = answer.strip()
        is_legal = answer in numbers
        self.state.apply_action(numbers[answer if is_legal else self.stand_in.choice([*numbers])])
        self.play_chance()
        return is_legal

    def returns(self):
        return self.state.returns()


def text_of(state, seat):
    """What a seat reads, with its legal actions where it is its move; nothing else of the state goes in."""
    has_memory = state.get_game().get_type().provides_information_state_string
    seen = state.information_state_string(seat) if has_memory else state.observation_string(seat)
    lines = [f"You are player {seat}.", *filter(None, [seen.strip()])]
    if not state.is_terminal() and state.current_player() == seat:
        names = [state.action_to_string(seat, action).strip(" ,") for action in state.legal_actions()]
        lines += [", ".join(f"{k} {name}" for k, name in enumerate(names, 1)), "Say a number."]
    return "\n".join(lines)
