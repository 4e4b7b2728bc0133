"""Models and tokenizers in: ordinary Hugging Face folders or hub names, safetensors and JSON only."""

import contextlib
from pathlib import Path

import huggingface_hub
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from utils.cli import UserError, flag_name, one_line, write_settings
from utils.distributed import say


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


PLACE = ("revision", "subfolder", "cache_dir", "local_files_only")  # settings that say where a model and tokenizer are
LOADING = (*PLACE, "variant", "quantization_config")  # settings of from_pretrained, beside those of a configuration
FLAGS = ("dtype", "attn_implementation", "trust_remote_code")  # settings that are flags


def place(settings):
    """Those settings that say where a model, and its tokenizer, are to be had."""
    return {key: value for key, value in settings.items() if key in PLACE}


def check_model(name, flag, trust_remote_code, settings=None, settings_flag=None):
    """A model's configuration, with the user's settings.

    Raises UserError unless it is a folder, was downloaded before, or is in reach, and for settings that it lacks.
    """
    settings = settings or {}
    name = locate(name)
    if Path(name).exists():
        if not (Path(name) / settings.get("subfolder", "") / "config.json").is_file():
            raise UserError(f"{flag} takes a model's folder or a hub name, and {name} has no config.json")
    else:
        try:
            if not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
                huggingface_hub.HfApi().model_info(name, timeout=10)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            message = f"{flag} takes a model's folder or a hub name; {name} is no folder and can't be reached"
            raise UserError(f"{message}: {reason}") from error
    with loading(flag, name) as path:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **place(settings))
    for key in settings:
        if key in FLAGS:
            raise UserError(f"{settings_flag} {key}: it is a flag of its own, {flag_name(key)}")
        if key not in LOADING and not hasattr(config, key):
            takes = f"what the configuration of {name} has, or {', '.join(LOADING)}"
            raise UserError(f"{settings_flag} takes {takes}, got {key}")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **settings)
    except Exception as error:
        raise UserError(f"{settings_flag} {' '.join(write_settings(settings))}: {one_line(error)}") from error


@contextlib.contextmanager
def loading(flag, name):
    """Within it, an error becomes a UserError that names the flag; gives the path. No progress bars are shown."""
    transformers.utils.logging.disable_progress_bar()
    try:
        yield locate(name)
    except Exception as error:
        raise UserError(f"{flag} {name} can't be loaded: {one_line(error, 1000)}") from error


def from_pretrained(auto_class, path, *, attn_implementation, **options):
    """The model of a folder or of the hub, from safetensors only, in eval mode.

    A model without the attention that is asked for comes with the one that it has, and that is said.
    """
    try:
        return auto_class.from_pretrained(
            path, attn_implementation=attn_implementation, use_safetensors=True, **options
        )
    except ValueError as error:
        if "does not support" not in str(error) or "ttention" not in str(error):
            raise
    model = auto_class.from_pretrained(path, use_safetensors=True, **options)
    its_own = model.config._attn_implementation
    say(f"{path} has no {attn_implementation} attention: it is loaded with {its_own}")
    return model


def load_model(name, flag, dtype="float32", attn_implementation="sdpa", trust_remote_code=False, settings=None):
    """The causal language model of a folder or of the hub, in eval mode. Raises UserError."""
    with loading(flag, name) as path:
        model = from_pretrained(
            AutoModelForCausalLM,
            path,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            **(settings or {}),
        )
    return model.eval().requires_grad_(False)


def load_tokenizer(name, flag, trust_remote_code=False, settings=None):
    """A model's tokenizer, with a pad token. Raises UserError."""
    try:
        options = place(settings or {})
        tokenizer = AutoTokenizer.from_pretrained(locate(name), trust_remote_code=trust_remote_code, **options)
    except Exception as error:
        raise UserError(f"{flag} {name} has no tokenizer that can be loaded: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
