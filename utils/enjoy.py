"""See what a finished run's agents write, beside what the untouched model writes on the same held-out items.

    python -m utils.enjoy RUN                               four held-out items in the terminal, with their rewards
    python -m utils.enjoy RUN --items 8 --html page.html    and as a page that needs no other file
    python -m utils.enjoy RUN --prompt "Say a number."      a prompt of your own, for which there is no reward

Task, items, models and sampling are the run's, from RUN/config.json; the same command prints the same again.
"""

import base64
import contextlib
import html
import io
import itertools
import math
import os
import shlex
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import torch
import transformers
import tyro
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from utils.cli import UserError, command_line, flags, one_line, printable
from utils.envs import BUILT_IN as BUILT_IN_ENVS
from utils.envs import Games, load_env
from utils.files import WriteError, read_json, read_rows, write_whole
from utils.models.adapters import add_adapters, check_base, load_adapter
from utils.models.causal_lm import prepare
from utils.models.engine import max_length
from utils.models.loading import check_model, load_model, load_tokenizer, per_agent
from utils.models.lora import read_config
from utils.models.prompts import end_tokens, pad_left, render, reply
from utils.run.report import EVAL_REWARD, draw_curves
from utils.tasks import BUILT_IN as BUILT_IN_TASKS
from utils.tasks import load_items, load_task
from utils.tasks.episodes import Episodes, call
from utils.tasks.lengths import fit_prompts, prompt_limit

ROOT = Path(__file__).resolve().parent.parent  # of the project
TEAMS = ("untouched", "trained")
ROWS = 64  # prompts answered at once
# Flags of a run that must be there, with their types, and what stands for those that only some scripts have
NEEDED = {
    "seed": int,
    "model": (str, list),
    "num_agents": int,
    "eval_size": int,
    "trust_remote_code": bool,
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": int,
    "num_turns": int,
    "max_new_tokens": int,
    "dtype": str,
    "mixed_precision": str,
    "attn_implementation": str,
}
ABSENT = {
    "task": None,
    "do_sample": True,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_output_tokens": 0,
    "max_model_len": None,
    "early_termination_threshold": None,
    "reward_timeout": None,
    "max_prompt_length": None,
    "long_prompts": "drop",
    "vllm_config": {},
}


@flags
class EnjoyArgs:
    """What is shown, and how it is sampled."""

    run: tyro.conf.Positional[str] = ""  # folder of a finished run
    items: PositiveInt = 4  # held-out items, or seeds of the environment: the first of the run's
    prompt: str | None = None  # a prompt of your own in their place
    html: str | None = None  # a page to write too; what is there is replaced
    seed: NonNegativeInt = 1  # seed of the sampling, the same for both teams
    do_sample: bool = True  # sample as the run did; --no-do-sample: take the likeliest token
    temperature: PositiveFloat | None = None  # the logits are divided by it; none: as in the run
    task: str | None = None  # a FILE.py that the run names as its task, or its script: it is imported, and so run
    env: str | None = None  # a FILE.py that the run names as its environment, or its script: it is imported, and so run
    trust_remote_code: bool = False  # run code that comes with the run's models


@flags
class Args(EnjoyArgs):
    """All flags."""


@dataclass
class Writer:
    """A model and its tokenizer; where the model has adapters, the one that is on, or none."""

    model: Any
    tokenizer: Any
    adapter: str | None = None

    @property
    def has_adapters(self):
        """Whether it is of a run of adapters, though none may be on."""
        return isinstance(self.model, peft.PeftModel)


