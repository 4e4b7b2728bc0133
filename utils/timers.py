"""Limits on the time of a call, which hold whatever the code that is called does with alarms; they rest in a save."""

import contextlib
import signal
import threading
import time

from utils.cli import UserError

OVER = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # sent where a limit is over: code with alarms takes SIGALRM
AGAIN = 1.0  # seconds after which it is sent once more, where the code has caught the error
limits = []  # under way, the outermost first


def check_timer(seconds):
    """Raise UserError where `time_limit` can't serve."""
    if seconds is not None and threading.current_thread() is not threading.main_thread():
        raise UserError("--reward-timeout takes the main thread: its alarm is a signal")


@contextlib.contextmanager
def time_limit(seconds):
    """Within it, Python code that takes longer is ended by a TimeoutError; None: no limit. For the main thread only.

    Code that catches the error has not been in time either.
    """
    if seconds is None:
        yield
        return
    limit = Limit(seconds)
    handler = signal.signal(OVER, raise_over)
    limits.append(limit)
    try:
        try:
            limit.start()
            yield
        finally:
            limit.stop()
    finally:
        limit.stop()  # where the time was over just before the other one
        limits.remove(limit)
        signal.signal(OVER, handler)
    if limit.is_over:
        raise limit.error()


class Limit:
    """A thread that sends the signal once the time is over, but for that between `stop` and `start`."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.left = seconds
        self.is_over = False

    def start(self):
        self.started = time.monotonic()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.watch, args=(self.stopped,), daemon=True)
        self.thread.start()

    def watch(self, stopped):
        wait = max(0.0, self.left)
        while not stopped.wait(wait):
            self.is_over = True
            signal.pthread_kill(threading.main_thread().ident, OVER)
            wait = AGAIN

    def stop(self):
        self.stopped.set()
        self.thread.join()
        self.left -= time.monotonic() - self.started

    def is_running(self):
        return not self.stopped.is_set()

    def error(self):
        return TimeoutError(f"no answer within --reward-timeout, {self.seconds:g} s")


def raise_over(*_):
    for limit in limits:
        if limit.is_over and limit.is_running():
            raise limit.error()


@contextlib.contextmanager
def at_rest():
    """Within it no limit, and no alarm of the code that is called, is over; then they go on where they were."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    running = [limit for limit in limits if limit.is_running()]
    alarms = {}
    try:
        for limit in running:
            limit.stop()
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            alarms[timer] = signal.setitimer(timer, 0)
        yield
    finally:
        for limit in running:
            limit.start()
        for timer, (left, interval) in alarms.items():
            signal.setitimer(timer, left, interval)
