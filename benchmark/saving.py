"""What saving costs: seconds of a checkpoint of the default run with separate critics, and of an update without it.

python -m benchmark.saving
"""

import statistics
import tempfile
import time

import ippo_llm
import utils.run


def main():
    spent, write, start = [], utils.run.write_checkpoint, time.perf_counter()

    def timed(*given):
        before = time.perf_counter()
        write(*given)
        spent.append(time.perf_counter() - before)

    utils.run.write_checkpoint = timed
    with tempfile.TemporaryDirectory(dir=".") as folder:
        few = {"train_size": 640, "num_train_epochs": 1, "eval_interval": 0}
        ippo_llm.main(ippo_llm.Args(use_separate_critic=True, save_interval=1, output_dir=folder, **few))
    update = (time.perf_counter() - start - sum(spent)) / len(spent)
    save = statistics.median(spent)
    print(f"a checkpoint {save:.2f} s, an update {update:.2f} s: {save / (save + 10 * update):.1%} if saved every ten")


if __name__ == "__main__":
    main()
