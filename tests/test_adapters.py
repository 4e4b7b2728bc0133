"""Adapters on one base: what they compute, apart and merged, whatever was on before; what learns; their memory."""

import copy
import itertools
import json

import peft
import pytest
import torch
from helpers import tiny_base
from peft.tuners.lora import Linear
from teams import IDS, logits_of, make_args, make_team, roles_of, shake

import ippo_llm
import ppo_llm
from benchmark import architectures
from utils.cli import UserError
from utils.models import adapters, lora, weights
from utils.models.tensors import fingerprint

FIELDS = {  # configurations, and how many tensors an adapter then has on the two layers of the base
    "the rank": ({"r": 3, "lora_alpha": 4.5}, 28),
    "rslora": ({"use_rslora": True}, 28),
    "dora": ({"use_dora": True}, 42),
    "patterns": ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\.mlp.*": 3}}, 28),
    "a regular expression": ({"target_modules": r".*layers\.1.*_proj"}, 14),
    "a layer": ({"layers_to_transform": 1, "target_modules": ["q_proj"]}, 2),
    "the head": ({"modules_to_save": ["lm_head"]}, 29),
    "the embeddings": ({"modules_to_save": ["embed_tokens"], "use_dora": True}, 43),
    "a norm": ({"modules_to_save": ["model.norm"], "target_modules": ["o_proj"]}, 5),
}


