"""utils.population: who descends from whom, what is drawn, what a fault costs, and what is refused."""

import contextlib
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from processes import ROOT

from utils.cli import UserError, flag_name
from utils.population import __main__ as population
from utils.same import compare

# A script with the flags of a run, without the model: an update adds --lr to the reward. Its faults are the test's.
SCRIPT = """
import argparse, json, os, pathlib, signal, sys, time
parser = argparse.ArgumentParser()
numbers = {"lr": "FLOAT", "width": "INT", "seed": "INT", "pause-at": "INT", "eval-interval": "INT", "lora-rank": "INT"}
for flag, takes in numbers.items():
    parser.add_argument(f"--{flag}", metavar=takes)
for flag in ("env", "output-dir", "resume", "fork"):
    parser.add_argument(f"--{flag}")
parser.add_argument("--overwrite", action="store_true")
flags = parser.parse_args()
folder = pathlib.Path(flags.resume or flags.output_dir)
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as file:
    file.write(json.dumps({"argv": sys.argv[1:], "threads": os.environ["OMP_NUM_THREADS"]}) + "\\n")
rewards = []
if flags.resume:
    flags.fork = json.loads((folder / "config.json").read_text())["fork"]
for source in (folder, flags.fork):
    if source and not rewards and (pathlib.Path(source) / "rewards").exists():
        rewards = json.loads((pathlib.Path(source) / "rewards").read_text())
folder.mkdir(parents=True, exist_ok=True)
num_updates = 12 if flags.width != "8" else 13
(folder / "config.json").write_text(json.dumps({"num_updates": num_updates, "fork": flags.fork}))
plan = json.loads((here / "plan").read_text()) if (here / "plan").exists() else {}
fault = plan.get("/".join(folder.parts[-2:]), "")
once = here / fault if fault else None
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if fault == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "raises":
    sys.exit("script.py: error: reward_func raised ValueError: no mind to")
if fault in ("worker", "waits") and not once.exists():
    once.write_text(str(os.getpid()))
    if fault == "worker":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
while len(rewards) < min(12, int(flags.pause_at)):
    rewards.append((rewards or [0.0])[-1] + float(flags.lr))
text = "".join(f"{reward},{reward}\\n" for reward in rewards)
(folder / "metrics.csv").write_text("reward_mean,eval/reward_mean\\n" + text)
for path in (folder, folder / f"checkpoints/update_{len(rewards):06d}", folder / "agent_0"):
    path.mkdir(parents=True, exist_ok=True)
    (path / "rewards").write_text(json.dumps(rewards))
"""
RANGE = {"lr": "0.01:1"}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return "python script.py"


@pytest.fixture(scope="session")
def tools():
    """What needs Ray, where it is installed."""
    pytest.importorskip("ray.tune")
    from utils.population import breeding

    return breeding


@pytest.fixture(scope="session")
def breeding(tools):
    """Ray, with room for two members; populations take it as it is."""
    tools.connect(None, 2)
    yield tools
    tools.ray.shutdown()


@pytest.fixture(scope="session")
def whole(breeding, tmp_path_factory):
    """The folder of a population that nothing happens to, with its calls and what it printed beside it."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "script.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.chdir(folder)
        breed(keep_generations=1)
    (folder / "output").write_text(output.getvalue())
    return folder / "out"


def breed(folder="out", **flags):
    """The records of a population of four, of four generations of three updates, by generation and member."""
    settings = {"command": "python script.py", "mutate": RANGE, "generation": 3, "output_dir": str(folder)} | flags
    population.main(population.Args(**settings))
    return records(folder)


def records(folder="out"):
    members = json.loads((Path(folder) / "population.json").read_text())["members"]
    return {(record["generation"], record["member"]): record for record in members}


def lineage(folder="out"):
    """All that a population is, times aside."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records(folder).values()]


def calls(name="calls"):
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def plan(**faults):
    """Which generation of which member is to fail, and how."""
    Path("plan").write_text(json.dumps({f"generation_00{key[1]}/member_{key[3]}": x for key, x in faults.items()}))


