"""Models and tokenizers in: ordinary Hugging Face folders or hub names, safetensors and JSON only."""

import contextlib
import copy
import re
from dataclasses import field
from pathlib import Path
from typing import ClassVar, Literal

import huggingface_hub
import torch
import transformers
from pydantic import PositiveInt
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from utils import causal_lm
from utils.cli import Settings, UserError, flag_name, flags, needs, not_with, one_line, write_settings
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


UNNAMED = "a loaded model"


def name_of(args, model):
    """The --model of a run: where a loaded `model` is from, else what the flags, if they are given, name for it."""
    if model is None:
        return args.model
    named = args.model if args.model != type(args)().model else UNNAMED
    return getattr(model, "name_or_path", "") or named


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
    if name == UNNAMED:
        raise UserError(f"{flag}: the run's model was loaded in Python, and has no name: it is to be given (model=)")
    settings = settings or {}
    name = locate(name)
    if Path(name).exists():
        if not (Path(name) / settings.get("subfolder", "") / "config.json").is_file():
            raise UserError(f"{flag} takes a model's folder or a hub name, and {name} has no config.json")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise UserError(f"{flag} takes a model's folder or a hub name, and there is no folder {name}")
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
    causal_lm.register_attention()
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


def load_model(
    name,
    flag,
    dtype="float32",
    attn_implementation="sdpa",
    trust_remote_code=False,
    settings=None,
    auto_class=AutoModelForCausalLM,
):
    """A model of a folder or of the hub, frozen and in eval mode. Raises UserError."""
    with loading(flag, name) as path:
        model = from_pretrained(
            auto_class,
            path,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            **(settings or {}),
        )
    return model.eval().requires_grad_(False)


def load_tokenizer(name, flag, trust_remote_code=False, settings=None):
    """A model's tokenizer, with a padding token. Raises UserError."""
    with loading(flag, name) as path:
        options = place(settings or {})
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    return add_padding(tokenizer, flag)


def add_padding(tokenizer, flag):
    """A tokenizer, with its end token for padding where it has none. Raises UserError where it has neither."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise UserError(f"{flag}: its tokenizer has no padding and no end token: set eos_token, and save it again")
    return tokenizer


# --- A team's models --------------------------------------------------------------------------------------------------


@flags
class LoadingArgs:
    """How models are loaded, and computed."""

    model_config: Settings = field(default_factory=dict)  # settings that actors are loaded with, JSON values by name
    dtype: Literal["float32", "bfloat16"] = "float32"  # data type of the models' weights
    mixed_precision: Literal["no", "bf16"] = "no"  # autocast to this type in the forward pass, not attention on a CPU
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"  # attention kernel
    trust_remote_code: bool = False  # run code that comes with a hub model
    # sample with a cache of fixed size: on a GPU a token's step is captured once, and replayed (a CUDA graph)
    static_cache: bool = not_with("use_vllm", "shard", default=False)
    shard: bool = False  # let each of several processes hold a part of every model, in place of whole ones (FSDP)


@flags
class CriticArgs:
    """The critics: value heads on the actors, or models of their own."""

    use_separate_critic: bool = False  # give each agent a critic model of its own, instead of a value head on its actor
    # what separate critics start from, one or one each; none: --model
    critic_model_name_or_path: tuple[str, ...] = needs("use_separate_critic", default=())
    # settings that critics of that name are loaded with
    critic_model_config: Settings = needs("critic_model_name_or_path", default=dict)
    # hidden units of a separate critic's head; none: linear
    critic_value_head_hidden_dim: PositiveInt | None = needs("use_separate_critic")
    # hidden units of the value head on an actor; none: linear
    value_head_hidden_dim: PositiveInt | None = not_with("use_separate_critic")


@flags
class CentralCriticArgs:
    """The team's critic, a model of its own."""

    use_separate_critic: ClassVar = True
    value_head_hidden_dim: ClassVar = None
    # what the critic starts from, and reads with; none: the model of agent 0
    critic_model_name_or_path: str | None = None
    # settings that a critic of that name is loaded with
    critic_model_config: Settings = needs("critic_model_name_or_path", default=dict)
    critic_value_head_hidden_dim: PositiveInt | None = None  # hidden units of the critic's head; none: linear


def check_models(names_flag, settings_flag, args, model=None, quantized=False):
    """The configuration of each agent's model, of the names and settings in these flags; nothing is loaded.

    `model` stands in for what the flag names. Raises UserError for a model that is not to be had, and for quantized
    weights, where these are not taken.
    """
    settings = getattr(args, settings_flag)
    if model is not None and settings:
        raise UserError(f"{flag_name(settings_flag)} has no effect on a model that is loaded")
    configs = []
    for name in per_agent(flag_name(names_flag), getattr(args, names_flag), args.num_agents):
        if model is None:
            flag = flag_name(names_flag)
            config = check_model(name, flag, args.trust_remote_code, settings, flag_name(settings_flag))
        else:
            config = model.config
        is_quantized = "quantization_config" in settings or hasattr(config, "quantization_config")
        if is_quantized and not quantized:
            reason = "quantized weights can't learn; ppo_llm.py takes them, under adapters"
            raise UserError(f"{flag_name(names_flag)} {name}: {reason}")
        for flag in ("shard", "use_vllm"):
            if is_quantized and getattr(args, flag):
                raise UserError(f"{flag_name(flag)} takes a base that is not quantized")
        configs.append(config)
    return configs


