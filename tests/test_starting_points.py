"""--load-checkpoint: what a run of adapters takes from the run that it starts from, and what it leaves to the next."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from helpers import tiny_base
from safetensors.torch import load_file, save_file
from teams import IDS, logits_of, make_args, make_team, roles_of, same_policy, shake
from transformers import LlamaConfig, LlamaModel

import ippo_llm
import maac_llm
import magrpo_llm
from utils.cli import UserError
from utils.models import weights
from utils.models.weights import optimizers_of


@pytest.fixture(scope="module")
def old(base, tokenizer):
    """A team that has learned, with moments: not to be changed."""
    agents = shake(make_team(base, tokenizer))
    for agent in agents:
        loss = sum(logits_of_with_gradient(policy).square().mean() for policy in (agent.actor, agent.critic))
        (loss + agent.value_head(torch.ones(1, 32)).sum()).backward()
        for optimizer in optimizers_of(agent):
            optimizer.step()
    return agents


def logits_of_with_gradient(policy):
    with policy.active():
        return policy.model.get_base_model()(IDS).logits


@pytest.fixture(scope="module")
def saved(old, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    weights.save_agents(path, old, with_optimizer=True)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    return str(shutil.copytree(saved, tmp_path / "old"))


# --- What is loaded ---------------------------------------------------------------------------------------------------


def test_the_actor_there_is_actor_and_reference(base, tokenizer, old, folder):
    for before, after in zip(old, make_team(base, tokenizer, load_checkpoint=folder)):
        assert same_policy(after.actor, before.actor) and same_policy(after.reference, before.actor)
        assert same_policy(after.critic, before.critic)
        assert torch.equal(after.value_head[0].weight, before.value_head[0].weight)
        assert not any(optimizer.state for optimizer in after.optimizers)


@pytest.mark.parametrize("script", [ippo_llm, magrpo_llm, maac_llm])
def test_a_script_whose_reference_is_the_base_has_the_actor_there_too(base, tokenizer, old, folder, script):
    agents = make_team(base, tokenizer, script, load_checkpoint=folder)
    for before, after in zip(old, agents):
        assert same_policy(after.actor, before.actor) and same_policy(after.reference, before.actor)
        assert not any(parameter.requires_grad for parameter in after.reference.parameters())
    with torch.no_grad():
        agents[0].actor.parameters()[1].add_(1.0)
    assert same_policy(agents[0].reference, old[0].actor)


def test_references_stay_with_the_flag(base, tokenizer, old, folder):
    for before, after in zip(old, make_team(base, tokenizer, load_checkpoint=folder, keep_reference=True)):
        assert same_policy(after.reference, before.reference) and not same_policy(after.reference, before.actor)
        assert same_policy(after.actor, before.actor)


def test_a_reference_that_was_the_base_stays_so_with_the_flag(base, tokenizer, tmp_path):
    old = shake(make_team(base, tokenizer, ippo_llm))
    weights.save_agents(tmp_path / "old", old)
    assert not (tmp_path / "old/agent_0/reference").exists()
    agents = make_team(base, tokenizer, ippo_llm, load_checkpoint=str(tmp_path / "old"), keep_reference=True)
    assert torch.equal(logits_of(agents[0].reference), base(IDS).logits)
    assert same_policy(agents[0].actor, old[0].actor)


def test_critics_and_heads_are_new_with_the_flag(base, tokenizer, old, folder):
    (Path(folder) / "agent_1/critic/adapter_model.safetensors").write_bytes(b"")  # and are not read
    (Path(folder) / "agent_1/value_head.safetensors").write_bytes(b"")
    flags = {"fresh_critic": True, "load_optimizer": True}
    for before, after in zip(old, make_team(base, tokenizer, load_checkpoint=folder, **flags)):
        assert torch.equal(logits_of(after.critic), base(IDS).logits)
        assert not after.value_head[0].weight.any() and same_policy(after.actor, before.actor)
        assert after.optimizers[0].state and not after.optimizers[1].state


def test_a_critic_that_is_lacking_begins_as_its_actor(base, tokenizer, old, folder):
    shutil.rmtree(f"{folder}/agent_1/critic")
    (Path(folder) / "agent_1/value_head.safetensors").unlink()
    agents = make_team(base, tokenizer, load_checkpoint=folder)
    assert same_policy(agents[1].critic, old[1].actor) and same_policy(agents[0].critic, old[0].critic)
    assert not agents[1].value_head[0].weight.any()


def test_the_head_of_a_critic_is_not_put_on_an_actor(base, tokenizer, folder):
    agents = make_team(base, tokenizer, load_checkpoint=folder, use_separate_critic=False)
    assert not agents[0].value_head[0].weight.any()


def test_the_head_of_an_actor_is_not_put_on_a_critic_model_of_its_own(base, tokenizer, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaModel(LlamaConfig(vocab_size=768, **sizes)).save_pretrained(tmp_path / "critic")
    weights.save_agents(tmp_path / "old", shake(make_team(base, tokenizer, use_separate_critic=False)))
    flags = {"critic_model_name_or_path": (str(tmp_path / "critic"),), "load_checkpoint": str(tmp_path / "old")}
    assert not make_team(base, tokenizer, **flags)[0].value_head[0].weight.any()
    assert make_team(base, tokenizer, load_checkpoint=str(tmp_path / "old"))[0].value_head[0].weight.any()


def test_a_critic_model_of_its_own_is_loaded_too(base, tokenizer, tmp_path):
    config = LlamaConfig(
        vocab_size=768, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaModel(config).save_pretrained(tmp_path / "critic")
    flags = {"critic_model_name_or_path": (str(tmp_path / "critic"),)}
    old = shake(make_team(base, tokenizer, **flags))
    weights.save_agents(tmp_path / "old", old)
    again = make_team(base, tokenizer, load_checkpoint=str(tmp_path / "old"), **flags)
    assert all(map(torch.equal, again[1].critic.parameters(), old[1].critic.parameters()))
    with pytest.raises(
        UserError, match="/agent_0/critic is a model of its own, and here a critic is adapters: add --f"
    ):
        make_team(base, tokenizer, load_checkpoint=str(tmp_path / "old"))


def test_optimizers_go_on_with_the_flag_at_the_rates_of_the_flags(base, tokenizer, old, folder):
    flags = {"load_optimizer": True, "actor_learning_rate": 0.5}
    for before, after in zip(old, make_team(base, tokenizer, load_checkpoint=folder, **flags)):
        assert after.optimizers[0].param_groups[0]["lr"] == 0.5
        for one, other in zip(before.optimizers, after.optimizers):
            there, here = one.state_dict()["state"], other.state_dict()["state"]
            assert there and there.keys() == here.keys()
            assert all(torch.equal(there[k][name], here[k][name]) for k in there for name in there[k])


def test_without_a_saved_state_optimizers_are_new(base, tokenizer, folder):
    (Path(folder) / "agent_1/optimizer_0.safetensors").unlink()
    with pytest.warns(UserWarning, match="agent_1 has no state of optimizer 0: it is new"):
        agents = make_team(base, tokenizer, load_checkpoint=folder, load_optimizer=True)
    assert agents[0].optimizers[0].state and agents[1].optimizers[1].state and not agents[1].optimizers[0].state


# --- A plain peft folder ----------------------------------------------------------------------------------------------


@pytest.fixture
def plain(base, tmp_path):
    """A folder that peft alone wrote, and its logits."""
    config = peft.LoraConfig(r=4, lora_alpha=8.0, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny_base(), config)
    model.save_pretrained(tmp_path / "plain")
    return str(tmp_path / "plain"), model(IDS).logits


def test_every_agent_starts_with_pefts_own_policy(base, tokenizer, plain):
    agents = make_team(base, tokenizer, ippo_llm, load_checkpoint=plain[0])
    for agent in agents:
        for policy in roles_of(agent).values():
            torch.testing.assert_close(logits_of(policy), plain[1], atol=1e-5, rtol=0)
    assert agents[0].actor.parameters()[0].data_ptr() != agents[1].actor.parameters()[0].data_ptr()


def test_another_name_of_the_base_is_told(base, tokenizer, plain):
    path = Path(plain[0]) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "other/base"}))
    with pytest.warns(UserWarning, match="is of the base other/base by its name, not of "):
        make_team(base, tokenizer, load_checkpoint=plain[0])


# --- Configurations that differ ---------------------------------------------------------------------------------------

OTHERS = {  # flags beside which rank 4 and alpha 8 on all layers is merged
    "a larger rank": {"lora_rank": 6},
    "a smaller rank": {"lora_rank": 2},
    "another scale": {"lora_alpha": 3.0},
    "fewer layers": {"lora_target_modules": ("q_proj",)},
    "rslora": {"lora_config": '{"r": 5, "use_rslora": true}'},
    "dora": {"lora_config": '{"r": 6, "use_dora": true}'},
    "modules": {"lora_config": '{"r": 4, "modules_to_save": ["lm_head"]}'},
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_policy_is_merged_into_another_configuration(base, tokenizer, old, folder, case):
    flags = OTHERS[case] | {"load_checkpoint": folder}
    with pytest.raises(UserError, match="takes its LoRA configuration, or --merge-lora-configs: .* there, .* here"):
        make_team(base, tokenizer, **flags)
    with pytest.warns(UserWarning, match="LoRA configuration of .* differs: .* there, .* here; now r "):
        agents = make_team(base, tokenizer, merge_lora_configs=True, **flags)
    for before, after in zip(old, agents):
        assert same_policy(after.actor, before.actor, 1e-5) and same_policy(after.reference, before.actor, 1e-5)
        assert same_policy(after.critic, before.critic, 1e-5)


def test_a_larger_rank_changes_no_logit(base, tokenizer, old, folder):
    flags = {"lora_rank": 8, "lora_alpha": 16.0, "merge_lora_configs": True}
    with pytest.warns(UserWarning):
        agents = make_team(base, tokenizer, load_checkpoint=folder, **flags)
    assert same_policy(agents[0].actor, old[0].actor, 1e-6)
    assert agents[0].actor.model.peft_config["agent_0_actor"].r == 8


def test_dora_is_not_merged_into_adapters_without(base, tokenizer, tmp_path):
    flags = {"lora_config": '{"r": 4, "lora_alpha": 8.0, "use_dora": true}'}
    weights.save_agents(tmp_path / "old", make_team(base, tokenizer, **flags))
    with pytest.raises(UserError, match="has use_dora, and takes use_dora here too"):
        make_team(base, tokenizer, load_checkpoint=str(tmp_path / "old"), merge_lora_configs=True)


# --- What is refused --------------------------------------------------------------------------------------------------


def remove(name):
    return lambda path: (path / name).unlink()


def cut(name):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-9])


def rename(path):
    (path / "actor/adapter_model.safetensors").rename(path / "actor/adapter_model.bin")


def write(values):
    """Replace values in the actor's configuration."""

    def damage(path):
        config = path / "actor/adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | values))

    return damage


