"""Figures that README and the pages give of runs are those of the results, wherever these are kept."""

import csv
import json
import re
from functools import cache
from statistics import fmean, median

import pytest
from processes import ROOT

import benchmark.__main__ as driver
from benchmark import cost, side_by_side
from utils import plot
from utils.envs import guess
from utils.run.reader import read_metrics

RESULTS = ROOT / "benchmark/results"


@cache
def page(name):
    return " ".join((ROOT / name).read_text().split())


@cache
def final(group, task, name="final", digits=2):
    """The mean over seeds of what a group's runs end with: their reward, or log-probability."""
    ((_, curves),) = plot.load([f"{group}:{RESULTS / group}/{task}__*"]).items()
    return f"{fmean(getattr(curve, name) for curve in curves):.{digits}f}"


def held_out(run, update):
    """The held-out reward of a real model's run after an update."""
    return f"{read_metrics(ROOT / 'benchmark/real' / run)[update - 1]['eval/reward_mean']:.2f}"


def humaneval():
    """The training reward of each pass over HumanEval, of 8 updates, and the held-out reward after 1, 8 and 16."""
    rows = read_metrics(ROOT / "benchmark/humaneval/ippo_lora_cool")
    passes = [fmean(row["reward_mean"] for row in rows[k : k + 8]) for k in (0, 8)]
    return [f"{x:.2f}" for x in (*passes, *(rows[update - 1]["eval/reward_mean"] for update in (1, 8, 16)))]


def illegal_answers():
    """The percentage of illegal answers in the first and last five updates of IPPO, of PPO and of IPPO's own rates."""
    ends = []
    for run in ("ippo", "ppo", "ippo_slow"):
        rates = [row["illegal_rate"] for row in read_metrics(ROOT / "benchmark/textarena" / run)]
        assert len(rates) == 50
        ends += [f"{fmean(part):.0%}".replace("%", " %") for part in (rates[:5], rates[-5:])]
    return ends


def rewards_at_first():
    """The first rewards of the main table by task, the lowest to the highest, as the README rounds them."""
    table = (ROOT / "benchmark/README.md").read_text().partition("<!-- main -->")[2].partition("<!-- end -->")[0]
    rewards = {}
    for task, reward in re.findall(r"^\| (\w+) \| [^|]+ \| 5 \| (-?[\d.]+) \|", table, re.M):
        rewards.setdefault(task, []).append(float(reward))
    ranges = [[f"{bound(rewards[task]):.1f}" for bound in (min, max)] for task in ("tldr", "number", "code", "guess")]
    return [" to ".join(dict.fromkeys(own)) for own in ranges]


