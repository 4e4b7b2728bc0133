"""What a run shows: its curves, its last samples side by side, and where the time went."""

import math
import re
import shutil
import textwrap

from utils.cli import one_line, printable

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#555555"]  # Okabe and Ito
OF_TEAM = ["#444444"]
EVAL_REWARD = "eval/reward_mean"  # the column of the reward on held-out items
EXACT_SCORES = {"eval/exploitability": "exploitability, exact", "eval/return": "expected return, exact"}  # of games


def draw_curves(rows, path, title, optimum=None):
    """curves.png: reward, response lengths, entropy, value loss, explained variance, log-prob. under the reference."""
    from matplotlib.figure import Figure  # here, so that no start waits for it

    steps = [row["global_step"] for row in rows]
    of_learner = r"(agent_\d+)/(?!reward_mean|response_length|win_rate).*"  # a seat has these three, learner or not
    agents = dict.fromkeys(match[1] for key in rows[0] if (match := re.fullmatch(of_learner, key)))
    figure = Figure(figsize=(12, 6.5))
    figure.suptitle(f"{title}: each update (pale), and means over up to nine", fontsize=10, parse_math=False)
    margins = {"left": 0.055, "right": 0.98, "top": 0.89, "bottom": 0.08, "wspace": 0.25, "hspace": 0.4}
    axes = figure.subplots(2, 3, gridspec_kw=margins).flat  # a layout that is computed takes as long as all the rest
    mark = "o-" if len(steps) < 10 else "-"  # a single point is no line

    def panel(label, lines, colors=COLORS):
        axis = next(axes)
        axis.set_title(label, loc="left", fontsize=11)
        axis.set_xlabel("episodes", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        for color, (name, values) in zip(colors, lines):
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axis.plot(steps, smooth(values), mark, color=color, linewidth=2, markersize=4, label=name)
        if lines:
            axis.legend(frameon=False, fontsize=9)
        return axis

    def per_agent(metric):  # nothing of a metric that an algorithm does not have
        lines = []
        for agent in (*agents, "critic"):  # a team's critic is nobody's
            values = [row.get(f"{agent}/{metric}") for row in rows]
            if values.count(None) < len(values):
                lines.append((agent.replace("_", " "), [math.nan if x is None else x for x in values]))
        return lines

    rewards = [("training", [row["reward_mean"] for row in rows])]
    rewards += [(agent.replace("_", " "), values) for agent, values in own_rewards(rows).items()]
    reward = panel("reward", rewards, [*OF_TEAM, *COLORS])
    evaluations = {EVAL_REWARD: "held-out items"} | EXACT_SCORES
    for (column, label), color in zip(evaluations.items(), ("black", *COLORS)):
        evaluated = [row for row in rows if row.get(column) is not None]
        if evaluated:
            steps_of_them = [row["global_step"] for row in evaluated]
            values = [row[column] for row in evaluated]
            reward.plot(steps_of_them, values, "o", color=color, markersize=5, label=label)
    if optimum is not None:
        reward.axhline(optimum, color="black", linestyle="--", linewidth=1, label="optimal play")
    reward.legend(frameon=False, fontsize=9)
    panel("response length (tokens)", per_agent("response_length"))
    panel("entropy (nats a token)", per_agent("entropy"))
    panel("value loss", per_agent("value_loss"))
    panel("explained variance of the critic", per_agent("explained_variance")).set_ylim(-1.05, 1.05)
    reference_logprobs = [row.get("reference_logprob") for row in rows]
    measured = None not in reference_logprobs  # not in a run that has no reference
    panel("log-prob. a token under the reference", [("team", reference_logprobs)] if measured else [], OF_TEAM)
    figure.savefig(path, dpi=100)


def own_rewards(rows):
    """What each agent earns in each update, where agents earn differently: {agent: list}."""
    names = {name for row in rows for name in row if re.fullmatch(r"agent_\d+/reward_mean", name)}
    own = {}
    for name in sorted(names, key=lambda name: (len(name), name)):
        values = [row["reward_mean"] if row.get(name) is None else row[name] for row in rows]
        if values != [row["reward_mean"] for row in rows]:
            own[name.split("/")[0]] = values
    return own


def smooth(values, reach=4):
    """Each value's mean with up to `reach` neighbours on either side, as many on both."""
    means = []
    for k in range(len(values)):
        near = min(reach, k, len(values) - 1 - k)
        numbers = [x for x in values[k - near : k + near + 1] if not math.isnan(x)]
        means.append(sum(numbers) / len(numbers) if numbers else math.nan)
    return means


def time_table(totals, elapsed):
    """Where the time went, as text: seconds by phase, and of all."""
    totals = {**totals, "start, end": max(0.0, elapsed - sum(totals.values()))}
    lines = [f"{phase:<12}{seconds:>8.1f} s {seconds / elapsed:>7.1%}" for phase, seconds in totals.items()]
    return "\n".join(["", "where the time went", *lines, f"{'in all':<12}{elapsed:>8.1f} s", ""])


def outcome(rows, num_updates, optimum=None):
    """The reward at first and in the end, and the best that there is, where the task knows it, in a line."""
    rewards = [row["reward_mean"] for row in rows]
    own = own_rewards(rows)

    def first_and_last(values):
        last = values[-max(1, len(values) // 10) :]
        return f"{values[0]:.3f} at first, {sum(last) / len(last):.3f} over the last tenth of updates"

    text = f"reward: {first_and_last(rewards)}"
    if own:  # a mean over agents that earn the opposite says nothing
        text += "".join(f"; {agent}: {first_and_last(values)}" for agent, values in own.items())
    elif {(row["reward_mean"], row["reward_std"]) for row in rows} == {(rewards[0], 0.0)}:
        text += ": every episode earned the same"
    against = {name for row in rows for name in row if re.fullmatch(r"eval/agent_\d+/reward_against_.*", name)}
    for column in (EVAL_REWARD, *EXACT_SCORES, *sorted(against)):  # of --eval-against
        evaluated = [(k, row[column]) for k, row in enumerate(rows, 1) if row.get(column) is not None]
        if evaluated:
            update, value = evaluated[-1]
            text += f"; {column}: {value:.3f} {'in the end' if update == num_updates else f'after update {update}'}"
    if optimum is not None:
        text += f"; optimal play: {optimum:.3f}"
    return text


def side_by_side(samples, width=None):
    """Episodes, as in samples.jsonl, as text for a terminal: the agents' answers in columns.

    Of a game, whose item is no more than a seed, also what each read before it answered.
    """
    width = width or min(160, shutil.get_terminal_size((120, 24)).columns)
    lines = []
    for sample in samples:
        texts = sample["completions"]
        column = max(20, (width - 3 * (len(texts) - 1)) // len(texts))
        item = sample["item"]
        is_game = isinstance(item, dict) and set(item) == {"seed"}
        if isinstance(item, dict):
            item = "  ".join(f"{key}: {one_line(value)}" for key, value in item.items())
        earned = f"reward {sample['reward']:.2f}"
        own = sample.get("earned", [sample["reward"]])
        if max(own) - min(own) > 1e-6:
            earned = f"rewards {', '.join(f'{reward:.2f}' for reward in own)}"
        lines += ["", f"sample of update {sample['update']}, {earned}"]
        lines += [*textwrap.wrap(str(item), width), ""]
        cells = []
        for i, text in enumerate(texts):
            cells.append([f"agent {i}:"])
            for line in as_text(text, sample["prompts"][i] if is_game else None).split("\n"):
                cells[i] += textwrap.wrap(line, column)
        for k in range(max(map(len, cells))):
            row = [cell[k] if k < len(cell) else "" for cell in cells]
            lines.append(" | ".join(text.ljust(column) for text in row).rstrip())
    return printable("\n".join(lines))


def as_text(turns, prompts=None):
    """An agent's answers in one episode, of one turn or many, as one text; each after what was read, if given."""
    if isinstance(turns, str):
        return turns if prompts is None else f"{one_line(prompts)} -> {turns}"
    answers = turns if prompts is None else [f"{one_line(read)} -> {text}" for read, text in zip(prompts, turns)]
    return "\n".join(f"[{k}] {text}" for k, text in enumerate(answers, 1))
