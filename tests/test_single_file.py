"""Each script is whole in one file; what scripts share is the same to the letter, so that a diff shows what differs."""

import ast
import dataclasses
import difflib
import io
import re
import tokenize
from pathlib import Path

import pytest

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "utils").rglob("*.py"))
NAMES = [path.relative_to(ROOT) for path in MODULES]
SCRIPTS = sorted(ROOT.glob("*_llm.py"))
ALL_SCRIPTS = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
MOST_ROWS = 60  # of code in a function
MOST_CHANGES = {"ippo iac": 60, "iac maac": 400, "ippo magrpo": 400}  # lines that a diff of two adds or removes


def definitions(path):
    """Source of every function, class and constant at the top of a file, decorators included, by name."""
    source = path.read_text()
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return found


IPPO = definitions(ROOT / "ippo_llm.py")
IAC = definitions(ROOT / "iac_llm.py")
MAAC = definitions(ROOT / "maac_llm.py")
MAGRPO = definitions(ROOT / "magrpo_llm.py")
PPO = definitions(ROOT / "ppo_llm.py")


# --- The scripts beside one another -----------------------------------------------------------------------------------


def test_ippo_and_iac_have_the_same_names_but_for_their_algorithms():
    assert IPPO.keys() - IAC.keys() == {"IPPOArgs", "gae", "ippo_loss"}
    assert IAC.keys() - IPPO.keys() == {"IACArgs", "td_error", "iac_loss"}


@pytest.mark.parametrize("name", sorted(IPPO.keys() & IAC.keys() - {"Args", "learn"}))
def test_the_same_name_is_the_same_source_in_ippo_and_iac(name):
    assert IPPO[name] == IAC[name]


def test_the_flags_of_ippo_and_iac_differ_in_those_of_their_algorithms_only():
    assert IPPO["Args"].replace("IPPOArgs", "IACArgs") == IAC["Args"]


def test_the_losses_of_ippo_and_iac_differ_in_their_names_only():
    assert IPPO["ippo_loss"].replace("ippo_loss", "iac_loss") == IAC["iac_loss"]


def test_ippo_and_iac_differ_in_three_lines_of_learn():
    pairs = list(zip(IPPO["learn"].splitlines(), IAC["learn"].splitlines(), strict=True))
    differing = [(ours.strip(), theirs.strip()) for ours, theirs in pairs if ours != theirs]
    assert differing == [
        (
            "advantages, returns = gae(action_rewards, old_values, action_mask, args.gamma, args.gae_lambda)",
            "advantages, returns = td_error(action_rewards, old_values, action_mask, args.gamma)",
        ),
        ("for _ in range(args.ppo_epochs):", "for _ in range(args.ac_epochs):"),
        (
            "loss, metrics = ippo_loss(agent, part, args)",
            "loss, metrics = iac_loss(agent, part, args)",
        ),
    ]


@pytest.mark.parametrize("pair", MOST_CHANGES)
def test_a_diff_of_two_scripts_is_short(pair):
    files = [(ROOT / f"{name}_llm.py").read_text().splitlines() for name in pair.split()]
    changes = [line for line in difflib.ndiff(*files) if line.startswith(("- ", "+ "))]
    assert 0 < len(changes) <= MOST_CHANGES[pair]


# What differs where no critic is a head on the actor: no values in a rollout, no hidden states of the actor.
WITHOUT_HEADS = "AlgorithmArgs OptimizerArgs Args Agent build_optimizers build_agents Rollout sample_tokens sample "
WITHOUT_HEADS += "forward_policy compute_logprobs Batch minibatches learn main"
DIFFERING = {  # beside these
    "iac maac": (IAC, MAAC, "read_values compute_values td_error"),  # of turns alone
    "ippo magrpo": (IPPO, MAGRPO, "SamplingArgs check_args play optimizer_step"),  # trees, and no critic to be named
}


@pytest.mark.parametrize("pair", DIFFERING)
def test_the_same_name_is_the_same_source_but_where_the_work_differs(pair):
    one, other, names = DIFFERING[pair]
    assert {name for name in one.keys() & other.keys() if one[name] != other[name]} == {
        *names.split(),
        *WITHOUT_HEADS.split(),
    }


@pytest.mark.parametrize("name", "forward_policy policy_and_entropy compute_logprobs sample_tokens sample".split())
def test_what_maac_and_magrpo_have_without_heads_is_the_same(name):
    assert MAAC[name] == MAGRPO[name]


def test_the_losses_of_maac_and_magrpo_differ_in_what_an_action_counts():
    ours, theirs = [re.sub("(maac|magrpo)_loss", "loss", x) for x in (MAAC["maac_loss"], MAGRPO["magrpo_loss"])]
    assert ours.replace("sum(-1, keepdim=True)", "sum(-1)").replace("part.action_mask", "part.paths") == theirs


def parameters(source):
    """Names of a function's parameters, in order."""
    (node,) = ast.parse(source).body
    arguments = node.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


