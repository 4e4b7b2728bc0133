"""Curves, tables and aggregates of many runs."""

import csv
import itertools
import json
import sys

import numpy as np
import pytest
from matplotlib import image
from matplotlib.colors import to_rgb

from utils import plot
from utils.cli import UserError, command_line
from utils.run.report import COLORS

UPDATES = 20


def make_run(folder, seed, level=1.0, updates=UPDATES, task="tldr", header=None, **flags):
    """A run that climbs to about `level`, 8 joint samples and 2 seconds (1 of them for each phase) an update."""
    folder.mkdir(parents=True)
    args = {"seed": seed, "task": task, "output_dir": str(folder), "gamma": 1.0} | flags
    config = {"command": ["ippo_llm.py"], "args": args}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [header or "global_step,reward_mean,reference_logprob,time/sample,time/learn,eval/reward_mean"]
    for k in range(1, updates + 1):
        reward = level * k / UPDATES + 0.01 * ((7 * k + 3 * seed) % 5)
        lines.append(f"{8 * k},{reward:.9g},{-0.1 * seed - k:.9g},1,1,{reward + 1 if k % 10 == 0 else ''}")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def rewards(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row["reward_mean"]) for row in csv.DictReader(file)]


@pytest.fixture
def runs(tmp_path):
    """Two labels, two tasks and three seeds of each; texts for --runs."""
    for (label, up), task, seed in itertools.product({"a": 1.0, "b": 0.5}.items(), ("tldr", "code"), (1, 2, 3)):
        make_run(tmp_path / label / f"{task}_{seed}", seed, up + 0.1 * seed, task=task)
    return [f"{label.upper()}:{tmp_path}/{label}/*" for label in "ab"]


