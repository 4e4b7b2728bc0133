"""A gradient that is not finite ends a run in one line, before any weight has it; the run can be resumed."""

import pytest
import torch
from helpers import build_model, read_metrics

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils import distributed
from utils.cli import UserError
from utils.models.weights import optimizers_of
from utils.tasks import number

SCRIPTS = (ippo_llm, iac_llm, maac_llm, magrpo_llm, ppo_llm)
SMALL = {"rollout_buffer_size": 4, "train_size": 12, "num_train_epochs": 1, "eval_interval": 0, "num_agents": 2}
SMALL |= {"max_new_tokens": 3, "num_turns": 1, "mini_batch_size": 4, "save_interval": 1}
GROUPS = {"num_generations": 2, "train_size": 6}


def train(script, tokenizer, **flags):
    flags = SMALL | (GROUPS if script is magrpo_llm else {}) | flags
    return script.main(script.Args(**flags), number, build_model(tokenizer), tokenizer)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_gradient_that_is_not_finite_ends_the_run_and_is_in_no_weight(script, tokenizer, monkeypatch, tmp_path):
    norms = iter([1.0] * (10 if script is ppo_llm else 4) + [float("nan")])
    gradient_norm = distributed.gradient_norm
    monkeypatch.setattr(distributed, "gradient_norm", lambda parameters: gradient_norm(parameters) * next(norms, 1.0))
    with pytest.raises(UserError, match="^the gradient is not finite: lower the learning rates") as error:
        train(script, tokenizer, output_dir=str(tmp_path / "run"))
    assert error.value.exit_code == 1 and "\n" not in str(error.value)
    before = len(read_metrics(tmp_path / "run"))
    assert before < 3
    agents, run = train(script, tokenizer, resume=str(tmp_path / "run"))
    assert run.step == 3
    for agent in agents:
        for optimizer in optimizers_of(agent):
            for group in optimizer.param_groups:
                assert all(torch.isfinite(parameter).all() for parameter in group["params"])
