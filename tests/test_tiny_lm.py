"""The embedded model, and the text that it was made from."""

import ast
from pathlib import Path

import pytest
from helpers import TINY

import ippo_llm
from utils import distributed, make_tiny_lm, models
from utils.cli import UserError
from utils.files import WriteError
from utils.make_tiny_lm import collate, encode, held_out_loss, make_tokenizer
from utils.tasks.made_text import games, posts, programs
from utils.tasks.tldr import eval_dataset, formatters

# --- The model --------------------------------------------------------------------------------------------------------


def test_it_is_small():
    assert sum(path.stat().st_size for path in Path(TINY).glob("*.safetensors")) <= 2_000_000


def test_it_knows_its_text(loaded_model, tokenizer):
    # nats a token; a model that knows nothing has log 768 = 6.6
    assert held_out_loss(loaded_model, tokenizer, size=200) < 0.45


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in ("Zürich, 数学 and\ttabs — 12.5 %", "def f(x):\n    return x ** 2\n", " My roommate Anna"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_frequent_words_are_one_token_each(tokenizer):
    assert len(tokenizer(" station camera without").input_ids) == 3


def test_its_summaries_are_sentences_of_varied_length(loaded_model, tokenizer):
    chats = [formatters(item, 0) for item in eval_dataset(64, 0)]
    args = ippo_llm.Args(num_agents=1, max_new_tokens=64)
    agent = ippo_llm.Agent(0, models.load(args)[0], 1, args)
    contexts = [models.encode(chat, [], agent) for chat in chats]
    answers = ippo_llm.generate(agent, contexts, args, distributed.generator(0))
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    counts = sorted(len(text.split()) for text in texts)
    assert counts[6] <= 10 and counts[-7] >= 30
    assert sum(text[0].isupper() and text[-1] in ".?" for text in texts) >= 60


# --- The text ---------------------------------------------------------------------------------------------------------


def test_posts_have_no_gaps():
    assert all("{" not in item["prompt"] + item["completion"] for item in posts(500, 0))


def test_programs_are_python():
    for item in programs(200, 0):
        ast.parse(item["solution"])


def test_every_move_of_a_game_is_legal_after_all_moves_before():
    for game in games(200, 0):
        messages = game["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        first = messages[0]["content"]
        low = int("think" in first)
        high = int(first.split(" to ")[1].split(".")[0])
        guess = None
        for observation, answer in zip(messages[::2], messages[1::2]):
            if observation["content"] == "higher":
                low = guess
            if observation["content"] == "lower":
                high = guess
            guess = int(answer["content"])
            assert low <= guess <= high


def test_only_the_assistants_tokens_are_marked():
    chat = [{"role": "user", "content": "lower"}, {"role": "assistant", "content": "7"}]
    tokenizer = make_tokenizer(["lower 7"] * 10, vocab_size=300)
    ids, mask, marks = collate(encode(tokenizer, [chat, chat[:1] * 2 + chat]))
    assert tokenizer.decode(ids[0][marks[0] == 1]) == "7<|end|>"
    assert mask[0].sum() < mask[1].sum()
    rendered = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert ids[0][mask[0] == 1].tolist() == rendered  # what is trained on is what the template makes


def test_a_model_that_is_there_is_not_replaced_unasked(monkeypatch):
    monkeypatch.setattr(make_tiny_lm, "chats", None)
    with pytest.raises(UserError, match=r"tiny_lm has one \(--overwrite replaces it\)$"):
        make_tiny_lm.main(make_tiny_lm.Args())


def test_a_folder_that_can_not_be_written_is_one_line_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(make_tiny_lm, "chats", None)
    with pytest.raises(WriteError, match="file/model can't be written: .*Not a directory"):
        make_tiny_lm.main(make_tiny_lm.Args(out=str(tmp_path / "file" / "model")))