def run_tool(monkeypatch, capsys, *flags):
    """Its exit code, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, flags)])
    try:
        command_line(plot.main, plot.Args, plot.__doc__)
        code = 0
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    return code, output.out + output.err


def percentile(values, share):
    """Linear between the two nearest of the sorted values."""
    values = sorted(values)
    at = share * (len(values) - 1)
    low = int(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def test_the_interval_of_many_seeds_is_near_the_normal_one_and_always_the_same():
    values = np.random.default_rng(1).normal(size=36)
    error = values.std() / 6
    assert plot.interval(values) == pytest.approx(
        [values.mean() - 1.96 * error, values.mean() + 1.96 * error], abs=0.02
    )
    assert (plot.interval(values) == plot.interval(values)).all()


def test_one_seed_has_no_interval():
    assert np.isnan(plot.interval([1.0])).all()


def test_the_numbers_of_the_table(runs, tmp_path):
    rows = plot.table(plot.load(runs), {"tldr": 0.8})
    assert [(row["task"], row["label"]) for row in rows] == [("code", "A"), ("code", "B"), ("tldr", "A"), ("tldr", "B")]
    for row in rows:
        folders = [tmp_path / row["label"].lower() / f"{row['task']}_{seed}" for seed in (1, 2, 3)]
        histories = [rewards(folder) for folder in folders]
        finals = [sum(history[-2:]) / 2 for history in histories]
        means = [sum(picked) / 3 for picked in itertools.product(finals, repeat=3)]
        assert row["reward"] == pytest.approx(sum(finals) / 3)
        assert row["reward_low"] == pytest.approx(percentile(means, 0.025))
        assert row["reward_high"] == pytest.approx(percentile(means, 0.975))
        assert row["first_reward"] == pytest.approx(sum(history[0] for history in histories) / 3)
        assert row["held_out_reward"] == pytest.approx(sum(history[-1] for history in histories) / 3 + 1)
        assert row["reference_logprob"] == pytest.approx(-0.2 - (UPDATES - 1 + UPDATES) / 2)
        assert (row["joint_samples"], row["seconds"], row["samples_per_second"]) == (160, 40, 4)
        reached = []
        for history in histories:
            for k in range(UPDATES):
                reach = min(4, k, UPDATES - 1 - k)
                around = history[k - reach : k + reach + 1]
                if sum(around) / len(around) >= row["threshold"]:
                    reached.append(8 * (k + 1))
                    break
        assert row["seeds_to_threshold"] == len(reached)
        assert row["samples_to_threshold"] == (sorted(reached) + [np.inf] * 3)[1]  # of three seeds the second
    assert {row["threshold"] for row in rows if row["task"] == "tldr"} == {0.8}
    first, best = (rows[0]["first_reward"] + rows[1]["first_reward"]) / 2, rows[0]["reward"]
    assert rows[0]["threshold"] == rows[1]["threshold"] == pytest.approx(first + 0.9 * (best - first))
    assert (rows[0]["seeds_to_threshold"], rows[1]["seeds_to_threshold"], rows[3]["seeds_to_threshold"]) == (3, 0, 1)


def test_time_is_that_of_all_phases_of_earlier_versions_too(tmp_path):
    header = "global_step,reward_mean,reference_logprob,time/evaluate,time/update,fitness"
    folder = make_run(tmp_path / "run", 1, header=header)
    assert plot.read(folder)[1].seconds.tolist() == [2 * k for k in range(1, UPDATES + 1)]


def test_it_writes_the_same_bytes_every_time(runs, tmp_path, monkeypatch, capsys):
    names = ["aggregate.md", "aggregate.png", "curves.png", "finals.png", "table.csv", "table.md"]
    monkeypatch.setattr(plot, "REPEATS", 50)
    for out in ("one", "two"):
        np.random.seed(len(out) + (out == "two"))
        assert run_tool(monkeypatch, capsys, "--runs", *runs, "--output-dir", tmp_path / out) == (
            0,
            f"wrote {tmp_path / out}\n",
        )
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    table = (tmp_path / "one" / "table.md").read_text()
    assert "| code | B | 3 | 0.05 | 0.71 [0.63, 0.79] |" in table and ": never (0/3) |" in table
    with open(tmp_path / "one" / "table.csv", newline="") as file:
        row = next(csv.DictReader(file))
    assert (row["label"], row["task"], row["seeds"], row["joint_samples"]) == ("A", "code", "3", "160")


def test_every_label_is_drawn_in_its_colour(tmp_path):
    runs = []
    for k in range(6):  # of five tasks, whose panels wrap
        make_run(tmp_path / f"label_{k}" / "1", 1, 0.2 + 0.2 * k, task=f"$task_{min(k, 4)}")
        runs.append(f"$label_{k}:{tmp_path}/label_{k}/*")
    plot.draw(plot.load(runs), tmp_path / "curves.png")
    pixels = image.imread(tmp_path / "curves.png")[..., :3]
    assert pixels.shape[1] == 1700
    for color in COLORS[:6]:
        assert (abs(pixels - to_rgb(color)).max(-1) < 0.01).sum() > 500, color


def test_curves_by_time_alone(tmp_path, monkeypatch):
    make_run(tmp_path / "x" / "1", 1)
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    plot.draw(plot.load([f"{tmp_path}/x/*"]), tmp_path / "curves.png", "time")
    (axis,) = figures[0].axes
    assert axis.lines[0].get_xdata()[-1] == pytest.approx(40 / 60) and axis.get_xlabel() == "minutes of training"


def test_an_unfinished_run_ends_the_curve_and_is_named(tmp_path, capsys, monkeypatch):
    for seed, updates in ((1, UPDATES), (2, 12)):
        make_run(tmp_path / "runs" / str(seed), seed, updates=updates)
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.fill_between", lambda axis, x, low, high, **look: drawn.append(x))
    groups = plot.load([f"{tmp_path}/runs/*"])
    message = f"runs, tldr: {tmp_path}/runs/2 has 12 of its siblings' {UPDATES} updates; the curve ends there"
    assert message in capsys.readouterr().out
    plot.draw(groups, tmp_path / "curves.png")
    assert [x[-1] for x in drawn] == [8 * 12, 12 * 2 / 60]


def test_the_task_of_a_run(tmp_path):
    names = [("tldr", None, "tldr"), ("my/own.py", None, "own"), (None, "grid", "grid"), (None, None, "guess")]
    for k, (task, env, _) in enumerate(names):
        make_run(tmp_path / "x" / str(k), 1, task=task, env=env)
    assert [*plot.load([f"{tmp_path}/x/*"])] == [("x", task) for *_, task in names]


def test_flags_that_only_newer_runs_have_may_differ(tmp_path):
    make_run(tmp_path / "x" / "1", 1)
    make_run(tmp_path / "x" / "2", 2, newer=True, deterministic=True)
    assert len(plot.load([f"{tmp_path}/x/*"])["x", "tldr"]) == 2


def test_aggregates_are_those_of_rliable(runs, monkeypatch):
    from rliable import library, metrics

    monkeypatch.setattr(plot, "REPEATS", 200)
    groups = plot.load(runs)
    found = plot.aggregate(groups, {"tldr": [0.0, 2.0]})
    own = [[curve for label in "AB" for curve in groups[label, task]] for task in ("code", "tldr")]
    low, high = sum(curve.first for curve in own[0]) / 6, max(curve.final for curve in own[0])
    assert found["scales"]["code"] == pytest.approx((low, high)) and found["scales"]["tldr"] == [0.0, 2.0]
    scores = {}
    for label in "AB":
        pairs = zip(groups[label, "code"], groups[label, "tldr"])
        scores[label] = np.array([[(code.final - low) / (high - low), tldr.final / 2] for code, tldr in pairs])
        iqm = sorted(scores[label].ravel().tolist())[1:-1]  # of six, a quarter on either side rounds down to one
        assert found["interquartile mean"][label][0] == pytest.approx(sum(iqm) / 4)
        assert found["mean"][label][0] == pytest.approx(scores[label].sum() / 6)
    np.random.seed(0)
    _, bounds = library.get_interval_estimates(scores, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=200)
    assert {k: v[1:] for k, v in found["interquartile mean"].items()} == {
        k: v[:, 0].tolist() for k, v in bounds.items()
    }


def test_tasks_that_not_all_have_are_left_out_of_aggregates(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "REPEATS", 50)
    for seed in (1, 2, 3):
        make_run(tmp_path / "a" / f"number_{seed}", seed, task="number")
    found = plot.aggregate(plot.load(runs))
    assert (found["left_out"], [*found["scales"]]) == (["number"], ["code", "tldr"])
    assert "Left out, as not every label has them: number." in plot.aggregate_lines(found)[-2]


def test_without_an_aggregate_it_says_why_and_writes_the_rest(runs, tmp_path, monkeypatch, capsys):
    def reason(runs):
        code, output = run_tool(monkeypatch, capsys, "--runs", *runs, "--output-dir", tmp_path / "out")
        assert code == 0 and sorted(p.name for p in (tmp_path / "out").iterdir()) == [
            "curves.png",
            "finals.png",
            "table.csv",
            "table.md",
        ]
        return output

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **_: open(path, "w").close())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "aggregate.md").write_text("of an earlier time")
    monkeypatch.setitem(sys.modules, "rliable", None)
    assert "no aggregate over tasks: it takes rliable: pip install rliable==1.2.0 'pandas<3'\n" in reason(runs)
    assert "no aggregate" not in reason([runs[0].replace("*", "code*")])  # of one task nobody asks for one
    of_one_task = [runs[0], runs[1].replace("*", "code*")]
    assert "it takes two tasks that every label has; these have in common: code" in reason(of_one_task)
    make_run(tmp_path / "b" / "code_4", 4, task="code")
    assert "two or more, and B has 4 of code, 3 of tldr" in reason(runs)


def bad(tmp_path, **changes):
    """Two good runs in x, and a third with something wrong."""
    for seed in (1, 2):
        make_run(tmp_path / "x" / str(seed), seed)
    return make_run(tmp_path / "x" / "3", **({"seed": 3} | changes))


BAD_RUNS = {
    "no metrics": (lambda run: (run / "metrics.csv").unlink(), "x/3 has no metrics.csv with a whole update in it"),
    "no config": (lambda run: (run / "config.json").unlink(), "x/3 is none: it has no config.json"),
    "a list": (
        lambda run: (run / "config.json").write_text("[]"),
        "config.json is to hold a JSON object, and holds []",
    ),
    "ragged": (lambda run: (run / "metrics.csv").write_text("a,b\n1\n"), "x/3/metrics.csv can't be read: zip()"),
    "columns": (lambda run: (run / "metrics.csv").write_text("a\n1\n"), "can be read: KeyError: 'global_step'"),
    "NaN": (
        lambda run: (run / "metrics.csv").write_text("global_step,reward_mean,time/learn\n8,nan,1\n"),
        "x/3/metrics.csv has an update without its joint samples, reward or seconds",
    ),
    "endless seed": (
        lambda run: set_config(run, seed=1e999),
        "config.json: seed takes a whole number from 0, got inf",
    ),
    "half a seed": (
        lambda run: set_config(run, seed=1.5),
        "config.json: seed takes a whole number from 0, got 1.5",
    ),
    "updates": (lambda run: set_config(run, num_updates=1e999), "num_updates takes a whole number from 0, got inf"),
    "brackets": (
        lambda run: (run / "config.json").write_text('{"args": ' + "[" * 200_000),
        "x/3/config.json can't be read as JSON: maximum recursion",
    ),
    "names": (lambda run: set_config(run, task=["a"]), "x/3/config.json has a name that is no text"),
    "null": (lambda run: set_config(run, task="a\0b"), "x/3/config.json has a name that is no text"),
    "huge": (
        lambda run: (run / "metrics.csv").write_text("global_step,reward_mean,time/learn\n8,-1e308,1\n16,1e308,1\n"),
        "x/3/metrics.csv: reward_mean takes a number up to 1e+30, got -1e+308 in row 1",
    ),
    "link": (lambda run: link(run / "config.json"), "x/3/config.json is a link that leads out of its folder"),
    "linked": (lambda run: link(run / "metrics.csv"), "x/3/metrics.csv is a link that leads out of its folder"),
}


def set_config(run, **values):
    config = json.loads((run / "config.json").read_text())
    num_updates = values.pop("num_updates", 1)
    config = config | {"args": config["args"] | values, "num_updates": num_updates}
    (run / "config.json").write_text(json.dumps(config))


def link(path):
    """Let a file be a link to another place."""
    there = path.parent.parent.parent / path.name
    path.rename(there)
    path.symlink_to(there)


def test_numbers_as_large_as_they_may_be_are_drawn(tmp_path, monkeypatch, capsys):
    for seed in (1, 2):
        run = make_run(tmp_path / "x" / str(seed), seed, task="x" * 5000)
        rows = [f"{k},{(-1) ** (k + seed) * 1e30},nan,1e30" for k in range(1, 21)]
        text = "\n".join(["global_step,reward_mean,reference_logprob,time/learn", *rows, ""])
        (run / "metrics.csv").write_text(text)
    code, _ = run_tool(monkeypatch, capsys, "--runs", f"{tmp_path}/x/*", "--output-dir", tmp_path / "out")
    assert code == 0 and image.imread(tmp_path / "out/curves.png").std() > 0


def test_a_link_within_the_folder_is_followed(tmp_path):
    run = bad(tmp_path)
    (run / "metrics.csv").rename(run / "kept.csv")
    (run / "metrics.csv").symlink_to("kept.csv")
    assert len(plot.load([f"{tmp_path}/x/*"])["x", "tldr"]) == 3


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_run_that_cannot_be_read_is_named(name, tmp_path):
    spoil, message = BAD_RUNS[name]
    spoil(bad(tmp_path))
    with pytest.raises(UserError) as error:
        plot.load([f"{tmp_path}/x/*"])
    assert message in str(error.value)


def test_runs_that_python_began_are_told_apart_by_their_scripts(tmp_path):
    for seed, script in enumerate(["ippo_llm", "iac_llm"]):
        folder = make_run(tmp_path / f"x/{seed}", seed)
        config = json.loads((folder / "config.json").read_text())
        config |= {"script": f"/copies/{script}.py", "command": ["ipykernel_launcher.py"]}
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="differ in more than the seed: script ippo_llm.py and iac_llm.py$"):
        plot.load([f"{tmp_path}/x/*"])


def test_the_folder_of_a_game_may_have_a_colon(tmp_path):
    make_run(tmp_path / "a/ppo_llm__open_spiel:kuhn_poker__1", 1)
    assert list(plot.load([f"{tmp_path}/a/*:kuhn*"])) == [("a", "tldr")]


def test_runs_that_are_not_seeds_of_one_command_are_named(tmp_path):
    bad(tmp_path, gamma=0.9, kl_coef=1.0)
    with pytest.raises(UserError, match="x, tldr: .*x/1 and .*x/3 differ in more than the seed: --gamma 1.0 and 0.9$"):
        plot.load([f"{tmp_path}/x/*"])


def test_a_seed_may_have_been_resumed_with_less_memory(tmp_path):
    bad(tmp_path, micro_batch_size=2)
    assert len(plot.load([f"{tmp_path}/x/*"])["x", "tldr"]) == 3


def test_a_seed_twice_is_named(tmp_path):
    bad(tmp_path, seed=2)
    with pytest.raises(UserError, match="x/2 and .*x/3 are the same seed, 2$"):
        plot.load([f"{tmp_path}/x/*"])


BAD_FLAGS = {
    "no runs": ([], "--runs takes one or more"),
    "no match": (["--runs", "A:nowhere/*"], "--runs: no folder is named nowhere/*"),
    "label twice": (["--runs", "A:{x}", "A:{x}"], "--runs: two groups are named A"),
    "by": (["--runs", "{x}", "--by", "hours"], "--by"),
    "no number": (["--runs", "{x}", "--thresholds", "tldr=x"], "--thresholds takes TASK=REWARD, got tldr=x"),
    "NaN": (["--runs", "{x}", "--thresholds", "tldr=nan"], "--thresholds takes TASK=REWARD, got tldr=nan"),
    "task": (["--runs", "{x}", "--thresholds", "x=1"], "a task of the runs (tldr) once, got x=1"),
    "task twice": (["--runs", "{x}", "--thresholds", "tldr=1", "tldr=2"], "once, got tldr=2"),
    "range": (["--runs", "{x}", "--ranges", "tldr=3:0"], "--ranges takes TASK=LOW:HIGH, got tldr=3:0"),
    "a run": (["--runs", "{x}", "--output-dir", "{x}"], "is a run's folder, and its curves.png would be replaced"),
    "a file": (["--runs", "{x}", "--output-dir", "{x}/config.json"], "config.json can't be written: File exists"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_a_wrong_flag_ends_it_with_one_line(name, tmp_path, monkeypatch, capsys):
    flags, message = BAD_FLAGS[name]
    run = make_run(tmp_path / "runs" / "x", 1)
    monkeypatch.chdir(tmp_path)
    code, output = run_tool(monkeypatch, capsys, *(flag.replace("{x}", str(run)) for flag in flags))
    assert code == 2 and output.startswith("plot.py: error: ") and message in output and output.count("\n") == 1
