"""What README, docs/ and the scripts' own texts name is there: commands, flags, links, files, tests; diffs apply."""

import ast
import dataclasses
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml
from processes import ROOT, SCRIPTS
from short_runs import TEAM, small_model

from utils.benchmark import BenchmarkArgs
from utils.cli import aliases_of, parse
from utils.envs import import_file

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("benchmark/*.md")),
]
OWN_TEXTS = [
    *SCRIPTS.values(),
    *(importlib.import_module(f"utils.tasks.{p.stem}") for p in ROOT.glob("utils/tasks/*.py")),
]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
TEXTS |= {module.__name__: module.__doc__ or "" for module in OWN_TEXTS}
RUNNABLE = [name for name in TEXTS if not re.match("benchmark/[a-z]", name)]  # those have commands of earlier versions
every_text = pytest.mark.parametrize("name", RUNNABLE)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
NOT_OURS = set("nproc-per-node multi-gpu num-processes max-restarts nnodes no-deps cpu check".split())  # of launchers


def flags_there():
    """The flags of scripts and programs, by their names on the command line."""
    classes = [*(script.Args for script in SCRIPTS.values()), BenchmarkArgs]
    names = set()
    for path in [*ROOT.glob("utils/**/*.py"), *ROOT.glob("benchmark/**/*.py")]:
        names |= {name.replace("_", "-") for name in re.findall(r"^    (\w+): .*(?:=|$)", path.read_text(), flags=re.M)}
        names |= set(re.findall(r"\"--([\w-]+)\"", path.read_text()))
    for cls in classes:
        names |= {field.name.replace("_", "-") for field in dataclasses.fields(cls)}
        names |= {alias.replace("_", "-") for alias in aliases_of(cls)}
    return names


@every_text
def test_every_command_of_a_script_parses(name):
    text = TEXTS[name].replace("\\\n", " ")
    command = r"(?:python|torchrun|accelerate launch)[^\n`]*? (\w+_llm)\.py([^\n`&|;\"]*)"
    for script, flags in re.findall(command, text):
        words = shlex.split(re.split(" {2,}", flags)[0], comments=True)  # what follows is a remark
        is_short = any("…" in word or "..." in word for word in words)
        if not is_short and not {"--help", "--resume", "--fork"} & {*words}:
            parse(SCRIPTS[script].Args, words)


@every_text
def test_every_module_that_a_command_runs_is_there(name):
    for module in re.findall(r"python -m (utils[\w.]*|benchmark[\w.]*)", TEXTS[name]):
        assert importlib.util.find_spec(module), module


def test_every_flag_that_is_named_is_one():
    there = flags_there() | NOT_OURS
    unknown = set()
    for name in RUNNABLE:
        for flag in re.findall(r"`--([a-z][\w-]*)", TEXTS[name]):
            if not {flag.replace("_", "-"), flag.removeprefix("no-")} & there:
                unknown.add(f"{name}: --{flag}")
    assert not unknown


@every_page
def test_every_link_leads_somewhere(page):
    for path, anchor in re.findall(r"\]\(([^)#:\s]*)#?([^):\s]*)\)", page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            titles = re.findall(r"^#+ (.*)", target.read_text(), flags=re.M)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, anchor


@every_page
def test_every_file_and_test_that_is_named_is_there(page):
    text = page.read_text()
    for path in re.findall(r"`((?:utils|tests|docs|benchmark)/[a-z0-9_/.]+\.\w+)`", text):
        assert (ROOT / path).exists(), path
    for file, name in re.findall(r"`(?:tests/)?(test_\w+\.py)::(test_\w+)`", text):
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), name


@every_page
def test_code_in_a_page_is_python(page):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S):
        ast.parse(code)


def test_the_readme_leads_to_every_page_and_names_every_script():
    readme = TEXTS["README.md"]
    assert not [page.name for page in ROOT.glob("docs/*.md") if f"(docs/{page.name}" not in readme]
    assert not [name for name in SCRIPTS if f"`{name}.py`" not in readme]
    assert set(SCRIPTS) == {path.stem for path in ROOT.glob("*_llm.py")}


def test_how_to_cite_is_of_its_format_and_the_licence_has_the_author():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "MIT"
    assert citation["title"] == TEXTS["README.md"].splitlines()[0].removeprefix("# ")
    licence = " ".join((ROOT / "LICENSE").read_text().split())
    assert licence.startswith(f"MIT License Copyright (c) 2026 {citation['authors'][0]['name']} Permission")


# --- Diffs ------------------------------------------------------------------------------------------------------------

DIFFS = [
    (page.name, k, diff)
    for page in PAGES
    for k, diff in enumerate(re.findall(r"```diff\n(.*?)```", page.read_text(), flags=re.S))
]


def apply_diff(diff, code):
    """The code after a diff without line numbers; what it takes away, and what it shows, is there exactly once."""
    for hunk in re.split(r"^@@.*\n|^(?:---|\+\+\+) .*\n|^ *\.\.\.\n", diff, flags=re.M):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
        after = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
        if before:
            assert code.count(before) == 1, before
            code = code.replace(before, after)
    return code


@pytest.mark.parametrize("page, k, diff", DIFFS, ids=lambda x: str(x)[:20])
def test_a_diff_makes_a_script_that_learns(page, k, diff, in_tmp_path):
    texts = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
    for name, text in texts.items():
        try:
            code = apply_diff(diff, text)
            break
        except AssertionError as error:
            missing = error
    else:
        raise missing
    Path("mine.py").write_text(code)
    mine = import_file("mine.py", "mine")
    flags = TEAM | {"num_generations": 4, "train_size": 2, "output_dir": "run"}
    for name in {*flags} - {field.name for field in dataclasses.fields(mine.Args)}:
        del flags[name]
    _, run = mine.main(mine.Args(**flags), None, *small_model())
    assert run.step == 2 and all(row["agent_0/grad_norm"] >= 0 for row in run.rows)
