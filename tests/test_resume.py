"""--resume, --pause-at, --fork: a run goes on to the same bits, and what it can't go on from is one line."""

import itertools
import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy
import pytest
import short_runs
import torch
from helpers import build_model
from peft.tuners import lora
from safetensors.torch import load_file, save_file
from short_runs import FLAGS, SCRIPTS, Faulty, every_script, make_task, return_none, saved_state, small_model, train

import ippo_llm
import utils.run
from utils.cli import Stopped, TaskError, UserError, parse
from utils.files import read_rows
from utils.run import Run
from utils.run.checkpoint import checkpoints
from utils.same import compare, timeless

pytestmark = pytest.mark.usefixtures("in_tmp_path")
KEPT = {"save_interval": 1, "keep_checkpoints": 9}
SECOND = "first/checkpoints/update_000002"
FORMS = {
    "ippo": ({}, {"use_separate_critic": True, "lora_rank": 2}),
    "iac": ({"use_separate_critic": True}, {"lora_rank": 2}),
    "maac": ({}, {"lora_rank": 2}),
    "magrpo": ({}, {"lora_rank": 2}),
    "ppo": ({"lora_rank": 0}, {"action_granularity": "turn", "update_epochs": 2}),
}
every_form = pytest.mark.parametrize("script, flags", [(name, form) for name in FORMS for form in FORMS[name]], ids=str)


def assert_same(one, other):
    """Two runs measured, sampled and learned the same, to the bit."""
    same = compare(one, other)
    assert len(same) > 3 and [name for name in same if not same[name]] == []


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file() and path.name != ".lock"}


def config_of(folder):
    return json.loads((Path(folder) / "config.json").read_text())


@pytest.fixture
def made(undisturbed):
    """Puts a copy of a run that nothing happens to into a folder."""

    def make(folder, script="ippo", **flags):
        shutil.copytree(undisturbed(script, **flags), folder)

    return make


# --- To the same bits -------------------------------------------------------------------------------------------------


@every_form
def test_a_paused_run_goes_on_to_the_same_bits(script, flags, undisturbed, capsys):
    flags = flags | {"num_turns": 2, "eval_interval": 2, "eval_size": 2}
    train(script, pause_at=2, save_interval=0, **flags)
    goes_on = "paused after update 2 of 3; go on from Python with the task SimpleNamespace: "
    goes_on += "main(Args(..., resume='run'), ...)\nthe run is in run\n"
    assert capsys.readouterr().out.endswith(goes_on) and len(timeless("run")) == 2
    train(script, resume="run", **flags)
    assert_same("run", undisturbed(script, **flags))


@every_script
def test_a_fork_with_nothing_changed_is_the_run_to_the_bit(script, made, undisturbed):
    made("first", script, **KEPT)
    before = contents("first")
    train(script, folder="fork", fork="first/checkpoints/update_000001", **KEPT)
    assert_same("fork", undisturbed(script, **KEPT))
    assert contents("first") == before
    fork = config_of("fork")["fork"]
    assert fork == {"run": "first", "checkpoint": "update_000001", "step": 1, "changed": {}, "first": 0}


def test_a_task_that_draws_from_any_generator_draws_the_same():
    def draw(items):
        drawn = random.random() + random.gauss(0, 1) + numpy.random.rand() + torch.rand(()).item()
        return [drawn + random.random() for _ in items]

    train("ippo", Faulty(draw, *range(9)), folder="whole")
    train("ippo", Faulty(draw, *range(9)), pause_at=1)
    torch.rand(3), numpy.random.rand(3), random.random()
    train("ippo", Faulty(draw, *range(9)), resume="run")
    assert_same("run", "whole")


def test_a_run_that_has_ended_ends_again_with_the_same_bits(undisturbed):
    train("ippo")
    train("ippo", resume="run")
    assert_same("run", undisturbed("ippo"))


