"""Settings that models are loaded with: KEY=VALUE on the command line, a dict in Python."""

import dataclasses
import json

import pytest
from helpers import TINY

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from benchmark import architectures
from utils import models
from utils.cli import UserError, parse

SCRIPTS = pytest.mark.parametrize(
    "script", [ippo_llm, pytest.param(iac_llm, marks=pytest.mark.slow), maac_llm, magrpo_llm, ppo_llm]
)
ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}


@SCRIPTS
def test_values_are_read_as_json(script):
    command = ["--model-config", f"rope_parameters={json.dumps(ROPE)}", "use_cache=false", "revision=main"]
    settings = {"rope_parameters": ROPE, "use_cache": False, "revision": "main"}
    assert parse(script.Args, command).model_config == settings
    assert script.Args(model_config=settings).model_config == settings
    assert script.Args().model_config == {}


@SCRIPTS
def test_models_have_the_settings(script, tmp_path):
    args = script.Args(model_config={"rope_parameters": ROPE}, output_dir=str(tmp_path / "run"))
    if script is ppo_llm:
        args = ppo_llm.resolve_args(args)
        model = ppo_llm.build_agents(args, "cpu", updates=1)[0].model.get_base_model()
    else:
        models.check_models("model", "model_config", args)
        agents = script.build_agents(args, "cpu", updates=1)
        model = agents[0].actor
        assert script is not maac_llm or agents[-1].critic.config.rope_parameters == ROPE  # a copy of it
    assert model.config.rope_parameters == ROPE


@SCRIPTS
def test_limits_are_those_of_the_settings(script, tmp_path):
    flags = {"max_model_len": 100} if script is ppo_llm else {"max_prompt_length": 100}
    settings = {"max_position_embeddings": 90, "revision": "main"}
    with pytest.raises(UserError, match="90 positions|more than 18 tokens"):
        script.main(script.Args(model_config=settings, output_dir=str(tmp_path / "run"), task="tldr", **flags))


BAD = {
    "colour=1": "--model-config takes what the configuration of .* has, or revision, .*, got colour",
    "dtype=bfloat16": "--model-config dtype: it is a flag of its own, --dtype",
    "hidden_act=5": r"--model-config hidden_act=5: .*expected str, got int \(value: 5\)",
    "hidden_act": "Error parsing --model-config: it takes KEY=VALUE, got hidden_act",
    "hidden_size=64": "--model .*tiny_lm can't be loaded: .*",
}


@SCRIPTS
@pytest.mark.parametrize("setting", BAD)
def test_a_bad_setting_is_one_line(script, setting, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=BAD[setting]) as error:
        script.main(parse(script.Args, ["--model-config", setting, "--output-dir", str(folder)]))
    assert "\n" not in str(error.value)
    assert not folder.exists()


@SCRIPTS
def test_settings_of_a_loaded_model_have_no_effect(script, loaded_model):
    with pytest.raises(UserError, match="--model-config has no effect on a model that is loaded"):
        script.main(script.Args(model_config={"use_cache": True}), model=loaded_model)


@pytest.mark.parametrize("script", [ippo_llm, iac_llm, maac_llm])
@pytest.mark.parametrize(
    "flags, message",
    [
        ({"critic_model_config": {"use_cache": True}}, "--critic-model-config has no effect without .*-name-or-path"),
        (
            {"model_config": {"quantization_config": {"load_in_4bit": True}}},
            "quantized weights can't learn",
        ),
        (
            {"use_separate_critic": True, "critic_model_name_or_path": TINY, "critic_model_config": {"colour": 1}},
            "--critic-model-config takes .*, got colour",
        ),
    ],
)
def test_settings_that_critics_and_actors_do_not_take(script, flags, message):
    if script is maac_llm:  # which always has one
        flags = {name: value for name, value in flags.items() if name != "use_separate_critic"}
    with pytest.raises(UserError, match=message):
        script.main(script.Args(**flags))


def test_a_quantized_base_learns_under_adapters(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setitem(architectures.SIZES, "hidden_size", 128)  # blocks of 64 are quantized together
    monkeypatch.setitem(architectures.SIZES, "intermediate_size", 128)
    monkeypatch.setitem(architectures.SIZES, "head_dim", 32)
    architectures.save_model("llama", tmp_path / "model")
    quantization = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}}
    args = architectures.make_args(ppo_llm, str(tmp_path / "model"), str(tmp_path / "run"))
    agents, _ = ppo_llm.main(dataclasses.replace(args, model_config=quantization), task=architectures.Task())
    projection = agents[0].model.get_base_model().model.layers[0].self_attn.q_proj
    assert type(projection.base_layer).__name__ == "Linear4bit"
    assert architectures.weight_change(agents[0]) > 1e-5
