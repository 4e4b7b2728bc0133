"""What a model may be that a flag names or that comes from Python: whole, in any data type, savable."""

import copy
import json
import shutil

import peft
import pytest
import torch
from helpers import build_model
from processes import ROOT
from safetensors.torch import load_file
from short_runs import FLAGS, SCRIPTS, make_task, reward_length, train
from teams import IDS, logits_of, make_args, make_team
from transformers import (
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import ippo_llm
from utils import models
from utils.cli import UserError
from utils.models import weights
from utils.models.loading import check_model, load_frozen

every_script = pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.rest] * (name in ("iac", "maac"))) for name in SCRIPTS]
)
HALVES = [torch.bfloat16, torch.float16]


def load(**flags):
    """Agents of models that flags name, as they begin."""
    args = ippo_llm.Args(**flags)
    return [ippo_llm.Agent(i, initial, 10, args) for i, initial in enumerate(models.load(args))]


# --- Adapters ---------------------------------------------------------------------------------------------------------


def lora_model(base):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(base), config)


def prompt_model(base):
    return peft.get_peft_model(
        copy.deepcopy(base), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )


def model_with_layers(base):
    """peft's layers in a model that is otherwise transformers' own, as AutoModelForCausalLM loads an adapter."""
    return lora_model(base).get_base_model()


@pytest.mark.parametrize("make", [lora_model, prompt_model, model_with_layers])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_model_with_adapters_is_refused_and_one_that_has_them_merged_is_trained(base, tokenizer, make, rank):
    adapted = make(base)
    with pytest.raises(UserError, match=r"^model= has adapters: it takes a model without, .*\(merge_and_unload\)"):
        make_team(adapted, tokenizer, lora_rank=rank)
    if make is lora_model:
        merged = adapted.eval().merge_and_unload()
        agents = make_team(merged, tokenizer, lora_rank=rank)
        assert torch.equal(logits_of(agents[0].actor), merged(IDS).logits)
        assert not torch.equal(merged(IDS).logits, base(IDS).logits)


@pytest.mark.parametrize("flag", ["model", "critic_model_name_or_path"])
def test_a_folder_with_an_adapter_is_refused(tokenizer, small_model, tmp_path, flag):
    build_model(tokenizer).save_pretrained(tmp_path / "both")
    lora_model(build_model(tokenizer)).save_pretrained(tmp_path / "both")
    flags = {flag: str(tmp_path / "both")} | ({"model": small_model} if flag != "model" else {})
    with pytest.raises(UserError, match=f"^--{flag.replace('_', '-')} .*/both has adapters: it takes a model without"):
        load(use_separate_critic=True, **flags)


def test_a_critic_of_load_checkpoint_with_an_adapter_is_refused(base, tokenizer, tmp_path):
    LlamaModel(build_model(tokenizer).config).save_pretrained(tmp_path / "critic")
    flags = {"critic_model_name_or_path": str(tmp_path / "critic")}
    weights.save_agents(tmp_path / "old", make_team(base, tokenizer, **flags))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "old/agent_0/critic")
    lora_model(saved).save_pretrained(tmp_path / "old/agent_0/critic")
    with pytest.raises(UserError, match="^--load-checkpoint .*/critic can't be loaded: "):
        make_team(base, tokenizer, load_checkpoint=str(tmp_path / "old"), **flags)


OTHERS = {
    "a critic": lambda base: LlamaModel(base.config),
    "a classifier": lambda base: LlamaForSequenceClassification(base.config),
    "a module": lambda base: torch.nn.Linear(2, 2),
    "a name": lambda base: "some/base",
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_no_language_model_is_refused(base, tokenizer, case):
    with pytest.raises(UserError, match="^model= takes a causal language model of transformers, got a "):
        make_team(OTHERS[case](base), tokenizer)


# --- Data types -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rank", [0, 4])
def test_what_learns_from_a_model_in_half_precision_is_as_flags_load_it(base, tokenizer, tmp_path, dtype, rank):
    half = copy.deepcopy(base).to(dtype)
    half.save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")
    agents = make_team(half, tokenizer, lora_rank=rank)
    as_loaded = load(model=str(tmp_path / "half"), lora_rank=rank, use_separate_critic=True)
    right = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)(IDS).logits
    for agent in [*agents, *as_loaded]:
        for policy in (agent.actor, agent.critic, agent.reference):
            assert {x.dtype for x in [*policy.model.parameters(), *policy.model.buffers()]} == {torch.float32}
        assert torch.equal(logits_of(agent.actor), right) and torch.equal(logits_of(agent.reference), right)
        assert all(x.dtype == torch.float32 for x in agent.actor.parameters())
    assert {x.dtype for x in half.parameters()} == {dtype}  # the caller's own stays


