"""vLLM's CPU build as the sampler of every script: python -m pytest -m vllm, where it is installed."""

import copy
import random
import shutil

import numpy
import pytest
import torch
from helpers import read_metrics
from processes import assert_same, finish, finish_two, largest_difference
from short_runs import SCRIPTS, every_script

import ippo_llm
import ppo_llm
from utils import models
from utils.cli import UserError
from utils.models.engine import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_tmp_path")]
FORMS = {"whole": {}, "adapters": {"lora_rank": 4}}
every_form = pytest.mark.parametrize("form", FORMS)

# Eight updates; greedy, one process and two learn the same
RUN = {"train_size": 32, "rollout_buffer_size": 4, "mini_batch_size": 4, "num_train_epochs": 1, "num_agents": 2}
RUN |= {"task": "number", "num_turns": 2, "max_new_tokens": 4, "eval_interval": 4, "eval_size": 4}
CRITICS = {"critic_learning_rate": 1e-4}
OWN = {"ippo": CRITICS, "iac": CRITICS, "maac": CRITICS | {"reward_normalization": False}, "ppo": CRITICS}
OWN["magrpo"] = {"num_generations": 4, "train_size": 8, "advantage_mode": "raw"}
GREEDY = {"do_sample": False, "actor_learning_rate": 1e-4, "adam_epsilon": 1e-5}


def make_agents(model, tokenizer, script=ippo_llm, num_agents=2, seed=0, **flags):
    """Agents with vLLM whose actors are not as they were, and the flags."""
    args = script.Args(**({"use_vllm": True, "num_agents": num_agents, "max_new_tokens": 16, "num_turns": 1} | flags))
    initials = models.load(args, model, tokenizer)
    agents = [script.Agent(i, initial, 10, args) for i, initial in enumerate(initials)]
    for i, agent in enumerate(agents):
        shake(agent, seed + i)
    return agents, args


def shake(agent, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = 0.01 if agent.actor.adapter is None else 0.1
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def contexts_of(prompts, tokenizer):
    return tokenizer(prompts, add_special_tokens=False).input_ids


def answers_of(agents, contexts, args, seed=0, **flags):
    """Each agent's answers to the same contexts; `flags` are others."""
    args = copy.copy(args)
    for name, value in flags.items():
        setattr(args, name, value)
    with models.sampling(agents, args):
        generators = [torch.Generator().manual_seed(seed) for _ in agents]
        return [ippo_llm.generate(agent, contexts, args, rng) for agent, rng in zip(agents, generators)]


def assert_answers_as_without(agents, contexts, args):
    """The likeliest answers of both samplers are the same; them."""
    greedy = {"do_sample": False}
    answers = answers_of(agents, contexts, args, **greedy)
    assert answers == answers_of(agents, contexts, args, use_vllm=False, **greedy)
    return answers


def train(script, folder, **flags):
    """A run with vLLM."""
    module = SCRIPTS[script]
    return module.main(module.Args(**(RUN | OWN[script] | {"use_vllm": True, "output_dir": str(folder)} | flags)))


# --- What is sampled --------------------------------------------------------------------------------------------------


@every_form
def test_likeliest_answers_are_those_of_the_weights_of_now(form, model, tokenizer, prompts):
    agents, args = make_agents(model, tokenizer, **FORMS[form])
    for seed in range(2):
        first, second = assert_answers_as_without(agents, contexts_of(prompts, tokenizer), args)
        assert first != second
        for agent in agents:
            shake(agent, seed)


@pytest.mark.parametrize("flags", [{"repetition_penalty": 1.5}, {"min_output_tokens": 12}], ids=str)
def test_flags_of_sampling_are_followed(flags, model, tokenizer, prompts):
    agents, args = make_agents(model, tokenizer, **flags)
    assert_answers_as_without(agents, contexts_of(prompts, tokenizer), args)


@pytest.mark.parametrize("flags", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.5}], ids=str)
@every_form
def test_tokens_follow_the_probabilities(form, flags, model, tokenizer, prompts):
    agents, args = make_agents(model, tokenizer, num_agents=1, **FORMS[form], **(flags | {"max_new_tokens": 1}))
    contexts = contexts_of(prompts[:1], tokenizer) * 4000
    shares = []
    for use_vllm in (True, False):
        (answers,) = answers_of(agents, contexts, args, use_vllm=use_vllm)
        shares.append(torch.bincount(torch.tensor(answers).flatten(), minlength=len(tokenizer)) / len(contexts))
    torch.testing.assert_close(*shares, atol=0.04, rtol=0)
    assert not flags.get("top_k") or (shares[0] > 0).sum() <= 5


