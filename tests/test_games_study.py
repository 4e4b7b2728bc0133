"""benchmark.games: a run in short, its table and picture, the page beside kept runs, how long runs are, bad input."""

import numpy as np
import pytest

import ppo_llm
from benchmark import games
from utils.benchmark import Failed
from utils.cli import UserError, parse
from utils.run.reader import read_metrics

pyspiel = pytest.importorskip("pyspiel")
exploitability = pytest.importorskip("open_spiel.python.algorithms.exploitability")
policy = pytest.importorskip("open_spiel.python.policy")


@pytest.mark.slow
def test_a_study_in_short_is_run_scored_and_drawn(tmp_path):
    args = games.Args(size="quick", seeds=(1,), only=("moving reference",), output_dir=str(tmp_path))
    games.main(args)
    rows = read_metrics(tmp_path / "results" / "moving_reference__1")
    scores = [row[games.SCORE] for row in rows if row.get(games.SCORE) is not None]
    page = (tmp_path / "games.md").read_text().partition("<!-- kuhn -->")[2].partition("<!-- end -->")[0]
    assert len(scores) >= 2 and f"| moving reference | 1 | {scores[-1]:.3f} |" in page and "| nothing |" not in page
    assert (tmp_path / "kuhn.png").stat().st_size > 5000
    games.main(args)  # what is kept is not run again
    assert [row[games.SCORE] for row in rows] == [
        row[games.SCORE] for row in read_metrics(tmp_path / "results" / "moving_reference__1")
    ]


def test_the_table_has_the_mean_of_seeds_and_the_lowest_of_each():
    """Of two seeds the means of draws are 0.1, 0.2, 0.2, 0.3, and the interval is 7.5 % of the way in from each end.

    What a run has played beyond the shortest one is left out.
    """
    seeds = [np.array([[1, 2, 3], [0.3, 0.1, 0], [0.5, 0.02, 1]]), np.array([[1, 2], [0.1, 0.3], [0.5, 0.04]])]
    header, _, line, _ = games.table({"nothing": seeds})
    assert "exploitability after 2 matches" in header
    assert line.startswith("| nothing | 2 | 0.200 | 0.108 to 0.292 | 0.100 0.300 | 0.100 | 3.0% |")


@pytest.mark.parametrize("game", games.GAMES)
def test_the_uniformly_random_player_is_as_easy_to_exploit_as_open_spiel_says(game):
    played = pyspiel.load_game(f"{game}_poker")
    found = exploitability.exploitability(played, policy.UniformRandomPolicy(played))
    assert games.GAMES[game].uniform == pytest.approx(found, abs=0.0005)


def test_a_study_whose_runs_all_fail_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(games, "make", lambda jobs, _: [job.name for job in jobs])
    monkeypatch.setattr(games.make_game_lm, "main", lambda _: None)
    args = games.Args(size="quick", seeds=(1,), only=("nothing",), output_dir=str(tmp_path))
    with pytest.raises(Failed, match="^1 of 1 runs failed: nothing__1$"):
        games.main(args)


@pytest.mark.parametrize("game", games.GAMES)
def test_the_page_has_what_kept_runs_give(game):
    curves = {variant: games.scores(games.HERE / game / "results", variant) for variant in games.GAMES[game].variants}
    assert all(len(seeds) == 5 for seeds in curves.values())
    assert "\n".join([f"<!-- {game} -->\n", *games.table(curves)]) in (games.HERE / "games.md").read_text()


@pytest.mark.parametrize("game", games.GAMES)
@pytest.mark.parametrize("size, num_updates", [("full", 400), ("quick", 8)])
def test_runs_are_as_long_as_their_study_says(game, size, num_updates):
    of_runs = {}
    for variant in games.GAMES[game].variants:
        of_runs[variant] = parse(ppo_llm.Args, games.job_of(game, variant, 3, "some/base", size).argv[2:])
    for args in of_runs.values():
        assert (args.env, args.model, args.seed) == (f"open_spiel:{game}_poker", ("some/base",), 3)
        assert args.train_size == num_updates * args.rollout_buffer_size
    assert of_runs["moving reference"].reference_update_interval == 50 and of_runs["nothing"].kl_loss_coef == 0


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"only": ("no",)}, "--only takes"),
        ({"game": "leduc", "only": ("entropy, held",)}, "--only takes"),
        ({"size": "quick"}, "another --output-dir"),
        ({"size": "quick", "output_dir": str(games.HERE / "leduc")}, "another --output-dir"),
        ({"seeds": (1, 1)}, "--seeds"),
    ],
)
def test_bad_input_is_one_line(flags, message):
    with pytest.raises(UserError, match=message) as error:
        games.main(games.Args(**flags))
    assert "\n" not in str(error.value)
