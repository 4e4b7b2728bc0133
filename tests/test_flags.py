"""Every flag of the scripts of teams does something: for each another value, and what then changes."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers import TINY, all_parameters, make_args

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
from utils.tasks import number

SMALL = {"task": "number", "train_size": 16, "max_new_tokens": 4, "eval_interval": 0}  # two updates
SCRIPTS = {module.__name__: module for module in (ippo_llm, iac_llm, maac_llm, magrpo_llm)}
OF_GROUPS = {"num_generations": 2, "train_size": 8}  # two updates of magrpo_llm
BASELINES = {}


def train(tmp_path, script, task=None, **flags):
    """A short run: its agents, Run, rows of metrics, folder, and the most rows that an actor reads at once."""
    batch_sizes = []

    class WatchedAgent(script.Agent):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.actor.register_forward_hook(lambda module, inputs, out: batch_sizes.append(out.logits.shape[0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Agent", WatchedAgent)
        agents, run = script.main(make_args(tmp_path, script, **(SMALL | flags)), task)
    return SimpleNamespace(agents=agents, run=run, rows=run.rows, folder=run.folder, most_rows=max(batch_sizes))


def baseline(tmp_path_factory, script, flags):
    """The short run with these flags, made once."""
    key = (script.__name__, *sorted(flags.items()))
    if key not in BASELINES:
        BASELINES[key] = train(tmp_path_factory.mktemp("before"), script, **flags)
    return BASELINES[key]


# --- What may be seen of a change: functions of the run before and the run after --------------------------------------


def learned(before, after):
    """Other weights came out."""
    weights = [
        [parameter for agent in result.agents for parameter in all_parameters(agent)] for result in (before, after)
    ]
    return any(not torch.equal(x, y) for x, y in zip(*weights, strict=True))


def sampled(before, after):
    """Other texts were sampled in the first update."""
    return before.run.samples[:2] != after.run.samples[:2]


def evaluated(before, after):
    """Other held-out items were answered."""
    return before.rows[0]["eval/reward_mean"] != after.rows[0]["eval/reward_mean"]


def becomes(expected, view):
    """What `view` sees of a run is `expected` now, and was not before."""

    def changed(before, after):
        return view(after) == expected != view(before)

    return changed


def num_updates(result):
    return len(result.rows)


def num_agents(result):
    return len(result.agents)


def head_size(result):
    """Hidden units of the first agent's value head."""
    head = result.agents[0].value_head
    return head[0].out_features if len(head) > 1 else None


def team_head_size(result):
    """Hidden units of the central critic's head."""
    head = result.agents[-1].value_head
    return head[0].out_features if len(head) > 1 else None


def has_file(name):
    return lambda result: any(result.folder.rglob(name))


def has_column(name):
    return lambda result: result.rows[0].get(name) is not None


def column(name):
    return lambda result: result.rows[0].get(name)


def first_actor(attribute):
    return lambda result: getattr(result.agents[0].actor, attribute)


def attention(result):
    return result.agents[0].actor.config._attn_implementation


def one_item_twice(result):
    return result.run.samples[0]["item"] == result.run.samples[1]["item"]


# --- The flags --------------------------------------------------------------------------------------------------------

