"""benchmark.games: a run in short, its table and picture, and bad input."""

import numpy as np
import pytest

from benchmark import games
from utils.cli import UserError
from utils.run.reader import read_metrics

pytest.importorskip("pyspiel")


@pytest.mark.slow
def test_a_study_in_short_is_run_scored_and_drawn(tmp_path):
    args = games.Args(size="quick", seeds=(1,), only=("moving reference",), output_dir=str(tmp_path))
    games.main(args)
    rows = read_metrics(tmp_path / "results" / "moving_reference__1")
    scores = [row[games.SCORE] for row in rows if row.get(games.SCORE) is not None]
    page = (tmp_path / "games.md").read_text()
    assert len(scores) >= 2 and f"| moving reference | 1 | {scores[-1]:.3f} |" in page and "| nothing |" not in page
    assert (tmp_path / "kuhn.png").stat().st_size > 5000
    games.main(args)  # what is kept is not run again
    assert [row[games.SCORE] for row in rows] == [
        row[games.SCORE] for row in read_metrics(tmp_path / "results" / "moving_reference__1")
    ]


def test_the_table_has_the_mean_of_seeds_and_the_lowest_of_each():
    """Of two seeds the means of draws are 0.1, 0.2, 0.2, 0.3, and the interval is 7.5 % of the way in from each end."""
    seeds = [np.array([[1, 2], [0.3, 0.1], [0.5, 0.02]]), np.array([[1, 2], [0.1, 0.3], [0.5, 0.04]])]
    line = games.table({"nothing": seeds})[-2]
    assert line.startswith("| nothing | 2 | 0.200 | 0.108 to 0.292 | 0.100 0.300 | 0.100 | 3.0% |")


@pytest.mark.parametrize(
    "flags, message",
    [({"only": ("no",)}, "--only takes"), ({"size": "quick"}, "another --output-dir"), ({"seeds": (1, 1)}, "--seeds")],
)
def test_bad_input_is_one_line(flags, message):
    with pytest.raises(UserError, match=message) as error:
        games.main(games.Args(**flags))
    assert "\n" not in str(error.value)