# Where the second update is cut: before which call of what is called there, numbered from 0
PLACES = {
    "as it plays": ("generate", 1),
    "as it begins to learn": ("policy_forward", 0),
    "as it computes a gradient": ("policy_forward", -1),
    "before a step": ("step", 0),
    "before its second step": ("step", 1),
    "before its last step": ("step", -1),
    "as it evaluates": ("evaluate", 0),
    "as it ends": ("log", 0),
}
CUTS = [("ippo", place) for place in PLACES]
CUTS += [(script, place) for script in SCRIPTS for place in [*PLACES][1:6:3] if script != "ippo"]
every_cut = pytest.mark.parametrize("script, place", CUTS)
CUTS.append(("ppo", "as it evaluates"))
EVALUATED = dict.fromkeys(SCRIPTS, {"save_interval": 0, "eval_interval": 1, "eval_size": 2})
EVALUATED["ppo"] = EVALUATED["ppo"] | {"reference_update_interval": 1}


def watch(patch, script, name, on_call):
    """Let on_call(k) be called before call k of a function of a script, of AdamW, or of Run."""
    owner = {"step": torch.optim.AdamW, "log": Run, "merge": lora.Linear}.get(name, SCRIPTS[script])
    function = getattr(owner, name)
    numbers = itertools.count()

    def watched(*values, **named):
        on_call(next(numbers))
        return function(*values, **named)

    patch.setattr(owner, name, watched)


def act_in_second_update(monkeypatch, script, place, act, **flags):
    """Train, where act() is called at a place of the second update."""
    name, call = PLACES.get(place, ("merge", 1))
    flags = EVALUATED[script] | flags
    calls = []
    with monkeypatch.context() as patch:
        watch(patch, script, name, calls.append)
        train(script, folder="counted", pause_at=1, **flags)
    number = len(calls) + call % len(calls)
    with monkeypatch.context() as patch:
        watch(patch, script, name, lambda k: act() if k == number else None)
        train(script, **flags)


@every_cut
def test_a_run_that_an_error_ended_in_an_update_goes_on_to_the_same_bits(script, place, undisturbed, monkeypatch):
    def fail():
        raise ArithmeticError("a fault")

    with pytest.raises(ArithmeticError, match="^a fault$"):
        act_in_second_update(monkeypatch, script, place, fail)
    assert saved_state("run")["step"] == len(timeless("run")) == 1
    train(script, resume="run", **EVALUATED[script])
    assert_same("run", undisturbed(script, **EVALUATED[script]))


def stop_in_second_update(monkeypatch, script, place, undisturbed, **flags):
    """A signal comes; the process is killed once that is saved, or has the time to finish the update: it goes on."""
    write = utils.run.write_checkpoint

    def write_and_copy(folder, *values):
        write(folder, *values)
        if folder == Path("run/checkpoints").absolute() and not Path("killed").exists():
            shutil.copytree("run", "killed")

    monkeypatch.setattr(utils.run, "write_checkpoint", write_and_copy)
    with pytest.raises(Stopped, match="^stopped by SIGTERM after update 2 of 3"):
        act_in_second_update(monkeypatch, script, place, lambda: signal.raise_signal(signal.SIGTERM), **flags)
    flags = EVALUATED[script] | flags
    for folder in ("killed", "run"):
        train(script, resume=folder, **flags)
        assert_same(folder, undisturbed(script, **flags))


@every_cut
def test_what_a_signal_in_an_update_saves_goes_on_to_the_same_bits(script, place, undisturbed, monkeypatch):
    stop_in_second_update(monkeypatch, script, place, undisturbed)


@pytest.mark.parametrize("place, precision", [("as it plays", "bf16"), ("as it merges", "no")])
def test_a_signal_saves_adapters_whose_base_is_cast_or_half_merged(place, precision, undisturbed, monkeypatch):
    tokenizer = small_model()[1]
    tied = build_model(tokenizer, tie_word_embeddings=True)  # of which a cast weight is a second one
    monkeypatch.setattr(short_runs, "small_model", lambda: (tied, tokenizer))
    stop_in_second_update(monkeypatch, "ippo", place, undisturbed, lora_rank=4, mixed_precision=precision)