def start(*flags, workers=1):
    """The command under way, with a Ray of its own."""
    argv = [sys.executable, "-m", "utils.population", "--command", "python script.py", "--mutate", "lr=0.01:1"]
    argv += ["--generation", "3", "--output-dir", "out", *flags]
    argv += ["--workers", str(workers)] if workers else []
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(argv, env=os.environ | {"PYTHONPATH": str(ROOT)}, **streams)


def wait_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# --- Values -----------------------------------------------------------------------------------------------------------


def test_values_are_log_uniform_in_their_range(breeding):
    rng = random.Random(0)
    values = [breeding.draw(rng, 1e-4, 1e-2, False) for _ in range(2000)]
    assert 1e-4 <= min(values) and max(values) <= 1e-2
    assert 0.46 < sum(value < 1e-3 for value in values) / 2000 < 0.54
    assert {breeding.draw(rng, 1, 4, True) for _ in range(200)} == {1, 2, 3, 4}


def test_a_winners_value_is_multiplied_or_drawn_anew_within_its_range(breeding):
    rng = random.Random(0)
    assert {breeding.explore(rng, 0.1, 1e-3, 1.0, False, 0.0) for _ in range(50)} == {0.08, 0.12}
    assert {breeding.explore(rng, 0.1, 0.09, 0.11, False, 0.0) for _ in range(50)} == {0.09, 0.11}
    assert {breeding.explore(rng, 2, 1, 9, True, 0.0) for _ in range(50)} == {1, 3}
    assert len({breeding.explore(rng, 0.1, 1e-3, 1.0, False, 1.0) for _ in range(50)}) > 40
    drawn = sum(breeding.explore(rng, 0.1, 1e-3, 1.0, False, 0.25) not in (0.08, 0.12) for _ in range(2000))
    assert 0.21 < drawn / 2000 < 0.29


# --- Lineage ----------------------------------------------------------------------------------------------------------


def test_losers_fork_winners_and_others_go_on(whole):
    members = records(whole)
    assert sorted(members) == [(g, k) for g in (1, 2, 3, 4) for k in range(4)]
    for k in range(4):
        assert members[1, k]["parent"] is None
        assert members[1, k]["fitness"] == pytest.approx(3 * members[1, k]["hyperparameters"]["lr"])
    for g in (2, 3, 4):
        ranked = sorted(range(4), key=lambda k: members[g - 1, k]["fitness"])
        for k in range(4):
            parent = ranked[-1] if k == ranked[0] else k
            assert members[g, k]["parent"] == parent
            before, after = members[g - 1, parent], members[g, k]
            assert after["fitness"] == pytest.approx(before["fitness"] + 3 * after["hyperparameters"]["lr"])
            assert (after["hyperparameters"] == before["hyperparameters"]) == (parent == k)


def test_each_generation_is_a_fork_of_one_thread(whole):
    made = calls(whole.parent / "calls")
    assert {call["threads"] for call in made} == {"1"}
    forks = [dict(zip(call["argv"][::2], call["argv"][1::2])) for call in made if "--fork" in call["argv"]]
    (first,) = [flags for flags in forks if flags["--output-dir"] == f"{whole}/generation_002/member_0"]
    assert first["--fork"] == f"{whole}/generation_001/member_0/checkpoints/update_000003"
    assert (first["--seed"], first["--eval-interval"], first["--pause-at"]) == ("1", "3", "6")
    assert len(forks) == 12 and len(made) == 17  # the first member's first update is a start of its own


def test_it_says_who_is_best_draws_it_and_keeps_the_newest_agents(whole):
    last = [record for key, record in records(whole).items() if key[0] == 4]
    best = max(last, key=lambda record: record["fitness"])
    output = (whole.parent / "output").read_text()
    assert output.endswith(f"the best is member {best['member']}, in {whole / best['folder']}\n")
    assert json.loads((whole / "population.json").read_text())["best"] == best["folder"]
    assert [*whole.glob("generation_00[123]/*/checkpoints")] == [] and (whole / best["folder"] / "agent_0").is_dir()
    assert (whole / "generation_001/member_0/metrics.csv").is_file()
    assert np.ptp(imread(whole / "population.png")) > 0.5


