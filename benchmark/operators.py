"""Where the time of an update goes, by kind of operator: its play, and what its agents learn.

    OMP_NUM_THREADS=1 python -m benchmark.operators
    OMP_NUM_THREADS=1 python -m benchmark.operators --task number --num-turns 3 --max-new-tokens 4

Flags are those of ippo_llm.py, but for those in OWN, which are refused. Of three updates the last is profiled
(torch.profiler, of which the run is slower). Prints a table: the seconds, and the shares of them that operators take
by themselves; Python has what is left.
"""

import json
import re
import sys
import tempfile
import time
from collections import Counter

from torch.profiler import ProfilerActivity, profile

import ippo_llm
from utils import plot
from utils.cli import UserError, command_line, flag_name

KINDS = {  # the first that fits an operator's name; what fits none is by elements
    "matrix products": r"mm$|mm_|linear|matmul",
    "attention": r"scaled_dot_product",
    "softmax, draws": r"softmax|multinomial|exponential|logsumexp|sort|topk",
    "copies, casts": r"copy|cat$|clone|index|gather|scatter|empty|fill|zero|stack|masked_select|nonzero|embedding",
    "by elements": r"",
}
UPDATES = 3
OWN = ("max_episodes", "eval_interval", "output_dir", "resume", "fork")  # flags that are set here


def profiled(function, phase, plays, found):
    """The function, of whose calls in the last update seconds and shares are kept in `found`."""

    def call(*values):
        if phase == "play":
            plays.append(1)
        if len(plays) < UPDATES:
            return function(*values)
        begin = time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            result = function(*values)
            seconds = time.perf_counter() - begin
        of_phase = found.setdefault(phase, Counter())
        of_phase["seconds"] += seconds
        for event in profiler.key_averages():
            if event.key.startswith("Optimizer.step"):  # with all operators in it, which are by elements
                of_phase["optimiser"] += event.cpu_time_total / 1e6
                of_phase["by elements"] -= (event.cpu_time_total - event.self_cpu_time_total) / 1e6
                continue
            kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, event.key))
            of_phase[kind] += event.self_cpu_time_total / 1e6
        return result

    return call


def main(args):
    """Print the table. Raises UserError."""
    for name in OWN:
        if getattr(args, name) != getattr(ippo_llm.Args(), name):
            raise UserError(f"{flag_name(name)} is set by this program")
    plays, found = [], {}
    for phase in ("play", "learn"):
        setattr(ippo_llm, phase, profiled(getattr(ippo_llm, phase), phase, plays, found))
    args.max_episodes = UPDATES * args.rollout_buffer_size
    args.eval_interval = 0
    with tempfile.TemporaryDirectory() as folder:
        args.output_dir = f"{folder}/run"
        ippo_llm.main(args)
    if not found:
        raise UserError(f"the training set gives fewer than {UPDATES} updates: more --num-train-epochs or --train-size")
    rows = []
    for phase, times in found.items():
        shares = {kind: times[kind] / times["seconds"] for kind in [*KINDS, "optimiser"]}
        shares["Python"] = max(1 - sum(shares.values()), 0)
        rows.append([phase, f"{times['seconds']:.1f}", *(f"{share:.0%}" for share in shares.values())])
    print(json.dumps(sys.argv[1:]))
    print("\n".join(plot.markdown(f"|seconds|{'|'.join(shares)}", rows)))


if __name__ == "__main__":
    command_line(main, ippo_llm.Args, __doc__)