def test_a_run_that_fails_in_its_first_update_begins_anew(undisturbed, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        watch(patch, "ippo", "step", lambda k: k < 2 or 1 / 0)
        train("ippo")
    assert not Path("run/agent_0").exists()
    train("ippo", resume="run")
    assert_same("run", undisturbed("ippo"))


def test_lines_that_were_damaged_behind_the_checkpoint_are_cut(undisturbed):
    train("ippo", pause_at=1)
    for name in ("metrics.csv", "samples.jsonl"):
        with open(f"run/{name}", "ab") as file:
            file.write(b"\0\xff" * 10 + b"\n")
    train("ippo", resume="run")
    assert_same("run", undisturbed("ippo"))


@pytest.mark.parametrize("name, text", [("metrics.csv", b"reward_mean"), ("samples.jsonl", b"prompts")])
def test_lines_that_were_damaged_before_the_checkpoint_are_told(name, text):
    train("ippo", pause_at=1)
    path = Path("run", name)
    path.write_bytes(path.read_bytes().replace(text, text[:-1] + b"\xff", 1))
    with pytest.raises(UserError, match="^metrics.csv or samples.jsonl in run has a line that can't be read: "):
        train("ippo", resume="run")


def test_a_copy_of_a_checkpoint_is_none_to_go_on_from(undisturbed):
    train("ippo", pause_at=2, **KEPT)
    shutil.copytree("run/checkpoints/update_000001", "run/checkpoints/update_000001_best")
    shutil.copytree("run/checkpoints/update_000001", "run/checkpoints/update_000009.bak")
    assert [path.name for path in checkpoints(Path("run/checkpoints"))] == ["update_000001", "update_000002"]
    train("ippo", resume="run")
    assert_same("run", undisturbed("ippo"))


# --- What may differ --------------------------------------------------------------------------------------------------


def test_flags_that_differ_are_all_named_and_nothing_is_changed():
    train("ippo", pause_at=1)
    before = contents("run")
    with pytest.raises(UserError) as error:
        train("ippo", resume="run", seed=9, gamma=0.5, num_train_epochs=1, keep_checkpoints=7, max_episodes=4)
    first, differing = str(error.value).split(": ", 1)
    assert first == "--resume run goes on with that run's flags, and --fork run takes others; these differ"
    named = ["--gamma 1.0 there, 0.5 here", "--max-episodes None there, 4 here", "--seed 1 there, 9 here"]
    assert sorted(differing.split("; ")) == named and contents("run") == before


def test_flags_that_are_not_given_are_those_of_the_run():
    train("ippo", gamma=0.5, pause_at=1)
    there = config_of("run")["args"]
    args = vars(parse(SCRIPTS["ippo"].Args, ["--resume", "run", "--save-interval", "5"], script="ippo_llm"))
    own = {"resume": "run", "overwrite": False, "save_interval": 5, "pause_at": None}
    assert json.loads(json.dumps(args)) == there | own and args["gamma"] == 0.5


def test_a_run_may_go_on_for_longer_and_be_saved_otherwise():
    train("ippo", **KEPT)
    _, run = train("ippo", resume="run", num_train_epochs=3, save_interval=2, keep_checkpoints=3)
    assert len(run.rows) == run.step == 9
    assert [path.name for path in checkpoints(Path("run/checkpoints"))] == [f"update_{k:06d}" for k in (6, 8, 9)]


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            {"overwrite": True, "output_dir": "run"},
            "^--resume run keeps what is done, and --overwrite would not: give one of them$",
        ),
        ({"output_dir": "other"}, "^--resume run goes on in that folder: leave out --output-dir other$"),
    ],
)
def test_a_run_goes_on_in_its_own_folder(flags, message):
    train("ippo", pause_at=1)
    with pytest.raises(UserError, match=message):
        train("ippo", resume="run", **flags)
    assert not Path("other").exists() and read_rows(Path("run/metrics.csv"))