TOKENS = {"action_granularity": "token"}  # so that gamma and lambda matter within one turn
CRITIC = {"use_separate_critic": True}
OWN_CRITIC = CRITIC | {"critic_model_name_or_path": (TINY,)}
ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
RAW_ADVANTAGES = {"advantage_normalization": False}
TABLE = {  # flag: another value, other flags of both runs, what is to be seen
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
    "value_loss_coef": (0.02, {}, learned),
    "entropy_coef": (1.0, {}, learned),
    "advantage_normalization": (False, {}, learned),
    "reward_normalization": (False, RAW_ADVANTAGES, learned),
    "reward_norm_eps": (1e3, RAW_ADVANTAGES, learned),
    "kl_coef": (1.0, {}, learned),
    "gamma": (0.5, TOKENS, learned),
    "action_granularity": (None, {}, learned),  # the other one
    "dtype": ("bfloat16", {}, becomes(torch.bfloat16, first_actor("dtype"))),
    "attn_implementation": ("eager", {}, becomes("eager", attention)),
    "model_config": ({"rope_parameters": ROPE}, {}, sampled),
    "critic_model_config": ({"rope_parameters": ROPE}, OWN_CRITIC, learned),
    "seed": (2, {}, sampled),
    "temperature": (0.5, {}, sampled),
    "top_p": (0.3, {}, sampled),
    "top_k": (2, {}, sampled),
    "do_sample": (False, {}, sampled),
    "task": ("tldr", {}, becomes(True, lambda result: "prompt" in result.run.samples[0]["item"])),
    "num_generations": (4, {}, becomes(True, one_item_twice)),
    "rollout_buffer_size": (4, {}, becomes(4, num_updates)),
    "num_train_epochs": (2, {}, becomes(4, num_updates)),
    "max_steps": (7, {}, becomes(1, num_updates)),
    "train_size": (24, {}, becomes(3, num_updates)),
    "max_new_tokens": (1, {}, becomes(1.0, column("agent_0/response_length"))),
    "per_device_train_batch_size": (2, {}, becomes(4, lambda result: result.most_rows)),  # 8 and 2; mini-batches have 4
    "micro_batch_size": (1, {"per_device_train_batch_size": 2}, becomes(2, lambda result: result.most_rows)),
    "use_separate_critic": (True, {}, becomes(True, has_file("critic"))),
    "critic_value_head_hidden_dim": (7, CRITIC, becomes(7, head_size)),
    "value_head_hidden_dim": (7, {}, becomes(7, head_size)),
    "num_agents": (3, {}, becomes(3, num_agents)),
    "num_turns": (2, {}, becomes(True, has_column("turn_2/reward_mean"))),
    "early_termination_threshold": (-1.0, {"num_turns": 3}, becomes(1.0, column("turns"))),
    "eval_interval": (1, {}, becomes(True, has_column("eval/reward_mean"))),
    "eval_size": (2, {"eval_interval": 1}, evaluated),
    "save_interval": (1, {"save_interval": 0}, becomes(True, has_file("update_000001"))),
    "keep_checkpoints": (1, {"save_interval": 1}, becomes(False, has_file("update_000001"))),
}
OWN = {
    "ippo_llm": {"ppo_epochs": (2, {}, learned), "gae_lambda": (0.1, TOKENS, learned)},
    "iac_llm": {"ac_epochs": (2, {}, learned)},
    "maac_llm": {
        "ac_epochs": (2, {}, learned),
        "critic_type": ("q", {}, learned),
        "gamma": (0.5, {"num_turns": 2}, learned),
        "critic_model_config": ({"rope_parameters": ROPE}, {"critic_model_name_or_path": TINY}, learned),
        "critic_value_head_hidden_dim": (7, {}, becomes(7, team_head_size)),
        "num_agents": (3, {}, becomes(4, num_agents)),  # with their critic
    },
    "magrpo_llm": {
        "magrpo_epochs": (2, {}, learned),
        "advantage_mode": ("raw", {}, learned),
        "advantage_normalization": (True, {}, learned),
        "gamma": (0.5, {"num_turns": 2, "num_generations": 2}, learned),
        "num_generations": (4, {}, becomes(4, num_updates)),
        "train_size": (12, {}, becomes(3, num_updates)),
        "rollout_buffer_size": (4, {}, becomes(4, num_updates)),
        "early_termination_threshold": (-1.0, {"num_turns": 3}, becomes(1.0, column("turns"))),
        "per_device_train_batch_size": (1, {}, becomes(4, lambda result: result.most_rows)),
        "micro_batch_size": (1, {"per_device_train_batch_size": 1}, becomes(2, lambda result: result.most_rows)),
    },
}
GONE = {  # flags of TABLE that a script does not have
    "ippo_llm": set(),
    "iac_llm": set(),
    "maac_llm": set(
        "action_granularity use_separate_critic value_head_hidden_dim value_loss_coef value_clip_range".split()
    ),
    "magrpo_llm": set(
        """action_granularity use_separate_critic value_head_hidden_dim value_loss_coef value_clip_range
        critic_learning_rate critic_model_config critic_model_name_or_path critic_value_head_hidden_dim
        reward_normalization reward_norm_eps""".split()
    ),
}
ELSEWHERE = {  # and the tests that change them
    "model": "test_agents.py",
    "critic_model_name_or_path": "test_agents.py",
    "output_dir": "every test here",
    "overwrite": "test_run.py",
    "dataset": "test_questions.py",
    "max_prompt_length": "test_long_prompts.py",
    "long_prompts": "test_long_prompts.py",
    "mixed_precision": "test_precision.py",
    "trust_remote_code": "passed on to transformers",
    "static_cache": "test_cache.py",
    "shard": "test_sharding.py",
    "use_vllm": "test_vllm.py",
    "vllm_config": "test_vllm.py",
    "sampler_correction": "test_sampler_correction.py",
    "resume": "test_resume.py",
    "fork": "test_fork.py",
    "pause_at": "test_pause.py",
    "reward_timeout": "test_reward_faults.py",
    "deterministic": "test_release.py",
    "track": "test_wandb.py",
}
OF_IPPO = [("ippo_llm", flag) for flag in (*TABLE, *OWN["ippo_llm"])]
OF_IAC = [("iac_llm", flag) for flag in OWN["iac_llm"]]
OF_OTHERS = []
for name in ("maac_llm", "magrpo_llm"):
    OF_OTHERS += [(name, flag) for flag in OWN[name]]
    rest = [flag for flag in TABLE if flag not in OWN[name].keys() | GONE[name]]
    OF_OTHERS += [pytest.param(name, flag, marks=pytest.mark.slow) for flag in rest]
