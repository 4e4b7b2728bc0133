"""Agents: how many, from which models, with which critics, tokenizers, value heads and optimisers."""

import copy

import pytest
import torch
from helpers import make_agent, make_args, make_model, read_metrics, task_of
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaModel

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
from utils.cli import UserError
from utils.distributed import start

SCRIPTS = pytest.mark.parametrize("script", [ippo_llm, pytest.param(iac_llm, marks=pytest.mark.slow)])


def short_args(tmp_path, script=ippo_llm, **flags):
    """Args of one update."""
    return make_args(tmp_path, script, **({"train_size": 8, "max_new_tokens": 4, "eval_interval": 0} | flags))


def make_critic(folder, vocab_size):
    """The folder of a small critic."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaModel(config).save_pretrained(folder)
    return str(folder)


TEAMS = [(ippo_llm, 1), (ippo_llm, 3), (ippo_llm, 8), (maac_llm, 3), (magrpo_llm, 1)]
OTHER_TEAMS = [(iac_llm, 1), (iac_llm, 8), (maac_llm, 1), (maac_llm, 8), (magrpo_llm, 3), (magrpo_llm, 8)]


@pytest.mark.parametrize(
    "script, num_agents", [*TEAMS, *(pytest.param(*x, marks=pytest.mark.slow) for x in OTHER_TEAMS)]
)
def test_teams_from_one_to_eight(tmp_path, script, num_agents):
    agents, _ = script.main(short_args(tmp_path, script, num_agents=num_agents))
    names = [f"agent_{i}" for i in range(num_agents)]
    assert len(agents) == num_agents + (script is maac_llm)  # and a critic
    assert sorted(path.name for path in (tmp_path / "run").glob("agent_*")) == names
    row = read_metrics(tmp_path / "run")[0]
    assert [name for name in names if f"{name}/policy_loss" in row] == names


# --- Models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, flags, critics",  # the sizes of these
    [
        (ippo_llm, {"use_separate_critic": True}, [160, 32]),
        (ippo_llm, {}, []),
        pytest.param(iac_llm, {"use_separate_critic": True}, [160, 32], marks=pytest.mark.slow),
        (maac_llm, {}, [160]),
        (magrpo_llm, {}, []),
    ],
)
def test_agents_may_have_models_of_their_own(tmp_path, tokenizer, script, flags, critics):
    other = make_model(tmp_path / "other", tokenizer)
    agents, _ = script.main(short_args(tmp_path, script, model=("utils/tiny_lm", other), **flags))
    assert [agent.actor.config.hidden_size for agent in agents[:2]] == [160, 32]
    assert [agent.critic.config.hidden_size for agent in agents if getattr(agent, "critic", None)] == critics
    assert LlamaForCausalLM.from_pretrained(tmp_path / "run/agent_1").config.hidden_size == 32


def test_each_agent_reads_its_prompts_by_its_own_chat_template(tmp_path, tokenizer):
    other = make_model(tmp_path / "other", tokenizer)
    prompts_of_agents = []

    def reward_func(first, second, prompts):
        prompts_of_agents.extend(prompts)
        return [0.5] * len(first)

    ippo_llm.main(short_args(tmp_path, model=("utils/tiny_lm", other)), task_of(reward_func=reward_func))
    assert prompts_of_agents[0][0].startswith("<|user|>")
    assert prompts_of_agents[1][0].startswith("Q: ")
    saved = AutoTokenizer.from_pretrained(tmp_path / "run/agent_1")
    assert saved.chat_template.startswith("{% for message in messages %}Q:")


def test_agents_of_one_model_share_a_frozen_reference():
    agents = ippo_llm.build_agents(make_args(num_agents=3), start(), updates=1)
    assert len({id(agent.reference) for agent in agents}) == 1
    assert not any(parameter.requires_grad for parameter in agents[0].reference.parameters())
    assert not agents[0].actor.training


@pytest.mark.parametrize("names, num_agents", [(("utils/tiny_lm",) * 3, 2), ((), 2)])
def test_models_are_one_for_all_or_one_each(tmp_path, names, num_agents):
    message = f"^--model takes one name, or one for each of the {num_agents} agents, got {len(names)}$"
    with pytest.raises(UserError, match=message):
        ippo_llm.main(short_args(tmp_path, model=names, num_agents=num_agents))


# --- Tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script", [ippo_llm, *(pytest.param(x, marks=pytest.mark.slow) for x in (iac_llm, magrpo_llm)), maac_llm]
)
def test_a_tokenizer_without_a_padding_token_gets_one_in_a_copy(tmp_path, tokenizer, model, script):
    without = copy.deepcopy(tokenizer)
    without.pad_token = None
    agents, _ = script.main(short_args(tmp_path, script), model=model, tokenizer=without)
    assert without.pad_token is None
    assert agents[0].tokenizer.pad_token == tokenizer.eos_token


def test_a_folders_tokenizer_without_a_padding_token_gets_one(tmp_path, tokenizer):
    other = make_model(tmp_path / "other", tokenizer)
    without = AutoTokenizer.from_pretrained(other)
    without.pad_token = None
    without.save_pretrained(other)
    assert AutoTokenizer.from_pretrained(other).pad_token is None
    agents, _ = ippo_llm.main(short_args(tmp_path, model=other))
    assert agents[0].tokenizer.pad_token == tokenizer.eos_token


# --- Critics ----------------------------------------------------------------------------------------------------------


def test_a_critic_may_be_a_model_of_its_own_kind(tmp_path):
    critic = make_critic(tmp_path / "critic", vocab_size=768)
    args = short_args(tmp_path, use_separate_critic=True, critic_model_name_or_path=critic)
    agents, _ = ippo_llm.main(args)
    assert [agent.critic.config.hidden_size for agent in agents] == [32, 32]
    assert agents[0].actor.config.hidden_size == 160


@SCRIPTS
def test_a_critic_that_lacks_tokens_of_the_second_agent_is_one_line(tmp_path, tokenizer, script):
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<|more|>", "<|most|>"])
    larger.save_pretrained(tmp_path / "larger_tokenizer")
    larger = AutoTokenizer.from_pretrained(tmp_path / "larger_tokenizer")
    other = make_model(tmp_path / "other", larger)
    larger.save_pretrained(other)
    critic = make_critic(tmp_path / "critic", vocab_size=768)
    flags = {"model": ("utils/tiny_lm", other), "use_separate_critic": True, "critic_model_name_or_path": critic}
    message = r"^--critic-model-name-or-path .*critic knows 768 tokens, the actor's tokenizer has 770$"
    with pytest.raises(UserError, match=message):
        script.main(short_args(tmp_path, script, **flags))


# --- Value heads and optimisers ---------------------------------------------------------------------------------------


def test_values_are_0_at_first(model, tokenizer):
    for flags in ({}, {"value_head_hidden_dim": 7}):
        agent = ippo_llm.Agent(0, model, tokenizer, 10, make_args(**flags))
        assert not agent.value_head(torch.randn(5, 160)).any()


def test_a_value_head_on_the_actor_learns_at_the_critics_rate(model, tokenizer):
    args = make_args(actor_learning_rate=1e-3, critic_learning_rate=2e-3)
    (optimizer,) = make_agent(args, model, tokenizer).optimizers
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 2e-3]


def test_a_separate_critic_has_an_optimiser_of_its_own(model, tokenizer):
    args = make_args(actor_learning_rate=1e-3, critic_learning_rate=2e-3)
    agent = make_agent(args, model, tokenizer, "separate")
    assert [optimizer.param_groups[0]["lr"] for optimizer in agent.optimizers] == [1e-3, 2e-3]


def test_the_flags_of_adam_go_to_every_optimiser(model, tokenizer):
    args = make_args(adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-7, weight_decay=0.2)
    for optimizer in make_agent(args, model, tokenizer, "separate").optimizers:
        group = optimizer.param_groups[0]
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.95), 1e-7, 0.2)


@pytest.mark.parametrize("script, flag", [(ippo_llm, "ppo_epochs"), (iac_llm, "ac_epochs")])
def test_epochs_and_mini_batches_make_optimiser_steps(tmp_path, script, flag):
    flags = {"rollout_buffer_size": 5, "mini_batch_size": 2, "train_size": 5, flag: 3, "use_separate_critic": True}
    agents, _ = script.main(short_args(tmp_path, script, **flags))
    for agent in agents:  # 5 episodes in twos are 3 mini-batches
        for optimizer in agent.optimizers:
            assert {int(state["step"]) for state in optimizer.state.values()} == {9}


def test_learning_rates_fall_to_zero_over_the_run(tmp_path):
    agents, _ = ippo_llm.main(short_args(tmp_path, actor_learning_rate=1e-3, train_size=32))
    assert agents[1].optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_learning_rates_fall_in_the_second_half_of_the_run():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = ippo_llm.build_schedule(optimizer, 8, make_args())
    rates = schedule.get_last_lr()
    for _ in range(8):
        optimizer.step()
        schedule.step()
        rates += schedule.get_last_lr()
    assert rates == [1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
