"""The rule of the task `code`, level by level, against points worked out by hand; its tests really run."""

import pytest

from utils.tasks import code, made_text

ITEM = {
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Add up the doubles."""\n',
    "test": "def check(candidate):\n"
    + "".join(f"    assert candidate({xs}) == {2 * sum(xs)}\n" for xs in ([], [1], [1, 2], [3, 4, 5])),
    "entry_point": "total",
}
AUX = "def aux(xs):\n    return [2 * x for x in xs]"
MAIN = "def total(xs: List[int]) -> int:\n    return sum(aux(xs))"
WRAPPED = "def aux(xs):\n    return sum(2 * x for x in xs)"


def points(aux, main, item=ITEM, **turns):
    return code.reward_func([aux], [main], items=[item], **turns)[0]


@pytest.mark.parametrize(
    "aux, main, expected",
    [
        ("", "", 0.0),
        ("I would rather not.", "Sure, here it is.", 0.0),
        (AUX, "", 0.4),  # no function: stop
        (AUX, "def other(xs):\n    return 0", 0.4),
        (AUX, "def total(xs):\n    print(xs)", 0.4),  # without a return it does not count
        ("def aux(xs):\n    pass", MAIN, 0.6 + 0.5 + 0.0),  # nor does aux, and the call of it fails
        ("", "def total(xs):\n    return 2 * sum(xs)", 0.6 + 0.5 + 1.0),  # no aux, no teamwork
        ("def aux(xs):\n    return 2 * (", MAIN, 0.4 + 0.6),  # together no Python: stop
        (AUX, "def total(xs):\n    return sum(aux(xs)", 0.4 + 0.6),
        (AUX, "def total(xs):\n    return 2 * sum(xs)", 2.5),  # aux is not called
        (AUX, MAIN, 4.0),
        (AUX, MAIN.replace("sum(aux(xs))", "1 + sum(aux(xs))"), 1.5),  # no test passes: nothing for teamwork
        (AUX, MAIN.replace("sum(aux(xs))", "len(aux(xs)) and 2"), 1.5 + 2 / 4 + 1.5),  # [] and [1]
        (WRAPPED, "def total(xs):\n    return aux(xs)", 3.0),
        (WRAPPED, 'def total(xs):\n    """Doubles."""\n    # by aux\n    y = aux(xs)\n    return y', 3.0),
        (WRAPPED, "def total(xs):\n    y = aux(xs)\n    return y + 0", 4.0),
        (WRAPPED, "def total(xs):\n    if not xs:\n        return 0\n    return aux(xs)", 4.0),
        (AUX, "def total(xs):\n    aux(xs)\n    return 2 * sum(xs)", 4.0 - 0.5),  # a call thrown away
        (AUX, "def total(xs):\n    aux(xs)\n    return sum(aux(xs))", 4.0 - 0.5),
    ],
)
def test_each_level_of_the_rule(aux, main, expected):
    assert points(aux, main) == pytest.approx(expected)


def test_a_wrong_constant_loses_the_share_of_the_asserts_that_it_fails():
    right = "def double_of_sum(a, b):\n    return 2 * aux(a, b)"
    item = code.made_problem("double", "sum")
    assert points("def aux(a, b):\n    return a + b", right, item) == pytest.approx(4.0)
    assert points("def aux(a, b):\n    return 10", right, item) == pytest.approx(3.0 + 2 / 6)  # 7 + 3 and 5 + 5


def test_code_is_taken_from_fences_and_prose_around_it_left_out():
    fenced = f"Here you are:\n\n```python\nimport math\n\n{AUX}\n\nprint(aux([1]))\n```\n\nIt doubles."
    assert points(fenced, f"```\n{MAIN}\n```") == pytest.approx(4.0)
    assert points(
        f"```bash\npip install x\n```\n\n```py\n{AUX}\n```", f"Of course.\n{MAIN}\nThat's it."
    ) == pytest.approx(4.0)
    assert points(f"```python\n{AUX}", MAIN) == pytest.approx(4.0)  # cut before the fence closes
    uses_math = "import math\n\ndef total(xs):\n    return math.floor(sum(aux(xs)))"
    assert points(AUX, uses_math) == pytest.approx(4.0)


def test_a_signature_over_several_lines_is_one_function():
    assert points(AUX, "def total(\n    xs: List[int],\n) -> int:\n    return sum(aux(xs))") == pytest.approx(4.0)


def test_a_single_agent_writes_both_functions():
    assert code.reward_func([f"{AUX}\n\n{MAIN}", MAIN], items=[ITEM] * 2) == pytest.approx([4.0, 1.1])
    assert "helper named aux" in code.formatters(ITEM, 0, num_agents=1)[0]["content"]
    with pytest.raises(ValueError, match="takes 1 or 2 agents.*got 3"):
        code.check(3, 1)


def test_a_team_that_is_done_early_is_paid_for_the_turns_that_are_left():
    assert points(AUX, MAIN, turn=0, num_turns=3) == pytest.approx(12.0)
    assert points(AUX, MAIN, turn=2, num_turns=3) == pytest.approx(4.0)
    assert points(AUX, "", turn=0, num_turns=3) == pytest.approx(0.4)


def test_a_program_runs_once_however_often_it_is_written(monkeypatch):
    ran = []
    real = code.run_tests
    monkeypatch.setattr(code, "run_tests", lambda jobs: ran.append(len(jobs)) or real(jobs))
    monkeypatch.setattr(code, "VERDICTS", {})
    rewards = code.reward_func([AUX, AUX, AUX], [MAIN, MAIN, ""], items=[ITEM] * 3)
    assert rewards == pytest.approx([4.0, 4.0, 0.4]) and ran == [1]
    assert points(AUX, MAIN) == pytest.approx(4.0) and ran == [1, 0]


def test_the_reference_solution_of_each_made_problem_earns_all():
    kinds = [(outer, inner) for outer in made_text.OUTER for inner in made_text.INNER][::5]
    assert [{*own} for own in zip(*kinds)] == [{*made_text.OUTER}, {*made_text.INNER}]
    helpers = [f"def aux(a, b):\n    return {made_text.INNER[inner]}" for _, inner in kinds]
    mains = [
        f"def {outer}_of_{inner}(a, b):\n    return {made_text.OUTER[outer].format(x='aux(a, b)')}"
        for outer, inner in kinds
    ]
    items = [code.made_problem(*kind) for kind in kinds]
    assert code.reward_func(helpers, mains, items=items) == pytest.approx([4.0] * len(kinds))


def test_the_values_of_made_problems_are_right():
    inner = {"sum": lambda a, b: b + a, "difference": lambda a, b: -(b - a), "product": lambda a, b: b * a}
    inner |= {"larger": lambda a, b: sorted([a, b])[1], "smaller": lambda a, b: sorted([a, b])[0]}
    inner |= {"remainder": lambda a, b: a - b * (a // b)}
    outer = {"double": lambda x: x + x, "square": lambda x: x**2, "negative": lambda x: 0 - x, "half": lambda x: x >> 1}
    outer |= {"absolute": lambda x: max(x, 0 - x), "next": lambda x: 1 + x, "parity": lambda x: x & 1, "text": repr}
    assert set(inner) == set(made_text.INNER) and set(outer) == set(made_text.OUTER)
    for second in outer:
        for first in inner:
            names = {}
            exec(code.made_problem(second, first)["test"], names)
            names["check"](lambda a, b: outer[second](inner[first](a, b)))


def test_made_problems_come_from_the_seed_and_none_is_both_trained_on_and_held_out():
    assert code.train_dataset(50, 1)[:] == code.train_dataset(50, 1)[:] != code.train_dataset(50, 2)[:]
    train, held_out = (set(data["entry_point"]) for data in (code.train_dataset(500, 1), code.eval_dataset(64, 1)))
    assert len(train) == 40 and len(held_out) == 8 and not train & held_out
    assert code.train_dataset(500, 2).unique("entry_point") != code.train_dataset(500, 1).unique("entry_point")


def test_prompts_are_those_that_the_embedded_model_was_trained_on():
    trained_on = {task["prompt"] for task in made_text.programs(2000, 0)}
    prompts = {code.formatters(item, agent)[0]["content"] for item in code.train_dataset(40, 0) for agent in range(2)}
    assert prompts <= trained_on and len(prompts) == 80


FENCE = "```"
FIRST = "def total(xs):\n    return 0"
STUB = 'def total(xs):\n    """Add up the doubles."""'


@pytest.mark.parametrize(
    "answer",
    [
        f"{MAIN}\n{FENCE}\nThis adds them up.",  # a fence that closes nothing
        f"{MAIN}\n\nExample:\n{FENCE}python\nprint(total([1]))\n{FENCE}",
        f"We complete\n{FENCE}python\n{STUB}\n{FENCE}\nso:\n{FENCE}python\n{MAIN}\n{FENCE}",
        f"{FENCE}\n{FIRST}\n{FENCE}\nNo, corrected:\n{FENCE} Python3\n{MAIN}\n{FENCE}\nOutput:\n{FENCE}\n6\n{FENCE}",
        "1. Here:\n" + "\n".join(f"   {line}" for line in f"{FENCE}py\n{MAIN}\n{FENCE}".splitlines()),
        f"<think>\n{FENCE}\n{FIRST}\n{FENCE}\n</think>\n{FENCE}\n{MAIN}\n{FENCE}",
        f"<think>\n{FIRST}\n</think>\n{MAIN}",
    ],
    ids=["stray fence", "example", "stub", "corrected", "indented", "thought in a fence", "thought"],
)
def test_the_function_is_found_in_what_instruct_models_write(answer):
    assert points(AUX, answer) == pytest.approx(4.0)


def test_a_row_of_humaneval_keeps_what_stands_before_the_function():
    row = {"task_id": "HumanEval/x", "canonical_solution": "", "entry_point": "decode"}
    row["prompt"] = 'import math\n\n\ndef encode(s: str):\n    """Turn it."""\n    return s[::-1]\n\n\n'
    row["prompt"] += 'def decode(s: str, times: int = 1):\n    """Turn it back. >>> decode("ab")\n    "ba"\n    """\n'
    loop = "    for s in ('', 'abc'):\n        assert candidate(encode(s)) == s\n"
    row["test"] = f"METADATA = {{}}\n\n\ndef check(candidate):\n{loop}"
    item = code.item_of(row)
    assert set(item) == {"prompt", "test", "entry_point"}
    assert code.formatters(item, 1)[0]["content"].endswith("You may call aux(s, times).")
    main = "def decode(s, times=1):\n    return aux(s, math.floor(times))[::-1]"
    assert points("def aux(s, times):\n    return s", main, item) == pytest.approx(4.0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"entry_point": None}, "its entry_point is no text"),
        ({"test": "def check(candidate):\n    pass"}, "no assert"),
        (
            {"test": "import numpy as np\n\ndef check(candidate):\n    assert candidate(1, 2)"},
            "test imports numpy, ",
        ),
        (
            {"test": "from scipy.stats import norm\nassert double_of_sum(1, 2)"},
            "test imports scipy.stats, ",
        ),
    ],
)
def test_a_row_that_can_not_be_judged_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        code.item_of(code.train_dataset(1, 1)[0] | change)


@pytest.mark.parametrize("sanitized", [False, True])
def test_a_row_of_mbpp_becomes_a_function_to_complete(sanitized):
    text = "Write a function to find the area of a circle, rounded."
    solution = "import math\ndef square(r):\n    return r * r\n"
    solution += "def area(r, digits=1):\n    return round(math.pi * square(r), digits)"
    tests = ["assert area(1) == 3.1", "assert math.isclose(area(2, digits=2), 12.57)"]
    row = {"task_id": 1, "code": solution, "test_list": tests}
    row |= (
        {"prompt": text, "test_imports": ["import math"]}
        if sanitized
        else {"text": text, "test_setup_code": "import math"}
    )
    item = code.item_of(row)
    assert item["prompt"] == f'def area(r, digits=1):\n    """{text}"""' and item["entry_point"] == "area"
    main = "import math\n\ndef area(r, digits=1):\n    return round(math.pi * aux(r), digits)"
    assert points("def aux(r):\n    return r * r", main, item) == pytest.approx(4.0)
    assert points("def aux(r):\n    return r", main, item) == pytest.approx(3.5)


def follow_up(aux, main):
    """What both agents read next."""
    return [message["content"] for (message,) in code.external_transition([aux, main], 2, ITEM)]


def test_a_second_turn_tells_each_agent_what_failed():
    wrong = MAIN.replace("sum(aux(xs))", "len(aux(xs)) and 2")
    for agent, (content, answer) in enumerate(zip(follow_up(AUX, wrong), (AUX, wrong))):
        assert content.startswith(f"You wrote:\n{answer}\n\n2 of 4 tests pass. assert candidate([1, 2]) == 6: ")
        assert content.endswith("\n\n" + code.formatters(ITEM, agent)[0]["content"])


@pytest.mark.parametrize(
    "aux, main, fault",
    [
        ("", "", "There is no function aux with a return. There is no function total with a return.\n"),
        ("", MAIN, "There is no function aux with a return. 0 of 4 tests pass. "),
        (AUX, MAIN[:-1], "The functions together are not Python.\n"),
    ],
)
def test_a_second_turn_names_what_is_missing(aux, main, fault):
    assert all(f"\n\n{fault}" in content for content in follow_up(aux, main))


def test_an_episode_ends_when_all_asserts_pass():
    assert code.external_transition([AUX, MAIN], 2, ITEM) is None
    assert code.external_transition(["", "def total(xs):\n    return 2 * sum(xs)"], 2, ITEM) is None
