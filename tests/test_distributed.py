"""Two processes: each knows its place, means and sums are those of both, and a launcher never starts two runs."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from processes import ROOT, finish_two_works

from utils import distributed
from utils.cli import UserError
from utils.run.metrics import team_metrics

NUMBERS = torch.tensor([[1.0, -2.0, 3.5, 0.25], [8.0, 0.5, -1.0, 2.0]])  # those of each process
TARGETS = torch.tensor([[1.0, 0.0], [0.5, -1.0]])


@dataclass
class Rollout:
    """Rewards [B, T] of two turns, of which one is not played where it is 0."""

    raw_rewards: torch.Tensor

    @property
    def played(self):
        return self.raw_rewards != 0


REWARDS = [  # [B, T] of each process; of one episode no turn was played
    torch.tensor([[1.0, 0.0], [0.5, 2.0], [3.0, 0.0]]),
    torch.tensor([[-1.0, 4.0], [0.25, 1.0], [2.0, -3.0], [2.5, 1.0], [0.0, 0.0]]),
]


def work():
    """What each of two processes finds."""
    device = distributed.start()
    distributed.start()  # a second time does no harm
    rank = distributed.rank()
    numbers = NUMBERS[rank].clone()
    found = {
        "device": str(device),
        "rank": rank,
        "world_size": distributed.world_size(),
        "is_main": distributed.is_main(),
        "total": distributed.total(numbers).tolist(),
        "mean": distributed.mean(numbers).tolist(),
        "mean of counts": distributed.mean(torch.tensor(rank)).item(),
        "gather": distributed.gather(numbers).tolist(),
        "gather of lengths": distributed.gather(numbers[: 3 * rank]).tolist(),  # 0 and 3
        "gather_objects": distributed.gather_objects({"rank": rank}),
        "unchanged": numbers.tolist(),
    }
    model = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    alone = torch.nn.Parameter(torch.zeros(1))  # has a gradient in one process only
    frozen = torch.nn.Parameter(torch.zeros(1))  # as an adapter is that is not active any more
    unused = torch.nn.Parameter(torch.zeros(1))
    model(TARGETS[rank]).pow(2).sum().backward()
    if rank == 0:
        (3 * alone).sum().backward()
    ((1 + rank) * frozen).sum().backward()
    frozen.requires_grad_(False)
    distributed.average_gradients([*model.parameters(), alone, frozen, unused])
    found |= {
        "weight": model.weight.grad.tolist(),
        "bias": model.bias.grad.tolist(),
        "alone": alone.grad.tolist(),
        "frozen": frozen.grad.tolist(),
        "unused": unused.grad,
    }
    metrics = team_metrics([Rollout(REWARDS[rank]), Rollout(REWARDS[rank] * 3)])
    found["metrics"] = {name: distributed.mean(x).item() for name, x in metrics.items()}
    distributed.say("once")
    print(json.dumps(found), flush=True)


@pytest.fixture(scope="module")
def outcome():
    """What two processes printed: what each found, in order of rank, and everything else, line by line."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    launcher = "torch.distributed.run --standalone --nproc-per-node 2"
    command = [sys.executable, "-m", *launcher.split(), __file__]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = ended.stdout.splitlines()
    found = sorted((json.loads(line) for line in lines if line.startswith("{")), key=lambda each: each["rank"])
    return found, [line for line in lines if not line.startswith("{")], ended.stderr


@pytest.fixture
def found(outcome):
    return outcome[0]


def test_two_processes_are_one_group(found):
    assert [each["rank"] for each in found] == [0, 1]
    assert [each["world_size"] for each in found] == [2, 2]
    assert [each["is_main"] for each in found] == [True, False]


def test_totals_and_means_are_over_both(found):
    for each in found:
        assert each["total"] == [9.0, -1.5, 2.5, 2.25]
        assert each["mean"] == [4.5, -0.75, 1.25, 1.125]
        assert each["mean of counts"] == 0.5


def test_what_is_summed_stays_as_it_is(found):
    for rank in range(2):
        assert found[rank]["unchanged"] == NUMBERS[rank].tolist()


def test_gathered_is_what_both_have_in_order(found):
    for each in found:
        assert each["gather"] == NUMBERS.flatten().tolist()
        assert each["gather of lengths"] == NUMBERS[1, :3].tolist()
        assert each["gather_objects"] == [{"rank": 0}, {"rank": 1}]


