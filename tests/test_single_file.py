"""The scripts are copies of one another but for their algorithms: the same name is the same source."""

import ast
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(ROOT.glob("*_llm.py"))
BUDGETS = {"ippo_llm": 500, "iac_llm": 500, "ppo_llm": 700}


def definitions(path):
    """Source of every function and class at the top of a script, decorators included, by name."""
    source = path.read_text()
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[start - 1 : node.end_lineno])
    return found


def test_the_same_name_is_the_same_source():
    assert {path.stem for path in SCRIPTS} >= BUDGETS.keys()
    found = {path.stem: definitions(path) for path in SCRIPTS}
    assert {"Agent", "Rollout", "sample", "losses", "update"} <= found["ippo_llm"].keys() & found["iac_llm"].keys()
    assert "gae" in found["ippo_llm"].keys() & found["ppo_llm"].keys()
    for one, other in itertools.combinations(found.values(), 2):
        for name in (one.keys() & other.keys()) - {"Args", "main"}:
            assert one[name] == other[name], name


def test_scripts_differ_by_little_but_the_algorithm():
    ippo, iac = ((ROOT / f"{name}.py").read_text().splitlines() for name in ("ippo_llm", "iac_llm"))
    assert len(set(ippo) ^ set(iac)) < 60
    assert definitions(ROOT / "ippo_llm.py").keys() ^ definitions(ROOT / "iac_llm.py").keys() == {
        "gae",
        "td_error",
        "IPPOArgs",
        "IACArgs",
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_keep_to_their_budget_of_lines_and_utils_know_no_script(script):
    lines = script.read_text().splitlines()
    assert len(lines) <= BUDGETS[script.stem] and max(map(len, lines)) <= 120
    for path in (ROOT / "utils").rglob("*.py"):
        imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert script.stem not in {node.module for node in imported}
