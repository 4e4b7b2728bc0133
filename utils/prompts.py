"""From what a task or an environment says to what a model reads."""


def render(prompt, tokenizer):
    """A prompt, which is a string or chat messages, as the string that the model reads, special tokens included."""
    first_token = tokenizer.decode(tokenizer("").input_ids)  # empty where the model wants none
    if isinstance(prompt, str):
        return first_token + prompt
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return first_token + "\n\n".join(message["content"] for message in prompt) + "\n\n"


def end_tokens(model, tokenizer):
    """The ids that end a response: the tokenizer's and, of which there may be several, the model's own."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return sorted(end for end in ends if end is not None)


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
