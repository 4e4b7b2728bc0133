"""The tests that pages of docs/ name are there, and so are the flags."""

import re
from pathlib import Path

import pytest

import ippo_llm
import ppo_llm
from utils.benchmark import BenchmarkArgs
from utils.cli import flag_name
from utils.population import PopulationArgs

ROOT = Path(__file__).resolve().parent.parent
TESTS = {"checkpoints.md": 20, "many_devices.md": 10, "populations.md": 9}  # page, and how many it names at least
REQUIRED = ("--command", "--mutate")  # of a population
FLAGS = {flag_name(name) for args in (ippo_llm.Args(), ppo_llm.Args(), BenchmarkArgs()) for name in vars(args)}


@pytest.mark.parametrize("page", TESTS)
def test_every_test_that_a_page_names_exists(page):
    tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / page).read_text())
    assert len(tests) >= TESTS[page]
    for file, name in tests:
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), name


def test_every_row_of_checkpoints_names_a_test():
    rows = re.findall(r"^\| `?\w.*\|$", (ROOT / "docs/checkpoints.md").read_text(), flags=re.M)[1:]
    assert all(re.search(r"\| `test_\w+\.py::test_\w+` \|$", row) for row in rows)


def test_every_flag_of_checkpoints_is_one():
    for flag in re.findall(r"--[a-z][a-z-]+", (ROOT / "docs/checkpoints.md").read_text()):
        assert flag.replace("--no-", "--") in FLAGS, flag


def test_every_flag_of_a_population_is_on_its_page():
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", (ROOT / "docs/populations.md").read_text(), flags=re.M)
    defaults = {flag_name(name): value for name, value in vars(PopulationArgs()).items()}
    assert [flag for flag, _ in rows] == ["--command", "--mutate", *(flag for flag in defaults if flag not in REQUIRED)]
    for flag, default in rows:
        assert default == ("required" if flag in REQUIRED else str(defaults[flag]).replace("None", "none")), flag
