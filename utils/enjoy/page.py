"""What `show` found as a page of HTML that needs no other file."""

import base64
import html
import io
import shlex
from pathlib import Path

from utils.cli import UserError, one_line, printable
from utils.enjoy import TEAMS
from utils.enjoy.text import facts, mean_rewards, reward_text, turns
from utils.run.reader import read_curves, read_metrics
from utils.run.report import draw_curves

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


def curves(run):
    """A run's curves.png, or the same drawn anew, as the URL that holds it. Raises UserError."""
    content = read_curves(run)
    if content is None:
        file = io.BytesIO()
        try:
            draw_curves(read_metrics(run), file, run.name)
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(f"{run} has no curves that can be drawn: {one_line(error)}") from error
        content = file.getvalue()
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def page(run, config, samples):
    """What `show` found of a run, whose config.json is given, as HTML without scripts. Raises UserError."""
    args = config["args"]
    run = Path(run).resolve()
    models = in_words(args["model"])
    script = Path(config["command"][0]).stem
    heading = run.name if run.name.startswith(script) else f"{script}: {run.name}"
    body = tag("h1", safe(heading)) + tag("p", safe(f"What its agents write, beside the untouched {models}."))
    means, title = mean_rewards(samples)
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
        *((name, args[name]) for name in chosen if args.get(name) is not None),
        ("versions", str(config.get("versions")).strip("{}").replace("'", "")),
    ]
    flag_texts = [(name, in_words(value)) for name, value in args.items()]
    all_flags = tag("details", tag("summary", "all flags") + table(flag_texts))
    body += tag("h2", "How it was trained") + table(how) + all_flags
    head = HEAD + tag("title", f"{safe(run.name)}: trained and untouched") + tag("style", STYLE)
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}</head>\n<body>\n{body}</body>\n</html>\n'