# --- Which run --------------------------------------------------------------------------------------------------------


def parse_resumed(script, name):
    return parse(SCRIPTS[script].Args, ["--resume", name], script=f"{script}_llm").resume


def test_the_latest_run_is_that_which_wrote_last():
    with pytest.raises(UserError, match="^--resume latest: there is no run of ippo_llm.py under runs/$"):
        parse_resumed("ippo", "latest")
    train("ippo", folder="runs/ippo_llm__z", pause_at=1)
    for name in ("ippo_llm__a", "iac_llm__b"):
        shutil.copytree("runs/ippo_llm__z", f"runs/{name}")
    for seconds, run in enumerate(("ippo_llm__z", "ippo_llm__a", "iac_llm__b"), 1_000_000_000):
        for path in (Path("runs") / run, *(Path("runs") / run).glob("*.*")):
            os.utime(path, (seconds, seconds))
    assert parse_resumed("ippo", "latest") == "runs/ippo_llm__a"
    Path("runs/ippo_llm__z/metrics.csv").touch()
    assert parse_resumed("ippo", "latest") == "runs/ippo_llm__z"


def test_a_folder_that_is_no_run_is_one_line():
    with pytest.raises(UserError, match="^--resume takes a run's folder, or latest, and nothing has no config.json$"):
        parse_resumed("ippo", "nothing")
    for content in ("", "{", "[]", "{}", '{"args": 3}'):
        Path("config.json").write_text(content)
        with pytest.raises(UserError, match="^--resume: config.json can't be read: [^\n]*$"):
            parse_resumed("ippo", ".")


def test_a_run_of_another_script_or_of_a_copy_is_one_line():
    train("ippo", pause_at=1)
    with pytest.raises(UserError, match="^--resume: run, of [^ ]*, is a run of another script or version: [^\n]*$"):
        parse_resumed("ppo", "run")
    Path("run/config.json").write_text(json.dumps(config_of("run") | {"script": "/somewhere/mine.py"}))
    with pytest.raises(UserError, match="^--resume run is a run of mine.py, and goes on with that script$"):
        train("ippo", resume="run")


# --- What it goes on from ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agents", [(), ("agent_0", "agent_1")], ids=["updates", "agents"])
def test_a_run_without_checkpoints_that_has_learned_is_refused_and_kept(agents):
    train("ippo", pause_at=2)
    for path in ("checkpoints", *{"agent_0", "agent_1"} - {*agents}):
        shutil.rmtree(f"run/{path}")
    before = contents("run")
    there = ", ".join(["2 updates in metrics.csv", *agents])
    with pytest.raises(UserError, match=f"^--resume: run has no checkpoint to go on from; it has {there}, which are"):
        train("ippo", resume="run")
    assert contents("run") == before


def test_a_run_that_has_done_no_update_begins_anew(undisturbed):
    with pytest.raises(TaskError):
        train("ippo", Faulty(return_none, 1))
    assert not checkpoints(Path("run/checkpoints"))
    train("ippo", resume="run")
    assert_same("run", undisturbed("ippo"))


def test_lines_that_were_half_written_are_left_out(undisturbed):
    train("ippo", pause_at=2)
    for name in ("metrics.csv", "samples.jsonl"):
        with open(f"run/{name}", "ab") as file:
            file.write('3,"größ'.encode()[:-1])
    train("ippo", resume="run")
    assert_same("run", undisturbed("ippo"))


def test_metrics_that_lack_updates_are_one_line():
    train("ippo", pause_at=2)
    Path("run/metrics.csv").unlink()
    with pytest.raises(UserError, match="^run/metrics.csv has 0 of the 2 updates that are done$"):
        train("ippo", resume="run")


