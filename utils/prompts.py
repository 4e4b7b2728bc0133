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


def end_tokens(model, tokenizer):
    """The ids that end a response: the tokenizer's and, of which there may be several, the model's own."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return sorted(end for end in ends if end is not None)
