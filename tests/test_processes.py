"""Two processes are one run: they learn what one does, sharded or whole, and go on to the same bits.

In the runs that are compared all episodes of an update are in one mini-batch, and answers are greedy.
"""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import read_metrics, tiny_base
from processes import (
    ROOT,
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
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import ippo_llm
from utils import distributed
from utils.cli import UserError
from utils.models import sharding

# --- Means, gradients, norms ------------------------------------------------------------------------------------------

NUMBERS = torch.tensor([[1.0, -2.0, 3.5, 0.25], [8.0, 0.5, -1.0, 2.0]])  # those of each process
MASK = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def work():
    """What each of two processes finds; both have to find the same."""
    distributed.start(ippo_llm.Args())
    rank = distributed.rank()
    numbers = NUMBERS[rank].clone()
    assert distributed.world_size() == 2 and distributed.is_main() == (rank == 0)
    assert distributed.sum(numbers).equal(NUMBERS.sum(0)) and distributed.mean(numbers).equal(NUMBERS.mean(0))
    assert distributed.max(IDS[rank]) == 12
    assert distributed.gather(numbers[: 3 * rank]).equal(NUMBERS[1, :3])  # of lengths 0 and 3
    assert distributed.gather_objects(rank) == [0, 1]
    assert numbers.equal(NUMBERS[rank])  # as it was
    mean, std = distributed.mean_std(numbers, MASK[rank])
    right = NUMBERS[MASK > 0]
    torch.testing.assert_close(mean, right.mean())
    torch.testing.assert_close(std, right.std(correction=0))
    own = [{"both": 1.0, "first": 5.0}, {"second": 7.0, "both": torch.tensor(3.0)}][rank]
    assert distributed.mean_by_name(own) == {"both": 2.0, "first": 5.0, "second": 7.0}
    assert [distributed.share([1, 2, 3]), distributed.share([1])] == [[[1], []], [[2, 3], [1]]][rank]

    one, alone, unused = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    ((1 + rank) * one).sum().backward()
    if rank == 0:
        (3 * alone).sum().backward()
    optimizer = torch.optim.SGD([one, alone, unused], lr=1.0)
    norm = distributed.average_and_clip_gradients(optimizer, 1.0)
    torch.testing.assert_close(norm, torch.tensor(4.5).sqrt())  # of 1.5 and 1.5, the means
    torch.testing.assert_close(torch.cat([one.grad, alone.grad]), torch.full((2,), 0.5**0.5))
    assert unused.grad is None
    shard()
    distributed.say("once")


def shard():
    """A sharded model, half of it here, computes what a whole one does, and its gradient is the whole one's."""
    rank = distributed.rank()
    model = tiny_base(tie_word_embeddings=True)
    right = copy.deepcopy(model)
    head = nn.Linear(48, 1)
    nn.init.ones_(head.weight)
    right_head = copy.deepcopy(head)
    sharding.shard_model(model)
    assert sum(x.to_local().numel() for x in model.parameters()) * 2 == sum(x.numel() for x in right.parameters())
    with torch.no_grad(), sharding.whole_models([model]):  # each makes a number of passes of its own
        for _ in range(1 + 2 * rank):
            assert model(IDS).logits.equal(right(IDS).logits)
    head(model(IDS[rank : rank + 1]).logits).square().sum().backward()
    (right_head(right(IDS).logits).square().sum() / 2).backward()
    parameters, right_parameters = [[*x.parameters(), *y.parameters()] for x, y in ((model, head), (right, right_head))]
    norm = distributed.average_and_clip_gradients(torch.optim.SGD(parameters, lr=1.0), 0.5)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(right_parameters, 0.5))
    for x, y in zip(parameters, right_parameters):
        torch.testing.assert_close(sharding.whole(x.grad), y.grad, atol=1e-6, rtol=0)
    whole = sharding.whole_tensors(model.state_dict(keep_vars=True))
    assert whole["lm_head.weight"] is whole["model.embed_tokens.weight"]
    assert all(rank == 1 if x is None else x.equal(right.state_dict()[name]) for name, x in whole.items())


