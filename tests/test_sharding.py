"""Two processes with --shard hold half of every weight each: they learn, save and go on as one process does."""

import copy
import json

import peft
import pytest
import torch
from helpers import read_metrics, tiny_base
from processes import (
    alone,
    assert_same,
    cut,
    finish,
    finish_two,
    finish_two_works,
    largest_difference,
    saved_steps,
    start_two,
)
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
from utils import distributed
from utils.cli import UserError
from utils.models import adapters, sharding

TASK = """
import datasets
def posts(size, seed): return datasets.Dataset.from_list([{"number": k, "seed": seed} for k in range(size)])
train_dataset = eval_dataset = posts
def formatters(item): return f"Write about {item['seed']} {item['number']}."
def reward_func(*texts, items):
    return [float(len(first) + len(second) + item["number"]) for first, second, item in zip(*texts, items)]
"""
# All joint samples of an update are in one mini-batch: it is the same for one process and for two.
EIGHT_UPDATES = "--train-size 16 --num-train-epochs 2 --rollout-buffer-size 4 --mini-batch-size 4 --save-interval 4"
HELD_OUT = "--eval-size 1 --eval-interval 4"  # none for the second process
GREEDY = "--no-do-sample --max-new-tokens 16 --actor-learning-rate 1e-4 --critic-learning-rate 1e-4 --adam-epsilon 1e-5"
CRITIC = "--use-separate-critic --critic-value-head-hidden-dim 8"
FLAGS = f"{EIGHT_UPDATES} {HELD_OUT} {GREEDY} {CRITIC}".split()


# --- Two processes and a model ----------------------------------------------------------------------------------------


IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def work():
    """Print what each of two processes finds, in order of rank, as a line of JSON."""
    distributed.start()
    rank = distributed.rank()
    model = tiny_base(tie_word_embeddings=True)
    right = copy.deepcopy(model)
    head = nn.Linear(48, 1)
    head.load_state_dict({"weight": torch.ones(1, 48), "bias": torch.zeros(1)})
    right_head = copy.deepcopy(head)
    sharding.shard_model(model)
    found = {
        "own": sum(x.to_local().numel() for x in model.parameters()),
        "all": sum(x.numel() for x in right.parameters()),
    }

    with torch.no_grad(), sharding.whole_models([model]):  # each makes a number of passes of its own
        for _ in range(1 + 2 * rank):
            logits = model(IDS).logits
        found["same logits"] = torch.equal(logits, right(IDS).logits)

    head(model(IDS[rank : rank + 1]).logits).square().sum().backward()
    (right_head(right(IDS).logits).square().sum() / 2).backward()
    distributed.average_gradients([*model.parameters(), *head.parameters()])
    found["norm"] = sharding.average_and_clip_gradients([*model.parameters(), *head.parameters()], 0.5).item()
    found["right norm"] = nn.utils.clip_grad_norm_([*right.parameters(), *right_head.parameters()], 0.5).item()
    pairs = list(zip([*model.parameters(), *head.parameters()], [*right.parameters(), *right_head.parameters()]))
    found["error"] = max((sharding.whole(x.grad) - y.grad).abs().max().item() for x, y in pairs)

    whole = sharding.whole_tensors(model.state_dict(keep_vars=True))
    found["names"] = whole.keys() == right.state_dict().keys()
    found["whole"] = [x is not None and torch.equal(x, right.state_dict()[name]) for name, x in whole.items()]
    found["tied"] = whole["lm_head.weight"] is whole["model.embed_tokens.weight"]
    found |= work_on_adapters()
    distributed.say(json.dumps(distributed.gather_objects(found)))


