"""Programming in two parts: agent 0 writes a helper `aux`, the last agent the function that may call it.

A single agent writes both. The team earns up to 4 points (rule and numbers: arXiv 2508.04652 and CoMLRL's code for it):

    0.4  there is a function aux with a return; without one the rule goes on, but pays nothing for teamwork
    0.6  there is a function of the problem's name with a return; else stop (as text: either may be broken)
    0.5  the prompt's lines before that function, aux and the function together are Python; else stop
    0-1  the share of the test's asserts that pass; if any does, and there is an aux, also
    0.5    if the function calls aux
    1.0    if it does so and is no mere wrapper, which only returns what aux returned
   -0.5    if it throws away what a call to aux returned

An episode of several turns ends when all asserts pass, and pays the turns left as this one, so that nobody gains by
being late. Before that, each agent reads what failed.

    python ippo_llm.py --task code --max-new-tokens 48                   40 made problems, and 8 held out
    python ippo_llm.py --task code --dataset openai/openai_humaneval     CoopHumanEval, MBPP, or rows with such columns
"""

import ast
import itertools
import random
import re
import sys
import textwrap
import warnings

import datasets

from utils.tasks.made_text import INNER, OUTER
from utils.tasks.sandbox import count_asserts, run_tests

ARGUMENTS = [(7, 3), (-4, 6), (5, 5), (0, 9), (-8, -3), (12, -5)]
FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("", "python", "python3", "py")  # how such blocks are marked
VERDICTS = {}  # of jobs that ran


def check(num_agents, num_turns):
    if num_agents > 2:
        raise ValueError(f"it takes 1 or 2 agents, who write a helper and the function, got {num_agents}")


def optimum(num_agents, num_turns):
    return 4.0 * num_turns


def train_dataset(size, seed):
    return made_dataset(size, f"train {seed}", held_out=False)


def eval_dataset(size, seed):
    return made_dataset(size, f"eval {seed}", held_out=True)


def made_dataset(size, seed, held_out):
    """The problems that are held out, or the others, in a random order, again and again up to `size`."""
    kinds = list(itertools.product(enumerate(OUTER), enumerate(INNER)))
    problems = [made_problem(outer, inner) for (j, outer), (k, inner) in kinds if ((j + k) % 6 == 5) == held_out]
    rng = random.Random(f"code {seed}")
    rows = []
    while len(rows) < size:
        rows += rng.sample(problems, len(problems))
    return datasets.Dataset.from_list(rows[:size])


def made_problem(outer, inner):
    """The item that asks for `outer` of `inner` of two numbers, in the words that the embedded model knows."""
    expression = OUTER[outer].format(x=f"({INNER[inner]})")
    values = [eval(expression, {"a": a, "b": b}) for a, b in ARGUMENTS]
    asserts = [f"    assert candidate{pair} == {value!r}" for pair, value in zip(ARGUMENTS, values)]
    name = f"{outer}_of_{inner}"
    prompt = f'def {name}(a, b):\n    """Return the {outer} of the {inner} of a and b."""'
    return {"prompt": prompt, "test": "\n".join(["def check(candidate):", *asserts]), "entry_point": name}


def item_of(row):
    """A row of HumanEval or CoopHumanEval as it is; a row of MBPP, whose tests call the function by its name."""
    if "test_list" not in row:
        item = {name: row[name] for name in ("prompt", "test", "entry_point")}
        for name, value in item.items():
            if not isinstance(value, str):
                raise ValueError(f"its {name} is no text but {value!r:.80}")
        check_test(item["test"], item["entry_point"])
        return item
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    tests = "\n".join([setup, *row["test_list"]]).strip()
    functions = [node for node in ast.parse(row["code"]).body if isinstance(node, ast.FunctionDef)]
    function = next(node for node in functions if calls(ast.parse(tests), node.name))
    text = (row.get("text") or row["prompt"]).strip()
    prompt = f'def {function.name}({ast.unparse(function.args)}):\n    """{text}"""'
    check_test(tests, function.name)
    return {"prompt": prompt, "test": tests, "entry_point": function.name}


