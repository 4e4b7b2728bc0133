"""Where the time of a run goes: seconds by phase. What a phase inside another one takes is not counted in the outer."""

import contextlib
import functools
import time


class Clock:
    """`seconds` by phase since `lap`; `phases` under way, the innermost last.

    `failed` are those that an error ended, the innermost first.
    """

    def __init__(self):
        self.seconds = {}
        self.phases = []
        self.failed = []
        self.since = 0.0

    def add(self):
        """Add the time since the last change of the phase to the one under way."""
        now = time.perf_counter()
        if self.phases:
            self.seconds[self.phases[-1]] = self.seconds.get(self.phases[-1], 0.0) + now - self.since
        self.since = now

    def lap(self):
        """The seconds by phase since the last call."""
        self.add()
        seconds, self.seconds = self.seconds, {}
        return seconds

    @contextlib.contextmanager
    def timed(self, name):
        """Within it, time belongs to the phase of that name."""
        self.add()
        if not self.phases:
            self.failed = []
        self.phases.append(name)
        try:
            yield
        except BaseException:
            self.failed.append(name)
            raise
        finally:
            self.add()
            self.phases.pop()


clock = Clock()  # of this process


def timed(function):
    """Count the seconds of a script's function, such as play, under its name; not where it is called by another one."""

    @functools.wraps(function)
    def timed_function(*arguments, **named):
        with contextlib.nullcontext() if clock.phases else clock.timed(function.__name__):
            return function(*arguments, **named)

    return timed_function
