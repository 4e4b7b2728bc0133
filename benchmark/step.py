"""Milliseconds of the step of one token on a GPU, by rows: as it is, and with --static-cache.

    python -m benchmark.random_lm half --layers 24 --width 896 --inner 4864 --heads 14 --groups 2 --vocabulary 151936
    python -m benchmark.step half
    python -m benchmark.step half --mixed-precision no

Each is the median of forty steps after prompts of 48 tokens, of which some are padding. Prints a JSON line for each,
with the first two steps after the prompt: with --static-cache the first is run as it is, and the second captured.
"""

import argparse
import json
import statistics
import time

import torch
from torch.nn.functional import pad

from benchmark.peer_speed import model_folder
from utils.models import causal_lm
from utils.models.loading import load_model

PROMPT = 48  # tokens
STEPS = 42


def step_seconds(model, num_rows):
    """The seconds of each of STEPS steps."""
    generator = torch.Generator(model.device).manual_seed(0)
    shape = (num_rows, PROMPT + STEPS)
    tokens = torch.randint(258, shape, device=model.device, generator=generator)
    mask = torch.ones(num_rows, PROMPT, dtype=torch.long, device=model.device)
    mask[: num_rows // 2, :9] = 0
    marks = []
    cache = causal_lm.forward(model, tokens[:, :PROMPT], mask, keep=1, use_cache=True).cache
    for t in range(PROMPT, PROMPT + STEPS):
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
        mask = pad(mask, (0, 1), value=1)
        causal_lm.forward(model, tokens[:, t : t + 1], mask, cache, keep=1, use_cache=True)
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    return [after - before for before, after in zip(marks, marks[1:])]


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=model_folder, help="a model's folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="that are sampled at once")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="bf16")
    flags = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it takes a GPU")
    model = load_model(flags.folder, "folder", flags.dtype).cuda()
    model.requires_grad_(True)  # as an actor: autocast keeps the casts of what learns
    causal_lm.prepare(model, flags.folder, flags.mixed_precision)
    for num_rows in flags.rows:
        for static_cache in (False, True):
            model.static_cache = static_cache
            with causal_lm.autocast(model):
                first, second, *others = (round(1000 * seconds, 2) for seconds in step_seconds(model, num_rows))
            result = {"dtype": flags.dtype, "mixed_precision": flags.mixed_precision, "rows": num_rows}
            result |= {"static_cache": static_cache, "ms": statistics.median(others), "first_ms": [first, second]}
            print(json.dumps(result))


if __name__ == "__main__":
    main()