def exploitability(variant, seed):
    rows = read_metrics(ROOT / "benchmark/kuhn/results" / f"{variant}__{seed}")
    scores = [row["eval/exploitability"] for row in rows if row["eval/exploitability"] is not None]
    return fmean(scores[-max(1, len(scores) // 10) :])


def ends(variant):
    """The lowest and the highest exploitability that five seeds of a study's rule end with."""
    values = [exploitability(variant, seed) for seed in range(1, 6)]
    return [f"{bound(values):.3f}" for bound in (min, max)]


def kuhn(folder):
    """The exploitability that each of five seeds ends with, and the first updates at which it is under 0.05."""
    last, firsts = [], []
    for seed in range(1, 6):
        rows = [row for row in read_metrics(ROOT / f"{folder}__{seed}") if row["eval/exploitability"] is not None]
        last.append(f"{rows[-1]['eval/exploitability']:.3f}")
        firsts.append(str(next(int(row["global_step"]) // 256 for row in rows if row["eval/exploitability"] < 0.05)))
    return last, firsts


def paid_in_a_round(game, update):
    """What an agent earns in a round of the prisoner's dilemma, the mean of three seeds."""
    folders = [ROOT / "benchmark/dilemma" / f"{game}__{seed}" for seed in (1, 2, 3)]
    shared = 2 if game == "dilemma_sum" else 1  # both are paid what both earn
    return f"{fmean(read_metrics(folder)[update]['reward_mean'] for folder in folders) / 5 / shared:.1f}"


def hanabi_return(seed, update, rule="reading"):
    """The exact expected reward of tiny_hanabi after an update, of 256 matches where it is not -1, the last."""
    rows = read_metrics(ROOT / "benchmark/hanabi" / f"{rule}__{seed}")
    steps = [row["global_step"] // 256 for row in rows]
    return f"{rows[-1 if update < 0 else steps.index(update)]['eval/return']:.2f}"


def bridge(script, seeds):
    """The first held-out reward of tiny_bridge_2p with each seed, then the last of each."""
    rows = [read_metrics(ROOT / f"benchmark/bridge/{script}__{seed}") for seed in seeds]
    return [f"{each[k]['eval/reward_mean']:.1f}" for k in (0, -1) for each in rows]


def first_rewards(run, part):
    """The mean reward of some updates of IPPO on all weights of a real model."""
    return f"{fmean(row['reward_mean'] for row in read_metrics(ROOT / f'benchmark/{run}ippo')[part]):.2f}"


def seconds_on_questions(place):
    """Medians of an update's seconds, and of its sampling's: of TRL's and of our run on questions."""
    rows = [read_metrics(ROOT / "benchmark" / run) for run in ("peer_real/trl_grpo_2", "reasoning/magrpo")]
    parts = [
        [(row[key], row[key] + row["time/reward"] + row["time/learn"]) for row in own]
        for own, key in zip(rows, ("time/sample", "time/play"))
    ]
    return [f"{median(seconds[1 - place] for seconds in own):.0f}" for own in parts]


def leduc(update, seed):
    """Exploitability of Leduc poker with a moving reference."""
    rows = read_metrics(ROOT / f"benchmark/leduc/results/moving_reference__{seed}")
    return f"{rows[update - 1]['eval/exploitability']:.2f}"


RULES = ("moving_reference", "initial_reference", "nothing")


def five(game, rule, name, *updates):
    """A column of a study's five seeds after some updates, as far as they went, from the lowest to the highest."""
    runs = [read_metrics(ROOT / f"benchmark/{game}/results/{rule}__{seed}") for seed in range(1, 6)]
    return sorted(rows[update - 1][name] for rows in runs for update in updates if update <= len(rows))


def lowest_and_highest(*args):
    values = five(*args)
    return [f"{value:.2f}" for value in (values[0], values[-1])]


def reasoning():
    """Held-out rewards on syllogisms; the first and last four rewards of solver and judge; their updates."""
    rows = read_metrics(ROOT / "benchmark/reasoning/syllogism")
    scores = [rows[update - 1]["eval/reward_mean"] for update in (1, 16, 32)]
    rows = read_metrics(ROOT / "benchmark/reasoning/judge")
    ends = [fmean(row[f"agent_{i}/reward_mean"] for row in own) for i in (0, 1) for own in (rows[:4], rows[-4:])]
    return [f"{x:.2f}" for x in (*scores, *ends)] + [str(len(rows))]


@cache
def falls_on_code():
    """How far the reward of each main run, smoothed over nine updates, falls below what it was, by "GROUP__SEED"."""
    falls = {}
    for group in driver.PICTURES["main"].values():
        for folder in sorted((RESULTS / group).glob("code__*")):
            rewards = [row["reward_mean"] for row in read_metrics(folder)]
            smooth = [fmean(rewards[max(0, k - 4) : k + 5]) for k in range(len(rewards))]
            falls[f"{group}{folder.name.removeprefix('code')}"] = max(
                max(smooth[: k + 1]) - value for k, value in enumerate(smooth)
            )
    return falls


def test_the_runs_that_fall_are_those_of_the_page():
    large = {"ippo_critic__4", "ippo_critic__5", "iac_critic__1", "iac_head__2", "iac_head__3"}
    assert {name for name, fall in falls_on_code().items() if fall > 0.3} == large | {"ippo_head__5"}


SENTENCES = [  # page, a sentence, its figures
    ("README.md", "in its first update it earns {}, {}, {} and {}.", rewards_at_first),
    (
        "benchmark/real.md",
        "earned {} and {} of 4 in its passes, and on the held-out problems {} after the first update, {} after 8 and "
        "{} after 16",
        humaneval,
    ),
    (
        "docs/games.md",
        "{} of the answers in the first five updates and {} in the last five with IPPO, {} and {} with PPO",
        lambda: illegal_answers()[:4],
    ),
    ("docs/games.md", "mini-batches of 16 they hardly do: {} and {}", lambda: illegal_answers()[4:]),
    (
        "benchmark/README.md",
        "Five other runs on `code` fall by {:.2f} to {:.2f} of the reward",
        lambda: [bound(sorted(falls_on_code().values())[-6:-1]) for bound in (min, max)],
    ),
    ("benchmark/README.md", "fall by {:.2f} at the most.", lambda: [sorted(falls_on_code().values())[-7]]),
    (
        "docs/algorithms.md",
        "in IPPO (`tldr`: {} and {}) and in IAC ({} and {};",
        lambda: [final(f"{script}_{kind}", "tldr") for script in ("ippo", "iac") for kind in ("critic", "head")],
    ),
    (
        "docs/algorithms.md",
        "after 4,608 samples its text is at {}, that of IPPO at {}.",
        lambda: [final(group, "tldr", "logprob") for group in ("ppo", "ippo_critic")],
    ),
    (
        "docs/algorithms.md",
        "it has {} nats a token under the initial model, whose own text has -0.33; that of CoMLRL's IPPO, which has no "
        "penalty, {} ([figures]",
        lambda: [final(group, "tldr", "logprob") for group in ("ippo_third", "comlrl_ippo")],
    ),
    (
        "README.md",
        "come from {} after the first update to {} after 32 on held-out posts",
        lambda: [held_out("ippo_lora_cool", update) for update in (1, 32)],
    ),
    (
        "docs/report.md",
        "Two agents of SmolLM2-135M come from {} to {} of 3 on held-out posts",
        lambda: [held_out("ippo_lora_cool", update) for update in (1, 32)],
    ),
    (
        "docs/report.md",
        "comes to an exploitability of {} to {} (five seeds",
        lambda: ends("moving_reference"),
    ),
    (
        "docs/report.md",
        "and to {} to {} (five seeds, four of them below 0.03) from a model that was made to tell its cards apart",
        lambda: sorted(kuhn("benchmark/kuhn_reading/reading")[0])[::4],
    ),
    (
        "docs/games.md",
        "exploitability ends between {} and {} (five seeds)",
        lambda: ends("moving_reference"),
    ),
    ("benchmark/games.md", "to between {} and {} with GAE's lambda of 0.85", lambda: ends("moving_reference")),
    ("benchmark/games.md", "{} and {} with whole returns", lambda: ends("moving_reference_whole_returns")),
    ("benchmark/games.md", "{} and {} with one baseline for", lambda: ends("moving_reference_one_baseline")),
    (
        "benchmark/games.md",
        "end between {} and {} with the same reference",
        lambda: ends("moving_reference_two_agents"),
    ),
    ("benchmark/games.md", "stops at {} to {}, with all seeds", lambda: ends("initial_reference")),
    ("benchmark/games.md", "for the legal moves: {} to {} in the end", lambda: ends("little_entropy_lowered")),
    (
        "docs/games.md",
        "IPPO comes from {}, {} and {} after the first update to {}, {} and {} after 200 updates",
        lambda: bridge("ippo", (1, 2, 3)),
    ),
    ("docs/games.md", "MAAC with the same flags comes to {}, {} and {}:", lambda: bridge("maac", (1, 2, 3))[3:]),
    (
        "docs/games.md",
        "what they earn in a round falls from {} to {} each",
        lambda: [paid_in_a_round("dilemma", update) for update in (0, -1)],
    ),
    (
        "docs/games.md",
        "rises with each step of the references, to {}, {} and {} after 300 updates",
        lambda: [hanabi_return(seed, 300) for seed in (1, 2, 3)],
    ),
    (
        "docs/games.md",
        "IPPO with {} and {} (seeds 1 and 2), MAGRPO with 16 episodes of an item (`--num-generations 16 "
        "--train-size 512`) with {}. MAAC ends lower, with {} and {}:",
        lambda: [
            hanabi_return(seed, -1, rule)
            for rule, seed in (("ippo", 1), ("ippo", 2), ("magrpo", 1), ("maac", 1), ("maac", 2))
        ],
    ),
    (
        "docs/games.md",
        "IPPO, without the references, ends with {} from the model that",
        lambda: [hanabi_return(1, -1, "ippo_reading")],
    ),
    (
        "docs/games.md",
        "seed 1 has {} after 375 updates, and seed 3 settles on the safe moves, {} after 495",
        lambda: [hanabi_return(*run, "normalised_rewards") for run in ((1, 375), (3, 495))],
    ),
    (
        "docs/games.md",
        "to {}, {}, {}, {} and {} with seeds 1 to 5 (`benchmark/kuhn_reading`)",
        lambda: kuhn("benchmark/kuhn_reading/reading")[0],
    ),
    (
        "docs/games.md",
        "first after {}, {}, {}, {} and {} updates of 400",
        lambda: kuhn("benchmark/kuhn_reading/reading")[1],
    ),
    (
        "benchmark/real.md",
        "rises from {} after the first update to {} after 16, and is {} after 32",
        lambda: reasoning()[:3],
    ),
    (
        "benchmark/real.md",
        "rises from {}, the mean of its first four updates, to {} in the last four of {}, after which it "
        "was stopped, by",
        lambda: [*reasoning()[3:5], reasoning()[7]],
    ),
    ("benchmark/real.md", "The judge's falls from {} to {}:", lambda: reasoning()[5:7]),
    (
        "benchmark/real.md",
        "the last three updates of 16 is {}, that of ours {} (the first three: {} and {};",
        lambda: [
            first_rewards(run, part) for part in (slice(7, 10), slice(3)) for run in ("peer_real/comlrl_", "real/")
        ],
    ),
    (
        "benchmark/real.md",
        "An update takes TRL {} s and ours {} s, of which {} and {} are sampling",
        lambda: [*seconds_on_questions(0), *seconds_on_questions(1)],
    ),
    (
        "benchmark/real.md",
        "TRL's reward rises from {}, the mean of its first three updates, to {} in the last three of ten, ours from {} "
        "to {} (",
        lambda: [
            f"{fmean(row['reward_mean'] for row in read_metrics(ROOT / 'benchmark' / run)[part]):.2f}"
            for run in ("peer_real/trl_grpo", "reasoning/magrpo")
            for part in (slice(3), slice(7, 10))
        ],
    ),
    (
        "docs/games.md",
        "falls from {}, {} and {} after the first update (seeds 1 to 3) to {}, {} and {} after 200, and to {}, {} and "
        "{} after 400 (`benchmark/leduc`)",
        lambda: [leduc(update, seed) for update in (1, 200, 400) for seed in (1, 2, 3)],
    ),
    (
        "docs/games.md",
        "five seeds have {} on average, with the initial model as the reference (without "
        "`--reference-update-interval`) {}, and with none (`--kl-loss-coef 0`) {}:",
        lambda: [f"{fmean(five('leduc', rule, 'eval/exploitability', 150)):.2f}" for rule in RULES],
    ),
    (
        "docs/report.md",
        "after 19,200 matches, with {} beside {} with one that follows, and {} with none",
        lambda: [f"{fmean(five('leduc', RULES[k], 'eval/exploitability', 150)):.2f}" for k in (1, 0, 2)],
    ),
    (
        "benchmark/games.md",
        "falls from between {} and {} to between {} and {}. It is as easy to exploit as the random player, or easier: "
        "{} to {} after 150 updates, and up to {} before",
        lambda: [
            *lowest_and_highest("leduc", "nothing", "agent_0/entropy", 1),
            *lowest_and_highest("leduc", "nothing", "agent_0/entropy", 100),
            *lowest_and_highest("leduc", "nothing", "eval/exploitability", 150),
            lowest_and_highest("leduc", "nothing", "eval/exploitability", *range(25, 151, 25))[1],
        ],
    ),
    (
        "benchmark/games.md",
        "after 150 updates it is {} at least. With the initial model all five seeds are below the random player by "
        "then, between {} and {}, and with a moving one four of five, between {} and {}.",
        lambda: [
            min(lowest_and_highest("leduc", rule, "agent_0/entropy", 150)[0] for rule in RULES[:2]),
            *lowest_and_highest("leduc", "initial_reference", "eval/exploitability", 150),
            *lowest_and_highest("leduc", "moving_reference", "eval/exploitability", 150),
        ],
    ),
    (
        "benchmark/games.md",
        "is ahead after as many matches, with {} beside {}.",
        lambda: [f"{fmean(five('kuhn', rule, 'eval/exploitability', 75)):.2f}" for rule in RULES[:2]],
    ),
    (
        "benchmark/games.md",
        "fall to {}, {} and {}. The initial model as the reference has {} at least in its first 200 updates",
        lambda: [
            *(leduc(400, seed) for seed in (1, 2, 3)),
            lowest_and_highest("leduc", "initial_reference", "eval/exploitability", 1, *range(25, 201, 25))[0],
        ],
    ),
    (
        "docs/report.md",
        "comes to {}, {} and {} in exact reward",
        lambda: [hanabi_return(seed, -1) for seed in (1, 2, 3)],
    ),
    (
        "docs/games.md",
        "they learn to cooperate, and earn {} each",
        lambda: [paid_in_a_round("dilemma_sum", -1)],
    ),
]


@pytest.mark.parametrize("name, sentence, figures", SENTENCES, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_a_sentence_has_the_figures_of_the_kept_runs(name, sentence, figures):
    assert sentence.format(*figures()) in page(name)


def test_the_rows_of_real_models_are_of_the_kept_runs():
    rows = re.findall(r"^\| (?:IPPO|MAGRPO|PPO|IAC|MAAC).*$", (ROOT / "benchmark/real.md").read_text(), flags=re.M)
    folders = {path.name for path in (ROOT / "benchmark/real").iterdir()}
    shown = set()
    for row in rows:
        label, *figures = [cell.strip().removesuffix(" (10)") for cell in row.strip("|").split("|")]
        middle = 10 if "(10)" in row else 12
        for run in sorted(folders):
            columns = read_metrics(ROOT / "benchmark/real" / run)
            if columns[middle - 1]["eval/reward_mean"] is None:
                continue
            logprob = f"{fmean(row['reference_logprob'] for row in columns[-3:]):.2f}"
            if figures[:4] == [*(held_out(run, update) for update in (1, middle, len(columns))), logprob]:
                shown.add(run)
    assert shown == folders and len(rows) == len(folders)


def test_the_table_of_humaneval_is_of_the_kept_answers():
    kept = json.loads((ROOT / "benchmark/humaneval/greedy.json").read_text())
    means = {}
    for key in ("reward", "main", "python", "aux", "passed"):
        means[key] = [fmean(row[team][key] for row in kept) for team in ("untouched", "trained")]
    rows = [f"| reward | {means['reward'][0]:.2f} | {means['reward'][1]:.2f} |"]
    names = {"main": "the function is there", "python": "the whole is Python", "aux": "there is a helper `aux`"}
    for key, name in (names | {"passed": "share of asserts that pass"}).items():
        rows.append(f"| {name} | {means[key][0]:.0%} | {means[key][1]:.0%} |")
    whole = [sum(row[team]["passed"] == 1 for row in kept) for team in ("untouched", "trained")]
    rows.append(f"| all asserts pass | {whole[0]} of {len(kept)} | {whole[1]} of {len(kept)} |")
    assert "\n".join(rows) in (ROOT / "benchmark/real.md").read_text() and len(kept) == 32


def of_seeds(group, task):
    """Of seeds 1, 2, 3: first reward, that of the last tenth, held out in the end; seconds of the run, of rewards."""
    manifest = json.loads((RESULTS / "manifest.json").read_text())
    columns = []
    for seed in (1, 2, 3):
        name = f"{group}/{task}__{seed}"
        rows = read_metrics(RESULTS / name)
        rewards = [row["reward_mean"] for row in rows]
        held = [row["eval/reward_mean"] for row in rows if row["eval/reward_mean"] is not None][-1]
        with open(RESULTS / name / "times.csv") as file:
            spent = sum(float(row["time/reward"]) for row in csv.DictReader(file))
        end = fmean(rewards[-(len(rewards) // 10) :])
        columns.append([rewards[0], end, held, manifest[name]["seconds"], spent])
    return list(zip(*columns))


def test_the_rows_of_tasks_are_of_the_kept_runs():
    seconds = {}
    for group, task, label, most in (
        ("ippo_head", "number", "`number`, three turns, value heads", "2.571"),
        ("ippo_critic", "code", "`code`, one turn, critics", "4"),
    ):
        first, last, _, walls, seconds[task] = of_seeds(group, task)
        rewards = [", ".join(f"{reward:.2f}" for reward in own) for own in (first, last)]
        wall = f"{min(walls):.0f} to {max(walls):.0f} s"
        assert f"| {label} | {rewards[0]} | **{rewards[1]}** | {most} | {wall} |" in page("docs/tasks.md")
    spent = f"takes {min(seconds['code']):.0f} to {max(seconds['code']):.0f} seconds of these runs"
    assert spent in page("docs/tasks.md")


def test_the_rows_of_ppo_are_of_the_kept_runs():
    for seed, first, last, held in zip((1, 2, 3), *of_seeds("ppo", "guess")[:3]):
        row = f"| {seed} | {first:.2f} | {last:.2f} | **{held:.3f}**, {held / guess.optimum(6):.0%}".replace("%", " %")
        assert row in page("docs/ppo.md")
    ends = [", ".join(f"{x:.2f}" for x in own) for own in of_seeds("ppo", "tldr")[1:3]]
    assert f"end at {ends[0]} with seeds 1, 2 and 3 (held out {ends[1]})" in page("docs/ppo.md")


@pytest.mark.rest
def test_the_tables_of_the_pages_are_of_the_kept_results(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "draw_curves", lambda *_: None)  # pictures take longer than tables
    monkeypatch.setattr(plot, "draw", lambda *_, **__: None)
    tables = driver.pictures(RESULTS, tmp_path) | {"probes": driver.probe_lines(RESULTS / "probes")}
    for path in (ROOT / "README.md", ROOT / "benchmark/README.md", ROOT / "benchmark/probes.md"):
        folder = tmp_path / path.parent.name
        folder.mkdir(exist_ok=True)
        driver.fill([path], tables, folder)
        assert (folder / path.name).read_text() == path.read_text(), path


def test_the_table_of_costs_is_of_the_kept_measurements():
    lines = (ROOT / "benchmark/cost/cost.jsonl").read_text().splitlines()
    measured = {json.dumps({name: row[name] for name in cost.FIRST}): row for row in map(json.loads, lines)}
    text = (ROOT / "benchmark/README.md").read_text()
    assert f"<!-- cost -->\n\n{cost.table_of(measured, tuple(cost.AXES))}\n<!-- end -->" in text
    assert len(measured) == sum(len(values) for values in cost.AXES.values()) - 3  # of which axes share some


def test_the_table_of_speeds_is_of_the_kept_measurements():
    speeds = json.loads((RESULTS / "side_by_side.json").read_text())
    text = (ROOT / "benchmark/README.md").read_text()
    table = "\n".join(side_by_side.table_of(speeds)).rstrip()
    assert f"<!-- side by side -->\n\n{table}\n\n<!-- end -->" in text
    lowest, highest = {}, {}
    for row in table.splitlines()[2:]:
        label, *_, times = [cell.strip() for cell in row.strip("|").split("|")]
        lowest[label] = min(float(times), lowest.get(label, 99.0))
        highest[label] = max(float(times), highest.get(label, 0.0))
    for label in lowest:
        assert re.search(rf"^\| CoMLRL [\d.]+, {label} \|.*\| {lowest[label]} to {highest[label]} \|", text, flags=re.M)
    for name in ("README.md", "docs/report.md"):
        assert f"take {min(lowest.values())} to {max(highest.values())} times as long" in page(name)


SYSTEMS = {  # of the table "Beside other systems": theirs and ours
    "CoMLRL 1.2.6, IPPO": ("comlrl_ippo", "ippo_third"),
    "CoMLRL 1.4.3, IAC": ("comlrl_iac", "iac_third"),
    "CoMLRL 1.4.3, MAAC": ("comlrl_maac", "maac_third"),
    "CoMLRL 1.4.3, MAGRPO": ("comlrl_magrpo", "magrpo_third"),
    "AgileRL 2.58, LLMPPO": ("agilerl", "ppo_alone"),
    "TRL 1.12, PPO": ("trl", "ppo_alone"),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_rewards_beside_other_systems_are_of_the_kept_runs(system):
    row = re.search(rf"^\| {re.escape(system)} \|(.*)\|$", (ROOT / "benchmark/README.md").read_text(), flags=re.M)[1]
    theirs, ours = SYSTEMS[system]
    for task, cell in zip(("tldr", "number", "code", "guess"), row.split("|")):
        if any((RESULTS / theirs).glob(f"{task}__*")):
            digits = 3 if task == "number" else 2
            assert cell.strip() == f"{final(theirs, task, digits=digits)}, {final(ours, task, digits=digits)}"
        else:
            assert not cell.strip()


def test_an_exponent_of_what_is_linear_is_one():
    assert cost.exponent([2, 4, 16], [3.0, 9.0, 24.0]) == pytest.approx(1.0)
    assert cost.exponent([1, 10], [5.0, 500.0]) == pytest.approx(2.0)
