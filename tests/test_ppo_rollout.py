"""The layout of a rollout of ppo_llm: transcripts, padding, selected episodes; a rollout of lists."""

import re

import pytest
import torch
from helpers import (
    make_episodes,
    make_ppo_agents,
    make_ppo_args,
    make_ppo_rollout,
    seeded,
)

import ppo_llm
from utils.cli import UserError

KIND = pytest.mark.parametrize("kind", ["game", "task"])


@pytest.fixture
def make_agent(loaded_model, tokenizer):
    """A function of a kind of episodes and flags: (agent, args)."""

    def build(kind, **flags):
        task = {"task": "number"} if kind == "task" else {}
        args = ppo_llm.resolve_args(make_ppo_args(**task, **flags))
        return make_ppo_agents(loaded_model, tokenizer, args)[0], args

    return build


@pytest.fixture
def make(make_agent):
    """A function of a kind of episodes: (episodes, rollout)."""

    def build(kind):
        agent, args = make_agent(kind)
        episodes = make_episodes(kind)
        generator = seeded()
        for transcript in episodes:
            transcript.logprobs = torch.randn(len(transcript.logprobs), generator=generator).tolist()
        return episodes, ppo_llm.collate(episodes, agent, args)

    return build


@pytest.mark.parametrize("kind, B, P, L", [("game", 8, 11, 19), ("task", 4, 6, 29)])
def test_an_episode_is_one_transcript(make, kind, B, P, L):
    _, rollout = make(kind)
    assert rollout.ids.shape == rollout.attention_mask.shape == (B, P + L)
    assert rollout.turn_of_token.shape == rollout.logprobs.shape == rollout.response_ids.shape == (B, L)
    assert rollout.rewards.shape == rollout.played.shape == (B, 3)
    assert rollout.truncated.shape == (B,)


@KIND
def test_prompts_are_padded_on_the_left(make, kind):
    episodes, rollout = make(kind)
    P = rollout.ids.shape[1] - rollout.turn_of_token.shape[1]
    for b, transcript in enumerate(episodes):
        start = P - len(transcript.prompt_ids)
        assert rollout.ids[b, start:P].tolist() == transcript.prompt_ids
        assert rollout.attention_mask[b, :P].tolist() == [0] * start + [1] * len(transcript.prompt_ids)


@KIND
def test_responses_are_padded_on_the_right(make, kind):
    episodes, rollout = make(kind)
    L = rollout.turn_of_token.shape[1]
    for b, transcript in enumerate(episodes):
        end = len(transcript.response_ids)
        assert rollout.response_ids[b, :end].tolist() == transcript.response_ids
        assert rollout.attention_mask[b, -L:].tolist() == [1] * end + [0] * (L - end)


@KIND
def test_selected_episodes_lose_no_token(make, kind):
    _, rollout = make(kind)
    rows = torch.tensor([1, 0])
    part = rollout.select(rows)
    assert part.responses == [rollout.responses[1], rollout.responses[0]]
    assert part.prompts == [rollout.prompts[1], rollout.prompts[0]]
    for row, b in enumerate(rows):
        here, there = part.attention_mask[row] == 1, rollout.attention_mask[b] == 1
        assert torch.equal(part.ids[row][here], rollout.ids[b][there])
        for name in ("turn_of_token", "logprobs"):
            L = getattr(part, name).shape[1]
            assert torch.equal(getattr(part, name)[row], getattr(rollout, name)[b, :L]), name
    for name in ("rewards", "raw_rewards", "truncated", "played"):
        assert torch.equal(getattr(part, name), getattr(rollout, name)[rows]), name


# --- A rollout of lists -----------------------------------------------------------------------------------------------


def lists_of(rollout):
    """A rollout as what make_rollout takes: ids, masks, turn ids and rewards, lists without padding."""
    ids, masks, turn_ids, rewards = [], [], [], []
    P = rollout.ids.shape[1] - rollout.turn_of_token.shape[1]
    for b in range(len(rollout.ids)):
        is_token = rollout.attention_mask[b] == 1
        turns = torch.cat([torch.full((P,), -1), rollout.turn_of_token[b]])[is_token].tolist()
        ids.append(rollout.ids[b][is_token].tolist())
        masks.append([int(turn >= 0) for turn in turns])
        turn_ids.append(turns)
        rewards.append(rollout.rewards[b][rollout.played[b]].tolist())
    return ids, masks, turn_ids, rewards


