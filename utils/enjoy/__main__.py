"""See what a run's agents write, beside what the untouched model writes on the same held-out items.

    python -m utils.enjoy RUN                               four held-out items in the terminal, with their rewards
    python -m utils.enjoy RUN --items 8 --html page.html    and as a page that needs no other file
    python -m utils.enjoy RUN --prompt "Say a number."      a prompt of your own, for which there is no reward
    python -m utils.enjoy RUN --play 0                      you have seat 0 of its game, against the run in the others

Task, items, models and sampling are the run's, from RUN/config.json, and its agents those of the newest checkpoint; the
same command prints the same again.
"""

import os
from pathlib import Path

import tyro
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from utils.cli import UserError, command_line, flags, one_line
from utils.enjoy import show
from utils.enjoy.page import page
from utils.enjoy.person import play_seat
from utils.enjoy.text import as_text
from utils.files import WriteError, write_whole
from utils.run.reader import read_config


@flags
class EnjoyArgs:
    """What is shown, and how it is sampled."""

    run: tyro.conf.Positional[str] = ""  # folder of a run
    items: PositiveInt = 4  # held-out items, or seeds of the environment: the first of the run's
    prompt: str | None = None  # a prompt of your own in their place
    play: NonNegativeInt | None = None  # the seat that you take in --items matches against the run's agents
    html: str | None = None  # a page to write too; what is there is replaced
    seed: NonNegativeInt = 1  # seed of the sampling, the same for both teams
    do_sample: bool = True  # sample as the run did; --no-do-sample: take the likeliest token
    temperature: PositiveFloat | None = None  # the logits are divided by it; none: as in the run
    script: str | None = None  # the run's script, where it is none of the project's: it is imported, and so run
    task: str | None = None  # a FILE.py that the run names as its task: it is imported, and so run
    env: str | None = None  # a FILE.py that the run names as its environment: it is imported, and so run
    dataset: str | None = None  # a file or folder that the run names as its data: it is shown
    trust_remote_code: bool = False  # run code that comes with the run's models


@flags
class Args(EnjoyArgs):
    """All flags."""


def main(args):
    """Show what the teams write, and write the page if one is asked for; returns what `show` does.

    With --play it is what `play_seat` does.
    """
    file = Path(args.html or "page.html")
    if os.path.isdir(file) or not os.path.isdir(file.parent):
        raise UserError(f"--html takes a file to write, in a folder that is there, got {one_line(file, 80)}")
    code = {name: getattr(args, name) for name in ("task", "env", "dataset", "trust_remote_code")}
    code = {name: value for name, value in code.items() if value}
    if args.play is not None:
        if args.prompt is not None or args.html:
            raise UserError("--play is a match in the terminal: it takes no --prompt and no --html")
        sampling = (args.seed, args.do_sample, args.temperature, args.script)
        return play_seat(args.run, args.play, args.items, *sampling, **code)
    samples = show(args.run, args.items, args.prompt, args.seed, args.do_sample, args.temperature, args.script, **code)
    print(as_text(samples))
    if args.html:
        try:
            write_whole(file, page(args.run, read_config(args.run), samples))
        except OSError as error:
            raise WriteError(f"--html {one_line(file, 80)} can't be written: {error.strerror}") from error
        print(f"wrote {file}")
    return samples


if __name__ == "__main__":
    command_line(main, Args, __doc__)
