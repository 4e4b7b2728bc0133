"""From chats to token ids and back: what an agent reads, rows padded on both sides, an answer's logits."""

import math
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from utils import distributed
from utils.cli import SharedError, UserError, one_line
from utils.distributed import say

UNLIMITED = 2**31  # tokens of a context
TEMPLATE_DATE = "2026-01-01"  # today, for chat templates that ask
MOST_MARKS = 20  # that are tried

# --- What an agent reads ----------------------------------------------------------------------------------------------


def check_date(text):
    """A date as YYYY-MM-DD, with a time or not. Raises ValueError."""
    datetime.fromisoformat(text)
    return text


def encode(chat, before, agent):
    """Token ids that a transcript, whose ids so far are `before`, goes on with: of a prompt, or of what comes next.

    `chat` is a string, a list of messages, or a list of ids, which are taken as they are. Later it is what the agent
    reads next: then the ids are the end of its last answer, where it was cut, the new messages, and the start of an
    answer. Raises UserError for no tokens, for tokens that the model does not know, and for messages that the chat
    template does not take.
    """
    if isinstance(chat, list) and chat and isinstance(chat[0], int):
        ids = chat
    elif not before:
        ids = encode_prompt(readable(chat), agent.tokenizer)
    else:
        ids = encode_reply(readable(chat), before[-1], agent.tokenizer)
    if not before and not ids:
        raise UserError(f"a prompt has no tokens: {chat!r}")
    check_known(ids, agent.tokenizer, getattr(getattr(agent, "actor", agent), "config", None))
    room = getattr(getattr(agent, "actor", None), "room", UNLIMITED)
    return ids[: max(0, room - len(before))]  # what the model has no positions for is not read


