"""What a run of ppo_llm leaves: actors that open elsewhere, a stage for the next run, and curves without a penalty."""

import copy
import csv

import peft
import pytest
import torch
from helpers import TINY_IDS, make_ppo_args, read_metrics, tiny_logits, with_curves
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ppo_llm
import utils.enjoy
import utils.merge_adapter
import utils.plot
from utils import adapters


def train(folder, **flags):
    """The agents of a run of two updates."""
    agents, _ = ppo_llm.main(make_ppo_args(folder, max_turns=2, evaluation_interval=0, **flags))
    return agents


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """(folder, agents) of a run."""
    folder = tmp_path_factory.mktemp("stage")
    return folder / "run", train(folder, env="guess")


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """(folder, agents) of a run of a team."""
    folder = tmp_path_factory.mktemp("team")
    return folder / "run", train(folder, task="number", num_agents=2)


# --- The agents -------------------------------------------------------------------------------------------------------


def test_a_run_has_learned(stage, loaded_model):
    _, (agent,) = stage
    assert (tiny_logits(agent.model, agent.actor) - tiny_logits(loaded_model)).abs().max() > 1e-2


@pytest.mark.parametrize("run, i", [("stage", 0), ("team", 0), ("team", 1)])
def test_peft_opens_a_saved_actor(request, loaded_model, run, i):
    folder, agents = request.getfixturevalue(run)
    opened = peft.PeftModel.from_pretrained(copy.deepcopy(loaded_model), folder / f"agent_{i}" / "actor").eval()
    assert torch.equal(tiny_logits(opened), tiny_logits(agents[i].model, agents[i].actor))


@pytest.mark.parametrize("run, i", [("stage", 0), ("team", 1)])
def test_a_saved_actor_can_be_merged_into_its_base(request, tmp_path, run, i):
    folder, agents = request.getfixturevalue(run)
    utils.merge_adapter.main(utils.merge_adapter.Args(str(folder / f"agent_{i}"), str(tmp_path / "out")))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    torch.testing.assert_close(tiny_logits(opened), tiny_logits(agents[i].model, agents[i].actor), atol=1e-4, rtol=0)


def test_agents_of_a_team_have_learned_different_things(team):
    _, (first, second) = team
    assert not torch.equal(tiny_logits(first.model, first.actor), tiny_logits(second.model, second.actor))


def test_the_base_of_a_run_is_as_it_was(team, loaded_model):
    _, agents = team
    with torch.no_grad():
        assert torch.equal(
            adapters.forward(agents[0].model, None, input_ids=TINY_IDS).logits, tiny_logits(loaded_model)
        )


# --- The next stage ---------------------------------------------------------------------------------------------------


@pytest.fixture
def next_stage(stage, tmp_path, monkeypatch):
    """A function of flags: (folder, agent) of a run that begins with the stage and makes no update."""
    monkeypatch.setattr(ppo_llm.tasks, "batches", lambda *_: [])

    def run(**flags):
        (agent,) = train(tmp_path, env="guess", load_checkpoint=str(stage[0]), seed=2, **flags)
        return tmp_path / "run", agent

    return run


@pytest.mark.parametrize("role, source", [("actor", "actor"), ("reference", "actor"), ("critic", "critic")])
def test_an_adapter_of_the_next_stage_is_the_stages(stage, next_stage, role, source):
    folder, _ = next_stage()
    found = load_file(folder / "agent_0" / role / "adapter_model.safetensors")
    expected = load_file(stage[0] / "agent_0" / source / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_value_head_of_the_next_stage_is_the_stages(stage, next_stage):
    _, agent = next_stage()
    head = stage[1][0].value_head
    assert head.weight.any() and torch.equal(agent.value_head.weight, head.weight)


def test_the_optimizer_of_the_next_stage_is_new(next_stage):
    _, agent = next_stage()
    assert not agent.optimizers[0].state_dict()["state"]


def test_the_optimizer_of_the_next_stage_goes_on_with_the_flag(stage, next_stage):
    _, agent = next_stage(load_optimizer=True)
    found = agent.optimizers[0].state_dict()["state"]
    expected = stage[1][0].optimizers[0].state_dict()["state"]
    assert found.keys() == expected.keys() and len(expected) > 0
    for k, moments in expected.items():
        assert float(moments["step"]) == 2
        assert all(torch.equal(found[k][name], x) for name, x in moments.items())


def test_the_learning_rates_of_the_next_stage_are_its_own(next_stage):
    _, agent = next_stage(load_optimizer=True, lr_actor=0.02, lr_critic=0.03)
    assert [group["initial_lr"] for group in agent.optimizers[0].param_groups] == [0.02, 0.03]


# --- A run without a penalty ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_penalty(tmp_path_factory):
    """The folder of a run without a penalty."""
    folder = tmp_path_factory.mktemp("without_penalty")
    with with_curves():
        train(folder, env="guess", beta=0.0)
    return folder / "run"


def test_a_run_without_a_penalty_has_no_column_of_the_reference(without_penalty):
    rows = read_metrics(without_penalty)
    assert len(rows) == 2
    assert not {"kl", "reference_logprob"} & rows[0].keys()


def test_a_run_without_a_penalty_has_curves(without_penalty):
    assert (without_penalty / "curves.png").stat().st_size > 10_000


def test_runs_with_and_without_a_penalty_are_compared(without_penalty, stage, tmp_path):
    runs = (f"without:{without_penalty}", f"with:{stage[0]}")
    utils.plot.main(utils.plot.Args(runs=runs, output_dir=str(tmp_path)))
    with open(tmp_path / "table.csv", newline="") as file:
        logprobs = {row["label"]: row["reference_logprob"] for row in csv.DictReader(file)}
    assert logprobs["without"] == "" and float(logprobs["with"]) < 0


def test_a_run_without_a_penalty_is_shown(without_penalty, capsys):
    utils.enjoy.main(utils.enjoy.Args(str(without_penalty), items=1))
    assert "mean reward over 1 item" in capsys.readouterr().out
