"""Hostile programs in the sandbox. What they attack lies in temporary folders, so that nothing is lost if they win."""

import glob
import os
import shutil
import socket
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from utils.tasks import sandbox
from utils.tasks.sandbox import Verdict, missing_protection, run_tests

GOOD = ("def double(x):\n    return 2 * x", "assert double(2) == 4\nassert double(-1) == -2", "double")
PASSED = Verdict(2, 2, "")
SECONDS = 1 + os.getpid() / 10**9
LAYERS = {"all": (), "no namespaces": ("namespaces",), "namespaces alone": ("landlock", "seccomp")}


@pytest.fixture(params=LAYERS)
def layers(request):
    """The whole sandbox, and what kernels without some of its layers have left."""
    lacking = missing_protection(LAYERS[request.param])
    for layer, word in (("namespaces", "no namespaces"), ("landlock", "no Landlock"), ("seccomp", "no seccomp")):
        if word in lacking and layer not in LAYERS[request.param]:
            pytest.skip(lacking)
    return LAYERS[request.param]


def processes():
    """Those that this test started: all carry their number of seconds, which no other run has, as an argument."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                if f"[{SECONDS}, ".encode() in file.read():
                    found.append(path)
        except OSError:
            pass
    return found


def attack(program, layers, test="assert f() == 1", by="program"):
    """The verdict on a hostile program, when its neighbours and the next batch were scored rightly and it is gone.

    `by` "test": the same attack, by the tests of a harmless program.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, used = set(os.listdir("/tmp")), shutil.disk_usage("/").used
        job = (program, test, "f") if by == "program" else (GOOD[0], f"{program}\n{test}", "double")
        jobs = [GOOD, job, GOOD]
        _, verdict, after = run_tests(jobs, workers=2, seconds=SECONDS, without=layers)
        assert after == PASSED
        assert run_tests([GOOD], seconds=SECONDS, without=layers) == [PASSED]
    assert not processes()
    assert shutil.disk_usage("/").used - used < 5 * 2**30
    assert not [name for name in set(os.listdir("/tmp")) - before if "sandbox" in name or "hostile" in name]
    return verdict


LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
FORGE = """
import os
for fd in range(3, 64):
    try:
        for _ in range(50):
            os.write(fd, {reply!r})
    except OSError:
        pass
def f():
    return 0
"""
HOSTILE = {
    "endless loop": "def f():\n    while True:\n        pass",
    "endless loop at import": "while True:\n    pass",
    "sleep": "import time\ndef f():\n    time.sleep(1000)",
    "fork bomb": "import os\ndef f():\n    while True:\n        os.fork()",
    "fork bomb that goes on": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "child that outlives": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nf = len",
    "thread": "import threading\ndef f():\n    threading.Thread(target=print).start()\n    return 1",
    "deaf to death": LIBC + "libc.prctl(1, 0, 0, 0, 0)\nimport os, time\nos.setsid()\ntime.sleep(60)",
    "100 GB": "def f():\n    return len(bytearray(100 * 10**9)) and 1",
    "list that grows": "def f():\n    x = []\n    while True:\n        x.append('a' * 10**6)",
    "10 GB file": "def f():\n    with open('hostile', 'wb') as file:\n        for _ in range(10**4):\n"
    "            file.write(bytes(10**6))\n    return 1",
    "many files": "def f():\n    for k in range(10**4):\n        open(f'/tmp/hostile{k}', 'w').close()\n    return 1",
    "sys.exit": "import sys\ndef f():\n    sys.exit(0)",
    "sys.exit at import": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "os._exit in the call": "import os\ndef f():\n    os._exit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f():\n    raise KeyboardInterrupt",
    "1 GB on standard output": "def f():\n    for _ in range(1000):\n        print('a' * 10**6)\n    return 2",
    "kills its parent": "import os, signal\ndef f():\n    os.kill(os.getppid() or -1, signal.SIGKILL)\n    return 1",
    "own AssertionError": "import builtins\nclass Never(Exception):\n    pass\nbuiltins.AssertionError = Never\n"
    "def f():\n    return 2",
    "equals everything": "class Same:\n    def __eq__(self, other):\n        return True\ndef f():\n    return Same()",
    "int that equals everything": "class Same(int):\n    def __eq__(self, other):\n        return True\n"
    "    __hash__ = None\ndef f():\n    return Same(7)",
    "garbage to its pipe": FORGE.format(reply=b"garbage\n"),
    "flood to its pipe": FORGE.format(reply=b"a" * 10**6),
    "nested garbage": FORGE.format(reply=b"[" * 10**5 + b"\n"),
    "forged value": FORGE.format(reply=b'{"value": 3}\n'),
    "forged object": FORGE.format(reply=b'{"value": ["Same", []]}\n'),
    "forged verdict": FORGE.format(reply=b'{"passed": 1, "error": "", "missing": []}\n'),
    "closes its pipe": "import os\nos.closerange(0, 64)\ndef f():\n    return 1",
    "does not parse": "def f(:",
    "null byte": "def f():\n    return 1\n\0",
    "no candidate": "def g():\n    return 1",
    "candidate that is no function": "f = 1",
    "raises at import": "def f():\n    return 1\nraise ValueError('no')",
    "recursion": "def f():\n    return f()",
    "recursion without limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f():\n    return f()",
    "deep expression": "def f():\n    return " + "(" * 5000 + "1" + ")" * 5000,
    "returns 100 MB": "def f():\n    return 'a' * 10**8",
    "deeply nested list": "def f():\n    x = []\n    for _ in range(10**5):\n        x = [x]\n    return x",
    "list in itself": "def f():\n    x = []\n    x.append(x)\n    return x",
    "returns a function": "def f():\n    return lambda: 1",
    "exception that fails to print": "class Bad(Exception):\n    def __str__(self):\n        raise self\n"
    "def f():\n    raise Bad",
    "shared memory": LIBC
    + "def f():\n    if libc.shmget(0, 10**9, 0o1600) == -1:\n        raise MemoryError\n    return 1",
    "new namespaces": LIBC + "def f():\n    return 1 if libc.unshare(0x10000000) == 0 else 0",
    "traces itself": LIBC + "def f():\n    return 1 if libc.ptrace(16, 1, 0, 0) == 0 else 0",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_fails_and_leaves_the_others_alone(name):
    verdict = attack(HOSTILE[name], ())
    assert (verdict.passed, verdict.total) == (0, 1) and verdict.error and "\n" not in verdict.error


BY_SYSTEM = ["fork bomb", "child that outlives", "deaf to death", "100 GB", "10 GB file", "many files"]
BY_SYSTEM += ["kills its parent", "new namespaces", "traces itself"]


@pytest.mark.parametrize("layers", [*LAYERS][1:], indirect=True)
@pytest.mark.parametrize("name", BY_SYSTEM)
def test_hostile_program_fails_without_some_layers(name, layers):
    verdict = attack(HOSTILE[name], layers)
    assert verdict.passed == 0, verdict


OF_TESTS = [*BY_SYSTEM, "thread", "shared memory", "endless loop at import", "os._exit", "closes its pipe"]
OF_TESTS += ["garbage to its pipe", "flood to its pipe", "nested garbage", "1 GB on standard output"]


@pytest.mark.parametrize("name", OF_TESTS)
def test_hostile_test_of_a_dataset_fails_and_leaves_the_others_alone(name):
    verdict = attack(HOSTILE[name], (), by="test")
    assert verdict.passed == 0 and verdict.error and "\n" not in verdict.error


by_both = pytest.mark.parametrize("by", ["program", "test"])


@pytest.fixture
def open_folder():
    """A folder that every user may enter and change, unlike tmp_path, so that only the sandbox keeps them out."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


@by_both
def test_files_stay_and_stay_unread(by, layers, open_folder, monkeypatch):
    canary = open_folder / "canary"
    canary.write_text("secret of the home")
    canary.chmod(0o666)
    monkeypatch.setenv("HOME", str(open_folder))
    program = f"""
import os, shutil
done = []
def attempt(what, *args):
    try:
        result = what(*args)
        done.append(str(result.read() if hasattr(result, "read") else args))
    except OSError:
        pass
for path in ({str(canary)!r}, os.path.join(os.path.expanduser("~"), "canary"), "../" * 20 + {str(canary)!r}):
    attempt(open, path)
    attempt(open, path, "w")
    attempt(open, path, "a")
    attempt(os.chmod, path, 0)
    attempt(os.truncate, path, 0)
    attempt(os.rename, path, path + "2")
    attempt(os.unlink, path)
attempt(os.mkdir, {str(open_folder / "hostile")!r})
attempt(os.symlink, "/", {str(open_folder / "hostile")!r})
shutil.rmtree({str(open_folder)!r}, ignore_errors=True)
attempt(os.listdir, {str(open_folder)!r})
attempt(os.rmdir, {str(open_folder)!r})
def f():
    return done
"""
    verdict = attack(program, layers, "for what in f():\n    raise ValueError(what)\nassert f() == []", by)
    assert verdict == Verdict(1, 1, ""), verdict
    assert canary.read_text() == "secret of the home" and os.listdir(open_folder) == ["canary"]
    assert canary.stat().st_mode & 0o777 == 0o666


def test_memory_of_the_program_holds_no_test(layers):
    program = """
import gc, sys
def f():
    texts, frame = [], sys._getframe().f_back
    while frame:
        texts += [str(value) for value in frame.f_locals.values()]
        frame = frame.f_back
    texts += [str(x)[:10**4] for x in gc.get_objects() if type(x) in (list, tuple, dict, bytes, str)]
    word = "".join(reversed("eldeen"))
    return len(texts) > 100, sum(word in text for text in texts)
"""
    verdict = attack(program, layers, "needle = (True, 0)\nassert f() == needle")
    assert verdict == Verdict(1, 1, "")


@by_both
def test_python_folder_is_read_only(by, layers):
    program = "import os\ndef f():\n    open(os.path.dirname(os.__file__) + '/hostile.py', 'w')\n    return 1"
    assert attack(program, layers, by=by).passed == 0
    assert not os.path.exists(os.path.dirname(os.__file__) + "/hostile.py")


@by_both
def test_secret_in_the_environment_stays_secret(by, layers, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "sesame")
    program = """
import ctypes, glob, os
def f():
    found = [str(dict(os.environ)), str(ctypes.CDLL(None).getenv(b"SECRET_TOKEN"))]
    for pid in ["self", *range(1, 35000)] if os.path.exists("/proc/self") else []:
        try:
            found.append(open(f"/proc/{pid}/environ").read())
        except OSError:
            pass
    return "".join(found)
"""
    test = "text = f()\nassert 'ses' + 'ame' not in text\nassert text == '{}0'"
    assert attack(program, layers, test, by) == Verdict(2, 2, "")


@by_both
def test_network_is_out_of_reach(by, layers):
    program = """
import socket
def f(port):
    with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
        connection.send(b"hello")
    return 1
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        verdict = attack(program, layers, f"assert f({listener.getsockname()[1]}) == 1", by)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert verdict.passed == 0 and ("PermissionError" in verdict.error or "OSError" in verdict.error), verdict


@by_both
def test_killing_everything_kills_nothing_else(by, layers):
    program = "import os\ndef f():\n    for pid in (-1, os.getppid() or -1, *range(2, 500)):\n        try:\n"
    program += (
        "            os.kill(pid, 0)\n            return 1\n        except OSError:\n            pass\n    return 0"
    )
    if (
        by == "test"
    ):  # which has no process namespace of its own, where -1 is nobody; here it is all, and never an error
        program = program.replace("(-1, ", "(")
    assert attack(program, layers, by=by).passed == 0  # signal 0 only asks whether it might


def test_parallel_hostile_programs_do_not_reach_each_other(layers):
    jobs = [GOOD, (HOSTILE["fork bomb"], "assert f() == 1", "f"), (HOSTILE["list that grows"], "assert f() == 1", "f")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdicts = run_tests(jobs * 2, workers=4, seconds=2, without=layers)
    assert [v.passed for v in verdicts] == [2, 0, 0] * 2


CANDIDATE = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4\n"
SORTS = """
import collections
def f(x): return sorted(x)
def g(x): return x
def h(x):
    if x < 0: raise ValueError("below 0")
    return x
class Wrong(KeyError): pass
def k(): raise Wrong("it")
def c(x): return collections.Counter(x)
def forever(): 
    while True: pass
"""


@pytest.mark.parametrize(
    ("program", "test", "entry_point", "expected"),
    [
        (GOOD[0], CANDIDATE, "double", (2, 2, "")),
        ("def double(x): return x + 1", CANDIDATE, "double", (1, 2, "assert candidate(2) == 4: got AssertionError")),
        (GOOD[0], "check = 3\nassert double(1) == 2", "double", (1, 1, "")),
        ("def check(n): return n > 1", "assert check(2) == True\nassert check(1) == False", "check", (2, 2, "")),
        (GOOD[0], "for x in range(5):\n    assert double(x) == 2 * x", "double", (1, 1, "")),
        (
            "def double(x): return 2 * x if x < 4 else 0",
            "for x in range(5):\n    assert double(x) == 2 * x",
            "double",
            (0, 1, "assert double(x) == 2 * x: got AssertionError"),
        ),
        (GOOD[0], "for x in []:\n    assert double(x)", "double", (0, 1, "assert double(x): never ran")),
        (SORTS, "assert f(3)\nassert f([2, 1]) == [1, 2]", "f", (1, 2, "assert f(3): got TypeError: 'int' object is")),
        (SORTS, "assert f([1]) == [1]\nf(1)\nassert f([]) == []", "f", (1, 2, "TypeError: 'int' object is not")),
        (SORTS, "assert f([]) == []\nforever()\nassert f([]) == []", "f", (1, 2, "timed out")),
        (SORTS, "assert h(1) == 1\nassert forever() == 1", "f", (1, 2, "assert forever() == 1: timed out")),
        (SORTS, "while True: pass\nassert f([]) == []", "f", (0, 1, "timed out")),
        (SORTS, "assert g(1) == 1\nassert any(iter(int, 1))", "g", (0, 2, "timed out")),  # C code, deaf to alarms
        (
            SORTS,
            "try:\n    h(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'below 0'",
            "h",
            (2, 2, ""),
        ),
        (SORTS, "try:\n    h(1)\n    assert False\nexcept ValueError:\n    pass", "h", (0, 1, "assert False: got Ass")),
        (SORTS, "try:\n    k()\nexcept KeyError:\n    assert True\n    assert f([]) == []", "k", (1, 1, "")),
        (SORTS, "assert c('aab') == {'a': 2, 'b': 1}", "c", (1, 1, "")),
        (SORTS, "assert g((1, [2])) == (1, [2])\nassert g((1,)) == [1]", "g", (1, 2, "assert g((1,)) == [1]: got A")),
        (SORTS, "assert type(g(True)) is bool and type(g(1.0)) is float and type(g(1)) is int", "g", (1, 1, "")),
        (SORTS, "x = g(float('nan'))\nassert x != x\nassert g(float('-inf')) < 0", "g", (2, 2, "")),
        (SORTS, "assert g({1, (2, 3)}) == {(2, 3), 1}\nassert g(frozenset('ab')) == frozenset('ab')", "g", (2, 2, "")),
        (
            SORTS,
            "for x in (None, 1j, b'\\0', '\\ud800é', 10**5000, -(2**64), {1: {'a': ()}}):\n    assert g(x) == x",
            "g",
            (),
        ),
        (SORTS, "assert g(x=3) == 3 and (y := g(4)) == 4\nassert y == 4", "g", (2, 2, "")),
        (SORTS, "import math\nassert math.fabs(f([2, 1])[0] - g(1.0)) < 1e-4, 'text'", "f", (1, 1, "")),
        (
            SORTS,
            "assert g(print)",
            "g",
            (0, 1, "assert g(print): got TypeError: builtin_function_or_method is not plain"),
        ),
        (SORTS + "\nif __name__ == '__main__':\n    input()", "assert g(1) == 1", "g", (1, 1, "")),
        (
            "import hashlib, math, re, random, dataclasses\ndef f(): return math.sqrt(4)",
            "assert f() == 2",
            "f",
            (1, 1, ""),
        ),
    ],
)
def test_verdict(program, test, entry_point, expected):
    (verdict,) = run_tests([(program, test, entry_point)], seconds=1)
    passed, total, error = expected or (1, 1, "")
    assert (verdict.passed, verdict.total) == (passed, total), verdict
    assert verdict.error.startswith(error) and bool(verdict.error) == (passed < total)


CASES = "cases = [(1, 2), (2, 4)]\n"
SWALLOWED = {  # what a test's own machinery would take an error of the program for
    "map": ("StopIteration", CASES + "assert all(map(lambda c: candidate(c[0]) == c[1], cases))"),
    "sum": ("StopIteration", CASES + "assert sum(map(lambda c: candidate(c[0]) != c[1], cases)) == 0"),
    "next": ("StopIteration", CASES + "assert next((c for c in cases if candidate(c[0]) != c[1]), None) is None"),
    "named": ("StopIteration", "try:\n    next(iter([]))\nexcept StopIteration:\n    pass\nassert all(map(f, [1, 2]))"),
    "sequence": (
        "IndexError",
        "class Cases:\n    def __getitem__(self, k):\n        return candidate(range(3)[k]) != 2 * k\n"
        "assert not any(Cases())",
    ),
    "property": (
        "AttributeError",
        "class Case:\n    fails = property(lambda self: [candidate(1), candidate(2)] != [2, 4])\n"
        "assert not getattr(Case(), 'fails', False)",
    ),
    "loop": ("ValueError", "for x in range(3):\n    y = candidate(x)\n    assert y == 2 * x"),
    "iterator": ("StopIteration", "for x, y in enumerate(map(candidate, range(3))):\n    assert y == 2 * x"),
    "function": (
        "ValueError",
        "def one(x):\n    y = f(x)\n    assert y == 2 * x\n    return y\nassert f(0) == 0\n[one(x) for x in range(3)]",
    ),
}


@pytest.mark.parametrize("case", SWALLOWED)
@pytest.mark.parametrize("right", [0, 1])
def test_no_error_of_a_program_passes_an_assert(case, right):
    """It answers so many calls rightly, then raises."""
    error, test = SWALLOWED[case]
    program = f"calls = 0\ndef f(x):\n    global calls\n    calls += 1\n    if calls > {right}: raise {error}\n"
    program += "    return 2 * x"
    (verdict,) = run_tests([(program, test, "f")])
    assert verdict.passed == (case == "function" and right == 1) and verdict.error
    (verdict,) = run_tests([("def f(x):\n    return 2 * x", test, "f")])
    assert verdict.passed == verdict.total


def test_an_error_that_the_test_names_is_of_its_kind():
    program = "def f(x):\n    raise {'k': KeyError, 'o': FileNotFoundError, 's': StopIteration}[x]('it')"
    tests = {
        "try:\n    f('k')\n    assert False\nexcept LookupError:\n    assert 1 < 2": 2,
        "try:\n    f('o')\n    assert False\nexcept IOError:\n    assert 1 < 2": 2,
        "try:\n    f('k')\n    assert False\nexcept Exception as e:\n    assert 'it' in str(e)": 2,
        "try:\n    f('s')\n    assert False\nexcept StopIteration:\n    assert 1 < 2": 0,
    }
    verdicts = run_tests([(program, test, "f") for test in tests])
    assert [verdict.passed for verdict in verdicts] == [*tests.values()]


@pytest.mark.parametrize(
    ("test", "message"), [("assert (", "does not parse"), ("x = 1", "no assert"), ("assert True", "no a")]
)
def test_faulty_test_is_the_datasets_fault(test, message):
    with pytest.raises(ValueError, match=f"the test of job 1 .*{message}"):
        run_tests([GOOD, (GOOD[0], test, "double")])


def test_missing_protection_is_reported_once():
    assert "no namespaces" in missing_protection(("namespaces",))
    with pytest.warns(UserWarning, match="no namespaces") as warnings_seen:
        assert run_tests([GOOD] * 4, without=("namespaces",)) == [PASSED] * 4
    assert len(warnings_seen) == 1


def test_player_that_cannot_start_is_no_verdict(monkeypatch):
    missing_protection()
    monkeypatch.setattr(sandbox, "__file__", "/nowhere/sandbox.py")
    with pytest.raises(RuntimeError, match="the sandbox does not start"):
        run_tests([GOOD])


@pytest.mark.slow
def test_64_programs_take_less_than_3_seconds():
    missing_protection()
    seconds = []
    for _ in range(3):  # the best of three, for other programs may keep the cores
        start = time.monotonic()
        assert run_tests([GOOD] * 64) == [PASSED] * 64
        seconds.append(time.monotonic() - start)
        if seconds[-1] < 3:
            break
    assert min(seconds) < 3


def test_processes_of_one_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert sandbox.num_cores() == 2
