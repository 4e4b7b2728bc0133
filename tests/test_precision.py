"""bfloat16: in the weights, in the forward passes, in both."""

import pytest
import torch
from helpers import make_agent, make_args, seeded

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
from utils.models import causal_lm

SMALL = {"train_size": 16, "eval_interval": 0}


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "script, flags",
    [
        (ippo_llm, {"use_separate_critic": True}),
        (ippo_llm, {"use_separate_critic": False}),
        pytest.param(iac_llm, {"use_separate_critic": True}, marks=pytest.mark.slow),
        (maac_llm, {}),
        (magrpo_llm, {"num_generations": 4, "train_size": 4}),
    ],
)
def test_weights_of_bfloat16_train(tmp_path, script, flags, mixed_precision):
    flags = SMALL | {"dtype": "bfloat16", "mixed_precision": mixed_precision} | flags
    learners, run = script.main(make_args(tmp_path, script, **flags))
    models = [agent.actor for agent in learners[:2]] + [critic.critic for critic in learners[2:]]
    assert {parameter.dtype for model in models for parameter in model.parameters()} == {torch.bfloat16}
    skipped = [row[name] for row in run.rows for name in row if name.endswith("/skipped")]
    assert len(skipped) == 2 * len(learners) and not any(skipped)
    assert abs(run.rows[0]["agent_0/approx_kl"]) < 0.1


@pytest.mark.parametrize("critic", [True, False])
def test_autocast_leaves_the_weights_in_float32_and_computes_in_bfloat16(tmp_path, critic):
    rows = []
    for precision in ("no", "bf16"):
        flags = {"mixed_precision": precision, "use_separate_critic": critic, "do_sample": False}
        args = make_args(output_dir=str(tmp_path / precision), **flags, **SMALL)
        agents, run = ippo_llm.main(args)
        assert {parameter.dtype for parameter in agents[0].actor.parameters()} == {torch.float32}
        rows.append(run.rows[0])
    assert rows[0]["agent_0/value_loss"] != rows[1]["agent_0/value_loss"]
    assert abs(rows[1]["agent_0/approx_kl"]) < 0.1


def test_under_autocast_sampler_and_learner_have_the_same_logprobs_but_for_rounding(model, tokenizer, prompts):
    args = make_args(mixed_precision="bf16", max_new_tokens=40)
    causal_lm.prepare(model, "the model", args.mixed_precision)
    agent = make_agent(args, model, tokenizer)
    rollout = ippo_llm.sample(agent, prompts, args, seeded())
    differences = []
    for precision in ("bf16", "no"):
        agent.actor.mixed_precision = precision
        logprobs = ippo_llm.compute_logprobs(agent.actor, rollout, args)
        differences.append((logprobs - rollout.logprobs)[rollout.response_mask > 0].abs())
    assert all(difference.max() < 0.1 for difference in differences)
    assert differences[0].mean() < 0.001  # kernels for another number of rows round some tokens otherwise
    assert differences[1].mean() > 0.002  # to float32
