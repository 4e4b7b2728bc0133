"""A run's folder as agents, in one call."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils.cli import UserError
from utils.files import remove
from utils.load import load
from utils.models.loading import locate
from utils.models.weights import optimizers_of

pytestmark = pytest.mark.usefixtures("quick")
SMALL = {"train_size": 4, "rollout_buffer_size": 4, "mini_batch_size": 4, "num_train_epochs": 1, "eval_interval": 0}
SMALL |= {"num_agents": 2, "max_new_tokens": 2, "num_turns": 1, "task": "number", "eval_size": 2}
RUNS = {  # a script, and flags of a run
    "heads": (ippo_llm, {}),
    "critics": (iac_llm, {"use_separate_critic": True}),
    "a central critic": (maac_llm, {"critic_value_head_hidden_dim": 5}),
    "no critic": (magrpo_llm, {"num_generations": 2}),
    "adapters": (ppo_llm, {"lora_rank": 4}),
    "a configuration": (ppo_llm, {"lora_config": '{"r": 3, "target_modules": ["q_proj"]}'}),
}


def train(folder, script=ippo_llm, **flags):
    return script.main(script.Args(**(SMALL | {"output_dir": str(folder)} | flags)))[0]


def state_of(agents):
    """Of all that is learned, and of what the optimisers remember of it."""
    for agent in agents:
        for optimizer in optimizers_of(agent):
            for parameter in (x for group in optimizer.param_groups for x in group["params"]):
                yield parameter.detach()
                yield from optimizer.state[parameter].values()


def same(agents, others):
    pairs = list(zip(state_of(agents), state_of(others), strict=True))
    return len(pairs) > 10 and all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.rest] * (c == "critics")) for c in RUNS])
def test_a_runs_folder_is_its_agents_as_they_were(case, tmp_path):
    script, flags = RUNS[case]
    learned = train(tmp_path / "run", script, **flags)
    agents, args = load(tmp_path / "run", script)
    assert same(agents, learned) and args.max_new_tokens == 2
    assert [getattr(each, "state", None) for each in agents] == [getattr(each, "state", None) for each in learned]


def test_a_stage_is_loaded_without_the_one_before(tmp_path):
    train(tmp_path / "first", ppo_llm, lora_rank=4)
    flags = {"lora_rank": 8, "merge_lora_configs": True, "load_checkpoint": str(tmp_path / "first")}
    with pytest.warns(UserWarning, match="r 4 there, 8 here"):
        learned = train(tmp_path / "run", ppo_llm, **flags)
    remove(tmp_path / "first")
    agents, args = load(tmp_path / "run", ppo_llm)
    assert same(agents, learned) and args.load_checkpoint is None


def edit(folder, **flags):
    """Change flags in the run's config.json."""
    config = json.loads((folder / "config.json").read_text())
    config["args"] |= flags
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def made(quick, tmp_path_factory):
    """The folder of a run: not to be changed."""
    folder = tmp_path_factory.mktemp("made") / "run"
    train(folder)
    return folder


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def test_code_that_a_folder_names_is_not_run(run, monkeypatch):
    monkeypatch.chdir(run)
    Path("evil.py").write_text("open('ran', 'w')")
    edit(run, trust_remote_code=True, task="evil.py", use_vllm=True, shard=True)
    _, args = load(run, ippo_llm)
    assert not Path("ran").exists() and not (args.trust_remote_code or args.use_vllm or args.shard)
    _, args = load(run, ippo_llm, trust_remote_code=True)
    assert args.trust_remote_code


REFUSED = {  # what becomes of the folder, and the message
    "a value": (lambda run: edit(run, gamma=3.0), "^--gamma: Input should be less than or equal to 1, got 3.0$"),
    "a flag": (lambda run: edit(run, no_such=1), "^load: .* is a run of another script or version: no_such$"),
    "no checkpoint": (lambda run: remove(run / "checkpoints"), "^load: .*/run has no checkpoint$"),
    "no name": (lambda run: edit(run, model=["a loaded model"]), "^--model: the run's model was loaded in Python"),
    "another model": (
        lambda run: edit(run, model=["benchmark/central/model"]),
        "^the run of .* began with another model than agent 0 has here$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_no_whole_run_is_one_line(case, run):
    change, message = REFUSED[case]
    change(run)
    with pytest.raises(UserError, match=message):
        load(run, ippo_llm)


def test_agents_of_two_architectures_start_from_a_checkpoint_of_such(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(locate("utils/tiny_lm"))
    sizes = {"vocab_size": len(tokenizer), "n_positions": 512, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    models = {"model": ("utils/tiny_lm", str(tmp_path / "gpt2")), "lora_rank": 2}
    first = train(tmp_path / "first", **models)
    again = train(tmp_path / "again", **models, load_checkpoint=str(tmp_path / "first"), actor_learning_rate=0.0)
    for one, other in zip(first, again):
        assert all(torch.equal(x, y) for x, y in zip(one.actor.parameters(), other.actor.parameters(), strict=True))
    with pytest.raises(UserError, match="^--no-calc-position-embeddings takes .* rotary positions, not a gpt2$"):
        train(tmp_path / "positions", **models, calc_position_embeddings=False)
    with pytest.raises(UserError, match="^--save-base takes agents of one --model$"):
        train(tmp_path / "base", **models, save_base=True)
