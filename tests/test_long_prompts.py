"""Prompts that are too long: their items are left out before training, or they lose tokens on the left."""

from types import SimpleNamespace

import pytest
from helpers import make_agent, make_args, make_ppo_args, seeded

import iac_llm
import ippo_llm
import ppo_llm
from utils.cli import UserError
from utils.same import timeless
from utils.tasks import fit_prompts, lengths, truncate

SCRIPTS = pytest.mark.parametrize("script", [ippo_llm, pytest.param(iac_llm, marks=pytest.mark.slow), ppo_llm])
SHORT = [{"text": "Guess it. " * (k % 3 + 1)} for k in range(16)]
LONG = {"text": "Guess it. " * 200}


def task_of(**more):
    task = {"formatters": lambda item: item["text"], "reward_func": lambda *texts: [float(len(x)) for x in texts[0]]}
    return SimpleNamespace(**(task | more))


def train(script, folder, rows, held_out=(), task=None, **flags):
    flags = {"task": None, "num_agents": 2, "train_size": None} | flags
    if script is ppo_llm:
        flags = {"max_turns": 1, "max_model_len": None} | flags
        args = make_ppo_args(folder, **flags)
    else:
        args = make_args(folder, script, **flags)
    return script.main(args, task or task_of(), train_dataset=rows, eval_dataset=[*held_out])[1]


def room(script):
    """The most tokens of a prompt in a short run with the embedded model."""
    return 512 - (5 if script is ppo_llm else 24)


# --- Left out ---------------------------------------------------------------------------------------------------------


@SCRIPTS
def test_items_with_long_prompts_are_left_out_counted_and_change_nothing_else(tmp_path, capsys, script):
    run = train(script, tmp_path / "some", [*SHORT, LONG], [*SHORT[:2], LONG, LONG])
    line = f"3 of 21 items are left out: a prompt has more than {room(script)} tokens"
    assert capsys.readouterr().out.splitlines().count(line) == 1
    other = train(script, tmp_path / "none", SHORT, SHORT[:2])
    assert "left out" not in capsys.readouterr().out
    assert timeless(run.folder) == timeless(other.folder) and len(run.rows) == 2


@SCRIPTS
def test_the_flag_says_how_long_is_too_long(tmp_path, capsys, script, tokenizer):
    lengths = [len(tokenizer(item["text"], add_special_tokens=False).input_ids) for item in SHORT[:3]]
    assert lengths[0] < lengths[1] < lengths[2]
    run = train(script, tmp_path, SHORT, max_prompt_length=lengths[1], rollout_buffer_size=4)
    assert f"5 of 16 items are left out: a prompt has more than {lengths[1]} tokens\n" in capsys.readouterr().out
    assert len(run.rows) == 11 // 4
    assert {sample["item"]["text"] for sample in run.samples} <= {item["text"] for item in SHORT[:2]}


@SCRIPTS
def test_an_item_goes_where_any_agents_prompt_is_long(tmp_path, capsys, script):
    task = task_of(formatters=[lambda item: "Guess it.", lambda item: item["text"]])
    train(script, tmp_path, [*SHORT, LONG], task=task)
    assert "1 of 17 items are left out: " in capsys.readouterr().out


@SCRIPTS
@pytest.mark.parametrize("num_short", [0, 7])
def test_too_few_that_are_left_are_one_line_before_anything_is_loaded_or_made(tmp_path, monkeypatch, script, num_short):
    monkeypatch.setattr(script, "build_agents", None)
    rows = SHORT[:num_short] + [LONG] * 9
    what = f"9 of {len(rows)} items are left out: a prompt has more than {room(script)} tokens"
    with pytest.raises(UserError, match=f"^{what}; {num_short} are left to train on, and an update takes 8$"):
        train(script, tmp_path / "run", rows)
    assert not (tmp_path / "run").exists()


@SCRIPTS
def test_a_later_prompt_that_is_too_long_is_one_line(tmp_path, script):
    task = task_of(external_transition=lambda item: [LONG["text"]] * 2)
    turns = "max_turns" if script is ppo_llm else "num_turns"
    with pytest.raises(UserError, match="^--max-.* after a prompt of [0-9]+ exceeds .*512"):
        train(script, tmp_path / "room", SHORT, task=task, **{turns: 2})
    task = task_of(external_transition=lambda item: ["Guess it. " * 10] * 2)
    with pytest.raises(UserError, match="^a prompt of [0-9]+ tokens exceeds --max-prompt-length 20$"):
        train(script, tmp_path / "flag", SHORT, task=task, max_prompt_length=20, **{turns: 2})