def test_two_processes_mean_gather_and_shard_as_one():
    outputs = [process.output for process in finish_two_works(work)]
    assert [output.count("once") for output in outputs] == [1, 0]


# --- Runs -------------------------------------------------------------------------------------------------------------

TASK = """
import datasets
def posts(size, seed): return datasets.Dataset.from_list([{"number": k} for k in range(size)])
train_dataset = eval_dataset = posts
def formatters(item): return f"Write about {item['number']}."
def reward_func(*texts, items):
    return [sum(map(len, own)) / 4 + item["number"] % 5 for *own, item in zip(*texts, items)]
def external_transition(item, agent_completions):
    return [f"And {item['number'] * 7}?"] * len(agent_completions) if item["number"] % 3 == 1 else None
"""  # so that processes have different numbers of turns
FOUR = (
    "--train-size 16 --num-train-epochs 1 --rollout-buffer-size 4 --mini-batch-size 4 --save-interval 2 --num-agents 2"
)
FLAGS = f"{FOUR} --eval-size 1 --eval-interval 4 --num-turns 2 --no-do-sample --max-new-tokens 8 --adam-epsilon 1e-5"
FLAGS = f"{FLAGS} --actor-learning-rate 1e-4".split()
CRITICS = ["--critic-learning-rate", "1e-4"]
CASES = {
    "ippo": ("ippo_llm", [*CRITICS, "--use-separate-critic"]),
    "ippo adapters": ("ippo_llm", [*CRITICS, "--lora-rank", "2"]),
    "iac": ("iac_llm", CRITICS),
    "maac": ("maac_llm", [*CRITICS, "--no-reward-normalization"]),
    "magrpo": ("magrpo_llm", ["--train-size", "8", "--num-generations", "2", "--advantage-mode", "raw"]),
    "ppo": ("ppo_llm", [*CRITICS, "--update-epochs", "1", "--lora-rank", "2"]),
}
SHARDED = ["ippo", "maac", "ppo"]


@pytest.fixture(scope="module")
def make(shared_folder, small_model):
    """Makes the folder of a run of a case, once: of `one` process, of `two`, or of two that are `sharded`."""
    (shared_folder / "lengths.py").write_text(TASK)

    def make(case, kind):
        script, flags = CASES[case]
        folder = shared_folder / f"{case}_{kind}"
        flags = [*FLAGS, *flags, "--task", shared_folder / "lengths.py", "--model", small_model, "--output-dir", folder]
        with alone(folder.with_suffix(".lock")):
            if not (folder / "agent_1").exists():
                flags += ["--shard"] * (kind == "sharded") + ["--overwrite"]
                (finish if kind == "one" else finish_two)(script, *flags)
        return folder

    return make


@pytest.mark.parametrize("case, kind", [(x, "two") for x in CASES] + [(x, "sharded") for x in SHARDED])
def test_two_processes_learn_and_measure_what_one_does(case, kind, make):
    one, two = make(case, "one"), make(case, kind)
    for row, other in zip(read_metrics(one), read_metrics(two), strict=True):
        assert row.keys() == other.keys()
        for name in row:
            if row[name] and "time/" not in name and "per_second" not in name:
                assert float(other[name]) == pytest.approx(float(row[name]), abs=1e-4, rel=1e-4, nan_ok=True), name
    last, before = "checkpoints/update_000004", "checkpoints/update_000002"  # agents, critics, moments
    assert largest_difference(one / last, two / last) < 1e-5 < 1e-4 < largest_difference(two / last, two / before)


@pytest.mark.parametrize("case", SHARDED)
def test_two_sharded_processes_go_on_to_the_same_bits(case, make, tmp_path):
    run = cut(make(case, "sharded"), tmp_path / "run")
    finish_two(CASES[case][0], "--resume", run)
    assert_same(run, make(case, "sharded"))
    assert largest_difference(run / "checkpoints", make(case, "sharded") / "checkpoints") == 0


