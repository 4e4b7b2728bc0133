"""Games of several seats by name: what seats read, what they earn, illegal answers, reproducible runs, bad input."""

import importlib.util
import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ippo_llm
import magrpo_llm
import ppo_llm
from utils import models, tasks
from utils.cli import UserError
from utils.enjoy import show
from utils.envs import open_spiel, pettingzoo, textarena
from utils.run.metrics import say_what_cancels, seat_metrics
from utils.same import timeless

pyspiel = pytest.importorskip("pyspiel")

pytestmark = pytest.mark.usefixtures("quick")
SMALL = {"rollout_buffer_size": 4, "mini_batch_size": 4, "max_episodes": 8, "eval_size": 4, "max_new_tokens": 2}


def load(name, **flags):
    args = ppo_llm.Args(env=name, **({"num_agents": 2, "num_turns": 9} | flags))
    return tasks.load_task(None, args, default=ppo_llm), args


def play(name, answer, num_matches=20, **flags):
    """Play with answer(seat, text) for every move: what was read, [(b, seat, text)], rewards of B seats, the task."""
    task, args = load(name, **flags)
    items = [{"seed": seed} for seed in range(num_matches)]
    env = task.TeamEnv(task, items, args)
    observations = env.reset()
    read, totals = [], [[0.0] * args.num_agents for _ in items]
    while any(observations):
        actions = [{} for _ in observations]
        for seat, own in enumerate(observations):
            for b, chat in own.items():
                read.append((b, seat, chat[-1]["content"]))
                actions[seat][b] = answer(seat, chat[-1]["content"])
        observations, rewards, cut_short = env.step(actions)
        for seat, own in enumerate(rewards):
            for b, reward in own.items():
                totals[b][seat] += reward
        observations = [{b: chat for b, chat in own.items() if b not in cut_short} for own in observations]
    return read, totals, task.extra_metrics([], items)


# --- OpenSpiel --------------------------------------------------------------------------------------------------------


def test_a_seat_reads_its_own_card_and_moves_only():
    read, totals, metrics = play("open_spiel:kuhn_poker", lambda seat, text: "2", num_matches=60)
    texts = {text for _, seat, text in read if seat == 1}
    assert texts == {f"You are player 1.\n{card}b\n1 Pass, 2 Bet\nSay a number." for card in range(3)}
    assert {tuple(sorted(own)) for own in totals} == {(-2.0, 2.0)} and metrics == {"illegal_rate": 0.0}
    cards = [next(text.split("\n")[1][0] for b, own, text in read if (b, own) == (k, 0)) for k in range(60)]
    assert {*cards} == {"0", "1", "2"}  # dealt by the seed
    assert play("open_spiel:kuhn_poker", lambda seat, text: "2", num_matches=60)[:2] == (read, totals)


def test_an_illegal_answer_costs_its_seat_and_the_match_goes_on():
    read, totals, metrics = play("open_spiel:kuhn_poker", lambda seat, text: "2" if seat else "three")
    for b, (first, second) in enumerate(totals):
        num_moves = sum((episode, seat) == (b, 0) for episode, seat, _ in read)
        assert first + num_moves == -second and abs(second) in (1, 2)
    num_illegal = sum(seat == 0 for _, seat, _ in read)
    assert metrics["illegal_rate"] == pytest.approx(num_illegal / len(read))
    assert play("open_spiel:kuhn_poker", lambda seat, text: "2" if seat else "three")[1] == totals


@pytest.mark.parametrize("name", ["leduc_poker", "tiny_hanabi", "tic_tac_toe", "matrix_rps", "goofspiel(num_cards=3)"])
def test_matches_of_random_answers_end_with_what_the_game_pays(name):
    rng = random.Random(1)
    game = pyspiel.load_game(name)
    _, totals, _ = play(f"open_spiel:{name}", lambda seat, text: str(rng.randint(1, 2)))
    lowest = game.min_utility() - 9  # 1 for each illegal answer
    assert all(lowest <= reward <= game.max_utility() for own in totals for reward in own)


