"""A model that is loaded already, from Python: whose tokenizer it reads with, and under which name it is saved."""

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
from helpers import build_model
from short_runs import ADAPTERS, FLAGS, SCRIPTS, TEAM, every_script
from transformers import AutoModelForCausalLM, AutoTokenizer

import ippo_llm
import ppo_llm
from utils import merge_adapter
from utils.cli import UserError
from utils.models.loading import locate


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A model with a tokenizer of its own, of fewer tokens than the embedded one has."""
    own = tokenizer.train_new_from_iterator(["Say a number. 1 2 3 4 5 6 7 8 9"] * 9, vocab_size=97)
    model = build_model(own)
    model.save_pretrained(tmp_path / "own")
    own.save_pretrained(tmp_path / "own")
    return tmp_path / "own"


def test_a_loaded_model_reads_with_its_own_tokenizer_and_is_named(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    args = ippo_llm.Args(**TEAM, task="number", output_dir=str(tmp_path / "run"))
    agents, run = ippo_llm.main(args, model=model)
    assert len(agents[0].tokenizer) == len(AutoTokenizer.from_pretrained(folder)) < 768
    assert json.loads((run.folder / "config.json").read_text())["args"]["model"] == [str(folder)]
    assert args.model == ("utils/tiny_lm",)  # the user's own flags are as they were


def test_adapters_of_a_loaded_model_open_in_peft_and_merge(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    flags = ADAPTERS | {"num_agents": 1, "task": "number", "output_dir": str(tmp_path / "run")}
    agents, _ = ppo_llm.main(ppo_llm.Args(**flags), model=model)
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run/agent_0/actor")
    merge_adapter.main(merge_adapter.Args(str(tmp_path / "run/agent_0"), str(tmp_path / "merged")))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(opened(ids).logits, merged(ids).logits)


@every_script
def test_a_loaded_model_without_a_name_takes_its_tokenizer_too(script, tokenizer, tmp_path):
    module = SCRIPTS[script]
    args = module.Args(**FLAGS[script], task="number", output_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match="^model= is of no folder or hub name, .* give tokenizer= too$"):
        module.main(args, model=build_model(tokenizer))
    assert not Path(args.output_dir).exists()


@every_script
def test_a_loaded_model_without_a_name_has_that_of_the_flags(script, tokenizer, tmp_path):
    module = SCRIPTS[script]
    args = module.Args(**FLAGS[script], model="some/base", task="number", output_dir=str(tmp_path / "run"))
    _, run = module.main(args, model=build_model(tokenizer), tokenizer=tokenizer)
    assert "some/base" in json.loads((run.folder / "config.json").read_text())["args"]["model"]


def test_a_padding_token_that_the_model_does_not_know_is_refused(tokenizer, tmp_path):
    model = build_model(tokenizer)
    wider = copy.deepcopy(tokenizer)
    wider.add_special_tokens({"pad_token": "[PAD]"})
    args = ippo_llm.Args(**TEAM, task="number", output_dir=str(tmp_path / "run"))
    message = r"^--model: .* padding token, \[PAD\], is number 768, .*: set its pad_token to one of these, or .*$"
    with pytest.raises(UserError, match=message):
        ippo_llm.main(args, model=model, tokenizer=wider)
    assert not (tmp_path / "run").exists()


# --- Critics ----------------------------------------------------------------------------------------------------------


def refuses(critic, message, tmp_path, **flags):
    flags = {"use_separate_critic": True, "critic_model_name_or_path": str(critic), "task": "number"} | flags
    with pytest.raises(UserError, match=message):
        ippo_llm.main(ippo_llm.Args(**TEAM, **flags, output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_critic_with_fewer_positions_is_refused_unless_prompts_are_short(tmp_path, tokenizer):
    model = build_model(tokenizer, max_position_embeddings=40)
    model.save_pretrained(tmp_path / "critic")
    refuses(tmp_path / "critic", "has 40 positions, fewer .*: it takes --max-prompt-length 37 or less$", tmp_path)
    flags = {"use_separate_critic": True, "critic_model_name_or_path": str(tmp_path / "critic"), "task": "number"}
    args = ippo_llm.Args(**TEAM, **flags, max_prompt_length=37, output_dir=str(tmp_path / "run"))
    ippo_llm.main(args)


def test_a_critic_that_reads_other_words_is_refused(tmp_path, tokenizer):
    other = tokenizer.train_new_from_iterator(["other words of another text"] * 9, vocab_size=len(tokenizer))
    build_model(tokenizer).save_pretrained(tmp_path / "critic")
    other.save_pretrained(tmp_path / "critic")
    refuses(tmp_path / "critic", "has another tokenizer: it reads [0-9]+ of the actor's 768 tokens", tmp_path)
    tokenizer.save_pretrained(tmp_path / "critic")
    ippo_llm.models.check_critics(
        ippo_llm.Args(use_separate_critic=True, critic_model_name_or_path=str(tmp_path / "critic")),
        ippo_llm.tasks.readers(ippo_llm.Args(), "max_new_tokens"),
    )


# --- The data type ----------------------------------------------------------------------------------------------------


def test_rounded_log_probabilities_of_a_loaded_model_are_computed_anew(tokenizer):
    args = ppo_llm.resolve_args(ppo_llm.Args())
    exact = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(locate("utils/tiny_lm"), dtype=dtype)
        agent = ppo_llm.build_agents(args, torch.device("cpu"), 1, model, tokenizer)[0]
        exact.append(ppo_llm.samples_exactly(agent, args))
    assert exact == [True, False]
