"""Models and tokenizers in: ordinary Hugging Face folders or hub names, safetensors and JSON only, or GGUF files."""

import contextlib
import copy
import os
import re
import tempfile
from pathlib import Path

import accelerate
import huggingface_hub
import torch
import transformers
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from utils.cli import UserError, flag_name, one_line, write_settings
from utils.distributed import say
from utils.files import disk_errors
from utils.models import causal_lm, gguf


def locate(name):
    """A model's folder, seen from here or from the scripts' own folder; or the hub name, as it is."""
    beside = Path(__file__).resolve().parents[2] / name
    return str(beside) if not os.path.exists(name) and os.path.exists(beside) else name


def source(name, flag):
    """What from_pretrained takes for a model: its folder or hub name, and options, which name the file of a GGUF."""
    path = locate(name)
    file = gguf.find(path, flag)
    return (path, {}) if file is None else (str(file.parent), {"gguf_file": file.name})


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
    for key in ("revision", "subfolder", "cache_dir", "variant"):
        if not isinstance(settings.get(key, ""), str):
            raise UserError(f"{settings_flag} {key} takes a text, got {settings[key]!r}")
    name = locate(name)
    file = gguf.find(name, flag)
    if file is not None:
        gguf.check(file, flag)
        if "quantization_config" in settings:
            raise UserError(f"{settings_flag} quantization_config: a GGUF takes none, as its weights are dequantised")
    elif os.path.exists(name):
        folder = Path(name, settings.get("subfolder", ""))
        if os.path.isfile(folder / "adapter_config.json"):
            raise UserError(f"{flag} {name} {WITHOUT_ADAPTERS}")
        if not os.path.isfile(folder / "config.json"):
            raise UserError(f"{flag} takes a model's folder or a hub name, and {name} has no config.json")
    elif name.endswith(".gguf"):
        raise UserError(f"{flag}: there is no file {name}")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise UserError(f"{flag} takes a model's folder or a hub name, and there is no folder {name}")
    else:
        try:
            options = {key: settings[key] for key in ("cache_dir", "revision") if key in settings}
            config = os.path.join(settings.get("subfolder", ""), "config.json")
            is_here = isinstance(huggingface_hub.try_to_load_from_cache(name, config, **options), str)
            if not (is_here or settings.get("local_files_only")):
                huggingface_hub.HfApi().model_info(name, timeout=10)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            message = f"{flag} takes a model's folder or a hub name; {name} is no folder and can't be reached"
            raise UserError(f"{message}: {reason}") from error
    path, options = source(name, flag)
    options["trust_remote_code"] = trust_remote_code
    with loading(flag, name):
        config = AutoConfig.from_pretrained(path, **options, **place(settings))
    for key in settings:
        flag_of_its_own = key.removeprefix("torch_")  # an older name of dtype
        if flag_of_its_own in FLAGS:
            raise UserError(f"{settings_flag} {key}: it is a flag of its own, {flag_name(flag_of_its_own)}")
        if key not in LOADING and not hasattr(config, key):
            takes = f"what the configuration of {name} has, or {', '.join(LOADING)}"
            raise UserError(f"{settings_flag} takes {takes}, got {key}")
    if not settings:
        return config
    try:
        return AutoConfig.from_pretrained(path, **options, **settings)
    except Exception as error:
        raise UserError(f"{settings_flag} {' '.join(write_settings(settings))}: {one_line(error)}") from error


@contextlib.contextmanager
def without_bars():
    """Within it transformers shows no progress bars."""
    shows_bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bars:
            transformers.utils.logging.enable_progress_bar()


@contextlib.contextmanager
def loading(flag, name):
    """Within it, an error becomes a UserError that names the flag. No progress bars are shown."""
    try:
        with without_bars():
            yield
    except Exception as error:
        agent = os.path.join(name, "agent_0")
        if os.path.isdir(agent):
            raise UserError(f"{flag} {name} is a run; its agents are {agent} ...") from error
        raise UserError(f"{flag} {name} can't be loaded: {one_line(error, 1000)}") from error


