"""Environments: their rules and optima against brute force, loading, a batch under way, and what may go wrong in it."""

import collections
import functools
import math
import random
import re
from types import ModuleType

import numpy
import pytest
import torch
from helpers import PLACE, make_ppo_agents, make_ppo_args

import ppo_llm
from utils.cli import TaskError, UserError
from utils.envs import Games, game_seeds, grid, guess, load_env

pytestmark = pytest.mark.usefixtures("in_tmp_path")


class Echo:
    """Says back what it hears, for 1 each, until it hears bye; `heard` has the calls of all of them."""

    heard = []

    def reset(self, seed=None):
        self.heard.append(f"reset {seed}")
        return f"seed {seed}", {}

    def step(self, answer):
        self.heard.append(answer)
        return answer, 1, answer == "bye", answer == "late", {}

    def close(self):
        self.heard.append("close")


@pytest.fixture
def heard(monkeypatch):
    monkeypatch.setattr(Echo, "heard", [])
    return Echo.heard


class Match:
    """A batch of games under way, one of each seed: `running` are those that go on, `rewards` what each has earned."""

    def __init__(self, factory, seeds):
        self.games = Games(factory, [{"seed": seed} for seed in seeds])
        self.running = [k for k in range(len(seeds)) if k not in self.games.dropped]
        self.rewards = [[] for _ in seeds]

    def step(self, answers):
        """Let the running games have an answer each."""
        rewards, learned_from = self.games.reward_func(self.running, None, [answers])
        assert rewards == learned_from
        for k, reward in zip(self.running, *rewards, strict=True):
            self.rewards[k].append(reward)
        self.running = [k for k in self.running if self.goes_on(k)]

    def goes_on(self, k):
        prompts = self.games.external_transition(k)
        if prompts is None or k in self.games.truncated:
            return False
        assert prompts == [self.games.observations[k]]
        self.games.add_prompts(k, prompts)
        return True

    @property
    def observations(self):
        """The last of each game; None: reset failed."""
        first = {k: history[0][0] for k, history in enumerate(self.games.prompt_history) if history[0]}
        last = first | self.games.observations
        return [last.get(k) for k in range(len(self.rewards))]

    @property
    def ended(self):
        """How each game ended; None: it did not by itself."""
        ends = {}
        for how in ("terminated", "truncated", "dropped"):
            ends |= dict.fromkeys(getattr(self.games, how), how)
        return [ends.get(k) for k in range(len(self.rewards))]


# The rules


def play(env, seed, answers):
    """Observations and rewards of a fresh environment, and whether it ended with the last of the answers."""
    environment = env()
    observations, rewards, ended = [environment.reset(seed)[0]], [], False
    for answer in answers:
        assert not ended
        observation, reward, ended, truncated, info = environment.step(answer)
        assert (truncated, info) == (False, {})
        observations.append(observation)
        rewards.append(reward)
    return observations, rewards, ended


def seed_of(number):
    def hidden(seed):
        environment = guess.Env()
        environment.reset(seed)
        return environment.secret

    return next(seed for seed in range(1000) if hidden(seed) == number)


def worth(below, above):
    """Half the chance that a number with so many below and above it is met; half the entropy, of 4 bits."""
    left = below + 1 + above
    entropy = 0.0
    for n in (below, 1, above):
        entropy -= n / left * (math.log(n / left, 2) if n else 0)
    return 0.5 / left + 0.5 * entropy / 4


COST = 1 / 6  # of every turn but the first
GUESSES = {  # of 11: answers, what is observed after each, what each earns
    "at once": (["11"], "met", [worth(10, 5)]),
    "in three": (["8", " 16\n", "11"], "higher lower met", [worth(7, 8), worth(7, 0) - COST, worth(2, 4) - COST]),
    "with a zero before it": (["8", "011"], "higher met", [worth(7, 8), worth(2, 5) - COST]),
    "again and again": (
        ["1"] * 5 + ["11"],
        "higher higher higher higher higher met",
        [worth(0, 15), *[-COST] * 4, worth(9, 5) - COST],
    ),
    "what is ruled out": (
        ["8", "3", "12", "14", "9", "10"],
        "higher higher lower lower higher out_of_turns",
        [
            worth(7, 8),
            -COST,
            worth(3, 4) - COST,
            -COST,
            worth(0, 2) - COST,
            worth(0, 1) - COST,
        ],  # 11 is left, not guessed
    ),
    "the only one that is left": (
        ["10", "12", "11"],
        "higher lower met",
        [worth(9, 6), worth(1, 4) - COST, worth(0, 0) - COST],  # the last tells nothing, but meets it
    ),
    "what is no such number": (["0", "17", "999"], "higher lower lower", [0.0, -COST, -COST]),
    "never": (["1"] * 6, "higher higher higher higher higher out_of_turns", [worth(0, 15), *[-COST] * 5]),
}


