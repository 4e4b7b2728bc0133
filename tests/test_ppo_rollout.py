"""The layout of a rollout of ppo_llm: episodes, transcripts, tokens and turns, and what is padding or not played."""

import pytest
import torch
from helpers import GAMES, TASK_EPISODES, make_episodes, make_ppo_agents, make_ppo_args, seeded

import ppo_llm

KIND = pytest.mark.parametrize("kind", ["game", "task"])


@pytest.fixture
def make(loaded_model, tokenizer):
    """A function of a kind of episodes: (episodes, rewards, rollout), where processed rewards are the rewards + 1."""

    def build(kind):
        args = ppo_llm.resolve_args(make_ppo_args(task="number" if kind == "task" else None))
        (agent,) = make_ppo_agents(loaded_model, tokenizer, args)
        episodes, rewards = make_episodes(kind)
        generator = seeded()
        for episode in episodes:
            for transcript in episode:
                transcript.logprobs = torch.randn(len(transcript.logprobs), generator=generator).tolist()
        processed_rewards = [[reward + 1 for reward in turns] for turns in rewards]
        items = [{"item": k} for k in range(len(episodes))]
        return episodes, rewards, ppo_llm.collate(episodes, rewards, processed_rewards, items, agent, args)

    return build


def transcripts_of(episodes):
    """Each transcript with its place in a rollout: (b, r, transcript)."""
    for b, episode in enumerate(episodes):
        for r, transcript in enumerate(episode):
            yield b, r, transcript


def test_a_game_is_one_transcript(make):
    _, _, rollout = make("game")
    assert rollout.response_ids.shape == (8, 1, 19)
    assert rollout.prompt_ids.shape == (8, 1, 11)
    assert rollout.rewards.shape == (8, 3)


def test_a_turn_of_a_task_is_a_transcript_of_its_own(make):
    _, _, rollout = make("task")
    assert rollout.response_ids.shape == (4, 3, 7)
    assert rollout.prompt_ids.shape == (4, 3, 12)
    assert rollout.rewards.shape == (4, 3)


@KIND
def test_prompts_are_padded_on_the_left(make, kind):
    episodes, _, rollout = make(kind)
    for b, r, transcript in transcripts_of(episodes):
        start = rollout.prompt_ids.shape[-1] - len(transcript.prompt_ids)
        assert rollout.prompt_ids[b, r, start:].tolist() == transcript.prompt_ids
        assert rollout.prompt_mask[b, r].tolist() == [0] * start + [1] * len(transcript.prompt_ids)


@KIND
def test_responses_are_padded_on_the_right(make, kind):
    episodes, _, rollout = make(kind)
    for b, r, transcript in transcripts_of(episodes):
        end = len(transcript.response_ids)
        padding = rollout.response_ids.shape[-1] - end
        assert rollout.response_ids[b, r, :end].tolist() == transcript.response_ids
        assert rollout.response_mask[b, r].tolist() == [1] * end + [0] * padding


@KIND
def test_the_mask_is_one_on_sampled_tokens(make, kind):
    episodes, _, rollout = make(kind)
    expected = torch.zeros_like(rollout.mask)
    for b, r, transcript in transcripts_of(episodes):
        for column, turn in enumerate(transcript.turn_of_token):
            expected[b, r, column] = float(turn >= 0)
    assert torch.equal(rollout.mask, expected)


def test_observations_are_holes_in_the_mask(make):
    _, _, rollout = make("game")
    assert GAMES[1] == [9, 4, 3, 2, 4, 6]
    assert rollout.mask[1, 0].tolist() == [1] * 4 + [0] * 3 + [1] * 2 + [0] * 4 + [1] * 6


@KIND
def test_logprobs_are_the_samplers(make, kind):
    episodes, _, rollout = make(kind)
    for b, r, transcript in transcripts_of(episodes):
        end = len(transcript.logprobs)
        torch.testing.assert_close(rollout.logprobs[b, r, :end], torch.tensor(transcript.logprobs))
        assert not rollout.logprobs[b, r, end:].any()


