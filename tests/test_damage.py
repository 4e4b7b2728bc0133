"""No damage to a checkpoint goes unseen, an earlier one stands in for it, and no pickle is ever read."""

import json
import pickle
import random
import shutil

import pytest
from processes import assert_same, command, finish, resume_here

from utils.cli import UserError
from utils.run import checkpoint

CASES = ["ippo head 1 number", "ppo guess"]

# --- Bytes that change, ends that are lost ----------------------------------------------------------------------------


def damage_one_byte(path):
    """Change the last byte of a checkpoint's weights."""
    file = sorted(path.rglob("*.safetensors"))[0]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


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


@pytest.mark.parametrize("case", CASES)
def test_of_1000_damages_to_a_checkpoint_each_is_found(case, begun):
    """Or changes nothing, as another space in the manifest does."""
    rng = random.Random(case)
    path = keep_newest(begun(case))
    folder = path.parent
    state = checkpoint.read_json(path / checkpoint.STATE)
    manifest = checkpoint.read_json(path / checkpoint.MANIFEST)
    assert checkpoint.newest_whole(folder) == (path, state)
    files = checkpoint.files_in(path)
    found = 0
    for _ in range(1000):
        file = rng.choice([*files, path / checkpoint.MANIFEST])
        content = file.read_bytes()
        file.write_bytes(damaged(content, rng))
        try:
            assert checkpoint.newest_whole(folder, lambda text: None) == (path, state)
            assert file.name == checkpoint.MANIFEST and checkpoint.read_json(file) == manifest
        except UserError as error:
            found += 1
            assert str(error) == f"no checkpoint in {folder} is whole: there are 1"
        file.write_bytes(content)
    assert found > 980
    assert checkpoint.newest_whole(folder) == (path, state)


def test_an_earlier_checkpoint_is_used_for_one_that_lacks_a_file_and_a_line_says_so(begun):
    folder = begun() / "checkpoints"
    path, _ = checkpoint.newest_whole(folder)
    (path / "state.json").unlink()
    lines = []
    assert checkpoint.newest_whole(folder, lines.append)[0].name == "update_000002"
    assert lines == [f"{path} is not whole: state.json is missing; looking for an earlier one"]


def test_a_run_goes_on_from_an_earlier_checkpoint_to_the_same_bits(begun, whole):
    folder = begun()
    damage_one_byte(folder / "checkpoints/update_000003")
    process = finish("ippo_llm", "--resume", folder)
    assert "update_000003 is not whole" in process.output
    assert "update_000002: 2 of 6 updates are done" in process.output
    assert_same(folder, whole("ippo head 1 number").folder)


def test_a_manifest_that_is_too_deep_is_passed_over(begun):
    folder = begun() / "checkpoints"
    (folder / "update_000003" / checkpoint.MANIFEST).write_text("[" * 1_000_000)
    assert checkpoint.newest_whole(folder, lambda text: None)[0].name == "update_000002"


# --- Pickles, which run code when they are read -----------------------------------------------------------------------

FILES = {
    "ippo critic 2 tldr": [
        "model.safetensors",
        "value_head.safetensors",
        "optimizer_0.safetensors",
        "optimizer_0.json",
        "base.json",
        "config.json",
        "critic/model.safetensors",
        "critic/config.json",
    ],
    "ppo guess": [
        "actor/adapter_model.safetensors",
        "critic/adapter_config.json",
        "reference/adapter_model.safetensors",
        "value_head.safetensors",
        "optimizer.safetensors",
        "optimizer.json",
        "base.json",
    ],
}
PLACES = [(case, f"agent_0/{file}") for case, files in FILES.items() for file in files]
PLACES += [(case, "state.json") for case in FILES]


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


@pytest.mark.parametrize("case", FILES)
def test_a_pickle_in_a_checkpoint_is_not_read(case, begun, trap):
    path = keep_newest(begun(case))
    names = [place for other, place in PLACES if other == case] + ["manifest.json"]
    names += ["agent_0/pytorch_model.bin", "agent_0/optimizer.pt", "agent_9/training_args.bin", "state.pkl"]
    for name in names:
        before = (path / name).read_bytes() if (path / name).exists() else None
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(trap)
        with pytest.raises(UserError, match="no checkpoint in .* is whole: there are 1$"):
            checkpoint.newest_whole(path.parent, lambda text: None)
        if before is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(before)
    assert checkpoint.newest_whole(path.parent)[0] == path


@pytest.mark.parametrize("case, place", PLACES)
def test_a_pickle_that_the_manifest_lists_is_one_line_and_not_read(case, place, begun, trap):
    folder = begun(case)
    path = keep_newest(folder)
    (path / place).write_bytes(trap)
    fit_manifest(path)
    with pytest.raises(UserError) as error:
        resume_here(command(case, "")[0], folder)
    assert "\n" not in str(error.value), str(error.value)


@pytest.mark.parametrize("case, weights", [("ippo critic 2 tldr", "model"), ("ppo guess", "actor/adapter_model")])
def test_a_pickle_in_place_of_weights_is_one_line_and_not_read(case, weights, begun, trap):
    folder = begun(case)
    path = keep_newest(folder)
    (path / f"agent_0/{weights}.safetensors").unlink()
    (path / f"agent_0/{weights}.bin").write_bytes(trap)
    (path / "agent_0/pytorch_model.bin").write_bytes(trap)
    fit_manifest(path)
    with pytest.raises(UserError) as error:
        resume_here(command(case, "")[0], folder)
    assert "\n" not in str(error.value), str(error.value)
