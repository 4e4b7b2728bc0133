"""What tests share: models, runs that are made once, a folder to work in."""

import copy
import functools
import os
import signal
import sys

import pytest
import torch
from helpers import TINY, make_model, tiny_base
from processes import alone, copy_begun, make_whole
from short_runs import train
from transformers import AutoModelForCausalLM, AutoTokenizer

import utils.run.log
from utils.tasks import tldr

torch.set_num_threads(1)
HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
for number, handler in HANDLERS.items():  # ignored where a shell's & or nohup starts the tests: runs would inherit it
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)
utils.run.log.draw_curves = lambda *_: None  # takes longer than the rest of a short run
os.fsync = lambda file: None  # what is written outlives a process that is killed, if not the machine


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="session")
def loaded_model():
    """The embedded model, frozen, as a reference is: not to be changed."""
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture
def model(loaded_model):
    return copy.deepcopy(loaded_model)


@pytest.fixture(scope="session")
def base():
    """A base of adapters, which is copied: not to be changed."""
    return tiny_base()


@pytest.fixture
def prompts(tokenizer):
    """Five prompts of different lengths."""
    requests = ["Guess it.", "I think of a number from 1 to 50. Guess it.", "Summarise this post in about 16 words."]
    requests += [item["prompt"] + "\n\n" + requests[2] for item in tldr.eval_dataset(2, 0)]
    chats = [[{"role": "user", "content": request}] for request in requests]
    return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]


# --- Runs in processes of their own -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder for what is made once; the workers of pytest-xdist share it."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def small_model(shared_folder, tokenizer):
    """The folder of a model that is quick to load and to save."""
    folder = shared_folder / "small_model"
    with alone(shared_folder / "small_model.lock"):
        return str(folder) if folder.exists() else make_model(folder, tokenizer)


@pytest.fixture(scope="module")
def quick(request, small_model):
    """Lets the runs of a file, which have the flags of its SMALL, be of that model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(request.module.SMALL, "model", small_model)
        yield


@pytest.fixture(scope="session")
def whole(shared_folder, small_model):
    """Makes the folder of a run that nothing stops, of a command."""

    def make(case, *more, model=small_model):
        return make_whole(shared_folder, case, model, *more)

    return make


@pytest.fixture
def begun(whole, tmp_path):
    """Makes the folder of a run that has done three of its six updates."""

    def make(case="ippo", name="run"):
        return copy_begun(whole(case), tmp_path / name)

    return make


# --- Short runs in this process ---------------------------------------------------------------------------------------


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    """A folder of its own to work in, and a check that runs put back what they take."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Makes the folder of a short run of a script, with some flags, that nothing happens to."""

    @functools.cache
    def make(script, **flags):
        folder = tmp_path_factory.mktemp(script) / "run"
        train(script, folder=folder, **flags)
        return folder

    return make
