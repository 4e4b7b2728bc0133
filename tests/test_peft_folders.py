"""--load-checkpoint of a plain peft folder, which other code made: every agent's actor and reference."""

import copy
import json
import re

import peft
import pytest
import torch
from helpers import (
    TINY_IDS,
    change_adapters,
    make_team,
    make_team_args,
    randomise_value_head,
    tiny_base,
    tiny_logits,
)

from utils.cli import UserError
from utils.models import adapters

TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}


@pytest.fixture
def plain(base, tmp_path):
    """A function of fields of a LoraConfig: a folder that peft alone wrote, and the logits that peft has for it."""

    def build(name="plain", **fields):
        made = change_adapters(peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**(CONFIG | fields))))
        made.save_pretrained(tmp_path / name)
        opened = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name)
        assert not torch.allclose(tiny_logits(opened), tiny_logits(base), atol=1e-2)
        return str(tmp_path / name), tiny_logits(opened)

    return build


def start(base, tokenizer, folder, **flags):
    return make_team(base, tokenizer, load_checkpoint=folder, **flags)


def assert_policies(agents, logits):
    """Actors, references and critics have these logits, to 1e-5."""
    for agent in agents:
        for name in (agent.actor, agent.reference, agent.critic):
            torch.testing.assert_close(tiny_logits(agent.model, name), logits, atol=1e-5, rtol=0)


# --- What it starts ---------------------------------------------------------------------------------------------------


def test_every_agent_starts_with_pefts_own_policy(base, tokenizer, plain):
    folder, logits = plain()
    agents = start(base, tokenizer, folder)
    assert_policies(agents, logits)
    assert not any(agent.value_head.weight.any() for agent in agents)


def test_agents_do_not_share_what_they_start_from(base, tokenizer, plain):
    folder, logits = plain(modules_to_save=["lm_head"])
    config = {"lora_rank": 4, "merge_lora_configs": True}
    agents = start(base, tokenizer, folder, **config)
    loss = adapters.forward(agents[0].model, agents[0].actor, input_ids=TINY_IDS).logits.square().mean()
    loss.backward()
    agents[0].optimizers[0].step()
    assert not torch.allclose(tiny_logits(agents[0].model, agents[0].actor), logits, atol=1e-3)
    assert_policies(agents[1:], logits)
    torch.testing.assert_close(tiny_logits(agents[0].model, agents[0].reference), logits, atol=1e-5, rtol=0)
    assert torch.equal(adapters.forward(agents[0].model, None, input_ids=TINY_IDS).logits, tiny_logits(base))


def test_an_agents_folder_may_be_a_plain_one(base, tokenizer, plain, tmp_path):
    first = plain("team/agent_0")[1]
    (tmp_path / "team/agent_1").mkdir()
    old = make_team(base, tokenizer)
    randomise_value_head(old[1])
    adapters.save_agents(tmp_path / "run", old)
    (tmp_path / "run/agent_1").replace(tmp_path / "team/agent_1")
    agents = start(base, tokenizer, str(tmp_path / "team"))
    assert_policies(agents[:1], first)
    assert_policies(agents[1:], tiny_logits(base))
    assert torch.equal(agents[1].value_head.weight, old[1].value_head.weight)


# --- Its configuration ------------------------------------------------------------------------------------------------

