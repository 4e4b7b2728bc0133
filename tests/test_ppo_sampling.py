"""Sampling in ppo_llm against transformers' generate and single forward passes, without padding or a cache."""

import pytest
import torch
from helpers import make_ppo_agents, make_ppo_args, seeded

import ppo_llm
from utils.models import adapters

LENGTH = 16


@pytest.fixture
def sampler(loaded_model, tokenizer, prompts):
    """A function of flags that lets one of two agents continue the five prompts."""
    return Sampler(loaded_model, tokenizer, prompts)


class Sampler:
    """Two agents, and the ids of five prompts of different lengths."""

    def __init__(self, base, tokenizer, prompts):
        self.agents = make_ppo_agents(base, tokenizer, self.make_args(), scale=0.05)
        self.model = self.agents[0].model
        self.prompts = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]

    def make_args(self, **flags):
        team = {"task": "number", "num_agents": 2, "max_output_tokens": LENGTH, "max_model_len": None}
        return ppo_llm.resolve_args(make_ppo_args(**(team | flags)))

    def sample(self, agent=0, rows=range(5), generator=None, **flags):
        """(ids, log-probabilities, texts); with no generator the likeliest tokens."""
        transcripts = [ppo_llm.Transcript([""], self.prompts[row]) for row in rows]
        args = self.make_args(**flags)
        ppo_llm.respond([self.agents[agent]], [transcripts], args, generator, greedy=generator is None)
        return (
            [transcript.response_ids for transcript in transcripts],
            [transcript.logprobs for transcript in transcripts],
            [transcript.responses[0] for transcript in transcripts],
        )

    def ids(self, *values, **flags):
        return self.sample(*values, **flags)[0]


@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize(
    "ours, theirs",
    [
        ({}, {}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"min_output_tokens": 8}, {"min_new_tokens": 8}),
    ],
    ids=["plain", "repetition penalty", "shortest response"],
)
def test_the_likeliest_tokens_are_those_of_generate(sampler, agent, ours, theirs):
    responses = sampler.ids(agent, **ours)
    sampler.model.set_adapter(sampler.agents[agent].actor)
    for prompt, response in zip(sampler.prompts, responses, strict=True):
        input_ids = torch.tensor([prompt])
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        expected = sampler.model.generate(**inputs, **theirs, do_sample=False, max_new_tokens=LENGTH)
        assert response == expected[0, len(prompt) :].tolist()


def test_chunks_change_nothing(sampler):
    assert sampler.ids(hf_generate_chunk_size=2) == sampler.ids()


@pytest.mark.parametrize("flags", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}, {"temperature": 1e-4}], ids=str)
def test_a_filter_that_leaves_one_token_samples_the_likeliest(sampler, flags):
    assert sampler.ids(generator=seeded(), **flags) == sampler.ids()


def test_the_same_seed_samples_the_same(sampler):
    first = sampler.sample(generator=seeded())
    assert first == sampler.sample(generator=seeded())
    assert first != sampler.sample(generator=seeded(1))


def test_a_response_ends_with_its_end_or_is_as_long_as_may_be(sampler, tokenizer):
    end = tokenizer.eos_token_id
    responses = sampler.ids(generator=seeded())
    assert len({len(response) for response in responses}) > 1
    for response in responses:
        assert end not in response[:-1]
        assert response[-1] == end or len(response) == LENGTH


def test_logprobs_are_those_of_one_forward_pass(sampler):
    responses, logprobs, _ = sampler.sample(1, generator=seeded(), temperature=0.7)
    sampler.model.set_adapter(sampler.agents[1].actor)
    for prompt, response, row in zip(sampler.prompts, responses, logprobs, strict=True):
        with torch.no_grad():
            logits = sampler.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1)[range(len(response)), response]
        torch.testing.assert_close(torch.tensor(row), expected, atol=1e-5, rtol=0)


def test_texts_are_without_special_tokens(sampler, tokenizer):
    responses, _, texts = sampler.sample(generator=seeded())
    assert texts == [tokenizer.decode(response, skip_special_tokens=True) for response in responses]


def test_rows_that_ended_are_not_computed(sampler, monkeypatch):
    rows = []
    forward = adapters.forward

    def count(model, name, **inputs):
        rows.append(len(inputs["input_ids"]))
        return forward(model, name, **inputs)

    monkeypatch.setattr(adapters, "forward", count)
    lengths = [len(response) for response in sampler.ids(generator=seeded())]
    assert rows == [sum(length > t for length in lengths) for t in range(max(lengths))]


# --- Ways to sample ---------------------------------------------------------------------------------------------------


def test_a_rollout_of_one_turn_has_what_was_sampled(sampler, prompts, tokenizer):
    args = sampler.make_args()
    rollout = ppo_llm.sample(sampler.agents[1], prompts, args, seeded())
    responses, logprobs, texts = sampler.sample(1, generator=seeded())
    assert rollout.prompts == [[prompt] for prompt in prompts]
    assert rollout.responses == [[text] for text in texts]
    assert not rollout.rewards.any() and not rollout.truncated.any()
    for row, (prompt, response) in enumerate(zip(sampler.prompts, responses)):
        assert rollout.ids[row][rollout.attention_mask[row] == 1].tolist() == prompt + response
        assert rollout.response_ids[row][rollout.response_mask[row] == 1].tolist() == response
        torch.testing.assert_close(rollout.logprobs[row][: len(response)], torch.tensor(logprobs[row]))


def test_an_agent_acts_on_strings_and_chats(sampler, prompts):
    args = sampler.make_args()
    texts = sampler.sample(generator=seeded())[2]
    assert ppo_llm.act(sampler.agents[0], prompts, args, seeded()) == texts
    chats = [[{"role": "user", "content": "Guess it."}]]
    likeliest = sampler.sample(rows=[0])[2]
    assert ppo_llm.act(sampler.agents[0], chats, args, greedy=True) == likeliest


def test_each_of_several_agents_answers_its_own_prompts(sampler):
    args = sampler.make_args()
    transcripts = [[ppo_llm.Transcript([""], sampler.prompts[row])] for row in (0, 3)]
    ppo_llm.respond(sampler.agents, transcripts, args, None, greedy=True)
    assert transcripts[0][0].response_ids == sampler.ids(0, rows=[0])[0]
    assert transcripts[1][0].response_ids == sampler.ids(1, rows=[3])[0]
