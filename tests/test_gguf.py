"""A GGUF file is a model: what is read of it, what its runs leave, and what is refused. Files are written here."""

import copy
import json
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import TINY, build_model, read_metrics
from short_runs import FLAGS, SCRIPTS, make_task, reward_length, small_model
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import ippo_llm
from utils import merge_adapter, models
from utils.cli import UserError, command_line
from utils.models import policy
from utils.models.loading import check_model, load_critic_tokenizer, load_model, load_tokenizer
from utils.models.transcripts import closing_token

gguf = pytest.importorskip("gguf")

every_script = pytest.mark.parametrize("script", SCRIPTS)
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network is asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


# --- Files ------------------------------------------------------------------------------------------------------------


def names_of(num_layers):
    """What the tensors of a Llama are called in a GGUF: {transformers' name: its name}."""
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    parts |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {"self_attn.o_proj": "attn_output"}
    parts |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    for k in range(num_layers):
        names |= {f"model.layers.{k}.{old}": f"blk.{k}.{new}" for old, new in parts.items()}
    return {f"{old}.weight": f"{new}.weight" for old, new in names.items()}


def write(path, model, tokenizer, architecture="llama", pre="gpt-2", kind="F32", without=(), **more):
    """Write a Llama and a tokenizer of byte-level BPE as a GGUF; matrices in the data type `kind`."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if k in tokenizer.added_tokens_decoder else 1 for k in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for key, value in more.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key.replace("__", "."), value)
    for name, new_name in names_of(config.num_hidden_layers).items():
        x = model.state_dict()[name].numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # pairs of a rotation are neighbours in a GGUF
            heads = len(x) // config.head_dim
            x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape).copy()
        if new_name in without:
            continue
        if kind == "F32" or x.ndim == 1:
            writer.add_tensor(new_name, x)
        else:
            data_type = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(new_name, gguf.quants.quantize(x, data_type), raw_dtype=data_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture(scope="module")
def tokenizer():
    """The embedded one, which splits texts as GPT-2 does."""
    own = AutoTokenizer.from_pretrained(TINY)
    own.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return own


@pytest.fixture(scope="module")
def model(tokenizer):
    """A small Llama with a key for two queries, whose settings float32 holds, as a GGUF has them."""
    settings = {"rms_norm_eps": 2.0**-20, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": None}
    return build_model(tokenizer, **settings).eval()


@pytest.fixture(scope="module")
def file(model, tokenizer, tmp_path_factory):
    return write(tmp_path_factory.mktemp("file") / "small.gguf", model, tokenizer)


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    """The same model as an ordinary folder."""
    path = tmp_path_factory.mktemp("folder")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


# --- What is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_weights_are_those_of_the_model(file, model, dtype):
    read = load_model(file, "--model", dtype)
    wanted = {name: x.to(getattr(torch, dtype)) for name, x in model.state_dict().items()}
    torch.testing.assert_close(read.state_dict(), wanted, atol=0, rtol=0)
    assert not hasattr(read.config, "quantization_config") and not read.is_quantized
    ids = torch.arange(20).view(1, -1)
    if dtype == "float32":
        torch.testing.assert_close(read(ids).logits, model(ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("kind, largest", [("F16", 1e-3), ("Q8_0", 1e-2), ("Q4_1", 0.1)])
def test_weights_of_fewer_bits_come_back_rounded(model, tokenizer, kind, largest, tmp_path):
    read = load_model(write(tmp_path / "small.gguf", model, tokenizer, kind=kind), "--model")
    for name, x in read.state_dict().items():
        wanted = model.state_dict()[name]
        error = (x - wanted).abs().max() / wanted.abs().max()
        assert x.dtype == torch.float32 and error < largest and (error > 0 or x.dim() == 1)


def bpe(piece, ranks):
    """Merge the bytes of a piece, in GPT-2's letters for them, pair by pair, the earliest merge first."""
    letters = {0x20: "Ġ", 0x0A: "Ċ"}
    parts = [letters.get(byte, chr(byte)) for byte in piece.encode()]
    while pairs := [pair for pair in zip(parts, parts[1:]) if pair in ranks]:
        first = min(pairs, key=ranks.get)
        merged = []
        for part in parts:
            if merged and (merged[-1], part) == first:
                merged[-1] += part
            else:
                merged.append(part)
        parts = merged
    return parts


