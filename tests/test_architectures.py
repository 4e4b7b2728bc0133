"""Every causal language model is an agent: what a script samples with is what each sequence has alone."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import randomise_adapters
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_llm
from benchmark import architectures
from utils import enjoy
from utils.models import causal_lm
from utils.models.loading import from_pretrained

UNPADDED = {"minimax", "recurrent_gemma", "rwkv"}  # that take no padding on the left, or no cache
APART = {"glm4_moe", "deepseek_v3", "qwen3_next"}  # whose experts have adapters in one tensor, which are not merged
FEW = ("llama", "gemma3_text", "mixtral", "qwen3_5_text", "mamba", "rwkv")  # of each kind one: the others take minutes


def cases():
    """Scripts and architectures; iac computes as ippo with a critic does."""
    for name in architectures.ARCHITECTURES:
        for label in architectures.SCRIPTS:
            marks = [] if name in FEW and label != "iac" else [pytest.mark.slow]
            yield pytest.param(label, name, marks=marks)


ALL = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in architectures.ARCHITECTURES]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A folder of a random model; its name is the architecture's."""
    path = tmp_path_factory.mktemp("models") / request.param
    architectures.save_model(request.param, path)
    return path


@pytest.mark.parametrize("label, folder", cases(), indirect=["folder"])
def test_a_script_trains_an_architecture(label, folder, tmp_path):
    result = architectures.check_script(architectures.SCRIPTS[label], str(folder), str(tmp_path / "run"))
    assert len(set(result["lengths"])) > 1  # rows that end at different times
    assert result["sampled"] < 1e-4
    assert result["recomputed"] < 1e-4
    assert result["change"] > 1e-5
    assert result["saved"] < 1e-5
    assert result["recomputes"] == (folder.name in UNPADDED)


@pytest.mark.parametrize("folder", ALL, indirect=True)
def test_the_first_ratio_is_one_where_adapters_are_merged_to_sample(folder):
    args = architectures.make_args(ppo_llm, str(folder), None)
    args = ppo_llm.resolve_args(dataclasses.replace(args, task="tldr"))
    (agent,) = ppo_llm.build_agents(args, torch.device("cpu"), updates=1)
    randomise_adapters(agent.model)
    before = {name: x.clone() for name, x in agent.model.state_dict().items()}
    task = architectures.Task()
    rollout = ppo_llm.play([agent], task, task.train_dataset(8, 0), args, torch.Generator().manual_seed(1))[0]
    assert bool(agent.model.mergeable) == (folder.name not in APART) and ppo_llm.samples_exactly(agent, args)
    assert all(torch.equal(x, before[name]) for name, x in agent.model.state_dict().items())  # the base and adapters
    log_pi = ppo_llm.forward_policy(agent.actor, rollout, args)  # with gradients, and so apart
    assert log_pi.requires_grad
    ratio = (ppo_llm.take_logprobs(log_pi, rollout.response_ids) - rollout.logprobs).exp()
    largest = float(((ratio - 1) * rollout.response_mask).abs().max())
    print(f"{folder.name}: |ratio - 1| is at most {largest:.1e}")
    assert largest < 1e-5
    change = ppo_llm.compute_logprobs(agent.reference, rollout, args) - rollout.logprobs
    assert float((change * rollout.response_mask).abs().max()) > 0.01  # adapters matter


def test_the_page_has_all_of_them():
    page = (Path(__file__).resolve().parent.parent / "docs/architectures.md").read_text()
    names = re.findall(r"^\| (\w+) \| \d", page, flags=re.M)
    assert names == [*architectures.ARCHITECTURES]
    assert len(names) >= 35


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba", "rwkv"])
def test_games_of_several_turns_are_one_sequence(name, tmp_path):
    architectures.save_model(name, tmp_path)
    args = ppo_llm.resolve_args(ppo_llm.Args(model=str(tmp_path), max_turns=3, max_output_tokens=4))
    agent = ppo_llm.build_agents(args, torch.device("cpu"), updates=1)[0]
    items = [{"seed": seed} for seed in range(6)]
    rollout = ppo_llm.play([agent], Echo, items, args, torch.Generator().manual_seed(1))[0]
    assert rollout.turn_of_token.max() == 2
    logprobs = ppo_llm.compute_logprobs(agent.actor, rollout, args)
    torch.testing.assert_close(rollout.logprobs, logprobs * rollout.response_mask, atol=1e-4, rtol=0)


class Echo:
    """A game that says more and more."""

    def reset(self, seed):
        self.text = "word " * (1 + seed)
        return self.text, {}

    def step(self, answer):
        return self.text, 0.0, False, False, {}


@pytest.mark.parametrize("asked", ["sdpa", "flash_attention_2"])
def test_a_model_without_the_attention_comes_with_its_own(asked, tmp_path, capsys):
    architectures.save_model("bloom", tmp_path)
    model = from_pretrained(AutoModelForCausalLM, tmp_path, attn_implementation=asked, dtype=torch.float32)
    assert model.config._attn_implementation == "eager"
    assert capsys.readouterr().out.count(f"has no {asked} attention: it is loaded with eager") == 1


def test_an_attention_that_is_not_installed_is_an_error_still(tmp_path):
    architectures.save_model("llama", tmp_path)
    with pytest.raises(ImportError, match="FlashAttention2"):
        from_pretrained(AutoModelForCausalLM, tmp_path, attn_implementation="flash_attention_2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mamba2", "qwen3_next", "rwkv", "minimax"])
def test_padding_is_tried_in_every_data_type(name, dtype, capsys):
    model = architectures.make_model(name).to(dtype)
    causal_lm.check_padding(model, name)
    assert getattr(model, "recomputes", False) == (name in UNPADDED)
    assert (f"{name} takes no padding" in capsys.readouterr().out) == (name in UNPADDED)


def test_a_critic_without_an_output_layer_is_tried_too():
    body = architectures.make_model("rwkv").base_model
    causal_lm.check_padding(body, "rwkv")
    assert body.recomputes
    body = architectures.make_model("qwen2").base_model
    causal_lm.check_padding(body, "qwen2")
    assert not hasattr(body, "recomputes")


@pytest.mark.parametrize("name", ["llama", "rwkv", "recurrent_gemma"])
def test_what_is_shown_does_not_depend_on_the_other_prompts(name, tmp_path, tokenizer):
    architectures.save_model(name, tmp_path)
    model = from_pretrained(AutoModelForCausalLM, tmp_path, attn_implementation="sdpa", dtype=torch.float32).eval()
    causal_lm.prepare(model, name)
    writer = enjoy.Writer(model, AutoTokenizer.from_pretrained(tmp_path))
    flags = {"max_new_tokens": 6, "min_output_tokens": 0, "repetition_penalty": 1.0, "mixed_precision": "no"}
    args = SimpleNamespace(do_sample=False, **flags)
    rows = [[5, 9], [8, 7, 6, 5, 4, 3], [11, 12, 13, 9]]
    assert enjoy.respond(writer, rows, args) == [enjoy.respond(writer, [row], args)[0] for row in rows]