def dense(base, policy, scale=2.0):
    """The base with scaled B A added to its weights, in float64."""
    model = copy.deepcopy(base).double()
    weights = {name: x.double() for name, x in policy.model.named_parameters()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{prefix}A.{policy.adapter}.weight" in weights:
                B, A = (weights[f"{prefix}{letter}.{policy.adapter}.weight"] for letter in "BA")
                weight += scale * B @ A
    return model


@pytest.fixture
def team(base, tokenizer):
    return shake(make_team(base, tokenizer))


# --- What an adapter computes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_policy_is_its_adapter_whatever_was_on_before(base, team, has_gradient):
    policies = [policy for agent in team for policy in roles_of(agent).values()]
    policies += [copy.copy(policies[0])]
    policies[-1].adapter = ""  # the base
    exact = [dense(base, policy)(IDS).logits for policy in policies]
    with torch.set_grad_enabled(has_gradient):
        for k in (*range(len(policies)), *reversed(range(len(policies))), 0, 3, 3):
            logits = logits_of(policies[k]).double()
            torch.testing.assert_close(logits, exact[k], atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", FIELDS)
def test_an_adapter_is_pefts_own(tokenizer, case, tied):
    """The same weights give the same in a model that peft made alone; without them it is the base, to the bit."""
    fields, num_tensors = FIELDS[case]
    base = tiny_base(tie_word_embeddings=tied)
    agents = make_team(base, tokenizer, lora_config=json.dumps(fields))
    torch.testing.assert_close(logits_of(agents[0].actor), base(IDS).logits, atol=1e-5, rtol=0)
    policy = shake(agents)[1].actor
    state = adapters.adapter_state(policy.model, policy.adapter)
    assert len(state) == num_tensors
    config = peft.LoraConfig(**{"target_modules": "all-linear", **fields})
    alone = peft.get_peft_model(copy.deepcopy(base), config)
    peft.set_peft_model_state_dict(alone, state)
    for has_gradient in (True, False):
        with torch.set_grad_enabled(has_gradient):
            torch.testing.assert_close(logits_of(policy), alone(IDS).logits, atol=1e-5, rtol=0)
    assert weights.fingerprint_of(agents[0].reference) == fingerprint(base)


def test_new_adapters_differ_and_references_draw_no_random_numbers(base, tokenizer):
    first = make_team(base, tokenizer)
    drawn = torch.rand(1)
    second = make_team(base, tokenizer, use_separate_reference_adapter=False)
    assert torch.equal(torch.rand(1), drawn)
    for one, other in zip(first, second):
        assert all(map(torch.equal, one.actor.parameters(), other.actor.parameters()))
        assert all(map(torch.equal, one.critic.parameters(), other.critic.parameters()))
    A = [policy.parameters()[0] for policy in (first[0].actor, first[0].critic, first[1].actor)]
    assert not torch.equal(A[0], A[1]) and not torch.equal(A[0], A[2])


def test_memory_that_runs_out_as_adapters_are_merged_leaves_the_base_as_it_was(base, tokenizer, monkeypatch):
    agents = shake(make_team(base, tokenizer))
    with torch.no_grad():
        right = logits_of(agents[0].actor)
        logits_of(agents[1].actor)
    merge = Linear.merge
    calls = itertools.count()

    def run_out(layer, *arguments, **options):
        if next(calls) == 2:
            raise torch.OutOfMemoryError
        merge(layer, *arguments, **options)

    with monkeypatch.context() as patch, torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Linear, "merge", run_out)
        logits_of(agents[0].actor)
    with torch.no_grad():
        assert torch.equal(logits_of(agents[0].actor), right)
    adapters.unmerge(agents[0].actor.model)
    assert weights.fingerprint_of(agents[0].reference) == fingerprint(base)


# --- What learns ------------------------------------------------------------------------------------------------------


def gradients(agents, policy):
    """The gradients of everything, by name, of a loss of one policy; the seed is dropout's."""
    model = agents[0].actor.model
    model.zero_grad()
    torch.manual_seed(3)
    out = policy.read(IDS, before=torch.ones_like(IDS) > 0)
    (out.hidden_states if out.logits is None else out.logits).square().mean().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("flags", [{}, {"gradient_checkpointing": True}], ids=str)
def test_gradients_are_of_one_adapter_and_those_of_merged_weights(base, tokenizer, flags):
    """By the chain rule: that of B is scale G A^T, that of A scale B^T G, of the gradient G of the merged weight."""
    agents = shake(make_team(base, tokenizer, **flags))
    for policy in (agents[0].actor, agents[1].critic, agents[1].actor):
        with torch.no_grad():
            logits_of(agents[1].actor)  # leaves another one merged
        own = gradients(agents, policy)
        assert {name.split(".")[-2] for name in own} == {policy.adapter}
        model = dense(base, policy).requires_grad_(True)
        out = model(IDS, output_hidden_states=True)
        (out.hidden_states[-1] if policy.is_body else out.logits)[:, :-1].square().mean().backward()
        parts = {name: x.double() for name, x in policy.model.named_parameters()}
        count = 0
        for name, weight in model.named_parameters():
            prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{prefix}A.{policy.adapter}.weight" in parts:
                B, A = (f"{prefix}{letter}.{policy.adapter}.weight" for letter in "BA")
                torch.testing.assert_close(own[B].double(), 2 * weight.grad @ parts[A].T, atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(own[A].double(), 2 * parts[B].T @ weight.grad, atol=1e-5, rtol=1e-4)
                count += 2
        assert count == len(own) == 28


def test_dropout_is_on_in_passes_with_gradients_alone(base, tokenizer):
    agents = shake(make_team(base, tokenizer, lora_dropout=0.5, merge_adapters=False))
    actor = agents[0].actor
    assert not torch.equal(logits_of(actor), logits_of(actor))
    with torch.no_grad():
        plain = logits_of(actor)
        assert torch.equal(logits_of(actor), plain)
    torch.testing.assert_close(plain.double(), dense(base, actor)(IDS).logits, atol=1e-5, rtol=0)


def test_with_gradient_checkpointing_dropout_is_the_same_when_computed_again(base, tokenizer):
    plain, checkpointed = (
        shake(make_team(base, tokenizer, lora_dropout=0.5, gradient_checkpointing=flag)) for flag in (False, True)
    )
    expected = gradients(plain, plain[1].actor)
    found = gradients(checkpointed, checkpointed[1].actor)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-5)


def test_a_step_changes_one_adapter_alone(base, tokenizer):
    config = json.dumps({"use_dora": True, "modules_to_save": ["lm_head"]})
    agents = shake(make_team(base, tokenizer, lora_config=config))
    model = agents[0].actor.model
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    with torch.no_grad():
        logits_of(agents[1].critic), logits_of(agents[0].actor)
    gradients(agents, agents[1].actor)
    agents[1].optimizers[0].step()
    changed = {name for name, x in model.named_parameters() if not torch.equal(before[name], x)}
    assert changed == {name for name in before if ".agent_1_actor." in name}


# --- Merged -----------------------------------------------------------------------------------------------------------


def calls_of_adapters(model):
    """A list that grows by one whenever a layer multiplies by an A."""
    calls = []
    for layer in adapters.lora_layers(model):
        for A in layer.lora_A.values():
            A.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_passes_without_gradients_are_merged_and_others_are_not(team):
    calls = calls_of_adapters(team[0].actor.model)
    with torch.no_grad():
        logits_of(team[0].actor)  # finds the layers that are called
        calls.clear()
        merged = logits_of(team[0].actor)
        logits_of(team[1].critic)
    assert not calls
    apart = logits_of(team[0].actor)
    assert calls
    torch.testing.assert_close(merged, apart, atol=1e-5, rtol=0)


def test_what_was_merged_follows_the_weights(team):
    actor = team[0].actor
    with torch.no_grad():
        before = logits_of(actor)
    for parameter in actor.parameters():
        parameter.grad = torch.ones_like(parameter)
    team[0].optimizers[0].step()
    with torch.no_grad():
        after = logits_of(actor)
    torch.testing.assert_close(after, logits_of(actor), atol=1e-5, rtol=0)
    assert (after - before).abs().max() > 1e-3


def test_the_base_is_the_same_to_the_bit_afterwards(team):
    model = team[0].actor.model
    before = {name: (x, x.clone()) for name, x in model.state_dict().items()}
    for _ in range(3):
        with torch.no_grad():
            logits_of(team[0].actor), logits_of(team[1].critic)
    adapters.unmerge(model)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name][1]) and x.data_ptr() == before[name][0].data_ptr(), name


