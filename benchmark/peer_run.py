"""The run folder of another system's training: config.json and metrics.csv, as our scripts write them."""

import csv
import importlib.metadata
import json
import sys

import torch

from utils.cli import UserError
from utils.files import in_columns, lock, write_whole, writing
from utils.run.folder import git_commit, versions


class PeerRun:
    """A folder that is locked until the process ends. Raises UserError where it has a run already."""

    def __init__(self, script, flags):
        self.script, self.folder = script, flags.output_dir
        self.metrics = self.folder / "metrics.csv"
        if self.metrics.exists() and not flags.overwrite:
            raise UserError(f"--output-dir takes a folder without a run in it; {self.folder} has one")
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = lock(self.folder)
            self.metrics.unlink(missing_ok=True)

    def write_config(self, args, package):
        config = {"command": [f"benchmark/{self.script}.py", *sys.argv[1:]]}
        config["args"] = args | {"output_dir": str(self.folder)}
        config["versions"] = versions() | {package: importlib.metadata.version(package)}
        config["git_commit"] = git_commit(__file__)
        write_whole(self.folder / "config.json", json.dumps(config, indent=2, default=str) + "\n")

    def write(self, row):
        """Add a row to metrics.csv, with the columns' names before the first one."""
        is_first = not self.metrics.exists()
        with open(self.metrics, "a", newline="") as file:
            csv.writer(file).writerows([[*row]] * is_first + [in_columns(row, row)])
        samples, speed = row["global_step"], row["samples_per_second"]
        print(f"{samples} samples: reward {row['reward_mean']:.3f}, {speed:.1f}/s", flush=True)


@torch.no_grad()
def reference_logprob(reference, rows):
    """The mean log-probability of tokens under a model: rows of ids [L] and a mask [L], which is off for the first."""
    logprobs = []
    for ids, mask in rows:
        ids = ids.to(reference.device)
        of_vocabulary = reference(ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs.append(of_vocabulary.gather(1, ids[1:, None])[mask[1:]])
    return float(torch.cat(logprobs).mean())


def single_agent_rewards(script, task, items, answers, args):
    """What answers to items earn in a task of one turn and one agent."""
    env = script.TeamEnv(task, items, args)
    env.reset()
    _, (rewards,), _ = env.step([dict(enumerate(answers))])
    return [rewards[b] for b in range(len(items))]
