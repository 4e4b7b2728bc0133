"""The default task's rule, against numbers worked out by hand."""

import random

import pytest

from utils.tasks import batches
from utils.tasks.tldr import eval_dataset, formatters, pair_reward, reward_func, train_dataset


def text(words, letters=4, start=0):
    """So many different words of so many letters, none a stop word or a transition."""
    return " ".join(f"{start + k:0{letters}d}" for k in range(words))


def test_a_text_outside_8_to_256_words_earns_nothing():
    assert pair_reward(text(7), text(16)) == 0.0
    assert pair_reward(text(8), text(257)) == 0.0
    assert pair_reward("", text(20)) == 0.0


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
def test_each_level_of_the_rule(long, points):
    assert pair_reward(text(8), long) == pytest.approx(points)


def test_the_reward_is_at_most_three_and_at_least_zero():
    rng = random.Random(0)
    words = "the cat however so in short first then if when like although indeed also for example such as river".split()
    for _ in range(3000):
        pair = [" ".join(rng.choices(words, k=rng.randint(0, 60))) for _ in range(2)]
        assert 0.0 <= pair_reward(*pair) <= 3.0


def test_one_writer_is_held_against_the_post_and_many_form_a_chain():
    items = [{"prompt": text(20)}]
    assert reward_func([text(8)], items=items) == [pytest.approx(pair_reward(text(8), text(20)))]
    pairs = pair_reward(text(8), text(20)), pair_reward(text(20), text(40))
    assert reward_func([text(8)], [text(20)], [text(40)], items=items) == [pytest.approx(sum(pairs) / 2)]


def test_posts_come_from_the_seed_and_are_not_shared_between_training_and_evaluation():
    assert train_dataset(50, 1)[:] == train_dataset(50, 1)[:] != train_dataset(50, 2)[:]
    train, held_out = (set(data["prompt"]) for data in (train_dataset(1000, 1), eval_dataset(64, 1)))
    assert len(train & held_out) <= 1
    assert "about 64 words" in formatters(train_dataset(1, 1)[0], 2)[0]["content"]


def test_batches_pass_over_the_data_as_often_as_there_are_epochs():
    seen = [item for batch in batches(list(range(10)), 4, 3, seed=0) for item in batch]
    assert len(seen) == 28  # 30, less two that make no batch
    assert sorted(seen[:10]) == list(range(10)) and seen[:10] != seen[10:20]
    assert seen == [item for batch in batches(list(range(10)), 4, 3, seed=0) for item in batch]