def test_the_same_seed_draws_the_same_and_another_one_does_not(model, tokenizer, prompts):
    agents, args = make_agents(model, tokenizer, num_agents=1)
    contexts = contexts_of(prompts, tokenizer)
    first, again, other = (answers_of(agents, contexts, args, seed) for seed in (0, 0, 1))
    assert first == again != other


def test_agents_of_two_architectures_have_an_engine_each(tokenizer, model, prompts, tmp_path):
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    for name, each in (("two", model), ("one", type(model)(config))):
        each.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    args = ippo_llm.Args(model=(str(tmp_path / "two"), str(tmp_path / "one")), use_vllm=True, max_new_tokens=16)
    agents = [ippo_llm.Agent(i, initial, 10, args) for i, initial in enumerate(models.load(args))]
    assert_answers_as_without(agents, contexts_of(prompts, tokenizer), args)
    assert agents[0].engine is not agents[1].engine


def test_what_the_cache_has_of_old_weights_is_forgotten(model, tokenizer, prompts):
    settings = {"enable_prefix_caching": True, "max_model_len": 512}
    agents, args = make_agents(model, tokenizer, vllm_config=settings)
    contexts = [context[:300] for context in contexts_of([" ".join(prompts * 2)] * 2, tokenizer)]
    assert len(contexts[0]) > 2 * 128  # more than a block of the cache
    for seed in range(3):
        assert_answers_as_without(agents, contexts, args)
        shake(agents[0], seed)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_taken(form, model, tokenizer, prompts):
    agents, args = make_agents(model, tokenizer, mixed_precision="bf16", **FORMS[form])
    answers = answers_of(agents, contexts_of(prompts, tokenizer), args, do_sample=False)
    assert all(len(answer) for own in answers for answer in own)


# --- What is handed over ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form, load", [("whole", "load_weights"), ("adapters", "load_adapter")])
def test_weights_that_do_not_arrive_are_seen(form, load, model, tokenizer, prompts, monkeypatch):
    agents, args = make_agents(model, tokenizer, **FORMS[form])
    contexts = contexts_of(prompts, tokenizer)
    answers_of(agents, contexts, args)
    shake(agents[1], 7)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, load, lambda *_: None)
        with pytest.raises(UserError, match="^--use-vllm: the weights in the engine are not those that were handed"):
            answers_of(agents, contexts, args)
    assert_answers_as_without(agents, contexts, args)


@every_form
def test_the_longest_transcript_is_the_engines(form, model, tokenizer, prompts):
    agents, args = make_agents(model, tokenizer, max_model_len=128, **FORMS[form])
    answers_of(agents, contexts_of(prompts, tokenizer), args)
    assert agents[0].engine.llm.model_config.max_model_len == 128


def test_an_engine_leaves_the_random_generators_as_they_are(model, tokenizer, prompts):
    def states():
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    agents, args = make_agents(model, tokenizer, vllm_config={"max_num_seqs": 7})  # an engine of its own
    before = states()
    answers_of(agents, contexts_of(prompts, tokenizer), args)
    assert states() == before


def test_adapters_of_several_ranks_and_scalings_are_those_of_learning(model, tokenizer, prompts):
    config = '{"r": 8, "rank_pattern": {"q_proj": 12}, "alpha_pattern": {"v_proj": 40.0}, "use_rslora": true}'
    agents, args = make_agents(model, tokenizer, lora_config=config)
    assert_answers_as_without(agents, contexts_of(prompts, tokenizer), args)


# --- Runs -------------------------------------------------------------------------------------------------------------


def assert_same_agents(one, other):
    for name in ("agent_0", "agent_1", *(["critic"] if (one / "critic").exists() else [])):
        assert largest_difference(one / name, other / name) < 2e-4