TEXT = "in  2024, it's\n\n xyz"
PIECES = {  # by hand
    "gpt-2": ["in", " ", " 2024", ",", " it", "'s", "\n\n", " xyz"],
    "smollm": ["in", "  ", "2", "0", "2", "4", ",", " it", "'s", "\n\n", " xyz"],
    "qwen2": ["in", " ", " ", "2", "0", "2", "4", ",", " it", "'s", "\n\n", " xyz"],
    "llama-bpe": ["in", " ", " ", "202", "4", ",", " it", "'s", "\n\n", " xyz"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_a_text_is_split_as_the_file_says_and_its_bytes_are_merged(pre, model, tokenizer, tmp_path):
    path = write(tmp_path / "small.gguf", model, tokenizer, pre=pre)
    field = lambda key: gguf.GGUFReader(path).get_field(f"tokenizer.ggml.{key}").contents()  # noqa: E731
    numbers = {token: k for k, token in enumerate(field("tokens"))}
    ranks = {tuple(merge.split(" ")): k for k, merge in enumerate(field("merges"))}
    read = load_tokenizer(path, "--model")
    ids = read(TEXT).input_ids
    assert ids == [numbers[part] for piece in PIECES[pre] for part in bpe(piece, ranks)]
    assert read.decode(ids) == TEXT
    read.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved(TEXT).input_ids == ids and saved.eos_token_id == tokenizer.eos_token_id


def test_the_tokenizer_is_that_of_the_folder(file, tokenizer):
    read = load_tokenizer(file, "--model")
    assert read.get_vocab() == tokenizer.get_vocab() and read.chat_template == tokenizer.chat_template
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(read, name) == getattr(tokenizer, name)
    for text in (Path("README.md").read_text(), "<|user|>Hi<|end|> <|nothing|> é 語"):
        assert read(text).input_ids == tokenizer(text).input_ids
    ids = read.apply_chat_template(CHAT)["input_ids"]
    assert ids == tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert read.decode(ids, skip_special_tokens=True) == "HiHello."


def test_the_first_token_stands_where_the_file_says(model, tokenizer, tmp_path):
    first = {"tokenizer__ggml__bos_token_id": 4}
    for k, adds in enumerate((True, False)):
        more = first | {"tokenizer__ggml__add_bos_token": adds}
        read = load_tokenizer(write(tmp_path / f"{k}.gguf", model, tokenizer, **more), "--model")
        assert read.bos_token_id == 4 and read("Hi").input_ids == [4] * adds + tokenizer("Hi").input_ids


def test_a_way_to_split_that_is_not_known_is_said(model, tokenizer, tmp_path, capsys):
    read = load_tokenizer(write(tmp_path / "small.gguf", model, tokenizer, pre="other"), "--model")
    assert "splits texts in a way that is not known here, other: they are split as for GPT-2" in capsys.readouterr().out
    assert read(TEXT).input_ids == tokenizer(TEXT).input_ids


def test_a_vocabulary_of_sentencepiece_is_read_by_transformers_with_the_special_tokens_of_the_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "words.gguf", "llama")
    words = ["▁", "h", "i", "t", "hi", "▁hi"]
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(1)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 260 + [-1.0 - k for k in range(4)] + [-0.5, -0.1])
    writer.add_token_types([2, 3, 3, 3] + [6] * 256 + [1] * len(words))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read = load_tokenizer(str(tmp_path / "words.gguf"), "--model")
    assert (read.bos_token, read.eos_token, read.pad_token, read.unk_token) == ("<s>", "<|end|>", "<|end|>", "<unk>")
    ids = read("hi hi<|end|>", add_special_tokens=False).input_ids
    assert read.convert_ids_to_tokens(ids) == ["▁hi", "▁hi", "<|end|>"]
    assert read.decode(ids, skip_special_tokens=True) == "hi hi"


