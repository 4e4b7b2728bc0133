"""bfloat16: in the weights, in the forward passes, in both."""

import pytest
import torch
from short_runs import FLAGS, SCRIPTS, make_task, reward_length, train

from utils.models import causal_lm

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "script, flags",
    [
        ("ippo", {"use_separate_critic": True}),
        ("iac", {"lora_rank": 2}),
        ("maac", {}),
        ("magrpo", {}),
        ("ppo", {"lora_rank": 0}),
    ],
)
def test_weights_of_bfloat16_learn(script, flags, mixed_precision, small_model):
    flags = FLAGS[script] | {"dtype": "bfloat16", "mixed_precision": mixed_precision, "model": small_model} | flags
    agents, run = SCRIPTS[script].main(SCRIPTS[script].Args(**flags, output_dir="run"), make_task(reward_length))
    for agent in agents[:2]:
        assert {x.dtype for name, x in agent.actor.base.named_parameters() if "lora" not in name} == {torch.bfloat16}
    norms = [row[name] for row in run.rows for name in row if name.endswith("/grad_norm")]
    assert len(norms) >= 6 and 0 < min(norms) and max(norms) < float("inf")


@pytest.mark.parametrize("flags", [{}, {"lora_rank": 2}], ids=str)
def test_autocast_leaves_the_weights_in_float32_and_computes_in_bfloat16(flags):
    rows = []
    for precision in ("no", "bf16"):
        flags |= {"mixed_precision": precision, "do_sample": False}
        agents, run = train("ippo", folder=precision, **flags)
        assert {x.dtype for x in agents[0].actor.model.parameters()} == {torch.float32}
        rows.append(run.rows[0])
    one, other = [[row[f"agent_{i}/{name}"] for i in range(2) for name in ("entropy", "grad_norm")] for row in rows]
    assert one != other and other == pytest.approx(one, rel=0.2)


def test_a_tasks_own_model_is_computed_as_it_is():
    """Whatever the precision in which agents sample."""
    dtypes = set()

    def reward_func(*completions, items):
        dtypes.add((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return [1.0 for _ in items]

    train("ippo", reward_func, mixed_precision="bf16")
    assert dtypes == {torch.float32}


def test_a_large_model_is_computed_in_bfloat16_by_itself_where_the_device_is_fast_at_it(monkeypatch, capfd):
    def found(able, large, **flags):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
        monkeypatch.setattr(causal_lm, "LARGE", large)
        agents, _ = train("ippo", folder="run", overwrite=True, max_episodes=4, **flags)
        said = "forward passes are in bfloat16" in "".join(capfd.readouterr())
        return agents[0].actor.base.mixed_precision, agents[0].reference.base.mixed_precision, said

    large = 100  # parameters, which the small model has
    assert found({"avx512_bf16": True}, large) == found({"amx_bf16": True}, large) == ("bf16", "bf16", True)
    assert found({"avx512_bf16": False}, large) == found({}, large) == ("no", "no", False)
    assert found({"avx512_bf16": True}, causal_lm.LARGE * 10**6) == ("no", "no", False)
    assert found({"avx512_bf16": True}, large, mixed_precision="no") == ("no", "no", False)
    assert found({"avx512_bf16": True}, large, dtype="bfloat16") == ("no", "no", False)