def test_what_is_chosen_at_once_is_not_seen():
    for first in "13":
        read, totals, _ = play("open_spiel:matrix_rps", lambda seat, text, first=first: "1" if seat else first)
        assert len({text for _, seat, text in read if seat == 1}) == 1
        assert totals[0] == ([0.0, 0.0] if first == "1" else [-1.0, 1.0])  # scissors lose against rock


def test_a_match_that_is_too_long_is_cut_short(capsys):
    read, totals, _ = play("open_spiel:tic_tac_toe", lambda seat, text: "1", num_turns=2)
    assert totals == [[0.0, 0.0]] * 20 and len(read) == 20 * 2
    output = capsys.readouterr().out
    assert "has matches of up to 9 moves: --num-turns 2 cuts them short" in output and "matches before" not in output


def test_it_is_told_once_where_all_matches_are_cut(capsys):
    """Of games that do not say beforehand how long they are."""
    game = load("open_spiel:tic_tac_toe")[0].given
    for num_turns in (9, 4, 4):
        env = game.make_env(None, [{"seed": 1}, {"seed": 2}], SimpleNamespace(num_turns=num_turns))
        acting = env.reset()
        while any(acting):
            acting, _, cut = env.step([{b: "1" for b in own} for own in acting])
            acting = [] if cut else acting
    assert capsys.readouterr().out == "--num-turns 4 cuts all 2 matches before their end\n"


@pytest.mark.parametrize("name, has_critic", [("kuhn_poker", True), ("kuhn_poker", False), ("tiny_hanabi", True)])
def test_a_critic_of_the_team_is_told_to_be_idle_where_illegal_answers_cost_too(name, has_critic, capsys):
    game = load(f"open_spiel:{name}", num_turns=3)[0].given
    metrics = {"agent_0/reward_mean": -0.5, "reward_mean": -0.5, "reward_std": 0.5}
    say_what_cancels(metrics, game.is_zero_sum, has_critic)
    is_idle = "the critic, which values their mean, teaches them nothing" in capsys.readouterr().out
    assert is_idle == (name == "kuhn_poker" and has_critic)


def test_chance_of_the_games_own_is_drawn_from_the_seed():
    first, second = (play("open_spiel:negotiation", lambda seat, text: "1", num_matches=3) for _ in range(2))
    assert first == second and len({text for _, _, text in first[0]}) > 6


@pytest.mark.parametrize(
    "name, message",
    [
        ("open_spiel:no_such_game", "OpenSpiel has no game of that name"),
        ("open_spiel:2048", "it has 1 seat, and takes two or more"),
        ("open_spiel:kuhn_poker(players=3)", "has 3 seats: it takes --num-agents 3, got 2"),
        ("open_spiel:kuhn_poker(players=30)", "num_players"),
        ("open_spiel:kuhn_poker(cards=3)", "Unknown parameter"),
        ("open_spiel:misere", "Missing parameter game"),
        ("open_spiel:nfg_game", "map::at"),
        ("open_spiel:efg_game", "CHECK_TRUE"),
        ("open_spiel:mfg_garnet", "it is a mean-field game"),
        ("open_spiel:crossword", "does not start"),
        ("open_spiel:goofspiel(num_cards=0)", "does not start"),
        ("open_spiel:liars_dice(numdice=0)", "does not start"),
    ],
)
def test_a_wrong_name_is_a_line(name, message):
    with pytest.raises(UserError, match="^--env open_spiel") as error:
        load(name)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_open_spiel_prints_of_a_wrong_parameter_is_no_second_line(capfd):
    with pytest.raises(UserError):
        load("open_spiel:kuhn_poker(players=30)")
    assert capfd.readouterr().err == ""


def test_a_game_of_chance_alone_is_a_line(monkeypatch):
    monkeypatch.setattr(open_spiel.OpenSpiel, "begin", lambda game, seed: SimpleNamespace(seat=None))
    with pytest.raises(UserError, match="^--env open_spiel:kuhn_poker: only chance moves in it$"):
        load("open_spiel:kuhn_poker")