def test_gradients_are_the_means_of_both(found):
    weight = [0.0, 0.0]
    bias = 0.0
    for x, y in TARGETS.tolist():  # d (x + y)^2 = 2 (x + y)
        weight[0] += 2 * (x + y) * x / 2
        weight[1] += 2 * (x + y) * y / 2
        bias += 2 * (x + y) / 2
    for each in found:
        assert each["weight"] == [pytest.approx(weight)]
        assert each["bias"] == pytest.approx([bias])


def test_a_gradient_that_one_process_lacks_is_0_there(found):
    for each in found:
        assert each["alone"] == [1.5]
        assert each["unused"] is None


def test_a_gradient_is_averaged_whatever_its_parameter_is_for_now(found):
    for each in found:
        assert each["frozen"] == [1.5]


def test_metrics_are_those_of_all_episodes(found):
    episodes = (torch.cat(REWARDS) * 2).tolist()  # the mean of two agents, one with three times the other's
    episodes = [turns for turns in episodes if turns[0]]
    sums = [sum(turns) for turns in episodes]
    mean = sum(sums) / 7
    second = [turns[1] for turns in episodes if turns[1]]
    expected = {
        "reward_mean": mean,
        "reward_std": (sum((x - mean) ** 2 for x in sums) / 7) ** 0.5,
        "turns": (7 + len(second)) / 7,
        "turn_1/reward_mean": sum(turns[0] for turns in episodes) / 7,
        "turn_2/reward_mean": sum(second) / len(second),
    }
    for each in found:
        assert each["metrics"] == pytest.approx(expected)


def test_a_line_is_said_once(outcome):
    assert [line for line in outcome[1] if "once" in line] == ["once"]


def test_the_group_ends_without_a_warning(outcome):
    assert "destroy_process_group" not in outcome[2] and "ProcessGroup" not in outcome[2]


# --- One process ------------------------------------------------------------------------------------------------------


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
    device = distributed.start()
    x = torch.tensor([1.0, 2.0])
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert distributed.rank() == 0 and distributed.world_size() == 1 and distributed.is_main()
    assert distributed.total(x) is x and distributed.mean(x) is x and distributed.gather(x) is x
    assert distributed.gather_objects(x) == [x]


def test_processes_of_slurm_that_do_not_know_of_each_other_are_refused(environment):
    environment(SLURM_STEP_NUM_TASKS="2")
    with pytest.raises(UserError, match="srun starts 2 processes .* torchrun"):
        distributed.start()


def test_one_of_several_processes_that_accelerate_does_not_start_is_refused(environment):
    """As `accelerate launch --cpu --num_processes 2` does without MPI."""
    environment(ACCELERATE_MIXED_PRECISION="no", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    with pytest.raises(UserError, match="^accelerate launch starts one process of several here: add --multi_gpu"):
        distributed.start()


def test_one_process_of_accelerate_is_taken(environment):
    environment(ACCELERATE_MIXED_PRECISION="no", ACCELERATE_USE_CPU="true")
    assert distributed.start() == torch.device("cpu") and distributed.world_size() == 1


@pytest.mark.parametrize("launcher", distributed.MPI)
def test_the_processes_of_mpi_are_found(environment, monkeypatch, launcher):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    environment(**dict(zip(launcher, ("3", "1", "4"))))
    distributed.take_over_mpi()
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["3", "1", "4"]


def test_more_processes_than_gpus_are_refused(environment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="each process takes a GPU; of 1 there is none for rank 1"):
        distributed.device_of(1)


# --- Metrics by name --------------------------------------------------------------------------------------------------


def average_by_name():
    distributed.start()
    own = [{"both": 1.0, "first": 5.0}, {"second": 7.0, "both": torch.tensor(3.0)}][distributed.rank()]
    assert distributed.mean_by_name(own) == {"both": 2.0, "first": 5.0, "second": 7.0}
    distributed.stop()


def test_metrics_are_averaged_by_name_over_the_processes_that_have_them():
    finish_two_works(average_by_name)
    assert distributed.mean_by_name({"one": torch.tensor(-0.0), "two": 2}) == {"one": 0.0, "two": 2.0}


if __name__ == "__main__":
    work()
