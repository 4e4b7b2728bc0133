"""Crashes at any change of files, full disks, damage, pickles: a whole checkpoint is there, and it alone is read."""

import functools
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
from processes import SCRIPTS, Process, assert_same, command, contents, finish, saved_steps, start

from utils.cli import UserError, parse
from utils.run import checkpoint

CRASHED = 99  # the exit code of a process that `crash_at` ended
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree", "shutil.move"}


class Crash(BaseException):
    """In place of the end of a process: nothing catches it."""


def end():
    os._exit(CRASHED)


def crash_at(k, crash=end):
    """Call `crash` at the k-th change of files from now on, 1 the first: by default the process ends, all at once."""
    count = itertools.count(1)

    def change():
        if next(count) == k:
            crash()

    def on_event(event, arguments):
        if event in CHANGES or event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            change()

    def fsync(file):  # what is written outlives a process, if not the machine
        change()

    def serialize_file(tensors, path, *rest, original=safetensors.torch.serialize_file, **options):
        crashes = next(count) == k
        original(tensors, path, *rest, **options)
        if crashes:  # halfway
            with open(path, "r+b") as file:
                file.truncate(os.path.getsize(path) // 2)
            crash()

    os.fsync = fsync
    safetensors.torch.serialize_file = serialize_file
    sys.addaudithook(on_event)


# --- One checkpoint ---------------------------------------------------------------------------------------------------


def write_texts(folder, text):
    """What stands in for agents."""
    for name in ("a.txt", "agent_0/b.txt", "agent_0/critic/c.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{text} {name}")


def prepare(folder, case):
    """Make a folder as it is before a checkpoint after update 3 is written."""
    for step in {"first": [], "second": [2], "pruned": [1, 2], "damaged": [2, 3]}[case]:
        checkpoint.write_checkpoint(folder, step, lambda path: write_texts(path, step), {"step": step}, 9)
    if case == "damaged":
        (folder / "update_000003" / checkpoint.STATE).write_text("{}")
    folder.mkdir(exist_ok=True)


def crash_everywhere(folder, case):
    """Crash at every change of files of a save: what is whole then is the earlier checkpoint, or the new one."""
    os.fsync = lambda file: None
    prepare(folder / "before", case)
    save = functools.partial(
        checkpoint.write_checkpoint,
        step=3,
        write=lambda path: write_texts(path, 3),
        state={"step": 3},
        keep=1 if case == "pruned" else 2,
    )
    shutil.copytree(folder / "before", folder / "after")
    save(folder / "after")
    states = {3: contents(folder / "after/update_000003")}
    if case != "first":
        states[2] = contents(folder / "before/update_000002")
    steps = []
    for k in itertools.count(1):
        shutil.rmtree(folder / "now", ignore_errors=True)
        shutil.copytree(folder / "before", folder / "now")
        has_crashed = crashes(save, folder / "now", k)
        path, state = checkpoint.newest_whole(folder / "now", lambda text: None)
        if path is None:
            assert case == "first", f"no checkpoint is there after a crash at change {k}"
            steps.append(None)
        else:
            assert contents(path) == states[state["step"]]
            steps.append(state["step"])
        if not has_crashed:
            break
        save(folder / "now")  # nothing that is left is in the way
        path, _ = checkpoint.newest_whole(folder / "now")
        assert contents(path) == states[3]
        assert [path.name for path in (folder / "now").iterdir() if path.suffix == ".writing"] == []
    earlier = None if case == "first" else 2
    change = steps.index(3)
    assert change > 10 and {*steps[:change]} == {earlier} and {*steps[change:]} == {3}


def crashes(save, folder, k):
    """Save, and crash at the k-th change of files; returns whether there were so many.

    A Crash stands for the end of the process: to fork one takes half a second.
    """
    is_saving = True

    def crash():
        if is_saving:
            raise Crash

    crash_at(k, crash)
    try:
        save(folder)
    except Crash:
        return True
    finally:
        is_saving = False
    return False


@pytest.mark.parametrize("case", ["first", "second", "pruned", "damaged"])
def test_a_crash_at_any_change_of_files_leaves_the_earlier_checkpoint_or_the_new_one(case, tmp_path):
    process = Process(crash_everywhere, tmp_path, case).wait()
    assert process.exitcode == 0, process.error


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = set()
    fsync = os.fsync
    replace = os.replace

    def watch_fsync(file):
        synced.add(os.fstat(file).st_ino)
        fsync(file)

    def watch_replace(source, target):
        if Path(target).name == "update_000003":
            assert {path.stat().st_ino for path in (source, *source.rglob("*"))} <= synced
            synced.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    checkpoint.write_checkpoint(tmp_path / "there", 3, lambda path: write_texts(path, 3), {}, 1)
    assert synced == {(tmp_path / "there").stat().st_ino}  # the name


def test_a_checkpoint_that_was_just_written_stays_where_later_ones_are_damaged(tmp_path):
    """They are of a run that went on from an earlier one, with fewer checkpoints to keep."""
    for step in (1, 2, 3):
        checkpoint.write_checkpoint(tmp_path, step, lambda path: write_texts(path, step), {"step": step}, 3)
    for step in (2, 3):
        (tmp_path / f"update_00000{step}" / checkpoint.STATE).write_text("{}")
    checkpoint.write_checkpoint(tmp_path, 2, lambda path: write_texts(path, 2), {"step": 2}, 1)
    assert checkpoint.newest_whole(tmp_path)[1] == {"step": 2}


# --- A run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case, k", [("ippo", 1), ("ppo", 12), ("ippo", 60), ("ppo", 150), ("maac", 300)])
def test_a_run_that_crashed_at_a_change_of_files_gives_the_same_bits(case, k, small_model, whole, tmp_path):
    name, flags = command(case, small_model)
    folder = tmp_path / "run"
    anew = [*flags, "--output-dir", folder, "--save-interval", "1"]
    process = start(name, *anew, before=functools.partial(crash_at, k)).wait()
    assert process.exitcode == CRASHED, process.error
    if (folder / "config.json").exists():
        finish(name, "--resume", folder)
    else:
        finish(name, *anew)
    assert_same(folder, whole(case))


@pytest.mark.parametrize("k", [20, 50])
def test_a_run_that_crashed_while_it_replaced_another_can_be_replaced_again(k, small_model, begun, whole):
    case = "ippo"
    name, flags = command(case, small_model)
    folder = begun(case)
    anew = [*flags, "--seed", "2", "--output-dir", folder, "--overwrite"]
    process = start(name, *anew, before=functools.partial(crash_at, k)).wait()
    assert process.exitcode == CRASHED, process.error
    resumed = start(name, "--resume", folder).wait()
    if resumed.exitcode == 0:
        seed = json.loads((folder / "config.json").read_text())["args"]["seed"]
        assert_same(folder, whole(case, *([] if seed == 1 else ["--seed", str(seed)])))
    else:
        assert resumed.error.splitlines()[-1].startswith(f"{name}.py: error: ")
    finish(name, *anew)
    assert_same(folder, whole(case, "--seed", "2"))


# --- A full disk ------------------------------------------------------------------------------------------------------


def fill_disk(size):
    """From now on files of this process can't grow beyond so many bytes, as if the disk were full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize(
    "case, size, flags", [("ippo", 1000, []), ("ppo", 30_000, []), ("iac", 6000, ["--save-interval", "0"])]
)
def test_a_full_disk_is_one_line_and_the_checkpoints_are_as_they_were(case, size, flags, begun, whole):
    folder = begun(case)
    name, _ = command(case, "")
    before = {path: contents(path) for path in checkpoint.checkpoints(folder / "checkpoints")}
    process = start(name, "--resume", folder, *flags, before=functools.partial(fill_disk, size)).wait()
    assert process.exitcode == 1, process.error
    last = process.error.splitlines()[-1]
    assert last.startswith(f"{name}.py: error: ") and "can't be written" in last and "File too large" in last
    assert "Traceback" not in process.error
    assert {path: contents(path) for path in before} == before
    assert saved_steps(folder) == [1, 2, 3]
    assert [path.name for path in folder.glob("checkpoints/*.*")] == []
    finish(name, "--resume", folder)
    assert_same(folder, whole(case))


# --- Damage -----------------------------------------------------------------------------------------------------------


def damaged(content, rng):
    """The content of a file with a byte changed, or without its end."""
    position = rng.randrange(len(content))
    if rng.random() < 0.3:
        return content[:position]
    byte = content[position] ^ rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 255])
    return content[:position] + bytes([byte]) + content[position + 1 :]


def keep_newest(folder):
    """The last of a run's checkpoints, now the only one."""
    *others, last = checkpoint.checkpoints(folder / "checkpoints")
    for path in others:
        shutil.rmtree(path)
    return last


@pytest.mark.parametrize("case", ["ippo", "ppo"])
def test_of_500_damages_to_a_checkpoint_each_is_found(case, begun):
    """Or changes nothing, as another space in the manifest does."""
    rng = random.Random(case)
    path = keep_newest(begun(case))
    state, manifest = [checkpoint.read_json(path / name) for name in (checkpoint.STATE, checkpoint.MANIFEST)]
    found = 0
    for _ in range(500):
        file = rng.choice([*checkpoint.files_in(path), path / checkpoint.MANIFEST])
        content = file.read_bytes()
        file.write_bytes(damaged(content, rng))
        try:
            assert checkpoint.newest_whole(path.parent, lambda text: None) == (path, state)
            assert file.name == checkpoint.MANIFEST and checkpoint.read_json(file) == manifest
        except UserError as error:
            found += 1
            assert str(error) == f"no checkpoint in {path.parent} is whole: there are 1"
        file.write_bytes(content)
    assert found > 490 and checkpoint.newest_whole(path.parent) == (path, state)


@pytest.mark.parametrize("content", [b"", b"[" * 1_000_000, None], ids=["empty", "deep", "missing"])
def test_a_run_goes_on_from_an_earlier_checkpoint_to_the_same_bits(content, begun, whole):
    folder = begun()
    file = folder / "checkpoints/update_000003" / ("state.json" if content is None else checkpoint.MANIFEST)
    file.unlink() if content is None else file.write_bytes(content)
    output = finish("ippo_llm", "--resume", folder).output
    assert "update_000003 is not whole" in output and "update_000002: 2 of 6 updates are done" in output
    assert_same(folder, whole("ippo"))


# --- Pickles, which run code when they are read -----------------------------------------------------------------------


class Trap:
    """Reading a pickle of it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def trap(tmp_path):
    """A pickle; that it was not read is checked, and that this can be seen."""
    content = pickle.dumps(Trap(tmp_path / "read"))
    yield content
    assert not (tmp_path / "read").exists()
    pickle.loads(content)
    assert (tmp_path / "read").exists()


def fit_manifest(path):
    """Make a checkpoint's manifest that of its files, as one who plants files would."""
    files = {str(file.relative_to(path)): checkpoint.digest(file) for file in checkpoint.files_in(path)}
    del files[checkpoint.MANIFEST]
    (path / checkpoint.MANIFEST).write_text(json.dumps(files))


def plant(content, file, place):
    """Put a content at a place, in place of a file; what puts all back."""
    before = {path: path.read_bytes() if path.exists() else None for path in (file, place)}
    file.unlink(missing_ok=True)
    place.write_bytes(content)

    def undo():
        for path, old in before.items():
            path.unlink(missing_ok=True) if old is None else path.write_bytes(old)

    return undo


@pytest.mark.parametrize("case", ["ippo", "ppo"])
def test_a_pickle_that_is_not_of_the_checkpoint_is_not_read(case, begun, trap):
    path = keep_newest(begun(case))
    for place in [*checkpoint.files_in(path), path / "agent_0/optimizer.pt", path / "state.pkl"]:
        undo = plant(trap, place, place)
        with pytest.raises(UserError, match="no checkpoint in .* is whole: there are 1$"):
            checkpoint.newest_whole(path.parent, lambda text: None)
        undo()
    assert checkpoint.newest_whole(path.parent)[0] == path


@pytest.mark.parametrize("case", ["ippo", "ppo"])
def test_a_pickle_that_the_manifest_lists_is_one_line_and_not_read(case, begun, trap):
    """Also in place of weights, where other programs look for pickles."""
    folder = begun(case)
    path = keep_newest(folder)
    name, _ = command(case, "")
    args = parse(SCRIPTS[name].Args, ["--resume", str(folder)], script=name)
    files = [path / "state.json", *path.glob("agent_0/*.json"), *path.glob("agent_0/*/adapter_config.json")]
    files = [file for file in files if "token" not in file.name and file.name != "generation_config.json"]
    weights = [*path.glob("agent_0/**/*.safetensors")]
    places = [(file, file) for file in files + weights]
    places += [(file, file.with_name(other)) for file in weights for other in (file.stem + ".bin", "pytorch_model.bin")]
    assert len(places) > 12
    for file, place in places:
        undo = plant(trap, file, place)
        fit_manifest(path)
        with pytest.raises(UserError, match="^[^\n]*$"):
            SCRIPTS[name].main(args)
        undo()
    fit_manifest(path)
    _, run = SCRIPTS[name].main(args)
    assert run.step == 6
