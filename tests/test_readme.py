"""The README's commands, examples and flags are those of the code."""

import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest
from conftest import make_args

import iac_llm
import ippo_llm
import ppo_llm
from utils.cli import parse
from utils.run import FolderArgs
from utils.tasks import BUILT_IN

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = {code.split(".py")[0]: code for code in re.findall(r"```python\n# (.*?)```", README, flags=re.S)}
SCRIPTS = {"ippo_llm": ippo_llm, "iac_llm": iac_llm, "ppo_llm": ppo_llm}


def test_every_command_parses():
    sources = [README, (ROOT / "benchmark/README.md").read_text(), *BLOCKS.values()]
    sources += [importlib.import_module(f"utils.tasks.{name}").__doc__ for name in BUILT_IN]
    commands = re.findall(r"(?<=python )(\w+_llm)\.py([^\n`&|;\"]*)", "\n".join(sources).replace("\\\n", " "))
    assert len(commands) >= 15
    for script, flags in commands:
        flags = re.split(" {2,}", flags.strip())[0].replace("$seed", "1")  # what follows is a remark
        if "--help" not in flags and "--resume" not in flags:
            parse(SCRIPTS[script].Args, shlex.split(flags))


def test_every_link_leads_somewhere():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmark/*.md")]
    links = [(page, *link) for page in pages for link in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text())]
    assert len(links) > 15
    for page, path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), f"{page} leads to {path}"
        titles = re.findall(r"^#+ (.*)", target.read_text(), flags=re.M) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("title", ["All scripts", "`ippo_llm.py` and `iac_llm.py`", "`ppo_llm.py`"])
def test_the_table_of_flags_is_that_of_the_code(title):
    section = (ROOT / "docs/flags.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    shared, scripts = (
        title == "All scripts",
        [name for name in SCRIPTS if f"`{name}.py`" in title or title == "All scripts"],
    )
    rows = re.findall(r"^\| `--([a-z0-9-]+)` \| (.*?) \|", section, flags=re.M)
    shown = {False: "off", True: "on", None: "none"}
    expected = {}
    for name in scripts:
        script = SCRIPTS[name]
        for field in dataclasses.fields(script.Args):
            if hasattr(FolderArgs, field.name) != shared:
                continue
            default = field.default
            if isinstance(default, (bool, type(None))):
                default = shown[default]
            elif isinstance(default, tuple):
                default = " ".join(default) or "none"
            expected.setdefault(field.name.replace("_", "-"), {})[name] = str(default)
    assert len(rows) == len(dict(rows)) and dict(rows).keys() == expected.keys()
    for flag, text in rows:
        defaults = expected[flag]
        if len(set(defaults.values())) > 1:
            assert text == ", ".join(f"{default} in `{name}.py`" for name, default in defaults.items())
        else:
            assert text in defaults.values()


def test_the_task_of_your_own_runs_as_printed(tmp_path):
    code = "# " + BLOCKS["meet"]
    assert len(code.splitlines()) < 30
    (tmp_path / "meet.py").write_text(code)
    args = make_args(tmp_path, task=str(tmp_path / "meet.py"), train_size=16, num_turns=2)
    _, run = ippo_llm.main(args)
    for sample in run.samples:  # the second prompt of each shows what the other wrote first
        first, second = sample["completions"]
        assert first[0] in sample["prompts"][1][1] and second[0] in sample["prompts"][0][1]
    assert 0 < run.rows[0]["turn_1/reward_mean"] < 1 and run.rows[0]["turns"] == 2


def test_every_task_is_in_the_table():
    assert sorted(re.findall(r"^\| `([a-z]+)` \|", README, flags=re.M)) == BUILT_IN


def test_the_environment_of_your_own_runs_as_printed(tmp_path):
    (tmp_path / "echo.py").write_text("# " + BLOCKS["echo"])
    sizes = {
        "train_size": 16,
        "rollout_buffer_size": 8,
        "num_train_epochs": 1,
        "eval_loop": 8,
        "evaluation_interval": 0,
    }
    args = ppo_llm.Args(env=str(tmp_path / "echo.py"), max_turns=2, max_output_tokens=8, **sizes)
    _, run = ppo_llm.main(dataclasses.replace(args, output_dir=str(tmp_path / "run")))
    assert run.optimum == 2 and [row["turns"] for row in run.rows] == [2, 2]
    first, second = run.samples[0]["prompts"][0]
    assert "Say " in first and second.startswith("Say ")