@every_script
def test_greedy_it_learns_what_a_run_without_learns(script, tmp_path):
    for use_vllm in (True, False):
        train(script, tmp_path / str(use_vllm), use_vllm=use_vllm, **GREEDY, save_optimizer=False)
    assert len(read_metrics(tmp_path / "True")) == 8
    assert_same_agents(tmp_path / "True", tmp_path / "False")


@every_script
def test_the_same_seed_gives_the_same_run_and_a_run_goes_on_to_the_same_bits(script, tmp_path):
    train(script, tmp_path / "whole", save_interval=4)
    shutil.copytree(tmp_path / "whole", tmp_path / "begun")
    shutil.rmtree(tmp_path / "begun/checkpoints/update_000008")
    train(script, None, output_dir=None, save_interval=4, resume=str(tmp_path / "begun"))
    assert_same(tmp_path / "whole", tmp_path / "begun")


def as_flags(values):
    """{name: value} as arguments of a command."""
    arguments = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        arguments += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", value]
    return arguments


@pytest.mark.parametrize(
    "script, more",
    [("ippo", {}), ("ippo", {"shard": True}), ("ppo", {}), ("ppo", {"shard": True}), ("maac", {})],
    ids=str,
)
def test_two_processes_have_an_engine_each(script, more, tmp_path):
    flags = RUN | OWN[script] | GREEDY | {"save_optimizer": False}
    finish(f"{script}_llm", *as_flags(flags), "--output-dir", tmp_path / "one")
    more = flags | more | {"use_vllm": True}
    finish_two(f"{script}_llm", *as_flags(more), "--output-dir", tmp_path / "two", seconds=400)
    assert_same_agents(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    "script, flags", [("ippo", {"num_agents": 2}), ("ppo", {"task": None, "num_turns": 6})], ids=str
)
def test_it_learns_as_without_within_a_few_updates(script, flags, tmp_path):
    flags |= {"train_size": 960, "num_turns": 3, "rollout_buffer_size": 64, "mini_batch_size": 16, "eval_interval": 0}
    if script == "ppo":
        flags |= {"num_agents": 1, "max_new_tokens": 8, "num_turns": 6}
    rewards = []
    for use_vllm in (True, False):
        module = SCRIPTS[script]
        defaults = {
            "num_train_epochs": 1,
            "max_new_tokens": 4,
            "task": "number",
            "output_dir": str(tmp_path / str(use_vllm)),
        }
        module.main(module.Args(**(defaults | flags), use_vllm=use_vllm))
        rows = [float(row["reward_mean"]) for row in read_metrics(tmp_path / str(use_vllm))]
        assert sum(rows[-4:]) / 4 > sum(rows[:2]) / 2 + 0.1
        rewards.append(sum(rows[-4:]) / 4)
    assert rewards[0] == pytest.approx(rewards[1], abs=0.2)


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_num_seq": 8}, "^--vllm-config takes settings of vllm.EngineArgs, got max_num_seq$"),
        ({"model": "x"}, "^--vllm-config model: it can't be set"),
        ({"logprobs_mode": "raw_logprobs"}, "^--vllm-config logprobs_mode: it can't be set"),
        ({"dtype": "nonsense"}, "^--use-vllm: the engine does not start: .*nonsense"),
        ({"max_model_len": 20}, "items are left out: a prompt has more than 16 tokens"),
    ],
)
@pytest.mark.parametrize("script", ["ippo", "ppo"])
def test_settings_that_can_not_be_followed_are_one_line(script, settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(script, tmp_path / "run", vllm_config=settings)


def test_a_temperature_that_vllm_would_raise_is_one_line(model, tokenizer, prompts):
    agents, args = make_agents(model, tokenizer, temperature=0.005)
    with pytest.raises(UserError, match="^--use-vllm takes a temperature from 0.01, got 0.005$"):
        answers_of(agents, contexts_of(prompts, tokenizer), args)


@pytest.mark.parametrize("config", ['{"r": 8, "use_dora": true}', '{"r": 8, "modules_to_save": ["lm_head"]}'])
def test_adapters_that_vllm_does_not_have_are_one_line(config, model, tokenizer, prompts):
    agents, args = make_agents(model, tokenizer, ppo_llm, lora_config=config)
    with pytest.raises(UserError, match="^--use-vllm takes no adapters with (use_dora|modules_to_save)"):
        answers_of(agents, contexts_of(prompts, tokenizer), args)
