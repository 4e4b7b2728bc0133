"""From what a task or an environment says to what a model reads."""


def render(prompt, tokenizer):
    """A prompt, which is a string or chat messages, as the string that the model reads, special tokens included."""
    first_token = tokenizer.decode(tokenizer("").input_ids)  # empty where the model wants none
    if isinstance(prompt, str):
        return first_token + prompt
    if not isinstance(prompt, (list, tuple)) or not all(isinstance(message, dict) for message in prompt):
        raise TypeError(f"a prompt is a string, or a list of messages with role and content, got {prompt!r:.80}")
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return first_token + "\n\n".join(message["content"] for message in prompt) + "\n\n"


def pad_left(rows, tokenizer, device):
    """B lists of token ids as ids [B, P], left-padded, and attention mask [B, P], 1 on tokens."""
    batch = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt").to(device)
    return batch.input_ids, batch.attention_mask


def end_tokens(model, tokenizer):
    """The ids that end a response: the tokenizer's and, of which there may be several, the model's own."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return sorted(end for end in ends if end is not None)


def new_message(earlier, prompt):
    """What a prompt says after an earlier one and the response to it, as one message of the user.

    A chat that goes on from the earlier one says what comes after that; any other what its messages of the user say.
    """
    if isinstance(prompt, str):
        return prompt
    goes_on = prompt != earlier and prompt[: len(earlier)] == earlier
    new = prompt[len(earlier) :] if goes_on else prompt
    texts = [message["content"] for message in new if message["role"] == "user"]
    if not texts:
        raise ValueError("its chat has no new message of the user")
    return "\n\n".join(texts)


MARK = "RESPONSE"  # stands for a response, to find what a chat template writes after one


def reply(observation, last, tokenizer):
    """Ids between a response, of which `last` is the last id, and the next: end of the turn, observation, start.

    The end of the turn is left out where the response ended with it. Without a chat template the observation stands
    between empty lines.
    """
    if not tokenizer.chat_template:
        return tokenizer(f"\n\n{observation}\n\n", add_special_tokens=False).input_ids
    chat = [
        {"role": "user", "content": MARK},
        {"role": "assistant", "content": MARK},
        {"role": "user", "content": observation},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text.split(MARK, 2)[2], add_special_tokens=False).input_ids
    return ids[1:] if ids[0] == last else ids
