"""The task build: pictures, worlds and what they are worth by hand, optimal play, what one builder can't earn."""

import itertools
from types import SimpleNamespace

import pytest

from utils.cli import UserError
from utils.tasks import build, load_task, optimum

L = (1, 4, 7, 8, 9)  # down the left side, then along the bottom
ITEM = {"picture": list(L), "variant": "every-kept"}


def score(turns, variant="every-kept", num_turns=None):
    """The reward of the last of an episode's turns, each a list of completions."""
    histories = [[list(said)] for said in zip(*turns)]
    item = ITEM | {"variant": variant}
    completions = [[text] for text in turns[-1]]
    extra = {"items": [item], "turns": histories, "turn": len(turns) - 1, "num_turns": num_turns or len(turns)}
    return build.reward_func(*completions, **extra)[0]


def test_what_a_world_is_worth_by_hand():
    assert score([["1", "4"]]) == pytest.approx(2 * 2 / 5)  # neighbours of two kinds
    assert score([["1", "1"]]) == pytest.approx(2 / 5 - 0.25)  # the second builds over the first, who has none then
    assert score([["1 4", "9"]]) == pytest.approx(2 * 3 / 5 - 1)  # the only pair is of one kind
    assert score([["1", "5"]]) == pytest.approx(2 / 5 - 1.5 / 4)
    assert score([["none", "10 0 -1 x"]]) == pytest.approx(-0.5)
    assert score([["1\n9", "4 8"], ["7", "8"]]) == pytest.approx(2)  # a chessboard's fields


def test_which_turns_pay_and_what_stays():
    turns = [["1", "4"], ["7", "8"]]
    assert score(turns) == pytest.approx(2 * 4 / 5)
    assert score(turns, "every-empty") == pytest.approx(2 * 2 / 5)
    assert score(turns, "last-kept") == pytest.approx(2 * 4 / 5)
    assert score(turns, "last-kept", num_turns=3) == 0


def test_pictures_hang_together_and_every_sixth_is_held_out():
    assert len(build.PICTURES) == 49 and L in build.PICTURES and (1, 3, 5, 7, 9) not in build.PICTURES
    train, held_out = (
        {tuple(row["picture"]) for row in build.named_dataset("last-kept", 100, 1, split)}
        for split in ("train", "eval")
    )
    assert (len(train), len(held_out)) == (41, 8) and not train & held_out


@pytest.mark.parametrize("variant", build.VARIANTS)
@pytest.mark.parametrize("num_agents", [1, 2])
def test_optimal_play_is_the_best_of_all_plays(num_agents, variant):
    best = -9.0
    moves = [*itertools.product(map(str, build.CELLS), repeat=num_agents)]
    for plays in itertools.product(moves, repeat=2) if num_agents == 1 else zip(moves, moves):
        turns = [list(said) for said in plays]
        best = max(best, score(turns[:1], variant, 2) + score(turns, variant, 2))
    expected = build.optimum(num_agents, 2, [ITEM | {"variant": variant}])
    if num_agents == 1:  # all plays of two turns
        assert best == pytest.approx(expected)
    else:  # some of them: the same moves twice
        assert best <= expected


@pytest.mark.parametrize("num_turns", [1, 2, 4])
@pytest.mark.parametrize("variant", build.VARIANTS)
def test_one_builder_alone_does_not_earn_what_a_team_can(num_turns, variant):
    items = [*build.named_dataset(variant, 41, 1, "train")]
    task = load_task("build", 2, num_turns)
    assert optimum(task, items, 1, num_turns) < optimum(task, items, 2, num_turns)


def test_iou_is_of_the_last_world():
    prompts = [["<|user|>We each say a number from 1 to 9, of 1 4 7 8 9. Say yours.<|end|>", "..."]]
    rollouts = [SimpleNamespace(prompts=prompts, responses=[said]) for said in (["1", "2"], ["4", "9"])]
    assert build.metrics_callback(rollouts) == {"iou": 3 / 6}


def test_other_names_and_larger_teams_are_one_line():
    with pytest.raises(UserError, match="--task build takes --dataset every-kept, every-empty, last-kept, got nosuch"):
        build.named_dataset("nosuch", 4, 1, "train")
    with pytest.raises(UserError, match="build takes 1 to 3 agents, got 4"):
        load_task("build", 4)