def test_each_agent_has_its_own_limit(tokenizer, monkeypatch):
    lines = []
    monkeypatch.setattr(lengths, "say", lines.append)
    args = make_args()
    items = [{"text": "Guess it. " * k} for k in range(1, 9)]
    sizes = [len(tokenizer(item["text"], add_special_tokens=False).input_ids) for item in items]
    readers = [(tokenizer, sizes[5]), (tokenizer, None), (tokenizer, sizes[3])]
    assert fit_prompts(task_of(), args, readers, 2, items, items[2:6]) == (items[:4], items[2:4])
    assert lines == [f"6 of 12 items are left out: a prompt has more than {sizes[3]} or {sizes[5]} tokens"]


def test_many_items_are_counted_in_parts(tokenizer, monkeypatch):
    monkeypatch.setattr(lengths, "AT_ONCE", 3)
    items = [*SHORT, LONG, *SHORT[:3], LONG]
    assert fit_prompts(task_of(), make_args(), [(tokenizer, 100)], 2, items, []) == (SHORT + SHORT[:3], [])


def test_nothing_is_tokenized_where_any_prompt_fits():
    items = [LONG]
    readers = [(None, None)] * 2
    assert fit_prompts(None, make_args(), readers, 1, items, [])[0] is items
    with pytest.raises(
        UserError, match="^--long-prompts truncate takes --max-prompt-length: the model has room for any"
    ):
        fit_prompts(None, make_args(long_prompts="truncate"), readers, 1, items, [])


@pytest.mark.parametrize("flag", [{"max_prompt_length": 9}, {"long_prompts": "truncate"}])
def test_the_flags_have_no_effect_in_an_environment(flag):
    name = "--" + next(iter(flag)).replace("_", "-")
    with pytest.raises(UserError, match=f"^{name} has no effect without --task$"):
        ppo_llm.resolve_args(ppo_llm.Args(**flag))


def test_a_limit_beyond_the_room_is_one_line():
    room = "--max-model-len 512 less --max-output-tokens 72"
    with pytest.raises(UserError, match=f"^--max-prompt-length takes at most {room}, got 441$"):
        ppo_llm.resolve_args(ppo_llm.Args(task="tldr", max_prompt_length=441))
    assert ppo_llm.resolve_args(ppo_llm.Args(task="tldr")).max_prompt_length == 440


# --- Truncated --------------------------------------------------------------------------------------------------------


def test_tokens_go_on_the_left_and_a_first_special_token_stays():
    tokenizer = SimpleNamespace(bos_token_id=1)
    assert truncate([1, 5, 6, 7], 4, tokenizer) == [1, 5, 6, 7]
    assert truncate([1, 5, 6, 7], 3, tokenizer) == [1, 6, 7]
    assert truncate([1, 5, 6, 7], 1, tokenizer) == [1]
    assert truncate([4, 5, 6, 7], 3, tokenizer) == [5, 6, 7]
    assert truncate([4, 5, 6, 7], 3, SimpleNamespace(bos_token_id=None)) == [5, 6, 7]


@SCRIPTS
def test_truncated_prompts_stay_in_the_run(tmp_path, capsys, script):
    rows = SHORT[:8] + [LONG] * 8
    run = train(script, tmp_path, rows, long_prompts="truncate", max_prompt_length=20)
    assert "left out" not in capsys.readouterr().out
    assert len(run.rows) == 2


def test_a_rollout_has_the_end_of_a_truncated_prompt(model, tokenizer):
    args = make_args(long_prompts="truncate", max_prompt_length=7, max_new_tokens=4)
    prompts = ["Guess it.", "I think of a number from 1 to 50. Guess it."]
    rollout = ippo_llm.sample(make_agent(args, model, tokenizer), prompts, args, seeded())
    for row, prompt in enumerate(prompts):
        ids = tokenizer(prompt, add_special_tokens=False).input_ids[-7:]
        assert rollout.prompt_ids[row, 0][rollout.prompt_mask[row, 0].bool()].tolist() == ids
    assert rollout.prompts == [[prompt] for prompt in prompts]


def test_a_later_prompt_is_truncated_too(tmp_path):
    task = task_of(external_transition=lambda item: [LONG["text"]] * 2)
    for script, turns, length in (
        (ippo_llm, "num_turns", "max_new_tokens"),
        (ppo_llm, "max_turns", "max_output_tokens"),
    ):
        flags = {"long_prompts": "truncate", turns: 2, length: 8}
        run = train(script, tmp_path / turns, SHORT[:8], task=task, **flags)
        assert run.rows[0]["turns"] == 2


def test_a_transcript_has_the_end_of_a_truncated_prompt(tokenizer):
    args = ppo_llm.resolve_args(make_ppo_args(task="tldr", long_prompts="truncate", max_prompt_length=7))
    ids = tokenizer(LONG["text"], add_special_tokens=False).input_ids
    assert ppo_llm.encode_prompt(LONG["text"], tokenizer, args) == ids[-7:]