@pytest.mark.parametrize("case", GUESSES)
def test_guess_move_by_move(case):
    answers, observed, earned = GUESSES[case]
    observations, rewards, ended = play(guess.Env, seed_of(11), answers)
    assert observations[0] == "I think of a number from 1 to 16. Guess it."
    assert [text.replace(" ", "_") for text in observations[1:]] == observed.split()
    assert rewards == pytest.approx(earned, abs=1e-12)
    assert ended == (observed.split()[-1] in ("met", "out_of_turns"))


@pytest.mark.parametrize("strategy", range(20))
def test_a_number_found_is_worth_what_its_turn_is_on_average(strategy):
    """For any strategy that finds all numbers: guess the middle of what is left, or nearly, and waste some turns."""
    rng, scores, turns = random.Random(strategy), [], []
    guesses = {}  # the guess after a history, the same for every number
    for secret in range(1, 17):
        environment, low, high, history, ended, score = guess.Env(), 1, 16, (), False, 0.0
        environment.reset(seed_of(secret))
        while not ended:
            near = (low + high) // 2 + (rng.choice([-1, 0, 1]) if high - low > 4 else 0)
            wasted = len(history) == 1 and rng.random() < 0.2
            number = guesses.setdefault(history, rng.choice([0, 17, 99]) if wasted else near)
            observation, reward, ended, _, _ = environment.step(str(number))
            low, high = (max(low, number + 1), high) if observation == "higher" else (low, min(high, number - 1))
            history, score = (*history, observation), score + reward
        assert observation == "met"
        scores.append(score)
        turns.append(len(history))
    assert sum(scores) / 16 == pytest.approx(sum((7 - t) / 6 for t in turns) / 16, abs=1e-12)
    assert sum(scores) / 16 <= guess.optimum(6) + 1e-12


NO_NUMBERS = ["", "1000", "0011", "11.0", "-1", "١١", "²"]


@pytest.mark.parametrize("answer", [*NO_NUMBERS, "I say 11"])
def test_anything_but_a_number_ends_the_guessing_and_costs_1(answer):
    observations, rewards, ended = play(guess.Env, seed_of(11), ["8", answer])
    assert (observations[-1], rewards, ended) == ("not a number", [worth(7, 8), -1.0], True)
    assert play(guess.Env, seed_of(11), [answer])[1:] == ([-1.0], True)


def test_hidden_numbers_are_uniform_and_come_from_the_seed():
    def numbers():
        for seed in range(1600):
            environment = guess.Env()
            environment.reset(seed)
            yield environment.secret

    drawn = list(numbers())
    counts = collections.Counter(drawn)
    assert sorted(counts) == list(range(1, 17))
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 37.7  # chi-square of 15, one in a thousand
    assert drawn == list(numbers())
    environment = guess.Env()  # nor does it depend on the games before, and without a seed they differ
    assert [environment.reset(seed) and environment.secret for seed in range(50)] == drawn[:50]
    assert len({environment.reset() and environment.secret for _ in range(50)}) > 1


def best_guessing(max_turns):
    """The expected score at best, by guessing in every turn every number from 0 to 17, of the environment itself."""

    @functools.cache
    def search(games, turn):
        """The most points that games of one history, (secret, low, high) each, earn together from this turn on."""
        if turn > max_turns:
            return 0.0
        scores = []
        for number in range(guess.MAX_NUMBER + 2):
            score, outcomes = 0.0, collections.defaultdict(list)
            for secret, low, high in games:
                environment = guess.Env()
                vars(environment).update(secret=secret, low=low, high=high, num_guesses=turn - 1)
                observation, reward, terminated, _, _ = environment.step(str(number))
                score += reward
                if not terminated:
                    outcomes[observation].append((secret, environment.low, environment.high))
            scores.append(score + sum(search(tuple(games), turn + 1) for games in outcomes.values()))
        return max(scores)

    return (
        search(tuple((number, 1, guess.MAX_NUMBER) for number in range(1, guess.MAX_NUMBER + 1)), 1) / guess.MAX_NUMBER
    )