def read_run(run):
    """A finished run's config.json, and its flags, under one name for all scripts. Raises UserError.

    Of `task` and `env` the flags have the one that the run was of, the script itself where neither was chosen.
    """
    path = Path(run) / "config.json"
    if not os.path.isfile(path):  # False too for what can be no name
        problem = "it has no config.json" if os.path.isdir(run) else "there is no such folder"
        raise UserError(f"a run's folder is needed, and {run or 'none'} is none: {problem}")
    config = read_json(path)
    saved = config.get("args")
    values = ABSENT | (saved if isinstance(saved, dict) else {})
    in_environment = "env" in values and not values["task"]
    values["env"] = (values["env"] or script_of(config)) if in_environment else None
    values["task"] = None if in_environment else values["task"] or script_of(config)
    values.setdefault("num_turns", values.get("max_turns") or (6 if in_environment else 1))
    values.setdefault("max_new_tokens", values.get("max_output_tokens") or (8 if in_environment else 72))
    for name, kind in NEEDED.items():
        if not isinstance(values.get(name), kind):
            raise UserError(f"{path} is not of these scripts: {name} is {one_line(repr(values.get(name)), 80)}")
    if not torch.cuda.is_available():
        values["attn_implementation"] = values["attn_implementation"].replace("flash_attention_2", "sdpa")
    try:
        command = Path(config["command"][0]).name
        rows = read_rows(path.parent / "metrics.csv")
        updates = int(config["num_updates"])
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{run} has no config.json and metrics.csv that can be read: {one_line(error)}") from error
    missing = [i for i in range(values["num_agents"]) if not (path.parent / f"agent_{i}").is_dir()]
    if len(rows) < updates or missing:
        problem = f"{len(rows)} of {updates} updates are done" if rows else "no update is done"
        if missing:
            problem += f", and there is no agent_{missing[0]}"
        raise UserError(f"{run} is not finished: {problem}; go on with: python {command} --resume {run}")
    return config, SimpleNamespace(**values)


def script_of(config):
    """The run's script: where it was, or else of that name here."""
    script = str(config.get("script"))
    return script if os.path.isfile(script) else Path(script).name


def load_teams(run, args):
    """What the run's agents started from, and the agents, N writers each. Raises UserError."""
    names = per_agent("--model", args.model, args.num_agents)
    folders = [Path(run) / f"agent_{i}" for i in range(args.num_agents)]
    for name in dict.fromkeys(names):
        check_model(name, "--model", args.trust_remote_code, args.model_config, "--model-config")

    def load(name, flag="--model", settings=None):
        model = load_model(str(name), flag, args.dtype, args.attn_implementation, args.trust_remote_code, settings)
        prepare(model, name, args.mixed_precision)
        tokenizer = load_tokenizer(str(name), flag, args.trust_remote_code, settings)
        return Writer(model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer)

    bases = {name: load(name, settings=args.model_config) for name in dict.fromkeys(names)}
    untouched = [bases[name] for name in names]
    if not hasattr(args, "lora_rank"):
        return untouched, [load(path, "the agent in") for path in folders]
    base = untouched[0]
    for path in folders:
        check_base(path, base.model, names[0])
    config = read_config(folders[0] / "actor")
    config.base_model_name_or_path = None
    adapters = [f"agent_{i}_actor" for i in range(args.num_agents)]
    base.model = add_adapters(base.model, config, adapters)
    for path, adapter in zip(folders, adapters):
        load_adapter(path / "actor", base.model, adapter)
    return untouched, [Writer(base.model, base.tokenizer, adapter) for adapter in adapters]


# --- Writing ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def respond(writer, rows, args):
    """Continue B prompts, lists of ids: B lists of new ids, of which the last may be an end."""
    model = writer.model
    ends = end_tokens(model, writer.tokenizer)
    config = {
        "max_new_tokens": args.max_new_tokens,
        "min_new_tokens": args.min_output_tokens,
        "eos_token_id": ends,
        "pad_token_id": writer.tokenizer.pad_token_id,
        "repetition_penalty": float(args.repetition_penalty),
    }
    if args.do_sample:
        config |= {
            "do_sample": True,
            "temperature": float(args.temperature),
            "top_p": float(args.top_p),
            "top_k": args.top_k,
            "min_p": args.min_p or None,
        }
    ids, mask = pad_left(rows, writer.tokenizer, model.device)
    ids = torch.where(mask > 0, ids, ids.gather(1, mask.argmax(1, keepdim=True)))  # no padding to be penalised
    responses = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(ids.device.type, torch.bfloat16, args.mixed_precision == "bf16"))
        if writer.has_adapters:
            if writer.adapter:
                model.set_adapter(writer.adapter)
            else:
                stack.enter_context(model.disable_adapter())
            model = model.get_base_model()
        model.generation_config = transformers.GenerationConfig(**config)  # in place of what came with the model
        takes_padding = not getattr(model, "recomputes", False)
        size = ROWS if takes_padding else 1
        for some_ids, some_mask in zip(ids.split(size), mask.split(size)):
            if not takes_padding:
                some_ids, some_mask = some_ids[:, some_mask[0] > 0], some_mask[:, some_mask[0] > 0]
            continued = model.generate(input_ids=some_ids, attention_mask=some_mask, use_cache=takes_padding)
            responses += continued[:, some_ids.shape[1] :].tolist()
    return [up_to_end(response, ends) for response in responses]


