"""benchmark's one command, small: runs, what is kept of them, tables and pictures; made again, the same to the byte."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from processes import SCRIPTS

import benchmark.__main__ as driver
from benchmark import central_critic
from utils import plot
from utils.benchmark import manifest
from utils.cli import UserError, parse

ROOT = Path(__file__).resolve().parent.parent
STUDIES = ("central_critic", "games")  # pages with a command of their own
PAGE = "# A page\n\n<!-- main -->\nof old\n<!-- end -->\n\n<!-- main in short -->\n<!-- end -->\nThe end.\n"


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A folder of pages in the place of benchmark/, seen from the repository's root."""
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "README.md").write_text(PAGE)
    monkeypatch.setattr(driver, "HERE", tmp_path / "pages")
    monkeypatch.chdir(ROOT)
    return tmp_path


@pytest.mark.slow
def test_small_benchmark_is_made_and_made_again(here, capsys):
    flags = {"size": "quick", "seeds": (1, 2), "only": ("ippo_head/(number|tldr)",), "threads": 1}
    flags["output_dir"] = str(here / "out")
    driver.main(driver.Args(**flags))
    names = [f"ippo_head/{task}__{seed}" for task in ("number", "tldr") for seed in (1, 2)]
    kept = manifest(here / "out" / "results")
    assert sorted(kept) == names
    finals = {"number": [], "tldr": []}
    for name in names:
        folder = here / "out" / "results" / name
        text = (folder / "metrics.csv").read_text()
        assert "time/" not in text and "per_second" not in text and "time/learn" in (folder / "times.csv").read_text()
        columns, *rows = [line.split(",") for line in text.splitlines()]
        whole = (here / "out" / "runs" / name / "metrics.csv").read_text().splitlines()
        assert len(rows) == len(whole) - 1 == 4
        finals[name.split("/")[1].split("_")[0]].append(float(rows[-1][columns.index("reward_mean")]))
        as_dicts = json.dumps([dict(zip(columns, row)) for row in rows])
        assert kept[name]["metrics"] == hashlib.sha256(as_dicts.encode()).hexdigest()
        assert json.loads((folder / "config.json").read_text())["args"]["seed"] == int(name[-1])
    page = (here / "out" / "README.md").read_text()
    assert "of old" not in page and page.endswith("<!-- end -->\nThe end.\n")
    for task, values in finals.items():
        mean = sum(values) / 2
        ends = [end + 0.075 * (mean - end) for end in sorted(values)]  # 2.5 % on the way along [a, mean, mean, b]
        row = re.search(rf"\| {task} \| IPPO, heads \| 2 \| [\d.]+ \| ([\d.]+) \[([\d.]+), ([\d.]+)\]", page)
        assert [float(number) for number in row.groups()] == pytest.approx([mean, *ends], abs=0.0051)
    assert (here / "pages" / "README.md").read_text() == PAGE  # only the full benchmark changes the pages themselves
    assert np.ptp(imread(here / "out" / "main.png")) > 0.5

    before = {path: path.read_bytes() for path in (here / "out").glob("results/**/*.csv")}
    capsys.readouterr()
    driver.main(driver.Args(**flags))
    assert "starting" not in capsys.readouterr().out
    for folder in ("runs", "results"):
        shutil.rmtree(here / "out" / folder / names[1])
    driver.main(driver.Args(**flags))
    output = capsys.readouterr().out
    assert f"starting  {names[1]}" in output and output.count("starting") == 1
    assert all(path.read_bytes() == was for path, was in before.items() if path.name == "metrics.csv")

    line = kept[names[0]] | {"command": "python other.py"}
    (here / "out" / "results" / "manifest.json").write_text(json.dumps(kept | {names[0]: line}))
    with pytest.raises(UserError, match="number__1 is of another command, python other.py: delete it first"):
        driver.main(driver.Args(**flags))


def test_bad_flags_are_one_line(here):
    with pytest.raises(UserError, match="--only takes regular expressions of GROUP/TASK, and nothing fits none"):
        driver.main(driver.Args(only=("nothing",)))
    with pytest.raises(UserError, match="--only takes regular expressions, got [(]: "):
        driver.main(driver.Args(only=("(",)))
    with pytest.raises(UserError, match="--seeds takes different numbers of 0 or more, got 1 1"):
        driver.main(driver.Args(seeds=(1, 1)))
    with pytest.raises(UserError, match="--size quick takes another --output-dir"):
        driver.main(driver.Args(size="quick", output_dir=str(here / "pages")))


@pytest.mark.slow
def test_every_run_is_of_flags_that_the_script_takes():
    for size in ("full", "quick"):
        jobs = driver.jobs_of(driver.Args(size=size))
        assert len({job.name for job in jobs}) == len(jobs) > 100
        for job in jobs:
            args = parse(SCRIPTS[job.argv[1].removesuffix(".py")].Args, job.argv[2:])
            assert (args.task or args.env or "guess") in job.name and job.name.endswith(f"__{args.seed}")


def test_a_peer_is_run_by_the_python_that_has_it():
    pythons = {"peer_ippo": "one", "peer": "two", "peer_agilerl": "three", "peer_trl": "four"}
    jobs = driver.jobs_of(driver.Args(**pythons, only=("comlrl", "agilerl", "trl")))
    expected = {"comlrl_ippo": "one", "comlrl_iac": "two", "comlrl_maac": "two", "comlrl_magrpo": "two"}
    assert {job.name.split("/")[0]: job.python for job in jobs} == expected | {"agilerl": "three", "trl": "four"}


