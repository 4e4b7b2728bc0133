"""Agents: how many, from which models, with which critics, tokenizers, optimisers and learning rates."""

import copy

import pytest
import torch
from helpers import build_model, make_model, read_metrics
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaModel

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils import distributed, models
from utils.cli import UserError
from utils.models.weights import optimizers_of
from utils.tasks import number

SMALL = {"rollout_buffer_size": 4, "train_size": 4, "num_train_epochs": 1, "eval_interval": 0, "num_turns": 1}
SMALL |= {"max_new_tokens": 3, "mini_batch_size": 4}


def train(script, folder, model=None, tokenizer=None, **flags):
    """(agents, run) of one update."""
    flags = SMALL | flags
    if script is magrpo_llm:
        flags |= {"num_generations": 2, "train_size": flags["train_size"] // 2}
    args = script.Args(**flags, output_dir=str(folder / "run"))
    return script.main(args, number, model, tokenizer)


def train_named(script, folder, names, **flags):
    """The same from models that a flag names."""
    args = script.Args(**(SMALL | flags), model=names, output_dir=str(folder / "run"))
    return script.main(args, number)


@pytest.mark.parametrize(
    "script, num_agents", [(ippo_llm, 8), (iac_llm, 3), (maac_llm, 1), (maac_llm, 3), (magrpo_llm, 3), (ppo_llm, 3)]
)
def test_teams_of_any_size(tmp_path, model, tokenizer, script, num_agents):
    agents, _ = train(script, tmp_path, build_model(tokenizer), tokenizer, num_agents=num_agents)
    names = [f"agent_{i}" for i in range(num_agents)]
    assert len(agents) == num_agents + (script is maac_llm)  # and a critic
    assert sorted(path.name for path in (tmp_path / "run").glob("agent_*")) == names
    (row,) = read_metrics(tmp_path / "run")
    assert all(f"{name}/policy_loss" in row for name in names)


# --- Models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, flags, critics",  # the sizes of these
    [
        (ippo_llm, {"use_separate_critic": True}, [160, 32]),
        (ippo_llm, {}, []),
        (maac_llm, {}, [160]),
        (ppo_llm, {"num_agents": 2, "lora_rank": 2}, [160, 32]),
    ],
    ids=str,
)
def test_agents_may_have_models_of_their_own(tmp_path, tokenizer, script, flags, critics):
    other = make_model(tmp_path / "other", tokenizer)
    agents, _ = train_named(script, tmp_path, ("utils/tiny_lm", other), **flags)
    assert [agent.actor.config.hidden_size for agent in agents[:2]] == [160, 32]
    assert [agent.critic.config.hidden_size for agent in agents if getattr(agent, "critic", None)] == critics
    if script is not ppo_llm:
        assert LlamaForCausalLM.from_pretrained(tmp_path / "run/agent_1").config.hidden_size == 32


def test_each_agent_reads_its_prompts_by_its_own_chat_template(tmp_path, tokenizer):
    names = ("utils/tiny_lm", make_model(tmp_path / "other", tokenizer))
    agents, _ = train_named(ippo_llm, tmp_path, names)
    chat = [{"role": "user", "content": "7"}]
    texts = [agent.tokenizer.decode(models.encode(chat, [], agent)) for agent in agents]
    assert texts[0].startswith("<|user|>7") and texts[1].startswith("Q: 7 A:")
    saved = AutoTokenizer.from_pretrained(tmp_path / "run/agent_1")
    assert saved.chat_template.startswith("{% for message in messages %}Q:")


@pytest.mark.parametrize("script", [ippo_llm, ppo_llm])
def test_a_saved_agent_opens_elsewhere_and_gives_the_same_greedy_answer(tmp_path, script):
    flags = {"num_agents": 2, "actor_learning_rate": 3e-3, "max_new_tokens": 16, "train_size": 8}
    agents, run = train_named(script, tmp_path, ("utils/tiny_lm",), **flags)
    run.args.do_sample = False
    chat = [{"role": "user", "content": "Summarise this post in about 16 words. Anna took my car."}]
    for i, agent in enumerate(agents):
        ids = models.encode(chat, [], agent)
        (answer,) = script.generate(agent, [ids], run.args, distributed.generator(1))
        folder = tmp_path / f"run/agent_{i}"
        if script is ppo_llm:  # adapters
            saved = AutoPeftModelForCausalLM.from_pretrained(folder / "actor", dtype=torch.float32)
        else:
            saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        read = AutoTokenizer.from_pretrained(folder)
        prompt = read.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert prompt.input_ids[0].tolist() == ids
        assert saved.generate(**prompt, do_sample=False, max_new_tokens=16)[0, len(ids) :].tolist() == answer


def build(script, tokenizer, **flags):
    """Agents that have not learned."""
    args = script.Args(**(SMALL | flags))
    initials = models.load(args, build_model(tokenizer), tokenizer)
    return [script.Agent(i, initial, 8, args) for i, initial in enumerate(initials)]


def test_agents_of_one_model_share_a_frozen_reference(tokenizer):
    agents = build(ippo_llm, tokenizer, num_agents=3)
    assert len({id(agent.reference.model) for agent in agents}) == 1
    assert not any(parameter.requires_grad for parameter in agents[0].reference.model.parameters())
    assert not agents[0].actor.model.training


@pytest.mark.parametrize("names, num_agents", [(("utils/tiny_lm",) * 3, 2), ((), 2)])
def test_models_are_one_for_all_or_one_each(tmp_path, names, num_agents):
    message = f"^--model takes one name, or one for each of the {num_agents} agents, got {len(names)}$"
    with pytest.raises(UserError, match=message):
        train_named(ippo_llm, tmp_path, names, num_agents=num_agents)