def change(function):
    """Change the actor's tensors, {name: tensor}."""

    def damage(path):
        tensors = load_file(path / "actor/adapter_model.safetensors")
        function(tensors)
        save_file(tensors, path / "actor/adapter_model.safetensors")

    return damage


REFUSED = {
    "no base": (remove("base.json"), "agent_1 is incomplete: there is no .*base.json"),
    "no actor": (
        lambda path: shutil.rmtree(path / "actor"),
        "agent_1 is incomplete: there is no .*adapter_config.json",
    ),
    "no weights": (remove("critic/adapter_model.safetensors"), "agent_1 is incomplete: there is no .*safetensors$"),
    "a pickle": (rename, "adapter_model.bin is a pickle, which is not read"),
    "cut weights": (cut("actor/adapter_model.safetensors"), "adapter_model.safetensors is no whole safetensors file"),
    "a cut head": (cut("value_head.safetensors"), "value_head.safetensors is no whole safetensors file"),
    "cut moments": (cut("optimizer_1.safetensors"), "optimizer_1.safetensors is no whole safetensors file"),
    "a tensor less": (change(lambda x: x.pop(next(iter(x)))), r"does not fit: .*lora_.* is not there, \[.*\] here"),
    "a tensor more": (change(lambda x: x.update(more=torch.zeros(3))), r"does not fit: more is \[3\] there, not here"),
    "another shape": (change(lambda x: x.update({next(iter(x)): torch.zeros(3, 3)})), r"fit: .* is \[3, 3\] there"),
    "cut JSON": (cut("actor/adapter_config.json"), "adapter_config.json can't be read as JSON"),
    "IA3": (write({"peft_type": "IA3"}), "is no LoRA configuration: peft_type is IA3"),
    "no rank": (write({"r": None}), "is no LoRA configuration: r is None"),
    "a word": (write({"r": "four"}), "adapter_config.json: r: Input should be a valid integer, .*got four"),
    "no layer": (write({"target_modules": "q.*"}), r"takes names of linear layers .*, and q\.\* means no layer"),
    "fewer agents": (shutil.rmtree, "--load-checkpoint .*old has 1 agent, and the team has 2$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_damaged_is_one_line(base, tokenizer, folder, case):
    damage, message = REFUSED[case]
    damage(Path(folder) / "agent_1")
    with pytest.raises(UserError, match=message) as error:
        make_team(base, tokenizer, load_checkpoint=folder, load_optimizer=True)
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_base_is_refused(tokenizer, folder):
    with pytest.raises(UserError, match="agent_0 is of the base some/base, not of .*: the weights differ$"):
        make_team(tiny_base(seed=3), tokenizer, load_checkpoint=folder)
    with pytest.raises(UserError, match="num_hidden_layers 2 there, 1 here$"):
        make_team(tiny_base(num_hidden_layers=1), tokenizer, load_checkpoint=folder)


def test_a_folder_that_is_none_is_one_line(tmp_path):
    with pytest.raises(UserError, match="--load-checkpoint takes a folder with agent_0 .*: there is no such folder$"):
        make_args(load_checkpoint=str(tmp_path / "no")).check_models()


def test_a_plain_folder_has_no_references_to_keep(plain):
    with pytest.raises(UserError, match="^--keep-reference takes a run's folder, and .* is a peft folder"):
        make_args(load_checkpoint=plain[0], keep_reference=True).check_models()


def test_optimizers_of_other_adapters_are_refused(base, tokenizer, folder):
    flags = {"lora_rank": 6, "merge_lora_configs": True, "load_optimizer": True}
    with pytest.raises(UserError, match="^--load-optimizer takes the LoRA configuration of .*, not a merged one: r 4"):
        make_team(base, tokenizer, load_checkpoint=folder, **flags)