def readable(value):
    """A text, or one in messages, as a tokenizer can take it: U+FFFD in place of half a character."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {key: readable(own) for key, own in value.items()}
    return [readable(own) for own in value] if isinstance(value, list | tuple) else value


def check_known(ids, tokenizer, config):
    """Raise UserError for an id that a model of this configuration has no embedding of."""
    size = getattr(config and config.get_text_config(), "vocab_size", None)
    if size and max(ids, default=0) >= size:
        token = tokenizer.convert_ids_to_tokens(max(ids))
        what = f"a text has the token {one_line(token, 40)}, number {max(ids)}, and the model knows {size} tokens"
        raise UserError(f"{what}: resize its embeddings (resize_token_embeddings), or leave the token out")


def encode_prompt(chat, tokenizer):
    """The ids of a first prompt: as the tokenizer has them, without an end token that it adds."""
    if isinstance(chat, str) or not tokenizer.chat_template:
        encoded = tokenizer(as_text(chat), return_special_tokens_mask=True)
        ids, is_added = encoded.input_ids, encoded.special_tokens_mask
        return ids[:-1] if any(is_added[-1:]) and ids[-1] == tokenizer.eos_token_id else ids
    return tokenizer(render(chat, tokenizer), add_special_tokens=False).input_ids


def as_text(chat):
    """A string as it is, messages with empty lines after each."""
    if isinstance(chat, str):
        return chat
    check_messages(chat)
    return "".join(message["content"] + "\n\n" for message in chat)


def check_messages(chat):
    if not isinstance(chat, (list, tuple)) or not all(isinstance(message, dict) for message in chat):
        raise TypeError(f"a prompt is a string, or a list of messages with role and content, got {chat!r:.80}")


def render(chat, tokenizer, earlier=(), add_generation_prompt=True):
    """A chat after earlier messages by the tokenizer's template, up to the start of an answer; on a fixed date.

    Raises UserError for a role that the template does not take.
    """
    check_messages(chat)
    today = datetime.fromisoformat(getattr(tokenizer, "template_date", TEMPLATE_DATE))
    options = {**getattr(tokenizer, "template_kwargs", {}), "strftime_now": today.strftime}
    options |= {"tokenize": False, "add_generation_prompt": add_generation_prompt}

    def apply(messages):
        try:
            return tokenizer.apply_chat_template([*earlier, *messages], **options)
        except Exception as error:  # of the template's own, or of what it can't compute
            roles = ", ".join(str(message.get("role")) for message in messages)
            refuses = f"the chat template refuses messages of the roles {one_line(roles, 80)}"
            raise UserError(f"{refuses}: {one_line(error)}") from error

    text = apply(chat)
    for k, message in enumerate(chat):
        if message.get("role") in ("user", "assistant"):
            continue
        if apply([*chat[:k], message | {"content": message["content"] + "?"}, *chat[k + 1 :]]) == text:
            raise UserError(f"the chat template leaves out messages of the role {one_line(message.get('role'), 40)}")
    return text


def encode_reply(chat, last, tokenizer):
    """The ids between an answer, of which `last` is the last, and the next one.

    Without a chat template the new messages stand between empty lines.
    """
    messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else [*chat]
    check_messages(messages)
    mark = "ANSWER"  # stands for the earlier question and answer
    if not tokenizer.chat_template:
        return encode_after(mark, "\n\n" + as_text(messages), tokenizer)
    ids = encode_after(mark, render_reply(messages, tokenizer), tokenizer)
    for k, number in enumerate(ids):
        if number == last:
            return ids[k + 1 :]  # the answer has its end token
        if tokenizer.decode([number]).strip():
            break  # some templates write a space before the end token
    return ids


def render_reply(messages, tokenizer):
    """What the chat template writes after an answer, of messages that follow it.

    Raises UserError where an answer is not in what it writes.
    """
    mark = "ANSWER"  # stands for the earlier question and answer; nothing else is to contain it
    for _ in range(MOST_MARKS):
        earlier = [{"role": "user", "content": mark}, {"role": "assistant", "content": mark}]
        parts = render(messages, tokenizer, earlier).split(mark)
        if len(parts) == 3 and not any(mark in message["content"] for message in messages):
            return parts[2]
        mark += "R"
    raise UserError("the chat template does not write an answer as it is: it can't serve several turns")


def encode_after(before, text, tokenizer):
    """The ids of a text after another one: without the space that some tokenizers put before whatever is first."""
    both, first, alone = (tokenizer(x, add_special_tokens=False).input_ids for x in (before + text, before, text))
    return both[len(first) :] if both[: len(first)] == first else alone


def say_what_differs(tokenizer, name):
    """Say where the chat template writes earlier turns, in a whole chat, otherwise than transcripts have them."""
    if not tokenizer.chat_template:
        return
    said = [{"role": "user", "content": "First?"}, {"role": "user", "content": "Then?"}]
    for answer in ("One.", "<think>\nSo.\n</think>\n\nOne."):
        earlier = [said[0], {"role": "assistant", "content": answer}]
        try:
            transcript = render(said[:1], tokenizer) + answer + render_reply(said[1:], tokenizer)
            differs = render(said[1:], tokenizer, earlier) != transcript
        except UserError as error:
            return say(f"{name}: {error}")
        if differs:
            otherwise = f"its chat template writes earlier turns, such as the answer {answer!r}, otherwise later"
            return say(f"{name}: {otherwise}; in transcripts they stay as they were read and written")


def end_tokens(model, tokenizer):
    """The ids that end an answer: the tokenizer's and, of which there may be several, the model's own."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return sorted(end for end in ends if end is not None and can_be_sampled(end, model))


def can_be_sampled(number, model):
    """Whether the model knows the token of that number."""
    return number < getattr(model.config.get_text_config(), "vocab_size", math.inf)


def closing_token(tokenizer):
    """The id of the special token with which the chat template closes an answer; None: there is none."""
    mark = "ANSWER"
    asked, answered = ({"role": role, "content": mark} for role in ("user", "assistant"))
    if not tokenizer.chat_template:
        return None
    try:
        opened, not_opened = (render([asked], tokenizer, add_generation_prompt=each) for each in (True, False))
        before, _, after = render([asked, answered], tokenizer, add_generation_prompt=False).rpartition(mark)
    except UserError:
        return None
    opening = encode_after(mark, opened.removeprefix(not_opened), tokenizer)  # an answer, or a turn
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    for number in encode_after(mark, after, tokenizer) if mark in before else []:
        if number in special:
            return None if number in opening else number
        if tokenizer.decode([number]).strip():
            return None
    return None


