"""From chats to token ids and back: what an agent reads, rows padded on both sides, an answer's logits."""

from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from utils.cli import UserError

UNLIMITED = 2**31  # tokens of a context

# --- What an agent reads ----------------------------------------------------------------------------------------------


def encode(chat, before, agent):
    """Token ids that a transcript, whose ids so far are `before`, goes on with: of a prompt, or of what comes next.

    `chat` is a string, or a list of messages. Later it is what the user says next: then the ids are the end of the
    agent's last answer, where it was cut, the new messages, and the start of an answer. Raises UserError for no tokens.
    """
    if isinstance(chat, torch.Tensor | list) and len(chat) and isinstance(chat[0], int):
        ids = [*chat]
    elif not before:
        ids = encode_prompt(readable(chat), agent.tokenizer)
    else:
        ids = encode_reply(readable(chat), before[-1], agent.tokenizer)
    if not before and not ids:
        raise UserError(f"a prompt has no tokens: {chat!r}")
    room = getattr(getattr(agent, "actor", None), "room", UNLIMITED)
    return ids[: max(0, room - len(before))]  # what the model has no positions for is not read


def readable(value):
    """A text, or one in messages, as a tokenizer can take it: U+FFFD in place of half a character."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {key: readable(own) for key, own in value.items()}
    return [readable(own) for own in value] if isinstance(value, list | tuple) else value


def encode_prompt(chat, tokenizer):
    """The ids of a first prompt: as the tokenizer has them, without an end token that it adds."""
    if isinstance(chat, str) or not tokenizer.chat_template:
        ids = tokenizer(as_text(chat)).input_ids
        plain = tokenizer(as_text(chat), add_special_tokens=False).input_ids
        if len(ids) > len(plain) and ids[-1] == tokenizer.eos_token_id and plain[-1:] != [tokenizer.eos_token_id]:
            ids = ids[:-1]
        return ids
    check_messages(chat)
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def as_text(chat):
    """A string as it is, messages with empty lines after each."""
    if isinstance(chat, str):
        return chat
    check_messages(chat)
    return "".join(message["content"] + "\n\n" for message in chat)


def check_messages(chat):
    if not isinstance(chat, (list, tuple)) or not all(isinstance(message, dict) for message in chat):
        raise TypeError(f"a prompt is a string, or a list of messages with role and content, got {chat!r:.80}")


def encode_reply(chat, last, tokenizer):
    """The ids between an answer, of which `last` is the last, and the next one.

    Without a chat template the new messages stand between empty lines.
    """
    messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else [*chat]
    check_messages(messages)
    mark = "ANSWER"  # stands for the earlier question and answer
    if not tokenizer.chat_template:
        return encode_after(mark, "\n\n" + as_text(messages), tokenizer)
    while mark in tokenizer.chat_template or any(mark in message["content"] for message in messages):
        mark += "R"
    earlier = [{"role": "user", "content": mark}, {"role": "assistant", "content": mark}]
    text = tokenizer.apply_chat_template(earlier + messages, tokenize=False, add_generation_prompt=True)
    ids = encode_after(mark, text.split(mark, 2)[2], tokenizer)
    return ids[1:] if ids and ids[0] == last else ids


def encode_after(before, text, tokenizer):
    """The ids of a text after another one: without the space that some tokenizers put before whatever is first."""
    both, first, alone = (tokenizer(x, add_special_tokens=False).input_ids for x in (before + text, before, text))
    return both[len(first) :] if both[: len(first)] == first else alone


def end_tokens(model, tokenizer):
    """The ids that end an answer: the tokenizer's and, of which there may be several, the model's own."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return sorted(end for end in ends if end is not None)


# --- Rows of tensors --------------------------------------------------------------------------------------------------


def pad_left(contexts, agent):
    """R lists of ids as ids [R, S] and attention mask [R, S]; padding is 0 in the mask, and the row's first id."""
    width = max(map(len, contexts))
    ids = [[row[0]] * (width - len(row)) + row for row in contexts]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in contexts]
    device = agent.actor.device
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def pad_right(transcripts, agent, truncated=()):
    """B transcripts as the fields of a Rollout, in their order, in one column more than the longest has tokens."""
    width = 1 + max([1, *[len(transcript.ids) for transcript in transcripts]])
    device = getattr(agent, "actor", agent).device

    def rows(lists, value, dtype):
        padded = [[*row, *[value] * (width - len(row))] for row in lists]
        return torch.tensor(padded, dtype=dtype, device=device).view(len(transcripts), width)

    ids = rows([each.ids for each in transcripts], agent.tokenizer.pad_token_id, torch.long)
    attention_mask = rows([[1] * len(each.ids) for each in transcripts], 0, torch.long)
    turns = rows([each.turns for each in transcripts], 0, torch.long)
    rewards = rows([each.rewards for each in transcripts], 0.0, torch.float32)
    was_cut = torch.tensor([b in truncated for b in range(len(transcripts))], dtype=torch.bool, device=device)
    answers, earned = [each.answers for each in transcripts], [each.earned for each in transcripts]
    return ids, attention_mask, turns, rewards, was_cut, answers, earned


