"""Every flag does something: a table of flags, another value for each, and what then changes."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import make_args
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import iac_llm
import ippo_llm
import utils.run
from utils.tasks import number

SMALL = {"task": "number", "train_size": 16, "max_new_tokens": 4, "eval_interval": 0}  # two updates
SCRIPTS = {"ippo_llm": ippo_llm, "iac_llm": iac_llm}
BASELINES = {}


def train(tmp_path, script, task=None, **flags):
    """What a short run learned, said and wrote."""

    class Watched(script.Agent):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.actor.register_forward_hook(lambda module, given, out: answered.append(out.logits.shape[0]))

    answered = []  # rows that an actor reads at once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Agent", Watched)
        patch.setattr(utils.run, "draw_curves", lambda *_: None)  # takes longer than all the rest
        agents, run = script.main(make_args(tmp_path, script, **(SMALL | flags)), task)
    return SimpleNamespace(agents=agents, run=run, rows=run.rows, folder=run.folder, answered=max(answered))


def weights(seen):
    return [parameter.detach().clone() for agent in seen.agents for parameter in agent.parameters()]


def learned(before, after):
    """Other weights came out."""
    pairs = list(zip(weights(before), weights(after)))
    return any(one.shape != other.shape or not torch.equal(one, other) for one, other in pairs)


def said(before, after):
    """Other texts were sampled in the first update."""
    return before.run.samples[:2] != after.run.samples[:2]


def evaluated(before, after):
    """Other held-out items were answered."""
    return before.rows[0]["eval/reward_mean"] != after.rows[0]["eval/reward_mean"]


def updates(expected):
    return lambda before, after: len(before.rows) == 2 and len(after.rows) == expected


def of(attribute, expected):
    """An attribute of the first agent's critic head, tokenizer, ... as it should be now, and was not."""

    def changed(before, after):
        return attribute(after) == expected != attribute(before)

    return changed


def head_size(seen):
    head = seen.agents[0].value_head
    return head[0].out_features if len(head) > 1 else None


def files(seen):
    return sorted(path.name for path in seen.folder.rglob("*"))


TOKENS = {"action_granularity": "token"}  # so that gamma and lambda matter within one turn
CRITIC = {"use_separate_critic": True}
# flag: (another value, other flags of both runs, what has to be seen)
TABLE = {
    "actor_learning_rate": (2e-3, {}, learned),
    "critic_learning_rate": (2e-3, {}, learned),
    "weight_decay": (0.5, {}, learned),
    "adam_beta1": (0.5, {}, learned),
    "adam_beta2": (0.9, {}, learned),
    "adam_epsilon": (1e-3, {}, learned),
    "max_grad_norm": (1e-3, {}, learned),
    "anneal_lr": (False, {"train_size": 32}, learned),
    "mini_batch_size": (8, {}, learned),
    "value_clip_range": (1e-6, {}, learned),
    "value_loss_coef": (0.5, {}, learned),
    "entropy_coef": (1.0, {}, learned),
    "advantage_normalization": (False, {}, learned),
    "reward_normalization": (False, {"advantage_normalization": False}, learned),
    "reward_norm_eps": (1e3, {"advantage_normalization": False}, learned),
    "kl_coef": (1.0, {}, learned),
    "gamma": (0.5, TOKENS, learned),
    "action_granularity": (None, {}, learned),  # the other one
    "dtype": ("bfloat16", {}, of(lambda seen: seen.agents[0].actor.dtype, torch.bfloat16)),
    "attn_implementation": ("eager", {}, of(lambda seen: seen.agents[0].actor.config._attn_implementation, "eager")),
    "seed": (2, {}, said),
    "temperature": (0.5, {}, said),
    "top_p": (0.3, {}, said),
    "top_k": (2, {}, said),
    "do_sample": (False, {}, said),
    "task": ("tldr", {}, of(lambda seen: "prompt" in seen.run.samples[0]["item"], True)),
    "num_generations": (4, {}, of(lambda seen: seen.run.samples[0]["item"] == seen.run.samples[1]["item"], True)),
    "rollout_buffer_size": (4, {}, updates(4)),
    "num_train_epochs": (2, {}, updates(4)),
    "train_size": (24, {}, updates(3)),
    "max_new_tokens": (1, {}, of(lambda seen: seen.rows[0]["agent_0/response_length"], 1.0)),
    "per_device_train_batch_size": (2, {}, of(lambda seen: seen.answered, 4)),  # 8 and 2; mini-batches have 4
    "use_separate_critic": (True, {}, of(lambda seen: "critic" in files(seen), True)),
    "critic_value_head_hidden_dim": (7, CRITIC, of(head_size, 7)),
    "value_head_hidden_dim": (7, {}, of(head_size, 7)),
    "num_agents": (3, {}, of(lambda seen: len(seen.agents), 3)),
    "num_turns": (2, {}, of(lambda seen: "turn_2/reward_mean" in seen.rows[0], True)),
    "early_termination_threshold": (
        -1.0,
        {"num_turns": 3},
        of(lambda seen: seen.rows[0]["turns"], 1),
    ),
    "eval_interval": (1, {}, of(lambda seen: seen.rows[0]["eval/reward_mean"] is None, False)),
    "eval_size": (2, {"eval_interval": 1}, evaluated),
    "save_interval": (1, {}, of(lambda seen: "update_000001" in files(seen), True)),
    "keep_checkpoints": (1, {"save_interval": 1}, of(lambda seen: "update_000001" in files(seen), False)),
}
OWN = {
    "ippo_llm": {"ppo_epochs": (2, {}, learned), "gae_lambda": (0.1, TOKENS, learned)},
    "iac_llm": {"ac_epochs": (2, {}, learned)},
}
ELSEWHERE = {  # and the test that changes them
    "model": "test_models_of_their_own",
    "critic_model_name_or_path": "test_a_critic_of_its_own_kind",
    "output_dir": "every test here",
    "overwrite": "test_an_earlier_run_is_kept_unless_told",
    "dataset": "test_a_dataset_of_yours",
    "mixed_precision": "test_bfloat16_autocast_and_weights_train",
    "trust_remote_code": "passed on to transformers",
    "resume": "test_resume.py",
    "reward_timeout": "test_faults.py",
    "deterministic": "test_faults.py",
    "track": "test_weights_and_biases_gets_the_same",
}
CASES = [(name, flag) for name in SCRIPTS for flag in (*TABLE, *OWN[name])]
# Of CoMLRL's pages, both lists; `model_config` is --dtype, --attn-implementation and --mixed-precision, `wandb_config`
# is --track and its like; the rest is given by a task or in Python.
PUBLISHED = """output_dir actor_learning_rate critic_learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon
max_grad_norm rollout_buffer_size mini_batch_size value_clip_range value_loss_coef entropy_coef advantage_normalization
max_new_tokens temperature top_p top_k do_sample num_train_epochs per_device_train_batch_size use_separate_critic model
critic_model_name_or_path critic_value_head_hidden_dim value_head_hidden_dim num_agents num_turns reward_norm_eps"""