def tie(base):
    base.model.layers[1].mlp.up_proj.weight = base.model.layers[0].mlp.up_proj.weight
    return base


APART = {
    "a flag": (lambda base: base, {"merge_adapters": False}),
    "a base in bfloat16": (lambda base: base, {"dtype": "bfloat16"}),
    "passes in bfloat16": (lambda base: base, {"mixed_precision": "bf16"}),
    "DoRA": (lambda base: base, {"lora_config": '{"use_dora": true, "target_modules": ["q_proj"]}'}),
    "a weight that two layers have": (tie, {}),
}


@pytest.mark.parametrize("case", APART)
def test_where_a_sum_is_not_right_adapters_stay_apart(base, tokenizer, case):
    change, flags = APART[case]
    agents = make_team(change(copy.deepcopy(base)), tokenizer, **flags)
    calls = calls_of_adapters(agents[0].actor.model)
    with torch.no_grad():
        logits_of(agents[0].actor)
    assert calls and not agents[0].actor.model.mergeable
    assert {x.dtype for x in agents[0].actor.parameters()} == {torch.float32}


def test_an_adapter_that_has_no_effect_apart_has_none_merged(tokenizer):
    """Falcon-Mamba reads the weight of dt_proj by itself."""
    agents = shake(make_team(architectures.make_model("falcon_mamba"), tokenizer), 0.05)
    actor = agents[0].actor
    with torch.no_grad():
        merged = logits_of(actor)
    left_out = [layer for layer in adapters.lora_layers(actor.model) if layer not in actor.model.mergeable]
    names = [name for name, module in actor.model.named_modules() if module in left_out]
    assert len(names) == 2 and all("dt_proj" in name for name in names)
    torch.testing.assert_close(merged, logits_of(actor), atol=2e-5, rtol=1e-5)


# --- Memory -----------------------------------------------------------------------------------------------------------


