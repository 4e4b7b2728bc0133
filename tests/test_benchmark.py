"""The benchmark runner: every combination once, failures named, stopped runs resumed, a manifest that is true."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from utils import benchmark
from utils.cli import Stopped, UserError, parse

ROOT = Path(__file__).resolve().parent.parent

# A script with the flags of a run, without the model: two updates, a line of its calls, what the test asks for.
SCRIPT = """
import argparse, json, os, pathlib, signal, sys, time
parser = argparse.ArgumentParser()
for flag in ("--task", "--seed", "--output-dir", "--resume", "--sleep", "--killed"):
    parser.add_argument(flag)
parser.add_argument("--overwrite", action="store_true")
flags = parser.parse_args()
here = pathlib.Path(__file__).parent
call = {"argv": sys.argv[1:], "threads": os.environ["OMP_NUM_THREADS"], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
call["from"] = time.time()
folder = pathlib.Path(flags.resume or flags.output_dir)
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.json").write_text(json.dumps({"git_commit": "abc", "versions": {"torch": "1"}}))
if flags.killed and not flags.overwrite:
    os.kill(os.getpid(), signal.SIGKILL)
(folder / "checkpoints/update_000001").mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("under way", flush=True)
if flags.task == "bad" and not (here / "mended").exists():
    sys.exit("script.py: error: no such task")
time.sleep(0 if flags.resume else float(flags.sleep or 0))
rows = f"reward_mean,time/learn,samples_per_second\\n{flags.seed},{time.time()},{time.time()}\\n"
(folder / "metrics.csv").write_text(rows)
call["to"] = time.time()
with open(here / "calls", "a") as file:
    file.write(json.dumps(call) + "\\n")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return "python script.py"


def calls():
    return [json.loads(line) for line in Path("calls").read_text().splitlines()] if Path("calls").exists() else []


def run(command, **flags):
    args = benchmark.Args(command=command, output_dir="out", **flags)
    jobs = benchmark.jobs_of(args)
    return jobs, benchmark.run_jobs(jobs, args.output_dir, args.workers, args.threads)


def test_runs_every_combination_once(script, capsys):
    jobs, failed = run(f"{script} --sleep 0", tasks=("a", "b"), seeds=(1, 2, 3), workers=2, threads=3)
    assert not failed and len(calls()) == 6
    for task in "ab":
        for seed in (1, 2, 3):
            flags = f"--sleep 0 --task {task} --seed {seed} --output-dir out/script_sleep_0/{task}__{seed}"
            assert flags.split() in [call["argv"] for call in calls()]
    assert {call["threads"] for call in calls()} == {"3"}
    manifest = benchmark.manifest("out")
    assert set(manifest) == {job.name for job in jobs}
    for name, entry in manifest.items():
        task, seed = name.split("/")[1].split("__")
        assert entry["command"] == f"python script.py --sleep 0 --task {task} --seed {seed}"
        assert (entry["status"], entry["commit"], entry["versions"]) == ("finished", "abc", {"torch": "1"})
        assert entry["seconds"] >= 0 and entry["machine"]["cores"] == os.cpu_count() and entry["threads"] == 3
    assert "under way" in Path("out/script_sleep_0/a__1.log").read_text()
    assert capsys.readouterr().out.count("finished  script_sleep_0/") == 6
    run(f"{script} --sleep 0", tasks=("a", "b"), seeds=(1, 2, 3, 4))
    assert len(calls()) == 8  # the fourth seed alone


def test_digest_leaves_times_aside(script):
    run(script, name="one", seeds=(1, 2))
    run(script, name="other", seeds=(1, 2))
    found = {name: entry["metrics"] for name, entry in benchmark.manifest("out").items()}
    assert found["one/run__1"] == found["other/run__1"] != found["one/run__2"]


def test_failure_is_named_and_others_go_on(script, capsys):
    _, failed = run(script, tasks=("bad", "good"), seeds=(1, 2), name="x")
    assert sorted(failed) == ["x/bad__1", "x/bad__2"] and len(calls()) == 2
    output = capsys.readouterr().out
    assert "FAILED  x/bad__1" in output and "script.py: error: no such task" in output and "x/bad__1.log" in output
    manifest = benchmark.manifest("out")
    assert manifest["x/bad__1"]["status"] == "failed" and manifest["x/bad__1"]["exit_code"] == 1
    assert "metrics" not in manifest["x/bad__1"] and manifest["x/good__2"]["status"] == "finished"
    Path("mended").touch()
    _, failed = run(script, tasks=("bad", "good"), seeds=(1, 2), name="x")
    assert not failed and len(calls()) == 4


def test_a_run_that_was_killed_before_it_had_a_checkpoint_begins_anew(script):
    _, failed = run(f"{script} --killed 1", seeds=(1,), name="x")
    assert failed == ["x/run__1"] and not calls()
    _, failed = run(f"{script} --killed 1", seeds=(1,), name="x")
    assert not failed and calls()[0]["argv"][-3:] == ["--output-dir", "out/x/run__1", "--overwrite"]


def test_as_many_at_a_time_as_workers_each_with_a_gpu_for_each_process(script, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    jobs = benchmark.jobs_of(benchmark.Args(command=f"{script} --sleep 0.6", seeds=(1, 2, 3, 4), name="x"))
    for job in jobs:
        job.num_processes = 2
    benchmark.run_jobs(jobs, "out", workers=2)
    spans = [(call["from"], call["to"]) for call in calls()]
    assert max(sum(a <= moment <= b for a, b in spans) for moment, _ in spans) == 2
    assert sorted(call["gpus"] for call in calls()) == ["4,5", "4,5", "6,7", "6,7"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_stopped_runs_are_resumed(script, number):
    flags = ["--command", f"{script} --sleep 60", "--seeds", "1", "2", "--workers", "2", "--output-dir", "out"]
    argv = [sys.executable, "-m", "utils.benchmark", *flags, "--name", "x"]
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": os.environ | {"PYTHONPATH": str(ROOT)},
        "preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests' own shell may ignore it
    }
    with subprocess.Popen(argv, **options) as process:
        logs = [Path(f"out/x/run__{seed}.log") for seed in (1, 2)]
        wait(lambda: all(log.exists() and "under way" in log.read_text() for log in logs))
        process.send_signal(number)
        time.sleep(0.05)
        process.send_signal(number)  # as `timeout` does, and not taken for a second one
        _, output = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "the same command goes on" in output, output
    assert {entry["status"] for entry in benchmark.manifest("out").values()} == {"stopped"} and not calls()
    assert subprocess.run(argv, env=options["env"], capture_output=True).returncode == 0
    assert [call["argv"][-2:] for call in sorted(calls(), key=lambda call: call["argv"])] == [
        ["--resume", "out/x/run__1"],
        ["--resume", "out/x/run__2"],
    ]
    assert {entry["status"] for entry in benchmark.manifest("out").values()} == {"finished"}
    assert Path("out/x/run__1.log").read_text().count("under way") == 2  # the log is added to


def test_hangup_is_ignored_under_nohup(script):
    argv = [sys.executable, "-m", "utils.benchmark", "--command", f"{script} --sleep 3", "--seeds", "1"]
    argv = ["nohup", *argv, "--output-dir", "out", "--name", "x"]
    with subprocess.Popen(argv, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL) as process:
        log = Path("out/x/run__1.log")
        wait(lambda: log.exists() and "under way" in log.read_text())
        process.send_signal(signal.SIGHUP)
    assert process.returncode == 0 and len(calls()) == 1


def test_second_signal_ends_at_once(script, tmp_path):
    Path("script.py").write_text(SCRIPT.replace("lambda *_: sys.exit(143)", "signal.SIG_IGN"))
    jobs = benchmark.jobs_of(benchmark.Args(command=f"{script} --sleep 60", seeds=(1,), output_dir="out"))
    other = subprocess.Popen(
        [
            "bash",
            "-c",
            f"until grep -q under out/*/*.log; do sleep 0.1; done; kill {os.getpid()}; sleep 1.5; kill {os.getpid()}",
        ],
        stderr=subprocess.DEVNULL,
    )
    start = time.time()
    with pytest.raises(Stopped):
        benchmark.run_jobs(jobs, "out")
    other.wait()
    assert time.time() - start < 30 and jobs[0].process.returncode == -signal.SIGKILL


def test_the_processes_of_a_launcher_are_killed_with_it():
    launcher = (
        "import subprocess as s; print(s.Popen(['sleep', '600'], start_new_session=True).pid, flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = Path(f"/proc/{int(process.stdout.readline())}/status")
    benchmark.kill(process)
    assert process.wait() == -signal.SIGKILL
    wait(lambda: not child.exists() or "State:\tZ" in child.read_text())


def wait(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"command": ""}, "--command is missing"),
        (
            {"command": "python script.py", "name": "n" * 201},
            "^--name takes at most 200 bytes, got 201: give a shorter one$",
        ),
        ({"command": "python nowhere.py"}, "names no script"),
        ({"command": 'python script.py --model "x'}, "is no command line"),
        ({"command": "python script.py --seed 3"}, "--command has --seed"),
        ({"command": "python script.py --output_dir=x"}, "--command has --output-dir"),
        ({"command": "python script.py --task tldr", "tasks": ("code",)}, "--command has --task"),
        ({"command": "python script.py", "seeds": ()}, "--seeds takes"),
        ({"command": "python script.py", "seeds": (1, -1)}, "--seeds takes"),
        ({"command": "python script.py", "seeds": (1, 1)}, "--seeds takes different numbers of 0 or more, got 1 1"),
        ({"command": "python script.py", "tasks": ("a/t.py", "b/t.py")}, "--tasks names script/t__1 twice"),
        ({"command": "python script.py", "name": "a/b"}, "--name takes"),
        ({"command": "python script.py", "name": ".."}, "--name takes"),
    ],
)
def test_bad_flags_are_one_line(script, flags, message):
    with pytest.raises(UserError, match=message) as error:
        benchmark.jobs_of(benchmark.Args(**flags))
    assert "\n" not in str(error.value)