@every_script
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_small_steps_from_a_model_in_half_precision_are_taken(script, dtype, tokenizer, tmp_path):
    flags = FLAGS[script] | {"lora_rank": 0, "actor_learning_rate": 1e-6}
    args = SCRIPTS[script].Args(**flags, output_dir=str(tmp_path / "run"))
    half = build_model(tokenizer).to(dtype)
    agents, run = SCRIPTS[script].main(args, make_task(reward_length), half, tokenizer)
    before = half.float().state_dict()
    moved = [not torch.equal(x, before[name]) for name, x in agents[0].actor.model.state_dict().items()]
    assert all(moved)  # by less than what half precision can tell apart
    saved = AutoModelForCausalLM.from_pretrained(run.folder / "agent_0")
    assert saved.dtype == torch.float32 and torch.equal(saved(IDS).logits, agents[0].actor.model(IDS).logits)


def test_the_flag_takes_a_model_in_float32_to_bfloat16(base):
    args = make_args(lora_rank=0, dtype="bfloat16")
    frozen = load_frozen("some/base", args, "cpu", base)
    assert {x.dtype for x in frozen.parameters()} == {torch.bfloat16}
    assert {x.dtype for x in frozen.buffers()} == {torch.float32} == {x.dtype for x in base.parameters()}


def test_the_older_name_of_the_data_type_is_refused(small_model):
    with pytest.raises(UserError, match="^--model-config torch_dtype: it is a flag of its own, --dtype$"):
        load(model=small_model, model_config={"torch_dtype": "float16"})


# --- What can be saved ------------------------------------------------------------------------------------------------

GREEDY = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "pad_token_id": -1, "repetition_penalty": 1.5}


@pytest.mark.parametrize("given", [False, True], ids=["by a flag", "from Python"])
@every_script
def test_a_generation_config_that_transformers_refuses_is_mended_at_the_start(
    script, given, small_model, tokenizer, tmp_path, capsys
):
    model = build_model(tokenizer)
    for name, value in GREEDY.items():
        setattr(model.generation_config, name, value)
    run, read = save_and_resume(script, model, tokenizer, tmp_path, given)
    assert "its generation_config goes without temperature, top_p" in capsys.readouterr().out.replace(
        "pad_token_id, ", ""
    )
    saved = read.generation_config
    assert (saved.temperature, saved.top_p, saved.pad_token_id) == (None, None, None)
    assert saved.repetition_penalty == 1.5 and saved.eos_token_id == tokenizer.eos_token_id


def test_a_temperature_in_config_json_is_mended_at_the_start(tokenizer, tmp_path):
    model = build_model(tokenizer)
    _, read = save_and_resume("ippo", model, tokenizer, tmp_path, False, temperature=0.7)
    assert read.generation_config.temperature is None


def save_and_resume(script, model, tokenizer, tmp_path, given, **config):
    """A run of two updates that is paused after the first and resumed: itself, and its first actor as it was saved."""
    flags = FLAGS[script] | {"save_interval": 0, "lora_rank": 0}
    if not given:
        folder = tmp_path / "model"
        generation = model.generation_config.to_dict()
        model.generation_config = type(model.generation_config)()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        if not config:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | config))
        flags["model"] = str(folder)
        model = tokenizer = None
    for more in ({"output_dir": str(tmp_path / "run"), "pause_at": 1}, {"resume": str(tmp_path / "run")}):
        args = SCRIPTS[script].Args(**flags, **more)
        agents, run = SCRIPTS[script].main(args, make_task(reward_length), model, tokenizer)
    read = AutoModelForCausalLM.from_pretrained(run.folder / "agent_0")
    assert run.step == run.num_updates and torch.equal(read(IDS).logits, agents[0].actor.model(IDS).logits)
    return run, read