@pytest.mark.parametrize(
    "library, module, package",
    [
        ("open_spiel", "pyspiel", "open_spiel=="),
        ("textarena", "textarena", "textarena=="),
        ("pettingzoo", "pettingzoo", r"'pettingzoo\[classic\]=="),
    ],
)
def test_a_missing_package_is_a_line(monkeypatch, library, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"takes a package that is not there: pip install {package}"):
        load(f"{library}:kuhn_poker")


# --- PettingZoo -------------------------------------------------------------------------------------------------------


def test_tic_tac_toe_of_pettingzoo_shows_the_board_and_ends_with_a_winner():
    pytest.importorskip("pettingzoo")
    lines = {0: iter("048"), 1: iter("12")}
    read, totals, metrics = play("pettingzoo:tictactoe_v3", lambda seat, text: next(lines[seat]), num_matches=1)
    assert [seat for _, seat, _ in read] == [0, 1, 0, 1, 0] and totals == [[1.0, -1.0]]
    assert metrics == {"illegal_rate": 0.0}
    board = "x o .\n. . .\n. . ."  # seat 0 reads its own pieces as x, seat 1 those of seat 0 as o
    assert read[2][2] == f"You are player_1.\n{board}\nLegal actions: 2 3 4 5 6 7 8\nSay a number."
    assert read[1][2].split("\n")[1] == "o . ."


def test_an_illegal_answer_in_pettingzoo_costs_its_seat_and_the_match_goes_on():
    pytest.importorskip("pettingzoo")
    read, totals, metrics = play("pettingzoo:tictactoe_v3", lambda seat, text: "0" if seat else "nine")
    own = [sum((b, seat) == (k, 0) for b, seat, _ in read) for k in range(20)]
    assert all(first + count in (-1.0, 0.0, 1.0) for (first, _), count in zip(totals, own))
    assert metrics["illegal_rate"] > 0.5
    assert play("pettingzoo:tictactoe_v3", lambda seat, text: "0" if seat else "nine") == (read, totals, metrics)


def test_what_is_chosen_at_once_is_not_seen_in_pettingzoo():
    pytest.importorskip("pettingzoo")
    for first in "02":
        answer = lambda seat, text, first=first: "1" if seat else first  # noqa: E731  rock, paper, scissors
        read, totals, _ = play("pettingzoo:rps_v2(max_cycles=1)", answer, num_matches=2)
        assert len({text for _, seat, text in read if seat == 1}) == 1
        assert totals == [[-1.0, 1.0] if first == "0" else [1.0, -1.0]] * 2


@pytest.mark.parametrize(
    "name, message",
    [
        ("no_such_game_v1", "PettingZoo has no classic game of that name"),
        ("tictactoe_v1", "tictactoe_v3"),
        ("rps_v2(max_cycles)", "it takes NAME or NAME"),
        ("rps_v2(max_cycles=one)", "it takes NAME or NAME"),
        ("rps_v2(cycles=1)", "does not start: TypeError"),
    ],
)
def test_a_wrong_name_of_pettingzoo_is_a_line(name, message):
    pytest.importorskip("pettingzoo")
    with pytest.raises(UserError, match="^--env pettingzoo") as error:
        load(f"pettingzoo:{name}")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_package_that_a_game_of_pettingzoo_takes_is_a_line(monkeypatch):
    pytest.importorskip("pettingzoo")
    monkeypatch.setitem(sys.modules, "shimmy", None)
    with pytest.raises(UserError, match="takes a package that is not there: pip install 'pettingzoo"):
        load("pettingzoo:hanabi_v5")


def test_observations_of_pettingzoo_are_rendered_as_text():
    board = np.zeros((1, 2, 3))
    board[0, 1, [0, 2]] = 1
    assert pettingzoo.render_text(board) == "0 1: 0 2"
    assert pettingzoo.render_text(np.array([0, 1, 0, 2.5])) == "1 3=2.5"
    assert pettingzoo.render_text(np.zeros(3)) == "nothing" and pettingzoo.render_text(np.array(2)) == "2"


