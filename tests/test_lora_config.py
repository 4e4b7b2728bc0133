"""--lora-config: a whole peft.LoraConfig from a file, on the model, through a run's files and into the base."""

import copy
import json

import peft
import pytest
import torch
from helpers import (
    TINY,
    TINY_IDS,
    change_adapters,
    make_team,
    make_team_args,
    same_tensors,
    tiny_base,
    tiny_logits,
)
from short_runs import assert_same_run, train
from transformers import AutoModelForCausalLM

import ppo_llm
from utils.cli import UserError
from utils.merge_adapter import Args as MergeArgs
from utils.merge_adapter import main as merge_adapter
from utils.models import adapters
from utils.models.weights import fingerprint
from utils.run import checkpoint

FIELDS = {  # and how many tensors an adapter has on the two layers of tiny_base
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
every_field = pytest.mark.parametrize("case", FIELDS)
every_tie = pytest.mark.parametrize("tied", [False, True])


@pytest.fixture
def write(tmp_path):
    """A function of the fields of a configuration, or of a text: the flags that name a file of it."""

    def build(fields, **flags):
        text = fields if isinstance(fields, str) else json.dumps(fields)
        (tmp_path / "lora.json").write_text(text)
        return {"lora_config": str(tmp_path / "lora.json"), "lora_rank": 16, "lora_alpha": 32.0, **flags}

    return build


# --- On the model -----------------------------------------------------------------------------------------------------


@every_tie
@every_field
def test_an_adapter_is_pefts_own(tokenizer, write, case, tied):
    """The same weights give the same logits in a model that peft made alone."""
    fields, num_tensors = FIELDS[case]
    base = tiny_base(tie_word_embeddings=tied)
    agents = make_team(base, tokenizer, **write(fields))
    model = change_adapters(agents[0].model)
    state = adapters.adapter_state(model, agents[1].critic)
    assert len(state) == num_tensors
    targets = fields.get("target_modules", "all-linear")
    alone = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**(fields | {"target_modules": targets})))
    peft.set_peft_model_state_dict(alone, state)
    torch.testing.assert_close(tiny_logits(model, agents[1].critic), tiny_logits(alone), atol=1e-5, rtol=0)
    assert not torch.allclose(tiny_logits(model, agents[1].critic), tiny_logits(base), atol=1e-3)
    assert not torch.allclose(tiny_logits(model, agents[1].actor), tiny_logits(alone), atol=1e-3)


@every_tie
@every_field
def test_a_new_adapter_changes_nothing_and_none_is_the_base(tokenizer, write, case, tied):
    base = tiny_base(tie_word_embeddings=tied)
    agents = make_team(base, tokenizer, **write(FIELDS[case][0]))
    model = agents[0].model
    for name in model.peft_config:
        torch.testing.assert_close(tiny_logits(model, name), tiny_logits(base), atol=1e-5, rtol=0)
    change_adapters(model)
    assert torch.equal(adapters.forward(model, None, input_ids=TINY_IDS).logits, tiny_logits(base))
    assert fingerprint(model) == fingerprint(base)


