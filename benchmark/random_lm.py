"""Write a random Qwen2 with a tokenizer of bytes, to measure speed and memory with.

python -m benchmark.random_lm small                                              0.9 million parameters
python -m benchmark.random_lm large --layers 8 --width 512 --vocabulary 8192     31 million

As wide and deep as Qwen2.5-0.5B, 494 million:

python -m benchmark.random_lm half --layers 24 --width 896 --inner 4864 --heads 14 --groups 2 --vocabulary 151936
"""

import argparse

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from utils.files import disk_errors

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_tokenizer():
    """A tokenizer whose 258 tokens are padding, the end, and the bytes."""
    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: k for k, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left", "chat_template": TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=2048, **special)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where it is written")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--inner", type=int, help="units between a layer's two products; none: three times the width")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--groups", type=int, help="heads of keys and values; none: as many")
    parser.add_argument("--vocabulary", type=int, default=258, help="tokens that the model knows, 258 or more")
    flags = parser.parse_args()
    groups = flags.groups or flags.heads
    if flags.vocabulary < 258 or flags.layers < 1 or flags.width < 4 or flags.width % 8:
        parser.error("--vocabulary takes 258 or more, --layers 1 or more, --width a multiple of 8")
    if min(flags.heads, groups) < 1 or flags.width % flags.heads or flags.heads % groups:
        parser.error("--heads takes a divisor of --width, --groups one of --heads")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": flags.vocabulary,
        "hidden_size": flags.width,
        "intermediate_size": flags.inner or 3 * flags.width,
    }
    sizes |= {"num_hidden_layers": flags.layers, "num_attention_heads": flags.heads, "num_key_value_heads": groups}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **ends, max_position_embeddings=2048, tie_word_embeddings=True))
    try:
        with disk_errors():
            model.save_pretrained(flags.folder)
            make_tokenizer().save_pretrained(flags.folder)
    except OSError as error:
        parser.error(f"{flags.folder} can't be written: {error}")
    print(f"wrote {flags.folder}: {sum(x.numel() for x in model.parameters()) / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
