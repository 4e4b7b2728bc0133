"""The commands, examples, diffs and flags of the README and of docs/ are those of the code."""

import dataclasses
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import make_args
from processes import SCRIPTS, cut
from transformers import AutoModelForCausalLM

import ippo_llm
import ppo_llm
from utils import enjoy
from utils.cli import parse
from utils.models.engine import VllmArgs
from utils.models.loading import LoadingArgs
from utils.run import FolderArgs
from utils.same import timeless
from utils.tasks import BUILT_IN, TaskArgs, import_file, tldr

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
BENCHMARK = [path.read_text() for path in sorted((ROOT / "benchmark").glob("*.md"))]
EXAMPLES = DOCS["tasks"] + DOCS["ppo"]
BLOCKS = {code.split(".py")[0]: code for code in re.findall(r"```python\n# (.*?)```", EXAMPLES, flags=re.S)}
DIFFS = re.findall(r"\*\*The (\w+)\.\*\*.*?```diff\n(.*?)```", README + DOCS["make_it_yours"], flags=re.S)
assert set(SCRIPTS) == {path.stem for path in ROOT.glob("*_llm.py")}


# --- Commands, links, tasks -------------------------------------------------------------------------------------------


def test_every_command_parses():
    sources = [README, *DOCS.values(), *BENCHMARK]
    sources += [script.__doc__ for script in SCRIPTS.values()]
    sources += [importlib.import_module(f"utils.tasks.{name}").__doc__ for name in BUILT_IN]
    text = "\n".join(sources).replace("\\\n", " ")
    commands = re.findall(r"(python|torchrun|accelerate launch)[^\n`]*? (\w+_llm)\.py([^\n`&|;\"]*)", text)
    assert len(commands) >= 60 and len({launcher for launcher, _, _ in commands}) == 3
    for _, script, flags in commands:
        flags = re.split(" {2,}", flags)[0]  # what follows is a remark
        if not any(flag in flags for flag in ("--help", "--resume", "--fork")):
            parse(SCRIPTS[script].Args, shlex.split(flags))


