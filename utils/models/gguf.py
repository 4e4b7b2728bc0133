"""GGUF files in: found and checked, and their tokenizers; transformers reads configuration and weights."""

import importlib.util
import math
import os
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast, modeling_gguf_pytorch_utils
from transformers.integrations.gguf import read_gguf_metadata, reader
from transformers.utils import logging

from utils.cli import UserError, one_line
from utils.distributed import say

modeling_gguf_pytorch_utils.tqdm = logging.tqdm  # a bar that disable_progress_bar turns off

NEEDS = "takes a package that is not there: pip install -r requirements-gguf.txt"
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are found in a text before it is split

# How a text is split before its bytes are merged, by the name that a file has for it (tokenizer.ggml.pre)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS = (r"\p{N}", GPT2)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{letter}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = WORDS.format(letters=r"\p{L}", letter=r"\p{L}", digits=r"\p{N}")
QWEN35 = WORDS.format(letters=r"[\p{L}\p{M}]", letter=r"\p{L}\p{M}", digits=r"\p{N}")
LLAMA3 = WORDS.format(letters=r"\p{L}", letter=r"\p{L}", digits=r"\p{N}{1,3}")
SPLITS = (
    dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), (GPT2,))
    | dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS)
    | dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan"), (QWEN2,))
    | dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral"), (LLAMA3,))
    | dict.fromkeys(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), (LLAMA3,))
    | {"qwen35": (QWEN35,)}
)
WHOLE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral")  # a word of the vocabulary is not merged


def find(path, flag):
    """The GGUF file that a path is, or that stands alone in a folder without config.json; None: there is none.

    Raises UserError for a folder that holds several.
    """
    path = Path(path)
    if os.path.isfile(path):  # False too for what may not be read, or can be no name
        return path
    if not os.path.isdir(path) or os.path.exists(path / "config.json"):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = one_line(", ".join(file.name for file in files), 100)
        raise UserError(f"{flag} {path} holds {len(files)} GGUF files: name one of them, {names}")
    return files[0] if files else None


def check(file, flag):
    """Raise UserError for a file that is no whole GGUF of a language model, or without the package that reads it."""
    label = f"{flag} {file}"
    with open(file, "rb") as content:
        if content.read(4) != b"GGUF":
            raise UserError(f"{label} is no GGUF file: it takes one, a model's folder or a hub name")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{label} {NEEDS}")
    try:
        size, metadata = measure(file)
    except Exception as error:
        raise UserError(f"{label} is no whole GGUF file: {one_line(error)}") from error
    if metadata["general.architecture"] == "clip" or metadata.get("general.type") == "mmproj":
        raise UserError(f"{label} is the vision part of a model (mmproj): it takes the GGUF of the language model")
    if metadata.get("general.type", "model") != "model":
        raise UserError(f"{label} is a GGUF of the type {one_line(metadata['general.type'], 40)}: it takes a model")
    if metadata.get("split.count", 1) > 1:
        joined = "join them (llama-gguf-split --merge)"
        raise UserError(f"{label} is one of {metadata['split.count']} parts of a model: {joined}")
    if size > file.stat().st_size:
        raise UserError(f"{label} was cut off: it has {file.stat().st_size} of its {size} bytes")


def measure(file):
    """The bytes that a file is to have by its own table of tensors, and its metadata, {name: value}."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    content = reader._mapped(str(file))
    metadata, num_tensors, start = reader._read_metadata(content, str(file))
    tensors, size = reader._read_tensor_table(content, num_tensors, start)
    alignment = metadata.get("general.alignment", 32)
    start = -(-size // alignment) * alignment
    for _, shape, kind, offset in tensors:
        block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]  # of so many numbers
        size = max(size, start + offset + math.prod(shape) // block * num_bytes)
    return size, metadata


def load_tokenizer(file):
    """The tokenizer of a file, with the special tokens and the chat template that it names.

    Byte-level BPE, which most models have, is built here from vocabulary and merges, and splits a text as the file
    says; others are as transformers reads them.
    """
    metadata, _ = read_gguf_metadata(str(file), ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    if "tokens" not in own:
        raise ValueError("it has no vocabulary")
    options = {"chat_template": metadata.get("tokenizer.chat_template")}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = own.get(f"{key}_token_id")
        options[f"{name}_token"] = own["tokens"][number] if number is not None else None
    if own.get("model") == "gpt2":
        options["add_bos_token"] = own.get("add_bos_token", False) and options["bos_token"] is not None
        return PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe(own, file), **options)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    for name, value in options.items():
        setattr(tokenizer, name, value)
    return tokenizer


def byte_level_bpe(own, file):
    """A tokenizers.Tokenizer of the vocabulary, the merges and the way to split in a file's metadata."""
    vocabulary = {token: number for number, token in enumerate(own["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in own["merges"]]
    name = own.get("pre")
    if name not in SPLITS:
        say(f"{file} splits texts in a way that is not known here, {name}: they are split as for GPT-2")
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=name in WHOLE))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS.get(name, (GPT2,))]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = own.get("token_type", [])
    added = [(token, kind) for token, kind in zip(own["tokens"], kinds) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in added])
    return tokenizer
