"""TextArena's games by name, for teams: --env textarena:TicTacToe-v0, textarena:SimpleNegotiation-v0.

A seat reads what the game has told it since its last move, without its own answers, which it has. Where the game's own
wrappers put an answer into brackets, so is it here. Before what another seat said stands who it was. What an illegal
answer costs is the game's: mostly it may answer once more, and then loses. TextArena draws from Python's own generator
and NumPy's, which each match has for itself, by its seed.
"""

import contextlib
import random

import numpy

from utils.cli import UserError, describe
from utils.envs.seats import LARGEST_SEED, Game, check_seats

PIN = "textarena==0.7.4"


def load(name, args):
    """The game of that name. Raises UserError."""
    label = f"--env textarena:{name}"
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise UserError(f"{label} takes a package that is not there: pip install {PIN}") from error
    if name not in ENV_REGISTRY or f"{name}-raw" not in ENV_REGISTRY:
        raise UserError(f"{label}: TextArena has no game of that name, such as TicTacToe-v0")
    check_seats(label, max(2, args.num_agents), args)
    wrappers = ENV_REGISTRY[name].default_wrappers or []
    game = TextArena(textarena, name, args.num_agents, textarena.wrappers.ActionFormattingWrapper in wrappers)
    try:
        num_seats = game.begin(0).env.state.num_players
    except (Exception, SystemExit) as error:
        raise UserError(f"{label} does not start with --num-agents {args.num_agents}: {describe(error)}") from error
    check_seats(label, num_seats, args)
    return game


class TextArena(Game):
    def __init__(self, textarena, name, num_seats, in_brackets):
        super().__init__(num_seats)
        self.textarena = textarena
        self.name = name
        self.in_brackets = in_brackets

    def begin(self, seed):
        return Match(self.textarena.make(f"{self.name}-raw"), self.num_seats, self.in_brackets, seed)


def set_random_states(of_python, of_numpy):
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)


class Match:
    def __init__(self, env, num_seats, in_brackets, seed):
        self.env = env
        self.num_seats = num_seats
        self.in_brackets = in_brackets
        seed = seed % LARGEST_SEED
        self.random_states = random.Random(seed).getstate(), numpy.random.RandomState(seed).get_state()
        with self.own_random():
            env.reset(num_players=num_seats, seed=seed)

    @contextlib.contextmanager
    def own_random(self):
        """Within it Python's own generator and NumPy's are the match's."""
        before = random.getstate(), numpy.random.get_state()
        set_random_states(*self.random_states)
        try:
            yield
        finally:
            self.random_states = random.getstate(), numpy.random.get_state()
            set_random_states(*before)

    @property
    def seat(self):
        return None if self.env.state.done else self.env.state.current_player_id

    def text(self, seat):
        messages = self.env.state.observations[seat]
        if seat == self.seat:
            with self.own_random():
                _, messages = self.env.get_observation()  # some games tell whose move it is only then
        self.env.state.observations[seat] = []
        lines = []
        for sender, message, _ in messages:
            if sender in range(self.num_seats):  # else it is the game that speaks
                message = f"[{self.env.state.role_mapping.get(sender, f'Player {sender}')}] {message}"
            if sender != seat:
                lines.append(message)
        return "\n".join(lines) or "It is your move."

    def move(self, answer):
        seat = self.seat
        if self.in_brackets and "[" not in answer and "]" not in answer:
            answer = f"[{answer.strip()}]"
        state = self.env.state
        state.game_info[seat]["invalid_move"] = False  # it may be of an earlier answer
        with self.own_random():
            self.env.step(answer)
        return not (getattr(state, "error_count", 0) or state.game_info[seat].get("invalid_move"))

    def returns(self):
        earned = self.env.state.rewards or {}
        return [float(earned.get(seat, 0.0)) for seat in range(self.num_seats)]