def test_pictures_are_of_groups_that_are_run():
    for groups in driver.PICTURES.values():
        assert set(groups.values()) <= set(driver.RUNS) and len(set(groups.values())) == len(groups)
    pages = "".join(path.read_text() for path in (ROOT / "benchmark").glob("*.md") if path.stem not in STUDIES)
    marks = set(re.findall(r"<!-- (.*?) -->\n", pages)) - {"end", "probes", "cost", "side by side"}
    assert marks <= {
        f"{name}{kind}"
        for name in driver.PICTURES
        for kind in ("", " in short", ", how soon", " commands", " over tasks")
    }
    assert {"main", "comlrl"} <= marks
    assert re.findall(r"<!-- (.*?) -->\n", (ROOT / "README.md").read_text()) == ["main in short", "end"]


def test_how_soon_a_peers_reward_is_reached():
    def curve(rewards, final):
        steps = np.arange(1, len(rewards) + 1)
        return plot.Curve(Path(), {}, 1, steps * 64, steps * 10.0, np.array(rewards), 0.0, final, 0.0, 0.0)

    ours = [curve([0.0, 1.0, 2.0], 2.0), curve([0.0, 0.5, 1.0, 9.0], 9.0)]  # together 0, 0.75, 1.5
    theirs = [curve([0.0, 0.0], 0.6), curve([0.0, 0.0], 0.9)]  # 0.75
    groups = {("IPPO", "a"): ours, ("CoMLRL's IPPO", "a"): theirs, ("IPPO, more", "a"): theirs, ("IAC", "a"): ours}
    lines = driver.how_soon(groups)
    assert lines[2] == "| a | IPPO | 0.750 | 128 |" and lines[3] == "| a | IPPO, more | 0.750 | never |"
    assert lines[4:] == [""]


@pytest.mark.slow
def test_the_study_of_a_central_critic_in_short(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "central"
    flags = {"size": "quick", "seeds": (1,), "workers": 2, "output_dir": str(folder)}
    central_critic.main(central_critic.Args(**flags))
    page = (folder / "central_critic.md").read_text()
    for method in central_critic.METHODS:
        row = re.search(rf"\| 2 turns, each pays \| {method} \| 1 \| (-?[\d.]+)", page)
        assert -1 < float(row[1]) < 1
    assert np.ptp(imread(folder / "central_critic.png")) > 0.5
    capsys.readouterr()
    central_critic.main(central_critic.Args(**flags))  # nothing is made twice
    assert "starting" not in capsys.readouterr().out
    with pytest.raises(UserError, match="--size quick takes another --output-dir"):
        central_critic.main(central_critic.Args(size="quick"))


def test_a_study_whose_runs_all_fail_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(central_critic, "make", lambda jobs, args: [job.name for job in jobs])
    with pytest.raises(central_critic.Failed, match=r"^all \d+ runs failed$"):
        central_critic.main(central_critic.Args(size="quick", seeds=(1,), output_dir=str(tmp_path)))


def test_the_figures_of_populations_are_of_the_kept_results():
    page = (ROOT / "docs/populations.md").read_text()
    table = []  # of each seed: the best member and the mean, bred and kept
    for seed in (1, 2, 3):
        row = []
        for name in ("tldr_bred", "tldr_kept"):
            file = ROOT / f"benchmark/results/population/{name}__{seed}/population.json"
            population = json.loads(file.read_text())
            assert population["seed"] == seed and f'command="{population["command"]}"' in page
            assert f"--generation {population['generation']} --output-dir runs/population/{name}__$seed" in page
            assert all(f"{flag}={low_high}" in page for flag, low_high in population["mutate"].items())
            last = max(each["generation"] for each in population["members"])
            scores = [each["fitness"] for each in population["members"] if each["generation"] == last]
            row += [max(scores), np.mean(scores)]
        table.append(row)
        assert f"| {seed} | {' | '.join(f'{value:.2f}' for value in row)} |" in page
    columns = zip(np.mean(table, 0), *plot.interval(table), strict=True)
    means = [f"{mean:.2f} [{low:.2f}, {high:.2f}]" for mean, low, high in columns]
    assert f"| mean | {' | '.join(means)} |" in page


def test_the_figures_of_a_gpu_are_of_the_kept_lines():
    page = (ROOT / "benchmark/gpu.md").read_text()
    lines = [json.loads(line) for line in (ROOT / "benchmark/gpu.jsonl").read_text().splitlines()]
    whole, steps = re.findall(r"^\|---.*\n((?:\|.*\n)+)", page, flags=re.M)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in whole.splitlines()]
    for name, *figures in rows:
        if name.startswith("CoMLRL"):
            (line,) = [line for line in lines if "peer" in line]
            assert figures[:2] == [str(line["joint_samples_per_second"]), f"{line['new_tokens_per_second']:.0f}"]
            continue
        wanted = {"script": name[1:].split(".")[0], "static_cache": "static" in name, "use_vllm": "vllm" in name}
        (line,) = [line for line in lines if wanted.items() <= line.items()]
        seconds = line["seconds_of_an_iteration"]
        assert figures == [
            str(line["joint_samples_per_second"]),
            f"{line['joint_new_tokens_per_second']:.0f}",
            f"{seconds['sample']:.2f}",
            f"{seconds['learn']:.2f}",
            f"{line['ms_of_a_token']:.2f}",
            str(line["peak_gib"]),
        ]
    assert len(rows) == 6
    for row in steps.splitlines():
        name, *figures = [cell.strip() for cell in row.split("|")[1:-1]]
        dtype, mixed_precision = name.split(", ")
        wanted = {"dtype": dtype, "mixed_precision": mixed_precision, "keys": "shared"}
        kept = {(line["static_cache"], line["rows"]): line["ms"] for line in lines if wanted.items() <= line.items()}
        assert figures == [f"{kept[static, rows]:.2f}" for static in (False, True) for rows in (1, 64, 256)]
