"""From what a task asks to the token ids that a model reads."""

from utils.cli import UserError


def render(prompt, tokenizer):
    """A prompt, which is a string or chat messages, as the string that the model reads, special tokens included."""
    if isinstance(prompt, str):
        return tokenizer.decode(tokenizer("").input_ids) + prompt  # where the model wants it, a first token
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return "\n\n".join(message["content"] for message in prompt) + "\n\n"


def encode_prompts(prompts, tokenizer, model, new_tokens):
    """Token ids and mask of B prompts, each [B, P], left-padded, on the model's device.

    Raises UserError where the model has no room for so many new tokens after the longest.
    """
    encoded = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    length, room = encoded.input_ids.shape[1], getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if room and length + new_tokens > room:
        raise UserError(
            f"--max-new-tokens {new_tokens} after a prompt of {length} exceeds the model's {room} positions"
        )
    return encoded.input_ids.to(model.device), encoded.attention_mask.to(model.device)


def encode(prompt, args, tokenizer):
    """The text and the ids of a first prompt, which is text or chat messages.

    Raises UserError where --max-model-len leaves no room for a response.
    """
    text = render(prompt, tokenizer)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise UserError(f"a prompt has no tokens: {prompt!r}")
    if len(ids) + args.max_output_tokens > args.max_model_len:
        sizes = f"--max-output-tokens {args.max_output_tokens} after a prompt of {len(ids)}"
        raise UserError(f"{sizes} exceeds --max-model-len {args.max_model_len}")
    return text, ids


def end_tokens(model, tokenizer):
    """The ids that end a response: the tokenizer's and, of which there may be several, the model's own."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return sorted(end for end in ends if end is not None)


MARK = "RESPONSE"  # stands for a response, to find what a chat template writes after one


def reply(observation, last, tokenizer):
    """Ids between a response, whose last id is given, and the next: the end of its turn, the observation, a start.

    The end of the turn is left out where the response ended with it. Without a chat template the observation stands
    between empty lines.
    """
    text = f"\n\n{observation}\n\n"
    if tokenizer.chat_template:
        roles = zip(("user", "assistant", "user"), (MARK, MARK, observation))
        chat = [{"role": role, "content": content} for role, content in roles]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        text = text.split(MARK, 2)[2]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return ids[1:] if tokenizer.chat_template and ids[0] == last else ids
