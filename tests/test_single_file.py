"""Each script is whole in one file; what scripts share is the same to the letter, so that a diff shows what differs;
and a copy becomes another algorithm by few edits.
"""

import ast
import importlib.util
import io
import random
import subprocess
import sys
import tokenize
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import build_model

import ippo_llm
import ppo_llm
from utils.envs import guess
from utils.same import timeless
from utils.tasks import tldr

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("ippo", "iac", "maac", "magrpo", "ppo")

MOST = {"lines": 480, "tokens": 3200, "definitions": 26}  # of a script
MOST_OF_PPO = {"lines": 600, "tokens": 4200, "definitions": 32}
MOST_CHANGES = {"ippo iac": 40, "iac maac": 120, "ippo magrpo": 125, "ippo ppo": 250}  # lines that differ
ALGORITHM = {"Args", "Agent", "policy_forward", "critic_forward", "learn", "main"}  # what may differ at all
OWN = {  # what scripts have of their own, or lack, beside ippo_llm.py
    "iac": {"gae", "td_error"},
    "maac": {"gae", "Critic"},
    "magrpo": {"gae", "critic_forward", "group_advantages"},
    "ppo": {
        "train_dataset",
        "eval_dataset",
        "formatters",
        "reward_func",
        "external_transition",
        "Env",
        "mean_rewards_to_go",
    },
}


def text_of(script):
    return (ROOT / f"{script}_llm.py").read_text()


def definitions(script):
    """The source of every function and class at the top of a script, decorators included, by name; of Rollout its code
    alone: comments on its fields say what that script's `learn` reads.
    """
    lines = text_of(script).splitlines()
    found = {}
    for node in ast.parse(text_of(script)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
            if node.name == "Rollout":
                found[node.name] = ast.unparse(node)
    return found


# --- The scripts beside one another -----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_what_scripts_share_is_the_same_to_the_letter(script):
    ippo, own = definitions("ippo"), definitions(script)
    assert ippo.keys() ^ own.keys() == OWN[script]
    assert {name for name in ippo.keys() & own.keys() if ippo[name] != own[name]} <= ALGORITHM


def test_ippo_and_iac_differ_in_their_flags_in_what_a_value_is_of_and_in_learn_alone():
    ippo, iac = definitions("ippo"), definitions("iac")
    assert {name for name in ippo.keys() & iac.keys() if ippo[name] != iac[name]} == {"Args", "critic_forward", "learn"}


def changes(one, other):
    """How many lines differ between two files: one that is changed counts once."""
    lines = subprocess.run(["diff", "-d", one, other], capture_output=True, text=True).stdout.splitlines()
    return max(sum(line[0] == side for line in lines) for side in "<>")


@pytest.mark.parametrize("pair", MOST_CHANGES)
def test_a_diff_of_two_scripts_is_short(pair):
    one, other = (ROOT / f"{script}_llm.py" for script in pair.split())
    assert 0 < changes(one, other) <= MOST_CHANGES[pair]


# --- Each script by itself --------------------------------------------------------------------------------------------

SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def sizes(text):
    """Lines; tokens of code, without imports, docstrings and fields of dataclasses; functions, methods and classes."""
    silent, num_definitions = set(), 0
    for node in ast.walk(ast.parse(text)):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.AnnAssign)) or is_docstring:
            silent |= {*range(node.lineno, node.end_lineno + 1)}
        num_definitions += isinstance(node, (ast.FunctionDef, ast.ClassDef))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    num_tokens = sum(token.type not in SILENT and token.start[0] not in silent for token in tokens)
    return {"lines": len(text.splitlines()), "tokens": num_tokens, "definitions": num_definitions}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short(script):
    most = MOST_OF_PPO if script == "ppo" else MOST
    found = sizes(text_of(script))
    assert all(found[name] <= most[name] for name in most), found


def test_utils_import_no_script():
    for module in (ROOT / "utils").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            names = {alias.name for alias in node.names} if isinstance(node, (ast.Import, ast.ImportFrom)) else set()
            assert not {*names, getattr(node, "module", None)} & {f"{script}_llm" for script in SCRIPTS}, module


# --- The default task and game ----------------------------------------------------------------------------------------


def test_the_default_task_is_that_of_utils():
    items = [*ippo_llm.train_dataset(20, 3)]
    assert items == [*tldr.train_dataset(20, 3)] and [*ippo_llm.eval_dataset(9, 3)] == [*tldr.eval_dataset(9, 3)]
    texts = [[item["prompt"][: 60 * 2**k] for item in items] for k in range(3)]
    for agents in (1, 2, 3):
        assert ippo_llm.formatters(items[0], agents) == tldr.formatters(items[0], agents)
        rewards = ippo_llm.reward_func(*texts[:agents], items=items)
        assert rewards == tldr.reward_func(*texts[:agents], items=items)
    assert len({*rewards}) > 3


def test_the_default_game_is_that_of_utils():
    rng = random.Random(0)
    for seed in range(200):
        games = (ppo_llm.Env(), guess.Env())
        assert games[0].reset(seed=seed) == games[1].reset(seed=seed)
        is_over = False
        while not is_over:
            answer = rng.choice(["", "x", *map(str, range(1, 17))])
            result, other = (game.step(answer) for game in games)
            is_over = result[2]
            assert result[is_over:] == other[is_over:]  # nobody reads how a game ends


