"""From chats to token ids, for kinds of tokenizers and templates; the transcripts of a team as one text."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from short_runs import FLAGS, make_task, reward_length, small_model
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import ippo_llm
from utils import distributed, models
from utils.cli import UserError
from utils.models import decode, encode, join_transcripts, pad_left, pad_right, unflatten
from utils.tasks.task import load_task, new_messages

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
    tokenizer = Tokenizer(BPE({token: k for k, token in enumerate(vocabulary)}, merges))
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
    rollout = ippo_llm.Rollout(**pad_right(transcripts, agent))
    pad = agent.tokenizer.pad_token_id
    assert rollout.ids.tolist() == [[pad] * 4, [6, 7, 8, pad]]
    assert rollout.attention_mask.tolist() == [[0] * 4, [1, 1, 1, 0]]
    assert rollout.turns.tolist() == [[0] * 4, [0, 0, 1, 0]]


def test_places_and_turns():
    mask = torch.tensor([[False, True, False], [True, False, True]])
    assert unflatten(torch.tensor([1.0, 2.0, 3.0]), mask).tolist() == [[0, 1, 0], [2, 0, 3]]
    x = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    assert ippo_llm.sum_by(torch.tensor([[0, 1, 2, 2]]), x, 3).tolist() == [[1, 2, 12, 0]]


FORMATS = ("Agent {} reads:\n{}\n\n", "Agent {} writes:\n{}\n\n")


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
    rollouts = [ippo_llm.Rollout(**pad_right([own], agent)) for own in (first, second)]
    critic = SimpleNamespace(critic=SimpleNamespace(tokenizer=tokenizer, device="cpu", config=config_of(200)))
    text = join_transcripts([agent, agent], rollouts, critic, *FORMATS)
    ids, attention_mask, turns = text.ids, text.attention_mask, text.marks
    end = tokenizer.eos_token
    assert tokenizer.decode(ids[0, attention_mask[0] > 0]) == (
        f"Agent 0 reads:\nSay one.\n\n{end}Agent 0 writes:\n one\n\n"
        f"Agent 0 reads:\nSay three.\n\nAgent 1 reads:\nWait.\n\n{end}"
        "Agent 0 writes:\n three\n\nAgent 1 writes:\n so\n\n"
    )
    assert turns[turns > 0].tolist() == [1, 3]
    assert ids[turns > 0].tolist() == [tokenizer.eos_token_id] * 2
    critic.critic.config = config_of(int(turns[0].argmax()))  # it reads up to the last mark
    join_transcripts([agent, agent], rollouts, critic, *FORMATS)
    critic.critic.config = config_of(20)
    with pytest.raises(UserError, match="^the critic has 20 positions, and what the team reads and writes has "):
        join_transcripts([agent, agent], rollouts, critic, *FORMATS)


def test_a_teams_critic_need_not_know_the_padding_token(agent):
    padded = copy.deepcopy(agent.tokenizer)
    padded.add_special_tokens({"pad_token": "<more>"})
    assert padded.pad_token_id == len(agent.tokenizer)
    transcripts = []
    for words in (" one", " one two three"):
        transcripts.append(ippo_llm.Transcript())
        transcripts[-1].extend(padded(words, add_special_tokens=False).input_ids)
        transcripts[-1].extend([9], turn=1)
        transcripts[-1].answers.append("(")
    critic = SimpleNamespace(critic=SimpleNamespace(tokenizer=padded, device="cpu", config=config_of(200)))
    text = join_transcripts([agent], [ippo_llm.Rollout(**pad_right(transcripts, agent))], critic, *FORMATS)
    padding = text.ids[text.attention_mask == 0]
    assert len(padding) > 2 and not padding.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_teams_critic_reads_from_the_first_tokens_that_its_tokenizer_adds(kind):
    tokenizer = build(kind)
    agent = SimpleNamespace(tokenizer=tokenizer, actor=SimpleNamespace(device="cpu"))
    transcript = ippo_llm.Transcript()
    transcript.extend(tokenizer("It.", add_special_tokens=False).input_ids)
    transcript.extend([9], turn=1)
    transcript.answers.append("(")
    rollout = ippo_llm.Rollout(**pad_right([transcript], agent))
    critic = SimpleNamespace(critic=SimpleNamespace(tokenizer=tokenizer, device="cpu", config=config_of(200)))
    text = join_transcripts([agent], [rollout], critic, *FORMATS)
    ids, turns = text.ids, text.marks
    right = tokenizer("Agent 0 reads:\nIt.\n\n").input_ids
    end = int(turns[0].argmax())
    assert ids[0, : end + 1].tolist() == (right if kind in ("ends", "both") else [*right, 1])


def config_of(positions):
    config = SimpleNamespace(max_position_embeddings=positions)
    config.get_text_config = lambda: config
    return config


# --- What a tokenizer and its chat template do ------------------------------------------------------------------------

ROLES = (
    "{% for m in messages %}{% if m['role'] != 'secret' %}{% if m['role'] == 'king' %}{{ raise_exception('no kings') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["Say it.", "Say it.</s>", "</s></s>", "<s>Say", " Say", "\n"])
def test_of_what_the_tokenizer_adds_the_end_alone_is_left_out(kind, text):
    tokenizer = build(kind)
    ids = tokenizer(text).input_ids
    assert encode(text, [], reader(tokenizer)) == (ids[:-1] if kind in ("ends", "both") else ids)


def test_an_end_token_that_begins_prompts_stays():
    tokenizer = build("begins")
    tokenizer.eos_token = "<s>"
    tokenizer.unk_token = "<s>"
    assert encode("Say", [], reader(tokenizer)) == tokenizer("Say").input_ids
    assert encode("é", [], reader(tokenizer)) == tokenizer("é").input_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["And?", " And?", "ANSWER"])
def test_without_a_template_what_follows_is_encoded_as_in_the_whole_text(kind, text):
    tokenizer = build(kind)
    whole = tokenizer(f"x\n\n{text}\n\n", add_special_tokens=False).input_ids
    first = tokenizer("x", add_special_tokens=False).input_ids
    assert first + encode([{"role": "user", "content": text}], [5], reader(tokenizer)) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_may_contain_our_marks_in_any_way(kind):
    """A system prompt of the template's own, a label that is put together, and messages."""
    template = (
        "ANSWER ### RESPONSE: {% for m in messages %}{{ 'ANS' ~ 'WER' }} {{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}ANSWERR### RESPONSE:{% endif %}"
    )
    tokenizer = build(kind, template)
    ids = encode([{"role": "user", "content": "ANSWERRR ### RESPONSE:"}], [5], reader(tokenizer))
    assert tokenizer.decode([9, *ids])[1:] == "</s>ANSWER ANSWERRR ### RESPONSE:</s>ANSWERR### RESPONSE:"


