"""Faults that are put into a script, and the probes that find them: each a fault that trains on without an error."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
PPO, IPPO = "ppo_llm.py", "ippo_llm.py"
CUT = """    parts = []
    for turn in range(args.max_turns):
        mask = action_mask * (rollout.turn_of_token == turn)
        parts.append(torch.stack(gae(action_rewards, old_values, mask, args.gamma, args.gae_lambda)))
    advantages, returns = sum(parts)
"""
GAE = "    advantages, returns = gae(action_rewards, old_values, action_mask, args.gamma, args.gae_lambda)\n"
MUTATIONS = {  # fault: script and flags, what is replaced, by what, a probe that fails, one that passes
    "values are read one token late": (PPO, "values[:, :-1]\n", "values[:, 1:]\n", "copy-4", "critic-4"),
    "an end is worth what the last action was": (
        PPO,
        "    next_value = torch.zeros_like(values[:, 0])\n",
        "    next_value = values[:, -1]\n",
        "critic-4",
        "copy-4",
    ),
    "the entropy bonus has the other sign": (
        f"{PPO} --ent-coef 0.05",
        "- args.ent_coef * entropy",
        "+ args.ent_coef * entropy",
        "critic-4",
        "copy-4",
    ),
    "a turn's credit ends with it": (PPO, GAE, CUT, "delayed-4", "copy-4"),
    "observations are taken for actions": (
        PPO,
        "self.turn_of_token += [-1] * len(ids)\n",
        "self.turn_of_token += [len(self.responses)] * len(ids)\n",
        "whole-4",
        "copy-4",
    ),
    "an agent learns from what the other did": (
        IPPO,
        "zip(agents, rollouts)]",
        "zip(agents, rollouts[::-1])]",
        "roles-2",
        "copy-4",
    ),
}


def verdicts(folder, command, probes):
    """The verdict of each probe, for a script in a folder that has a copy of everything else."""
    words = ["--command", f"python {command}", "--quick", "--json", "table.json", "--probes", *probes]
    process = subprocess.run(
        [sys.executable, "-m", "utils.probe", *words], cwd=folder, capture_output=True, text=True, timeout=1800
    )
    assert process.returncode == 0, process.stderr
    return {probe["name"]: probe["verdict"] for probe in json.loads((folder / "table.json").read_text())["probes"]}


@pytest.mark.slow
@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_fault_is_found_by_a_probe(tmp_path, fault):
    command, old, new, fails, passes = MUTATIONS[fault]
    shutil.copytree(HERE / "utils", tmp_path / "utils")
    name = command.split()[0]
    text = (HERE / name).read_text()
    assert text.count(old) == 1
    (tmp_path / name).write_text(text)
    right = verdicts(tmp_path, command, [fails, passes])
    assert right == {fails: "learned", passes: "learned"}
    (tmp_path / name).write_text(text.replace(old, new))
    wrong = verdicts(tmp_path, command, [fails, passes])
    assert wrong[passes] == "learned" != wrong[fails]