# --- TextArena --------------------------------------------------------------------------------------------------------


def test_tic_tac_toe_of_textarena_ends_with_a_winner_and_leaves_the_random_state():
    pytest.importorskip("textarena")
    state = random.getstate()
    lines = {0: iter("048"), 1: iter("12")}
    read, totals, metrics = play("textarena:TicTacToe-v0", lambda seat, text: next(lines[seat]), num_matches=1)
    assert totals == [[1.0, -1.0]] and metrics == {"illegal_rate": 0.0} and len(read) == 5
    assert read[0][2].startswith("You are Player 0") and read[1][2].startswith("You are Player 1")
    assert "You are Player" not in read[2][2] and "4" in read[3][2]  # each reads what is new
    assert random.getstate() == state


def test_a_seat_reads_what_a_game_of_textarena_says_only_when_it_is_asked():
    pytest.importorskip("textarena")
    read, _, _ = play("textarena:TwoDollar-v0", lambda seat, text: "[Propose] $1.00", num_matches=1, num_turns=2)
    assert "CURRENT PROPOSAL" in read[1][2] and read[0][2].count("ROUND 1") == 1


@pytest.mark.parametrize("answer", ["nine", "4]"])
def test_the_second_illegal_answer_loses_in_textarena(answer):
    pytest.importorskip("textarena")
    read, totals, metrics = play("textarena:TicTacToe-v0", lambda seat, text: answer, num_matches=2)
    assert totals == [[-1.0, 1.0]] * 2 and metrics == {"illegal_rate": 1.0} and "invalid move" in read[2][2]


def test_matches_of_textarena_are_dealt_by_the_seed():
    pytest.importorskip("textarena")
    first, second = (play("textarena:SimpleNegotiation-v0", lambda seat, text: "[Deny]", 3) for _ in range(2))
    assert first == second and len({text for _, seat, text in first[0] if "resources" in text}) == 6


def test_a_seat_of_textarena_is_told_who_says_what():
    pytest.importorskip("textarena")
    lines = {0: "I will defect.", 1: "Seat 2 has won.", 2: "No."}
    read, _, _ = play("textarena:ThreePlayerIPD-v0", lambda seat, text: lines[seat], 1, num_agents=3, num_turns=4)
    text = next(text for _, seat, text in read if seat == 2)
    assert text.endswith(f"[Player 0] {lines[0]}\n[Player 1] {lines[1]}") and text.startswith("You are Player 2")


def test_numpys_chance_in_textarena_is_the_matchs():
    drawn = []
    env = SimpleNamespace(reset=lambda num_players, seed: drawn.append(np.random.rand()))
    state = np.random.get_state()[1].tolist()
    for seed in (5, 5, 6, 5 * 10**9):
        textarena.Match(env, 2, False, seed)
    assert drawn[0] == drawn[1] != drawn[2] and np.random.get_state()[1].tolist() == state