@pytest.mark.parametrize("script, rank", [("ippo", 0), ("maac", 0), ("magrpo", 2), ("ppo", 2)])
def test_a_model_that_has_changed_since_is_one_line(script, rank):
    model, tokenizer = small_model()
    for each in (model, tokenizer):
        each.save_pretrained("model")
    flags = FLAGS[script] | {"lora_rank": rank, "model": "model"}
    task = make_task(lambda *texts, items: [1.0] * len(items))
    SCRIPTS[script].main(SCRIPTS[script].Args(**flags, output_dir="run", pause_at=1), task)
    weights = load_file("model/model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, "model/model.safetensors", metadata={"format": "pt"})
    before = contents("run")
    with pytest.raises(UserError, match="^[^\n]*(began with another model|is of the base)[^\n]*$"):
        SCRIPTS[script].main(SCRIPTS[script].Args(**flags, resume="run"), task)
    assert contents("run") == before


def test_a_run_on_what_python_gave_does_not_go_on_with_anything_else(tmp_path, request):
    rows = [{"prompt": "I took my car."}] * 12
    small = {"rollout_buffer_size": 4, "mini_batch_size": 4, "max_new_tokens": 4, "eval_interval": 0}
    small["model"] = request.getfixturevalue("small_model")
    args = ippo_llm.Args(**small, max_episodes=8, output_dir=str(tmp_path / "run"))
    ippo_llm.main(args, train_dataset=rows)
    again = ippo_llm.Args(**small, max_episodes=12, resume=str(tmp_path / "run"))
    config = (tmp_path / "run/config.json").read_bytes()
    message = "is a run of the task in ippo_llm.py on rows given from Python, and here is the task in ippo_llm.py; main"
    with pytest.raises(UserError, match=message):
        ippo_llm.main(again)
    assert (tmp_path / "run/config.json").read_bytes() == config
    _, run = ippo_llm.main(again, train_dataset=rows)
    assert run.step == 3


OWN_TASK = """
def reward_func(*completions):
    return [1.0] * len(completions[0])
"""


def go_on_with(rows, tmp_path, **flags):
    """Begin or resume a run of a task's file on a file of rows."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "post {k}"}}\n' for k in range(rows)))
    flags |= {"dataset": str(tmp_path / "rows.jsonl"), "task": str(tmp_path / "own.py"), "train_size": None}
    args = ippo_llm.Args(**(FLAGS["ippo"] | {"eval_size": 1} | flags))
    return ippo_llm.main(args, None, *small_model())[1]


def test_data_that_have_changed_their_number_are_one_line(tmp_path):
    (tmp_path / "own.py").write_text(OWN_TASK)
    go_on_with(13, tmp_path, output_dir="run", pause_at=1)
    before = contents("run")
    with pytest.raises(UserError, match="run is a run of 3 updates, and with the items that are here it has 2"):
        go_on_with(9, tmp_path, resume="run")
    assert contents("run") == before
    assert go_on_with(9, tmp_path, resume="run", num_train_epochs=2).step == 4  # more epochs may be asked for


def test_a_task_that_has_changed_is_said(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN_TASK)
    go_on_with(13, tmp_path, output_dir="run", pause_at=1)
    go_on_with(13, tmp_path, resume="run", pause_at=2)
    assert "has changed" not in capsys.readouterr().out
    (tmp_path / "own.py").write_text(OWN_TASK.replace("1.0", "5.0"))
    run = go_on_with(13, tmp_path, resume="run")
    assert "own.py has changed since run was begun, or last resumed" in capsys.readouterr().out
    assert [row["reward_mean"] for row in run.rows] == [1.0, 1.0, 5.0]


def test_a_fork_passes_over_a_damaged_checkpoint_also_where_its_run_began_with_another():
    train("ppo", folder="start", pause_at=1)
    flags = {"load_checkpoint": "start", "pause_at": 2}
    train("ppo", folder="first", **flags, **KEPT)
    Path("first/checkpoints/update_000002/agent_0/actor/adapter_config.json").unlink()
    train("ppo", folder="fork", fork="first", **flags, **KEPT)
    assert config_of("fork")["fork"]["checkpoint"] == "update_000001" and len(timeless("fork")) == 2


# --- Forks that differ ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script, actor", [("ippo", "model"), ("ppo", "actor/adapter_model")])
def test_a_fork_with_another_learning_rate_differs_from_there_on(script, actor, made):
    made("first", script, **KEPT)
    train(script, folder="fork", fork=SECOND, actor_learning_rate=0.25)
    assert timeless("fork")[:2] == timeless("first")[:2]
    assert not compare("first", "fork")[f"agent_0/{actor}.safetensors"]
    assert config_of("fork")["fork"]["changed"]["actor_learning_rate"][1] == 0.25


@pytest.mark.parametrize("script, divisor", [("ippo", "s"), ("ppo", "std")])
def test_a_fork_to_other_rewards_measures_their_deviation_anew(script, divisor):
    agents, _ = train(script, lambda *texts, items: [100.0 * (k % 2) for k in range(len(items))], "first", **KEPT)
    items = [{"prompt": f"Number {k}.", "number": k} for k in range(12)]
    Path("other.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    own = {"dataset": "other.jsonl"} if script == "ippo" else {"reward_normalization": True}
    small = lambda *texts, items: [k % 2 / 10 for k in range(len(items))]  # noqa: E731
    forked, _ = train(script, small, "fork", fork=SECOND, pause_at=3, **own)
    assert agents[0].state[divisor] > 10 * forked[0].state[divisor] > 0
    kept, _ = train(script, small, "kept", fork=SECOND, pause_at=3)
    assert kept[0].state[divisor] > 0.9 * agents[0].state[divisor]


def test_a_fork_of_another_seed_draws_other_numbers(made):
    made("first", **KEPT)
    train("ippo", folder="other", fork=SECOND, seed=2)
    assert timeless("first")[:2] == timeless("other")[:2] and timeless("first")[2] != timeless("other")[2]


def test_a_fork_with_other_data_reads_them_from_the_first(made):
    made("first", **KEPT)
    items = [{"prompt": f"Number {k}.", "number": k} for k in range(12)]
    Path("other.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    read = []

    def note(*completions, items):
        read.extend(item["number"] for item in items)
        return [0.5] * len(items)

    flags = {"dataset": "other.jsonl", "train_size": 8, "eval_size": 4, "num_train_epochs": 2}
    _, run = train("ippo", note, fork=SECOND, pause_at=4, **flags)
    assert run.num_updates == 2 + 4 and run.rows[-1]["epoch"] == 1 and len({*read}) == len(read) == 8
    _, again = train("ippo", note, folder="again", fork="run", **flags)
    assert again.num_updates == 6 and again.rows[-1]["epoch"] == 2 and {*read[8:]} == {*read[:8]}
    del read[8:]
    train("ippo", note, resume="run", fork=SECOND, **flags)
    assert len(read) == 16 and {*read[8:]} == {*read[:8]}


def test_a_fork_is_of_the_newest_checkpoint_that_is_whole(made):
    made("first", pause_at=2, **KEPT)
    (Path(SECOND) / "agent_0/model.safetensors").write_bytes(b"")
    _, run = train("ippo", folder="fork", fork="first")
    assert config_of("fork")["fork"]["step"] == 1 and run.step == 3


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"num_agents": 3}, "^--fork first goes on with what that run has, and these differ: --num-agents 2 there, 3"),
        ({"use_separate_critic": True}, "these differ: --use-separate-critic False there, True here$"),
        ({"rollout_buffer_size": 8}, "these differ: --rollout-buffer-size 4 there, 8 here$"),
        ({"fork": "nowhere"}, "^--fork takes a run's folder, or latest, and nowhere has no config.json$"),
        ({"fork": "first/checkpoints/update_000007"}, "^first/checkpoints/update_000007 is not whole: "),
        ({"output_dir": "first", "overwrite": True}, "^--fork first is the folder that the run would write; "),
        ({}, "^--fork first has done 3 updates, and that is all by these flags: give a larger --max-episodes or "),
    ],
)
def test_what_can_not_be_forked_is_one_line_and_nothing_is_lost(flags, message, made):
    made("first", **KEPT)
    before = contents("first")
    folder = flags.get("output_dir", "fork")
    with pytest.raises(UserError, match=message):
        train("ippo", folder=folder, **({"fork": "first"} | flags))
    assert contents("first") == before and not Path("fork").exists()


def test_a_fork_that_ended_before_its_first_update_goes_on_without_its_run(made, undisturbed):
    made("first", pause_at=2, **KEPT)
    with pytest.raises(TaskError):
        train("ippo", Faulty(return_none, 1), folder="run", fork="first")
    Path("first").rename("away")
    train("ippo", resume="run", fork="first")
    assert_same("run", undisturbed("ippo"))


@pytest.mark.parametrize("has_parent, agents", [(True, True), (False, False)])
def test_a_fork_without_checkpoints_that_has_learned_is_refused_and_kept(has_parent, agents, made):
    made("first", pause_at=1, **KEPT)
    train("ippo", folder="run", fork="first", **KEPT)
    shutil.rmtree("run/checkpoints")
    if not agents:
        for path in Path("run").glob("agent_*"):
            shutil.rmtree(path)
    before = contents("run")
    if not has_parent:
        Path("first").rename("away")
    there = "3 updates in metrics.csv" + (", agent_0, agent_1" if agents else "")
    with pytest.raises(UserError, match=f"^--resume: run has no checkpoint to go on from; it has {there}, which are k"):
        train("ippo", resume="run", fork="first", **KEPT)
    assert contents("run") == before


def test_a_fork_that_can_not_be_copied_removes_no_run_that_it_would_replace(made, monkeypatch):
    made("first", pause_at=1, **KEPT)
    made("run", pause_at=1, seed=2)
    before = contents("run")
    copytree = shutil.copytree

    def remove_first(source, target):
        shutil.rmtree(source)
        copytree(source, target)

    monkeypatch.setattr("utils.run.fork.shutil.copytree", remove_first)
    with pytest.raises(UserError, match="^--fork: first/checkpoints/update_000001 can't be copied: that run goes on"):
        train("ippo", fork="first", overwrite=True)
    assert contents("run") == before


@pytest.mark.parametrize("change", range(1, 60, 7))
def test_a_fork_that_was_cut_off_at_a_change_of_files_is_whole_or_made_again(change, made, undisturbed, monkeypatch):
    """Where it replaces a run."""
    made("first", pause_at=1, **KEPT)
    made("run", pause_at=1, seed=2)
    numbers = itertools.count(1)

    def stop(*_):
        if next(numbers) == change:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for module, name in [(os, "replace"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (os, "open")]:
            function = getattr(module, name)
            patch.setattr(module, name, lambda *values, f=function, **named: stop() or f(*values, **named))
        try:
            train("ippo", fork="first", overwrite=True)
        except KeyboardInterrupt:
            pass
    is_fork = Path("run/config.json").exists() and config_of("run")["args"]["seed"] == 1
    train("ippo", fork="first", **({"resume": "run"} if is_fork else {"overwrite": True}))
    assert_same("run", undisturbed("ippo"))
    assert not Path("run/fork.writing").exists()


def test_a_fork_that_was_cut_off_while_it_was_made_is_made_again(made, undisturbed, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    made("first", pause_at=2, **KEPT)
    with monkeypatch.context() as patch:
        patch.setattr("utils.run.fork.shutil.copytree", full)
        with pytest.raises(UserError, match=f"^--fork: {SECOND} can't be copied: .*No space left"):
            train("ippo", fork="first")
    train("ippo", resume="run", fork="first")
    assert_same("run", undisturbed("ippo"))
