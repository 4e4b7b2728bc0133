"""A run's folder as agents, in one call; and what a live agent takes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import peft
import pytest
from helpers import all_parameters, same_tensors
from short_runs import IN_ENV, SCRIPTS, every_script, install_env, small_model, train
from short_runs import Env as Counting

from utils.cli import UserError
from utils.files import remove
from utils.load import load

pytestmark = pytest.mark.usefixtures("in_tmp_path")

RUNS = {  # a script, and flags of a run
    "heads": ("ippo", {}),
    "critics": ("ippo", {"use_separate_critic": True}),
    "iac": ("iac", {}),
    "a central critic": ("maac", {"critic_value_head_hidden_dim": 5}),
    "trees": ("magrpo", {}),
    "adapters": ("ppo", {}),
    "a configuration": ("ppo", {"lora_rank": 16, "lora_alpha": 32.0, "lora_config": peft.LoraConfig(r=3)}),
}


def moments(agent):
    """What the optimisers of an agent remember of each parameter."""
    return [x for optimizer in agent.optimizers for state in optimizer.state.values() for x in state.values()]


def load_run(script, folder="run", **flags):
    model, tokenizer = small_model()
    return load(folder, SCRIPTS[script], "cpu", model=model, tokenizer=tokenizer, **flags)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c == "iac")) for c in RUNS])
def test_a_runs_folder_is_its_agents_as_they_were(case):
    script, flags = RUNS[case]
    learned, run = train(script, **flags)
    agents, args = load_run(script)
    for agent, other in zip(agents, learned, strict=True):
        assert same_tensors(all_parameters(agent), all_parameters(other))
        assert len(moments(agent)) > 0 and same_tensors(moments(agent), moments(other))
    assert script != "ppo" or json.loads(args.lora_config)["r"] == flags.get("lora_config", peft.LoraConfig(r=4)).r
    prompts = ["Say a number."]
    module = SCRIPTS[script]
    assert module.act(agents[1], prompts, args, greedy=True) == module.act(learned[1], prompts, run.args, greedy=True)


def test_a_stage_is_loaded_without_the_one_before():
    train("ppo", folder="first")
    flags = {"lora_rank": 8, "merge_lora_configs": True, "load_checkpoint": "first", "load_optimizer": False}
    with pytest.warns(UserWarning, match="lora_alpha|r 4 there"):
        learned, _ = train("ppo", **flags)
    remove(Path("first"))
    agents, args = load_run("ppo")
    assert args.load_checkpoint is None
    assert same_tensors(all_parameters(agents[1]), all_parameters(learned[1]))
    assert agents[0].model.peft_config[agents[0].actor].r == 8


def test_a_run_in_an_environment_needs_no_environment_to_be_loaded(monkeypatch):
    with monkeypatch.context() as patch:
        install_env(patch, Counting)
        learned, _ = train("ppo", **IN_ENV)
    (agent,), args = load_run("ppo")
    assert args.env == "made_up:Env"
    assert same_tensors(all_parameters(agent), all_parameters(learned[0]))


def edit(**flags):
    """Change flags in the run's config.json."""
    path = Path("run/config.json")
    config = json.loads(path.read_text())
    config["args"] |= flags
    path.write_text(json.dumps(config))


@every_script
def test_code_that_a_folder_names_is_not_run(script):
    train(script)
    Path("evil.py").write_text("open('ran', 'w')")
    edit(trust_remote_code=True, task="evil.py", **({"env": None} if script == "ppo" else {}))
    _, args = load_run(script)
    assert not Path("ran").exists() and args.trust_remote_code is False
    _, args = load_run(script, trust_remote_code=True)
    assert args.trust_remote_code is True
    edit(model=SCRIPTS[script].Args().model, model_config={"use_kernels": True}, use_vllm=True)
    with pytest.raises(UserError, match="^--model-config takes what the configuration of .*, got use_kernels$"):
        load("run", SCRIPTS[script], "cpu")


REFUSED = {  # what becomes of the folder, and the message
    "a value": (lambda: edit(gamma=3.0), "^--gamma: Input should be less than or equal to 1, got 3.0$"),
    "no checkpoint": (lambda: remove(Path("run/checkpoints")), "^load: run has no checkpoint$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_no_whole_run_is_one_line(case):
    change, message = REFUSED[case]
    train("ippo")
    change()
    with pytest.raises(UserError, match=message):
        load_run("ippo")


def test_a_run_on_another_model_is_one_line():
    train("ippo")
    with pytest.raises(UserError, match="^--model: the run's model was loaded in Python, and has no name"):
        load("run", SCRIPTS["ippo"], "cpu")
    edit(model=SCRIPTS["ippo"].Args().model)
    with pytest.raises(UserError, match="^the run of run/.* began with another model than agent 0 has here$"):
        load("run", SCRIPTS["ippo"], "cpu")


# --- Live agents ------------------------------------------------------------------------------------------------------


def test_flags_that_are_not_resolved_build_agents():
    module = SCRIPTS["ppo"]
    args = module.Args(lr_actor=0.5, max_turns=1)
    (agent,) = module.build_agents(args, "cpu", 1, *small_model())
    assert [group["initial_lr"] for group in agent.optimizers[0].param_groups] == [0.5, 0.5]
    with pytest.raises(UserError, match="^--shard takes several processes"):
        module.build_agents(replace(args, shard=True), "cpu", 1, *small_model())


PAGE = (Path(__file__).resolve().parent.parent / "docs/python.md").read_text()
LINE = re.search(r"`(agent\.schedules[^`]*)`", PAGE)[1]  # which sets learning rates


@pytest.mark.parametrize("script, flags", [("ippo", {"anneal_lr": False}), ("ppo", {"cosine_lr_schedule": False})])
def test_the_line_that_sets_learning_rates_holds_from_the_next_step_of_the_schedule(script, flags):
    module = SCRIPTS[script]
    args = module.Args(num_agents=1, **flags)
    (agent,) = module.build_agents(args, "cpu", 4, *small_model())
    exec(LINE, {"agent": agent})
    for _ in range(2):
        agent.optimizers[0].step()
        agent.schedules[0].step()  # as at the end of learn
        assert [group["lr"] for group in agent.optimizers[0].param_groups] == [1e-5, 1e-4]
