"""--load-checkpoint of a folder that is damaged, incomplete or of another base: one line, which names the file."""

import json

import pytest
import torch
from helpers import make_team, randomise_adapters, tiny_base
from safetensors.torch import load_file, save_file

from utils.cli import UserError
from utils.models import adapters, stages


@pytest.fixture
def stage(base, tokenizer, tmp_path):
    """The folder of a stage of two agents."""
    agents = make_team(base, tokenizer)
    randomise_adapters(agents[0].model)
    adapters.save_agents(tmp_path / "stage", agents)
    return tmp_path / "stage"


# --- Ways to damage a file --------------------------------------------------------------------------------------------


def remove(path):
    path.unlink()


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


def garble(path):
    path.write_bytes(b"\x80\x04 no such thing" * 20)


def make_a_list(path):
    path.write_text("[1]")


def lose_a_tensor(path):
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path)


def reshape_a_tensor(path):
    tensors = load_file(path)
    tensors[next(iter(tensors))] = torch.zeros(3, 3)
    save_file(tensors, path)


def add_a_tensor(path):
    save_file(load_file(path) | {"something.else": torch.zeros(3)}, path)


def write(values):
    """Replace values of a JSON object."""

    def damage(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    damage.__name__ = str(values)
    return damage


ACTOR = "actor/adapter_model.safetensors"
CRITIC = "critic/adapter_model.safetensors"
CONFIG = "actor/adapter_config.json"
HEAD = "value_head.safetensors"
DAMAGES = [
    (CONFIG, remove, "is incomplete: there is no .*agent_1/actor/adapter_config.json"),
    (ACTOR, remove, "is incomplete: there is no .*actor/adapter_model.safetensors"),
    (CRITIC, remove, "is incomplete: there is no .*critic/adapter_model.safetensors"),
    ("base.json", remove, "is incomplete: there is no .*base.json"),
    ("base.json", garble, "agent_1/base.json can't be read as JSON"),
    ("base.json", write({"base": "x", "fingerprint": 3}), "is of the base x, not of some/base: model_type None there"),
    (CONFIG, garble, "adapter_config.json can't be read as JSON"),
    (CONFIG, empty, "adapter_config.json can't be read as JSON"),
    (CONFIG, make_a_list, r"adapter_config.json is to hold a JSON object, and holds \[1\]"),
    (CONFIG, write({"peft_type": "IA3"}), "is no LoRA configuration: peft_type is IA3"),
    (CONFIG, write({"r": "four"}), "adapter_config.json: r: Input should be a valid integer, .*got four"),
    (CONFIG, write({"r": None}), "is no LoRA configuration: r is None"),
    (CONFIG, write({"target_modules": "q.*"}), r"takes names of linear layers .*, and q\.\* means no layer"),
    (CONFIG, write({"target_modules": "q.*("}), r"adapter_config.json: q\.\*\( is no regular expression: "),
    (CONFIG, write({"alpha_pattern": {"q_proj": -3}}), "adapter_config.json: alpha_pattern: Input should be greater"),
    (ACTOR, cut, "agent_1/actor/adapter_model.safetensors is no whole safetensors file"),
    (ACTOR, empty, "adapter_model.safetensors is no whole safetensors file"),
    (CRITIC, garble, "critic/adapter_model.safetensors is no whole safetensors file"),
    (ACTOR, lose_a_tensor, r"does not fit: .*lora_.* is not there, \[.*\] here"),
    (ACTOR, reshape_a_tensor, r"does not fit: .*lora_.* is \[3, 3\] there, \[.*\] here"),
    (ACTOR, add_a_tensor, r"does not fit: something.else is \[3\] there, not here"),
    (HEAD, cut, "value_head.safetensors is no whole safetensors file"),
    (HEAD, reshape_a_tensor, r"value_head.safetensors does not fit: .* is \[3, 3\] there"),
]


def name_of(value):
    return getattr(value, "__name__", None) or str(value)[:40]


def refusal(base, tokenizer, folder, **flags):
    """The line that a stage is refused with."""
    with pytest.raises(UserError) as error:
        make_team(base, tokenizer, load_checkpoint=str(folder), **flags)
    assert "\n" not in str(error.value)
    return error


@pytest.mark.parametrize("merging", [False, True])
@pytest.mark.parametrize("file, damage, message", DAMAGES, ids=name_of)
def test_a_damaged_stage_is_refused(base, tokenizer, stage, file, damage, message, merging):
    damage(stage / "agent_1" / file)
    assert refusal(base, tokenizer, stage, merge_lora_configs=merging).match(message)


def test_a_stage_of_dora_is_refused_without_dora(base, tokenizer, stage):
    write({"use_dora": True})(stage / "agent_1" / CONFIG)
    assert refusal(base, tokenizer, stage).match(".*agent_1/actor/.* has use_dora, and takes use_dora here too")


def test_a_stage_of_more_agents_than_the_team_has_is_refused(stage):
    with pytest.raises(UserError, match="has 2 agents, and the team has 1"):
        stages.find_agents(stage, 1)


@pytest.mark.parametrize(
    "config, reason",
    [
        ({"seed": 1}, "the weights differ"),
        ({"hidden_size": 16, "intermediate_size": 32}, "hidden_size 32 there, 16 here"),
    ],
    ids=["weights", "shape"],
)
def test_a_stage_of_another_base_is_refused(tokenizer, stage, config, reason):
    message = f"agent_0 is of the base some/base, not of other/base: {reason}"
    assert refusal(tiny_base(**config), tokenizer, stage, model="other/base").match(f".*{message}")
