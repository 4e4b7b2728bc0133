"""A run of ppo_llm without a penalty: no column is of the reference, the base is as it was, and it is compared."""

import csv

import pytest
import torch
from helpers import TINY_IDS, read_metrics
from short_runs import small_model, train

import utils.plot
from utils.models import adapters

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def test_a_run_without_a_penalty_has_no_column_of_the_reference_and_leaves_the_base_as_it_was(tmp_path, undisturbed):
    agents, _ = train("ppo", beta=0.0)
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 3
    assert not {"kl", "reference_logprob"} & rows[0].keys()
    logits = adapters.forward(agents[0].model, None, input_ids=TINY_IDS).logits
    assert torch.equal(logits, small_model()[0](TINY_IDS).logits)

    utils.plot.main(utils.plot.Args(runs=("without:run", f"with:{undisturbed('ppo')}"), output_dir="plots"))
    with open("plots/table.csv", newline="") as file:
        logprobs = {row["label"]: row["reference_logprob"] for row in csv.DictReader(file)}
    assert logprobs["without"] == "" and float(logprobs["with"]) < 0