def bytes_of(agents):
    """The bytes of all tensors that agents hold: weights, and AdamW's moments as they will be."""
    tensors = {}
    for agent in agents:
        modules = [policy.model for policy in roles_of(agent).values()] + [agent.value_head]
        for module in modules:
            tensors |= {x.data_ptr(): x for x in [*module.parameters(), *module.buffers()]}
    moments = [x for agent in agents for o in agent.optimizers for group in o.param_groups for x in group["params"]]
    return sum(x.nbytes for x in tensors.values()) + 2 * sum(x.nbytes for x in moments)


@pytest.mark.parametrize("script", [ippo_llm, ppo_llm])
def test_four_agents_hold_at_most_1_2_times_what_one_holds(tokenizer, script):
    base = tiny_base(hidden_size=512, intermediate_size=1024, num_attention_heads=8, vocab_size=2048)
    one, four = (bytes_of(make_team(base, tokenizer, script, num_agents=n, lora_rank=2)) for n in (1, 4))
    assert four < 1.2 * one


# --- What is refused --------------------------------------------------------------------------------------------------


def test_an_adapter_is_on_all_linear_layers_but_the_head(base):
    config = lora.lora_config(base, make_args())
    assert config.target_modules == set("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())


@pytest.mark.parametrize("target", ["nothing", "embed_tokens", "proj", "norm"])
def test_a_target_that_is_no_linear_layer_is_refused(base, target):
    with pytest.raises(UserError, match=rf"down_proj, gate_proj.*v_proj.* has no {target}"):
        lora.lora_config(base, make_args(lora_target_modules=("q_proj", target)))


REFUSED = {  # a file of --lora-config, and the message
    "{": "^--lora-config: .*lora.json can't be read as JSON",
    "[4]": r"^--lora-config: .*lora.json is to hold a JSON object, and holds \[4\]",
    '{"rank": 4}': "lora.json: a peft.LoraConfig has no rank$",
    '{"r": "four"}': "lora.json: r: Input should be a valid integer, got four$",
    '{"lora_dropout": 2}': "lora.json: lora_dropout: Input should be less than or equal to 1, got 2$",
    '{"peft_type": "IA3"}': "lora.json: peft_type takes LORA, got IA3$",
    '{"bias": "all"}': "lora.json: bias takes none here, got all$",
    '{"init_lora_weights": "pissa"}': "lora.json: init_lora_weights: Input should be .*'gaussian', got pissa$",
    '{"rank_pattern": {"(": 3}}': r"lora.json: \( is no regular expression: ",
    '{"layers_pattern": "layers"}': "lora.json: When `layers_pattern` is specified, `layers_to_transform` must",
    '{"target_modules": ["nothing"]}': "lora.json takes names of linear layers .*, and the model has no nothing$",
    '{"target_modules": ".*norm"}': r"lora.json takes names of linear layers .*, and \.\*norm means model.*norm$",
    '{"modules_to_save": ["nothing"]}': "lora.json: modules_to_save takes names of modules, and the model has no noth",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_configuration_that_is_wrong_is_one_line(base, tokenizer, tmp_path, text):
    (tmp_path / "lora.json").write_text(text)
    with pytest.raises(UserError, match=REFUSED[text]) as error:
        make_team(base, tokenizer, lora_config=str(tmp_path / "lora.json"))[0].actor
    assert "\n" not in str(error.value)


def test_a_configuration_may_be_an_object_of_peft(base, tokenizer):
    config = peft.LoraConfig(r=5, lora_alpha=7.5, lora_dropout=0.25, target_modules=["q_proj", "up_proj"])
    flags = {"lora_rank": 5, "lora_alpha": 7.5, "lora_dropout": 0.25, "lora_target_modules": ("q_proj", "up_proj")}
    configs = [
        make_team(base, tokenizer, **each)[0].actor.model.peft_config for each in ({"lora_config": config}, flags)
    ]
    assert configs[0] == configs[1]
    with pytest.raises(UserError, match="^--lora-config: bias takes none here, got all$"):
        make_args(lora_config=peft.LoraConfig(bias="all")).check_models()
    with pytest.raises(UserError, match="^--lora-config takes the place of --lora-alpha; give one"):
        make_args(lora_config='{"r": 3}', lora_alpha=3.0).check_models()
