"""The rule of the task `arxiv`, against numbers worked out by hand."""

import json

import datasets
import pytest

import ippo_llm
from utils.cli import UserError
from utils.tasks import arxiv, load_task


def text(words, letters=4, start=0):
    """So many different words of so many letters, none a stop word or a transition."""
    return " ".join(f"{start + k:0{letters}d}" for k in range(words))


def test_a_text_outside_its_bounds_earns_nothing():
    assert arxiv.pair_reward(text(127), text(180), 128) == arxiv.pair_reward(text(190), text(257), 128) == 0.0
    assert arxiv.pair_reward(text(128), text(180), 128) > 2.0
    assert arxiv.pair_reward(text(15), text(21), 16) == 0.0 < arxiv.pair_reward(text(16), text(22), 16)
    assert arxiv.pair_reward("", text(20), 16) == 0.0


@pytest.mark.parametrize(
    "second, expected",
    [
        (text(16, 2), 0.5),  # characters 47 / 79 = 0.59: stop
        (text(32), 0.5),  # 159 / 79 = 2.01: stop
        (text(16), 0.5 + (1 - 0.8) / 0.5 + 0.5 + 0.6),
        (text(22), 0.5 + 1 + 0.5 * (1.7 - 22 / 16) / 0.4 + 0.6),  # 109 / 79 = 1.38; unique words 1.375
        (text(20, 5), 0.5 + 1 + 0.5),  # 119 / 79 = 1.51; no word in common
        (text(20, 5) + " the", 0.5 + 1 + 0.5 * (1.7 - 21 / 16) / 0.4),  # nor by a stop word
        (text(18, 5, 5000) + " " + text(2), 0.5 + 1 + 0.5 + 0.6 * 2 / 34 / 0.23),
        (text(28, 3), 0.5 + 1 + 0.0),  # 111 / 79 = 1.41; unique words 1.75: stop
        (text(13, 6) + " 000000 000000 000000", 0.5 + 1 + 0.5),  # 111 / 79; unique words 13 / 16
        (text(9, 6) + " 000000" * 7, 0.5 + 1 + 0.5 * (9 / 16 - 0.5) / 0.2),
        (text(29, 4) + " 0000", 0.5 + (2.0 - 149 / 79) / 0.4),  # unique words 1.81: stop
        (text(18, 5) + " however", 0.5 + 1 + 0.5 + 0.4 * 0.4),
        (text(17, 5) + " however indeed", 0.5 + 1 + 0.5 + 0.4 * 0.45),  # two categories
    ],
)
def test_each_level_of_the_rule(second, expected):
    assert arxiv.pair_reward(text(16), second, 16) == pytest.approx(expected)


def test_transitions_count_in_either_text():
    assert arxiv.pair_reward(text(15) + " thus", text(20, 5), 16) == pytest.approx(0.5 + 1 + 0.5 + 0.4 * 0.4)


def test_two_sensible_parts_about_a_made_abstract_earn_nearly_all():
    first = (
        "Solar cells wear out in the heat of the desert, so they cost more than they earn when the error of their "
        "control is large. However, earlier methods did not reduce the error of solar cells in the heat."
    )
    second = (
        "First, a Bayesian model of the solar cells is trained. Then the model is compared with earlier methods in the "
        "heat of the desert. As a result, the error of the control of solar cells is thirty percent lower. In short, "
        "solar cells wear out later and cost less if they have such a model."
    )
    assert arxiv.reward_func([first], [second], items=list(arxiv.train_dataset(1, 0)))[0] > 2.8


def test_abstracts_come_from_the_seed_have_four_to_six_sentences_and_are_varied():
    assert arxiv.train_dataset(50, 1)[:] == arxiv.train_dataset(50, 1)[:] != arxiv.train_dataset(50, 2)[:]
    train, held_out = (set(data["abstract_text"]) for data in (arxiv.train_dataset(1000, 1), arxiv.eval_dataset(64, 1)))
    assert len(train) > 950 and len(train & held_out) <= 3
    assert {abstract.count(". ") + 1 for abstract in train} == {4, 5, 6}
    assert not any("  " in abstract or "{" in abstract for abstract in train)


def test_each_writer_is_asked_for_a_length_that_is_paid():
    for item in (arxiv.train_dataset(1, 1)[0], arxiv.item_of({"abstract_text": "We study it."})):
        requests = [arxiv.formatters(item, agent)[0]["content"] for agent in range(2)]
        lengths = [int(request.split(" in about ")[1].split()[0]) for request in requests]
        assert all(item["min_words"] < length < arxiv.MAX_WORDS for length in lengths)
        assert 1.3 <= lengths[1] / lengths[0] <= 1.6
        assert all(request.startswith(item["abstract_text"]) for request in requests)


def test_rows_of_the_hubs_columns_are_held_to_the_published_bounds(tmp_path):
    rows = [{"article_id": str(k), "abstract_text": f"We study {k}.", "token_count": 4} for k in range(3)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    loaded = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=tmp_path)
    assert set(arxiv.columns) <= set(loaded.column_names)
    items = [arxiv.item_of(row) for row in loaded]
    assert arxiv.item_of({"abstract_text": ["We study it.", "It works."]})["abstract_text"] == "We study it. It works."
    assert "We study 2." in arxiv.formatters(items[2], 0)[0]["content"]
    assert arxiv.reward_func([text(127)] * 3, [text(180)] * 3, items=items) == [0.0] * 3
    assert min(arxiv.reward_func([text(128)] * 3, [text(170)] * 3, items=items)) > 2.4


def test_the_task_is_for_two_writers():
    assert load_task("arxiv", ippo_llm.Args(), default=ippo_llm).given is arxiv
    with pytest.raises(UserError, match="^the task arxiv: it takes 2 agents, .*, got 3$|it takes 2 agents"):
        load_task("arxiv", ippo_llm.Args(num_agents=3), default=ippo_llm)
