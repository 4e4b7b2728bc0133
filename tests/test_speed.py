"""What benchmark.speed counts, and benchmark.side_by_side's table."""

import csv
import json
import re

import pytest
import torch
from helpers import build_model
from processes import ROOT, SCRIPTS
from transformers import AutoTokenizer

import ippo_llm
from benchmark import operators, side_by_side
from benchmark.speed import Positions
from utils.cli import UserError, parse
from utils.models import causal_lm


def test_padding_is_what_is_computed_and_not_needed(monkeypatch):
    monkeypatch.setattr(causal_lm, "read", causal_lm.read)  # put back afterwards
    monkeypatch.setattr(causal_lm, "forward", causal_lm.forward)
    model = build_model(AutoTokenizer.from_pretrained("utils/tiny_lm"))
    positions = Positions()
    positions.watch()

    places = torch.zeros(2, 6, dtype=torch.bool)
    places[0, 1:3] = places[1, 4] = True  # 3 and 5 tokens up to the last one; the sixth column is left out
    causal_lm.read(model, torch.ones(2, 6, dtype=torch.long), places)
    assert (positions.needed, positions.computed) == (8, 10)

    ids = torch.tensor([[0, 7, 8], [5, 6, 7], [5, 6, 7]])  # the last two are read once
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1]])
    out = causal_lm.forward(model, ids, mask, keep=1, use_cache=True)
    assert (positions.needed, positions.computed) == (8 + 5, 10 + 6)
    causal_lm.forward(model, ids[:, :1], torch.nn.functional.pad(mask, (0, 1), value=1), out.cache, keep=1)
    assert (positions.needed, positions.computed) == (8 + 5 + 3, 10 + 6 + 3)


def test_the_time_of_an_update_is_divided_among_operators(monkeypatch, capsys):
    for phase in ("play", "learn"):
        monkeypatch.setattr(ippo_llm, phase, getattr(ippo_llm, phase))  # put back afterwards
    small = {"num_agents": 1, "task": "number", "rollout_buffer_size": 4, "mini_batch_size": 4, "max_new_tokens": 4}
    operators.main(ippo_llm.Args(**small))
    header, _, *rows, _ = capsys.readouterr().out.splitlines()[-5:]
    assert [row.split(" | ")[0] for row in rows] == ["| play", "| learn"]
    names = [name.strip() for name in header.strip("| ").split("|")]
    for row in rows:
        shares = dict(zip(names[1:], (int(share.strip(" %")) for share in row.split("|")[3:-1])))
        assert 97 <= sum(shares.values()) <= 103 and shares["matrix products"] > 0
        assert (shares["optimiser"] > 0) == row.startswith("| learn")


@pytest.mark.parametrize(
    "flags, message",
    [({"max_episodes": 8}, "--max-episodes is set by this program"), ({"train_size": 64}, "fewer than 3 updates")],
)
def test_what_can_not_be_divided_is_one_line(flags, message, monkeypatch):
    for phase in ("play", "learn"):
        monkeypatch.setattr(ippo_llm, phase, getattr(ippo_llm, phase))
    with pytest.raises(UserError, match=message):
        operators.main(ippo_llm.Args(**{"num_train_epochs": 1, "task": "number", "max_new_tokens": 4} | flags))


def write_run(folder, seconds):
    """A run of 64 joint samples in each of so many seconds."""
    folder.mkdir(parents=True)
    config = {
        "command": ["ippo_llm.py"],
        "args": {"task": folder.name, "env": None, "seed": 1},
        "script": "ippo_llm.py",
    }
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "metrics.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["global_step", "reward_mean", "time/play", "time/learn"])
        table.writerows([64 * k, 0.5, value / 4, 3 * value / 4] for k, value in enumerate(seconds, 1))


def test_the_speeds_of_two_systems_stand_side_by_side(monkeypatch, tmp_path, capsys):
    jobs = []

    def run_jobs(given, output_dir, workers):
        jobs.extend(given)
        for job in given:
            write_run(tmp_path / job.name, [8.0, 4.0, 2.0] if job.name.startswith("comlrl") else [2.0, 1.0, 0.5])

    monkeypatch.setattr(side_by_side, "run_jobs", run_jobs)
    python = tmp_path / "python"
    python.touch()
    flags = {"peer": str(python), "peer_ippo": str(python), "json": str(tmp_path / "speeds.json")}
    side_by_side.main(side_by_side.Args(**flags, output_dir=str(tmp_path)))
    rows = re.findall(r"^\| (\w+) \| (\w+) \| (.*) \| (.*) \| (.*) \|$", capsys.readouterr().out, flags=re.M)
    ours, theirs = "64.00 (32.00 to 128.00)", "16.00 (8.00 to 32.00)"
    assert [row[2:] for row in rows[1:]] == [(ours, theirs, "4.0")] * 12
    assert json.loads((tmp_path / "speeds.json").read_text())["ippo/code"] == [32.0, 64.0, 128.0]
    for job in jobs:
        if not job.name.startswith("comlrl"):
            args = parse(SCRIPTS[job.argv[1].removesuffix(".py")].Args, job.argv[2:])
            assert args.max_episodes == 320 and job.name.endswith(f"/{args.task}")


def test_a_python_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match="--peer takes a Python, got none"):
        side_by_side.main(side_by_side.Args())
    with pytest.raises(UserError, match=f"--peer-ippo takes a Python, got {tmp_path / 'no'}"):
        side_by_side.main(side_by_side.Args(peer=str(ROOT / "README.md"), peer_ippo=str(tmp_path / "no")))
