"""What saving costs: seconds of a checkpoint of the default run with separate critics, and of an update without it.

python -m benchmark.saving
"""

import statistics
import tempfile
import time

import ippo_llm
import utils.run


def main():
    write = utils.run.write_checkpoint
    seconds = []

    def timed(*arguments):
        before = time.perf_counter()
        write(*arguments)
        seconds.append(time.perf_counter() - before)

    utils.run.write_checkpoint = timed
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        args = ippo_llm.Args(
            use_separate_critic=True,
            train_size=640,
            num_train_epochs=1,
            eval_interval=0,
            save_interval=1,
            output_dir=folder,
        )
        ippo_llm.main(args)
    update = (time.perf_counter() - start - sum(seconds)) / len(seconds)
    save = statistics.median(seconds)
    print(f"a checkpoint {save:.2f} s, an update {update:.2f} s: {save / (save + 10 * update):.1%} if saved every ten")


if __name__ == "__main__":
    main()
