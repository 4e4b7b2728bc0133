"""What a run shows of foreign text: nothing that steers a terminal, and no formulas in titles."""

import pytest

from utils import distributed
from utils.cli import UserError, one_line
from utils.run.report import draw_curves, side_by_side

ESCAPE = "\x1b[2J\x1b]0;owned\x07 fine"


@pytest.mark.parametrize("item", [{"prompt": ESCAPE}, ESCAPE, 7], ids=["dict", "text", "number"])
def test_samples_hold_nothing_that_steers_a_terminal(item):
    sample = {"update": 1, "reward": 0.5, "item": item, "completions": [ESCAPE, [ESCAPE, "two"]]}
    text = side_by_side([sample], width=100)
    assert "\x1b" not in text and "\x07" not in text and "fine" in text


def test_errors_and_notes_hold_nothing_that_steers_a_terminal(capsys):
    assert "\x1b" not in one_line(UserError(ESCAPE))
    distributed.say(ESCAPE)
    assert "\x1b" not in capsys.readouterr().out


def test_a_title_is_no_formula(tmp_path):
    draw_curves([{"global_step": 4, "reward_mean": 1.0}], tmp_path / "curves.png", "costs $5 and $x^{")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_the_untrained_team_is_drawn_before_the_first_update(tmp_path, monkeypatch):
    points = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda self, x, y, *rest, **options: points.append((x, y)))
    rows = [{"global_step": 4, "reward_mean": 1.0, "eval/reward_mean": 2.0, "eval/reward_mean_untrained": 0.5}]
    draw_curves(rows, tmp_path / "curves.png", "title")
    assert ([0, 4], [0.5, 2.0]) in points


def test_few_updates_are_points_too(tmp_path, monkeypatch):
    marks = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda self, x, y, mark="", **options: marks.append(mark))
    for number, seen in ((1, {"o-", ""}), (9, {"o-", ""}), (10, {"-", ""})):
        marks.clear()
        draw_curves([{"global_step": k, "reward_mean": 1.0} for k in range(number)], tmp_path / "curves.png", "title")
        assert {*marks} == seen
