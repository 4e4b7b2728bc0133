"""Probes: exact scores against plays of their own, what a run of them prints and writes, and wrong commands."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ippo_llm
from utils import probe
from utils.cli import UserError, parse
from utils.envs import probe as truncation
from utils.tasks import load_task
from utils.tasks import probe as games

SIZES = [f"{game.__name__}-{size}" for game, sizes in games.GAMES.items() for size in sizes]
FEW = [name for name in SIZES if games.game_of(name).num_turns * games.game_of(name).num_tokens <= 4]
HERE = Path(__file__).parent.parent


def play(name, items, answers):
    """What a team earns in an episode of each item, where answers(turn, agent, prompt) are its letters."""
    game = games.game_of(name)
    args = ippo_llm.Args(task="probe", num_agents=game.num_agents, num_turns=game.num_turns)
    env = ippo_llm.TeamEnv(load_task(None, args, ippo_llm), items, args)
    totals = [0.0] * len(items)
    prompts = [[[] for _ in items] for _ in range(game.num_agents)]  # all that an agent has read and said
    observations, turn = env.reset(), 0
    while any(observations):
        actions = []
        for i, observed in enumerate(observations):
            said = {}
            for b, chat in observed.items():
                prompts[i][b] += chat
                said[b] = answers(turn, i, list(prompts[i][b]))
                prompts[i][b].append({"role": "assistant", "content": said[b]})
            actions.append(said)
        observations, rewards, _ = env.step(actions)
        for b, reward in rewards[0].items():
            totals[b] += reward
        turn += 1
    return totals


def all_deals(name):
    return [{"game": name, "deal": deal} for deal in range(len(games.game_of(name).deals))]


@pytest.mark.parametrize("name", FEW)
def test_the_random_players_score_is_the_mean_over_all_that_can_be_said(name):
    game = games.game_of(name)
    answers = [" ".join(answer) for answer in game.answers]
    plans = itertools.product(answers, repeat=game.num_turns * game.num_agents)
    scores = []
    for plan in plans:
        scores += play(name, all_deals(name), lambda turn, agent, _: plan[turn * game.num_agents + agent])
    assert games.score(game, games.mean) == pytest.approx(sum(scores) / len(scores), abs=1e-12)


def shown(prompt):
    """The letters that are shown in each turn."""
    return [message["content"] for message in prompt if message["role"] == "user"]


def best_answer(name):
    """(turn, agent, prompt) -> what the best player says, written down by hand."""
    kind, _, size = name.partition("-")
    return {
        "always": lambda turn, agent, prompt: " ".join("a" * int(size)),
        "copy": lambda turn, agent, prompt: shown(prompt)[-1],
        "critic": lambda turn, agent, prompt: "a",
        "first": lambda turn, agent, prompt: " ".join("a" * int(size)),
        "last": lambda turn, agent, prompt: " ".join("a" * int(size)),
        "delayed": lambda turn, agent, prompt: "a",
        "steps": lambda turn, agent, prompt: shown(prompt)[-1],
        "whole": lambda turn, agent, prompt: shown(prompt)[-1],
        "memory": lambda turn, agent, prompt: shown(prompt)[0],
        "ending": lambda turn, agent, prompt: "b",
        "trap": lambda turn, agent, prompt: "b",
        "noise": lambda turn, agent, prompt: shown(prompt)[-1],
        "roles": lambda turn, agent, prompt: "abcdefgh"[agent],
        "differ": lambda turn, agent, prompt: "abcdefgh"[agent],
        "partner": lambda turn, agent, prompt: shown(prompt)[-1],
        "decider": lambda turn, agent, prompt: shown(prompt)[-1].split()[1],
    }[kind]


@pytest.mark.parametrize("name", SIZES)
def test_the_best_score_is_what_the_best_player_earns(name):
    totals = play(name, all_deals(name), best_answer(name))
    assert games.score(games.game_of(name), max) == pytest.approx(sum(totals) / len(totals), abs=1e-12)


def test_only_letters_are_letters_of_a_team():
    pay = games.game_of("differ-2").pay
    assert [pay(0, [said]) for said in (("a", "b"), ("", "a"), ("ab", "b"), ("a", "a"))] == [1.0, 0.25, 0.25, 0.5]


def test_a_prompt_has_what_was_said_before():
    seen = []
    play("memory-4", all_deals("memory-4")[:1], lambda turn, agent, prompt: seen.append(prompt) or "b")
    assert [len(prompt) for prompt in seen] == [1, 3, 5, 7]
    assert seen[3][:5] == seen[2] and seen[3][5] == {"role": "assistant", "content": "b"}
    assert shown(seen[3])[1:] == ["go", "go", "tell"] and shown(seen[3])[0] in ("a", "b", "c", "d")


def test_items_are_all_deals_equally_often():
    items = games.named_dataset("copy-4", 64, 1, "train")
    assert sorted(items["deal"]) == sorted([*range(4)] * 16)
    assert items["deal"] != games.named_dataset("copy-4", 64, 2, "train")["deal"]


@pytest.mark.parametrize("goes_on, worth", [(0, 0.6), (1, 1.0)])
def test_what_truncated_episodes_are_worth(goes_on, worth):
    reward = goes_on * 0.25 + (1 - goes_on) * 0.6
    assert truncation.worth(reward) == pytest.approx(worth)


def test_the_truncated_game_earns_what_it_says():
    totals = {"a": 0.0, "b": 0.0}
    for seed in range(2000):
        for letter in totals:
            env = truncation.Env()
            env.reset(seed=seed)
            over = False
            while not over:
                _, reward, terminated, truncated, _ = env.step(letter)
                totals[letter] += reward / 2000
                over = terminated or truncated
    assert totals["a"] == pytest.approx(0.6) and totals["b"] == pytest.approx(0.25, abs=0.03)


# --- The command ------------------------------------------------------------------------------------------------------


def run(*words):
    argv = [sys.executable, "-m", "utils.probe", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(argv, capture_output=True, text=True, cwd=HERE, env=environment)


@pytest.mark.parametrize("flag", ["--json", "--picture"])
def test_a_file_to_write_is_looked_at_before_anything_is_played(flag, tmp_path):
    with pytest.raises(UserError, match=f"^{flag} takes a file to write, and {tmp_path} is a folder$"):
        probe.main(parse(probe.Args, ["--command", "python ippo_llm.py", flag, str(tmp_path)]))


@pytest.mark.parametrize("name", ["copy-1", "roles-1", "differ-1", "ending-1"])
def test_a_game_in_which_nothing_can_be_learned_is_refused(name):
    with pytest.raises(UserError, match=f"^--probes {name}: whatever is said earns the most"):
        probe.probe_of(name, {"--num-agents": "INT", "--num-turns": "INT", "--max-new-tokens": "INT"})


@pytest.mark.parametrize(
    "script", ["ppo_llm", *(pytest.param(script, marks=pytest.mark.slow) for script in ("ippo_llm", "iac_llm"))]
)
def test_a_game_is_learned_and_shown(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    own = ["--probes", "always-1", "--episodes", "480", "--output-dir", str(tmp_path / "runs")]
    out = ["--json", str(tmp_path / "of/table.json"), "--picture", str(tmp_path / "of/bars.png")]
    probe.main(parse(probe.Args, ["--command", f"python {script}.py", "--quick", *own, *out]))
    printed = capsys.readouterr().out
    assert "| always-1 | an answer that is always right |" in printed
    assert "1 of 1 probes are learned; interquartile mean of the way 9" in printed.replace("100", "99")
    (entry,) = json.loads((tmp_path / "of/table.json").read_text())["probes"]
    assert entry["first"][0] < 0.3 < entry["random"] + 0.1 and entry["last"][0] > 0.9 and entry["verdict"] == "learned"
    assert (tmp_path / "of/bars.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_run_that_fails_is_told_and_the_others_stay(tmp_path):
    own = ["--probes", "always-1", "copy-4", "--output-dir", tmp_path / "runs", "--episodes", 64]
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "import ippo_llm\n"
        "from utils.cli import command_line\n"
        "if 'copy-4' in sys.argv: sys.exit('a fault')\n"
        "command_line(ippo_llm.main, ippo_llm.Args, '')\n"
    )
    process = run("--command", f"python {script}", *own)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].endswith("1 of 2 probes failed: copy-4")
    assert "| failed |" in process.stdout and "| always-1 |" in process.stdout and "a fault" in process.stdout


WRONG = {
    "python ippo_llm.py --task number": "--command has --task, which each run gets from here",
    "python ippo_llm.py --no-such-flag 1": "^--command: the script has no --no-such-flag$",
    "nosuchprogram ippo_llm.py": "^--command: nosuchprogram can't be run: No such file or directory$",
    "python utils/__init__.py": "^--command: the script has no --task$",
}


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_one_line(command):
    with pytest.raises(UserError, match=WRONG[command]) as error:
        probe.main(parse(probe.Args, ["--command", command]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["nothing", "copy-9", "copy-", "truncation"])
def test_a_wrong_probe_is_one_line(name):
    with pytest.raises(UserError, match=f"^--probes takes always, copy, .*, or one with its size, .*, got {name}$"):
        probe.probes_of(parse(probe.Args, ["--probes", name]), {"--task"})


def test_probes_are_those_that_a_script_can_play(monkeypatch):
    monkeypatch.setattr(games, "score", lambda game, choose: float(choose is max))  # it takes seconds; others check it
    flags = {"--task", "--num-agents", "--num-turns", "--max-new-tokens"}
    names = [each.name for each in probe.probes_of(probe.Args(), flags)]
    assert set(names) == set(SIZES)
    assert "truncation-2" in [each.name for each in probe.probes_of(probe.Args(quick=True), flags | {"--env"})]
    with pytest.raises(UserError, match="the script has no --num-turns, which delayed-4 takes"):
        probe.probes_of(probe.Args(probes=("delayed-4",)), flags - {"--num-turns"})
    (one,) = probe.probes_of(probe.Args(probes=("memory-5",)), flags)
    assert one.words[4:] == ["--num-agents", "1", "--num-turns", "5", "--max-new-tokens", "1"]


@pytest.mark.parametrize(
    "columns, last",
    [
        ({"agent_0/entropy": (2.0, 1.8), "agent_0/explained_variance": (0.0, 0.7)}, 0.7),
        ({"agent_0/entropy": (2.0, 0.5), "agent_0/explained_variance": (0.0, 0.7)}, 0.25),
        ({"agent_0/entropy": (2, 1), "agent_1/entropy": (4, 3), "critic/explained_variance": (0, 0.9)}, 2 / 3),
        ({"agent_0/entropy": (2.0, 1.2)}, 0.6),
    ],
    ids=["values", "entropy", "a team's critic", "no critic"],
)
def test_a_critic_is_scored_by_what_its_values_explain_and_what_is_left_of_the_entropy(tmp_path, columns, last):
    lines = [",".join(columns), *(",".join(str(values[k > 10]) for values in columns.values()) for k in range(20))]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    scores = probe.scores_of(SimpleNamespace(name="critic-4"), tmp_path)  # of the first of 20 updates, of the last two
    assert scores[1] == pytest.approx(last) and scores[0] == (1.0 if len(columns) == 1 else 0.0)


@pytest.mark.parametrize("values, middle", [([3, 1], 2), ([9, 1, 2, 4], 3), ([-50, 1, 2, 3, 7, 100], 3.25)])
def test_the_middle_half_of_the_scores_is_what_counts(values, middle):
    assert probe.middle_mean(values) == middle


def test_the_models_weights_are_the_same_each_time_and_say_anything(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("one", "two"):
        torch.manual_seed(len(name) + ord(name[0]))
        probe.make_model(tmp_path / name)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two")]
    for one, two in zip(*[model.parameters() for model in models]):
        assert torch.equal(one, two)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert len(tokenizer("a b go tell").input_ids) == 4
    logits = models[0](torch.tensor([tokenizer("go").input_ids])).logits
    assert logits.softmax(-1).min() > 1e-3