def up_to_end(ids, ends):
    """The ids up to and including the first end."""
    for k, token in enumerate(ids):
        if token in ends:
            return ids[: k + 1]
    return ids


def limit_of(writer, args):
    """The PromptLimit of a model."""
    longest = "max_output_tokens" if hasattr(args, "max_output_tokens") else "max_new_tokens"
    return prompt_limit(writer.model.config, args, longest)


def encode(writer, prompts, args):
    """Token ids of prompts, strings with special tokens included. Raises UserError where there is no room."""
    return limit_of(writer, args).encode(prompts, writer.tokenizer)


def play(team, episodes, args):
    """Play Episodes of a task, or Games, turn by turn, as the run's script does: a dict for each.

    An agent on adapters reads on in its transcript of an episode, any other a prompt of its own in each turn.
    """
    on_adapters = team[0].has_adapters
    room = max_length(team[0].model.config, args) or math.inf
    ids = [{} for _ in team]  # of each agent: what it has read and written, by episode
    rewards = [[[] for _ in team] for _ in episodes.prompt_history]
    running = [k for k in range(len(rewards)) if k not in episodes.dropped]
    for turn in range(args.num_turns):
        if not running:
            break
        prompts = []
        texts = []
        for i, (writer, own) in enumerate(zip(team, ids)):
            if on_adapters and turn > 0:
                prompts.append([episodes.messages(k)[i] for k in running])
            else:
                prompts.append(episodes.prompts(i, running, writer.tokenizer))
                own.update(zip(running, encode(writer, prompts[i], args)))
            responses = respond(writer, [own[k] for k in running], args)
            for k, response in zip(running, responses):
                own[k] = own[k] + response
            texts.append(writer.tokenizer.batch_decode(responses, skip_special_tokens=True))
        raw_rewards, _ = episodes.reward_func(running, prompts, texts)
        answered = running
        running = []
        for k, agent_rewards in zip(answered, zip(*raw_rewards)):
            for earned, reward in zip(rewards[k], agent_rewards):
                earned.append(reward)
            if k in episodes.truncated or is_last(turn, agent_rewards, args):
                continue
            next_prompts = episodes.external_transition(k)
            if next_prompts is None:
                continue
            episodes.add_prompts(k, next_prompts)
            if on_adapters:
                for writer, own, message in zip(team, ids, episodes.messages(k)):
                    own[k] = own[k] + reply(message, own[k][-1], writer.tokenizer)
            if not on_adapters or max(len(own[k]) for own in ids) + args.max_new_tokens <= room:
                running.append(k)
    episodes.finish()
    played = []
    for k, responses in enumerate(episodes.response_history):
        prompts = []
        for own, own_responses in zip(episodes.prompt_history[k], responses):
            prompts.append([last_message(prompt) for prompt in own[: len(own_responses)]])
        note = episodes.dropped[k] if k in episodes.dropped else None
        played.append(episode(rewards[k], prompts, responses, note))
    return played


def is_last(turn, agent_rewards, args):
    """Whether an episode ends after a turn with these rewards of the agents."""
    threshold = args.early_termination_threshold
    good_enough = threshold is not None and sum(agent_rewards) / len(agent_rewards) > threshold
    return good_enough or turn + 1 == args.num_turns


def play_prompt(team, task, item, args):
    """Each agent's response to a prompt of the user's, put as the task puts an item's where it can."""
    prompts = []
    responses = []
    formatters = getattr(task, "formatters", None)
    formatters = formatters if isinstance(formatters, (list, tuple)) else [formatters] * len(team)
    for i, (writer, formatter) in enumerate(zip(team, formatters)):
        prompt = [{"role": "user", "content": item["prompt"]}]
        with contextlib.suppress(Exception):  # a formatter that wants more of an item, or none
            formatted = call(formatter, item, agent=i, num_agents=len(team))
            prompt = formatted if item["prompt"] in last_message(formatted) else prompt
        prompts.append([last_message(prompt)])
        ids = respond(writer, encode(writer, [render(prompt, writer.tokenizer)], args), args)
        responses.append(writer.tokenizer.batch_decode(ids, skip_special_tokens=True))
    return episode([[] for _ in team], prompts, responses, "a prompt of your own has none")


