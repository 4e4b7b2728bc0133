"""Merge a trained agent's adapter into its base: an ordinary Hugging Face folder, model and tokenizer.

    python -m utils.merge_adapter RUN/agent_0 OUT

AutoModelForCausalLM and AutoTokenizer open OUT like any other model.
"""

import os
import shutil
from dataclasses import field
from pathlib import Path
from typing import Literal

import tyro
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoTokenizer

from utils.cli import Settings, UserError, command_line, flags
from utils.files import disk_errors, read_json, writing
from utils.models.adapters import WEIGHTS, add, check_base, load_adapter, wrap
from utils.models.loading import load_model, read_tokenizer
from utils.models.lora import CONFIG, read_config
from utils.models.transcripts import mend_end_tokens
from utils.models.weights import BASE


@flags
class MergeArgs:
    """What is merged, and where to."""

    agent: tyro.conf.Positional[str] = ""  # folder of an agent, RUN/agent_0
    out: tyro.conf.Positional[str] = ""  # folder to write; it must not be there yet
    model: str | None = None  # folder or hub name of the base; none: the name that the agent's folder has
    model_config: Settings = field(default_factory=dict)  # settings that the base is loaded with, JSON values by name
    dtype: Literal["float32", "bfloat16"] = "float32"  # data type of the merged weights
    trust_remote_code: bool = False  # run code that comes with a hub model


@flags
class Args(MergeArgs):
    """All flags."""


def main(args):
    """Merge, and write the folder aside, then rename it. Raises UserError."""
    agent = Path(args.agent)
    out = Path(args.out)
    if not args.agent or not args.out:
        raise UserError("two folders are needed: an agent's, and one to write, as in RUN/agent_0 OUT")
    if out.exists():
        raise UserError(f"{out} is there already: name a new folder")
    for file in (agent / BASE, agent / "actor" / CONFIG, agent / "actor" / WEIGHTS):
        if not file.is_file():
            raise UserError(f"{agent} is no agent's folder with a LoRA adapter: there is no {file}")
    name = args.model or read_json(agent / BASE).get("base")
    config = read_config(agent / "actor")
    config.base_model_name_or_path = None
    options = {"trust_remote_code": args.trust_remote_code, "settings": args.model_config}
    base = load_model(str(name), "--model", args.dtype, **options)
    check_base(agent, base, name)
    try:
        # One with code of its own is not read back from where it was saved
        read = (str(name), "--model", True, args.model_config)
        tokenizer = read_tokenizer(*read) if args.trust_remote_code else AutoTokenizer.from_pretrained(agent)
    except Exception as error:
        raise UserError(f"{agent} has no tokenizer that can be loaded: {error}") from error
    mend_end_tokens(base, tokenizer, name)

    model = wrap(base, config)
    add(model, "agent_0_actor")
    load_adapter(agent / "actor", model, "agent_0_actor")
    head = base.get_output_embeddings()
    if isinstance(head, BaseTunerLayer) and head.weight is base.get_input_embeddings().weight:
        head.get_base_layer().weight = nn.Parameter(head.weight.clone())  # merged, it differs from the embeddings
    merged = model.merge_and_unload()
    if merged.get_output_embeddings().weight is not merged.get_input_embeddings().weight:
        merged.config.tie_word_embeddings = False
    aside = out.with_name(out.name + ".writing")
    with writing(out), disk_errors():
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        merged.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        os.replace(aside, out)
    print(f"wrote {out}: {name} with the adapter of {agent}")


if __name__ == "__main__":
    command_line(main, Args, __doc__)
