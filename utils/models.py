"""Models and tokenizers in: ordinary Hugging Face folders or hub names, safetensors and JSON only."""

import copy
from pathlib import Path

import huggingface_hub
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from utils.cli import UserError

CRITIC = "--critic-model-name-or-path"


def locate(name):
    """A model's folder, seen from here or from the scripts' own folder; or the hub name, as it is."""
    beside = Path(__file__).resolve().parent.parent / name
    return str(beside) if not Path(name).exists() and beside.exists() else name


def per_agent(flag, names, num_agents):
    """A list of num_agents names, from one for all or one for each. Raises UserError for any other number of them."""
    names = [names] if isinstance(names, str) else [*names]
    if len(names) not in (1, num_agents):
        raise UserError(f"{flag} takes one name, or one for each of the {num_agents} agents, got {len(names)}")
    return names * num_agents if len(names) == 1 else names


def check_models(args, model=None):
    """Raise UserError unless the models that the flags name can be had; `model`, if given, stands in for --model."""
    critics = args.critic_model_name_or_path
    if critics and not args.use_separate_critic:
        raise UserError(f"{CRITIC} takes --use-separate-critic with it")
    for name in dict.fromkeys(per_agent("--model", args.model, args.num_agents)):
        if model is None:
            check_model(name, "--model", args.trust_remote_code)
    for name in dict.fromkeys(per_agent(CRITIC, critics, args.num_agents) if critics else []):
        check_model(name, CRITIC, args.trust_remote_code)


def check_model(name, flag, trust_remote_code):
    """Raise UserError unless `name` is a model's folder, a hub model downloaded before, or one in reach."""
    name = locate(name)
    if Path(name).exists():
        if not (Path(name) / "config.json").is_file():
            raise UserError(f"{flag} takes a model's folder or a hub name, and {name} has no config.json")
    else:
        try:
            if not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
                huggingface_hub.HfApi().model_info(name, timeout=10)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            message = f"{flag} takes a model's folder or a hub name; {name} is no folder and can't be reached"
            raise UserError(f"{message}: {reason}") from error
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(f"{flag} {name} can't be loaded: {error}") from error


def load_team(args, device, model=None, tokenizer=None):
    """What the agents start from: N frozen models, N tokenizers and N frozen critics (None where none is separate).

    Agents of one name share one object. `model` and `tokenizer` stand in for what --model names. Raises UserError.
    """
    names = per_agent("--model", args.model, args.num_agents)
    models = {name: load_model(args, name, model).to(device) for name in dict.fromkeys(names)}
    tokenizers = {name: tokenizer or load_tokenizer(args, name) for name in models}
    critics = [None] * args.num_agents
    if args.use_separate_critic:
        paths = per_agent(CRITIC, args.critic_model_name_or_path or (None,), args.num_agents)
        loaded = {
            path: load_model(args, path, None, CRITIC, AutoModel).to(device) for path in dict.fromkeys(paths) if path
        }
        critics = [loaded[path] if path else models[name].base_model for name, path in zip(names, paths)]
        for name, path in zip(names, paths):
            known, needed = loaded[path].config.get_text_config().vocab_size if path else 0, len(tokenizers[name])
            if path and known < needed:
                raise UserError(f"{CRITIC} {path} knows {known} tokens, the tokenizer of {name} has {needed}")
    return [models[name] for name in names], [tokenizers[name] for name in names], critics


def load_tokenizer(args, name):
    """A model's tokenizer, with a pad token. Raises UserError where it can't be loaded."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(locate(name), trust_remote_code=args.trust_remote_code)
    except Exception as error:
        raise UserError(f"--model {name} has no tokenizer that can be loaded: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(args, name, model=None, flag="--model", auto_class=AutoModelForCausalLM):
    """A frozen model in eval mode: a copy of `model`, or what the flag names; UserError if it can't be loaded."""
    if model is None:
        transformers.utils.logging.disable_progress_bar()
        try:
            model = auto_class.from_pretrained(
                locate(name),
                dtype=getattr(torch, args.dtype),
                attn_implementation=args.attn_implementation,
                trust_remote_code=args.trust_remote_code,
                use_safetensors=True,  # no pickles
            )
        except Exception as error:
            raise UserError(f"{flag} {name} can't be loaded: {error}") from error
    else:
        model = copy.deepcopy(model)
    return model.eval().requires_grad_(False)
