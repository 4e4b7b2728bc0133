"""The tests that docs/checkpoints.md names are there, and every flag that it names is one."""

import re
from pathlib import Path

import ppo_llm
from utils.cli import flag_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/checkpoints.md").read_text()


def test_every_row_names_a_test_that_exists():
    rows = re.findall(r"^\| `?\w.*\|$", PAGE, flags=re.M)[1:]
    assert len(rows) > 20
    for row in rows:
        file, name = re.search(r"\| `(test_\w+\.py)::(test_\w+)` \|$", row).groups()
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), row


def test_every_flag_is_one():
    flags = {flag_name(name) for name in vars(ppo_llm.Args())}
    for flag in re.findall(r"--[a-z][a-z-]+", PAGE):
        assert flag.replace("--no-", "--") in flags, flag
