"""What the tasks number, build, reasoning and tldr pay, by hand, by search and by the package that asks."""

import functools
import itertools
import sys
from types import SimpleNamespace

import datasets
import pytest

import ippo_llm
from utils import tasks
from utils.cli import UserError
from utils.tasks import build, number, reasoning
from utils.tasks.tldr import pair_reward, reward_func


def make_env(items, **flags):
    args = ippo_llm.Args(**flags)
    task = tasks.load_task(None, args, default=ippo_llm)
    return ippo_llm.TeamEnv(task, items, args)


# --- number -----------------------------------------------------------------------------------------------------------


def best(n, turns):
    """Least sum of distances over n neighbouring targets: a search over every number to name, in every turn."""

    @functools.cache
    def search(n, turns):
        if n == 0 or turns == 0:
            return 0
        return min(
            sum(abs(i - k) for i in range(n)) + search(k, turns - 1) + search(n - 1 - k, turns - 1) for k in range(n)
        )

    return search(n, turns)


@pytest.mark.parametrize("num_agents, num_turns", [(1, 1), (1, 3), (2, 3), (3, 5), (8, 8)])
def test_the_optimum_of_number_is_what_a_search_over_all_plays_finds(num_agents, num_turns):
    n = 10 * num_agents + 1
    expected = num_turns - best(n, num_turns) / n / (n - 1)
    assert number.optimum(num_agents, num_turns) == pytest.approx(expected, abs=1e-12)


