"""PettingZoo's classic games by name, for teams: --env pettingzoo:tictactoe_v3, or pettingzoo:rps_v2(max_cycles=1).

A seat reads what it observes, as text (render_text), and the numbers of its legal actions, PettingZoo's own. It answers
with a number. As in games of OpenSpiel an answer that is no such number costs 1, and a uniformly random legal action is
played. Chance, and actions that stand in, follow from the item's seed.
"""

import ast
import importlib
import random
import re
import warnings

import numpy as np

from utils.cli import UserError, describe
from utils.envs.seats import LARGEST_SEED, Game, check_seats

PIN = "'pettingzoo[classic]==1.27.0'"


def load(name, args):
    """The game of that name. Raises UserError."""
    label = f"--env pettingzoo:{name}"
    game = make_game(name, label)
    check_seats(label, game.num_seats, args)
    return game


def make_game(name, label):
    """The game of a name, or of NAME(key=value, ...) with what PettingZoo's env() takes. Raises UserError."""
    try:
        import pettingzoo  # noqa: F401
    except ImportError as error:
        raise UserError(f"{label} takes a package that is not there: pip install {PIN}") from error
    module_name, parameters = parse(name, label)
    try:
        module = importlib.import_module(f"pettingzoo.classic.{module_name}")
    except ModuleNotFoundError as error:
        if error.name == f"pettingzoo.classic.{module_name}":
            raise UserError(f"{label}: PettingZoo has no classic game of that name, such as tictactoe_v3") from error
        raise UserError(f"{label} takes a package that is not there, {error.name}: pip install {PIN}") from error
    except Exception as error:  # a name with an old version
        raise UserError(f"{label}: {describe(error)}") from error
    if not hasattr(module, "env"):  # a name without its version
        raise UserError(f"{label}: PettingZoo has no classic game of that name, such as tictactoe_v3")
    game = PettingZoo(module, parameters)
    try:
        game.begin(0).answers()
    except ImportError as error:
        raise UserError(f"{label} takes a package that is not there: pip install {PIN}") from error
    except Exception as error:
        raise UserError(f"{label} does not start: {describe(error)}") from error
    return game


def parse(name, label):
    """("rps_v2", {"max_cycles": 1}) of "rps_v2(max_cycles=1)". Raises UserError."""
    parts = re.fullmatch(r"(\w+)(\(.*\))?", name)
    try:
        call = ast.parse(f"dict{parts[2] or '()'}", mode="eval").body
        if call.args:
            raise ValueError(call.args)
        return parts[1], {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (AttributeError, TypeError, ValueError, SyntaxError) as error:
        raise UserError(f"{label}: it takes NAME or NAME(key=value, ...)") from error


class PettingZoo(Game):
    illegal_cost = 1.0

    def __init__(self, module, parameters):
        self.module = module
        self.parameters = parameters
        super().__init__(0)

    def begin(self, seed):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the precision of its own spaces
            env = self.module.env(**self.parameters)
            env.reset(seed=seed % LARGEST_SEED)
        self.num_seats = len(env.possible_agents)
        return Match(env, seed)


class Match:
    def __init__(self, env, seed):
        self.env = env
        self.players = list(env.possible_agents)
        self.stand_in = random.Random(f"pettingzoo stand-in {seed}")
        self.totals = [0.0] * len(self.players)

    @property
    def seat(self):
        env = self.env
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)  # as PettingZoo has it, a player that is out takes its leave
        return self.players.index(env.agent_selection) if env.agents else None

    def text(self, seat):
        player = self.players[seat]
        lines = [f"You are {player}."]
        if player in self.env.agents:
            observed = self.env.observe(player)
            lines += [render_text(observed["observation"] if isinstance(observed, dict) else observed)]
        if self.seat == seat:
            lines += [f"Legal actions: {' '.join(self.answers())}", "Say a number."]
        return "\n".join(lines)

    def answers(self):
        """The legal answers, of the seat whose move it is."""
        player = self.env.agent_selection
        observed = self.env.observe(player)
        infos = self.env.infos[player]
        mask = observed.get("action_mask") if isinstance(observed, dict) else infos.get("action_mask")
        numbers = range(self.env.action_space(player).n) if mask is None else np.flatnonzero(mask)
        return [str(k) for k in numbers]

    def move(self, answer):
        legal = self.answers()
        answer = answer.strip()
        is_legal = answer in legal
        self.env.step(int(answer if is_legal else self.stand_in.choice(legal)))
        for i, player in enumerate(self.players):
            self.totals[i] += float(self.env.rewards.get(player, 0.0))
        return is_legal

    def returns(self):
        return [*self.totals]


def render_text(observed):
    """An observation as text.

    A board of two planes, own pieces and the other's, is drawn with x, o and a point for an empty square; of more
    planes each square that has some is a line "row column: planes". Of a vector the places that are not 0 are named,
    with their number where it is not 1; a number is itself.
    """
    array = np.asarray(observed)
    if array.ndim == 0:
        return str(array)
    if array.ndim == 3 and array.shape[2] == 2:
        return "\n".join(" ".join(".xox"[int(own) + 2 * int(other)] for own, other in row) for row in array)
    if array.ndim == 3:
        squares = [f"{r} {c}: {' '.join(map(str, np.flatnonzero(array[r, c])))}" for r, c in np.argwhere(array.any(2))]
        return "\n".join(squares)
    flat = array.ravel()
    return " ".join(str(k) if flat[k] == 1 else f"{k}={flat[k]:g}" for k in np.flatnonzero(flat)) or "nothing"