SAME = {  # other ways to say what the flags say
    "a regular expression": {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"},
    "all linear layers": {"target_modules": "all-linear"},
    "full names": {"target_modules": [f"model.layers.{k}.self_attn.q_proj" for k in range(2)] + TARGETS[1:]},
    "layers by number": {"layers_to_transform": [0, 1]},
    "none but": {"target_modules": [*TARGETS, "lm_head"], "exclude_modules": ["lm_head"]},
}


@pytest.mark.filterwarnings("error:the LoRA configuration")
@pytest.mark.parametrize("case", SAME)
def test_targets_may_be_said_in_other_words(base, tokenizer, plain, case):
    folder, logits = plain(**SAME[case])
    assert_policies(start(base, tokenizer, folder), logits)


AS_THERE = {
    "dora": {"use_dora": True},
    "rslora and patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {r".*mlp.*": 3}},
    "modules to save": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "a regular expression": {"target_modules": r".*layers\.1\..*_proj"},
}


@pytest.mark.filterwarnings("error:the LoRA configuration")
@pytest.mark.parametrize("case", AS_THERE)
def test_a_folders_own_configuration_is_a_lora_config(base, tokenizer, plain, case):
    folder, logits = plain(**AS_THERE[case])
    flags = {"lora_rank": 16, "lora_alpha": 32.0, "lora_config": f"{folder}/adapter_config.json"}
    assert_policies(start(base, tokenizer, folder, **flags), logits)


OTHERS = {  # fields there, flags here
    "a smaller rank": ({"r": 4}, {"lora_rank": 8}),
    "a larger rank": ({"r": 8}, {"lora_rank": 4}),
    "other layers": ({"target_modules": r".*layers\.1\..*(q|up)_proj"}, {"lora_target_modules": ("q_proj", "v_proj")}),
    "no linear layers of the head": ({"target_modules": "all-linear"}, {"lora_target_modules": ("lm_head",)}),
    "the head": ({"target_modules": ["lm_head", "q_proj"]}, {}),
    "rank patterns": ({"rank_pattern": {"q_proj": 6, "layers.1.mlp.up_proj": 2}}, {"lora_rank": 3}),
    "alpha patterns": ({"alpha_pattern": {"q_proj": 5, r"layers.\d.mlp.*": 3.5}}, {}),
    "the root of the rank": ({"use_rslora": True, "rank_pattern": {"v_proj": 9}}, {"lora_rank": 5}),
    "dropout": ({"lora_dropout": 0.3}, {}),
    "a module to save": ({"modules_to_save": ["lm_head"]}, {}),
    "modules to save": ({"modules_to_save": ["embed_tokens", "norm"]}, {"lora_rank": 6}),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", OTHERS)
def test_a_policy_is_merged_into_another_configuration(tokenizer, tmp_path, case, tied):
    fields, flags = OTHERS[case]
    base = tiny_base(tie_word_embeddings=tied)
    made = change_adapters(peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**(CONFIG | fields))))
    made.save_pretrained(tmp_path)
    opened = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    with pytest.warns(UserWarning, match="the LoRA configuration of .* differs: "):
        agents = start(base, tokenizer, str(tmp_path), merge_lora_configs=True, **flags)
    assert_policies(agents, tiny_logits(opened))
    assert torch.equal(adapters.forward(agents[0].model, None, input_ids=TINY_IDS).logits, tiny_logits(base))


def test_rank_4_into_rank_8_changes_no_logit(base, tokenizer, plain):
    """With the same alpha / r not even by rounding: what is new is 0."""
    folder, logits = plain()
    with pytest.warns(UserWarning, match="r 4 there, 8 here; lora_alpha 8.0 there, 16.0 here; now r 8"):
        agents = start(base, tokenizer, folder, lora_rank=8, lora_alpha=16.0, merge_lora_configs=True)
    torch.testing.assert_close(tiny_logits(agents[0].model, agents[0].actor), logits, atol=1e-6, rtol=0)
    for parameter in adapters.parameters(agents[0].model, agents[0].actor):
        rank = parameter.shape.index(8)
        assert not parameter.narrow(rank, 4, 4).any() and parameter.narrow(rank, 0, 4).any()


def test_modules_to_save_are_joined(base, tokenizer, plain, tmp_path):
    folder, _ = plain(modules_to_save=["lm_head"])
    (tmp_path / "here.json").write_text(json.dumps(CONFIG | {"modules_to_save": ["norm"]}))
    flags = {"lora_rank": 16, "lora_alpha": 32.0, "lora_config": str(tmp_path / "here.json")}
    with pytest.warns(UserWarning, match="lm_head there, norm here; now .*modules_to_save lm_head,norm"):
        agents = start(base, tokenizer, folder, merge_lora_configs=True, **flags)
    assert agents[0].model.peft_config[agents[0].actor].modules_to_save == ["lm_head", "norm"]


# --- What is refused, or told -----------------------------------------------------------------------------------------


def test_another_name_of_the_base_is_told(base, tokenizer, plain, tmp_path):
    folder, _ = plain()
    config = tmp_path / "plain/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "that/base"}))
    with pytest.warns(UserWarning, match="plain is of the base that/base by its name, not of some/base"):
        start(base, tokenizer, folder)


def test_pickled_weights_are_refused(plain, base, tmp_path):
    folder, _ = plain()
    (tmp_path / "plain/adapter_model.safetensors").rename(tmp_path / "plain/adapter_model.bin")
    with pytest.raises(UserError, match="there is no .*safetensors; adapter_model.bin is a pickle, which is not read$"):
        make_team_args(base, load_checkpoint=folder)


def test_a_layer_with_an_adapter_there_and_a_copy_here_is_refused(base, tokenizer, plain, tmp_path):
    folder, _ = plain(target_modules=["q_proj", "lm_head"])
    (tmp_path / "here.json").write_text(json.dumps(CONFIG | {"modules_to_save": ["lm_head"]}))
    flags = {"lora_rank": 16, "lora_alpha": 32.0, "lora_config": str(tmp_path / "here.json")}
    with pytest.raises(UserError, match=re.escape("does not fit: base_model.model.lm_head.lora_A.weight is [4, 32]")):
        with pytest.warns(UserWarning, match="the LoRA configuration"):
            start(base, tokenizer, folder, merge_lora_configs=True, **flags)