def play_number(targets, num_turns, choose):
    """Rewards of two players over targets; choose(hints) is the sum of their numbers after these hints."""
    items = [{"share": (target + 0.5) / 21} for target in targets]
    env = make_env(items, task="number", num_turns=num_turns)
    env.reset()
    hints = {b: [] for b in range(len(items))}  # of the episodes that go on
    earned = [0.0] * len(items)
    while hints:
        sums = {b: choose(own) for b, own in hints.items()}
        observations, rewards, _ = env.step(
            [{b: str(s // 2) for b, s in sums.items()}, {b: f" {s - s // 2}\n" for b, s in sums.items()}]
        )
        for b, reward in rewards[0].items():
            earned[b] += reward
        hints = {b: [*hints[b], chat[-1]["content"]] for b, chat in observations[0].items()}
    return earned


def middle(hints):
    low, high = 0, 20
    for hint in hints:
        guess = (low + high) // 2
        low, high = {"higher": (guess + 1, high), "lower": (low, guess - 1), "met": (guess, guess)}[hint]
    return (low + high) // 2


def test_playing_the_middle_earns_the_optimum_of_number():
    rewards = play_number(range(21), 3, middle)
    assert sum(rewards) / 21 == pytest.approx(number.optimum(2, 3), abs=1e-12)
    assert rewards[10] == 3.0  # met at once, and said again


def test_number_move_by_move():
    assert play_number([4], 3, lambda hints: 5 if hints else 10) == [pytest.approx(1 - 6 / 20 + 2 * (1 - 1 / 20))]
    assert play_number([4], 3, lambda hints: 23) == [0.0]  # 11 and 12 spoil the game
    legal = number.reward_func(["5", "5", "11", "five"], ["5", "6", "5", "5"], items=[{"share": 0.5}] * 4)
    assert legal == [1.0, 1 - 1 / 20, 0.0, 0.0]  # 10 is hidden; 11 and a word are no moves


def test_hidden_numbers_are_uniform():
    counts = [0] * 21
    for item in number.train_dataset(4200, 1):
        counts[number.hidden(item, 2)] += 1
    assert min(counts) > 140 and max(counts) < 260  # 200 each; deviation 14


# --- build ------------------------------------------------------------------------------------------------------------

L = (1, 4, 7, 8, 9)  # down the left side, then along the bottom


def score(turns, variant="every-kept", num_turns=None):
    """The reward of the last of an episode's turns, each a list of completions."""
    histories = [[list(said)] for said in zip(*turns)]
    extra = {"items": [{"picture": list(L), "variant": variant}], "turns": histories, "turn": len(turns) - 1}
    return build.reward_func(*[[text] for text in turns[-1]], **extra, num_turns=num_turns or len(turns))[0]


def test_what_a_world_is_worth_by_hand():
    assert score([["1", "4"]]) == pytest.approx(2 * 2 / 5)  # neighbours of two kinds
    assert score([["1", "1"]]) == pytest.approx(2 / 5 - 0.25)  # the second builds over the first, who has none then
    assert score([["1 4", "9"]]) == pytest.approx(2 * 3 / 5 - 1)  # the only pair is of one kind
    assert score([["1", "5"]]) == pytest.approx(2 / 5 - 1.5 / 4)
    assert score([["none", "10 0 -1 x"]]) == pytest.approx(-0.5)
    assert score([["1\n9", "4 8"], ["7", "8"]]) == pytest.approx(2)  # a chessboard's fields


def test_which_turns_pay_and_what_stays():
    turns = [["1", "4"], ["7", "8"]]
    assert score(turns) == score(turns, "last-kept") == pytest.approx(2 * 4 / 5)
    assert score(turns, "every-empty") == pytest.approx(2 * 2 / 5)
    assert score(turns, "last-kept", num_turns=3) == 0


def test_pictures_hang_together_and_every_sixth_is_held_out():
    assert len(build.PICTURES) == 49 and L in build.PICTURES and (1, 3, 5, 7, 9) not in build.PICTURES
    rows = [build.named_dataset("last-kept", 100, 1, split) for split in ("train", "eval")]
    train, held_out = ({tuple(row["picture"]) for row in split} for split in rows)
    assert (len(train), len(held_out)) == (41, 8) and not train & held_out


@pytest.mark.parametrize("variant", build.VARIANTS)
def test_optimal_building_is_the_best_of_all_plays(variant):
    plays = itertools.product(map(str, build.CELLS), repeat=2)
    best = max(score([[first]], variant, 2) + score([[first], [then]], variant, 2) for first, then in plays)
    assert build.optimum(1, 2, [{"picture": list(L), "variant": variant}]) == pytest.approx(best)


@pytest.mark.parametrize("num_turns", [1, 2, 4])
@pytest.mark.parametrize("variant", build.VARIANTS)
def test_one_builder_alone_does_not_earn_what_a_team_can(num_turns, variant):
    items = [*build.named_dataset(variant, 41 if num_turns < 4 else 10, 1, "train")]
    assert build.optimum(1, num_turns, items) < build.optimum(2, num_turns, items)


def test_iou_is_of_the_last_world():
    items = [{"picture": list(L), "variant": "every-kept"}]
    rollouts = [SimpleNamespace(answers=[said]) for said in (["1", "2"], ["4", "9"])]
    assert build.metrics_callback(rollouts, items=items) == {"iou": 3 / 6}


def test_a_team_that_a_task_can_not_serve_is_one_line():
    with pytest.raises(UserError, match="build takes 1 to 3 agents, got 4"):
        make_env([], task="build", num_agents=4)
    with pytest.raises(UserError, match="^--task reasoning: 2 turns take 2 or more agents"):
        make_env([], task="reasoning", num_agents=1, num_turns=2)


# --- tldr -------------------------------------------------------------------------------------------------------------


def text(words, letters=4, start=0):
    """So many different words of so many letters, none a stop word or a transition."""
    return " ".join(f"{start + k:0{letters}d}" for k in range(words))


def test_a_text_outside_8_to_256_words_earns_nothing():
    assert pair_reward(text(7), text(16)) == pair_reward(text(8), text(257)) == pair_reward("", text(20)) == 0.0


@pytest.mark.parametrize(
    "long, points",
    [
        (text(8), 0.5),  # ratio 1: stop
        (text(50), 0.5),  # ratio 6.4: stop
        (text(10, 4), 0.5 + (49 / 39 - 1.1) / 0.5),  # ratio 1.256; unique ratio 1.25 is below 1.3: stop
        (text(12, 4), 0.5 + (59 / 39 - 1.1) / 0.5 + 0.5 * (1.5 - 1.3) / 0.7 + 0.6 * 8 / 12),
        (text(20, 4), 0.5 + 1 + 0.5 + 0.6 * 8 / 20),  # ratio 2.54, unique ratio 2.5
        (text(20, 4, start=100), 0.5 + 1 + 0.5),  # no word in common
        (text(32, 4), 0.5 + (5 - 159 / 39) / 1.8 + 0.5 + 0.6 * 8 / 32),
        (text(19) + " however", 0.5 + 1 + 0.5 + 0.4 * 0.4 + 0.6 * 8 / 20),  # one category of transitions
        (text(18) + " however so", 0.5 + 1 + 0.5 + 0.4 * 0.45 + 0.6 * 8 / 19),  # two; `so` is a stop word
        (text(19) + " soviet", 0.5 + 1 + 0.5 + 0.6 * 8 / 20),  # a part of a word is no transition
    ],
)
def test_each_level_of_tldr(long, points):
    assert pair_reward(text(8), long) == pytest.approx(points)


def test_one_writer_is_held_against_the_post_and_many_form_a_chain():
    items = [{"prompt": text(20)}]
    assert reward_func([text(8)], items=items) == [pytest.approx(pair_reward(text(8), text(20)))]
    pairs = pair_reward(text(8), text(20)), pair_reward(text(20), text(40))
    assert reward_func([text(8)], [text(20)], [text(40)], items=items) == [pytest.approx(sum(pairs) / 2)]


# --- reasoning --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym")


def rewards_of(*completions, items):
    task = tasks.load_task(None, ippo_llm.Args(task="reasoning"), default=ippo_llm)
    return task.given.reward_func(*completions, items=items)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning.source.cache_clear()
    with pytest.raises(UserError, match=r"takes the package reasoning-gym: pip install reasoning-gym==0\.1\.25$"):
        reasoning.named_dataset("gcd", 3, 1, "train")


def test_scorers_that_run_the_answer_and_unknown_names_are_refused(gym):
    from reasoning_gym.factory import DATASETS

    assert reasoning.UNSAFE <= set(DATASETS)
    with pytest.raises(UserError, match="--dataset spiral_matrix is refused"):
        reasoning.named_dataset("spiral_matrix", 3, 1, "train")
    with pytest.raises(UserError, match="^--dataset leg_count is not in reasoning-gym; the closest.* leg_counting"):
        reasoning.named_dataset("leg_count", 3, 1, "train")


@pytest.mark.parametrize("name", ["gcd", "chain_sum", "rearc", "time_intervals"])
def test_items_go_through_a_dataset_and_the_last_agents_right_answer_is_paid(gym, name, tmp_path):
    items = reasoning.named_dataset(name, 6, 1, "train")
    items.to_json(tmp_path / "items.jsonl")
    reasoning.entry.cache_clear()
    path = str(tmp_path / "items.jsonl")
    items = [*datasets.load_dataset("json", data_files=path, split="train", cache_dir=tmp_path)]
    right = [item["answer"] for item in items]
    assert rewards_of(["no"] * 6, right, items=items) == [1.0] * 6
    assert max(rewards_of(right, ["no"] * 6, items=items)) < 0.1


def test_scores_are_those_of_the_package_and_0_where_it_fails(gym):
    items = [*reasoning.train_dataset(20, 3)]
    own = gym.create_dataset("gcd", size=20, seed=items[0]["seed"])
    answers = ["1", "2", "12", "", "no"] * 4
    assert [item["question"] for item in items] == [entry["question"] for entry in own]
    expected = [own.score_answer(answer, entry) for answer, entry in zip(answers, own)]
    assert rewards_of(answers, items=items) == expected and len(set(expected)) > 2
    items = [*reasoning.named_dataset("prime_factorization", 2, 1, "train")]
    assert rewards_of(["I do not know"] * 2, items=items) == [0.0, 0.0]


def test_in_a_later_turn_each_agent_reads_what_all_said():
    first, last = reasoning.external_transition(["three", " 4\n"], 2, {"question": "What is 2 + 2?"})
    assert first[0]["content"].startswith("What is 2 + 2?\n\nYou said: three\nAgent 1 said: 4\n\n")
    assert last[0]["content"].startswith("What is 2 + 2?\n\nAgent 0 said: three\nYou said: 4\n\n")
    assert reasoning.answer_in("It is <answer> 7 </answer>, I think.") == "7"
    assert reasoning.answer_in("<think>\n<answer>3</answer>?\n</think>\n\n7") == "7"