SAME_IN_PPO = ("gae", "standardise", "take_logprobs")
OTHER_IN_PPO = {  # functions of both whose work differs: the parameters in ppo_llm.py
    "sample_tokens": "agent transcripts args generator greedy",  # transcripts grow from turn to turn
    "play": "agents task items args generator phase greedy",  # held-out episodes take the likeliest tokens
    "model_inputs": "rollout args",  # --calc-position-embeddings
    "forward_policy": "policy rollout args",  # no hidden states: the critic is never a head on the actor
    "main": "args task model tokenizer train_dataset eval_dataset env",  # an environment too
}


@pytest.mark.parametrize("name", sorted(filter(str.islower, IPPO.keys() & PPO.keys() - OTHER_IN_PPO.keys())))
def test_a_function_of_ppo_has_the_parameters_of_that_name_in_ippo(name):
    assert parameters(IPPO[name]) == parameters(PPO[name])


@pytest.mark.parametrize("name", OTHER_IN_PPO)
def test_a_function_of_ppo_whose_work_differs_has_these_parameters(name):
    assert parameters(IPPO[name]) != parameters(PPO[name]) == OTHER_IN_PPO[name].split()


@pytest.mark.parametrize("name", SAME_IN_PPO)
def test_what_ppo_copies_is_the_same_to_the_letter(name):
    assert IPPO[name] == PPO[name]


ANATOMY = "Args Agent Rollout sample play Batch minibatches optimizer_step learn evaluate main".split()


@ALL_SCRIPTS
def test_every_script_has_the_anatomy_in_this_order(script):
    assert script.read_text().endswith('\n\nif __name__ == "__main__":\n    command_line(main, Args, __doc__)\n')
    names = [name for name in definitions(script) if name != "update_reference"]  # which follows learn, in ppo_llm.py
    assert [name for name in names if name in ANATOMY] == ANATOMY and names[-3:] == ANATOMY[-3:]


# --- The scripts beside the tasks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [IPPO, IAC, MAAC, MAGRPO], ids=["ippo", "iac", "maac", "magrpo"])
def test_the_default_task_is_that_of_utils(script):
    task = definitions(ROOT / "utils/tasks/tldr.py")
    names = {"train_dataset", "eval_dataset", "formatters", "reward_func", "pair_reward", "columns"}
    assert task.keys() >= names | {"MIN_WORDS", "MAX_WORDS"}
    assert task == {name: script.get(name) for name in task}


def test_the_default_environment_is_that_of_utils():
    environment = definitions(ROOT / "utils/envs/guess.py")
    assert environment.keys() >= {"Env", "optimum"}
    assert environment == {name: PPO.get(name) for name in environment}


# --- Each script by itself --------------------------------------------------------------------------------------------

NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


def rows_of_code(path):
    """The rows of a file that hold code: no comment, docstring or blank line."""
    source = path.read_text()
    rows = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*NO_CODE, tokenize.ENDMARKER):
            rows.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            rows -= set(range(node.lineno, node.end_lineno + 1))
    return rows


@ALL_SCRIPTS
def test_no_function_is_long(script):
    rows = rows_of_code(script)
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.FunctionDef):
            length = len([row for row in rows if node.lineno <= row <= node.end_lineno])
            assert length <= MOST_ROWS, node.name


# --- utils know no script ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_of_utils_imports_no_script(module):
    names = {path.stem for path in SCRIPTS}
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            assert not names & {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.module not in names and not names & {alias.name for alias in node.names}


def owned_flags(tree):
    """The fields of the @flags classes of a module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "flags" in [ast.unparse(decorator) for decorator in node.decorator_list]:
            names |= {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
    return names


def named_flags(tree):
    """What looks like a flag in the strings of a module, docstrings aside, and what it takes for a flag's name."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            names |= {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z0-9-]*)", node.value)}
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("flag_name", "needs", "not_with"):
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return names


def is_program(module):
    """Whether a user runs it: then it may make, or read, the flags of a run."""
    return 'if __name__ == "__main__":' in (ROOT / module).read_text()


IMPORTED = [name for name in map(str, NAMES) if not is_program(name)]
FLAGS = set()  # of the scripts
for each in (ippo_llm, iac_llm, maac_llm, magrpo_llm, ppo_llm):
    FLAGS |= {field.name for field in dataclasses.fields(each.Args)}
for each in IMPORTED:  # a flag of one module may be named by all of them
    FLAGS -= owned_flags(ast.parse((ROOT / each).read_text()))
SCRIPT_FLAGS = {  # flags of the scripts themselves that a module names
    "utils/distributed.py": {"rollout_buffer_size"},  # as all scripts call it
    "utils/models.py": {"model"},  # as all scripts call it
    "utils/run.py": {"num_train_epochs", "max_steps"},  # as all scripts call them
    "utils/models/stages.py": {"beta", "use_separate_reference_adapter"},  # without which there is no reference to keep
    "utils/tasks/__init__.py": {"rollout_buffer_size"},  # as all scripts call it
    "utils/tasks/lengths.py": {"model", "max_model_len"},  # the second of which a script may have or not
}


@pytest.mark.parametrize("module", IMPORTED)
def test_what_scripts_import_names_only_flags_of_utils(module):
    assert named_flags(ast.parse((ROOT / module).read_text())) & FLAGS == SCRIPT_FLAGS.get(module, set())