def test_a_rollout_of_lists_is_the_one_that_was_played_and_its_policy_the_actor_as_it_is(make_agent):
    agent, args = make_agent("game")
    rollout = make_ppo_rollout(make_episodes("game"), agent, args)
    own = ppo_llm.make_rollout(agent, *lists_of(rollout), args)
    for name in ("ids", "attention_mask", "turn_of_token", "rewards", "played"):
        assert torch.equal(getattr(own, name), getattr(rollout, name)), name
    for name in ("logprobs", "sampler_logprobs"):
        found = getattr(own, name) * own.response_mask
        torch.testing.assert_close(found, rollout.logprobs, atol=1e-5, rtol=0)


IDS, MASK, TURNS, REWARDS = [5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 0, 1], [-1, -1, 0, 0, -1, 1], [1.0, 2.0]
GOOD = (IDS, MASK, TURNS, REWARDS)
BAD = {  # the second of two transcripts, and the error
    "no sampled token": (
        (IDS, [0] * 6, TURNS, REWARDS),
        "takes a prompt, with 0 in its mask, and then sampled tokens, with 1",
    ),
    "no prompt": (([5], [1], [0], [1.0]), "takes a prompt, with 0 in its mask, and then sampled tokens, with 1"),
    "nothing": (([], [], [], []), "takes a prompt, with 0 in its mask, and then sampled tokens, with 1"),
    "short mask": ((IDS, MASK[:-1], TURNS, REWARDS), "has 6 ids, a mask of 5, 6 turn ids"),
    "short turns": ((IDS, MASK, TURNS[:-2], REWARDS), "has 6 ids, a mask of 6, 4 turn ids"),
    "a turn without a reward": ((IDS, MASK, TURNS, [1.0]), "got pieces of the turns 0, 1 and 1 rewards"),
    "a reward without a turn": ((IDS, MASK, TURNS, [1.0, 2.0, 3.0]), "got pieces of the turns 0, 1 and 3 rewards"),
    "no turn 0": ((IDS, MASK, [0, 0, 1, 1, 1, 2], REWARDS), "got pieces of the turns 1, 2 and 2 rewards"),
    "a turn of none": ((IDS, MASK, [0, 0, -1, -1, 0, 0], REWARDS), "got pieces of the turns -1, 0 and 2 rewards"),
    "back to a turn": ((IDS, MASK, [0, 0, 1, 1, 0, 0], REWARDS), "got pieces of the turns 1, 0 and 2 rewards"),
    "two pieces of a turn": ((IDS, MASK, [0] * 6, [1.0]), "got pieces of the turns 0, 0 and 1 rewards"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_rollout_of_lists_is_one_line(make_agent, case):
    agent, args = make_agent("game")
    bad, message = BAD[case]
    with pytest.raises(UserError) as error:
        ppo_llm.make_rollout(agent, *zip(GOOD, bad), args)
    assert re.fullmatch(f"transcript 1 .*{message}", str(error.value))


@pytest.mark.parametrize("counts", [(1, 2, 1, 1), (2, 1, 1, 1), (1, 1, 1, 2), (0, 0, 0, 0)])
def test_lists_of_different_numbers_of_transcripts_are_refused(make_agent, counts):
    agent, args = make_agent("game")
    lists = [[part] * count for part, count in zip(GOOD, counts)]
    with pytest.raises(
        UserError, match="^a rollout takes one of each for a transcript, got {} lists of".format(*counts)
    ):
        ppo_llm.make_rollout(agent, *lists, args)


def test_turn_ids_of_what_was_not_sampled_do_not_matter(make_agent):
    agent, args = make_agent("game")
    first, second = (
        ppo_llm.make_rollout(agent, [IDS], [MASK], [turns], [REWARDS], args) for turns in (TURNS, [0, 0, 0, 0, 1, 1])
    )
    assert torch.equal(first.turn_of_token, second.turn_of_token)
    assert first.turn_of_token.tolist() == [[0, 0, -1, 1]]
