"""--fork: a run begins where another one was, to the bit; what may differ, what may not, and what it learns from."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from processes import SCRIPTS, contents, finish, start
from short_runs import every_script, train

from utils.cli import UserError, parse
from utils.files import read_rows
from utils.same import compare, timeless

pytestmark = pytest.mark.usefixtures("in_tmp_path")
KEPT = {"save_interval": 1, "keep_checkpoints": 9}
SECOND = "first/checkpoints/update_000002"


def config_of(folder):
    return json.loads((Path(folder) / "config.json").read_text())


@every_script
def test_a_fork_with_nothing_changed_is_the_run_to_the_byte(script):
    train(script, folder="first", **KEPT)
    before = contents(Path("first"))
    train(script, folder="fork", fork="first/checkpoints/update_000001", **KEPT)
    same = compare("first", "fork")
    assert all(same.values()) and len(same) > 2
    assert contents(Path("first")) == before
    fork = config_of("fork")["fork"]
    assert fork.pop("items") == config_of("first")["items_per_update"]
    assert fork == {"run": "first", "checkpoint": "update_000001", "step": 1, "samples": 4, "changed": {}}


@pytest.mark.parametrize(
    "script, rate, actor", [("ippo", "actor_learning_rate", "model"), ("ppo", "lr_actor", "actor/adapter_model")]
)
def test_a_fork_with_another_learning_rate_differs_from_there_on(script, rate, actor):
    train(script, folder="first", **KEPT)
    train(script, folder="fork", fork=SECOND, **{rate: 0.25}, **KEPT)
    assert timeless("fork")[:2] == timeless("first")[:2]
    assert not compare("first", "fork")[f"agent_0/{actor}.safetensors"]
    assert config_of("fork")["fork"]["changed"][rate][1] == 0.25


def test_a_fork_is_of_the_newest_checkpoint_that_is_whole():
    train("ippo", folder="first", train_size=16, max_steps=8, **KEPT)
    (Path(SECOND) / "agent_0/model.safetensors").write_bytes(b"")
    train("ippo", folder="fork", fork="first", train_size=16, max_steps=12)
    assert config_of("fork")["fork"]["step"] == 1 and len(read_rows(Path("fork/metrics.csv"))) == 3


def test_larger_rollouts_go_on_with_the_items_that_are_left(monkeypatch):
    batches = []
    original = SCRIPTS["ippo_llm"].play

    def play(agents, task, items, *rest):
        batches.append([*items])
        return original(agents, task, items, *rest)

    monkeypatch.setattr(SCRIPTS["ippo_llm"], "play", play)
    train("ippo", folder="first", train_size=12, num_train_epochs=2, **KEPT)
    whole = [item for batch in batches for item in batch]
    batches.clear()
    train("ippo", folder="fork", fork=SECOND, train_size=12, num_train_epochs=2, rollout_buffer_size=8)
    assert [item for batch in batches for item in batch] == whole[8:]
    rows = read_rows(Path("fork/metrics.csv"))
    assert [row["global_step"] for row in rows] == [4, 8, 16, 24]
    assert [row["epoch"] for row in rows] == pytest.approx([1 / 3, 2 / 3, 4 / 3, 2])


def test_other_data_are_read_from_their_first_item():
    train("ippo", folder="first", **KEPT)
    _, run = train("ippo", folder="fork", fork=SECOND, train_size=8)
    assert run.step == 4 and [row["epoch"] for row in run.rows[2:]] == [0.5, 1]
    _, run = train("ippo", folder="more", fork="fork", train_size=16)
    assert run.step == 8 and run.rows[-1]["global_step"] == 32


def test_advantages_of_other_rewards_are_not_divided_by_the_old_deviation():
    def long(*completions, items):
        return [1000 * len(text) for text in completions[0]]

    train("ippo", long, folder="first", reward_normalization=False, **KEPT)
    (same, _), _ = train("ippo", long, folder="same", fork=SECOND, reward_normalization=False, entropy_coef=0.1)
    (other, _), _ = train("ippo", long, folder="other", fork=SECOND)
    assert same.deviation > 100 > 10 > other.deviation > 0


def test_another_seed_draws_other_numbers():
    train("ippo", folder="first", **KEPT)
    train("ippo", folder="same", fork=SECOND)
    train("ippo", folder="other", fork=SECOND, seed=2)
    columns = ("reward_mean", "agent_0/response_length", "agent_0/entropy")
    last = [tuple(timeless(folder)[2].get(name) for name in columns) for folder in ("same", "other")]
    assert last[0] != last[1]


def test_a_fork_of_a_fork_counts_on():
    train("ippo", folder="first", **KEPT)
    train("ippo", folder="second", fork=SECOND, rollout_buffer_size=2, mini_batch_size=2, **KEPT)
    _, run = train(
        "ippo", folder="third", fork="second/checkpoints/update_000003", rollout_buffer_size=2, mini_batch_size=2
    )
    assert [row["global_step"] for row in run.rows] == [4, 8, 10, 12]
    assert timeless("third") == timeless("second")


def test_flags_that_are_not_given_are_those_of_the_run():
    train("ppo", folder="first", beta=0.25, **KEPT)
    args = parse(SCRIPTS["ppo_llm"].Args, ["--fork", SECOND, "--lr-actor", "0.5"], script="ppo_llm")
    there = config_of("first")["args"]
    own = {"fork": SECOND, "lr_actor": 0.5, "output_dir": None}
    assert json.loads(json.dumps(vars(args))) == there | own and args.beta == 0.25


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"num_agents": 3}, "--fork first has the agents of that run, and these flags differ: --num-agents 2 there, 3"),
        ({"use_separate_critic": True}, "these flags differ: --use-separate-critic False there, True here$"),
        ({"fork": "nowhere"}, "^--fork takes a run's folder, or latest, and nowhere has no config.json$"),
        ({"fork": "first/checkpoints/update_000007"}, "^first/checkpoints/update_000007 is not whole: "),
        ({"output_dir": "first", "overwrite": True}, "^--fork first is the folder that the run would write; "),
        ({}, "^--fork first has done 12 samples, and that is all by these flags: give a larger --max-steps or "),
    ],
)
def test_what_can_not_be_forked_is_one_line_and_nothing_is_lost(flags, message):
    train("ippo", folder="first", **KEPT)
    before = contents(Path("first"))
    folder = flags.pop("output_dir", "fork")
    with pytest.raises(UserError, match=message):
        train("ippo", folder=folder, **({"fork": "first"} | flags))
    assert contents(Path("first")) == before and not Path("fork").exists()


def test_a_run_without_checkpoints_or_of_another_script_is_refused():
    train("ippo", folder="first", save_interval=0)
    shutil.rmtree("first/checkpoints")
    with pytest.raises(UserError, match="^--fork first has no checkpoint yet$"):
        train("ippo", folder="fork", fork="first")
    with pytest.raises(UserError, match="^--fork: first is a run of another script or version: "):
        train("ppo", folder="fork", fork="first")


def test_a_fork_that_was_killed_before_its_first_update_goes_on_without_its_run(monkeypatch):
    train("ippo", folder="first", **KEPT)
    train("ippo", folder="whole", fork=SECOND)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SCRIPTS["ippo_llm"], "play", die)
        with pytest.raises(KeyboardInterrupt):
            train("ippo", folder="fork", fork=SECOND)
    Path("first").rename("away")
    _, run = train("ippo", resume="fork", fork=SECOND)
    assert run.step == 3 and all(compare("whole", "fork").values())


def test_a_fork_that_was_cut_off_while_it_was_made_is_made_again(monkeypatch):
    train("ippo", folder="first", **KEPT)
    train("ippo", folder="whole", fork=SECOND)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("utils.run.fork.shutil.copytree", full)
        with pytest.raises(
            UserError, match="^--fork: first/checkpoints/update_000002 can't be copied: .*No space left"
        ):
            train("ippo", folder="fork", fork=SECOND)
    _, run = train("ippo", resume="fork", fork=SECOND)
    assert run.step == 3 and all(compare("whole", "fork").values())


def test_a_checkpoint_that_is_removed_while_it_is_copied_is_one_line(monkeypatch):
    train("ippo", folder="first", **KEPT)

    def remove(source, _):
        shutil.rmtree(source)
        raise shutil.Error([("a file", "its copy", "No such file or directory")])

    monkeypatch.setattr("utils.run.fork.shutil.copytree", remove)
    with pytest.raises(UserError, match="^--fork: first/checkpoints/update_000003 can't be copied: that run goes on"):
        train("ippo", folder="fork", fork="first", num_train_epochs=2)


def test_the_command_forks_a_run_that_is_under_way(tmp_path):
    first, fork = tmp_path / "first", tmp_path / "fork"
    flags = ["--task", "number", "--max-new-tokens", "3", "--rollout-buffer-size", "4", "--mini-batch-size", "4"]
    flags += ["--train-size", "400", "--save-interval", "1", "--eval-interval", "0", "--output-dir", first]
    flags += ["--keep-checkpoints", "100"]  # none is removed while it is copied
    process = start("ippo_llm", *flags)
    process.wait_until((first / "checkpoints/update_000003").exists)
    finish("ippo_llm", "--fork", first, "--output-dir", fork, "--max-steps", "40", "--gamma", "0.5")
    process.signal(signal.SIGKILL)
    config = config_of(fork)
    assert config["fork"]["changed"] == {"max_steps": [None, 40], "gamma": [1.0, 0.5]}
    step = config["fork"]["step"]
    assert 3 <= step < 10
    assert len(timeless(fork)) == 10 and timeless(fork)[:step] == timeless(first)[:step]