@pytest.mark.slow
def test_a_killed_population_goes_on_with_the_same_lineage_however_many_workers_it_has(script, whole):
    """SIGKILL in the third generation, with one worker; then on with two, as one that nothing stops."""
    plan(g3m1="waits")
    process = start()
    wait_until(lambda: Path("waits").exists() and Path("waits").read_text())
    pid = Path("waits").read_text()
    before = records()
    process.kill()
    process.communicate()
    assert [*before] == [(g, k) for g in (1, 2) for k in range(4)] + [(3, 0)]
    done = len(calls())
    wait_until(lambda: not Path(f"/proc/{pid}").exists())  # what was under way has ended too
    breed()
    assert lineage() == lineage(whole)
    again = [call["argv"] for call in calls()[done:]]
    (anew,) = [argv for argv in again if "--overwrite" in argv]  # it had no checkpoint yet
    assert len(again) == 7 and anew[anew.index("--output-dir") + 1] == str(
        Path("out/generation_003/member_1").absolute()
    )
    assert "--fork" in anew and not any("--resume" in argv for argv in again)
    assert breed() == records() and len(calls()) == done + 7  # there is nothing left to do


@pytest.fixture
def cluster(monkeypatch):
    """The address of a Ray cluster of this machine, of processes of its own."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is asked for
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=2", "--block"]
    argv += ["--include-dashboard=false", f"--object-store-memory={100 * 2**20}"]
    with tempfile.TemporaryDirectory() as folder:  # a short path, as sockets take no longer one
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([*argv, f"--temp-dir={folder}"], **quiet)
        yield f"127.0.0.1:{port}"
        process.terminate()
        process.wait(timeout=240)


@pytest.mark.slow
def test_a_population_of_a_cluster_has_the_same_lineage_and_goes_on_after_a_kill(cluster, script, whole):
    plan(g2m1="waits")
    process = start("--address", cluster, workers=None)
    wait_until(lambda: Path("waits").exists() and Path("waits").read_text())
    pid = Path("waits").read_text()
    process.kill()
    process.communicate()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())  # what was under way has ended too
    output, _ = start("--address", cluster, workers=None).communicate(timeout=240)
    assert lineage() == lineage(whole), output


@pytest.mark.slow
def test_a_stopped_population_saves_and_goes_on(script, breeding):
    plan(g2m0="waits")
    process = start()
    wait_until(Path("waits").exists)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert output.endswith("population: the members under way are saved; the same command goes on with them\n")
    assert sorted(records()) == [(1, k) for k in range(4)] and not Path("out/stop").exists()
    assert len(breed()) == 16 and all(record["error"] is None for record in records().values())


# --- Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lost_members_are_forked_anew_and_others_go_on(script, breeding, capsys):
    """More of them than losers: one is killed, one raises, and the folder of one can't be made."""
    plan(g2m1="killed", g2m2="raises")
    Path("out/generation_002").mkdir(parents=True)
    population.Population(population.Args(**basic_flags()), "script.py", {}).write()
    Path("out/generation_002/member_3").write_text("")
    members = breed()
    output = capsys.readouterr().out
    errors = [members[2, k]["error"] for k in range(4)]
    assert errors[:2] == [None, "killed by SIGKILL"] and "out/generation_002/member_3" in errors[3]
    assert errors[2] == "script.py: error: reward_func raised ValueError: no mind to"
    assert output.count("LOST") == 3 and "generation 2 of 4, member 1: LOST: killed by SIGKILL (lr " in output
    assert [members[3, k]["parent"] for k in range(4)] == [0, 0, 0, 0]
    assert [members[2, k]["fitness"] for k in range(1, 4)] == [None] * 3
    assert all(members[4, k]["fitness"] > members[2, 0]["fitness"] for k in range(4))


def basic_flags():
    return {"command": "python script.py", "mutate": RANGE, "generation": 3, "output_dir": "out"}


def test_who_was_lost_in_the_last_generation_is_listed_last(tmp_path):
    members = population.Population(population.Args(**(basic_flags() | {"size": 4})), "script.py", {})
    for k, fitness in enumerate([1.0, None, 3.0, 2.0]):
        record = {"generation": 1, "member": k, "parent": None, "hyperparameters": {}}
        members.records[1, k] = record | {"fitness": fitness, "folder": f"{k}"}
    rows = [line.split(" | ")[0] for line in population.outcome(members).splitlines()[2:6]]
    assert rows == ["| 2", "| 3", "| 0", "| 1"]