def mend_end_tokens(model, tokenizer, name):
    """Let an answer end where the chat template closes it too, and say so; what is saved has the same end tokens."""
    closing = closing_token(tokenizer)
    ends = end_tokens(model, tokenizer)
    if closing is not None and closing not in ends and can_be_sampled(closing, model):
        token = tokenizer.convert_ids_to_tokens(closing)
        declared = ", ".join(map(str, tokenizer.convert_ids_to_tokens(ends))) or "none"
        others = f"which is not among its end tokens, {declared}"
        say(f"{name}: its chat template ends an answer with {token}, {others}: it ends answers here too")
        ends = sorted({*ends, closing})
    own = model.generation_config.eos_token_id
    if ends and {*(own if isinstance(own, list) else [own])} != {*ends}:
        model.generation_config.eos_token_id = ends


def decode(answers, agent, args):
    """Sampled answers, lists of ids, as texts: without the end token, and by the flag without special tokens."""
    ends = {*agent.end_ids.tolist()}  # of which not all need be special
    answers = [answer[:-1] if answer and answer[-1] in ends else answer for answer in answers]
    options = {"skip_special_tokens": args.skip_special_tokens, "clean_up_tokenization_spaces": False}  # as written
    return agent.tokenizer.batch_decode(answers, **options)


# --- Rows of tensors --------------------------------------------------------------------------------------------------


def pad_left(contexts, agent):
    """R lists of ids as ids [R, S] and attention mask [R, S]; padding is 0 in the mask, and the row's first id."""
    width = max(map(len, contexts))
    ids = [[row[0]] * (width - len(row)) + row for row in contexts]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in contexts]
    device = agent.actor.device
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def pad_right(transcripts, agent, truncated=()):
    """The fields of a Rollout by name, of B transcripts, in one column more than the longest has tokens.

    On padding ids are the padding token, and all else is 0.
    """
    width = 1 + max([1, *[len(transcript.ids) for transcript in transcripts]])
    device = getattr(agent, "actor", agent).device

    def rows(lists, value, dtype):
        padded = [[*row, *[value] * (width - len(row))] for row in lists]
        return torch.tensor(padded, dtype=dtype, device=device).view(len(transcripts), width)

    turns = rows([each.turns for each in transcripts], 0, torch.long)
    was_cut = [b in truncated for b in range(len(transcripts))]
    return {
        "ids": rows([each.ids for each in transcripts], agent.tokenizer.pad_token_id, torch.long),
        "attention_mask": rows([[1] * len(each.ids) for each in transcripts], 0, torch.long),
        "turns": turns,
        "mask": turns > 0,
        "rewards": rows([each.rewards for each in transcripts], 0.0, torch.float32),
        "answers": [each.answers for each in transcripts],
        "earned": [each.earned for each in transcripts],
        "truncated": torch.tensor(was_cut, dtype=torch.bool, device=device),
    }


def unflatten(x, mask):
    """n numbers at the n places where the mask [b, S] is True, 0 elsewhere: [b, S]."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


def earned_by_turn(rollout, last_turn):
    """What an agent earns in each turn, also where others act: [B, T + 1], turn t in column t."""
    rows = [[own.get(turn, 0.0) for turn in range(last_turn + 1)] for own in rollout.earned]
    return torch.tensor(rows, device=rollout.rewards.device).view(len(rows), last_turn + 1)


def episode_rewards(rollout, dtype=torch.float32):
    """What an agent earns in each episode, [B]; also before it first acts, from which it does not learn."""
    first_turns = rollout.turns.masked_fill(rollout.turns == 0, UNLIMITED).amin(1).tolist()
    before = [
        sum(reward for turn, reward in own.items() if turn < first) for own, first in zip(rollout.earned, first_turns)
    ]
    return rollout.rewards.to(dtype).sum(1) + torch.tensor(before, dtype=dtype, device=rollout.rewards.device)


def split_turns(rollout, b, agent):
    """Episode b of an agent's rollout as text: {turn: (what it read, its answer)}, where it answered."""
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
            turns[number] = (observation, rollout.answers[b][len(turns)])
            read = []
    return turns


def join_rollouts(agents, players, rollouts):
    """The rollout that each agent learns from: its own, or, of an agent in several of the N seats, one of S B rows.

    `players` have the seats, in their order, and `rollouts` are theirs. Of who is none of the agents nobody learns.
    """
    joined = []
    for agent in agents:
        own = [rollout for player, rollout in zip(players, rollouts) if player is agent]
        joined.append(own[0] if len(own) == 1 else concatenate(own))
    return joined


