"""SIGTERM, SIGINT and SIGHUP end a run after the update under way."""

import contextlib
import os
import select
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
                silence(self.terminals)
            silence_unread(number)
            if distributed.is_main():
                with contextlib.suppress(OSError):
                    os.write(2, f"\n{signal.Signals(number).name}: {what_follows()}\n".encode())
            self.on_first()
        elif time.monotonic() - self.time > 1:  # sooner it is no second one: `timeout` sends its own twice
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def silence_unread(number):
    """Silence the standard streams that nobody reads any more, as to write there is an error; `number` is the signal.

    Ctrl-C in `... | tee log` ends the reader too, maybe a moment later.
    """
    unread = select.poll()
    for stream in (1, 2):
        unread.register(stream, 0)  # what is always told is: no reader (POLLERR), hung up (POLLHUP)
    events = unread.poll(100 if number == signal.SIGINT else 0)
    silence([stream for stream, event in events if event & (select.POLLERR | select.POLLHUP)])


def silence(streams):
    """Have what is written to streams, by their numbers, go nowhere."""
    for stream in streams:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)


def what_follows():
    """What a first signal brings, and in how many seconds, where a launcher is known not to wait for longer."""
    seconds = distributed.seconds_to_stop()
    finished = "the update under way is finished and saved" + (f", if {seconds} s suffice" if seconds else "")
    return f"{finished}, then the run stops; once more, and it stops at once"