def test_turns_that_were_not_played_have_no_tokens(make):
    _, _, rollout = make("task")
    lengths = [len(turns) for turns in TASK_EPISODES]
    assert rollout.has_tokens.sum(1).tolist() == lengths
    assert rollout.played.sum(1).tolist() == lengths
    assert not rollout.mask[1, 1:].any()


@KIND
def test_rewards_are_0_where_a_turn_was_not_played(make, kind):
    _, rewards, rollout = make(kind)
    for b, turns in enumerate(rewards):
        padding = [0.0] * (3 - len(turns))
        assert rollout.rewards[b].tolist() == pytest.approx(turns + padding)
        assert rollout.processed_rewards[b].tolist() == pytest.approx([reward + 1 for reward in turns] + padding)


@KIND
def test_played_turns_have_a_prompt_and_a_response(make, kind):
    _, rewards, rollout = make(kind)
    assert rollout.played.sum(1).tolist() == [len(turns) for turns in rewards]
    assert [len(texts) for texts in rollout.responses] == [len(turns) for turns in rewards]


@KIND
def test_selected_episodes_are_trimmed_to_their_longest(make, kind):
    _, _, rollout = make(kind)
    rows = torch.tensor([3, 0])
    part = rollout.select(rows)
    longest_prompt = {"game": 5, "task": 12}[kind]
    longest_response = {"game": 6, "task": 5}[kind]
    assert part.prompt_ids.shape[-1] == longest_prompt
    assert part.response_ids.shape[-1] == longest_response


@KIND
def test_selected_episodes_lose_no_token(make, kind):
    _, _, rollout = make(kind)
    rows = torch.tensor([3, 0])
    part = rollout.select(rows)
    L = part.mask.shape[-1]
    P = part.prompt_ids.shape[-1]
    assert part.items == [{"item": 3}, {"item": 0}]
    assert part.responses == [rollout.responses[3], rollout.responses[0]]
    assert part.mask.sum() == rollout.mask[rows].sum()
    for name in ("response_ids", "response_mask", "turn_of_token", "logprobs", "reference_logprobs"):
        assert torch.equal(getattr(part, name), getattr(rollout, name)[rows, :, :L]), name
    for name in ("prompt_ids", "prompt_mask"):
        assert torch.equal(getattr(part, name), getattr(rollout, name)[rows, :, -P:]), name
    for name in ("rewards", "processed_rewards", "truncated", "played"):
        assert torch.equal(getattr(part, name), getattr(rollout, name)[rows]), name


# --- Between tokens and turns -----------------------------------------------------------------------------------------


@KIND
def test_numbers_of_turns_stand_at_all_of_their_tokens(make, kind):
    _, _, rollout = make(kind)
    x = torch.randn(*rollout.rewards.shape, 1, generator=seeded())
    tokens = ppo_llm.to_tokens(x, rollout)
    for index in rollout.mask.nonzero().tolist():
        assert tokens[tuple(index)] == x[index[0], rollout.turn_of_token[tuple(index)], 0]
    assert not tokens[rollout.mask == 0].any()


@KIND
@pytest.mark.parametrize("reduction", ["sum", "first_value", "mean", "final_value"])
def test_a_turn_is_a_number_of_its_tokens(make, kind, reduction):
    _, _, rollout = make(kind)
    x = torch.randn(rollout.mask.shape, generator=seeded())
    turns = ppo_llm.to_turns(x, rollout, reduction)
    for b, t in rollout.played.nonzero().tolist():
        tokens = x[b][rollout.turn_of_token[b] == t].tolist()
        reductions = {
            "sum": sum(tokens),
            "first_value": tokens[0],
            "mean": sum(tokens) / len(tokens),
            "final_value": tokens[-1],
        }
        assert turns[b, t, 0].item() == pytest.approx(reductions[reduction], abs=1e-5)
    assert not turns[~rollout.played].any()


@KIND
def test_a_turn_has_one_first_token_and_one_last(make, kind):
    _, _, rollout = make(kind)
    for select in (ppo_llm.first_tokens, ppo_llm.last_tokens):
        assert torch.equal(ppo_llm.to_turns(select(rollout), rollout).squeeze(-1), rollout.played.float())
