"""A run at Weights & Biases. Where that fails, the run goes on without it, and says so."""

import contextlib
import os
from pathlib import Path

from tqdm import tqdm

from utils.cli import one_line, printable
from utils.run.report import as_text


class Tracker:
    """What --track logs to; `id` is the run's there, None before it has one."""

    def __init__(self):
        self.run = None
        self.id = None

    def start(self, folder, args, config):
        """Begin, or go on with the run of that id; where it can't be reached, log into the folder, or WANDB_DIR."""
        import wandb

        options = {
            "project": args.wandb_project_name,
            "entity": args.wandb_entity,
            "tags": list(args.wandb_tags),
            "name": args.wandb_run_name or folder.name,
            "config": config,
            "dir": Path(os.environ.get("WANDB_DIR") or folder).resolve(),
            "id": self.id,
            "resume": "allow" if self.id else None,
        }
        for mode in (None, "offline"):
            try:
                self.run = wandb.init(**options, mode=mode)
                self.id = self.run.id
                return
            except Exception as error:
                consequence = "the run goes on without it" if mode else "logging offline, for wandb sync"
                tqdm.write(f"--track: Weights & Biases does not start ({one_line(error)}); {consequence}")

    def log(self, values, step=None):
        """Log {name: value}; where it fails, do without it from now on."""
        if self.run is None:
            return
        try:
            self.run.log(values, step=step)
        except Exception as error:
            tqdm.write(f"--track: Weights & Biases fails ({one_line(error)}); the run goes on without it")
            self.finish(failed=True)

    def log_samples(self, samples):
        """Log joint samples, dicts as in samples.jsonl, as a table."""
        if self.run is None or not samples:
            return
        import wandb

        agents = [f"agent_{i}" for i in range(len(samples[0]["completions"]))]
        rows = []
        for sample in samples:
            texts = [printable(as_text(own)) for own in sample["completions"]]
            rows.append([sample["global_step"], one_line(sample["item"]), *texts, sample["reward"]])
        self.log({"samples": wandb.Table(columns=["global_step", "item", *agents, "reward"], data=rows)})

    def finish(self, failed):
        """Let go of the run there."""
        if self.run is not None:
            with contextlib.suppress(Exception):
                self.run.finish(exit_code=int(failed))
        self.run = None
