"""Models in and out: ordinary Hugging Face folders, safetensors and JSON only."""

import copy
import os
import shutil
from pathlib import Path

import huggingface_hub
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from utils.cli import UserError

CRITIC = "--critic-model-name-or-path"


def locate(name):
    """A model's folder, seen from here or from the scripts' own folder; or the hub name, as it is."""
    beside = Path(__file__).resolve().parent.parent / name
    return str(beside) if not Path(name).exists() and beside.exists() else name


def check_models(args, model=None):
    """Raise UserError unless the models that the flags name can be had; `model`, if given, stands in for --model."""
    if model is None:
        check_model(args.model, "--model", args.trust_remote_code)
    if args.use_separate_critic and args.critic_model_name_or_path:
        check_model(args.critic_model_name_or_path, CRITIC, args.trust_remote_code)
    elif args.critic_model_name_or_path:
        raise UserError(f"{CRITIC} takes --use-separate-critic with it")


def check_model(name, flag, trust_remote_code):
    """Raise UserError unless `name` is a model's folder, a hub model downloaded before, or one in reach."""
    name = locate(name)
    if Path(name).exists():
        if not (Path(name) / "config.json").is_file():
            raise UserError(f"{flag} takes a model's folder or a hub name, and {name} has no config.json")
    elif not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        try:
            huggingface_hub.HfApi().model_info(name, timeout=10)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            message = f"{flag} takes a model's folder or a hub name; {name} is no folder and can't be reached"
            raise UserError(f"{message}: {reason}") from error
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(f"{flag} {name} can't be loaded: {error}") from error


def load_tokenizer(args):
    """The tokenizer of --model, with a pad token. Raises UserError where it can't be loaded."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(locate(args.model), trust_remote_code=args.trust_remote_code)
    except Exception as error:
        raise UserError(f"--model {args.model} has no tokenizer that can be loaded: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(args, model=None, name=None, flag="--model", auto_class=AutoModelForCausalLM):
    """A frozen model in eval mode: a copy of `model`, or what the flag names; UserError if it can't be loaded."""
    if model is None:
        transformers.utils.logging.disable_progress_bar()
        try:
            model = auto_class.from_pretrained(
                locate(name or args.model),
                dtype=getattr(torch, args.dtype),
                attn_implementation=args.attn_implementation,
                trust_remote_code=args.trust_remote_code,
                use_safetensors=True,  # no pickles
            )
        except Exception as error:
            raise UserError(f"{flag} {name or args.model} can't be loaded: {error}") from error
    else:
        model = copy.deepcopy(model)
    return model.eval().requires_grad_(False)


def load_critic(args, model, tokenizer):
    """What separate critics start from: a frozen model without a vocabulary head, by default the one in `model`.

    Raises UserError where it can't be loaded or knows fewer tokens than the tokenizer.
    """
    name = args.critic_model_name_or_path
    if name is None:
        return model.base_model
    critic = load_model(args, None, name, CRITIC, AutoModel)
    known = critic.config.get_text_config().vocab_size
    if known < len(tokenizer):
        raise UserError(f"{CRITIC} {name} knows {known} tokens, --model's tokenizer has {len(tokenizer)}")
    return critic


def save_agents(folder, agents, tokenizer):
    """Write each agent's `actor` as a Hugging Face folder agent_<i>, its `value_head` and `critic` (if any) beside it.

    A folder is whole or not there: it is written aside, then renamed.
    """
    for i, agent in enumerate(agents):
        final = Path(folder) / f"agent_{i}"
        aside = final.with_name(final.name + ".writing")
        shutil.rmtree(aside, ignore_errors=True)
        agent.actor.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        save_file(dict(agent.value_head.state_dict()), aside / "value_head.safetensors")
        if agent.critic is not None:
            agent.critic.save_pretrained(aside / "critic")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