def test_every_link_leads_somewhere():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmark/*.md")]
    links = [(page, *link) for page in pages for link in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text())]
    assert len(links) > 60
    for page, path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), f"{page} leads to {path}"
        titles = re.findall(r"^#+ (.*)", target.read_text(), flags=re.M) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_name_in_the_tables_of_equations_is_in_its_script():
    tables = re.findall(r"^\| in the equation \| in (.*?) \|\n(.*?)\n\n", DOCS["equations"], flags=re.S | re.M)
    of_tables = [re.findall(r"(\w+)\.py", scripts) for scripts, _ in tables]
    assert of_tables == [["ippo_llm", "iac_llm"], ["maac_llm"], ["magrpo_llm"], ["ppo_llm"]]
    for scripts, table in tables:
        names = set(re.findall(r"`(\w+)`", table))
        for script in re.findall(r"(\w+)\.py", scripts):
            names -= vars(SCRIPTS[script]).keys()
        assert not names


def test_every_task_is_in_the_table():
    assert sorted(re.findall(r"^\| `([a-z]+)` \|", DOCS["tasks"], flags=re.M)) == sorted(BUILT_IN)
    line = README.split("the tasks by name: ")[1].split(".\n")[0]
    assert sorted(re.findall(r"`([a-z]+)`", line)) == sorted(BUILT_IN)


def test_every_script_is_in_the_table():
    assert re.findall(r"^\| `(\w+)\.py` \|", README, flags=re.M) == [*SCRIPTS]


SECTIONS = ["All scripts", "`ippo_llm.py` and `iac_llm.py`"]
SECTIONS += ["`maac_llm.py`", "`magrpo_llm.py`", "`ppo_llm.py`"]

# --- Flags ------------------------------------------------------------------------------------------------------------


def flag_rows(script, shared):
    """{flag: (default, help)} of a script: those of every script, or the others."""
    rows = {}
    defaults = script.Args()
    for group in script.Args.__mro__[1:-1]:
        source = inspect.getsource(group)
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, flags=re.M))
        comments |= {name: text for text, name in re.findall(r"^    # (.*)\n    (\w+): ", source, flags=re.M)}
        for field in dataclasses.fields(group):
            if (group in (FolderArgs, TaskArgs, LoadingArgs, VllmArgs)) == shared:
                rows["--" + field.name.replace("_", "-")] = (
                    shown(getattr(defaults, field.name)),
                    comments[field.name],
                )
    return rows


def shown(default):
    if isinstance(default, tuple):
        return " ".join(default) or "none"
    return {"False": "off", "True": "on", "None": "none", "{}": "none"}.get(str(default), str(default))


@pytest.mark.parametrize("title", SECTIONS)
def test_the_table_of_flags_is_that_of_the_code(title):
    section = DOCS["flags"].split(f"## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(--[a-z0-9-]+)` \| (.*?) \| (.*) \|$", section, flags=re.M)
    shared = title == "All scripts"
    tables = {name: flag_rows(SCRIPTS[name], shared) for name in SCRIPTS if shared or f"`{name}.py`" in title}
    assert sorted(flag for flag, _, _ in rows) == sorted({flag for table in tables.values() for flag in table})
    for flag, default, help_text in rows:
        defaults = {name: table[flag][0] for name, table in tables.items() if flag in table}
        assert {help_text.replace("`", "")} == {table[flag][1] for table in tables.values() if flag in table}
        if len(defaults) == len(tables) and len(set(defaults.values())) == 1:
            assert default == next(iter(defaults.values()))
        else:
            assert default == ", ".join(f"{value} in `{name}.py`" for name, value in defaults.items())


# --- Examples ---------------------------------------------------------------------------------------------------------


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


def test_the_environment_of_your_own_runs_as_printed(tmp_path):
    (tmp_path / "echo.py").write_text("# " + BLOCKS["echo"])
    args = ppo_llm.Args(
        env=str(tmp_path / "echo.py"),
        max_turns=2,
        max_output_tokens=8,
        train_size=16,
        rollout_buffer_size=8,
        num_train_epochs=1,
        evaluation_interval=0,
        output_dir=str(tmp_path / "run"),
    )
    _, run = ppo_llm.main(args)
    assert run.optimum == 2 and [row["turns"] for row in run.rows] == [2, 2]
    first, second = run.samples[0]["prompts"][0]
    assert "Say " in first and second.startswith("Say ")


# --- A copy of a script -----------------------------------------------------------------------------------------------


def apply_diff(diff, code):
    """The code after a diff without line numbers; what it takes away, and what it shows, is there exactly once."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert code.count(before) == 1 and set(line[0] for line in lines) <= set(" +-")
        code = code.replace(before, after)
    return code


@pytest.fixture
def mine(request, tmp_path, monkeypatch):
    """The module of a copy of ippo_llm.py with one of the diffs, whose runs go to tmp_path."""
    code = apply_diff(dict(DIFFS)[request.param], (ROOT / "ippo_llm.py").read_text())
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return import_file(tmp_path / "mine.py", "mine")


def test_there_are_three_diffs_of_a_few_lines_and_one_of_sixty():
    assert [name for name, _ in DIFFS] == ["reward", "advantage", "model", "critic"]
    for name, diff in DIFFS:
        changed = [line for line in diff.splitlines() if line[0] in "+-"]
        assert len(changed) <= (60 if name == "critic" else 4)


@pytest.mark.parametrize("mine", ["reward"], indirect=True)
def test_a_copy_with_another_reward(mine):
    _, run = mine.main(make_args(script=mine, train_size=32, rollout_buffer_size=32, max_new_tokens=72))
    texts = ["Anna took my car and did not ask me.", "Anna took my car yesterday. So should I talk to Anna about it?"]
    pairs = [[text] for text in texts]
    assert mine.reward_func(*pairs, items=[{}]) == [tldr.reward_func(*pairs, items=[{}])[0] + 1]
    assert mine.reward_func(pairs[1], pairs[0], items=[{}]) == tldr.reward_func(pairs[1], pairs[0], items=[{}])
    for sample in run.samples:
        completions = [[text] for text in sample["completions"]]
        assert sample["reward"] == pytest.approx(mine.reward_func(*completions, items=[sample["item"]])[0])


def batches_of(mine, monkeypatch, **flags):
    """What two agents learn from in two updates of a run without normalization, whose advantages are not all 0."""
    batches = []
    minibatches = mine.minibatches
    monkeypatch.setattr(mine, "minibatches", lambda batch, *rest: batches.append(batch) or minibatches(batch, *rest))
    flags |= {"num_generations": 4, "advantage_normalization": False, "reward_normalization": False, "kl_coef": 0.0}
    mine.main(make_args(script=mine, train_size=4, **flags))
    assert len(batches) == 4 and any(batch.advantages.abs().max() > 0.1 for batch in batches)
    return batches


@pytest.mark.parametrize("mine", ["advantage"], indirect=True)
def test_a_copy_with_another_advantage(mine, monkeypatch):
    batches = batches_of(mine, monkeypatch)
    for batch in batches:
        scores = batch.rewards[:, 0].double().view(-1, 4)
        wanted = (scores - scores.mean(1, keepdim=True)).view(-1, 1, 1) * batch.action_mask
        assert torch.allclose(batch.advantages.double(), wanted, atol=1e-6)


@pytest.mark.parametrize("mine", ["model"], indirect=True)
def test_a_copy_with_another_model(mine, model):
    _, run = mine.main(make_args(script=mine))
    for i in range(2):
        learned = AutoModelForCausalLM.from_pretrained(run.folder / f"agent_{i}").state_dict()
        changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, learned[name])}
        assert {name.split(".")[2] for name in changed} == {"1", "2"} and len(model.base_model.layers) == 3


@pytest.mark.parametrize("mine", ["critic"], indirect=True)
def test_a_copy_without_a_critic_trains_saves_resumes_and_is_shown(mine, capsys):
    flags = {"num_generations": 4, "gae_lambda": 1.0, "train_size": 4, "num_agents": 2}
    _, whole = mine.main(make_args(Path("whole"), script=mine, save_interval=1, **flags))
    begun = str(cut(whole.folder, Path("cut")))
    agents, run = mine.main(make_args(script=mine, resume=begun, save_interval=1, **flags))
    assert timeless(run.folder) == timeless(whole.folder) and len(run.rows) == 2
    assert not any("value" in name or "critic" in name for name in [*vars(mine.Args()), *vars(agents[0])])
    assert not any("value_loss" in name for name in run.rows[0])
    assert not list(run.folder.rglob("value_head*")) and not list(run.folder.rglob("critic"))
    for name, weight in AutoModelForCausalLM.from_pretrained("whole/run/agent_1").state_dict().items():
        assert torch.equal(weight, agents[1].actor.state_dict()[name])
    enjoy.main(enjoy.Args(run=str(run.folder), items=1, task=mine.__file__))
    assert "trained: reward" in capsys.readouterr().out


@pytest.mark.parametrize("mine", ["critic"], indirect=True)
def test_without_a_critic_the_baseline_is_the_mean_of_the_others(mine, monkeypatch):
    batches = batches_of(mine, monkeypatch, gae_lambda=1.0)
    for batch in batches:
        for row, score in enumerate(batch.rewards[:, 0].tolist()):
            group = row // 4 * 4
            others = [batch.rewards[k, 0].item() for k in range(group, group + 4) if k != row]
            wanted = (score - sum(others) / 3) * batch.action_mask[row]
            torch.testing.assert_close(batch.advantages[row], wanted, atol=1e-5, rtol=0)


def test_a_copy_runs_beside_utils_and_its_run_has_its_name(tmp_path):
    (tmp_path / "mine.py").write_text((ROOT / "ippo_llm.py").read_text())
    (tmp_path / "utils").symlink_to(ROOT / "utils")
    command = re.search(r"cp ippo_llm.py mine.py && python (mine.py [^#\n]*)", README)[1]
    argv = shlex.split(command.replace("--max-steps 512", "--max-steps 64"))  # an update
    subprocess.run([sys.executable, *argv], cwd=tmp_path, check=True)
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"mine__1__[0-9-]+", folder.name)
    assert (folder / "agent_1/model.safetensors").is_file()
    assert len((folder / "metrics.csv").read_text().splitlines()) == 2