THE_SAME = [pytest.param("iac_llm", flag, marks=pytest.mark.slow) for flag in TABLE]


@pytest.mark.parametrize("name, flag", OF_IPPO + OF_IAC + OF_OTHERS + THE_SAME)
def test_a_flag_changes_what_happens(tmp_path, tmp_path_factory, name, flag):
    script = SCRIPTS[name]
    value, base, changed = (TABLE | OWN[name])[flag]
    if script is magrpo_llm:
        base = OF_GROUPS | base
    default = getattr(make_args(script=script, **(SMALL | base)), flag)
    if flag == "action_granularity":
        value = {"token": "turn", "turn": "token"}[default]
    assert value != default
    before = baseline(tmp_path_factory, script, base)
    assert changed(before, train(tmp_path / "after", script, **(base | {flag: value})))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_table_has_every_flag(name):
    flags = {field.name for field in dataclasses.fields(SCRIPTS[name].Args)}
    tracking = {flag for flag in flags if flag.startswith("wandb_")}
    assert flags == (TABLE.keys() | OWN[name].keys() | ELSEWHERE.keys() | tracking) - GONE[name]


# --- The task's functions ---------------------------------------------------------------------------------------------


def rising_rewards(*texts):
    return [float(k) for k in range(len(texts[0]))]


def other_eval_dataset(size, seed):
    return number.eval_dataset(size, seed + 1)


FUNCTIONS = {  # of the trainers' parameters, those that are no flags
    "reward_func": (rising_rewards, learned),
    "reward_processor": (lambda reward: reward**2, learned),
    "formatters": (lambda item: "Guess it.", sampled),
    "train_dataset": (number.eval_dataset, sampled),
    "eval_dataset": (other_eval_dataset, evaluated),
    "metrics_callback": (lambda rollouts: {"mine": 1}, becomes(True, has_column("mine"))),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_of_the_task_changes_what_happens(tmp_path, tmp_path_factory, name, function):
    other, changed = FUNCTIONS[function]
    script = SCRIPTS[name]
    names = ("train_dataset", "eval_dataset", "formatters", "reward_func")
    task = SimpleNamespace(**({name: getattr(number, name) for name in names} | {function: other}))
    base = {"eval_interval": 1, **RAW_ADVANTAGES} | (OF_GROUPS if script is magrpo_llm else {})
    before = baseline(tmp_path_factory, script, base)
    assert changed(before, train(tmp_path / "after", script, task, **base))