# --- Copies -----------------------------------------------------------------------------------------------------------


def without(text, first, last):
    """A text without the lines from one that begins with `first` up to one that begins with `last`."""
    lines = text.splitlines(keepends=True)
    start = next(k for k, line in enumerate(lines) if line.strip().startswith(first))
    end = next(k for k in range(start, len(lines)) if lines[k].strip().startswith(last))
    return "".join(lines[:start] + lines[end:])


def replaced(text, old, new):
    assert text.count(old) == 1, old
    return text.replace(old, new)


def without_a_critic(text):
    """ippo_llm.py as REINFORCE with a baseline for each turn."""
    text = replaced(text, "models.CriticArgs, ", "")
    for flag in ("use_separate_critic", "gae_lambda", "value_loss_coef", "value_clip_range", "critic_learning_rate"):
        text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(f"    {flag}: "))
    text = without(text, "self.critic = ", "self.optimizers")
    text = without(text, "models.adamw([self.value_head", "]")
    text = without(text, "def critic_forward", "@timed\ndef learn".split("\n")[0])
    text = without(text, "old_values = torch", "with torch.no_grad()")
    text = without(text, "old_values[rows] = ", "# 4.")
    text = replaced(
        text,
        "advantages, returns = gae(token_rewards, old_values, mask, args.gamma, args.gae_lambda)",
        "advantages = (token_rewards.flip(1).cumsum(1).flip(1) - m[rollout.turns]) * mask",
    )
    text = without(text, "values = critic_forward", "loss = policy_loss")
    text = replaced(text, " + args.value_loss_coef * value_loss", "")
    text = replaced(text, "[policy_loss, value_loss, mean_entropy]", "[policy_loss, mean_entropy]")
    text = replaced(text, "policy_loss, value_loss, mean_entropy = ", "policy_loss, mean_entropy = ")
    text = without(text, '"value_loss": ', '"entropy"')
    return without(text, '"explained_variance": ', "}")


def with_a_clipped_ratio(text):
    """ippo_llm.py with PPO's loss."""
    return replaced(
        text,
        "policy_loss = -(logprobs * advantages[rows] * mask[rows]).sum() / num_tokens",
        """ratio = (logprobs - old_logprobs[rows]).exp()
                clipped_ratio = ratio.clamp(0.8, 1.2)
                surrogate = torch.min(ratio * advantages[rows], clipped_ratio * advantages[rows])
                policy_loss = -(surrogate * mask[rows]).sum() / num_tokens""",
    )


def with_groups(text):
    """ppo_llm.py with GRPO's advantages."""
    return replaced(
        text,
        "    advantages, returns = gae(",
        """    totals = rollout.rewards.sum(1).view(-1, args.num_generations)
    relative = (totals - totals.mean(1, keepdim=True)) / (totals.std(1, correction=0, keepdim=True) + 1e-4)
    advantages = relative.view(-1, 1) * action_mask
    _, returns = gae(""",
    )


def with_another_optimizer(text):
    """ippo_llm.py with SGD for the actor."""
    sgd = "torch.optim.SGD(self.actor.parameters(), lr=args.actor_learning_rate, momentum=0.9)"
    return replaced(text, "models.adamw([self.actor], args.actor_learning_rate, args)", sgd)


def reward_length(*completions):
    return [float(len("".join(texts))) for texts in zip(*completions)]


SMALL = {"rollout_buffer_size": 8, "train_size": 16, "num_train_epochs": 1, "eval_size": 2, "max_new_tokens": 4}
COPIES = {  # the script, its edits, how many lines they may change, and flags
    "without a critic": ("ippo", without_a_critic, 75, {}),
    "with a clipped ratio": ("ippo", with_a_clipped_ratio, 8, {"update_epochs": 2}),
    "with another optimiser": ("ippo", with_another_optimizer, 2, {}),
    "with groups": ("ppo", with_groups, 10, {"num_generations": 4, "train_size": 4, "num_turns": 2}),
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_becomes_another_algorithm_by_few_edits(tmp_path, monkeypatch, tokenizer, copy):
    script, edit, most, flags = COPIES[copy]
    path = tmp_path / "my_llm.py"
    path.write_text(edit(text_of(script)))
    assert changes(ROOT / f"{script}_llm.py", path) <= most
    spec = importlib.util.spec_from_file_location("my_llm", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_llm", module)
    spec.loader.exec_module(module)

    def train(**more):
        args = module.Args(**(SMALL | flags | more))
        task = SimpleNamespace(
            train_dataset=ippo_llm.train_dataset, formatters=ippo_llm.formatters, reward_func=reward_length
        )
        return module.main(args, task, model=build_model(tokenizer), tokenizer=tokenizer)

    _, run = train(output_dir=str(tmp_path / "whole"))
    assert run.step == 2 and run.rows[1]["agent_0/grad_norm"] > 0
    train(output_dir=str(tmp_path / "run"), pause_at=1)
    train(resume=str(tmp_path / "run"), pause_at=None)
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")
