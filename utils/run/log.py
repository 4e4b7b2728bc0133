"""What a run tells of each update: metrics.csv, samples.jsonl, curves.png, and Weights & Biases."""

import csv
import io
import itertools
import json
import time

import torch

from utils.cli import UserError, one_line
from utils.files import in_columns, json_line, read_rows, whole_lines, write_whole
from utils.models import episode_rewards
from utils.run.report import draw_curves
from utils.run.tracking import Tracker

SPARE = 50  # curves are drawn once in so many times the seconds that it takes
SAMPLES = 2  # episodes written of each update
SHOWN = 200  # of the last ones, kept to be shown at the end


class Log:
    """The main process's: `rows` of metrics.csv, dicts of numbers or None; the last `samples`, dicts; the `tracker`."""

    def __init__(self, folder, optimum=None):
        self.folder = folder
        self.optimum = optimum  # expected reward at best, if known
        self.rows = []
        self.columns = []
        self.samples = []
        self.tracker = Tracker()
        self.drawn_at = 0.0
        self.drawing_seconds = 0.0

    def read(self, step):
        """Take up what is written of the first `step` updates. Raises UserError."""
        try:
            self.rows = read_rows(self.folder / "metrics.csv", step)
            samples = read_samples(self.folder / "samples.jsonl", step)
        except (ValueError, KeyError, TypeError) as error:
            where = f"metrics.csv or samples.jsonl in {self.folder} has a line that can't be read"
            raise UserError(f"{where}: {one_line(error)}") from error
        if len(self.rows) < step:
            raise UserError(f"{self.folder}/metrics.csv has {len(self.rows)} of the {step} updates that are done")
        self.write_all_metrics()
        write_whole(self.folder / "samples.jsonl", "".join(map(json_line, samples)))
        self.samples = samples[-SHOWN:]

    def add(self, row, samples):
        """Write what an update was like: its row of metrics, and its first episodes."""
        self.rows.append(row)
        if len(self.rows) == 1 or row.keys() - set(self.columns):
            self.write_all_metrics()
        else:
            with open(self.folder / "metrics.csv", "a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(in_columns(row, self.columns))
        with open(self.folder / "samples.jsonl", "a", encoding="utf-8") as file:
            file.writelines(map(json_line, samples))
        self.samples = [*self.samples, *samples][-SHOWN:]
        self.tracker.log({key: value for key, value in row.items() if value is not None}, row["global_step"])
        if time.time() - self.drawn_at > SPARE * self.drawing_seconds:
            self.draw()

    def write_all_metrics(self):
        """Write metrics.csv anew, as where a column has come."""
        self.columns = list(dict.fromkeys(key for row in self.rows for key in row))
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(self.columns)
        writer.writerows(in_columns(row, self.columns) for row in self.rows)
        write_whole(self.folder / "metrics.csv", text.getvalue())

    def draw(self):
        start = time.time()
        draw_curves(self.rows, self.folder / "curves.png", self.folder.name, self.optimum)
        self.drawn_at = time.time()
        self.drawing_seconds = self.drawn_at - start


def read_samples(path, step):
    """The samples of the first `step` updates. Lines behind them may be damaged, as where power was lost."""
    samples, error = [], None
    for line in whole_lines(path):
        try:
            sample = json.loads(line)
            is_older = sample["update"] <= step
        except (ValueError, KeyError, TypeError) as damage:
            error = damage
            continue
        if is_older and error:
            raise error
        if is_older:
            samples.append(sample)
    return samples


def joint_samples(items, agents, rollouts, several_turns, **numbers):
    """The first episodes of a rollout for samples.jsonl: what each agent read, wrote and earned.

    Of several turns these are lists of each agent's turns; `earned` is of the whole episode, also what was earned
    before an agent acted. `numbers` stand in each sample. One agent may be in all seats.
    """
    samples = []
    earned = [episode_rewards(rollout, torch.float64).tolist() for rollout in rollouts]
    for k in range(len(items)):
        if len(samples) == SAMPLES:
            break
        episode = [
            read_transcript(agent.tokenizer, rollout, k) for agent, rollout in zip(itertools.cycle(agents), rollouts)
        ]
        if not any(rewards for _, rewards in episode):  # nobody acted
            continue
        prompts = [prompts for prompts, _ in episode]
        rewards = [rewards for _, rewards in episode]
        answers = [rollout.answers[k] for rollout in rollouts]
        own_earned = [own[k] for own in earned]
        sample = {"reward": sum(own_earned) / len(earned), "earned": own_earned}
        if not several_turns:
            prompts, answers = ([own[0] if own else "" for own in texts] for texts in (prompts, answers))
            rewards = own_earned
        sample |= {"rewards": rewards, "item": items[k], "prompts": prompts, "completions": answers}
        samples.append(numbers | sample)
    return samples


def read_transcript(tokenizer, rollout, k):
    """(the texts that an agent read before each of its turns in episode k, and after the last one; its rewards)."""
    length = int(rollout.attention_mask[k].sum())
    turns = rollout.turns[k, :length].tolist()
    prompts = [[]]  # ids
    rewards = []
    before = 0
    for token, turn, reward in zip(rollout.ids[k].tolist(), turns, rollout.rewards[k].tolist()):
        if turn and turn != before:  # a turn begins
            prompts.append([])
            rewards.append(0.0)
        if turn:
            rewards[-1] += reward
        else:
            prompts[-1].append(token)
        before = turn
    if not prompts[-1]:
        prompts.pop()
    return tokenizer.batch_decode(prompts), rewards