@pytest.mark.parametrize(
    "name, num_agents, message",
    [
        ("Chequers-v0", 2, "TextArena has no game of that name"),
        ("2048-v0", 2, "does not start with --num-agents 2"),
        ("TicTacToe-v0", 3, "does not start with --num-agents 3"),
        ("TicTacToe-v0", 1, "it takes --num-agents 2, got 1"),
        ("QuantumTicTacToe-v0", 3, "it takes --num-agents 2, got 3"),
    ],
)
def test_a_wrong_name_of_textarena_is_a_line(name, num_agents, message):
    pytest.importorskip("textarena")
    with pytest.raises(UserError, match="^--env textarena") as error:
        load(f"textarena:{name}", num_agents=num_agents)
    assert message in str(error.value) and "\n" not in str(error.value)


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_joined_rollouts_are_the_rows_of_all_seats(tokenizer):
    agent = SimpleNamespace(tokenizer=tokenizer, device="cpu")
    transcripts = [ppo_llm.Transcript() for _ in range(4)]
    for k, transcript in enumerate(transcripts):
        transcript.extend([7] * (k + 1))
        transcript.extend([8, 9], turn=1 + k // 2)
        transcript.rewards[-1] = float(k)
        transcript.answers.append(str(k))
    rollouts = [ppo_llm.Rollout(**models.pad_right(own, agent)) for own in (transcripts[:2], transcripts[2:])]
    whole = ppo_llm.Rollout(**models.pad_right(transcripts, agent))
    (joined,) = models.join_rollouts([agent], [agent, agent], rollouts)
    for name in ("attention_mask", "turns", "rewards"):
        assert torch.equal(getattr(joined, name), getattr(whole, name))
    assert torch.equal(joined.ids * joined.attention_mask, whole.ids * whole.attention_mask)
    assert joined.answers == whole.answers
    other = SimpleNamespace()
    assert models.join_rollouts([agent, other], [agent, other], rollouts) == rollouts
    assert models.join_rollouts([agent], [other, agent], rollouts) == rollouts[1:]


def test_one_agent_learns_in_all_seats_and_goes_on_to_the_bit(tmp_path):
    flags = SMALL | {"env": "open_spiel:kuhn_poker", "num_agents": 2, "num_turns": 3, "self_play": True}

    def train(**more):
        return ppo_llm.main(ppo_llm.Args(**(flags | more)))

    agents, run = train(output_dir=str(tmp_path / "whole"))
    assert len(agents) == 1 and [path.name for path in (tmp_path / "whole").glob("agent_*")] == ["agent_0"]
    row = run.rows[0]
    assert {"agent_0/reward_mean", "agent_1/reward_mean"} <= row.keys() and "agent_1/policy_loss" not in row
    sample = json.loads((tmp_path / "whole/samples.jsonl").read_text().splitlines()[0])
    assert [prompts[0].split(".")[0][-1] for prompts in sample["prompts"]] == ["0", "1"]
    train(output_dir=str(tmp_path / "run"), pause_at=1)
    train(resume=str(tmp_path / "run"))
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")
    (shown,) = show(str(tmp_path / "whole"), items=1)
    assert len(shown["trained"]["completions"]) == 2


def test_self_play_takes_a_model():
    args = ppo_llm.Args(num_agents=2, self_play=True, model=("utils/tiny_lm", "utils/tiny_lm"))
    with pytest.raises(UserError, match="--model takes one name"):
        models.load(args)


def test_the_weight_of_the_entropy_is_lowered_over_the_run(tmp_path):
    def train(folder, **flags):
        args = ppo_llm.Args(**SMALL, env="guess", num_turns=1, output_dir=str(tmp_path / folder), **flags)
        return ppo_llm.main(args)[1].rows

    held = train("held", entropy_coef=0.5, save_interval=1)
    lowered = train("lowered", entropy_coef=0.5, entropy_coef_end=0.1)
    assert held[0]["agent_0/entropy"] == lowered[0]["agent_0/entropy"]  # the first update has the whole weight
    other = train("other", entropy_coef=0.3, fork=str(tmp_path / "held/checkpoints/update_000001"))
    norms = [rows[1]["agent_0/grad_norm"] for rows in (held, lowered, other)]
    assert norms[1] == pytest.approx(norms[2], rel=1e-6) != norms[0]  # the second of two is halfway
    assert train("same", entropy_coef=0.5, entropy_coef_end=0.5)[1]["agent_0/grad_norm"] == held[1]["agent_0/grad_norm"]
    with pytest.raises(UserError, match="--entropy-coef-end has no effect without --entropy-coef"):
        train("none", entropy_coef_end=0.1)


def test_the_share_of_matches_that_each_seat_wins():
    earned = [[{1: 1.0, 2: -3.0}, {1: 2.0}, {2: 0.5}, {}], [{2: 1.0}, {1: 2.0}, {}, {}], [{}, {1: 1.0}, {2: 0.25}, {}]]
    turns = torch.tensor([[1], [1], [1], [0]])  # nobody acts in the last match, and nobody wins the second
    rollouts = [SimpleNamespace(turns=turns, earned=own) for own in earned]
    shares = {"agent_0/win_rate": 1 / 3, "agent_1/win_rate": 1 / 3, "agent_2/win_rate": 0.0}
    assert seat_metrics(rollouts) == pytest.approx(shares)


@pytest.mark.parametrize("script", [ippo_llm, magrpo_llm, ppo_llm])
def test_scripts_play_it_and_the_same_again(tmp_path, script):
    def train(folder):
        args = script.Args(
            **SMALL, env="open_spiel:kuhn_poker", num_agents=2, num_turns=3, output_dir=str(tmp_path / folder)
        )
        return script.main(args)[1]

    run = train("one")
    assert run.step == 2 and 0 < run.rows[0]["illegal_rate"] <= 1
    assert {"agent_0/reward_mean", "agent_1/reward_mean"} <= run.rows[0].keys()
    assert run.rows[0]["agent_0/win_rate"] + run.rows[0]["agent_1/win_rate"] == 1  # nobody draws in it
    train("two")
    assert timeless(tmp_path / "one") == timeless(tmp_path / "two")


@pytest.mark.parametrize(
    "name, paid", [("dilemma", [(3, 3), (0, 5), (1, 1)]), ("dilemma_sum", [(6, 6), (5, 5), (2, 2)])]
)
def test_the_prisoners_dilemma_pays_each_for_itself_or_the_sum(name, paid):
    task, args = load(f"benchmark/games/{name}.py", num_turns=4)
    env = task.TeamEnv(task, [{"seed": 1}], args)
    (first,), _ = (own.values() for own in env.reset())
    assert first == [{"role": "user", "content": "Say 1 or 2."}]
    for answers, payoffs in zip((("1", " 1"), ("1", "2"), ("2", "2")), paid):
        observations, rewards, cut = env.step([{0: answer} for answer in answers])
        assert tuple(own[0] for own in rewards) == payoffs and not cut
        seen = [own[0][0]["content"] for own in observations]
        mine, other = (answer.strip() for answer in answers)
        assert seen == [f"You {mine}, other {other}. Say 1 or 2.", f"You {other}, other {mine}. Say 1 or 2."]
    observations, rewards, _ = env.step([{0: "1"}, {0: "yes"}])  # the last round; a coin moves for the second agent
    assert observations == [{}, {}]
    earned = tuple(own[0] for own in rewards)
    assert earned in (((3, 2), (0, 4)) if name == "dilemma" else ((5, 5), (4, 4)))


def test_a_judge_is_paid_for_a_verdict_that_is_right(monkeypatch):
    spec = importlib.util.spec_from_file_location("judge", "benchmark/games/judge.py")
    judge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge)
    monkeypatch.setattr(judge.reasoning, "reward_fn", lambda completion, answer, **_: 0.75 * (answer in completion))
    place = {"question": "Is it?", "name": "syllogism", "size": 3, "seed": 0}
    items = [place | {"answer": answer, "index": k} for k, answer in enumerate(("Yes", "No", "Yes"))]
    env = judge.TeamEnv(None, items, None)
    questions, waits = env.reset()
    assert questions.keys() == {0, 1, 2} and not waits and "Is it?" in questions[0][0]["content"]
    (waits, read), rewards, cut = env.step([{0: "Yes.", 1: "Yes", 2: "It is Yes"}, {}])
    assert not waits and "A student says: It is Yes" in read[2][0]["content"]
    assert rewards == [{0: 0.75, 1: 0.0, 2: 0.75}, {}] and not cut
    over, rewards, _ = env.step([{}, {0: "yes", 1: " Yes, it is", 2: "It is not"}])  # the third begins otherwise
    assert over == [{}, {}] and rewards == [{}, {0: 1.0, 1: 0.0, 2: 1.0}]