def test_a_folder_in_which_a_start_failed_is_taken_by_the_next(tmp_path):
    (tmp_path / ".lock").touch()
    args = population.Args(**(basic_flags() | {"output_dir": str(tmp_path)}))
    members = population.Population(args, "script.py", {})
    members.open()
    members.close()
    assert (tmp_path / "population.json").is_file()


@pytest.mark.slow
def test_where_all_are_lost_it_ends_with_one_line(script, breeding):
    """Mended, it goes on. The first member raised in its first update already."""
    plan(g1m0="raises", g2m0="raises", g2m1="raises", g2m2="raises", g2m3="raises")
    with pytest.raises(UserError, match="^no member of generation 2 is left: script.py: error: reward_func") as error:
        breed()
    assert error.value.exit_code == 1 and (3, 0) not in records()
    assert [records()[1, k]["error"] is None for k in range(4)] == [False, True, True, True]
    Path("plan").unlink()
    assert {record["error"] for key, record in breed().items() if key[0] > 1} == {None}


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_its_run_with_it_and_is_replaced(script, breeding):
    plan(g2m1="worker")
    members = breed()
    assert all(record["error"] is None for record in members.values())
    folder = str(Path("out/generation_002/member_1").absolute())
    mine = [call["argv"] for call in calls() if folder in call["argv"]]
    assert ["--resume" in argv for argv in mine] == [False, True]


@pytest.mark.parametrize(
    "fault, error",
    [
        ("no room", ".*generation_002.*"),
        ("longer", "with these values a run has 13 updates, and not 12"),
        ("no metric", "no score in updates 4 to 6"),
        ("not a number", "eval/reward_mean is nan in the end"),
    ],
)
def test_what_went_wrong_with_a_member_is_a_line(script, tools, tmp_path, fault, error):
    settings = {
        "folder": str(tmp_path / "out"),
        "cwd": str(tmp_path),
        "python": sys.executable,
        "words": script.split(),
    }
    settings |= {"generation": 3, "num_updates": 12, "metric": "score" if fault == "no metric" else "eval/reward_mean"}
    parent = tools.play(settings | {"metric": "eval/reward_mean"}, 1, 0, None, {"lr": 0.5})
    assert (parent["fitness"], parent["error"], parent["parent"]) == (1.5, None, None)
    if fault == "no room":
        Path("out/generation_002").write_text("")
    values = {"lr": float("nan") if fault == "not a number" else 0.25, "width": 8 if fault == "longer" else 1}
    record = tools.play(settings, 2, 1, 0, values)
    assert record["fitness"] is None and re.fullmatch(error, record["error"]), record["error"]
    sound = tools.play(settings | {"metric": "eval/reward_mean"}, 2, 2, 0, {"lr": 0.25, "width": 1})
    assert fault == "no room" or (sound["fitness"], sound["error"], sound["parent"]) == (2.25, None, 0)


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"mutate": {}}, "--mutate is missing; it takes FLAG=LOW:HIGH"),
        ({"mutate": {"lr": "1:0.1"}}, "--mutate lr takes LOW:HIGH, numbers above 0, the second one larger, got 1:0.1"),
        ({"mutate": {"lr": 0.5}}, "--mutate lr takes LOW:HIGH, numbers above 0, .* got 0.5"),
        ({"mutate": {"lr": "0:1"}}, "--mutate lr takes LOW:HIGH"),
        ({"mutate": {"lr": "1:inf"}}, "--mutate lr takes LOW:HIGH"),
        ({"mutate": {"lr": "a:b"}}, "--mutate lr takes LOW:HIGH"),
        ({"mutate": {"lr": "0.1:1", "--lr": "0.1:2"}}, "--mutate --lr: --lr has a range already"),
        ({"mutate": {"width": "1:2.5"}}, "--mutate width takes LOW:HIGH, whole numbers above 0"),
        ({"mutate": {"no_such": "1:2"}}, "--mutate no_such: the script has no --no-such"),
        ({"mutate": {"env": "1:2"}}, "--mutate env: --env is not a number"),
        ({"mutate": {"lora_rank": "1:2"}}, "--mutate lora_rank: --lora-rank can't differ between a run and its fork"),
        ({"size": 3}, "--size takes at least 4 with --quantile-fraction 0.25: one is to lose, one to win; got 3"),
        ({"size": 1, "quantile_fraction": 0.5}, "--size takes at least 2 with"),
        ({"command": ""}, "--command is missing"),
        ({"command": "python script.py --lr 1"}, "--command has --lr, which each run gets from here"),
        ({"command": "python script.py --seed 1"}, "--command has --seed"),
        ({"command": "python script.py --fork x"}, "--command has --fork"),
        ({"command": "python script.py --pause-at 1"}, "--command has --pause-at"),
        ({"workers": 2, "address": "auto"}, "--workers has no effect with --address"),
        ({"command": "python script.py --widht 1"}, "--command: the script has no --widht"),
    ],
)
def test_bad_flags_are_one_line(script, flags, message):
    with pytest.raises(UserError, match=f"^{message}") as error:
        population.main(population.Args(**(basic_flags() | flags)))
    assert "\n" not in str(error.value) and error.value.exit_code == 2 and not Path("out").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"generation": 13}, "--generation 13 is longer than a run, of 12 updates"),
        ({"metric": "score"}, "--metric score is no column of the runs' metrics.csv: reward_mean, eval/reward_mean"),
        ({"command": "python script.py --width x", "mutate": RANGE}, "--command: .*script.py: error: argument --width"),
    ],
)
def test_what_the_first_update_shows_is_one_line_and_leaves_nothing(script, breeding, flags, message):
    Path("script.py").write_text(SCRIPT.replace("metavar=takes", 'metavar=takes, type={"width": int}.get(flag)'))
    with pytest.raises(UserError, match=f"^{message}") as error:
        breed(**flags)
    assert "\n" not in str(error.value) and error.value.exit_code == 2 and not Path("out").exists()