def test_the_folders_are_those_of_one_process(make):
    one, sharded = make("ippo", "one"), make("ippo", "sharded")
    for path in [path for path in one.glob("agent_*/**/*") if path.is_file()]:
        other = sharded / path.relative_to(one)
        assert other.stat().st_size == path.stat().st_size
        assert path.suffix == ".safetensors" or other.read_bytes() == path.read_bytes()
    assert AutoModelForCausalLM.from_pretrained(sharded / "agent_0").num_parameters() > 0


def test_one_process_goes_on_with_a_sharded_run_and_says_so(make, tmp_path):
    run = cut(make("ippo", "sharded"), tmp_path / "run")
    process = finish("ippo_llm", "--resume", run, "--no-shard")
    assert "was a run of 2 processes, and goes on in 1: tokens are sampled" in process.output + process.error
    assert largest_difference(run / "checkpoints", make("ippo", "sharded") / "checkpoints") < 1e-5


def test_two_sharded_processes_go_on_with_a_run_of_one(make, tmp_path):
    run = cut(make("ippo", "one"), tmp_path / "run")
    finish_two("ippo_llm", "--resume", run, "--shard")
    assert largest_difference(run / "checkpoints", make("ippo", "one") / "checkpoints") < 1e-5


SAMPLED = "--task number --num-turns 3 --max-new-tokens 4 --train-size 16 --rollout-buffer-size 8 --mini-batch-size 4 "
SAMPLED += "--eval-size 3 --num-train-epochs 1 --model utils/tiny_lm"


