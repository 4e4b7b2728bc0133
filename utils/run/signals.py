"""SIGTERM, SIGINT and SIGHUP end a run after the update under way."""

import os
import signal
import threading
import time

from utils import distributed

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """`number` is the signal that is to end the run, or 0; on_first() is called when it comes. A second one kills."""

    def __init__(self, on_first):
        self.on_first = on_first
        self.number = 0
        self.time = None
        self.terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        self.handlers = {}  # as they were

    def catch(self):
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                    self.handlers[number] = signal.signal(number, self.handle)

    def release(self):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def handle(self, number, frame):
        if self.time is None:
            self.number = number
            self.time = time.monotonic()
            if number == signal.SIGHUP:  # nobody reads there any more, and writing there is an error
                for stream in self.terminals:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            if distributed.is_main():
                os.write(2, f"\n{signal.Signals(number).name}: {what_follows()}\n".encode())
            self.on_first()
        elif time.monotonic() - self.time > 1:  # sooner it is no second one: `timeout` sends its own twice
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def what_follows():
    """What a first signal brings, and in how many seconds, where a launcher is known not to wait for longer."""
    seconds = distributed.seconds_to_stop()
    finished = "the update under way is finished and saved" + (f", if {seconds} s suffice" if seconds else "")
    return f"{finished}, then the run stops; once more, and it stops at once"