def test_a_run_that_leaves_no_metrics_failed(script):
    Path("script.py").write_text("print('usage: none')")
    _, failed = run(script, name="x", seeds=(1,))
    assert failed == ["x/run__1"] and benchmark.manifest("out")["x/run__1"]["status"] == "failed"


def test_a_finished_run_that_was_deleted_is_made_again_and_a_failed_command_may_be_mended(script):
    run(script, name="x", seeds=(1, 2))
    shutil.rmtree("out/x/run__1")
    run(script, name="x", seeds=(1, 2))
    assert [call["argv"][1] for call in calls()] == ["1", "2", "1"]
    assert run(f"{script} --slep 0", name="y", seeds=(1,))[1] == ["y/run__1"]
    assert not run(f"{script} --sleep 0", name="y", seeds=(1,))[1]


def test_other_faults_are_one_line(script):
    run(script, name="x", seeds=(1,))
    with pytest.raises(UserError, match="x/run__1 is of another command, python script.py --seed 1"):
        run(f"{script} --sleep 0", name="x", seeds=(1,))
    with pytest.raises(UserError, match="nosuchprogram can't be run"):
        run("nosuchprogram script.py", name="y", seeds=(1,))
    Path("out/manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json can't be read"):
        run(script, name="x", seeds=(1,))
    Path("file").touch()
    with pytest.raises(UserError, match="file can't be written"):
        benchmark.run_jobs([benchmark.Job("x/run__1", ["python", "script.py"])], "file")


