"""Adapters merged into the base for passes without gradients; and rows of like length that go together."""

import copy
from dataclasses import dataclass

import pytest
import torch
from helpers import TINY_IDS, make_ppo_args, make_team, randomise_adapters, tiny_base

import ppo_llm
from benchmark import architectures
from utils.models import adapters
from utils.rollouts import Rows


@pytest.fixture
def model(base, tokenizer):
    return randomise_adapters(make_team(base, tokenizer)[0].model)


def calls_of_adapters(model):
    """A list that grows by one whenever a layer multiplies by an A."""
    calls = []
    for layer in adapters.lora_layers(model):
        for A in layer.lora_A.values():
            A.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_merged_weights_give_what_the_adapter_gives(model):
    apart = adapters.forward(model, "agent_1_actor", input_ids=TINY_IDS).logits
    calls = calls_of_adapters(model)
    with torch.no_grad(), adapters.merged(model, "agent_1_actor"):
        logits = adapters.forward(model, "agent_1_actor", input_ids=TINY_IDS).logits
    assert not calls
    torch.testing.assert_close(logits, apart, atol=2e-5, rtol=1e-5)
    other = adapters.forward(model, "agent_1_critic", input_ids=TINY_IDS).logits
    assert calls and (other - apart).abs().max() > 1e-3


@pytest.mark.parametrize("fails", [False, True])
def test_the_base_is_the_same_to_the_bit_afterwards(model, fails):
    before = {name: (x, x.clone()) for name, x in model.state_dict().items()}
    apart = adapters.forward(model, "agent_0_actor", input_ids=TINY_IDS).logits
    for _ in range(3):
        try:
            with torch.no_grad(), adapters.merged(model, "agent_0_actor"):
                adapters.forward(model, "agent_0_actor", input_ids=TINY_IDS)
                if fails:
                    raise RuntimeError("no memory")
        except RuntimeError:
            assert fails
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name][1]) and x.data_ptr() == before[name][0].data_ptr(), name
    logits = adapters.forward(model, "agent_0_actor", input_ids=TINY_IDS).logits
    assert torch.equal(logits, apart) and logits.requires_grad


def test_the_base_itself_is_not_merged_with_anything(model, base):
    with torch.no_grad(), adapters.merged(model, adapters.Adapter(model, "")):
        logits = adapters.forward(model, "", input_ids=TINY_IDS).logits
    with torch.no_grad():
        assert torch.equal(logits, base(TINY_IDS).logits)


def tie(base):
    base.model.layers[1].mlp.up_proj.weight = base.model.layers[0].mlp.up_proj.weight
    return base


DORA = {"lora_rank": 16, "lora_alpha": 32.0, "lora_config": '{"use_dora": true, "target_modules": ["q_proj"]}'}
APART = {
    "a flag": (lambda base: base, {"merge_adapters": False}),
    "a base in bfloat16": (lambda base: base.bfloat16(), {}),
    "passes in bfloat16": (lambda base: base, {"mixed_precision": "bf16"}),
    "a compiled base": (lambda base: base, {"torch_compiler": "default"}),
    "DoRA": (lambda base: base, DORA),
    "a weight that two layers have": (tie, {}),
}


@pytest.mark.parametrize("case", APART)
def test_where_a_sum_is_not_right_adapters_stay_apart(base, tokenizer, case):
    change, flags = APART[case]
    model = make_team(change(copy.deepcopy(base)), tokenizer, **flags)[0].model
    assert not model.mergeable
    calls = calls_of_adapters(model)
    with torch.no_grad(), adapters.merged(model, "agent_0_actor"):
        adapters.forward(model, "agent_0_actor", input_ids=TINY_IDS)
    assert calls


def test_an_adapter_that_has_no_effect_apart_has_none_merged(tokenizer, tmp_path):
    """Falcon-Mamba reads the weight of dt_proj by itself."""
    base = architectures.save_model("falcon_mamba", tmp_path)
    model = randomise_adapters(make_team(base, tokenizer)[0].model)
    missing = [layer for layer in adapters.lora_layers(model) if layer not in model.mergeable]
    assert len(missing) == 2 and all("dt_proj" in name for name, x in model.named_modules() if x in missing)
    with torch.no_grad():
        apart = adapters.forward(model, "agent_0_actor", input_ids=TINY_IDS).logits
        with adapters.merged(model, "agent_0_actor"):
            logits = adapters.forward(model, "agent_0_actor", input_ids=TINY_IDS).logits
    torch.testing.assert_close(logits, apart, atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("in_tmp_path")
def test_a_run_merges_where_there_is_no_gradient_and_leaves_the_base_as_it_was(tokenizer, monkeypatch, tmp_path):
    seen = []
    forward = adapters.forward

    def watch(model, name, **inputs):
        layer = adapters.lora_layers(model)[0]
        if name:
            seen.append((torch.is_grad_enabled(), layer.merged))
        return forward(model, name, **inputs)

    monkeypatch.setattr(adapters, "forward", watch)
    args = make_ppo_args(tmp_path, task="number", num_agents=2, max_turns=2, max_model_len=None)
    agents, run = ppo_llm.main(args, model=tiny_base(vocab_size=len(tokenizer)), tokenizer=tokenizer)
    assert set(seen) == {(True, False), (False, True)} and len(run.rows) == 2
    fresh = tiny_base(vocab_size=len(tokenizer))
    state = agents[0].model.get_base_model().state_dict()
    for name, x in fresh.state_dict().items():
        weight = state[name] if name in state else state[name.replace("_proj.", "_proj.base_layer.")]
        assert torch.equal(weight, x), name


# --- Rows of like length ----------------------------------------------------------------------------------------------


def rows_of(lengths):
    """Rows of a prompt of two tokens, and a response of so many, numbered in their first token."""
    L = max(lengths)
    mask = torch.tensor([[1] * (2 + length) + [0] * (L - length) for length in lengths])
    ids = torch.arange(len(lengths))[:, None].expand(-1, 2 + L)
    return Episodes(ids=ids, attention_mask=mask, logprobs=mask[:, 2:].float())


@dataclass
class Episodes(Rows):
    ids: torch.Tensor
    attention_mask: torch.Tensor
    logprobs: torch.Tensor


def test_rows_of_like_length_go_together():
    lengths = [3, 9, 1, 8, 3, 2, 9]
    parts = [*rows_of(lengths).split(3)]
    assert [part.ids[:, 0].tolist() for part in parts] == [[2, 5, 0], [4, 3, 1], [6]]
    assert [part.logprobs.shape[1] for part in parts] == [3, 9, 9]


def test_what_is_mapped_comes_back_in_its_own_order():
    lengths = [3, 9, 1, 8, 3, 2, 9]
    rows = rows_of(lengths)
    mapped = rows.map(lambda part: part.logprobs * (part.ids[:, :1] + 1), 2)
    assert torch.equal(mapped, rows.logprobs * torch.arange(1, 8)[:, None])