def unflatten(x, mask):
    """n numbers at the n places where the mask [b, S] is True, 0 elsewhere: [b, S]."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


def sum_by_turn(x, turns, num_turns):
    """Sums of x [B, S] over the tokens of each turn, [B, T + 1]: of turn t in column t, of those of no turn in 0."""
    return x.new_zeros(len(x), num_turns + 1).scatter_add(1, turns, x)


def rewards_by_turn(rollout, num_turns):
    """What an agent earns in each turn, also where others act: [B, T + 1], turn t in column t."""
    rows = [[own.get(turn, 0.0) for turn in range(num_turns + 1)] for own in rollout.earned]
    return torch.tensor(rows, device=rollout.rewards.device).view(len(rows), num_turns + 1)


@dataclass
class Turn:
    """What an agent read before it answered, and its answer."""

    observation: str
    answer: str


def split_turns(rollout, b, agent):
    """Episode b of an agent's rollout as text: {turn: Turn}, of the turns in which it answered."""
    length = int(rollout.attention_mask[b].sum())
    ids = rollout.ids[b, :length].tolist()
    numbers = rollout.turns[b, :length].tolist()
    turns = {}
    read = []
    for token, number in zip(ids, numbers):
        if number == 0:
            read.append(token)
        elif number not in turns:
            observation = agent.tokenizer.decode(read, skip_special_tokens=True)
            turns[number] = Turn(observation, rollout.answers[b][len(turns)])
            read = []
    return turns


def join_transcripts(agents, rollouts, critic, num_turns):
    """The transcripts of a team as one text for each of B episodes, turn by turn: what agents 0, 1, ... read, an end
    token, what they write. Returns ids, attention mask and turns, [B, S]: the turn on its end token, 0 elsewhere.

    Raises UserError where the critic has no room for it.
    """
    tokenizer = critic.critic.tokenizer
    encode_text = lambda text: tokenizer(readable(text), add_special_tokens=False).input_ids  # noqa: E731
    rows = []
    for b in range(len(rollouts[0].ids)):
        own_turns = [split_turns(rollout, b, agent) for agent, rollout in zip(agents, rollouts)]
        row = Row([], [], [])
        for turn in range(1, num_turns + 1):
            acting = {i: turns[turn] for i, turns in enumerate(own_turns) if turn in turns}
            if not acting:
                continue
            read = encode_text("".join(f"Agent {i} reads:\n{each.observation}\n\n" for i, each in acting.items()))
            written = encode_text("".join(f"Agent {i} writes:\n{each.answer}\n\n" for i, each in acting.items()))
            row.ids += [*read, tokenizer.eos_token_id or tokenizer.pad_token_id, *written]
            row.turns += [0] * len(read) + [turn] + [0] * len(written)
        row.rewards += [0.0] * len(row.ids)
        rows.append(row)
    room = getattr(critic.critic.config.get_text_config(), "max_position_embeddings", None)
    longest = max([len(row.ids) for row in rows], default=0)
    if room and longest > room:
        raise UserError(f"the critic has {room} positions, and what the team reads and writes has {longest} tokens")
    return pad_right(rows, critic.critic)[:3]


@dataclass
class Row:
    """A text of a team, as pad_right takes it."""

    ids: list
    turns: list
    rewards: list
    answers: tuple = ()
    earned: tuple = ()


# --- Sampling ---------------------------------------------------------------------------------------------------------


def logits_processors(agent, ids, args):
    """What is done to the logits [R, vocabulary] after ids [R, S] before a token is sampled: f(ids, logits).

    `ids` are the contexts that answers begin after.
    """
    processors = LogitsProcessorList()
    if args.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(args.repetition_penalty))
    if args.min_output_tokens:
        ends = agent.end_ids.tolist()
        processors.append(MinNewTokensLengthLogitsProcessor(ids.shape[1], args.min_output_tokens, ends, ids.device))
    if args.top_k:
        processors.append(TopKLogitsWarper(args.top_k))
    if args.top_p < 1:
        processors.append(TopPLogitsWarper(args.top_p))
    if args.min_p:
        processors.append(MinPLogitsWarper(args.min_p))
    return processors