def test_what_can_not_be_saved_at_all_is_found_before_training(tokenizer, tmp_path):
    model = build_model(tokenizer)
    model.config.colour = object()
    with pytest.raises(UserError, match="^model= could not be saved: .*not JSON serializable"):
        make_team(model, tokenizer, lora_rank=0)
    own = copy.deepcopy(tokenizer)
    own.init_kwargs["colour"] = object()
    with pytest.raises(UserError, match="^tokenizer= could not be saved: .*not JSON serializable"):
        make_team(build_model(tokenizer), own, lora_rank=0)


def test_what_fails_at_a_checkpoint_loses_no_agents(monkeypatch, tmp_path):
    """Such as a state that is no JSON value."""
    trained = []

    class Agent(ippo_llm.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.state["more"] = object()
            trained.append(self)

    monkeypatch.setattr(ippo_llm, "Agent", Agent)
    with pytest.raises(TypeError, match="not JSON serializable"):
        train("ippo", folder=tmp_path / "run", save_interval=2)
    for i, agent in enumerate(trained):
        read = AutoModelForCausalLM.from_pretrained(tmp_path / f"run/agent_{i}")
        assert torch.equal(read(IDS).logits, agent.actor.model(IDS).logits)
        assert not torch.equal(read(IDS).logits, agent.reference.model(IDS).logits)


class TwoHeads(torch.nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, hidden_states):
        return self.first(hidden_states)


def test_layers_that_are_frozen_behind_the_optimizer_are_saved(monkeypatch, tmp_path):
    class Agent(ippo_llm.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.actor.model.requires_grad_(False)
            self.actor.model.base_model.layers[-1:].requires_grad_(True)

    monkeypatch.setattr(ippo_llm, "Agent", Agent)
    train("ippo", folder=tmp_path / "run")
    assert (tmp_path / "run/agent_0/model.safetensors").is_file()


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_module_that_no_checkpoint_would_have_is_one_line(is_saved, monkeypatch, tmp_path):
    class Agent(ippo_llm.Agent):
        def __init__(self, i, initial, num_updates, args):
            super().__init__(i, initial, num_updates, args)
            both = TwoHeads(self.value_head, torch.nn.Linear(3, 1))
            self.optimizers[1] = models.adamw([both], args.critic_learning_rate, args)
            self.schedules[1] = models.lr_schedule(self.optimizers[1], num_updates, args)
            if is_saved:
                self.value_head = both

    monkeypatch.setattr(ippo_llm, "Agent", Agent)
    if is_saved:
        train("ippo", folder=tmp_path / "run")
        assert {"second.weight", "second.bias"} < set(load_file(tmp_path / "run/agent_0/value_head.safetensors"))
    else:
        with pytest.raises(UserError, match="^agent_0 learns 2 tensors that no checkpoint would have: "):
            train("ippo", folder=tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("owner", [PreTrainedModel, PreTrainedTokenizerBase])
def test_what_fails_at_a_save_loses_no_weights(owner, monkeypatch, tmp_path, capsys):
    def refuse(*_, **__):
        raise ValueError("refused")

    def break_saving(*completions, items):
        monkeypatch.setattr(owner, "save_pretrained", refuse)
        return reward_length(*completions, items=items)

    agents, run = train("ippo", break_saving, tmp_path / "run")
    assert "is written without what transformers does not save: ValueError: refused" in capsys.readouterr().out
    monkeypatch.undo()
    for i, agent in enumerate(agents):
        agent.actor.config.save_pretrained(run.folder / f"agent_{i}")
        read = AutoModelForCausalLM.from_pretrained(run.folder / f"agent_{i}")
        assert torch.equal(read(IDS).logits, agent.actor.model(IDS).logits)


def test_a_model_of_the_hub_that_lies_in_another_cache_needs_no_hub(tmp_path, monkeypatch):
    def call_hub(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", call_hub)
    commit = "0" * 40
    folder = tmp_path / "models--org--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    shutil.copytree(ROOT / "utils/tiny_lm", folder / "snapshots" / commit)
    settings = {"cache_dir": str(tmp_path), "local_files_only": True}
    assert check_model("org/tiny", "--model", False, settings, "--model-config").model_type == "llama"
    with pytest.raises(UserError, match="^--model .*org/tiny is no folder and can't be reached: no network$"):
        check_model("org/tiny", "--model", False)
