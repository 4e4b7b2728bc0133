"""The table of who beats whom: known players, an exact score, runs of different scripts, and what can't play."""

import json
import re
import shutil
from pathlib import Path

import numpy
import pytest

import ippo_llm
import ppo_llm
from utils import distributed, envs, tasks
from utils.cli import UserError
from utils.envs.exact import policy_of, seats_of
from utils.envs.open_spiel import OpenSpiel
from utils.league import Args, as_table, main, play_league
from utils.load import load
from utils.matches import AgentPlayer, RandomPlayer, play_matches

pyspiel = pytest.importorskip("pyspiel")
policies = pytest.importorskip("open_spiel.python.policy")
expected_game_score = pytest.importorskip("open_spiel.python.algorithms.expected_game_score")

SMALL = {"num_agents": 2, "num_turns": 3, "max_new_tokens": 2, "rollout_buffer_size": 8, "mini_batch_size": 8}
SMALL |= {"max_episodes": 8, "eval_interval": 0}


def train(script, folder, env="open_spiel:kuhn_poker", **flags):
    script.main(script.Args(env=env, output_dir=str(folder), **(SMALL | flags)))
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of a run of PPO, whose agent has both seats, and of one of IPPO, whose agents have one each."""
    root = tmp_path_factory.mktemp("runs")
    first = train(ppo_llm, root / "ppo", self_play=True, temperature=0.7)
    return [first, train(ippo_llm, root / "ippo", actor_learning_rate=0.01, top_k=1)]  # other answers in each seat


def test_means_are_those_of_the_exact_policies(runs, monkeypatch):
    monkeypatch.setattr(OpenSpiel, "illegal_cost", 0.0)  # a random action is played, as in the policies
    results = play_league(runs, matches=400)
    assert {key[::2] for key in results} == {(a, b) for a in NAMES for b in NAMES if a != b} and len(results) == 12
    game = pyspiel.load_game("kuhn_poker")
    tables = {"random": policies.TabularPolicy(game)}
    for name, run, script in zip(NAMES, runs, (ppo_llm, ippo_llm)):
        agents, args = load(run, script)
        args.temperature = 1e-3 if args.top_k == 1 else args.temperature  # --top-k is not in the table
        tables[name], _ = policy_of(game, seats_of(agents, 2), args, as_played=True)
    for (own, seat, other), result in results.items():
        seated = [tables[own if k == seat else other] for k in (0, 1)]
        value = expected_game_score.policy_value(game.new_initial_state(), seated)[seat]
        assert abs(result.mean - value) < 2 * result.half


NAMES = ("ppo", "ippo", "random")


def test_the_random_player_against_itself_earns_what_the_game_says():
    args = ppo_llm.Args(env="open_spiel:kuhn_poker", **SMALL)
    game, _ = envs.load_env(args.env, args)
    items = [{"seed": k} for k in range(4000)]
    played = play_matches([RandomPlayer("1"), RandomPlayer("2")], game.make_env(None, items, args), len(items))
    earned = numpy.array([match.earned for match in played])
    assert numpy.all(earned.sum(1) == 0) and abs(earned[:, 0].mean() - 0.125) < 3.5 * earned[:, 0].std() / 4000**0.5
    assert {seat for seat, _ in played[0].moves} == {0, 1} and {text for _, text in played[0].moves} <= {"1", "2"}


def test_a_match_is_what_the_script_plays(runs):
    agents, args = load(runs[0], ppo_llm)
    task = tasks.load_task(None, args, default=ppo_llm)
    items = [{"seed": k} for k in range(12)]
    rollouts = ppo_llm.play(agents * 2, task, items, args, distributed.generator(5))
    generator = distributed.generator(5)
    players = [AgentPlayer(agents[0], args, ppo_llm, generator) for _ in range(2)]
    played = play_matches(players, task.TeamEnv(task, items, args), len(items))
    for seat, rollout in enumerate(rollouts):
        assert [[text for own, text in match.moves if own == seat] for match in played] == rollout.answers
        assert [match.earned[seat] for match in played] == pytest.approx([sum(own.values()) for own in rollout.earned])


def test_the_command_prints_the_same_table_again(runs, capsys):
    texts = []
    for _ in range(2):
        results = main(Args(runs=tuple(runs), matches=20))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    lines = texts[0].splitlines()
    assert lines[2].split() == ["player", "seat", *NAMES, "all"] and len(lines) == 3 + 6
    cells = re.findall(r"(-?[\d.]+) ± ([\d.]+)", lines[3])
    assert cells == [(f"{results['ppo', 0, n].mean:.3f}", f"{results['ppo', 0, n].half:.3f}") for n in NAMES[1:]]
    mean = sum(results["ppo", 0, name].mean for name in NAMES[1:]) / 2
    assert lines[3].split()[-1] == f"{mean:.3f}"


def test_seats_of_three(tmp_path):
    env = "open_spiel:kuhn_poker(players=3)"
    run = train(ppo_llm, tmp_path / "three", env, num_agents=3, num_turns=6, self_play=True)
    results = play_league([run], matches=10)
    assert len(results) == 6 and as_table(results).splitlines()[0].split() == [
        "player",
        "seat",
        "three",
        "random",
        "all",
    ]


def test_two_runs_meet_in_a_game_of_textarena_without_a_random_player(tmp_path):
    pytest.importorskip("textarena")
    run = train(ppo_llm, tmp_path / "one", "textarena:TicTacToe-v0", self_play=True, num_turns=2)
    with pytest.raises(UserError, match="has no random player: it takes two runs or more"):
        play_league([run], matches=2)
    other = shutil.copytree(run, tmp_path / "two")
    assert len(play_league([run, str(other)], matches=2)) == 4


def test_a_run_called_random_is_no_random_player(runs, tmp_path, monkeypatch):
    shutil.copytree(runs[0], tmp_path / "random")
    monkeypatch.chdir(tmp_path)
    assert {player for player, *_ in play_league(["random"], matches=2)} == {"random (1)", "random"}


def test_a_run_of_ones_own_script_meets_one_of_the_projects(runs, tmp_path):
    text = Path(ppo_llm.__file__).read_text()
    flag = "    lora_rank: NonNegativeInt"
    assert text.count(flag) == 1
    (tmp_path / "mine.py").write_text(text.replace(flag, f"    own_flag: float = 1.0  # one more\n{flag}"))
    mine = shutil.copytree(runs[0], tmp_path / "mine")
    config = json.loads((mine / "config.json").read_text())
    config |= {"script": str(tmp_path / "mine.py"), "args": config["args"] | {"own_flag": 2.0}}
    (mine / "config.json").write_text(json.dumps(config))
    results = play_league([str(mine), runs[0]], matches=2, script=str(tmp_path / "mine.py"))
    assert {player for player, *_ in results} == {"mine", "ppo", "random"}


def test_what_can_not_play_is_a_line(runs, tmp_path):
    other = shutil.copytree(runs[0], tmp_path / "other")
    config = json.loads((other / "config.json").read_text())

    def refused(*folders, **flags):
        (other / "config.json").write_text(json.dumps(config | {"args": config["args"] | flags}))
        with pytest.raises(UserError) as error:
            play_league([str(folder) for folder in folders], matches=2)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "it takes the folders of runs" in refused()
    assert "a run's folder is needed" in refused(tmp_path)
    assert "is given twice" in refused(runs[0], f"{runs[0]}/")
    there = f"{runs[0]} of --env open_spiel:kuhn_poker --num-agents 2"
    assert refused(runs[0], other, env="open_spiel:leduc_poker").endswith(f"leduc_poker --num-agents 2, and {there}")
    assert "is no run of a game of several seats by name" in refused(other, env="guess")
    assert "is no run of a game of several seats by name" in refused(other, env=None)
    assert "OpenSpiel has no game of that name" in refused(other, env="open_spiel:no_such_game")
    assert "has 2 seats: it takes --num-agents 2, got 3" in refused(other, num_agents=3)
    assert "began with another model" in refused(other, model=[other_model(tmp_path)])
    with pytest.raises(UserError, match="--script mine.py has no effect"):
        play_league(runs, matches=2, script="mine.py")
    with pytest.raises(UserError, match="--matches"):
        Args(runs=("a",), matches=1)


def other_model(folder):
    """The name of a folder, with a copy of the embedded model of other weights."""
    import torch
    from helpers import TINY
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TINY)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / "model")
    return str(folder / "model")