def check_test(test, entry_point):
    """Raise ValueError for a test without asserts, or one that imports what is not in the sandbox."""
    count_asserts(test, entry_point)
    for node in ast.walk(ast.parse(test)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                raise ValueError(f"its test imports {name}, and programs have Python's standard library alone")


def formatters(item, agent, num_agents=2):
    function = find(item["prompt"], item["entry_point"])
    arguments = ", ".join(argument.arg for argument in function.args.args) if function else "..."
    if num_agents == 1:
        request = "Write a helper named aux for this function, and this function, which calls aux."
    elif agent == 0:
        request = "Write a helper named aux for this function."
    else:
        request = f"Write this function. You may call aux({arguments})."
    return [{"role": "user", "content": f"{item['prompt']}\n\n{request}"}]


def reward_func(*completions, items, turn=0, num_turns=1):
    """Joint points of N lists of B answers, B floats; all programs run in one call of the sandbox."""
    sources = [join(answers, item) for answers, item in zip(zip(*completions), items)]
    verdicts = judge([(program, item["test"], item["entry_point"]) for (_, _, program), item in zip(sources, items)])
    rewards = []
    for (aux, main, program), item, verdict in zip(sources, items, verdicts):
        points = 0.4 * bool(aux) + 0.6 * bool(main)
        if verdict:
            points += 0.5 + verdict.passed / verdict.total
            function = find(program, item["entry_point"])  # None where the program makes it in some other way
            points += teamwork(function) if function and aux and verdict.passed else 0.0
            points *= num_turns - turn if verdict.passed == verdict.total else 1
        rewards.append(points)
    return rewards


def join(answers, item):
    """The sources of aux and of the main function, and of the program that they make up; "" where there is none."""
    name = item["entry_point"]
    aux = source_of(answers[0], "aux")
    main = source_of(answers[-1], name)
    before, definition, _ = item["prompt"].partition(f"def {name}(")  # imports, and helpers that the tests may call
    program = "\n\n".join([before if definition else "", aux, main]).strip()
    return aux, main, program if main and parsed(program) else ""


def source_of(answer, name):
    """An answer's imports, and its function of that name with a return; "" without one.

    It is that of the last ``` block of Python that has it, or else of the text around the blocks. What stands before
    </think> counts for nothing.
    """
    text = answer.rpartition("</think>")[2]
    blocks = [textwrap.dedent(block) for language, block in FENCE.findall(text) if language.lower() in PYTHON]
    parts = [FENCE.sub("\n", text), *blocks]
    lines = [line for part in parts for line in part.splitlines()]
    imports = [line for line in lines if line.startswith(("import ", "from ")) and parsed(line)]
    functions = [function for part in parts if (function := function_of(part, name))]
    return "\n".join([*imports, functions[-1]]) if functions else ""


def function_of(text, name):
    """The first function of that name in a text, up to where the next line begins at the left; "" without a return."""
    lines = text.splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith(f"def {name}(")), len(lines))
    end = next((k for k in range(start + 1, len(lines)) if lines[k] and lines[k][0] not in " \t)#"), len(lines))
    function = "\n".join(lines[start:end]).rstrip()
    tree = parsed(function)
    returns = any(isinstance(node, ast.Return) for node in ast.walk(tree)) if tree else "return" in function
    return function if returns else ""


def parsed(source):
    """The syntax tree of a source, or None where it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def find(source, name):
    """The last function of that name at the top of a source, a syntax tree, or None."""
    tree = parsed(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)] if tree else []
    return next((node for node in reversed(functions) if node.name == name), None)


def judge(jobs):
    """The sandbox's verdicts on (program, test, entry_point), None for no program; what ran before is not run again."""
    if len(VERDICTS) > 10_000:
        VERDICTS.clear()
    new = [*dict.fromkeys(job for job in jobs if job[0] and job not in VERDICTS)]
    VERDICTS.update(zip(new, run_tests(new)))
    return [VERDICTS.get(job) for job in jobs]


def calls(tree, name):
    """The calls of a function by its name in a syntax tree."""
    all_calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in all_calls if isinstance(node.func, ast.Name) and node.func.id == name]


def teamwork(main):
    """Points from 0 to 1.5 for how the function, a syntax tree, uses aux."""
    aux_calls = calls(main, "aux")
    if not aux_calls:
        return 0.0
    match main.body[1:] if ast.get_docstring(main) is not None else main.body:
        case [ast.Return(value=value)]:
            is_wrapper = value in aux_calls
        case [ast.Assign(targets=[ast.Name(id=name)], value=value), ast.Return(value=ast.Name(id=returned))]:
            is_wrapper = value in aux_calls and returned == name
        case _:
            is_wrapper = False
    throws_away = any(isinstance(node, ast.Expr) and node.value in aux_calls for node in ast.walk(main))
    return 0.5 + 1.0 * (not is_wrapper) - 0.5 * throws_away


def external_transition(agent_completions, num_agents, item):
    """Each agent reads its answer, what is wrong with the whole, and its part again; None when all asserts passed."""
    aux, main, program = join(agent_completions, item)
    (verdict,) = judge([(program, item["test"], item["entry_point"])])
    if verdict and verdict.passed == verdict.total:
        return None
    functions = {"aux": aux, item["entry_point"]: main}
    faults = [f"There is no function {name} with a return." for name, source in functions.items() if not source]
    if verdict:
        faults.append(f"{verdict.passed} of {verdict.total} tests pass. {verdict.error}")
    elif main:
        faults.append("The functions together are not Python.")
    prompts = [formatters(item, agent, num_agents) for agent in range(num_agents)]
    for (message,), answer in zip(prompts, agent_completions):
        message["content"] = f"You wrote:\n{answer}\n\n{' '.join(faults)}\n\n{message['content']}"
    return prompts