def test_what_a_fork_may_not_change_is_not_mutated():
    assert population.FIXED >= {"opponents", "opponent_interval", "eval_interval", "lora_rank", "seed"}
    flags = {"--opponents": "INT", "--micro-batch-size": "INT"}
    with pytest.raises(UserError, match="--opponents can't differ between a run and its fork"):
        population.ranges_of({"opponents": "1:4"}, flags)
    with pytest.raises(UserError, match="--micro-batch-size changes nothing of what a run learns$"):
        population.ranges_of({"micro_batch_size": "1:4"}, flags)


def test_runs_that_evaluate_nothing_are_refused_at_once(script, breeding):
    Path("script.py").write_text(SCRIPT.replace("{reward},{reward}", "{reward},"))
    with pytest.raises(UserError, match="^--metric eval/reward_mean: the runs evaluate nothing"):
        breed()
    assert not Path("out").exists()


def test_the_command_keeps_its_program_and_its_interval_of_evaluations(script, breeding):
    breed(command="env python script.py --eval-interval=2", size=2, quantile_fraction=0.5, generation=12)
    argv = [call["argv"] for call in calls() if "--pause-at" in call["argv"]]
    assert argv and all("--eval-interval=2" in words and "--eval-interval" not in words for words in argv)


def test_a_folder_of_another_population_or_of_anything_else_is_refused(script, breeding):
    breed(generation=12)
    before = lineage()
    with pytest.raises(UserError, match="another population's: --size 4 there, 5 here; --seed 1 there, 2 here$"):
        breed(generation=12, size=5, seed=2)
    with pytest.raises(
        UserError, match="--output-dir takes a new folder, or a population's, and .*/out/generation_001"
    ):
        breed("out/generation_001")
    assert lineage() == before
    Path("out/population.json").write_text("{")
    with pytest.raises(UserError, match="population.json can't be read as JSON"):
        breed(generation=12)


def test_a_second_start_in_the_same_folder_is_refused(script, breeding):
    one = population.Population(population.Args(**basic_flags()), "script.py", {})
    one.open()
    with pytest.raises(UserError, match="^another run is under way in .*/out$"):
        breed()
    one.lock.close()


