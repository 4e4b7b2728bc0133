"""Prompts that are too long: their items are left out before training, or they lose tokens on the left."""

from types import SimpleNamespace

import pytest
from helpers import make_agent, make_args, make_ppo_args, seeded

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils.cli import UserError
from utils.same import timeless
from utils.tasks import fit_prompts, lengths, prompt_limit
from utils.tasks.lengths import PromptLimit, truncate

SCRIPTS = pytest.mark.parametrize(
    "script", [ippo_llm, pytest.param(iac_llm, marks=pytest.mark.slow), maac_llm, magrpo_llm, ppo_llm]
)
TEAM_SCRIPTS = pytest.mark.parametrize(
    "script", [ippo_llm, pytest.param(iac_llm, marks=pytest.mark.slow), maac_llm, magrpo_llm]
)
BOTH = pytest.mark.parametrize("script", [ippo_llm, ppo_llm])
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
    elif script is magrpo_llm:  # as many items as the others have in an update
        paths = 2 ** flags.get("num_turns", 1)
        size = flags.pop("rollout_buffer_size", 8) * paths
        args = make_args(folder, script, num_generations=2, rollout_buffer_size=size, **flags)
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


@BOTH
def test_the_flag_says_how_long_is_too_long(tmp_path, capsys, script, tokenizer):
    lengths = [len(tokenizer(item["text"], add_special_tokens=False).input_ids) for item in SHORT[:3]]
    assert lengths[0] < lengths[1] < lengths[2]
    run = train(script, tmp_path, SHORT, max_prompt_length=lengths[1], rollout_buffer_size=4)
    assert f"5 of 16 items are left out: a prompt has more than {lengths[1]} tokens\n" in capsys.readouterr().out
    assert len(run.rows) == 11 // 4
    assert {sample["item"]["text"] for sample in run.samples} <= {item["text"] for item in SHORT[:2]}


@BOTH
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


@TEAM_SCRIPTS
@pytest.mark.parametrize("flags", [{}, {"max_prompt_length": 20}], ids=["room", "flag"])
def test_an_episode_ends_before_a_later_prompt_that_is_too_long(tmp_path, script, flags):
    texts = {True: LONG["text"], False: "Guess it."}
    task = task_of(external_transition=lambda item: [texts[item["text"] == SHORT[1]["text"]], "Guess it."])
    run = train(script, tmp_path, SHORT[:8], task=task, num_turns=2, **flags)
    assert [row["turns"] for row in run.rows] == [pytest.approx(13 / 8)]  # three of eight items are such
    assert [row["long_prompts"] for row in run.rows] == [pytest.approx(3 / 8)]


@TEAM_SCRIPTS
def test_a_later_prompt_that_is_too_long_is_truncated_and_counted(tmp_path, script):
    task = task_of(external_transition=lambda item: [LONG["text"], "Guess it."])
    flags = {"max_prompt_length": 20, "long_prompts": "truncate"}
    run = train(script, tmp_path, SHORT[:8], task=task, num_turns=2, **flags)
    assert [(row["turns"], row["long_prompts"]) for row in run.rows] == [(2, 1)]


@pytest.mark.parametrize("long_prompts", ["drop", "truncate"])
def test_a_later_prompt_that_is_too_long_cuts_a_transcript_short(tmp_path, long_prompts):
    task = task_of(external_transition=lambda item: [LONG["text"]] * 2)
    flags = {"max_turns": 2, "long_prompts": long_prompts, "max_prompt_length": 100}
    run = train(ppo_llm, tmp_path, SHORT[:8], task=task, **flags)
    assert (run.rows[0]["turns"], run.rows[0]["truncated"]) == (1, 8)


def limit_of(tokens):
    return PromptLimit(tokens, "", truncate=False)


def test_each_agent_has_its_own_limit(tokenizer, monkeypatch):
    lines = []
    monkeypatch.setattr(lengths, "say", lines.append)
    args = make_args()
    items = [{"text": "Guess it. " * k} for k in range(1, 9)]
    sizes = [len(tokenizer(item["text"], add_special_tokens=False).input_ids) for item in items]
    readers = [(tokenizer, limit_of(tokens)) for tokens in (sizes[5], None, sizes[3])]
    assert fit_prompts(task_of(), args, readers, 2, items, items[2:6]) == (items[:4], items[2:4])
    assert lines == [f"6 of 12 items are left out: a prompt has more than {sizes[3]} or {sizes[5]} tokens"]


def test_many_items_are_counted_in_parts(tokenizer, monkeypatch):
    monkeypatch.setattr(lengths, "AT_ONCE", 3)
    items = [*SHORT, LONG, *SHORT[:3], LONG]
    assert fit_prompts(task_of(), make_args(), [(tokenizer, limit_of(100))], 2, items, []) == (SHORT + SHORT[:3], [])


def test_nothing_is_tokenized_where_any_prompt_fits():
    items = [LONG]
    readers = [(None, limit_of(None))] * 2
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


def test_a_limit_beyond_the_room_is_one_line(model):
    with pytest.raises(
        UserError, match="^--max-output-tokens 72 after a prompt of 441 exceeds the model.s 512 positions$"
    ):
        ppo_llm.resolve_args(ppo_llm.Args(task="tldr", max_prompt_length=441))
    args = ppo_llm.resolve_args(ppo_llm.Args(task="tldr"))
    assert prompt_limit(model.config, args, "max_output_tokens").tokens == 440


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
        length = int(rollout.response_mask[row].sum())
        assert rollout.ids[row, 0][rollout.attention_mask[row, 0].bool()].tolist()[:-length] == ids
    assert rollout.prompts == [[prompt] for prompt in prompts]


@SCRIPTS
def test_an_empty_prompt_is_one_line_before_anything_is_written(tmp_path, script):
    with pytest.raises(UserError, match="^a prompt has no tokens: ''$"):
        train(script, tmp_path / "new", [*SHORT, {"text": ""}])
    assert not (tmp_path / "new" / "run").exists()