@every_tie
@every_field
def test_a_step_of_an_actor_changes_it_alone(tokenizer, write, case, tied):
    base = tiny_base(tie_word_embeddings=tied)
    agents = make_team(base, tokenizer, **write(FIELDS[case][0]))
    model = change_adapters(agents[0].model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adapters.forward(model, None, input_ids=TINY_IDS)
    adapters.forward(model, agents[1].critic, input_ids=TINY_IDS)
    adapters.forward(model, agents[1].actor, input_ids=TINY_IDS).logits.square().mean().backward()
    agents[1].optimizers[0].step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    assert changed == {name for name in before if ".agent_1_actor." in name}


def test_default_targets_leave_out_the_modules_to_save(tokenizer, write):
    agents = make_team(tiny_base(), tokenizer, **write({"modules_to_save": ["up_proj"]}))
    targets = agents[0].model.peft_config[agents[0].actor].target_modules
    assert targets == set("q_proj k_proj v_proj o_proj gate_proj down_proj".split())


def test_the_four_flags_are_a_short_form(tokenizer, write):
    fields = {"r": 5, "lora_alpha": 7.5, "lora_dropout": 0.25, "target_modules": ["q_proj", "up_proj"]}
    long = make_team(tiny_base(), tokenizer, **write(fields))
    flags = {"lora_rank": 5, "lora_alpha": 7.5, "lora_dropout": 0.25, "lora_target_modules": ("q_proj", "up_proj")}
    short = make_team(tiny_base(), tokenizer, **flags)
    assert long[0].model.peft_config == short[0].model.peft_config
    for name in short[0].model.peft_config:
        assert same_tensors(adapters.parameters(long[0].model, name), adapters.parameters(short[0].model, name))


@every_field
def test_a_configuration_from_python_is_that_of_a_file(tokenizer, write, case):
    fields, _ = FIELDS[case]
    file = make_team(tiny_base(), tokenizer, **write(fields))
    flags = write({}) | {"lora_config": peft.LoraConfig(**fields, base_model_name_or_path="any", task_type="CAUSAL_LM")}
    assert make_team(tiny_base(), tokenizer, **flags)[0].model.peft_config == file[0].model.peft_config


def test_a_configuration_from_python_that_is_not_taken_is_one_line(write):
    with pytest.raises(UserError, match="^--lora-config: bias takes none here, got all$"):
        make_team_args(tiny_base(), **(write({}) | {"lora_config": peft.LoraConfig(bias="all")}))
    with pytest.raises(UserError, match="^--lora-config: Expecting ',' delimiter"):
        make_team_args(tiny_base(), **(write({}) | {"lora_config": '{"r": 3'}))
    with pytest.raises(UserError, match="^--lora-config: Input should be a valid string, got IA3Config"):
        ppo_llm.Args(lora_config=peft.IA3Config())


# --- In files ---------------------------------------------------------------------------------------------------------


@every_tie
@every_field
def test_what_is_saved_is_read_back_to_the_bit(tokenizer, write, tmp_path, case, tied):
    """As a run's checkpoint, and as the run that another starts from; peft opens each adapter."""
    base = tiny_base(tie_word_embeddings=tied)
    flags = write(FIELDS[case][0])
    old = make_team(base, tokenizer, **flags)
    change_adapters(old[0].model)
    adapters.save_agents(tmp_path / "run", old)
    again = make_team(base, tokenizer, **flags)
    adapters.load_agents(tmp_path / "run", again)
    next_stage = make_team(base, tokenizer, load_checkpoint=str(tmp_path / "run"), **flags)
    for name in old[0].model.peft_config:
        weights = adapters.parameters(old[0].model, name)
        assert same_tensors(weights, adapters.parameters(again[0].model, name)), name
        source = name.replace("reference", "actor")
        expected = adapters.parameters(old[0].model, source)
        assert same_tensors(expected, adapters.parameters(next_stage[0].model, name)), name
    opened = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "run/agent_1/critic")
    logits = tiny_logits(old[1].model, old[1].critic)
    torch.testing.assert_close(tiny_logits(opened), logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]], ids=",".join)
def test_an_actor_with_its_own_modules_is_merged_into_the_tied_base(loaded_model, tokenizer, write, tmp_path, modules):
    flags = write({"r": 4, "modules_to_save": modules}, model=TINY, num_agents=1)
    agents = make_team(loaded_model, tokenizer, **flags)
    model = change_adapters(agents[0].model, scale=0.05)
    adapters.save_agents(tmp_path, agents)
    merge_adapter(MergeArgs(str(tmp_path / "agent_0"), str(tmp_path / "out")))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    torch.testing.assert_close(tiny_logits(opened), tiny_logits(model, agents[0].actor), atol=1e-4, rtol=0)