def load_models(names_flag, settings_flag, args, device, model=None):
    """The model of each agent, frozen and in eval mode, as the flags name them; one of a name is one for all.

    `model` stands in for what the flag names: it is copied. Raises UserError.
    """
    models = {}
    names = per_agent(flag_name(names_flag), getattr(args, names_flag), args.num_agents)
    for name in dict.fromkeys(names):
        if model is None:
            options = (args.dtype, args.attn_implementation, args.trust_remote_code, getattr(args, settings_flag))
            models[name] = load_model(name, flag_name(names_flag), *options)
        else:
            models[name] = copy.deepcopy(model).eval().requires_grad_(False)
        models[name].to(device)
        prepared = name if model is None else "the model"
        causal_lm.prepare(models[name], prepared, args.mixed_precision, args.static_cache)
    return [models[name] for name in names]


def load_tokenizers(args, tokenizer=None, model=None):
    """The tokenizer of each agent, with a padding token: by its --model, or by `model`, or copies of `tokenizer`.

    Raises UserError.
    """
    flag = flag_name("model")
    tokenizers = {}
    names = per_agent(flag, name_of(args, model), args.num_agents)
    if tokenizer is None and UNNAMED in names:
        raise UserError("model= is of no folder or hub name, from which to load its tokenizer: give tokenizer= too")
    for name in dict.fromkeys(names):
        if tokenizer is None:
            tokenizers[name] = load_tokenizer(name, flag, args.trust_remote_code, args.model_config)
        else:
            tokenizers[name] = add_padding(copy.deepcopy(tokenizer), flag)
    return [tokenizers[name] for name in names]


def check_critics(args, readers):
    """Raise UserError for a critic that is not to be had, or that can't read all that the actor reads and writes.

    `readers` has of each agent its tokenizer, and the limit of its prompts. A critic without a tokenizer of its own is
    taken to have the actor's.
    """
    if not args.critic_model_name_or_path:
        return
    flag = flag_name("critic_model_name_or_path")
    names = per_agent(flag, args.critic_model_name_or_path, args.num_agents)
    configs = check_models("critic_model_name_or_path", "critic_model_config", args)
    for name, config, (tokenizer, limit) in zip(names, configs, readers):
        room = getattr(config.get_text_config(), "max_position_embeddings", None)
        if room and (limit.tokens is None or limit.tokens + args.max_new_tokens > room):
            takes = f"{flag_name('max_prompt_length')} {room - args.max_new_tokens} or less"
            raise UserError(f"{flag} {name} has {room} positions, fewer than the actor reads: it takes {takes}")
        differing = []
        size = config.get_text_config().vocab_size
        if size < len(tokenizer):
            raise UserError(f"{flag} {name} knows {size} tokens, the actor's tokenizer has {len(tokenizer)}")
        with contextlib.suppress(Exception):  # it has none
            own = AutoTokenizer.from_pretrained(locate(name), trust_remote_code=args.trust_remote_code)
            words = own.get_vocab()
            differing = [word for word, k in tokenizer.get_vocab().items() if words.get(word) != k]
        if differing:
            of = f"{len(differing)} of the actor's {len(tokenizer)} tokens, such as {one_line(differing[0], 20)!r}"
            raise UserError(f"{flag} {name} has another tokenizer: it reads {of}, as others")


def check_critic(args):
    """Raise UserError for a central critic that is not to be had; nothing but its tokenizer is loaded."""
    if args.critic_model_name_or_path:
        check_models("critic_model_name_or_path", "critic_model_config", args)
        load_critic_tokenizer(None, args)


def load_critic_tokenizer(tokenizer, args):
    """What a central critic reads with: its own, or the `tokenizer` of agent 0. Raises UserError."""
    name = args.critic_model_name_or_path
    if not name:
        return tokenizer
    flag = flag_name("critic_model_name_or_path")
    return load_tokenizer(name, flag, args.trust_remote_code, args.critic_model_config)


def load_critic(i, reference, args):
    """The critic model of agent i, which learns, or None, where the critic is a head on the actor. Raises UserError.

    It starts from the model that --critic-model-name-or-path names, or as a copy of the body of `reference`.
    """
    if not args.use_separate_critic:
        return None
    if not args.critic_model_name_or_path:
        return copy.deepcopy(reference.base_model).requires_grad_(True)
    flag = flag_name("critic_model_name_or_path")
    name = per_agent(flag, args.critic_model_name_or_path, args.num_agents)[i]
    options = (args.dtype, args.attn_implementation, args.trust_remote_code, args.critic_model_config)
    critic = load_model(name, flag, *options, AutoModel).to(reference.device)
    causal_lm.prepare(critic, name, args.mixed_precision)
    return critic.requires_grad_(True)


class ValueHead(nn.Sequential):
    """Hidden states [..., D] of a model to values [...], in float32, which begin at 0.

    Linear, or through one hidden layer where a flag gives its width.
    """

    def __init__(self, model, args):
        width = model.config.get_text_config().hidden_size
        hidden_dim = args.critic_value_head_hidden_dim or args.value_head_hidden_dim
        layers = []
        if hidden_dim:
            layers = [nn.Linear(width, hidden_dim), nn.Tanh()]
            width = hidden_dim
        last = nn.Linear(width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        super().__init__(*layers, last)
        self.to(model.device)

    def forward(self, hidden_states):
        with torch.autocast(hidden_states.device.type, enabled=False):
            return super().forward(hidden_states.float()).squeeze(-1)