def concatenate(rollouts):
    """Rollouts of B rows each as one, padded on the right to the widest: new columns of ids, as of all else, are 0."""
    width = max(rollout.ids.shape[1] for rollout in rollouts)
    fields = {}
    for name in vars(rollouts[0]):
        own = [getattr(rollout, name) for rollout in rollouts]
        if isinstance(own[0], list):
            fields[name] = [each for lists in own for each in lists]
        elif own[0].dim() == 1:
            fields[name] = torch.cat(own)
        else:
            fields[name] = torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in own])
    return type(rollouts[0])(**fields)


@dataclass
class JointTranscripts:
    """What a team's critic reads of B episodes, padded on the right."""

    ids: torch.Tensor  # [B, S]
    attention_mask: torch.Tensor  # [B, S] 1 on tokens, 0 on padding
    marks: torch.Tensor  # [B, S] t on the end token of turn t, 0 elsewhere


def join_transcripts(agents, rollouts, critic, reads, writes):
    """The transcripts of a team as one text for each of B episodes. Returns a JointTranscripts.

    In each turn stands what the agents that act read, an end token, and what they write, by the formats `reads` and
    `writes` of an agent's number and its text. Raises SharedError, in all processes, where the critic has no room.
    """
    tokenizer = critic.critic.tokenizer
    encode_text = lambda text: tokenizer(readable(text), add_special_tokens=False).input_ids  # noqa: E731
    end = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    rows = []
    for b in range(len(rollouts[0].ids)):
        own_turns = [split_turns(rollout, b, agent) for agent, rollout in zip(agents, rollouts)]
        row = SimpleNamespace(ids=[], turns=[], rewards=(), answers=(), earned=())  # as pad_right takes it
        for turn in sorted({turn for turns in own_turns for turn in turns}):
            acting = {i: turns[turn] for i, turns in enumerate(own_turns) if turn in turns}
            observations = "".join(reads.format(i, observation) for i, (observation, _) in acting.items())
            answers = "".join(writes.format(i, answer) for i, (_, answer) in acting.items())
            prompt_ids = encode_text(observations) if row.ids else encode_prompt(observations, tokenizer)
            answer_ids = encode_text(answers)
            row.ids += [*prompt_ids, end, *answer_ids]
            row.turns += [0] * len(prompt_ids) + [turn] + [0] * len(answer_ids)
        check_known(row.ids, tokenizer, critic.critic.config)
        rows.append(row)
    room = getattr(critic.critic.config.get_text_config(), "max_position_embeddings", None)
    # What stands before a row's last mark is read, and nothing behind it. All processes end together
    longest = distributed.max(torch.tensor([row.turns.index(max(row.turns)) for row in rows if row.turns]))
    if room and longest > room:
        many = f"what the team reads and writes has {longest} tokens before its last answers"
        raise SharedError(f"the critic has {room} positions, and {many}: take fewer agents or turns, or a larger one")
    padded = pad_right(rows, critic.critic)
    ids = padded["ids"] * padded["attention_mask"]  # 0 for padding: its token may be one that the critic does not know
    return JointTranscripts(ids, padded["attention_mask"], padded["turns"])


# --- Sampling ---------------------------------------------------------------------------------------------------------


def logits_processors(agent, ids, args):
    """What is done to the logits [R, vocabulary] after ids [R, S] before a token is sampled: f(ids, logits).

    `ids` are the contexts that answers begin after.
    """
    processors = LogitsProcessorList()
    if args.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(args.repetition_penalty))
    ends = agent.end_ids.tolist() if args.min_output_tokens else []
    if ends:  # else no answer ends early
        processors.append(MinNewTokensLengthLogitsProcessor(ids.shape[1], args.min_output_tokens, ends, ids.device))
    if args.top_k:
        processors.append(TopKLogitsWarper(args.top_k))
    if args.top_p < 1:
        processors.append(TopPLogitsWarper(args.top_p))
    if args.min_p:
        processors.append(MinPLogitsWarper(args.min_p))
    return processors
