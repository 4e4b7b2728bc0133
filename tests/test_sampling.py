"""Sampling: how tokens are chosen, that rows which end early leave the others as they are, what a rollout holds."""

import pytest
import torch
from helpers import make_agent, make_args, seeded

import ippo_llm
from ippo_llm import choose_tokens, sample
from utils.cli import UserError


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([[1.0, 0.0, -1.0]]).expand(20_000, 3)
    counts = torch.bincount(choose_tokens(logits, make_args(), seeded(), greedy=False), minlength=3)
    torch.testing.assert_close(counts / 20_000, logits[0].softmax(-1), atol=0.015, rtol=0)


@pytest.mark.parametrize(
    "flags, kept",
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.8}, {0, 1}),
        ({"top_p": 0.9}, {0, 1, 2}),
        ({}, {0, 1, 2, 3, 4}),
    ],
)
def test_only_the_likeliest_tokens_are_left(flags, kept):
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]]).expand(2000, 5)  # 0.64, 0.23, 0.09, 0.03, 0.01
    assert set(choose_tokens(logits, make_args(**flags), seeded(), greedy=False).tolist()) == kept
    assert set(choose_tokens(logits, make_args(**flags), seeded(), greedy=True).tolist()) == {0}


@pytest.mark.parametrize("items_at_once, do_sample, greedy", [(None, False, False), (2, True, True)])
def test_greedy_sampling_equals_generate(model, tokenizer, prompts, items_at_once, do_sample, greedy):
    args = make_args(do_sample=do_sample, max_new_tokens=40, per_device_train_batch_size=items_at_once)
    rollout = sample(make_agent(args, model, tokenizer), prompts, args, seeded(), greedy)
    encoded = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    expected = model.generate(**encoded, do_sample=False, max_new_tokens=40)[:, encoded.input_ids.shape[1] :]
    torch.testing.assert_close(rollout.response_ids[:, 0], expected)
    lengths = (expected != tokenizer.pad_token_id).sum(1)
    assert torch.equal(rollout.response_mask[:, 0].sum(1).long(), lengths)


def test_sampled_logprobs_and_values_equal_those_of_one_pass(model, tokenizer, prompts):
    args = make_args(temperature=0.7, max_new_tokens=40)
    agent = make_agent(args, model, tokenizer)
    rollout = sample(agent, prompts, args, seeded())
    with torch.no_grad():
        logprobs, _, values = ippo_llm.policy_and_values(agent, rollout, args)
    assert (
        len(set(rollout.response_mask.sum(-1).flatten().tolist())) > 1
    )  # rows end at different times, and are dropped then
    torch.testing.assert_close(rollout.logprobs, logprobs * rollout.response_mask, atol=1e-5, rtol=0)
    torch.testing.assert_close(rollout.values, values * rollout.response_mask, atol=1e-5, rtol=0)


def test_a_response_ends_with_its_first_end_token(model, tokenizer, prompts):
    args = make_args(max_new_tokens=40)
    rollout = sample(make_agent(args, model, tokenizer), prompts, args, seeded())
    for row in range(len(prompts)):
        ids = rollout.response_ids[row, 0]
        length = int(rollout.response_mask[row].sum())
        assert torch.equal(rollout.response_mask[row, 0], (torch.arange(len(ids)) < length).float())
        assert tokenizer.eos_token_id not in ids[: length - 1].tolist()
        assert ids[length - 1] == tokenizer.eos_token_id or length == args.max_new_tokens
        assert ids[length:].eq(tokenizer.pad_token_id).all()
        assert rollout.responses[row] == [tokenizer.decode(ids[:length], skip_special_tokens=True)]


def test_a_rollout_has_the_prompts_padded_on_the_left(model, tokenizer, prompts):
    args = make_args(max_new_tokens=4)
    rollout = sample(make_agent(args, model, tokenizer), prompts, args, seeded())
    assert rollout.prompts == [[prompt] for prompt in prompts]
    prompt_mask = rollout.attention_mask[:, 0, :-4]
    for row, prompt in enumerate(prompts):
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        assert rollout.ids[row, 0, :-4][-len(ids) :].tolist() == ids
        assert prompt_mask[row].sum() == prompt_mask[row, -len(ids) :].sum() == len(ids)
    assert torch.equal(rollout.attention_mask[:, :, -4:], rollout.response_mask.long())


def test_rows_of_a_rollout_are_trimmed_to_their_longest(model, tokenizer, prompts):
    args = make_args(max_new_tokens=40)
    rollout = sample(make_agent(args, model, tokenizer), prompts, args, seeded())
    rows = rollout.response_mask[:, 0].sum(-1).argsort()[:2]  # the two shortest responses
    part = rollout.select(rows)
    for name in ("response_ids", "response_mask", "logprobs", "sampler_logprobs", "values"):
        x = getattr(part, name)
        assert x.shape[-1] == rollout.response_mask[rows].sum(-1).max() < rollout.response_mask.shape[-1]
        assert torch.equal(x, getattr(rollout, name)[rows, :, : x.shape[-1]])
    L = rollout.logprobs.shape[-1]
    width = int(rollout.attention_mask[rows, :, :-L].sum(-1).max())
    for name in ("ids", "attention_mask"):
        whole = getattr(rollout, name)[rows, :, -L - width :]
        assert torch.equal(getattr(part, name), whole[..., : width + part.logprobs.shape[-1]])
    assert part.responses == [rollout.responses[row] for row in rows.tolist()]


def test_a_prompt_that_leaves_no_room_is_one_line(model, tokenizer):
    args = make_args()
    agent = make_agent(args, model, tokenizer)
    room = "--max-new-tokens 24 of the model's 512 positions"
    with pytest.raises(UserError, match=f"^a prompt has 5.. tokens, and at most 488 fit: {room}$"):
        sample(agent, ["Guess it.", "Guess " * 500], args, seeded())