def test_a_policy_without_dora_is_merged_into_dora(tokenizer, write, tmp_path):
    base = tiny_base()
    old = make_team(base, tokenizer, lora_rank=4, lora_alpha=8.0)
    change_adapters(old[0].model)
    adapters.save_agents(tmp_path / "run", old)
    flags = write({"r": 6, "use_dora": True}, load_checkpoint=str(tmp_path / "run"), merge_lora_configs=True)
    with pytest.warns(UserWarning, match="use_dora False there, True here"):
        agents = make_team(base, tokenizer, **flags)
    for before, after in zip(old, agents):
        for name, source in ((after.actor, before.actor), (after.reference, before.actor)):
            logits = tiny_logits(before.model, source)
            torch.testing.assert_close(tiny_logits(after.model, name), logits, atol=1e-5, rtol=0)
        logits = tiny_logits(before.model, before.critic)
        torch.testing.assert_close(tiny_logits(after.model, after.critic), logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("modules", ["lm_head", "embed_tokens"])
def test_a_run_with_its_own_modules_is_resumed_to_the_bit(write, tmp_path, monkeypatch, modules):
    monkeypatch.chdir(tmp_path)
    fields = {"r": 4, "use_dora": True, "rank_pattern": {"q_proj": 2}, "modules_to_save": [modules]}
    flags = write(fields, save_interval=1, keep_checkpoints=9)
    train("ppo", folder="whole", **flags)
    train("ppo", folder="run", **flags)
    for step in (2, 3):
        checkpoint.remove(tmp_path / f"run/checkpoints/update_{step:06d}")
    train("ppo", resume="run", **flags)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# --- What is refused --------------------------------------------------------------------------------------------------

REFUSED = {  # a file, and the message
    "{": "^--lora-config: .*lora.json can't be read as JSON",
    "[4]": r"^--lora-config: .*lora.json is to hold a JSON object, and holds \[4\]",
    '{"rank": 4}': "lora.json: a peft.LoraConfig has no rank$",
    '{"r": "four"}': "lora.json: r: Input should be a valid integer, got four$",
    '{"r": 0}': "lora.json: r: Input should be greater than 0, got 0$",
    '{"lora_dropout": 2}': "lora.json: lora_dropout: Input should be less than or equal to 1, got 2$",
    '{"peft_type": "IA3"}': "lora.json: peft_type takes LORA, got IA3$",
    '{"bias": "all"}': "lora.json: bias takes none here, got all$",
    '{"trainable_token_indices": [3]}': r"lora.json: trainable_token_indices takes None here, got \[3\]$",
    '{"init_lora_weights": "pissa"}': "lora.json: init_lora_weights: Input should be .*'gaussian', got pissa$",
    '{"rank_pattern": {"(": 3}}': r"lora.json: \( is no regular expression: ",
    '{"layers_pattern": "layers"}': "lora.json: When `layers_pattern` is specified, `layers_to_transform` must",
    '{"target_modules": ["nothing"]}': "lora.json takes names of linear layers .*, and the model has no nothing$",
    '{"target_modules": ".*norm"}': r"lora.json takes names of linear layers .*, and \.\*norm means model.*norm$",
    '{"modules_to_save": ["nothing"]}': "lora.json: modules_to_save takes names of modules, and the model has no noth",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_file_that_is_wrong_is_one_line(tokenizer, write, text):
    with pytest.raises(UserError, match=REFUSED[text]) as error:
        make_team(tiny_base(), tokenizer, **write(text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [{"lora_rank": 8}, {"lora_alpha": 4.0}, {"lora_dropout": 0.5}, {"lora_target_modules": ("q_proj",)}],
    ids=str,
)
def test_a_flag_of_the_short_form_beside_a_file_is_refused(write, flags):
    (flag,) = flags
    with pytest.raises(UserError, match=f"^--lora-config takes the place of --{flag.replace('_', '-')}; give one"):
        make_team_args(tiny_base(), **write({}, **flags))
