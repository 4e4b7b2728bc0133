"""From a task's items to the token ids that a model reads."""

import inspect

from utils.cli import TaskError, UserError, one_line


def format_prompts(task, items, agent, tokenizer):
    """The prompts (strings, special tokens included) that an agent answers for these items."""
    formatter = task.formatters[agent] if isinstance(task.formatters, (list, tuple)) else task.formatters
    more = {"agent": agent} if "agent" in inspect.signature(formatter).parameters else {}
    prompts = []
    for number, item in enumerate(items):
        try:
            prompt = formatter(item, **more)
            if isinstance(prompt, str):
                prompt = tokenizer.decode(tokenizer("").input_ids) + prompt  # where the model wants it, a first token
            elif tokenizer.chat_template:
                prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            else:
                prompt = "\n\n".join(message["content"] for message in prompt) + "\n\n"
        except Exception as error:
            what = f"formatter of agent {agent} failed on item {number}, {one_line(item, 80)}"
            raise TaskError(f"{what}: {type(error).__name__}: {error}") from error
        prompts.append(prompt)
    return prompts


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