def test_a_folder_with_one_file_is_the_model_too(file, model, tmp_path):
    shutil.copy(file, tmp_path)
    config = check_model(str(tmp_path), "--model", False, {"max_position_embeddings": 99}, "--model-config")
    assert config.hidden_size == model.config.hidden_size and config.max_position_embeddings == 99
    assert load_tokenizer(str(tmp_path), "--model").eos_token == "<|end|>"
    assert load_model(str(tmp_path), "--model").config.vocab_size == model.config.vocab_size


# --- Runs -------------------------------------------------------------------------------------------------------------


def train(script, name, output_dir, **flags):
    args = SCRIPTS[script].Args(**(FLAGS[script] | {"model": (name,), "output_dir": str(output_dir)} | flags))
    return SCRIPTS[script].main(args, make_task(reward_length))


@every_script
def test_a_run_is_that_of_the_folder_and_leaves_ordinary_folders(script, file, folder, tmp_path):
    agents, _ = train(script, file, tmp_path / "run", lora_rank=0)
    train(script, folder, tmp_path / "other", lora_rank=0)
    rows, others = (
        [{key: x for key, x in row.items() if "time" not in key and "per_second" not in key} for row in all]
        for all in map(read_metrics, (tmp_path / "run", tmp_path / "other"))
    )
    assert rows == others and len(rows) == 3
    saved = tmp_path / "run" / "agent_0"
    opened = AutoModelForCausalLM.from_pretrained(saved).eval()
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    args = SCRIPTS[script].Args(max_new_tokens=9, do_sample=False)
    ids = models.encode(CHAT[:1], [], agents[0])
    (answer,) = SCRIPTS[script].generate(agents[0], [ids], args, None)
    out = opened.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False)
    assert out[0, len(ids) :].tolist() == answer
    assert (
        AutoTokenizer.from_pretrained(saved).apply_chat_template(CHAT[:1], add_generation_prompt=True)["input_ids"]
        == ids
    )


def test_a_critic_starts_from_one_and_reads_with_its_tokenizer(file, tokenizer, tmp_path):
    flags = {"use_separate_critic": True, "critic_model_name_or_path": (file,)}
    agents, _ = train("ippo", file, tmp_path / "run", actor_learning_rate=0.0, critic_learning_rate=0.0, **flags)
    critic, actor = agents[0].critic.model.state_dict(), agents[0].actor.model.base_model.state_dict()
    torch.testing.assert_close(critic, actor, atol=0, rtol=0)
    args = ippo_llm.Args(**flags)
    assert load_critic_tokenizer(None, file, args).get_vocab() == tokenizer.get_vocab()
    (agents, _) = train("maac", file, tmp_path / "team", critic_model_name_or_path=(file,))
    assert (tmp_path / "team" / "critic" / "config.json").is_file()


def test_adapters_on_one_are_merged_into_an_ordinary_folder(file, model, tmp_path):
    train("ppo", file, tmp_path / "run", save_base=True)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "base")
    torch.testing.assert_close(base.state_dict(), model.state_dict(), atol=0, rtol=0)
    merge_adapter.main(merge_adapter.Args(agent=str(tmp_path / "run" / "agent_0"), out=str(tmp_path / "merged")))
    assert AutoConfig.from_pretrained(tmp_path / "merged").model_type == "llama"
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def test_a_run_of_one_is_resumed(file, tmp_path):
    train("ippo", file, tmp_path / "run", pause_at=2, lora_rank=0)
    args = ippo_llm.Args(**(FLAGS["ippo"] | {"model": (file,), "resume": str(tmp_path / "run")}))
    _, run = ippo_llm.main(args, make_task(reward_length))
    assert run.step == 3


# --- What ends an answer ----------------------------------------------------------------------------------------------

