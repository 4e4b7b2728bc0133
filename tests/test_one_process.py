"""One process under a launcher is a plain run."""

import subprocess
import sys

from processes import ROOT, assert_same, command, finish


def test_one_process_under_torchrun_gives_the_bits_of_a_plain_run(small_model, tmp_path):
    name, flags = command("ippo head 2 tldr", small_model)
    flags += ["--num-train-epochs", "1"]  # three updates
    finish(name, *flags, "--output-dir", tmp_path / "plain")
    launcher = "torch.distributed.run --standalone --nproc-per-node 1"
    words = [sys.executable, "-m", *launcher.split(), f"{name}.py", *flags, "--output-dir", tmp_path / "run"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same(tmp_path / "run", tmp_path / "plain")