def test_a_template_that_changes_answers_is_refused():
    tokenizer = build("bytes", "{% for m in messages %}{{ m['content'] | lower }}</s>{% endfor %}")
    assert encode([{"role": "user", "content": "Say"}], [], reader(tokenizer))
    with pytest.raises(UserError, match="^the chat template does not write an answer as it is: it can't serve several"):
        encode([{"role": "user", "content": "Say"}], [5], reader(tokenizer))


@pytest.mark.parametrize("role", ["tool", "system", "assistant"])
def test_messages_of_other_roles_are_rendered(role):
    tokenizer = build("bytes", ROLES)
    chat = [{"role": role, "content": "It is 5."}, {"role": "user", "content": "And?"}]
    ids = encode(chat, [5], reader(tokenizer))
    assert tokenizer.decode(ids) == f"</s>[{role}]It is 5.</s>[user]And?</s>[assistant]"
    assert tokenizer.decode(encode(chat[:1], [1], reader(tokenizer))) == f"[{role}]It is 5.</s>[assistant]"


@pytest.mark.parametrize("before", [[], [5]], ids=["first", "later"])
def test_roles_that_the_template_leaves_out_or_refuses_are_one_line(before):
    user = {"role": "user", "content": "Say it."}
    tokenizer = build("bytes", ROLES)
    with pytest.raises(UserError, match="^the chat template leaves out messages of the role secret$"):
        encode([{"role": "secret", "content": "5"}, user], before, reader(tokenizer))
    with pytest.raises(UserError, match="^the chat template refuses messages of the roles king, user: no kings$"):
        encode([{"role": "king", "content": "5"}, user], before, reader(tokenizer))


USER, TOOL = {"role": "user", "content": "What time is it?"}, {"role": "tool", "content": "It is 5."}
SYSTEM, MORE = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "And now?"}
OTHER = {"role": "system", "content": "Be long."}
WROTE, EXAMPLE = {"role": "assistant", "content": "time()"}, {"role": "assistant", "content": "Such."}
NEW = {  # a prompt after [SYSTEM, USER], and what of it is new
    "a tool": ([SYSTEM, USER, WROTE, TOOL], [TOOL]),
    "a system message": ([SYSTEM, USER, WROTE, OTHER, MORE], [OTHER, MORE]),
    "another answer": ([SYSTEM, USER, WROTE, MORE, EXAMPLE, USER], [MORE, EXAMPLE, USER]),
    "no answer": ([SYSTEM, USER, TOOL], [TOOL]),
    "another chat": ([SYSTEM, MORE], [MORE]),
    "another chat with a tool": ([OTHER, MORE, TOOL], [OTHER, MORE, TOOL]),
    "the same again": ([SYSTEM, USER], [USER]),
    "a text": ("And now?", [MORE]),
}