@pytest.mark.parametrize("name, flag", CASES)
def test_a_flag_changes_what_happens(tmp_path, name, flag):
    script, (value, base, changed) = SCRIPTS[name], (TABLE | OWN[name])[flag]
    if flag == "action_granularity":
        value = {"token": "turn", "turn": "token"}[script.Args().action_granularity]
    key = (name, *sorted(base.items()))
    if key not in BASELINES:
        BASELINES[key] = train(tmp_path / "before", script, **base)
    assert getattr(make_args(script=script, **(SMALL | base)), flag) != value
    assert changed(BASELINES[key], train(tmp_path / "after", script, **(base | {flag: value})))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_table_has_every_flag(name):
    flags = {field.name for field in dataclasses.fields(SCRIPTS[name].Args)}
    tracking = {flag for flag in flags if flag.startswith("wandb_")}
    assert flags == TABLE.keys() | OWN[name].keys() | ELSEWHERE.keys() | tracking
    assert {*PUBLISHED.split(), {"ippo_llm": "ppo_epochs", "iac_llm": "ac_epochs"}[name]} <= flags


def task_of(**parts):
    names = ("train_dataset", "eval_dataset", "formatters", "reward_func")
    return SimpleNamespace(**({name: getattr(number, name) for name in names} | parts))


OBJECTS = {  # of the trainers' parameters, those that are no flags
    "reward_func": ({"reward_func": lambda *texts: [float(k) for k in range(len(texts[0]))]}, learned),
    "reward_processor": ({"reward_processor": lambda reward: reward**2}, learned),
    "formatters": ({"formatters": lambda item: "Guess it."}, said),
    "train_dataset": ({"train_dataset": number.eval_dataset}, said),
    "eval_dataset": (
        {"eval_dataset": lambda size, seed: number.eval_dataset(size, seed + 1)},
        evaluated,
    ),
    "metrics_callback": (
        {"metrics_callback": lambda rollouts: {"mine": 1}},
        of(lambda seen: "mine" in seen.rows[0], True),
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("part", OBJECTS)
def test_a_part_of_the_task_changes_what_happens(tmp_path, name, part):
    other, changed = OBJECTS[part]
    base = {"eval_interval": 1, "advantage_normalization": False}
    key = (name, *sorted(base.items()))
    if key not in BASELINES:
        BASELINES[key] = train(tmp_path / "before", SCRIPTS[name], **base)
    assert changed(BASELINES[key], train(tmp_path / "after", SCRIPTS[name], task_of(**other), **base))


def make_model(folder, tokenizer):
    """Another model, a fifth as wide, with another chat template."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(LlamaConfig(**size)).save_pretrained(folder)
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.chat_template = "{% for message in messages %}Q: {{ message['content'] }} A: {% endfor %}"
    other.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("critic", [False, True])
def test_models_of_their_own(tmp_path, tokenizer, name, critic):
    other = make_model(tmp_path / "other", tokenizer)
    asked = []

    def reward_func(first, second, prompts):
        asked.extend(prompts)
        return [0.5] * len(first)

    flags = {"model": ("utils/tiny_lm", other), "use_separate_critic": critic}
    seen = train(tmp_path, SCRIPTS[name], task_of(reward_func=reward_func), **flags)
    assert [agent.actor.config.hidden_size for agent in seen.agents] == [160, 32]
    assert asked[0][0].startswith("<|user|>") and asked[1][0].startswith("Q: ")
    if critic:
        assert [agent.critic.config.hidden_size for agent in seen.agents] == [160, 32]
    saved = AutoTokenizer.from_pretrained(tmp_path / "run/agent_1")
    assert saved.chat_template.startswith("{% for message in messages %}Q:")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "run/agent_1").config.hidden_size == 32


@pytest.mark.parametrize("num_agents", [1, 8])
def test_teams_from_one_to_eight(tmp_path, num_agents):
    seen = train(tmp_path, iac_llm, num_agents=num_agents, train_size=8)
    assert f"agent_{num_agents - 1}/policy_loss" in seen.rows[0] and len(seen.agents) == num_agents
