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
