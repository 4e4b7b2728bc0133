"""What a run shows of foreign text: nothing that steers a terminal, and no formulas in titles."""

import pytest

from utils import distributed
from utils.cli import UserError, one_line
from utils.run.report import draw_curves, outcome, own_rewards, side_by_side

ESCAPE = "\x1b[2J\x1b]0;owned\x07 fine"


@pytest.mark.parametrize("item", [{"prompt": ESCAPE}, ESCAPE, 7], ids=["dict", "text", "number"])
def test_samples_hold_nothing_that_steers_a_terminal(item):
    sample = {"update": 1, "reward": 0.5, "rewards": [0.5, [0.25, 0.25]], "item": item}
    sample["completions"] = [ESCAPE, [ESCAPE, "two"]]
    text = side_by_side([sample], width=100)
    assert "\x1b" not in text and "\x07" not in text and "fine" in text


def test_errors_and_notes_hold_nothing_that_steers_a_terminal(capsys):
    assert "\x1b" not in one_line(UserError(ESCAPE))
    distributed.say(ESCAPE)
    assert "\x1b" not in capsys.readouterr().out


def test_what_agents_earn_that_are_paid_the_opposite_is_shown(tmp_path):
    sample = {"update": 1, "reward": 0.0, "earned": [1.0, -1.0], "item": 7, "completions": ["a", ["b", "c"]]}
    assert "sample of update 1, rewards 1.00, -1.00" in side_by_side([sample])
    rows = [{"global_step": k, "reward_mean": 0.0, "reward_std": 0.0} for k in (4, 8)]
    assert outcome(rows, 2).endswith("every episode earned the same")
    rows[0]["agent_0/reward_mean"], rows[0]["agent_1/reward_mean"] = 0.5, -0.5  # in the second update all drew
    assert own_rewards(rows) == {"agent_0": [0.5, 0.0], "agent_1": [-0.5, 0.0]}
    text = outcome(rows, 2)
    assert "same" not in text and "; agent_1: -0.500 at first, 0.000 over the last tenth" in text
    draw_curves(rows, tmp_path / "curves.png", "a game")


def test_a_game_is_shown_with_what_was_read():
    sample = {"update": 1, "reward": 0.0, "earned": [1.0, -1.0], "item": {"seed": 7}}
    sample |= {"prompts": [["<user> You have K.", "<user> bet"], ["<user> You have J."]]}
    sample |= {"completions": [["pass", "bet"], ["bet"]]}
    lines = side_by_side([sample], width=120).splitlines()
    assert lines[1:3] == ["sample of update 1, rewards 1.00, -1.00", "seed: 7"]
    assert [cell.strip() for cell in lines[5].split(" | ")] == [
        "[1] <user> You have K. -> pass",
        "[1] <user> You have J. -> bet",
    ]
    assert lines[6].split(" |")[0].strip() == "[2] <user> bet -> bet"


def test_a_title_is_no_formula(tmp_path):
    draw_curves([{"global_step": 4, "reward_mean": 1.0}], tmp_path / "curves.png", "costs $5 and $x^{")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_critic_of_the_team_is_drawn_and_an_update_without_a_length_is_a_gap(tmp_path, monkeypatch):
    panels = {}

    def keep(figure, *_, **__):
        panels.update({axis.get_title(loc="left"): len(axis.lines) for axis in figure.axes})

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", keep)
    rows = [
        {"global_step": k, "reward_mean": 0.0, "agent_0/policy_loss": 0.1, "critic/value_loss": 1.0} for k in (4, 8)
    ]
    rows[0]["agent_0/response_length"] = 3.0
    draw_curves(rows, tmp_path / "curves.png", "a run")
    assert panels["value loss"] == panels["response length (tokens)"] == 2  # pale, and smooth
