"""From chats to token ids, for kinds of tokenizers and templates; the transcripts of a team as one text."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import ippo_llm
from utils.cli import UserError
from utils.models import encode, join_transcripts, pad_left, pad_right, sum_by_turn, unflatten

LETTERS = [chr(code) for code in range(33, 127)]
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[Q]{{ m['content'] }}[/Q]"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
NAMES_MARKS = (
    "{% for m in messages %}{{ 'ANSWER' if m['role'] == 'user' else 'ANSWERR' }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}ANSWERR:{% endif %}"
)


def build(kind, template=None):
    """A tokenizer of letters: bytes or sentencepiece's spaces, with ids of its own at the start or the end."""
    vocabulary = ["<s>", "</s>", "<pad>", *LETTERS, "▁", "Ġ", "Ċ", "\n"]
    vocabulary += ["▁" + letter for letter in LETTERS]
    merges = [("▁", letter) for letter in LETTERS]
    tokenizer = Tokenizer(models.BPE({token: k for k, token in enumerate(vocabulary)}, merges))
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    single = {"begins": "<s> $A", "ends": "$A </s>", "both": "<s> $A </s>"}.get(kind)
    if single:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    return fast


KINDS = ["bytes", "spaces", "begins", "ends", "both"]


def reader(tokenizer):
    return SimpleNamespace(tokenizer=tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_as_the_tokenizer_has_it_without_an_end(kind):
    tokenizer = build(kind)
    ids = tokenizer("Say it.").input_ids
    assert (ids[0] == 0) == (kind in ("begins", "both")) and (ids[-1] == 1) == (kind in ("ends", "both"))
    assert encode("Say it.", [], reader(tokenizer)) == (ids[:-1] if ids[-1] == 1 else ids)
    assert encode("Say it.</s>", [], reader(tokenizer))[-1] == 1  # an end that stands in the text stays


@pytest.mark.parametrize("template", [INST, NAMES_MARKS], ids=["inst", "names marks"])
@pytest.mark.parametrize("kind", KINDS)
def test_turn_by_turn_is_the_whole_chat(kind, template):
    tokenizer = build(kind, template)
    said = ["Say ANSWER.", "ANSWERR", "Again: ANSWERRR", "no", "And?"]
    chat = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 3, said)]
    ids = encode(chat[:1], [], reader(tokenizer))
    for k in (1, 3):
        answer = tokenizer.encode("x" + said[k] + "</s>", add_special_tokens=False)
        ids += answer[len(tokenizer.encode("x", add_special_tokens=False)) :]
        ids += encode(chat[k + 1 : k + 2], ids, reader(tokenizer))
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer(whole, add_special_tokens=False).input_ids


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_template_messages_stand_between_empty_lines(kind):
    tokenizer = build(kind)
    message = {"role": "user", "content": "Say it."}
    assert encode([message], [], reader(tokenizer)) == encode("Say it.\n\n", [], reader(tokenizer))
    ids = encode([message], [5], reader(tokenizer))
    assert tokenizer.decode([9, *ids])[1:] == "\n\nSay it.\n\n" and ids[0] == tokenizer.convert_tokens_to_ids(
        "Ċ" if kind == "bytes" else "\n"
    )


def test_ids_stay_as_they_are_and_a_prompt_of_none_is_refused(tokenizer):
    assert (
        encode([7, 8], [], reader(tokenizer)) == encode(torch.tensor([7, 8]).tolist(), [3], reader(tokenizer)) == [7, 8]
    )
    with pytest.raises(UserError, match="^a prompt has no tokens: ''$"):
        encode("", [], reader(tokenizer))
    with pytest.raises(TypeError, match="a prompt is a string, or a list of messages with role and content, got 3"):
        encode(3, [], reader(tokenizer))


# --- Rows -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def agent(tokenizer):
    return SimpleNamespace(tokenizer=tokenizer, actor=SimpleNamespace(device="cpu"))


def test_rows_are_padded(agent):
    ids, mask = pad_left([[5], [6, 7, 8]], agent)
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]] and ids[mask > 0].tolist() == [5, 6, 7, 8]
    transcripts = [ippo_llm.Transcript(), ippo_llm.Transcript()]
    transcripts[1].extend([6, 7])
    transcripts[1].extend([8], turn=1)
    rollout = ippo_llm.Rollout(*pad_right(transcripts, agent))
    pad = agent.tokenizer.pad_token_id
    assert rollout.ids.tolist() == [[pad] * 4, [6, 7, 8, pad]]
    assert rollout.attention_mask.tolist() == [[0] * 4, [1, 1, 1, 0]]
    assert rollout.turns.tolist() == [[0] * 4, [0, 0, 1, 0]]


def test_places_and_turns():
    mask = torch.tensor([[False, True, False], [True, False, True]])
    assert unflatten(torch.tensor([1.0, 2.0, 3.0]), mask).tolist() == [[0, 1, 0], [2, 0, 3]]
    x = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    assert sum_by_turn(x, torch.tensor([[0, 1, 2, 2]]), 3).tolist() == [[1, 2, 12, 0]]


def test_a_teams_transcripts_are_one_text_turn_by_turn(agent):
    """Agent 1 does not act in turn 1; nobody acts in turn 2."""
    tokenizer = agent.tokenizer
    encode_text = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731

    def transcript(*pieces):
        made = ippo_llm.Transcript()
        for text, turn in pieces:
            made.extend(encode_text(text), turn)
            made.answers += [text] if turn else []
        return made

    first = transcript(("Say one.", 0), (" one", 1), ("Say three.", 0), (" three", 3))
    second = transcript(("Wait.", 0), (" so", 3))
    rollouts = [ippo_llm.Rollout(*pad_right([own], agent)) for own in (first, second)]
    critic = SimpleNamespace(critic=SimpleNamespace(tokenizer=tokenizer, device="cpu", config=config_of(200)))
    ids, attention_mask, turns = join_transcripts([agent, agent], rollouts, critic, 3)
    end = tokenizer.eos_token
    assert tokenizer.decode(ids[0, attention_mask[0] > 0]) == (
        f"Agent 0 reads:\nSay one.\n\n{end}Agent 0 writes:\n one\n\n"
        f"Agent 0 reads:\nSay three.\n\nAgent 1 reads:\nWait.\n\n{end}"
        "Agent 0 writes:\n three\n\nAgent 1 writes:\n so\n\n"
    )
    assert turns[turns > 0].tolist() == [1, 3]
    assert ids[turns > 0].tolist() == [tokenizer.eos_token_id] * 2
    critic.critic.config = config_of(20)
    with pytest.raises(UserError, match="^the critic has 20 positions, and what the team reads and writes has "):
        join_transcripts([agent, agent], rollouts, critic, 3)


def config_of(positions):
    config = SimpleNamespace(max_position_embeddings=positions)
    config.get_text_config = lambda: config
    return config
