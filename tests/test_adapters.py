"""Adapters on one base: made, and passed to forward by name, whatever was active before."""

import copy

import pytest
import torch
from helpers import TINY_IDS, make_team, make_team_args, randomise_adapters, same_tensors, tiny_logits

from utils.cli import UserError
from utils.models import adapters, lora
from utils.models.weights import fingerprint

NAMES = [f"agent_{i}_{role}" for i in range(2) for role in ("actor", "critic", "reference")]


@pytest.fixture
def make(base, tokenizer):
    """A function of flags: a model with the adapters of two agents, as if they had learned."""

    def build(**flags):
        return randomise_adapters(make_team(base, tokenizer, **flags)[0].model)

    return build


# --- Made -------------------------------------------------------------------------------------------------------------


def test_an_adapter_is_on_all_linear_layers_but_the_head(base):
    config = lora.lora_config(base, make_team_args(base))
    assert config.target_modules == set("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())


@pytest.mark.parametrize("target", ["nothing", "embed_tokens", "proj", "norm"])
def test_a_target_that_is_no_linear_layer_is_refused(base, target):
    with pytest.raises(UserError, match=rf"down_proj, gate_proj.*v_proj.* has no {target}"):
        lora.lora_config(base, make_team_args(base, lora_target_modules=("q_proj", target)))


@pytest.mark.parametrize("name", NAMES)
def test_a_new_adapter_changes_nothing(base, tokenizer, name):
    model = make_team(base, tokenizer)[0].model
    assert torch.equal(adapters.forward(model, name, input_ids=TINY_IDS).logits, tiny_logits(base))


def test_new_adapters_differ(base, tokenizer):
    model = make_team(base, tokenizer)[0].model
    weights = [adapters.parameters(model, name) for name in ("agent_0_actor", "agent_0_critic", "agent_1_actor")]
    assert not same_tensors(weights[0], weights[1])
    assert not same_tensors(weights[0], weights[2])


def test_a_new_reference_is_its_actor(base, tokenizer):
    model = make_team(base, tokenizer)[0].model
    for i in range(2):
        actor = adapters.parameters(model, f"agent_{i}_actor")
        assert same_tensors(actor, adapters.parameters(model, f"agent_{i}_reference"))


def test_references_draw_no_random_numbers(base, tokenizer):
    first = make_team(base, tokenizer)[0].model
    drawn = torch.rand(1)
    without = make_team(base, tokenizer, use_separate_reference_adapter=False)[0].model
    assert torch.equal(torch.rand(1), drawn)
    assert [*without.peft_config] == [name for name in NAMES if "reference" not in name]
    for name in without.peft_config:
        assert same_tensors(adapters.parameters(first, name), adapters.parameters(without, name))


def test_adapters_are_float32_on_a_base_of_bfloat16(base, tokenizer):
    model = make_team(copy.deepcopy(base).bfloat16(), tokenizer)[0].model
    assert {p.dtype for p in adapters.parameters(model, "agent_0_actor")} == {torch.float32}


# --- The fingerprint of a base ----------------------------------------------------------------------------------------


def test_a_fingerprint_is_the_same_in_bfloat16(base):
    assert fingerprint(base) == fingerprint(copy.deepcopy(base).bfloat16())


def test_a_fingerprint_is_of_the_weights(base):
    other = copy.deepcopy(base)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 4] += 0.01
    assert fingerprint(base) != fingerprint(other)


# --- An adapter is an argument ----------------------------------------------------------------------------------------


def merged(base, model, name):
    """The base with an adapter's scaled B A added to its weights; with no name, the base."""
    dense = copy.deepcopy(base)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for key, weight in dense.named_parameters():
            prefix = f"base_model.model.{key.removesuffix('.weight')}"
            if name and f"{prefix}.lora_A.{name}.weight" in weights:
                A = weights[f"{prefix}.lora_A.{name}.weight"]
                B = weights[f"{prefix}.lora_B.{name}.weight"]
                weight += 8.0 / 4 * B @ A
    return dense


def activate(model, before):
    """Leave an adapter active, or, with no name, come from a pass without one."""
    adapters.forward(model, before, input_ids=TINY_IDS)


BEFORE = pytest.mark.parametrize("before", [None, "agent_0_actor", "agent_1_critic", "agent_1_reference"])


@BEFORE
@pytest.mark.parametrize("name", [None, "agent_0_actor", "agent_1_critic", "agent_1_reference"])
def test_forward_is_that_of_the_adapter_whatever_was_active(base, make, before, name):
    model = make()
    activate(model, before)
    with torch.no_grad():
        logits = adapters.forward(model, name, input_ids=TINY_IDS).logits
        expected = merged(base, model, name)(TINY_IDS).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@BEFORE
@pytest.mark.parametrize("name", ["agent_0_critic", "agent_1_critic"])
def test_hidden_states_are_those_of_the_adapter_whatever_was_active(base, make, before, name):
    model = make()
    activate(model, before)
    with torch.no_grad():
        hidden_states = adapters.hidden_states(model, name, input_ids=TINY_IDS)
        expected = merged(base, model, name)(TINY_IDS, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(hidden_states, expected, atol=1e-5, rtol=0)


# --- Gradients --------------------------------------------------------------------------------------------------------


def gradients_of(model, name, before=None):
    """The gradients of all parameters that get one from a loss of an adapter, by name."""
    model.zero_grad()
    activate(model, before)
    torch.manual_seed(3)  # for dropout
    with adapters.training(model):
        logits = adapters.forward(model, name, input_ids=TINY_IDS).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), TINY_IDS[:, 1:].flatten()).backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@BEFORE
@pytest.mark.parametrize("name", ["agent_0_actor", "agent_0_critic", "agent_1_actor"])
def test_gradients_are_of_the_adapter_alone(make, before, name):
    model = make(lora_dropout=0.3)
    gradients = gradients_of(model, name, before)
    assert gradients.keys() == {key for key, _ in model.named_parameters() if f".{name}." in key}
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


@pytest.mark.parametrize("name", ["agent_0_actor", "agent_1_critic"])
def test_gradients_are_those_of_the_merged_weights(base, make, name):
    """By the chain rule: that of B is scale G A^T, and that of A is scale B^T G, of the merged weight's gradient G."""
    model = make()
    gradients = gradients_of(model, name)
    weights = dict(model.named_parameters())
    dense = merged(base, model, name).requires_grad_(True)
    dense(TINY_IDS, labels=TINY_IDS).loss.backward()
    for key, weight in dense.named_parameters():
        prefix = f"base_model.model.{key.removesuffix('.weight')}.lora_"
        if f"{prefix}A.{name}.weight" in weights:
            A = weights[f"{prefix}A.{name}.weight"]
            B = weights[f"{prefix}B.{name}.weight"]
            torch.testing.assert_close(gradients[f"{prefix}B.{name}.weight"], 2 * weight.grad @ A.T, atol=1e-5, rtol=0)
            torch.testing.assert_close(gradients[f"{prefix}A.{name}.weight"], 2 * B.T @ weight.grad, atol=1e-5, rtol=0)


# --- Dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_is_off_after_an_error_while_learning(make):
    model = make(lora_dropout=0.5)
    plain = tiny_logits(model, "agent_0_actor")
    with pytest.raises(RuntimeError), adapters.training(model):
        raise RuntimeError("no memory")
    assert torch.equal(tiny_logits(model, "agent_0_actor"), plain)