def test_where_ray_does_not_start_it_is_one_line(script, tools, monkeypatch):
    starts = []

    def init(**options):
        starts.append(options)
        raise Exception("The current node timed out\nduring startup.")

    monkeypatch.setattr(tools.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(tools.ray, "init", init)
    with pytest.raises(UserError, match="^Ray: The current node timed out during startup.$"):
        breed()
    with pytest.raises(UserError, match="^--address 10.0.0.1:6379: The current node timed out during startup.$"):
        breed(address="10.0.0.1:6379")
    assert starts[0]["num_cpus"] == 1 and "address" not in starts[0]
    assert starts[1]["address"] == "10.0.0.1:6379" and "num_cpus" not in starts[1]


def test_without_ray_it_is_one_line(script, monkeypatch):
    for name in ("ray", "ray.tune"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "utils.population.breeding", raising=False)
    monkeypatch.delattr("utils.population.breeding", raising=False)
    with pytest.raises(UserError, match="^populations take Ray Tune, .*: pip install -r requirements-pop") as error:
        population.main(population.Args(**basic_flags()))
    assert error.value.exit_code == 2 and "\n" not in str(error.value) and not Path("out").exists()


# --- What Ray has -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "resources, at_a_time, gpus",
    [
        ({"CPU": 2.0}, 2, 0.0),
        ({"CPU": 8.0, "GPU": 4.0}, 4, 1.0),
        ({"CPU": 8.0, "GPU": 4.0}, 1, 1.0),
        ({"CPU": 8.0, "GPU": 1.0}, 3, 0.333),
    ],
)
def test_members_share_the_gpus(tools, monkeypatch, resources, at_a_time, gpus):
    monkeypatch.setattr(tools.ray, "cluster_resources", lambda: resources)
    assert tools.gpus_of(at_a_time) == gpus


@pytest.mark.parametrize("gpus", [1.5, 3.0])
def test_gpus_that_are_not_there_are_a_line(tools, monkeypatch, gpus):
    monkeypatch.setattr(tools.ray, "cluster_resources", lambda: {"GPU": 2.0})
    tools.check_gpus(2.0)
    with pytest.raises(UserError, match=f"^--gpus takes a part of one, or a whole number up to the 2 .*got {gpus:g}$"):
        tools.check_gpus(gpus)


@pytest.mark.parametrize("log, reason", [("a\nb: no\n", "b: no"), ("", "exit code 1, and nothing in {}.log")])
def test_a_run_that_fails_has_a_reason_if_its_log_could_not_be_written(tools, log, reason, tmp_path):
    (tmp_path / "member_0.log").write_text(log)
    assert tools.why(1, tmp_path / "member_0") == reason.format(tmp_path / "member_0")


# --- A script's own runs ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_members_are_runs_and_who_forks_nobody_is_the_run_of_its_flags(breeding, tmp_path, monkeypatch):
    """A team of two: the winner's last folder is, to the bit, a run with its values that nothing interrupts."""
    monkeypatch.chdir(ROOT)
    flags = {"train_size": 12, "rollout_buffer_size": 4, "mini_batch_size": 4, "num_train_epochs": 1}
    flags |= {"num_agents": 2, "max_new_tokens": 3, "task": "number", "eval_size": 4}
    words = [word for name, value in flags.items() for word in (flag_name(name), str(value))]
    ranges = {"actor_learning_rate": "1e-4:1e-2"}
    command = f"python ippo_llm.py {' '.join(words)}"
    members = breed(tmp_path / "out", command=command, mutate=ranges, size=2, quantile_fraction=0.5, generation=2)
    assert {record["error"] for record in members.values()} == {None}
    best = members[2, 0]["parent"]
    assert members[2, 1]["parent"] == best and members[1, best]["fitness"] >= members[1, 1 - best]["fitness"]
    rate = members[1, best]["hyperparameters"]["actor_learning_rate"]
    own = ["--seed", "1", "--eval-interval", "2", "--actor-learning-rate", str(rate)]
    argv = [sys.executable, "ippo_llm.py", *words, *own, "--output-dir", str(tmp_path / "whole")]
    subprocess.run(argv, check=True, capture_output=True)
    same = compare(tmp_path / "whole", tmp_path / "out" / members[2, best]["folder"])
    assert all(same.values()) and len(same) > 4
    config = json.loads((tmp_path / "out" / members[2, 1 - best]["folder"] / "config.json").read_text())
    other = members[2, 1 - best]["hyperparameters"]["actor_learning_rate"]
    assert config["fork"]["changed"] == {"actor_learning_rate": [rate, other]} and rate != other