CHATML = "{% for m in messages %}<|user|>{{ m['role'] }}\n{{ m['content'] }}CLOSE{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
TEMPLATES = {
    "closed": (CHATML.replace("CLOSE", "<|end|>\n"), "<|end|>"),
    "after a space": (CHATML.replace("CLOSE", " <|end|>"), "<|end|>"),
    "open": (CHATML.replace("CLOSE", "\n"), None),
    "words": (CHATML.replace("CLOSE", "\nThat is all.<|end|>"), None),
    "next turn": ("{% for m in messages %}{{ m['content'] }}<|user|>{% endfor %}", "<|user|>"),
    "opens anew": (CHATML.replace("CLOSE", "<|user|>"), None),
    "refuses": ("{{ raise_exception('no') }}", None),
    "none": (None, None),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_the_token_that_closes_an_answer(case, tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template, token = TEMPLATES[case]
    assert closing_token(own) == (token and own.convert_tokens_to_ids(token))


def test_an_answer_ends_where_the_template_closes_it_also_in_what_is_saved(tmp_path, capsys):
    model, own = copy.deepcopy(small_model())
    own.eos_token = "<|user|>"  # not what closes an answer
    model.generation_config.eos_token_id = own.eos_token_id
    model.save_pretrained(tmp_path / "model")
    own.save_pretrained(tmp_path / "model")
    agents, _ = train("ippo", str(tmp_path / "model"), tmp_path / "run")
    ends = sorted([own.eos_token_id, own.convert_tokens_to_ids("<|end|>")])
    assert agents[0].end_ids.tolist() == agents[1].end_ids.tolist() == ends
    said = "its chat template ends an answer with <|end|>, which is not among its end tokens, <|user|>"
    assert capsys.readouterr().out.count(said) == 1
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "agent_0")
    assert saved.generation_config.eos_token_id == ends


# --- The learning rate ------------------------------------------------------------------------------------------------


@every_script
@pytest.mark.parametrize(
    "flags, size, is_said",
    [
        ({}, 1e8, True),
        ({"actor_learning_rate": 1e-5}, 1e8, False),
        ({}, 0.9e8, False),
        ({"lora_rank": 4, "actor_learning_rate": 3e-3}, 1e8, True),
        ({"lora_rank": 4, "actor_learning_rate": 5e-4}, 1e8, False),
    ],
    ids=["large", "low", "small", "adapters", "adapters low"],
)
def test_a_large_model_with_a_small_ones_learning_rate_is_said_once(
    script, flags, size, is_said, file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(PreTrainedModel, "num_parameters", lambda _: int(size))
    train(script, file, tmp_path / "run", **{"lora_rank": 0} | flags)
    output = capsys.readouterr().out
    assert output.count("weights of actors learn at --actor-learning-rate") == (is_said and "lora_rank" not in flags)
    assert output.count("adapters on 100 million weights learn at") == (is_said and "lora_rank" in flags)


@pytest.mark.parametrize(
    "kind, rate, dtype, size, message",
    [
        (
            "critic",
            1e-3,
            torch.float32,
            10**8,
            "all 100 million weights of critics learn at --critic-learning-rate ",
        ),
        ("critic", 1e-4, torch.float32, 10**8, None),
        ("critic", 1e-3, torch.float32, 10**7, None),
        ("actor", 1e-5, torch.bfloat16, 10**3, "actors learn at --actor-learning-rate 1e-05 in bfloat16, which rounds"),
        ("actor", 1e-4, torch.bfloat16, 10**3, None),
        ("critic", 0.0, torch.bfloat16, 10**3, None),
        ("actor", 1e-5, torch.float32, 10**8, None),
    ],
)
def test_a_rate_is_told_that_ruins_a_critic_or_is_lost_in_bfloat16(kind, rate, dtype, size, message, capsys):
    base = SimpleNamespace(dtype=dtype, num_parameters=lambda: size)
    agent = SimpleNamespace(**{kind: SimpleNamespace(adapter=None, base=base)})  # the other is None, or not there
    args = SimpleNamespace(actor_learning_rate=rate, critic_learning_rate=rate)
    policy.warn_of_learning_rate([agent], args)
    output = capsys.readouterr().out
    assert output.startswith(message) and output.count("\n") == 1 if message else output == ""


# --- Refused ----------------------------------------------------------------------------------------------------------


def damaged(name, change):
    def make(path, file):
        content = Path(file).read_bytes()
        (path / name).write_bytes(change(content))
        return path / name

    return make


def two(path, _):
    (path / "a.gguf").touch()
    (path / "b.gguf").touch()
    return path


def other(**options):
    return lambda path, _: write(path / "other.gguf", *small_model(), **options)


REFUSED = {
    "cut off": (damaged("x.gguf", lambda content: content[:-100]), "x.gguf was cut off: it has [0-9]+ of its [0-9]+ b"),
    "cut early": (damaged("x.gguf", lambda content: content[:999]), "x.gguf is no whole GGUF file: "),
    "magic alone": (damaged("x.gguf", lambda _: b"GGUF"), "x.gguf is no whole GGUF file: "),
    "no GGUF": (
        damaged("x.gguf", lambda _: b"PK\3\4 a model"),
        "x.gguf is no GGUF file: it takes one, a model's folde",
    ),
    "empty": (damaged("x.gguf", lambda _: b""), "x.gguf is no GGUF file"),
    "a text": (damaged("x.txt", lambda _: b"a model"), "x.txt is no GGUF file"),
    "two": (two, "holds 2 GGUF files: name one of them, a.gguf, b.gguf$"),
    "missing": (lambda path, _: path / "x.gguf", ": there is no file .*x.gguf$"),
    "architecture": (other(architecture="grok"), "can't be loaded: GGUF model with architecture grok is not supported"),
    "vision": (other(architecture="clip"), r"is the vision part of a model \(mmproj\): it takes the GGUF of the langu"),
    "adapter": (other(general__type="adapter"), "is a GGUF of the type adapter: it takes a model$"),
    "a part": (other(split__count=3), r"is one of 3 parts of a model: join them \(llama-gguf-split --merge\)$"),
    "weights": (other(without=["blk.0.ffn_norm.weight"]), "it has no weights for .*layers.0.post_attention_layernorm"),
}


@pytest.mark.parametrize("flag", ["model", "critic_model_name_or_path"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_such_model_is_one_line_before_anything_is_written(case, flag, file, tmp_path):
    make, message = REFUSED[case]
    flags = {flag: (str(make(tmp_path, file)),), "use_separate_critic": flag != "model"}
    with pytest.raises(UserError, match=message) as error:
        train("ippo", file, tmp_path / "run", **flags)
    text = str(error.value)
    assert text.startswith(f"--{flag.replace('_', '-')}") and "\n" not in text and error.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_without_the_package_the_command_that_installs_it_is_named(file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(UserError, match="small.gguf takes a package that .*: pip install -r requirements-gguf.txt$"):
        check_model(file, "--model", False)


def test_a_quantization_is_not_put_on_top(file):
    settings = {"quantization_config": {"load_in_4bit": True}}
    with pytest.raises(UserError, match="^--model-config quantization_config: a GGUF takes none"):
        check_model(file, "--model", False, settings, "--model-config")


def test_a_command_ends_with_one_line_and_code_2(tmp_path, monkeypatch, capfd):
    (tmp_path / "x.gguf").write_bytes(b"no")
    flags = ["--model", str(tmp_path / "x.gguf"), "--output-dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["ippo_llm.py", *flags])
    with pytest.raises(SystemExit) as stop:
        command_line(ippo_llm.main, ippo_llm.Args, ippo_llm.__doc__)
    error = capfd.readouterr().err
    assert stop.value.code == 2 and error.startswith("ippo_llm.py: error: --model ")
    assert len(error.splitlines()) == 1 and [*tmp_path.iterdir()] == [tmp_path / "x.gguf"]
