"""Before the first step of an update the ratio pi / pi_old is 1; and what is not needed for that is not computed."""

from types import SimpleNamespace

import pytest
import torch
from helpers import make_ppo_args, read_metrics, watch_passes

import ppo_llm

KINDS = {
    "games of several turns": {"env": "guess", "max_turns": 3},
    "a task of one turn": {"task": "tldr", "max_turns": 1, "max_output_tokens": 8, "max_model_len": 400},
    "a team on a task of several turns": {"task": "number", "max_turns": 2, "num_agents": 2},
}
EXACT = {  # where the sampler's log-probabilities are those of learning
    **KINDS,
    "temperature": {"temperature": 0.7},
    "micro-batches": {"micro_batch_size_per_gpu": 3},
    "chunks": {"hf_generate_chunk_size": 3},
    "gradient checkpointing": {"gradient_checkpointing": True},
}
FILTERED = {  # where they are of another distribution, and so computed again
    "top-p": {"top_p": 0.5},
    "top-k": {"top_k": 3},
    "min-p": {"min_p": 0.1},
    "repetition penalty": {"repetition_penalty": 1.5},
    "positions of the padding": {"calc_position_embeddings": False},
    "shortest response on a task": {"min_output_tokens": 3, "task": "number", "max_turns": 2, "num_agents": 2},
}
ROUNDED = {  # where they are coarse, and so computed again
    "weights in bfloat16": {"dtype": "bfloat16"},
    "autocast to bfloat16": {"mixed_precision": "bf16"},
}
KIND = pytest.mark.parametrize("kind", KINDS)
RUNS = {}  # runs that several tests look at


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function of flags: a run of two updates with its `passes` and `log_ratios`, made once."""

    def run(**flags):
        key = str(flags)
        if key not in RUNS:
            with pytest.MonkeyPatch.context() as monkeypatch:
                RUNS[key] = watch_run(monkeypatch, tmp_path_factory.mktemp("run"), flags)
        return RUNS[key]

    return run


def watch_run(monkeypatch, tmp_path, flags):
    """A run with, in `log_ratios`, of each update {actor: the largest |log ratio| of each of its forward passes}."""
    watched = watch_passes(monkeypatch)
    watched.log_ratios = []
    play = ppo_llm.play
    ppo_loss = ppo_llm.ppo_loss
    take_logprobs = ppo_llm.take_logprobs

    def play_next(*arguments):
        watched.log_ratios.append({})
        return play(*arguments)

    def loss_of(agent, part, args):
        def take(log_pi, tokens):
            logprobs = take_logprobs(log_pi, tokens)
            log_ratio = (logprobs - part.logprobs) * part.response_mask
            watched.log_ratios[-1].setdefault(agent.actor, []).append(log_ratio.abs().max().item())
            return logprobs

        monkeypatch.setattr(ppo_llm, "take_logprobs", take)
        loss = ppo_loss(agent, part, args)
        monkeypatch.setattr(ppo_llm, "take_logprobs", take_logprobs)
        return loss

    monkeypatch.setattr(ppo_llm, "play", play_next)
    monkeypatch.setattr(ppo_llm, "ppo_loss", loss_of)

    small = {"batch_size": 4, "update_epochs": 2, "evaluation_interval": 0, "cosine_lr_schedule": False}
    _, watched.run = ppo_llm.main(make_ppo_args(tmp_path, **(small | flags)))
    return watched


def first_ratios(watched, flags):
    """The largest |log ratio| before the first step, of each agent and update."""
    num_parts = 2 if "micro_batch_size_per_gpu" in flags else 1
    return [max(log_ratios[:num_parts]) for update in watched.log_ratios for log_ratios in update.values()]


def functions_of(watched, adapter):
    return {each.function for each in watched.passes if each.adapter == adapter}


@pytest.mark.parametrize("case", EXACT)
def test_the_first_ratio_is_one_without_another_pass(train, case):
    flags = EXACT[case]
    ratios = first_ratios(train(**flags), flags)
    assert len(ratios) == 2 * flags.get("num_agents", 1)
    assert max(ratios) < 1e-5
    assert functions_of(train(**flags), "agent_0_actor") == {"respond", "ppo_loss"}


@KIND
def test_later_ratios_are_not_one(train, kind):
    for update in train(**KINDS[kind]).log_ratios:
        for log_ratios in update.values():
            assert len(log_ratios) == 4
            assert min(log_ratios[1:]) > 1e-3


@pytest.mark.parametrize("case", FILTERED | ROUNDED)
def test_the_first_ratio_is_one_by_another_pass_where_the_sampler_is_filtered_or_coarse(train, case):
    watched = train(**(FILTERED | ROUNDED)[case])
    assert max(first_ratios(watched, {})) < (1e-5 if case in FILTERED else 1e-3)
    assert functions_of(watched, "agent_0_actor") == {"respond", "compute_logprobs", "ppo_loss"}


# --- The reference ----------------------------------------------------------------------------------------------------


@KIND
def test_with_a_penalty_the_reference_is_read_once(train, kind):
    watched = train(**KINDS[kind])
    assert functions_of(watched, "agent_0_reference") == {"compute_logprobs"}
    assert sum(each.adapter == "agent_0_reference" for each in watched.passes) == 2 * 2  # of two updates, two parts


@KIND
def test_without_a_penalty_the_reference_is_not_read(train, kind):
    watched = train(**KINDS[kind], beta=0.0)
    assert {each.function for each in watched.passes} == {"respond", "compute_values", "ppo_loss", "value_loss"}
    assert not functions_of(watched, "agent_0_reference")


def test_the_base_is_the_reference_where_it_has_no_adapter(train):
    watched = train(use_separate_reference_adapter=False)
    assert functions_of(watched, None) == {"compute_logprobs"}
    assert "agent_0_reference" not in {each.adapter for each in watched.passes}


def test_a_quantized_base_is_read_again(model):
    args = ppo_llm.resolve_args(make_ppo_args())
    assert ppo_llm.samples_exactly(SimpleNamespace(model=model), args)
    model.config.quantization_config = {"load_in_8bit": True}
    assert not ppo_llm.samples_exactly(SimpleNamespace(model=model), args)


def test_with_a_penalty_metrics_are_of_the_reference(train):
    watched = train()
    (row, _) = read_metrics(watched.run.folder)
    assert abs(float(row["kl"])) < 1e-6 and float(row["reference_logprob"]) < 0
    assert torch.isfinite(torch.tensor(float(row["agent_0/k3"])))