@pytest.mark.parametrize("script", [ippo_llm, maac_llm])
def test_a_tokenizer_without_a_padding_token_gets_one_in_a_copy(tmp_path, tokenizer, script):
    without = copy.deepcopy(tokenizer)
    without.pad_token = None
    agents, _ = train(script, tmp_path, build_model(tokenizer), without)
    assert without.pad_token is None
    assert agents[0].tokenizer.pad_token == tokenizer.eos_token


# --- Critics ----------------------------------------------------------------------------------------------------------


def make_critic(folder, vocab_size):
    """The folder of a small critic."""
    size = {"hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaModel(LlamaConfig(vocab_size=vocab_size, **size)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("script", [ippo_llm, maac_llm, ppo_llm])
def test_a_critic_may_be_a_model_of_its_own_kind(tmp_path, tokenizer, script):
    flags = {"critic_model_name_or_path": make_critic(tmp_path / "critic", vocab_size=768)}
    if script is ippo_llm:
        flags["use_separate_critic"] = True
    agents, _ = train(script, tmp_path, build_model(tokenizer), tokenizer, **flags)
    sizes = [agent.critic.config.hidden_size for agent in agents if hasattr(agent, "critic")]
    assert {*sizes} == {48} and agents[0].actor.config.hidden_size == 32


def test_a_critic_that_lacks_tokens_of_an_agent_is_one_line(tmp_path, tokenizer):
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<|more|>", "<|most|>"])
    critic = make_critic(tmp_path / "critic", vocab_size=768)
    message = r"^--critic-model-name-or-path .*critic knows 768 tokens, the actor's tokenizer has 770$"
    with pytest.raises(UserError, match=message):
        flags = {"use_separate_critic": True, "critic_model_name_or_path": critic}
        train(ippo_llm, tmp_path, build_model(larger), larger, **flags)


def test_values_are_0_at_first(tokenizer):
    for flags in ({}, {"value_head_hidden_dim": 7}, {"use_separate_critic": True, "critic_value_head_hidden_dim": 7}):
        agent = build(ippo_llm, tokenizer, **flags)[0]
        assert not agent.value_head(torch.randn(5, 32)).any()


# --- Optimisers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [False, True])
def test_actor_and_critic_learn_at_their_own_rates(tokenizer, separate):
    rates = {"actor_learning_rate": 1e-3, "critic_learning_rate": 2e-3}
    agent = build(ippo_llm, tokenizer, use_separate_critic=separate, **rates)[0]
    assert [optimizer.param_groups[0]["lr"] for optimizer in agent.optimizers] == [1e-3, 2e-3]


def test_the_flags_of_adam_go_to_every_optimiser(tokenizer):
    flags = {"adam_beta1": 0.8, "adam_beta2": 0.97, "adam_epsilon": 1e-7, "weight_decay": 0.2}
    for optimizer in build(ppo_llm, tokenizer, **flags)[0].optimizers:
        group = optimizer.param_groups[0]
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.97), 1e-7, 0.2)


@pytest.mark.parametrize("script", [ippo_llm, maac_llm, magrpo_llm, ppo_llm])
def test_epochs_and_mini_batches_make_optimiser_steps(tmp_path, tokenizer, script):
    flags = {"rollout_buffer_size": 6, "mini_batch_size": 4, "train_size": 6, "update_epochs": 3}
    agents, _ = train(script, tmp_path, build_model(tokenizer), tokenizer, **flags)
    for agent in agents:  # 6 episodes in fours are 2 mini-batches
        for optimizer in optimizers_of(agent):
            assert {int(state["step"]) for state in optimizer.state.values()} == {6}


def rates_of(agent):
    """Those of eight updates, and of two after them."""
    rates = agent.schedules[0].get_last_lr()
    for _ in range(9):
        agent.optimizers[0].step()
        agent.schedules[0].step()
        rates = [*rates, *agent.schedules[0].get_last_lr()]
    return [rate / max(rates) for rate in rates]


def test_learning_rates_fall_in_the_second_half_of_the_run(tokenizer):
    assert rates_of(build(ippo_llm, tokenizer)[0]) == pytest.approx([1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert rates_of(build(ippo_llm, tokenizer, anneal_lr=False)[0]) == [1] * 10


def test_learning_rates_of_ppo_rise_and_then_fall_along_a_cosine(tokenizer):
    rates = rates_of(build(ppo_llm, tokenizer, warmup_proportion=0.25)[0])
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert rates[5] == pytest.approx(0.5) and rates[8:] == pytest.approx([0, 0])


# --- How long a run is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_episodes, num_updates", [(1, 1), (4, 1), (5, 2), (99, 3)])
def test_a_run_ends_after_so_many_episodes_rounded_up_to_an_update(tmp_path, tokenizer, max_episodes, num_updates):
    flags = {"train_size": 12, "max_episodes": max_episodes}
    agents, run = train(ippo_llm, tmp_path, build_model(tokenizer), tokenizer, **flags)
    assert [row["global_step"] for row in run.rows] == [4, 8, 12][:num_updates]
    assert agents[0].schedules[0].get_last_lr() == [0.0]  # the schedules are as long as the run


def test_episodes_of_an_item_are_neighbours(tmp_path, tokenizer, monkeypatch):
    seen = []

    def reward_func(*completions, items):
        seen.extend(item["share"] for item in items)
        return [0.0] * len(items)

    monkeypatch.setattr(number, "reward_func", reward_func)
    train(magrpo_llm, tmp_path, build_model(tokenizer), tokenizer, train_size=8)
    assert seen[::2] == seen[1::2] and len({*seen}) == 4