def last_message(prompt):
    """What a prompt, text or chat messages, says last."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def episode(rewards, prompts, completions, note=None):
    """An episode as a dict; a note says why there is no reward."""
    reward = None if note else sum(map(sum, rewards)) / len(rewards)
    return {"reward": reward, "rewards": rewards, "prompts": prompts, "completions": completions, "note": note}


def allow(run, args, task=None, env=None, trust_remote_code=False):
    """Take from a run's folder, which may be a stranger's, no code to run but the project's own and what is named here.

    Raises UserError for other code, which the flags in its config.json ask for.
    """
    for name, named, built_in in (("task", task, BUILT_IN_TASKS), ("env", env, BUILT_IN_ENVS)):
        there = getattr(args, name)
        of_project = str(there).endswith(".py") and Path(there).resolve().parent == ROOT
        if named is not None:
            setattr(args, name, named)
        elif there is not None and there not in built_in and not of_project:
            code = f"the code in {one_line(Path(there).name, 80)}"
            raise UserError(f"{run} takes {code}: add --{name} FILE.py, if you trust it, and that is run")
    if args.trust_remote_code and not trust_remote_code:
        raise UserError(f"{run} takes the code that comes with its models: add --trust-remote-code, if you trust it")


def show(run, items=4, prompt=None, seed=1, do_sample=True, temperature=None, **code):
    """What both teams write, a dict for each item: the `item`, and the episodes of `untouched` and `trained`.

    An episode has the team's `reward` (or None, and a `note` that says why) and, lists of N lists over the turns,
    `rewards`, `prompts` (the last message of each) and `completions`. `code` is what `allow` takes. Raises UserError.
    """
    _, args = read_run(run)
    allow(run, args, **code)
    args.do_sample = do_sample and args.do_sample
    args.temperature = temperature or args.temperature
    if prompt is not None and (not prompt.strip() or prompt != prompt.encode(errors="replace").decode()):
        raise UserError(f"--prompt takes a text, got {one_line(ascii(prompt), 80)}")
    if args.task:
        subject = load_task(args.task, args.num_agents, args.num_turns)
    else:
        subject, _ = load_env(args.env, args.num_turns)
    if prompt is not None:
        chosen = [{"prompt": prompt}]
    elif args.task:
        chosen = load_items(subject, args, args.seed, 0)[1]
    else:
        chosen = [{"seed": 500_000 + 1_000_000 * args.seed + k} for k in range(items)]
    if not chosen:
        raise UserError(f"--task {args.task} has no held-out items; --prompt takes one of your own")
    teams = load_teams(run, args)
    if args.task and prompt is None:
        readers = [(writer.tokenizer, limit_of(writer, args)) for writer in teams[0]]
        _, held_out = fit_prompts(subject, args, readers, 0, [], chosen)
        chosen = [held_out[k] for k in range(min(items, len(held_out)))]
    shown = []
    for team in teams:
        transformers.set_seed(seed)
        if prompt is not None:
            shown.append([play_prompt(team, subject, chosen[0], args)])
        elif args.task:
            readers = () if team[0].has_adapters else [(writer.tokenizer, limit_of(writer, args)) for writer in team]
            episodes = Episodes(subject, chosen, args.num_agents, args.num_turns, args.reward_timeout, readers)
            shown.append(play(team, episodes, args))
        else:
            shown.append(play(team, Games(subject, chosen, args.reward_timeout), args))
    return [{"item": item} | dict(zip(TEAMS, pair)) for item, *pair in zip(chosen, *shown)]


# --- Showing ----------------------------------------------------------------------------------------------------------


def mean_rewards(samples):
    """(Each team's mean reward over the samples in which both have one, by name, how many these are in words)."""
    pairs = [[sample[name]["reward"] for name in TEAMS] for sample in samples]
    pairs = [pair for pair in pairs if None not in pair]
    means = {name: sum(x) / len(x) for name, x in zip(TEAMS, zip(*pairs))}
    return means, f"mean reward over {len(pairs)} item{'s' * (len(pairs) != 1)}"


def reward_text(team):
    return f"no reward: {team['note']}" if team["note"] else f"reward {team['reward']:.3f}"


def turns(team, agent):
    """Prompt and response of an agent in each turn, and its reward, where the team's does not say it."""
    rewards = team["rewards"]
    texts = [f"reward {reward:.3f}" for reward in rewards[agent]]
    if team["note"] or len(rewards[agent]) == 1 and len({*map(tuple, rewards)}) == 1:
        texts = [""] * len(team["completions"][agent])
    return zip(team["prompts"][agent], team["completions"][agent], texts)


def facts(item):
    """What an item holds, as pairs of texts; numbers of six digits."""
    values = item if isinstance(item, dict) else {"item": item}
    return [(str(name), f"{x:.6g}" if isinstance(x, float) else str(x)) for name, x in values.items()]


def as_text(samples, width=None):
    """The samples for a terminal, the two teams in columns."""
    width = width or min(160, shutil.get_terminal_size((120, 24)).columns)
    column = max(20, (width - 3) // 2)
    lines = []
    for k, sample in enumerate(samples, 1):
        lines += ["", f"--- item {k} of {len(samples)} ".ljust(width, "-")]
        lines += [line for fact in facts(sample["item"]) for line in textwrap.wrap(": ".join(fact), width)]
        for agent in range(len(sample["trained"]["completions"])):
            cells = [["", f"agent {agent}, {name}:"] for name in TEAMS]
            for cell, name in zip(cells, TEAMS):
                for turn, (prompt, text, reward) in enumerate(turns(sample[name], agent)):
                    cell += [f"> {one_line(prompt, column - 2)}"] if turn else []
                    text += f"  ({reward})" if reward else ""
                    cell += [line for part in text.split("\n") for line in textwrap.wrap(part, column)]
            for row in itertools.zip_longest(*cells, fillvalue=""):
                lines.append(" | ".join(text.ljust(column) for text in row).rstrip(" |"))
        lines += ["", *(f"{name}: {reward_text(sample[name])}" for name in TEAMS)]
    means, title = mean_rewards(samples)
    lines += ["", f"{title}: " + ", ".join(f"{name} {x:.3f}" for name, x in means.items())] if means else []
    return printable("\n".join(lines))


STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #566072; --paper: #fff; --card: #f4f6f8; --line: #c9d0d9;
  --mark: #0a5bab }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #a4adba; --paper: #14181e; --card: #1d232b; --line: #46515e; --mark: #7db8f5 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem } h2 { font-size: 1.25rem; margin: 2.5rem 0 1rem }
h3, h4 { font-size: 1rem; margin: 0 0 .5rem } h4, dt, summary, .soft { color: var(--soft); font-size: .875rem }
p, dd, b { display: block; white-space: pre-wrap; margin: 0 0 .5rem } summary { cursor: pointer; margin: 0 0 .5rem }
figure { margin: 1.5rem 0; overflow-x: auto } img { display: block; width: 100%; min-width: 40rem; background: #fff }
article { border-top: 1px solid var(--line); padding: 1.25rem 0 .25rem }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; margin: .5rem 0 1.25rem }
.side { background: var(--card); border-left: 4px solid var(--line); padding: .75rem 1rem .25rem; min-width: 0 }
.trained { border-color: var(--mark) } .trained h4, .trained b { color: var(--mark) }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0 1.25rem; margin: .5rem 0 }
@media (max-width: 40rem) { .pair, dl { grid-template-columns: minmax(0, 1fr) } }
"""
HEAD = """<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
"""


def tag(name, inner, kind=""):
    """An element around what is HTML already."""
    return f'<{name} class="{kind}">{inner}</{name}>\n' if kind else f"<{name}>{inner}</{name}>\n"


def safe(text):
    """Any text as HTML that shows it."""
    return html.escape(printable(str(text)))


def table(pairs):
    return tag("dl", "".join(tag("dt", safe(name)) + tag("dd", safe(text)) for name, text in pairs))


def in_words(value):
    """A flag's value, not as Python spells it."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else value
    return "none" if text in (None, "", {}) else text


def folded(title, prompt):
    """A prompt, folded where it is long."""
    text = tag("p", safe(prompt), "soft")
    return tag("details", tag("summary", title) + text) if len(prompt) > 100 else text


def beside(titles, inners):
    """The two teams' parts in columns."""
    sides = [tag("div", tag("h4", safe(t)) + x, f"side {name}") for t, x, name in zip(titles, inners, TEAMS)]
    return tag("div", "".join(sides), "pair") if sides else ""


def dialogue(team, agent):
    """All turns of an agent, but for its first prompt."""
    shown = ""
    for turn, (prompt, text, reward) in enumerate(turns(team, agent)):
        shown += folded("what it was told", prompt) if turn else ""
        shown += tag("p", safe(text) if text.strip() else "(nothing)")
        shown += tag("p", reward, "soft") if reward else ""
    return shown


def number(value):
    return tag("b", f"{value:.3f}")


def held_out_rewards(run):
    """The run's own rewards on all its held-out items, before and after, by team; nothing where it has not both."""
    rows = read_rows(run / "metrics.csv")
    before, after = rows[0].get(f"{EVAL_REWARD}_untrained"), rows[-1].get(EVAL_REWARD)
    return {} if before is None or after is None else dict(zip(TEAMS, (before, after)))


def curves(run):
    """A run's curves.png, or the same drawn anew, as the URL that holds it. Raises UserError."""
    file = io.BytesIO()
    try:
        if (run / "curves.png").is_file():
            file.write((run / "curves.png").read_bytes())
        else:
            rows = read_rows(run / "metrics.csv")
            draw_curves(rows, file, run.name)
    except (OSError, KeyError, TypeError) as error:
        raise UserError(f"{run} has no curves that can be read or drawn: {one_line(error)}") from error
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def page(run, samples):
    """What `show` found as a page of HTML that needs no other file, no network, no script. Raises UserError."""
    config, args = read_run(run)
    run = Path(run).resolve()
    models = ", ".join(dict.fromkeys(per_agent("--model", args.model, args.num_agents)))
    script = Path(config["command"][0]).stem
    heading = run.name if run.name.startswith(script) else f"{script}: {run.name}"
    body = tag("h1", safe(heading)) + tag("p", safe(f"What its agents write, beside the untouched {models}."))
    means, title = mean_rewards(samples)
    of_all = held_out_rewards(run)
    body += beside([f"mean reward over all held-out items, {name}" for name in of_all], map(number, of_all.values()))
    image = f'<img alt="Curves of the run: rewards, lengths and losses, update by update" src="{curves(run)}">'
    body += f'<figure tabindex="0">{image}</figure>\n' + tag("h2", "What they write")
    body += tag("p", "Each item is shown as the data has it. Agents read only what they were told.", "soft")
    body += beside([f"{title}, {name}" for name in means], map(number, means.values()))
    for k, sample in enumerate(samples, 1):
        teams = [sample[name] for name in TEAMS]
        inner = tag("h3", f"Item {k} of {len(samples)}") + table(facts(sample["item"]))
        for agent, prompts in enumerate(teams[1]["prompts"]):
            inner += folded(f"what agent {agent} was told", prompts[0]) if prompts else ""
            inner += beside([f"agent {agent}, {name}" for name in TEAMS], [dialogue(team, agent) for team in teams])
        rewards = [tag("b", safe(reward_text(team))) for team in teams]
        body += tag("article", inner + beside(TEAMS, rewards))
    chosen = "task env dataset num_agents num_turns max_new_tokens num_train_epochs seed temperature".split()
    how = [
        ("command", shlex.join(["python", *map(str, config["command"])])),
        ("commit", config.get("git_commit")),
        ("model", models),
        *((name, getattr(args, name)) for name in chosen if getattr(args, name, None) is not None),
        ("versions", str(config.get("versions")).strip("{}").replace("'", "")),
    ]
    flag_texts = [(name, in_words(value)) for name, value in config["args"].items()]
    all_flags = tag("details", tag("summary", "all flags") + table(flag_texts))
    body += tag("h2", "How it was trained") + table(how) + all_flags
    head = HEAD + tag("title", f"{safe(run.name)}: trained and untouched") + tag("style", STYLE)
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}</head>\n<body>\n{body}</body>\n</html>\n'


def main(args):
    """Show what the teams write, and write the page if one is asked for; returns what `show` does."""
    file = Path(args.html or "page.html")
    if os.path.isdir(file) or not os.path.isdir(file.parent):
        raise UserError(f"--html takes a file to write, in a folder that is there, got {one_line(file, 80)}")
    code = {"task": args.task, "env": args.env, "trust_remote_code": args.trust_remote_code}
    samples = show(args.run, args.items, args.prompt, args.seed, args.do_sample, args.temperature, **code)
    print(as_text(samples))
    if args.html:
        try:
            write_whole(file, page(args.run, samples))
        except OSError as error:
            raise WriteError(f"--html {one_line(file, 80)} can't be written: {error.strerror}") from error
        print(f"wrote {file}")
    return samples


if __name__ == "__main__":
    command_line(main, Args, __doc__)
