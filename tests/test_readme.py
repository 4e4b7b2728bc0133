"""The README's commands, examples and flags are those of the code."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

from conftest import make_args

from ippo_llm import Args, main
from utils.cli import parse

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
BLOCKS = {code.split(".py")[0]: code for code in re.findall(r"```python\n# (.*?)```", README, flags=re.S)}


def test_every_command_parses():
    commands = re.findall(r"(?<=python )ippo_llm\.py[^\n`&|]*", README.replace("\\\n", " "))
    assert len(commands) >= 5
    for command in commands:
        if "--help" not in command:
            parse(Args, shlex.split(command)[1:])


def test_the_table_of_flags_is_that_of_the_code():
    rows = dict(re.findall(r"^\| `--([a-z0-9-]+)` \| (.*?) \|", README, flags=re.M))
    defaults = {True: "on", False: "off", None: "none", (): "none"}
    for field in dataclasses.fields(Args):
        default = field.default
        expected = defaults[default] if isinstance(default, (bool, type(None), tuple)) else str(default)
        assert rows.pop(field.name.replace("_", "-")) == expected
    assert not rows


def test_the_reward_of_your_own_runs(tmp_path):
    (tmp_path / "agree.py").write_text("# " + BLOCKS["agree"])
    _, run = main(make_args(tmp_path, task=str(tmp_path / "agree.py"), train_size=8))
    assert 0 < run.rows[0]["reward_mean"] < 1


def test_the_dataset_from_the_hub_runs_from_a_folder(tmp_path):
    for split in ("train", "test"):
        lines = [json.dumps({"prompt": f"{split} post {k}", "completion": "short"}) for k in range(20)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    (tmp_path / "hub_data.py").write_text("# " + BLOCKS["hub_data"].replace("trl-lib/tldr", str(tmp_path)))
    _, run = main(make_args(tmp_path, task=str(tmp_path / "hub_data.py"), train_size=8))
    assert {sample["item"]["prompt"].split()[0] for sample in run.samples} == {"train"}
