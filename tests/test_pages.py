"""Pages are short and say whom they are for; the tests and flags that they name are there; how to cite, the licence."""

import re
from pathlib import Path

import pytest
import yaml

import ippo_llm
import ppo_llm
from utils.benchmark import BenchmarkArgs
from utils.cli import flag_name
from utils.population import PopulationArgs

ROOT = Path(__file__).resolve().parent.parent
TESTS = {"checkpoints.md": 20, "many_devices.md": 10, "populations.md": 9}  # page, and how many it names at least
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
REQUIRED = ("--command", "--mutate")  # of a population
FLAGS = {flag_name(name) for args in (ippo_llm.Args(), ppo_llm.Args(), BenchmarkArgs()) for name in vars(args)}


def test_the_readme_is_short_and_leads_to_every_page():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) < 300
    assert not [page.name for page in PAGES if f"({page.relative_to(ROOT)})" not in readme]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_opens_with_one_sentence_that_says_whom_it_is_for(page):
    title, first, *_ = page.read_text().split("\n\n")
    assert re.fullmatch(r"# .+", title)
    assert re.fullmatch(r"For somebody who .*\.", first, flags=re.S)
    assert len(re.findall(r"[.!?](?=\s|$)", first)) == 1


def test_the_file_that_says_how_to_cite_is_of_its_format():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    for key in ("message", "title", "type", "license"):
        assert isinstance(citation[key], str)
    assert citation["type"] == "software" and citation["license"] == "MIT"
    assert citation["authors"] and all(author.keys() <= {"name", "website"} for author in citation["authors"])
    assert citation["title"] == (ROOT / "README.md").read_text().splitlines()[0].removeprefix("# ")


def test_the_licence_is_mits_and_has_the_authors():
    text = " ".join((ROOT / "LICENSE").read_text().split())
    (author,) = yaml.safe_load((ROOT / "CITATION.cff").read_text())["authors"]
    assert text.startswith(f"MIT License Copyright (c) 2026 {author['name']} Permission is hereby granted")


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
