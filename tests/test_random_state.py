"""Random states of a run on GPUs go on where they fit, on fewer GPUs or on a CPU too; GPUs are imitated."""

import json

import pytest
import torch

from utils.run.checkpoint import random_state, restore_random_state


class GPUs:
    """Two imitated GPUs: the states of their generators are what their numbers say, so many bytes as those of CUDA."""

    def __init__(self, patch, count=2):
        self.states = [torch.full((16,), k, dtype=torch.uint8) for k in range(count)]
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state", lambda device: self.states[device.index])
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device: self.states.__setitem__(device.index, state))


class Generator:
    """A generator of a GPU, with a state as long as it has there."""

    def __init__(self, index, value=0):
        self.device = torch.device("cuda", index)
        self.state = torch.full((16,), value, dtype=torch.uint8)

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.fixture(autouse=True)
def generators_kept():
    with torch.random.fork_rng([]):
        yield


def saved(state):
    """A state, as a checkpoint gives it back."""
    return json.loads(json.dumps(state))


def test_a_process_saves_the_state_of_its_own_gpu_and_takes_it_up_on_another(monkeypatch, capsys):
    gpus = GPUs(monkeypatch)
    gpus.states[1] += 6
    state = saved(random_state(Generator(1, value=5)))
    gpus.states = gpus.states[:1]
    generator = Generator(0)
    restore_random_state(state, generator)
    assert gpus.states[0].tolist() == [7] * 16
    assert generator.state.tolist() == [5] * 16
    assert capsys.readouterr().out == ""


def test_a_run_of_a_gpu_goes_on_on_a_cpu_and_says_what_is_left_out(capsys):
    generator = torch.Generator().manual_seed(3)
    state = saved(random_state(generator)) | {"cuda": [3] * 16, "generator": [0] * 16}
    before = generator.get_state()
    torch.manual_seed(4)
    drawn = torch.rand(2)
    restore_random_state(state, generator)
    assert generator.get_state().equal(before)
    assert not torch.rand(2).equal(drawn)  # what fits is restored
    (line,) = capsys.readouterr().out.splitlines()
    assert "does not fit cpu: other random numbers" in line


def test_a_run_of_a_cpu_goes_on_on_a_gpu_and_says_what_is_left_out(monkeypatch, capsys):
    state = saved(random_state(torch.Generator().manual_seed(3)))
    gpus = GPUs(monkeypatch)
    generator = Generator(1, value=5)
    restore_random_state(state, generator)
    assert generator.state.tolist() == [5] * 16 and gpus.states[1].tolist() == [1] * 16
    (line,) = capsys.readouterr().out.splitlines()
    assert "does not fit cuda:1: other random numbers" in line