WITHOUT_ADAPTERS = (
    "has adapters: it takes a model without, or into which they were merged (merge_and_unload); an adapter's own "
    "folder is what --load-checkpoint takes, with --lora-rank"
)


def check_whole(model, label):
    """Raise UserError for a model with adapters of peft: its weights would learn, and the adapters alone be saved."""
    if isinstance(model, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise UserError(f"{label} {WITHOUT_ADAPTERS}")


def check_given(model):
    """Raise UserError for a model from Python that is no whole language model of transformers."""
    if isinstance(model, nn.Module):
        check_whole(model, "model=")
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise UserError(f"model= takes a causal language model of transformers, got a {type(model).__name__}")


def from_pretrained(auto_class, path, *, attn_implementation, **options):
    """The model of a folder or of the hub, from safetensors only, or of a GGUF, in eval mode.

    A model without the attention that is asked for comes with the one that it has, and that is said. Raises ValueError
    for a GGUF without some of the weights, and whatever the libraries raise.
    """
    causal_lm.register_attention()
    options |= {"use_safetensors": True, "output_loading_info": True}
    try:
        model, info = auto_class.from_pretrained(path, attn_implementation=attn_implementation, **options)
    except ValueError as error:
        if "does not support" not in str(error) or "ttention" not in str(error):
            raise
        model, info = auto_class.from_pretrained(path, **options)
        say(f"{path} has no {attn_implementation} attention: it is loaded with {model.config._attn_implementation}")
    if "gguf_file" in options and info["missing_keys"]:
        raise ValueError(f"it has no weights for {', '.join(sorted(info['missing_keys']))}")
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
    """A model of a folder, of the hub or of a GGUF file, frozen and in eval mode. Raises UserError."""
    path, options = source(name, flag)
    if options:
        options["quantization_config"] = GgufConfig(dequantize=True)
    with loading(flag, name):
        model = from_pretrained(
            auto_class,
            path,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            **options,
            **(settings or {}),
        )
    check_whole(model, f"{flag} {name}")
    make_savable(model, f"{flag} {name}")
    return model.eval().requires_grad_(False)


def in_dtype(model, dtype):
    """A model from Python with its weights in a data type, as if it had been loaded with it; not quantized ones.

    What it computes from its configuration, such as rotary frequencies, is in float32 then too, and not rounded.
    """
    if is_quantized(model.config):
        return model
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    saved = model.state_dict().keys()
    rounded = {name for name, x in model.named_buffers() if x.dtype in (torch.float16, torch.bfloat16)}
    exact = {}
    if rounded - saved:
        with torch.random.fork_rng(devices=[]), accelerate.init_empty_weights(include_buffers=False):
            exact = dict(type(model)(copy.deepcopy(model.config)).named_buffers())
    for name in rounded:
        module, _, buffer = name.rpartition(".")
        x = model.get_buffer(name)
        setattr(model.get_submodule(module), buffer, x.float() if name in saved else exact[name].to(x.device))
    return model


def is_quantized(config):
    return getattr(config, "quantization_config", None) is not None


def make_savable(model, label):
    """Unset what transformers would refuse to save of how the model generates by itself, and say so.

    That is not used here, but for the end tokens. Raises UserError for anything else that can't be saved.
    """
    if is_quantized(model.config):
        return
    try:
        return try_to_save(model, state_dict={})
    except Exception as error:
        refused = re.findall(r"^- `(\w+)`", str(error), flags=re.MULTILINE)
    for name in refused:
        setattr(model.generation_config, name, None)
    try:
        try_to_save(model, state_dict={})
    except Exception as error:
        raise UserError(f"{label} could not be saved: {one_line(error)}") from error
    say(f"{label}: its generation_config goes without {', '.join(refused)}, which transformers would not save")


def try_to_save(thing, **options):
    """Write a tokenizer, or a model without its weights, to where it is removed at once; a full disk is no failure."""
    with contextlib.suppress(OSError), disk_errors(), without_bars(), tempfile.TemporaryDirectory() as folder:
        thing.save_pretrained(folder, **options)


OF_TOKENIZER = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")  # how the names of its files begin


class NoTokenizer(UserError):
    """A model has no tokenizer of its own."""


def load_tokenizer(name, flag, trust_remote_code=False, settings=None):
    """A model's tokenizer, with a padding token. Raises UserError."""
    return add_padding(find_tokenizer(name, flag, trust_remote_code, settings), flag)


def find_tokenizer(name, flag, trust_remote_code=False, settings=None):
    """A model's tokenizer as it is. Raises UserError, which is a NoTokenizer where there are no files of one."""
    try:
        with loading(flag, name):
            return read_tokenizer(name, flag, trust_remote_code, settings)
    except UserError as error:
        folder = Path(locate(name), (settings or {}).get("subfolder", ""))
        has_files = any(file.name.startswith(OF_TOKENIZER) or file.suffix == ".model" for file in folder.glob("*"))
        is_missing = "backend tokenizer" in str(error)  # transformers found no file of one, or can't read it
        if not is_missing and (has_files or not folder.is_dir()):
            raise
        kind = UserError if has_files else NoTokenizer
        raise kind(f"{flag} {name} has no tokenizer that can be read: save one there (save_pretrained)") from error


def read_tokenizer(name, flag, trust_remote_code=False, settings=None):
    """A model's tokenizer as it is. Raises whatever the libraries raise."""
    file = gguf.find(locate(name), flag)
    if file is not None:
        return gguf.load_tokenizer(file)
    options = place(settings or {})
    return AutoTokenizer.from_pretrained(locate(name), trust_remote_code=trust_remote_code, **options)


def add_padding(tokenizer, flag):
    """A tokenizer, with its end token for padding where it has none. Raises UserError where it has neither."""
    if not hasattr(tokenizer, "pad_token"):
        raise UserError(f"{flag}: tokenizer= takes a tokenizer of transformers, got {one_line(repr(tokenizer), 80)}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise UserError(f"{flag}: its tokenizer has no padding and no end token: set eos_token, and save it again")
    # Of texts that are too long transformers would say that they fail; here they are left out, or cut
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    say_what_is_hidden(tokenizer, flag)
    return tokenizer


def say_what_is_hidden(tokenizer, flag):
    """Say which ordinary words the tokenizer declares special, such as a full stop for padding: answers lack them."""
    for token in dict.fromkeys(tokenizer.all_special_tokens):
        is_mark = token == tokenizer.eos_token or token.strip()[:1] in ("<", "[", "{", "|")
        number = tokenizer.convert_tokens_to_ids(token)
        if not is_mark and not tokenizer.decode([number], skip_special_tokens=True):
            keeps = "--no-skip-special-tokens keeps it"
            say(f"{flag}: its tokenizer declares {token!r} special, so that answers as text lack it; {keeps}")


def num_learners(args):
    """How many agents learn: one in each seat, or with --self-play one in all seats."""
    return 1 if getattr(args, "self_play", False) else args.num_agents


# --- A team's models --------------------------------------------------------------------------------------------------


def check_models(names, names_flag, settings_flag, args, model=None, quantized=False):
    """The configuration of the model of each name, of which there are several, by these flags; nothing is loaded.

    `model` stands in for what the flag names. Raises UserError for a model that is not to be had, and for quantized
    weights, where these are not taken.
    """
    settings = getattr(args, settings_flag)
    if model is not None:
        check_given(model)
    if model is not None and settings:
        raise UserError(f"{flag_name(settings_flag)} has no effect on a model that is loaded")
    wanted = args.attn_implementation
    is_free = model is None or getattr(args, "critic_model_name_or_path", None)  # a critic is loaded with it
    if not is_free and wanted not in (type(args)().attn_implementation, model.config._attn_implementation):
        raise UserError(f"--attn-implementation {wanted} has no effect on a model that is loaded: load it with that")
    configs = []
    for name in names:
        if model is None:
            flag = flag_name(names_flag)
            config = check_model(name, flag, args.trust_remote_code, settings, flag_name(settings_flag))
        else:
            config = model.config
        has_few_bits = "quantization_config" in settings or is_quantized(config)
        if has_few_bits and not quantized:
            reason = "quantized weights can't learn; they are taken under adapters (--lora-rank)"
            raise UserError(f"{flag_name(names_flag)} {name}: {reason}")
        for flag in ("shard", "use_vllm"):
            if has_few_bits and getattr(args, flag):
                raise UserError(f"{flag_name(flag)} takes a base that is not quantized")
        configs.append(config)
    return configs


def load_frozen(name, args, device, model=None):
    """The model of a name, frozen and in eval mode, or a copy of `model`. Raises UserError."""
    if model is None:
        options = (args.dtype, args.attn_implementation, args.trust_remote_code, args.model_config)
        frozen = load_model(name, flag_name("model"), *options)
    else:
        frozen = in_dtype(copy.deepcopy(model).eval().requires_grad_(False), getattr(torch, args.dtype))
        make_savable(frozen, "model=")
    frozen.to(device)
    prepared = name if model is None else "the model"
    causal_lm.prepare(frozen, prepared, args.mixed_precision, args.static_cache)
    return frozen


def check_initial(initial, args):
    """Raise UserError where a model does not know its tokenizer's padding, or has no room for an answer.

    And where positions are to be counted otherwise than it can.
    """
    config = initial.config.get_text_config()
    is_rotary = any(hasattr(config, name) for name in ("rope_parameters", "rotary_dim"))
    if not (args.calc_position_embeddings or is_rotary):
        raise UserError(f"--no-calc-position-embeddings takes a model with rotary positions, not a {config.model_type}")
    size = getattr(config, "vocab_size", None)
    tokenizer = initial.tokenizer
    if size and tokenizer.pad_token_id >= size:
        pad = f"the tokenizer's padding token, {tokenizer.pad_token}, is number {tokenizer.pad_token_id}"
        mend = "set its pad_token to one of these, or resize the model's embeddings"
        raise UserError(f"{flag_name('model')}: {pad}, and the model knows {size} tokens: {mend}")
    prompt = args.max_prompt_length or 1
    if initial.longest_prompt < prompt:
        room = initial.longest_prompt + args.max_new_tokens
        own = getattr(config, "max_position_embeddings", None)
        where = f"{flag_name('max_model_len')} {room}" if args.max_model_len == room != own else None
        sizes = f"{flag_name('max_new_tokens')} {args.max_new_tokens} after a prompt of {prompt}"
        raise UserError(f"{sizes} exceeds {where or f'the positions of the model, {room}'}")
    say_where_positions_change(initial, config, args)


def say_where_positions_change(initial, config, args):
    """Say where a model of longrope counts positions otherwise, for all rows of a pass if one of them is long."""
    ropes = getattr(config, "rope_parameters", None) or {}
    has_limit = args.max_prompt_length and args.num_turns == 1
    longest = (args.max_prompt_length if has_limit else initial.longest_prompt) + args.max_new_tokens
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            most = rope.get("original_max_position_embeddings")
            if most and longest > most:
                what = f"what it computes depends on whether a transcript above {most} tokens is read in the same pass"
                say(f"{initial.source.name}: {what}; {flag_name('max_model_len')} {most} keeps them below")


def load_tokenizers(names, args, tokenizer=None):
    """The tokenizer of each agent, with a padding token: that of its model's name, or copies of `tokenizer`.

    Raises UserError.
    """
    flag = flag_name("model")
    tokenizers = {}
    if tokenizer is None and UNNAMED in names:
        raise UserError("model= is of no folder or hub name, from which to load its tokenizer: give tokenizer= too")
    for name in dict.fromkeys(names):
        if tokenizer is None:
            tokenizers[name] = load_tokenizer(name, flag, args.trust_remote_code, args.model_config)
        else:
            tokenizers[name] = add_padding(copy.deepcopy(tokenizer), flag)
        check_template_kwargs(tokenizers[name], name, args.chat_template_kwargs)
        tokenizers[name].template_date = args.template_date
        tokenizers[name].template_kwargs = args.chat_template_kwargs
        try:
            try_to_save(tokenizers[name])
        except Exception as error:
            label = f"{flag} {name}: its tokenizer" if tokenizer is None else "tokenizer="
            raise UserError(f"{label} could not be saved: {one_line(error)}") from error
    return [tokenizers[name] for name in names]


def check_template_kwargs(tokenizer, name, settings):
    """Raise UserError for a setting that the chat template does not read."""
    for key in settings:
        if key not in str(tokenizer.chat_template):
            raise UserError(f"{flag_name('chat_template_kwargs')} {key}: the chat template of {name} does not read it")


def check_critics(initials, args):
    """Raise UserError for a critic that is not to be had, or that can't read all that the actor reads and writes.

    A critic without a tokenizer of its own is taken to have the actor's.
    """
    if not getattr(args, "critic_model_name_or_path", ()):
        return
    flag = flag_name("critic_model_name_or_path")
    num_critics = num_learners(args) if hasattr(args, "use_separate_critic") else 1  # a team has one
    names = per_agent(flag, args.critic_model_name_or_path, num_critics)
    configs = check_models(names, "critic_model_name_or_path", "critic_model_config", args)
    for name, config, initial in zip(names, configs, initials):
        tokenizer = initial.tokenizer
        size = config.get_text_config().vocab_size
        if not hasattr(args, "use_separate_critic"):
            load_critic_tokenizer(tokenizer, name, args)
            continue
        if size < min(len(tokenizer), initial.config.get_text_config().vocab_size):
            raise UserError(f"{flag} {name} knows {size} tokens, the actor's tokenizer has {len(tokenizer)}")
        room = getattr(config.get_text_config(), "max_position_embeddings", None)
        if room and initial.longest_prompt + args.max_new_tokens > room:
            takes = f"{flag_name('max_model_len')} {room} or less"
            raise UserError(f"{flag} {name} has {room} positions, fewer than the actor reads: it takes {takes}")
        differing = []
        with contextlib.suppress(NoTokenizer):
            words = find_tokenizer(name, flag, args.trust_remote_code, args.critic_model_config).get_vocab()
            differing = [word for word, k in tokenizer.get_vocab().items() if words.get(word) != k]
        if differing:
            of = f"{len(differing)} of the actor's {len(tokenizer)} tokens, such as {one_line(differing[0], 20)!r}"
            raise UserError(f"{flag} {name} has another tokenizer: it reads {of}, as others")


def load_critic_tokenizer(tokenizer, name, args):
    """What a critic of that name reads with: its own, or, where it has none, the agent's `tokenizer`.

    Raises UserError where it has one that can't be read, or that has no token to pad with.
    """
    try:
        flag = flag_name("critic_model_name_or_path")
        return load_tokenizer(name, flag, args.trust_remote_code, args.critic_model_config)
    except NoTokenizer:
        return tokenizer


class ValueHead(nn.Sequential):
    """Hidden states [..., D] of a model to values [...], in float32, which begin at 0.

    Linear, or through one hidden layer where a flag gives its width.
    """

    def __init__(self, policy, args):
        config = policy.config.get_text_config()
        width = getattr(config, "word_embed_proj_dim", config.hidden_size)  # OPT's states may be of another width
        hidden_dim = args.critic_value_head_hidden_dim or getattr(args, "value_head_hidden_dim", None)
        layers = []
        if hidden_dim:
            layers = [nn.Linear(width, hidden_dim), nn.Tanh()]
            width = hidden_dim
        last = nn.Linear(width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        super().__init__(*layers, last)
        self.depth = len(self)  # a module that a script adds is saved and learns, and is not called here
        self.to(policy.device)

    def forward(self, hidden_states):
        with torch.autocast(hidden_states.device.type, enabled=False):
            x = hidden_states.float()
            for layer in [*self][: self.depth]:
                x = layer(x)
            return x.squeeze(-1)
