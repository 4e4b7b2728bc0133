"""Evaluations against a random player and against runs: what they say, and that they change nothing else."""

import shutil
from types import SimpleNamespace

import pytest
from helpers import assert_metrics_are_alike
from processes import finish, finish_two

import iac_llm
import ippo_llm
import ppo_llm
from utils import distributed, league
from utils.cli import UserError
from utils.enjoy import show
from utils.envs.exact import policy_of, seats_of
from utils.envs.open_spiel import OpenSpiel
from utils.load import load
from utils.run.reader import read_metrics
from utils.same import compare, timeless

pyspiel = pytest.importorskip("pyspiel")
policies = pytest.importorskip("open_spiel.python.policy")
expected_game_score = pytest.importorskip("open_spiel.python.algorithms.expected_game_score")

FLAGS = {"env": "open_spiel:kuhn_poker", "num_agents": 2, "num_turns": 3, "max_new_tokens": 2}
FLAGS |= {"rollout_buffer_size": 8, "mini_batch_size": 8, "max_episodes": 16, "eval_size": 8}


def train(script, folder, **flags):
    return script.main(script.Args(output_dir=str(folder), **(FLAGS | flags)))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The folder of a run of IPPO, whose likeliest answers are others in each seat."""
    folder = tmp_path_factory.mktemp("runs") / "other"
    train(ippo_llm, folder, max_episodes=8, actor_learning_rate=0.01, top_k=1, eval_interval=0)
    return str(folder)


def reward_columns(row):
    return {name for name in row if "_against_" in name}


def test_rewards_are_those_of_the_exact_policies(tmp_path, other, monkeypatch):
    monkeypatch.setattr(OpenSpiel, "illegal_cost", 0.0)  # a random action is played, as in the policies
    flags = {"self_play": True, "temperature": 0.7, "eval_size": 400, "eval_against": ("random", other)}
    agents, run = train(ppo_llm, tmp_path / "run", max_episodes=8, **flags)
    game = pyspiel.load_game("kuhn_poker")
    tables = {"random": policies.TabularPolicy(game)}
    own, _ = policy_of(game, seats_of(agents, 2), run.args, as_played=True)
    opponents, args = load(other, ippo_llm)
    args.temperature = 1e-3  # --top-k 1 is not in the table
    tables["other"], _ = policy_of(game, seats_of(opponents, 2), args, as_played=True)
    for name, table in tables.items():
        for seat in (0, 1):
            seated = [own if k == seat else table for k in (0, 1)]
            value = expected_game_score.policy_value(game.new_initial_state(), seated)[seat]
            reward = run.rows[-1][f"eval/agent_{seat}/reward_against_{name}"]
            half = run.rows[-1][f"eval/agent_{seat}/reward_half_width_against_{name}"]
            assert 0 < half < 0.3 and abs(reward - value) < 2 * half
    assert len(reward_columns(run.rows[-1])) == 8


@pytest.mark.parametrize("script", [ppo_llm, pytest.param(iac_llm, marks=pytest.mark.slow)], ids=["ppo", "iac"])
def test_what_is_learned_is_the_same_without_them(tmp_path, other, script, capsys):
    _, run = train(script, tmp_path / "run", eval_against=("random", other), eval_interval=2)
    output = capsys.readouterr().out
    _, plain = train(script, tmp_path / "plain", eval_interval=2)
    same = compare(run.folder, plain.folder)
    assert len(same) >= 4 and [name for name in same if not same[name]] == ["metrics.csv"]  # which has more columns
    columns = reward_columns(run.rows[0])
    assert len(columns) == 8 and not reward_columns(plain.rows[0])
    for row, expected in zip(timeless(run.folder), timeless(plain.folder), strict=True):
        assert {name: value for name, value in row.items() if name not in columns} == expected
    assert "; eval/agent_0/reward_against_random: " in output and "half_width" not in output
    rows = read_metrics(run.folder)
    assert all(rows[-1][name] is not None for name in columns)


@pytest.mark.slow
def test_a_run_is_resumed_to_the_bit(tmp_path, other):
    flags = {"eval_against": ("random", other), "eval_interval": 1}
    train(ppo_llm, tmp_path / "whole", **flags)
    train(ppo_llm, tmp_path / "run", pause_at=1, **flags)
    ppo_llm.main(ppo_llm.Args(resume=str(tmp_path / "run"), **(FLAGS | flags)))
    assert all(compare(tmp_path / "run", tmp_path / "whole").values())


def test_a_run_is_shown_and_goes_on_without_those_whom_it_met(tmp_path, other):
    met = shutil.copytree(other, tmp_path / "met")
    train(ppo_llm, tmp_path / "run", pause_at=1, eval_against=str(met))
    shutil.rmtree(met)
    assert len(show(tmp_path / "run", items=1)) == 1
    _, run = ppo_llm.main(ppo_llm.Args(resume=str(tmp_path / "run"), **FLAGS))
    assert [bool(reward_columns(row)) for row in run.rows] == [True, False]
    assert [row["eval/agent_0/reward_against_met"] is None for row in read_metrics(run.folder)] == [False, True]


@pytest.mark.parametrize("more", [[], pytest.param(["--shard"], marks=pytest.mark.slow)], ids=str)
def test_two_processes_say_the_same_as_one(tmp_path, other, more):
    """With the likeliest answers: what a random player draws differs between the processes."""
    flags = [x for name, value in FLAGS.items() for x in ("--" + name.replace("_", "-"), value)]
    flags += ["--top-k", 1, "--adam-epsilon", 1e-4, "--eval-interval", 1, "--eval-size", 9, "--eval-against", other]
    finish("ippo_llm", *flags, "--output-dir", tmp_path / "one")
    finish_two("ippo_llm", *flags, *more, "--output-dir", tmp_path / "two")
    assert len(reward_columns(read_metrics(tmp_path / "two")[0])) == 4
    assert_metrics_are_alike(tmp_path / "one", tmp_path / "two")


def test_random_players_of_two_processes_draw_differently(monkeypatch):
    seeds = []
    monkeypatch.setattr(league, "RandomPlayer", seeds.append)
    monkeypatch.setattr(league, "play_matches", lambda players, env, num_matches: [])
    game = SimpleNamespace(make_env=lambda task, items, args: None)
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        league.play_sides([None, None], game, [], None, seed=1)
    assert len({*seeds}) == 4


def test_one_match_has_no_interval(tmp_path):
    _, run = train(ppo_llm, tmp_path / "run", max_episodes=8, eval_size=1, eval_against="random")
    assert run.rows[0]["eval/agent_0/reward_half_width_against_random"] is None
    assert isinstance(run.rows[0]["eval/agent_0/reward_against_random"], float)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"env": "guess", "num_agents": 1}, "--eval-against has no effect without a game of several seats by name, .*"),
        ({"env": None, "task": "number"}, "--eval-against has no effect without a game of several seats by name, .*"),
        ({"eval_interval": 0}, "--eval-against has no effect without --eval-interval"),
        ({"eval_against": ("random", "random")}, "--eval-against takes players of different names, and .* another .*"),
        ({"eval_against": ("./random",)}, "--eval-against takes players of different names, and ./random .*"),
        ({"eval_against": ("none",)}, "--eval-against: .*none.* no such folder"),
        ({"env": "open_spiel:tiny_hanabi"}, "--eval-against .*other is a run of --env open_spiel:kuhn_poker .*"),
    ],
)
def test_bad_input_is_a_line(tmp_path, other, flags, message):
    with pytest.raises(UserError, match=f"^{message}$") as error:
        train(ppo_llm, tmp_path / "run", **({"eval_against": ("random", other)} | flags))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_game_that_does_not_say_what_is_legal_has_no_random_player(tmp_path):
    pytest.importorskip("textarena")
    message = "^--eval-against random: --env textarena:TicTacToe-v0 does not say which answers are legal$"
    with pytest.raises(UserError, match=message):
        train(ppo_llm, tmp_path / "run", env="textarena:TicTacToe-v0", eval_against="random")
    assert not (tmp_path / "run").exists()
