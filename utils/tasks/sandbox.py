"""Score programs that a language model wrote by unit tests, without trusting them.

Each job runs in a fresh interpreter that starts this file as a script and splits in three. The keeper, which runs
nothing of the job, ends the other two in time. The player runs the program, and never holds the tests. The judge runs
the tests and calls the player's functions through a pipe; only plain data crosses it, and arrives as new None, bool,
int, float, complex, str, bytes, list, tuple, set, frozenset and dict (a subclass, such as a Counter, as its plain
type). So a program that exits, patches the builtins or returns an object that equals everything gains nothing by it.
Nor does one that raises what ends a loop: its error is of the kind that it raised only where the test names that kind,
or one that it belongs to, else of a kind that nothing else has.
The judge is shut in as the player is, for the tests may be a stranger's too; they decide on their own verdict alone.

Both get limits on memory and time, may not write files, and cannot start threads or processes. On Linux each gets
namespaces (no network, no other processes, no files but Python's own and the system's libraries), Landlock (the same
for files, by path), a seccomp filter (no sockets, signals, processes, shared memory, nor any change to a file) and an
unprivileged user without capabilities. What the kernel or the user does not give is left out, and missing_protection()
says so; on other systems than Linux only the limits are left.

It does not protect from: holes in the kernel; what a program learns from timing; the load of all cores up to the
limits; reading Python's own folder and the system's libraries; a helper which a test borrows from the program and which
deceives it; answers that the program knew from its prompt. A test sees no change that the program makes to its
arguments, can pass it no functions, and finds no packages but Python's own, and nor does the program.
"""

import ast
import functools
import json
import os
import struct
import sys

if __name__ != "__main__":  # the script, started for each job, does without these slow imports
    import subprocess
    import warnings
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Verdict:
        """How many of a test's asserts passed, and in one line why not all did ("" where all did)."""

        passed: int
        total: int
        error: str


LONGEST = 2**20  # bytes of one message of the player
PLAYERS, JUDGES = 2_000_000_000, 3_000_000_000  # their users' numbers, before that of the keeper's process

# What a seccomp filter denies, by the machine's number of it (on others than x86_64 there is none): sockets; signals;
# touching other processes; new processes and namespaces; memory that no limit counts; making, renaming and removing
# files; their owners, rights, times and lengths; prctl, keys, io_uring, bpf and the like. Last, those that open files,
# with the argument that says for what.
DENIED = {
    "x86_64": (
        0xC000003E,
        "41  62 129 200 234 297 424 434  101 141 144 203 302 310 311  56 57 58 272 308 435  29 64 68 240 319 "
        "82 83 84 85 86 87 88 133 258 259 263 264 265 266 316  76 90 91 92 93 94 132 188 189 190 197 198 199 235 260 "
        "261 268 280 452  157 248 250 298 321 323 425 437",
        {2: 1, 257: 2},
    ),
}


def run_tests(jobs, workers=None, seconds=5.0, memory=512, without=()):
    """Verdicts on jobs, (program, test, entry_point) strings each, in their order.

    A test calls the function by its name or as `candidate`; if it defines `check`, check(candidate) is called. Each
    assert counts once, and as passed if it ran and held whenever it ran; the others run on after one failed. A test
    that an error ends between asserts has not passed: its last assert does not count where it might have run again, or
    where all the others passed. `assert False` has to stay unreached, and `assert True` does not count. `workers` jobs
    run at a time (default: num_cores), for at most `seconds` of wall time and with `memory` MiB of address space each.
    `without` names layers to do without, as on a kernel that has none: "namespaces", "landlock", "seccomp" (for tests).

    Warns where a protection is missing. Raises ValueError for a test that does not parse or has no assert,
    RuntimeError where no player can be started, OSError on Windows; nothing for what a program does.
    """
    jobs = list(jobs)
    totals = [count_asserts(test, k) for k, (_, test, _) in enumerate(jobs)]
    missing = missing_protection(tuple(without))
    if missing:
        warnings.warn(f"sandbox: {missing}", stacklevel=2)
    pool = ThreadPoolExecutor(workers or num_cores())
    try:
        run = functools.partial(run_job, seconds=seconds, memory=memory, without=without)
        results = list(pool.map(run, jobs))
    finally:
        pool.shutdown(cancel_futures=True)
    return [Verdict(min(r.get("passed", 0), total), total, r["error"]) for r, total in zip(results, totals)]


