"""What a run's agents write, beside what they wrote before it, on the same held-out items, from Python."""

import contextlib
import importlib
import os
from pathlib import Path
from types import SimpleNamespace

import transformers

from utils import distributed, envs, tasks
from utils.cli import UserError, one_line
from utils.load import begin
from utils.models.weights import load_agents
from utils.run.reader import read_config
from utils.tasks.task import BUILT_IN

__all__ = ["TEAMS", "show"]

ROOT = Path(__file__).resolve().parent.parent.parent  # of the project
TEAMS = ("untouched", "trained")


def show(run, items=4, prompt=None, seed=1, do_sample=True, temperature=None, script=None, **flags):
    """What both teams write, a dict for each item: the `item`, and the episodes of `untouched` and `trained`.

    An episode has the team's `reward` (or None, and a `note` that says why) and, lists of N lists over the turns in
    which an agent acted, `rewards`, `prompts` (the last message of each) and `completions`. `script`, and `task`,
    `env` and `trust_remote_code` among the flags, which stand in for the run's, are code that may be run; a folder's
    own is taken only where it is the project's, and data of this machine only where `dataset` names them too. Raises
    UserError.
    """
    if prompt is not None and (not prompt.strip() or prompt != prompt.encode(errors="replace").decode()):
        raise UserError(f"--prompt takes a text, got {one_line(ascii(prompt), 80)}")
    config = read_config(run)
    module = import_script(run, config, script)
    check_code(run, config["args"], flags)
    agents, args, checkpoint, initials = begin(run, module, **flags)
    task = load_own_task(run, config, args, module)
    if prompt is None:
        train, held_out = tasks.load_items(task, initials, args)
        rows = held_out or train
        chosen = [rows[k] for k in range(min(items, len(rows)))]
    else:
        chosen = [{"prompt": prompt}]
    if not chosen:
        raise UserError("there are no items; --prompt takes one of your own")
    args.do_sample = do_sample and args.do_sample
    args.temperature = temperature or args.temperature
    shown = []
    for name in TEAMS:
        if name == "trained":
            load_agents(checkpoint, agents)
        if prompt is None:
            env = getattr(task, "TeamEnv", module.TeamEnv)(task, chosen, args)
        else:
            env = OwnPrompt(task, prompt, args)
        recorder = Recorder(env)
        transformers.set_seed(seed)
        playing = SimpleNamespace(TeamEnv=lambda *_, recorder=recorder: recorder)
        players = agents[: args.num_agents]
        players *= args.num_agents // len(players)  # --self-play: one agent has all seats
        module.play(players, playing, chosen, args, distributed.generator(seed))
        shown.append([recorder.episode(b, args.num_agents) for b in range(len(chosen))])
    return [{"item": item} | dict(zip(TEAMS, pair)) for item, *pair in zip(chosen, *shown)]


def load_own_task(run, config, args, module):
    """The task of a run; of one with an object from Python, which is not here, its script's own, and that is said."""
    task = tasks.load_task(None, args, default=module)
    name = config.get("task", task.name)
    if name != task.name and not (args.task or args.env):
        distributed.say(f"{run} was made from Python with {name}, which is not here: this shows {task.name}")
    return task


def import_script(run, config, script=None):
    """The module of a run's script: what the user names, or else one of the project's. Raises UserError for another."""
    own = Path(str(config.get("script")))
    if script is not None:
        if not script.endswith(".py") or not os.path.isfile(script):
            raise UserError(f"--script takes a FILE.py, and there is no file {one_line(script, 80)}")
        with envs.blame(f"--script {script}", "it can't be loaded"):
            return envs.import_file(script, Path(script).stem)
    if not is_of_project(own):
        code = f"the code in {one_line(own.name, 80)}"
        raise UserError(f"{run} takes {code}: add --script FILE.py, if you trust it, and that is run")
    return importlib.import_module(own.stem)


def is_of_project(script):
    """Whether a run's script, a path, is one of the project's."""
    is_elsewhere = os.path.isfile(script) and script.resolve().parent != ROOT
    return not is_elsewhere and script.name.endswith("_llm.py") and os.path.isfile(ROOT / script.name)


def check_code(run, saved, flags):
    """Raise UserError where a run's folder, which may be a stranger's, asks for code that the user has not named."""
    for name, built_in in (("task", BUILT_IN), ("env", envs.BUILT_IN)):
        there = saved.get(name)
        if name not in flags and there is not None and there not in built_in and not envs.of_library(there):
            code = f"the code in {one_line(Path(str(there)).name, 80)}"
            raise UserError(f"{run} takes {code}: add --{name} FILE.py, if you trust it, and that is run")
    data = saved.get("dataset")
    if "dataset" not in flags and data is not None and any(map(os.path.exists, (data, data.rpartition(":")[0]))):
        shown = f"what is in {one_line(data, 80)}"
        raise UserError(f"{run} shows {shown} on this machine: add --dataset {one_line(data, 80)}, if it may be shown")
    if saved.get("trust_remote_code") and not flags.get("trust_remote_code"):
        raise UserError(f"{run} takes the code that comes with its models: add --trust-remote-code, if you trust it")


class OwnPrompt:
    """One turn on a prompt of the user's, put as the task puts an item's where it can; it earns nothing."""

    note = "a prompt of your own has none"

    def __init__(self, task, prompt, args):
        self.chats = []
        for i in range(args.num_agents):
            chat = [{"role": "user", "content": prompt}]
            with contextlib.suppress(Exception):  # formatters that want more of an item, or none
                formatted = task.formatters({"prompt": prompt}, i)
                chat = formatted if prompt in last_message(formatted) else chat
            self.chats.append(chat)

    def reset(self):
        return [{0: chat} for chat in self.chats]

    def step(self, actions):
        return [{} for _ in actions], [{} for _ in actions], set()


class Recorder:
    """An environment that keeps what its players read, wrote and earned."""

    def __init__(self, env):
        self.env = env
        self.turns = []  # (observations, actions, rewards) of each
        self.truncated = set()

    @property
    def failed(self):
        self.dropped = getattr(self.env, "failed", ())
        return self.dropped

    def reset(self):
        self.observations = self.env.reset()
        return self.observations

    def step(self, actions):
        observations, rewards, truncated = self.env.step(actions)
        rewards = [{b: own[b] for b in own.keys() - self.truncated} for own in rewards]  # as in a script's play
        self.turns.append((self.observations, actions, rewards))
        self.truncated |= truncated
        self.observations = observations
        return observations, rewards, truncated

    def episode(self, b, num_agents):
        """Episode b as a dict."""
        prompts, completions, rewards = ([[] for _ in range(num_agents)] for _ in range(3))
        for observations, actions, earned in self.turns:
            for i in range(num_agents):
                if b in actions[i]:
                    prompts[i].append(last_message(observations[i][b]))
                    completions[i].append(actions[i][b])
                    rewards[i].append(earned[i].get(b, 0.0))
                elif rewards[i]:  # it earns by what others do
                    rewards[i][-1] += earned[i].get(b, 0.0)
        note = getattr(self.env, "note", None)
        if b in self.dropped:
            note = getattr(self.env, "errors", {}).get(b, "the environment has dropped this episode")
        reward = None if note else sum(own.get(b, 0.0) for *_, earned in self.turns for own in earned) / num_agents
        return {"reward": reward, "rewards": rewards, "prompts": prompts, "completions": completions, "note": note}


def last_message(chat):
    """What a prompt, text or chat messages, says last."""
    chat = getattr(chat, "given", chat)  # where it was truncated
    return chat if isinstance(chat, str) else str(chat[-1]["content"])