@pytest.mark.parametrize("script, more", [("ippo_llm", []), ("iac_llm", ["--shard"])], ids=str)
def test_processes_that_sample_for_different_times_go_on_to_the_same_bits(script, more, tmp_path):
    finish_two(script, *SAMPLED.split(), *more, "--output-dir", tmp_path / "whole", "--save-interval", 1)
    run = cut(tmp_path / "whole", tmp_path / "run")
    state = json.loads((run / "checkpoints/update_000001/state.json").read_text())
    assert len(state["random"]) == 2 and state["random"][0]["generator"] != state["random"][1]["generator"]
    moments = load_file(run / "checkpoints/update_000001/agent_0/optimizer_0.safetensors")
    steps = {int(x) for name, x in moments.items() if name.endswith("step")}
    assert steps == {2}  # of four episodes each, those of both processes together
    finish_two(script, "--resume", run)
    assert_same(run, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_launcher_starts_one_run_over_all_items(launcher, tmp_path):
    launchers = {
        "torchrun": "torch.distributed.run --standalone --nproc-per-node 2",
        "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0",
    }
    task = TASK.replace('sum(map(len, own)) / 4 + item["number"] % 5', "float(item['number'] ** 2)")
    (tmp_path / "squares.py").write_text(task)
    flags = "--rollout-buffer-size 8 --mini-batch-size 4 --train-size 16 --num-train-epochs 1 --eval-size 5"
    flags += " --max-new-tokens 4 --task squares.py"
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *launchers[launcher].split(), str(ROOT / "iac_llm.py"), *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("the run is in") == 1, done.stderr[-2000:]
    assert "ProcessGroup" not in done.stderr and "destroy_process_group" not in done.stderr
    rows = read_metrics(next((tmp_path / "runs").iterdir()))
    assert sum(float(row["reward_mean"]) for row in rows) / 2 == pytest.approx(sum(k**2 for k in range(16)) / 16)
    assert float(rows[-1]["eval/reward_mean"]) == pytest.approx(6.0)  # over items that do not divide among processes


# --- Where one of them fails ------------------------------------------------------------------------------------------


def run_out_of_memory():
    """Let memory run out in the second update of the first agent."""
    gae = ippo_llm.gae
    calls = []

    def exhaust(*values):
        calls.append(values)
        if len(calls) == 3:  # one of each agent in an update
            raise torch.OutOfMemoryError("out of memory")
        return gae(*values)

    ippo_llm.gae = exhaust


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_sharded_run_that_memory_ended_goes_on_with_smaller_micro_batches(
    make, shared_folder, small_model, victim, tmp_path
):
    before = [None, None]
    before[victim] = run_out_of_memory
    whole = make("ippo", "sharded")
    flags = [*FLAGS, *CASES["ippo"][1], "--task", shared_folder / "lengths.py", "--model", small_model, "--shard"]
    run = tmp_path / "run"
    own = ["--save-interval", 1, "--keep-checkpoints", 9, "--output-dir", run]
    processes = start_two("ippo_llm", *flags, *own, before=before)
    assert [processes[i].wait(90).exitcode for i in (victim, 1 - victim)] == [2, 1]
    line = "ippo_llm.py: error: out of memory in learning: --micro-batch-size 1 takes less; go on with: torchrun "
    line += f"--nproc-per-node 2 ippo_llm.py --resume {run} --micro-batch-size 1"
    assert processes[victim].error.splitlines()[-1] == line
    assert "another process of this run has ended" in processes[1 - victim].error.splitlines()[-1]
    assert saved_steps(run) == [1] and not list(run.glob("agent_*"))  # in the midst of learning there is no whole agent
    finish_two("ippo_llm", *line.split("ippo_llm.py ")[-1].split())
    assert largest_difference(run / "checkpoints/update_000004", whole / "checkpoints/update_000004") < 1e-5


# --- One process, and launchers ---------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    """Set the environment that a launcher gives a process."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "ACCELERATE_", "OMPI_", "PMI_", "MASTER_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_one_process_has_what_it_is_given_itself(environment):
    distributed.start(ippo_llm.Args())
    x = torch.tensor([1.0, 2.0])
    assert distributed.rank() == 0 and distributed.world_size() == 1 and distributed.is_main()
    assert distributed.sum(x) is x and distributed.mean(x) is x and distributed.gather(x) is x


def test_one_process_has_nobody_to_share_with(environment):
    with pytest.raises(UserError, match="--shard takes several processes, and this is one"):
        distributed.start(ippo_llm.Args(shard=True))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "srun starts 2 processes .* torchrun"),
        ({"SLURM_STEP_NUM_TASKS": "2", "PMI_RANK": "1", "PMI_SIZE": "2"}, "srun starts 2 processes .* torchrun"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "29500"}, "^WORLD_SIZE is set, and RANK, MASTER_ADDR not: start with tor"),
        (
            {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"},
            "^accelerate launch starts one process of several here: add --multi_gpu",
        ),
    ],
)
def test_processes_that_do_not_know_of_each_other_are_refused(environment, values, message):
    environment(**values)
    with pytest.raises(UserError, match=message):
        distributed.start(ippo_llm.Args())


def test_one_process_of_accelerate_is_taken(environment):
    environment(ACCELERATE_MIXED_PRECISION="no", ACCELERATE_USE_CPU="true")
    distributed.start(ippo_llm.Args())
    assert distributed.device() == torch.device("cpu") and distributed.world_size() == 1


@pytest.mark.parametrize("launcher", distributed.MPI)
def test_the_processes_of_mpi_are_found(environment, monkeypatch, launcher):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    environment(**dict(zip(launcher, ("3", "4", "1", "2"))))
    with pytest.raises(UserError, match="MPI starts processes on several machines: set MASTER_ADDR to the one of rank"):
        distributed.take_over_mpi()
    assert "RANK" not in os.environ
    environment(MASTER_ADDR="10.0.0.1")
    distributed.take_over_mpi()
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["3", "1", "4"]


def test_more_processes_than_gpus_are_refused(environment, monkeypatch):
    environment(WORLD_SIZE="2", LOCAL_RANK="1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="each process takes a GPU; of 1 there is none for rank 1"):
        distributed.device()