def num_cores():
    """The cores that this process may use; of several that torchrun started here, its share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@functools.cache
def missing_protection(without=()):
    """One line that names the protections which this kernel or user does not give; "" where all are given."""
    return "; ".join(run_job(("def f(): return 1", "assert f() == 1", "f"), 30, 512, without)["missing"])


def count_asserts(test, k):
    try:
        count = len(rewrite(test)[1])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test of job {k} does not parse: {error}") from None
    if not count:
        raise ValueError(f"the test of job {k} has no assert")
    return count


def run_job(job, seconds, memory, without):
    """What the judge of one job says, a dict."""
    if os.name != "posix":
        raise OSError("the sandbox takes Linux or another Unix")
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), json.dumps([seconds, memory, list(without)])]
    env = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}  # some Pythons start by it
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, env=env, cwd="/", start_new_session=True, **pipes)
    try:
        output, failure = process.communicate(json.dumps(job).encode(), timeout=seconds + 30)
    except BaseException as error:  # the keeper is stuck, or the keyboard stopped us
        os.killpg(process.pid, 9)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return {"error": "timed out"}
        raise
    result = read_verdict(output)
    if "broken" in result or (failure and not result):
        raise RuntimeError(f"the sandbox does not start: {result.get('broken') or line(failure.decode()[-200:])}")
    return result or {"error": "timed out" if process.returncode == 3 else "the judge died while it ran the test"}


def read_verdict(output):
    """What the judge wrote, a dict, {} of nothing; tests that write there themselves fail."""
    try:
        result = json.loads(output or "{}")
        if type(result.get("passed", 0)) is int and type(result.get("error", "")) is str:
            return result
    except (ValueError, RecursionError, AttributeError):
        pass
    return {"error": "the test wrote over its verdict"}


def line(text):
    text = " ".join(str(text).split())
    return text if len(text) <= 200 else text[:199] + "…"


class Raised(Exception):
    """An error of the program, of the kind `name`, which means nothing to the test."""

    def __init__(self, name, text):
        super().__init__(text)
        self.name = name


def describe(error):
    name = error.name if isinstance(error, Raised) else type(error).__name__
    return line(f"{name}: {error}" if str(error) else name)


def known_kinds(test):
    """The builtin kinds of errors that a test names; none that ends a loop, for map, next and their like take these."""
    import builtins

    ends = (StopIteration, StopAsyncIteration)
    kinds = [kind for name, kind in vars(builtins).items() if name in test and isinstance(kind, type)]
    return tuple(kind for kind in kinds if issubclass(kind, Exception) and kind not in (Exception, *ends))


def rewrite(test):
    """The test's syntax tree with recorded conditions in place of asserts, and the asserts.

    An assert's `repeats` says whether it stands in a loop, or in a function other than check.
    """
    asserts = []
    around = []  # loops and functions

    class Recorder(ast.NodeTransformer):
        def visit_repeated(self, node):
            around.append(node)
            self.generic_visit(node)
            around.pop()
            return node

        visit_For = visit_While = visit_AsyncFor = visit_AsyncFunctionDef = visit_repeated

        def visit_FunctionDef(self, node):
            return self.generic_visit(node) if node.name == "check" and not around else self.visit_repeated(node)

        def visit_Assert(self, node):
            if isinstance(node.test, ast.Constant) and node.test.value:
                return node
            k = len(asserts)
            node.repeats = bool(around)
            asserts.append(node)
            recorded = ast.parse(f"try:\n __begin__({k})\n __end__({k}, 0)\nexcept Exception:\n __end__({k})").body[0]
            recorded.body[1].value.args[1] = node.test
            return ast.copy_location(recorded, node)

    return ast.fix_missing_locations(Recorder().visit(ast.parse(test))), asserts


def pack(value):
    """Plain data as JSON can hold it; raises TypeError for anything else."""
    small = isinstance(value, int) and value.bit_length() < 64
    if value is None or small or isinstance(value, (float, str)):
        return value
    if isinstance(value, int):
        return ["int", hex(value)]  # Python refuses to read long decimals
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", [[pack(key), pack(item)] for key, item in value.items()]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [pack(item) for item in value]]
    raise TypeError(f"{type(value).__name__} is not plain data")


def unpack(code):
    """The plain data that pack() turned into code; raises some Exception for what it cannot have made."""
    if not isinstance(code, list):
        return code
    kind, body = code
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in body}
    if kind in ("list", "tuple", "set", "frozenset"):
        kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
        return kinds[kind](map(unpack, body))
    return {"int": lambda x: int(x, 16), "complex": lambda x: complex(*x), "bytes": bytes.fromhex}[kind](body)


def keep(seconds, memory, without):
    """Fork the judge and the player before either knows the job; end both when the judge ends or the time is over."""
    import signal

    pid = os.getpid()
    for what, most in (("AS", memory * 2**20), ("CPU", int(seconds) + 2), ("CORE", 0)):
        limit(f"RLIMIT_{what}", most)
    asks, ask = os.pipe()
    tells, tell = os.pipe()
    rules, rule = os.pipe()
    pids = [fork(lambda: judge(tells, ask, rule, pid, without, seconds), closing=(asks, tell, rules))]
    refused = new_processes() if "namespaces" not in without else "left out"
    pids.append(fork(lambda: play(asks, tell, pid, without, refused), closing=()))
    for end in (asks, ask, tells, tell, rule):
        os.close(end)

    def end_both(*_):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end_both)
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)  # the judge's own alarm comes first, unless C code keeps it
    _, status = os.waitpid(pids[0], 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    os.kill(pids[1], signal.SIGKILL)
    os.waitpid(pids[1], 0)  # returns when all processes of its namespace are gone
    os.set_blocking(rules, False)
    try:
        os.write(1, os.read(rules, 2**16))  # all that fits into the pipe, and so all that there may be
    except BlockingIOError:
        pass
    return 3 if status == signal.SIGKILL else 0


def fork(work, closing):
    pid = os.fork()
    if pid:
        return pid
    try:
        for end in closing:
            os.close(end)
        work()
    finally:
        os._exit(1)


def limit(name, most):
    import resource

    hard = resource.getrlimit(getattr(resource, name))[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(getattr(resource, name), (most, most))
    except (OSError, ValueError):  # macOS takes no limit on memory
        pass


def judge(replies, requests, out, pid, without, seconds):
    """Shut this process in, run the test of the job on standard input, and write the verdict to the pipe `out`."""
    import builtins
    import signal

    job = sys.stdin.buffer.read()
    null = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.environ.clear()
    requests, replies = open(requests, "wb", buffering=0), open(replies, "rb")
    program, test, entry_point = json.loads(job)
    tree, asserts = rewrite(test)
    known = known_kinds(test)
    ran, failed, under_way, last = set(), {}, None, None
    missing = []

    def finish(error, ended=False):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        if under_way is not None:
            failed.setdefault(under_way, error)
        passed = ran - failed.keys()
        idle = [k for k in range(len(asserts)) if k not in ran]
        if not ended and last in passed and (asserts[last].repeats or len(passed) == len(asserts)):
            passed.remove(last)
        if ended:  # `assert False`, the only constant that is recorded, is there to stay unreached
            passed |= {k for k in idle if isinstance(asserts[k].test, ast.Constant)}
        if failed and len(passed) < len(asserts):
            k, reason = next(iter(failed.items()))
            error = f"{line(ast.unparse(asserts[k]))}: {reason}"
        elif ended and len(passed) < len(asserts):
            error = f"{line(ast.unparse(asserts[min(set(idle) - passed)]))}: never ran"
        result = {"passed": len(passed), "error": error, "missing": missing}
        os.write(out, json.dumps(result).encode())
        os._exit(0)

    def begin(k):
        nonlocal under_way, last
        under_way = last = k
        ran.add(k)

    def end(k, value=None):
        nonlocal under_way
        error = sys.exc_info()[1] or AssertionError()
        if not value:
            failed.setdefault(k, f"got {describe(error)}")
        under_way = None

    def request(**message):
        try:
            requests.write(json.dumps(message).encode() + b"\n")
            reply = replies.readline(LONGEST + 1)
        except OSError:
            reply = b""
        if not reply:
            raise Raised("RuntimeError", "the program has ended")
        try:
            reply = json.loads(reply)
            name, text = map(str, reply["raised"]) if "raised" in reply else ("", "")
            value = None if name else unpack(reply["value"])
        except Exception:
            raise Raised("RuntimeError", "the program's answer is not plain data") from None
        if not name:
            return value
        kind = getattr(builtins, name, None)
        error = Raised(name, text)
        if isinstance(kind, type) and issubclass(kind, known):
            try:
                error = kind(text)
            except TypeError:  # some, such as UnicodeDecodeError, take more
                pass
        raise error

    def proxy(name):
        return lambda *args, **kwargs: request(call=name, args=pack(args), kwargs=pack(kwargs))

    signal.signal(signal.SIGALRM, lambda *_: finish("timed out"))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        refused = new_processes() if "namespaces" not in without else "left out"
        own_missing = shut_in(JUDGES + pid, without, refused)
        missing, broken = json.loads(replies.readline() or '[[], "the player died"]')
        missing = list(dict.fromkeys(missing + own_missing))
    except Exception as error:
        broken = describe(error)
    if broken:
        os.write(out, json.dumps({"broken": broken}).encode())
        os._exit(0)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    borrowed = {name for name in called if not hasattr(builtins, name)} | {entry_point}
    names = {name: proxy(name) for name in borrowed} | {"candidate": proxy(entry_point)}
    names |= {"__name__": "test", "__begin__": begin, "__end__": end}
    try:
        request(program=program)
        exec(compile(tree, "test", "exec"), names)
        if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
            names["check"](names["candidate"])
    except BaseException as error:
        finish(describe(error))
    finish("", ended=True)


def play(requests, replies, pid, without, refused):
    """Shut this process in, then run the program and call its functions as the judge asks."""
    null = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    low, high = sorted((requests, replies))
    for first, last in ((3, low), (low + 1, high), (high + 1, 256)):  # subprocess left none above
        os.closerange(first, last)
    requests, replies = open(requests, "rb"), open(replies, "wb", buffering=0)
    os.environ.clear()
    try:
        hello = shut_in(PLAYERS + pid, without, refused), ""
    except BaseException as error:
        hello = [], describe(error)
    replies.write(json.dumps(hello).encode() + b"\n")
    if hello[1]:
        return
    module = sys.modules["program"] = type(sys)("program")
    for message in requests:
        try:
            message = json.loads(message)
            if "program" in message:
                value = exec(compile(message["program"], "program", "exec"), module.__dict__)
            elif message["call"] in module.__dict__:
                function = module.__dict__[message["call"]]
                value = function(*unpack(message["args"]), **unpack(message["kwargs"]))
            else:
                raise NameError(f"name {message['call']!r} is not defined")
            reply = json.dumps({"value": pack(value)}).encode()
            if len(reply) >= LONGEST:
                raise ValueError(f"the value takes {len(reply)} bytes, more than {LONGEST}")
        except BaseException as error:
            name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
            reply = json.dumps({"raised": [name, line(error)]}).encode()
        replies.write(reply + b"\n")


def kernel(name, *args):
    """Call the C library's function of that name; raises OSError where it fails or does not exist."""
    import ctypes

    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    result = function(*(ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args)) if function else -1
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def new_processes():
    """Let the next fork be the first process of a namespace of its own; returns why it can't be, or ""."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        kernel("unshare", 0x20000000 | (0x10000000 if uid else 0))  # CLONE_NEWPID, CLONE_NEWUSER
        if uid:
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
    except OSError as error:
        return str(error.strerror)
    return ""


def shut_in(uid, without, refused):
    """Give up whatever a program does not need, root too, for the user `uid`; returns what protection is missing."""
    without = without if sys.platform == "linux" else ["namespaces", "landlock", "seccomp"]
    os.chdir("/")
    folders = {*sys.path, sys.base_prefix + "/lib", "/usr/lib", "/usr/lib64", "/lib", "/lib64"}
    folders = sorted(folder for folder in folders if os.path.isdir(folder))
    try:
        refused = refused or new_root(folders)
    except OSError as error:
        refused = error.strerror
    missing = []
    if refused:
        missing.append(f"no namespaces ({refused}), so programs see which files and processes there are")
    if os.geteuid() == 0:
        missing += drop_user(uid)
    for what, most in (("NPROC", 0), ("NOFILE", 64), ("FSIZE", 0)):
        limit(f"RLIMIT_{what}", most)
    if sys.platform == "linux":
        kernel("capset", struct.pack("II", 0x20080522, 0), bytes(24))
        kernel("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        kernel("prctl", 1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, which a change of the user undoes
    try:
        landlock(folders, without)
    except OSError as error:
        if refused:
            missing.append(f"no Landlock ({error.strerror}), so they read the files that their user may read")
    try:
        filter_calls(without)
    except OSError as error:
        more = ", change their user's files, reach the network and signal processes" if refused else ""
        missing.append(f"no seccomp filter ({error.strerror}), so they get memory beyond the limit{more}")
    return missing


def new_root(folders):
    """Leave the network behind, and all files but the folders, read-only."""
    kernel("unshare", 0x00020000 | 0x40000000 | 0x08000000)  # CLONE_NEWNS, CLONE_NEWNET, CLONE_NEWIPC
    kernel("mount", None, b"/", None, 0x44000, None)  # MS_REC, MS_PRIVATE: nothing shows outside
    kernel("mount", b"tmpfs", b"/proc", b"tmpfs", 6, b"size=1m,mode=755")  # a folder that exists
    for folder in folders:
        inside = b"/proc" + os.fsencode(folder)
        os.makedirs(inside, exist_ok=True)
        kernel("mount", os.fsencode(folder), inside, None, 0x5000, None)  # MS_BIND, MS_REC
        noexec = os.statvfs(folder).f_flag & os.ST_NOEXEC  # may not be taken away
        kernel("mount", None, inside, None, 0x1027 | noexec, None)  # MS_BIND, REMOUNT, RDONLY, NOSUID, NODEV
    kernel("mount", None, b"/proc", None, 0x1027, None)  # the root itself, too
    os.chroot("/proc")  # nobody makes a user namespace, which would give the right to get out, from within
    os.chdir("/")  # a working folder outside would be a way out


def drop_user(uid):
    """From root, become a user whom no other process has; returns what is missing then."""
    folder = os.path.dirname(os.__file__)
    try:
        while folder != "/":
            if not os.stat(folder).st_mode & 1:
                raise PermissionError(0, f"only root may enter {folder}, where Python is")
            folder = os.path.dirname(folder)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    except OSError as error:
        return [f"no user of their own ({error.strerror})"]
    return []


def landlock(folders, without):
    """Let this process open nothing but the folders, and these for reading only."""
    if "landlock" in without:
        raise OSError(0, "left out")
    version = kernel("syscall", 444, None, 0, 1)  # the newer, the more it knows: files, TCP, signals
    rules = struct.pack("QQQ", (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1, 3, 3)
    rules = rules[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = kernel("syscall", 444, rules, len(rules), 0)
    for folder in folders:
        file = os.open(folder, os.O_PATH)
        kernel("syscall", 445, ruleset, 1, struct.pack("=Qi", 12, file), 0)  # 12: read files, list folders
        os.close(file)
    kernel("syscall", 446, ruleset, 0)
    os.close(ruleset)


def filter_calls(without):
    """Let the calls of DENIED fail with EPERM from now on, and so the opening of files for anything but reading."""
    import ctypes

    if "seccomp" in without or os.uname().machine not in DENIED:
        raise OSError(0, "left out" if "seccomp" in without else f"none for {os.uname().machine}")
    architecture, numbers, opening = DENIED[os.uname().machine]
    load, both, equal, at_least, give = 0x20, 0x54, 0x15, 0x35, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050001, 0x80000000
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    for number, argument in opening.items():
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        code += [(equal, 0, 5, number), (load, 0, 0, 16 + 8 * argument), (both, 0, 0, writes)]
        code += [(equal, 0, 1, 0), (give, 0, 0, allow), (give, 0, 0, deny)]
    code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, deny)]  # the calls of x86_64's x32
    for number in map(int, numbers.split()):
        code += [(equal, 0, 1, number), (give, 0, 0, deny)]
    code += [(give, 0, 0, allow)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    kernel("prctl", 22, 2, struct.pack("HP", len(code), ctypes.addressof(filters)), 0, 0)  # PR_SET_SECCOMP


if __name__ == "__main__":
    sys.exit(keep(*json.loads(sys.argv[1])))