@pytest.mark.parametrize("case", NEW)
def test_what_is_new_in_a_prompt(case):
    prompt, new = NEW[case]
    assert new_messages([SYSTEM, USER], prompt) == new
    with pytest.raises(ValueError, match="^its chat has no new message for the agent$"):
        new_messages([SYSTEM, USER], [SYSTEM, USER, WROTE])


def test_what_a_tool_says_is_in_the_transcript(tokenizer):
    """Not a role that the embedded model's template names: it is written as any other."""
    task = make_task(reward_length)
    task.formatters = lambda item: [USER]
    task.external_transition = lambda agent_completions: [[USER, WROTE, TOOL] for _ in agent_completions]
    args = ippo_llm.Args(num_turns=2, max_new_tokens=3, rollout_buffer_size=4, eval_interval=0)
    model, own = small_model()
    own = copy.deepcopy(own)
    own.chat_template = ROLES.replace("</s>", "<|end|>")
    initials = models.load(args, model, own)
    agents = [ippo_llm.Agent(i, initial, 1, args) for i, initial in enumerate(initials)]
    whole = load_task(task, args, default=None)
    rollouts = ippo_llm.play(agents, whole, [{}] * 2, args, distributed.generator(1))
    text = own.decode(rollouts[0].ids[0])
    assert text.startswith("[user]What time is it?<|end|>[assistant]") and "[tool]It is 5.<|end|>[assistant]" in text


DIFFERING = {
    "thinking": "{{ m['content'].split('</think>')[-1].strip() if m['role'] == 'assistant' else m['content'] }}",
    "trimmed": "{{ m['content'] }}{% if not loop.last and m['role'] == 'user' %} {% endif %}",
}


@pytest.mark.parametrize("case", ["no", *DIFFERING])
def test_a_template_that_writes_earlier_turns_otherwise_is_told_once(case, capsys):
    model, own = small_model()
    own = copy.deepcopy(own)
    body = DIFFERING.get(case, "{{ m['content'] }}")
    own.chat_template = "{% for m in messages %}[{{ m['role'] }}]" + body + "<|end|>{% endfor %}[assistant]"
    for num_turns in (1, 2):
        models.load(ippo_llm.Args(num_turns=num_turns, num_agents=2), model, own)
        told = capsys.readouterr().out.count("its chat template writes earlier turns, such as the answer")
        assert told == (case != "no" and num_turns > 1)


# --- The date ---------------------------------------------------------------------------------------------------------


def test_a_template_has_the_date_of_the_flag_on_any_day(tmp_path, monkeypatch):
    model, own = small_model()
    own = copy.deepcopy(own)
    own.chat_template = "{{ strftime_now('%d %b %Y') }} " + ROLES.replace("</s>", "<|end|>")
    for flags, date in (({}, "01 Jan 2026"), ({"template_date": "2024-07-31"}, "31 Jul 2024")):
        flags |= FLAGS["ippo"] | {"num_turns": 2}
        texts = []
        for more in ({"pause_at": 1, "output_dir": str(tmp_path / date)}, {"resume": str(tmp_path / date)}):
            agents, run = ippo_llm.main(ippo_llm.Args(**flags, **more), make_task(reward_length), model, own)
            texts.append(own.decode(encode([USER], [], agents[0])))
            kept = json.loads((run.folder / "config.json").read_text())["args"]["template_date"]
            assert kept == flags.get("template_date", "2026-01-01")
        assert texts == [f"{date} [user]What time is it?<|end|>[assistant]"] * 2
        assert date not in own.decode(encode([USER], [5], agents[0]))  # it was read in the first prompt


def test_a_date_that_is_none_is_one_line():
    with pytest.raises(UserError, match="^--template-date: .*, got 2026-13-01$"):
        ippo_llm.Args(template_date="2026-13-01")


# --- What else a template takes ---------------------------------------------------------------------------------------

THINKS = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_a_template_has_the_settings_of_the_flag_also_in_a_run_that_goes_on(tmp_path):
    model, own = small_model()
    own = copy.deepcopy(own)
    own.chat_template = ROLES.replace("</s>", "<|end|>") + THINKS
    flags = FLAGS["ippo"] | {"num_turns": 2, "chat_template_kwargs": {"enable_thinking": False}}
    for more in ({"pause_at": 1, "output_dir": str(tmp_path / "run")}, {"resume": str(tmp_path / "run")}):
        agents, _ = ippo_llm.main(ippo_llm.Args(**flags, **more), make_task(reward_length), model, own)
        for before in ([], [5]):
            text = own.decode(encode([USER], before, agents[0]), skip_special_tokens=True)
            assert text.endswith("[user]What time is it?[assistant]<think></think>")