def work_on_adapters():
    """What each finds of a base under adapters."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = adapters.add_adapters(tiny_base(tie_word_embeddings=True), config, ["agent_0_critic"])
    base = model.get_base_model()
    num_weights = sum(x.numel() for name, x in base.named_parameters() if "lora" not in name)
    adapters.shard_base(model)
    held = sum(x.to_local().numel() for name, x in base.named_parameters() if "lora" not in name)
    return {
        "share of the base": held / num_weights,
        "whole adapters": not any(isinstance(x, DTensor) for x in adapters.parameters(model, "agent_0_critic")),
    }


@pytest.fixture(scope="module")
def found():
    """What each of two processes found, in order of rank."""
    main, _ = finish_two_works(work)
    return json.loads(main.output.splitlines()[-1])


def test_each_process_holds_half(found):
    for each in found:
        assert each["own"] == each["all"] / 2


def test_whole_models_compute_the_same_bits_in_numbers_of_passes_that_differ(found):
    for each in found:
        assert each["same logits"]


def test_gradients_are_averaged_once_and_clipped_by_the_norm_over_all(found):
    for each in found:
        assert each["norm"] == pytest.approx(each["right norm"], rel=1e-6) and each["norm"] > 1
        assert each["error"] < 1e-6


def test_whole_tensors_are_those_of_the_model_in_the_main_process(found):
    assert all(each["names"] and each["tied"] for each in found)
    assert all(found[0]["whole"])
    assert not any(found[1]["whole"])


def test_a_base_is_sharded_and_its_adapters_are_whole(found):
    for each in found:
        assert each["share of the base"] == 0.5
        assert each["whole adapters"]


# --- Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task(shared_folder):
    path = shared_folder / "lengths.py"
    path.write_text(TASK)
    return ["--task", path]


@pytest.fixture(scope="module")
def sharded(shared_folder, task):
    """The folder of a run of two processes that share each model."""
    folder = shared_folder / "sharded"
    with alone(shared_folder / "sharded.lock"):
        if not (folder / "agent_1").exists():
            finish_two("ippo_llm", *FLAGS, *task, "--shard", "--output-dir", folder)
    return folder


@pytest.fixture(scope="module")
def whole(shared_folder, task):
    """The folder of the same run of one process."""
    folder = shared_folder / "whole"
    with alone(shared_folder / "whole.lock"):
        if not (folder / "agent_1").exists():
            finish("ippo_llm", *FLAGS, *task, "--output-dir", folder)
    return folder


@pytest.fixture(scope="module")
def doubled(shared_folder, task):
    """The folder of the same run of two processes that have each model whole."""
    folder = shared_folder / "doubled"
    with alone(shared_folder / "doubled.lock"):
        if not (folder / "agent_1").exists():
            finish_two("ippo_llm", *FLAGS, *task, "--output-dir", folder)
    return folder


def test_two_processes_learn_what_one_does(doubled, whole):
    for i in range(2):
        name = f"checkpoints/update_000008/agent_{i}"
        assert largest_difference(doubled / name, whole / name) < 1e-5


def test_two_sharded_processes_learn_what_one_does(sharded, whole):
    for column in ("reward_mean", "agent_0/grad_norm", "agent_1/value_loss"):
        rows = zip(read_metrics(sharded), read_metrics(whole), strict=True)
        for ours, theirs in rows:
            assert float(ours[column]) == pytest.approx(float(theirs[column]), rel=1e-4)
    assert read_metrics(sharded)[3]["eval/reward_mean"] == read_metrics(whole)[3]["eval/reward_mean"]
    for i in range(2):
        name = f"checkpoints/update_000008/agent_{i}"  # with moments
        assert largest_difference(sharded / name, whole / name) < 1e-5
        assert largest_difference(sharded / name, whole / f"checkpoints/update_000004/agent_{i}") > 1e-4


def test_the_folders_are_those_of_one_process(sharded, whole):
    for i in range(2):
        names = [path.relative_to(whole) for path in (whole / f"agent_{i}").rglob("*") if path.is_file()]
        assert len(names) > 6
        for name in names:
            ours = sharded / name
            if name.suffix == ".safetensors":
                assert ours.stat().st_size == (whole / name).stat().st_size
            else:
                assert ours.read_bytes() == (whole / name).read_bytes()


def test_transformers_opens_the_folders(sharded):
    actor, messages = AutoModelForCausalLM.from_pretrained(sharded / "agent_0", output_loading_info=True)
    assert not messages["missing_keys"] and type(actor).__name__ == "LlamaForCausalLM"
    critic, messages = AutoModel.from_pretrained(sharded / "agent_0/critic", output_loading_info=True)
    assert not messages["missing_keys"] and type(critic).__name__ == "LlamaModel"


def test_two_sharded_processes_go_on_to_the_same_bits(sharded, tmp_path):
    run = cut(sharded, tmp_path / "run")
    finish_two("ippo_llm", "--resume", run)
    assert_same(run, sharded)
    assert largest_difference(run / "checkpoints", sharded / "checkpoints") == 0


def test_one_process_goes_on_with_a_sharded_run(sharded, tmp_path):
    run = cut(sharded, tmp_path / "run")
    process = finish("ippo_llm", "--resume", run, "--no-shard")
    assert "was a run of 2 processes, and goes on in 1: tokens are sampled" in process.output + process.error
    assert len(read_metrics(run)) == 8
    assert largest_difference(run / "checkpoints", sharded / "checkpoints") < 1e-5


@pytest.mark.slow
def test_two_sharded_processes_go_on_with_a_run_of_one(whole, tmp_path):
    run = cut(whole, tmp_path / "run")
    finish_two("ippo_llm", "--resume", run, "--shard")
    assert len(read_metrics(run)) == 8
    assert largest_difference(run / "checkpoints", whole / "checkpoints") < 1e-5


OTHERS = {  # scripts without critics of each agent's own
    "maac_llm": f"{GREEDY} --critic-type q --critic-value-head-hidden-dim 8",
    "magrpo_llm": f"{GREEDY.replace('--critic-learning-rate 1e-4', '')} --num-generations 2 --advantage-mode raw",
}


@pytest.mark.parametrize("script", ["maac_llm", pytest.param("magrpo_llm", marks=pytest.mark.slow)])
def test_two_sharded_processes_of_other_scripts_learn_what_one_does_and_go_on_to_the_same_bits(script, tmp_path, task):
    flags = [*f"{EIGHT_UPDATES} {HELD_OUT} {OTHERS[script]}".split(), *task]
    if script == "magrpo_llm":  # which answers each item twice
        flags += ["--train-size", 8]
    finish(script, *flags, "--output-dir", tmp_path / "whole")
    finish_two(script, *flags, "--shard", "--output-dir", tmp_path / "sharded", seconds=300)
    names = sorted(path.name for path in (tmp_path / "whole/checkpoints/update_000008").iterdir() if path.is_dir())
    assert names == ["agent_0", "agent_1", *(["critic"] if script == "maac_llm" else [])]
    for name in names:
        learned = tmp_path / f"sharded/checkpoints/update_000008/{name}"
        assert largest_difference(learned, tmp_path / f"whole/checkpoints/update_000008/{name}") < 1e-5
        assert largest_difference(learned, tmp_path / f"whole/checkpoints/update_000004/{name}") > 1e-4
    run = cut(tmp_path / "sharded", tmp_path / "run")
    finish_two(script, "--resume", run, seconds=300)
    assert_same(run, tmp_path / "sharded")
    assert largest_difference(run / "checkpoints", tmp_path / "sharded/checkpoints") == 0


def test_processes_may_play_and_sample_for_different_times(tmp_path):
    """With value heads on the actors, turns that end early, and sampling."""
    flags = "--shard --task number --num-turns 3 --max-new-tokens 4 --train-size 16 --rollout-buffer-size 8 "
    flags += "--mini-batch-size 4 --eval-size 3 --num-train-epochs 1 --early-termination-threshold 0.3"
    finish_two("iac_llm", *flags.split(), "--output-dir", tmp_path / "run")
    assert len(read_metrics(tmp_path / "run")) == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run/agent_1")


def run_out_of_memory():
    """Let memory run out in the second mini-batch of the first agent."""
    loss = ippo_llm.ippo_loss
    calls = []

    def exhaust(*values):
        calls.append(values)
        if len(calls) == 3:  # one of each agent in an update
            raise torch.OutOfMemoryError("out of memory")
        return loss(*values)

    ippo_llm.ippo_loss = exhaust


@pytest.mark.parametrize("victim", [0, 1])
def test_a_sharded_run_that_memory_ended_goes_on_with_smaller_micro_batches(sharded, tmp_path, task, victim):
    run = tmp_path / "run"
    before = [None, None]
    before[victim] = run_out_of_memory
    flags = [*FLAGS, *task, "--shard", "--save-interval", 1, "--keep-checkpoints", 9, "--output-dir", run]
    processes = start_two("ippo_llm", *flags, before=before)
    assert processes[victim].wait(60).exitcode == 2
    assert processes[1 - victim].wait(60).exitcode == 1
    line = "ippo_llm.py: error: out of memory in the phase learn: --micro-batch-size 1 takes less; go on with: python "
    line += f"ippo_llm.py --resume {run} --micro-batch-size 1"
    assert processes[victim].error.splitlines()[-1] == line
    assert "another process of this run has ended" in processes[1 - victim].error.splitlines()[-1]
    assert saved_steps(run) == [1]
    assert not list(run.glob("agent_*"))  # in the midst of learning there is no whole agent

    finish_two("ippo_llm", *line.split("ippo_llm.py ")[-1].split())
    for step in (4, 8):
        name = f"checkpoints/update_00000{step}"
        assert largest_difference(run / name, sharded / name) < 1e-5


# --- One process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [ippo_llm, iac_llm, maac_llm, magrpo_llm], ids=lambda script: script.__name__)
def test_one_process_has_nobody_to_share_with(script):
    with pytest.raises(UserError, match="--shard takes several processes, and this is one"):
        script.main(script.Args(shard=True))