def test_task_in_the_command_stays(script):
    run(f"{script} --task good", seeds=(1,))
    assert calls()[0]["argv"][:4] == ["--task", "good", "--seed", "1"]


def test_slurm_script_makes_the_same_runs(script, capsys):
    flags = {"command": f"{script} --sleep '0 '", "tasks": ("a", "b b"), "seeds": (1, 2, 5), "output_dir": "o ut"}
    args = benchmark.Args(**flags, workers=4, slurm_template=True)
    benchmark.main(args)
    text = capsys.readouterr().out
    assert "#SBATCH --array=0-5%4\n" in text and not Path("o ut").exists()
    Path("stub").mkdir()
    Path("stub/python").write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "call_$SLURM_ARRAY_TASK_ID"\n')
    Path("stub/python").chmod(0o755)
    made = []
    for index in range(6):
        environment = os.environ | {"PATH": f"stub:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(index)}
        subprocess.run(["bash", "-c", text], env=environment, check=True)
        argv = Path(f"call_{index}").read_text().split("\0")[:-1]
        assert argv[:2] == ["-m", "utils.benchmark"]
        again = parse(benchmark.Args, argv[2:])
        assert again.output_dir == "o ut"
        made += benchmark.jobs_of(again)
    assert [(job.name, job.argv) for job in made] == [(job.name, job.argv) for job in benchmark.jobs_of(args)]


def test_torchrun_starts_the_processes_of_a_run(script):
    args = benchmark.Args(command=f"{script} --flag 1", seeds=(1,), nproc_per_node=2, slurm_template=True)
    (job,) = benchmark.jobs_of(args)
    python, name = shlex.split(script)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert job.argv == [python, *launcher, name, "--flag", "1", "--seed", "1"]
    text = benchmark.slurm_script(args, [job])
    assert "#SBATCH --cpus-per-task=2\n" in text and "one # less\n##SBATCH --gpus-per-task=2\n" in text
    assert "--nproc-per-node 2" in text