@pytest.mark.parametrize("max_turns", [1, 3, 5, 6, 20])
def test_binary_search_in_games_earns_the_optimum_of_guess(max_turns):
    match = Match(guess.Env, [seed_of(number) for number in range(1, 17)])
    bounds = [(1, 16)] * 16
    for _ in range(max_turns):
        guesses = {k: sum(bounds[k]) // 2 for k in match.running}
        match.step([str(number) for number in guesses.values()])
        for k, number in guesses.items():
            low, high = bounds[k]
            if match.observations[k] in ("higher", "lower"):
                bounds[k] = (number + 1, high) if match.observations[k] == "higher" else (low, number - 1)
    score = sum(map(sum, match.rewards)) / 16
    assert score == pytest.approx(guess.optimum(max_turns), abs=1e-12)
    assert score == pytest.approx(best_guessing(min(6, max_turns)), abs=1e-12)
    if max_turns >= 5:
        assert score == pytest.approx(29 / 48, abs=1e-12)
        assert sum(map(len, match.rewards)) / 16 == 3.375 and set(match.ended) == {"terminated"}


class Placed(grid.Env):
    """A walk whose start and goal are the pair with the number of its seed."""

    pairs = [(start, goal) for start in grid.SQUARES for goal in grid.SQUARES if start != goal]

    def reset(self, seed):
        self.square, self.goal = self.pairs[seed]
        self.shortest, self.steps = grid.distance(self.square, self.goal), 0
        return self.observation(), {}


def way(observation):
    """The words of a shortest way, by a breadth-first search from what is observed."""
    words = observation.replace(".", "").split()
    start, goal = [tuple(int(words[i]) for i in pair) for pair in ((3, 5), (8, 10))]
    queue, seen = collections.deque([(start, [])]), {start}
    while queue:
        (column, row), path = queue.popleft()
        if (column, row) == goal:
            return path
        moved = {"up": (column, row + 1), "down": (column, row - 1), "left": (column - 1, row)}
        for word, square in (moved | {"right": (column + 1, row)}).items():
            if square not in seen and all(1 <= place <= 4 for place in square):
                seen.add(square)
                queue.append((square, [*path, word]))


@pytest.mark.parametrize("max_turns", [1, 3, 5, 6, 12])
def test_the_shortest_ways_in_games_earn_the_optimum_of_grid(max_turns):
    match = Match(Placed, range(240))
    first = {k: way(match.observations[k]) for k in match.running}
    for _ in range(max_turns):
        match.step([way(match.observations[k])[0] for k in match.running])
    assert sum(map(sum, match.rewards)) / 240 == pytest.approx(grid.optimum(max_turns), abs=1e-12)
    assert all(match.ended[k] == ("terminated" if len(first[k]) <= max_turns else None) for k in first)
    assert (grid.optimum(max_turns) == 1) == (max_turns >= 6)


def test_grid_move_by_move():
    seed = Placed.pairs.index(((1, 2), (3, 3)))
    walk = "Walk from column {} row {} to column 3 row 3."
    way = [walk.format(1, 2), walk.format(2, 2), walk.format(2, 3), "there"]
    assert play(Placed, seed, ["right", " Up\n", "right"]) == (way, [0.0, 0.0, 1.0], True)
    observations, rewards, _ = play(Placed, seed, ["left", "down", "up", "up", "right", "right"])
    assert observations[1] == walk.format(1, 2) and rewards == [0.0] * 5 + [1 - 3 / 12]  # off the grid, and back
    assert play(Placed, seed, ["left"] * 12)[1:] == ([0.0] * 12, True)
    assert play(Placed, seed, ["right", "go up"])[1:] == ([0.0, 0.0], True)


def test_walks_come_from_the_seed_and_reach_every_pair():
    first = [grid.Env().reset(seed)[0] for seed in range(2400)]
    assert first == [grid.Env().reset(seed)[0] for seed in range(2400)] and len(set(first)) == 240
    assert max(collections.Counter(first).values()) < 30  # 10 each
    rule = "Columns count from the left, rows from the bottom. Say up, down, left or right."
    assert all(text.endswith(f". {rule}") for text in first)


# Loading


AGILE = """
class Env:
    def __init__(self):
        self.actions = []

    def reset(self, seed=None):
        return "text", {}

    def step(self, action):
        self.actions.append(action)
        return " ".join(self.actions), len(self.actions), len(self.actions) == 2, False, {}
"""


def test_an_environment_from_a_file_or_from_a_module_works_as_it_is(tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/words.py").write_text(AGILE.replace("class Env", "class Words"))
    (tmp_path / "game.py").write_text(AGILE)
    (tmp_path / "made.py").write_text(
        "import game\nmake = lambda: game.Env()\nEnv = None\ndef optimum(max_turns): return 3 * max_turns\n"
    )
    for spec in ("game.py", "made.py", str(tmp_path / "made.py"), "shop.words:Words", "made:make"):
        factory, optimum = load_env(spec, 9)
        assert optimum == (27.0 if "made" in spec else None)
        match = Match(factory, [1, 2])
        match.step(["a", "b"])
        match.step(["c", "d"])
        assert match.observations == ["a c", "b d"] and match.rewards == [[1.0, 2.0]] * 2
        assert match.ended == ["terminated"] * 2 and not match.running


def test_an_environment_in_a_module_that_is_there_already():
    module = ModuleType("mine")
    module.__file__ = "somewhere/mine.py"
    with pytest.raises(UserError, match="^the environment in mine.py: there is no make or Env in it$"):
        load_env(module, 3)
    exec(AGILE, vars(module))
    assert load_env(module, 3) == (module.Env, None)
    module.optimum = lambda max_turns: 2 * max_turns
    assert load_env(module, 3) == (module.Env, 6.0)


BAD_FILES = {
    "Enviroment = 1": r"there is no make or Env in it",
    "Env = 3": r"Env can't be called to make an environment; it is of type int",
    "import no_such_module": r"it can't be loaded: ModuleNotFoundError: No module named 'no_such_module'",
    "import sys; sys.exit('usage: so\\nand so')": r"it can't be loaded: SystemExit: usage: so and so",
    "def Env(): raise ValueError('two\\nlines')": r"Env\(\) failed: ValueError: two lines",
    "def make(size): pass": r"make\(\) failed: TypeError: make\(\) missing 1 required positional argument: 'size'",
    "class Env: step = print": r"Env\(\) gives an object of type Env, without a reset\(\)",
    "class Env: reset, step = print, 'x'": r"Env\(\) gives an object of type Env, without a step\(\)",
    "class Env: reset = step = print\ndef optimum(max_turns): return 1 / (max_turns - 6)": (
        r"optimum failed: ZeroDivisionError: division by zero"
    ),
    "class Env: reset = step = print\ndef optimum(max_turns): return 'high'": r"optimum failed: ValueError: .*'high'",
    "class Env:\n reset = step = print\n def close(self): 1 / 0": r"close\(\) failed: ZeroDivisionError: .*",
}


@pytest.mark.parametrize("code", BAD_FILES)
def test_a_bad_file_is_one_line(tmp_path, code):
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(UserError, match=f"^--env bad.py: {BAD_FILES[code]}({PLACE})?$") as error:
        load_env("bad.py", 6)
    assert error.value.exit_code == 2


BAD_SPECS = {
    "gues": r"there is none; --env takes grid, guess, probe, FILE.py or MODULE:CALLABLE",
    "gone.py": r"there is no such file",
    "no_such_package.envs:Env": r"no_such_package.envs can't be imported: ModuleNotFoundError: No module named .*",
    "math:Env": r"there is no Env in it",
}


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_a_bad_name_is_one_line(spec):
    with pytest.raises(UserError, match=f"^--env {spec}: {BAD_SPECS[spec]}$") as error:
        load_env(spec, 6)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


# A batch under way


def test_episodes_end_each_in_its_way(heard):
    match = Match(Echo, [5, 6, 7])
    assert (match.running, match.observations) == ([0, 1, 2], ["seed 5", "seed 6", "seed 7"])
    match.step(["a", "bye", "b"])
    assert (match.running, match.ended) == ([0, 2], [None, "terminated", None])
    match.step(["late", "c"])
    assert (match.running, match.observations) == ([2], ["late", "bye", "c"])
    match.step(["d"])
    assert (match.running, match.ended) == ([2], ["truncated", "terminated", None])
    match.games.finish()
    assert match.rewards == [[1.0, 1.0], [1.0], [1.0, 1.0, 1.0]] and match.games.dropped == {}
    assert heard == "reset 5,reset 6,reset 7,a,bye,close,b,late,close,c,d,close".split(",")


def test_an_end_in_the_last_turn_is_the_environments_own(loaded_model, tokenizer, monkeypatch):
    """Cut short, an episode is worth V of its end; at the horizon, as after its own end, 0."""
    args = ppo_llm.resolve_args(make_ppo_args(max_turns=1))
    agents = make_ppo_agents(loaded_model, tokenizer, args)

    def respond(agents, transcripts, *_):
        for transcript, answer in zip(*transcripts, ["bye", "late", "a"], strict=True):
            ids = tokenizer(answer).input_ids
            transcript.add_response(ids, [0.0] * len(ids), answer)

    monkeypatch.setattr(ppo_llm, "respond", respond)
    (rollout,) = ppo_llm.play(agents, Echo, [{"seed": seed} for seed in range(3)], args, generator=None)
    assert rollout.truncated.tolist() == [0, 1, 0]
    observed = ["<|user|>" in text for text in tokenizer.batch_decode(rollout.response_ids)]
    assert observed == [False, True, False]


@pytest.mark.parametrize(
    "reset, seen",
    [
        (lambda self: ("text", {}), "text"),
        (lambda self, options=None: (f"{options}", {}), "None"),
        (lambda self, *, seed: (f"{seed}", {}), "4"),
        (lambda self, **optional: (f"{optional}", {}), "{'seed': 4}"),
    ],
)
def test_reset_gets_the_seed_if_it_takes_one(reset, seen):
    assert Match(type("Own", (Echo,), {"reset": reset}), [4]).observations == [seen]


@pytest.mark.parametrize(
    "reward", [1, 0.5, True, numpy.float32(0.5), numpy.int64(2), numpy.bool_(True), torch.tensor(0.5)]
)
def test_a_reward_is_any_number_and_an_end_any_truth(reward):
    for end in (True, numpy.bool_(True), torch.tensor(True), 1):
        match = Match(type("Own", (Echo,), {"step": lambda self, answer: ("x", reward, end, 0, {})}), [4])
        match.step(["a"])
        assert match.rewards == [[float(reward)]] and type(match.rewards[0][0]) is float
        assert match.ended == ["terminated"]


class Fragile(Echo):
    """Fails in what its seed says, in the turn that it says."""

    def reset(self, seed=None):
        self.seed, self.turn = seed, 0
        if seed == "reset":
            raise ValueError("no\n such seed")
        return super().reset(seed)

    def step(self, answer):
        self.turn += 1
        if self.seed == self.turn:
            raise KeyError(f"turn {self.turn} of its own")
        return super().step(answer)

    def close(self):
        super().close()
        if self.seed in ("close", 2):
            raise OSError("still open")


def test_an_environment_that_raises_ends_its_own_episode_only(heard):
    match = Match(Fragile, [0, 2, "reset", "close", 0, 1])
    assert match.running == [0, 1, 3, 4, 5] and "no such seed" in match.games.dropped[2]
    match.step(["a", "b", "c", "d", "e"])
    assert match.running == [0, 1, 3, 4] and heard[-1] == "close"
    match.step(["a", "b", "bye", "d"])
    assert match.running == [0, 4]
    match.step(["a", "d"])
    assert match.ended == [None, "dropped", "dropped", "dropped", None, "dropped"]
    assert [len(match.rewards[k]) for k in (0, 4)] == [3, 3] and match.observations[4] == "d"
    match.games.finish()
    assert {k: re.sub(PLACE, "", error) for k, error in match.games.dropped.items()} == {
        2: "ValueError: no such seed, in reset",
        5: "KeyError: 'turn 1 of its own', in turn 1",
        1: "KeyError: 'turn 2 of its own', in turn 2",
        3: "OSError: still open, in turn 2",
    }
    assert heard.count("close") == 6  # the dropped ones too, whose own error is reported, not that of closing


def test_an_environment_that_cannot_be_made_again_is_dropped():
    made = []

    def make():
        made.append(1)
        return Echo() if len(made) != 2 else 1 / 0

    match = Match(make, range(3))
    assert match.running == [0, 2] and [*match.games.dropped] == [1]
    assert re.fullmatch(f"ZeroDivisionError: division by zero{PLACE}, in reset", match.games.dropped[1])


@pytest.mark.parametrize(
    "seeds, first",
    [(["reset"] * 3, f"ValueError: no such seed{PLACE}, in reset"), ([2, 1, 2], r"KeyError: 'turn 1 .*")],
)
def test_a_batch_whose_episodes_all_fail_is_one_line(seeds, first):
    match = Match(Fragile, seeds)
    while match.running:
        match.step(["a"] * len(match.running))
    with pytest.raises(TaskError, match=f"^the environment failed in all 3 episodes, at first with {first}$") as error:
        match.games.finish()
    assert error.value.exit_code == 1
    match = Match(Fragile, [*seeds, 0])
    match.step(["a"] * len(match.running))  # one that lasts, and the run goes on
    match.games.finish()
    assert match.ended[-1] is None


@pytest.mark.parametrize("stop", [KeyboardInterrupt, TaskError("enough")])
def test_the_keyboard_and_a_task_error_end_the_run(stop):
    class Stopping(Echo):
        def step(self, answer):
            raise stop

    match = Match(Stopping, range(2))
    with pytest.raises(stop if isinstance(stop, type) else TaskError):
        match.step(["a", "b"])


BAD_RESETS = {
    "a text": ("hi", r"a single value of type str; it takes 2: observation, info"),
    "three": (("a", {}, 1), r"3 values; it takes 2: observation, info"),
    "one": (("a",), r"1 value; it takes 2: observation, info"),
    "no info": (("a", None), r"an info of type NoneType; it takes a dict"),
    "an array": ((numpy.zeros(3), {}), r"an observation of type ndarray; it takes text, a str"),
}
NUMBER = "it takes a number up to 1e30"
BAD_STEPS = {
    "four": (("a", 1.0, True, {}), r"4 values; it takes 5: observation, reward, terminated, truncated, info"),
    "nothing": (None, r"a single value of type NoneType; it takes 5: observation, reward, .*"),
    "a chat": (([{}], 1.0, True, False, {}), r"an observation of type list; it takes text, a str"),
    "no reward": (("a", None, True, False, {}), rf"the reward None; {NUMBER}"),
    "nan": (("a", math.nan, True, False, {}), rf"the reward nan; {NUMBER}"),
    "infinite in float32": (("a", -1e39, True, False, {}), rf"the reward -1e\+39; {NUMBER}"),
    "too large": (("a", 10**400, True, False, {}), rf"the reward 10+…; {NUMBER}"),
    "a word": (("a", "1", True, False, {}), rf"the reward '1'; {NUMBER}"),
    "two": (("a", torch.ones(2), True, False, {}), rf"the reward tensor\(\[1., 1.\]\); {NUMBER}"),
    "info third": (("a", 1.0, {}, True, False), r"terminated = {}; it takes True or False"),
    "many": (("a", 1.0, True, numpy.array([True, False]), {}), r"truncated = array\(.*\); it takes True or False"),
}


@pytest.mark.parametrize("case", BAD_RESETS)
def test_a_reset_that_returns_the_wrong_thing_is_one_line(case):
    returned, message = BAD_RESETS[case]
    own = type("Own", (Echo,), {"reset": lambda self: returned})
    with pytest.raises(TaskError, match=f"^reset of Own returned {message}$"):
        Match(own, range(2))


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_step_that_returns_the_wrong_thing_is_one_line(case):
    returned, message = BAD_STEPS[case]
    match = Match(type("Own", (Echo,), {"step": lambda self, answer: returned}), range(2))
    with pytest.raises(TaskError, match=f"^step of Own returned {message}$"):
        match.step(["a", "b"])


def test_games_to_train_on_are_never_those_held_out_nor_another_seeds():
    for size, held_out in ((500_001, 1), (8, 500_001)):
        with pytest.raises(UserError, match="--train-size: there are 500000 games to train on, and as many to hold"):
            game_seeds(ppo_llm.Args(train_size=size), 4, held_out)
    sets = []
    for seed in (0, 1, 2):
        for items in game_seeds(ppo_llm.Args(train_size=500_000, seed=seed), 4, 500_000):
            sets.append({item["seed"] for item in items})
    assert len(set().union(*sets)) == sum(map(len, sets)) == 3_000_000