def test_a_setting_that_no_template_reads_is_one_line():
    with pytest.raises(UserError, match="^--chat-template-kwargs thinks: the chat template of .* does not read it$"):
        models.load(ippo_llm.Args(chat_template_kwargs={"thinks": True}))


@pytest.mark.parametrize("prompt, is_told", [("Guess.", True), ([USER], False)])
def test_texts_that_go_without_the_template_are_told_once(prompt, is_told, tmp_path, capsys):
    task = make_task(reward_length)
    task.formatters = lambda item: prompt
    flags = FLAGS["ippo"] | {"num_turns": 1, "output_dir": str(tmp_path / "run")}
    ippo_llm.main(ippo_llm.Args(**flags), task, *small_model())
    assert capsys.readouterr().out.count("are read without the model's chat template") == is_told


# --- Answers as text --------------------------------------------------------------------------------------------------


@pytest.fixture
def thinking():
    """A tokenizer with special tokens <think> and </think>."""
    own = copy.deepcopy(small_model()[1])
    own.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return own


def test_answers_have_special_tokens_with_the_flag(thinking):
    ids = thinking("<think>7</think>8<|end|>", add_special_tokens=False).input_ids
    agent = SimpleNamespace(tokenizer=thinking, end_ids=torch.tensor([thinking.eos_token_id]))
    texts = [decode([ids, ids[:-1], []], agent, ippo_llm.Args(skip_special_tokens=skip)) for skip in (True, False)]
    assert texts == [["78", "78", ""], ["<think>7</think>8", "<think>7</think>8", ""]]


@pytest.mark.parametrize("keeps", [True, False])
def test_an_end_token_that_is_not_special_is_in_no_answer(tokenizer, keeps):
    plain = copy.deepcopy(tokenizer)
    end = len(plain)
    plain.add_tokens("<stop>")
    agent = SimpleNamespace(tokenizer=plain, end_ids=torch.tensor([end]))
    (number,) = plain("7", add_special_tokens=False).input_ids
    args = SimpleNamespace(skip_special_tokens=not keeps)
    assert decode([[number, end], [number, number], [end, number], [end], []], agent, args) == [
        "7",
        "77",
        "<stop>7",
        "",
        "",
    ]


def test_an_end_token_after_a_space_of_the_template_stands_once(tokenizer):
    spaced = copy.deepcopy(tokenizer)
    end = spaced.eos_token
    spaced.chat_template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content }}"
        f"{{% if message.role == 'assistant' %}} {end} {{% else %}};{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ).replace("%}} ", "%} ")
    before = spaced("user: Hm?;assistant: 8", add_special_tokens=False).input_ids
    with_end = encode("higher", [*before, spaced.eos_token_id], SimpleNamespace(tokenizer=spaced))
    without = encode("higher", before, SimpleNamespace(tokenizer=spaced))
    assert spaced.decode(with_end).count(end) == 0 and spaced.decode(without).count(end) == 1
    assert "user: higher;" in spaced.decode(with_end)


def test_padding_that_is_an_ordinary_word_is_not_in_answers(tmp_path, capsys):
    model, own = small_model()
    own = copy.deepcopy(own)
    own.pad_token = "."
    seen = []

    def reward(*completions, items):
        seen.extend(text for texts in completions for text in texts)
        return reward_length(*completions, items=items)

    flags = FLAGS["ippo"] | {"max_new_tokens": 24, "output_dir": str(tmp_path / "run")}
    agents, run = ippo_llm.main(ippo_llm.Args(**flags), make_task(reward), model, own)
    lengths = {len(own(text, add_special_tokens=False).input_ids) for text in seen}
    assert len(lengths) > 1 and not any(text.endswith("..") for text in seen)


def test_a_folder_that_declares_an_ordinary_word_special_says_so(request, tmp_path, capsys):
    folder = request.getfixturevalue("small_model")
    own = AutoTokenizer.from_pretrained(folder)
    own.pad_token = "."
    shutil.copytree(folder, tmp_path / "model")
    own.save_pretrained(tmp_path / "model")
    args = ippo_llm.Args(model=str(tmp_path / "model"))
    (read, _) = [initial.tokenizer for initial in models.load(args)]
    hides = read.decode(read("5. 6.", add_special_tokens=False).input_ids, skip_special_tokens=True) == "5 6"
    assert capsys.readouterr().out.count("declares '.' special, so that answers as text lack it") == hides == 1


def test_answers_are_as_they_were_written():
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in "abx=.'")]
    tokenizer = Tokenizer(Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=True)
    agent = SimpleNamespace(tokenizer=fast, end_ids=torch.tensor([1]))
    ids = fast("x = ' ' a . b").input_ids
    assert decode([ids], agent, SimpleNamespace(skip_special_tokens=True)) == ["x = ' ' a . b"]
