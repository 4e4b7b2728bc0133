"""Every flag does something: with another value, a run leaves other metrics, samples or weights."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import pytest
from short_runs import FLAGS, SCRIPTS, reward_length, small_model

from utils.same import compare

BASE = {"num_turns": 2, "eval_interval": 2, "eval_size": 4, "num_train_epochs": 2, "mini_batch_size": 2}
CRITIC = {"use_separate_critic": True}
LORA = {"lora_rank": 4}
RAW = {"advantage_normalization": False}
TASK = SimpleNamespace(
    train_dataset=lambda size, seed: [{"k": k, "text": "Say it. " * (k % 3 + 1)} for k in range(size)],
    eval_dataset=lambda size, seed: [{"k": k, "text": f"Say {k}."} for k in range(size)],
    formatters=lambda item: item["text"],
    external_transition=lambda num_agents: ["And on."] * num_agents,
    reward_func=reward_length,
)
OTHER = {  # flag: another value, or (another value, other flags of both runs)
    "seed": 2,
    "num_agents": 3,
    "use_separate_critic": None,  # None: the other one of two
    "lora_rank": 2,
    "num_train_epochs": 1,
    "max_episodes": 4,
    "eval_interval": 1,
    "rollout_buffer_size": 8,
    "num_generations": 2,
    "num_turns": 1,
    "max_new_tokens": 2,
    "do_sample": None,
    "temperature": 0.5,
    "top_p": 0.3,
    "top_k": 2,
    "min_p": 0.999,
    "repetition_penalty": 50.0,
    "min_output_tokens": 3,
    "gamma": 0.5,
    "gae_lambda": 0.1,
    "reward_normalization": (None, RAW),
    "reward_norm_eps": (10.0, RAW | {"reward_normalization": True}),
    "turn_baseline": None,
    "kl_coef": 1.0,
    "advantage_normalization": None,
    "advantage_norm_eps": 1.0,
    "advantage_mode": "raw",
    "update_epochs": 2,
    "mini_batch_size": 4,
    "entropy_coef": 0.5,
    "value_loss_coef": 0.1,
    "value_clip_range": 1e-4,
    "clip_coef": (1e-4, {"update_epochs": 3}),
    "turn_level_clip": (None, {"action_granularity": "turn", "update_epochs": 3, "clip_coef": 1e-3}),
    "action_granularity": ("token", {"action_granularity": "turn"}),
    "turn_value_reduction": ("mean", {"action_granularity": "turn", "update_epochs": 2}),
    "kl_loss_coef": 1.0,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-2,
    "anneal_lr": None,
    "cosine_lr_schedule": None,
    "warmup_proportion": 0.5,
    "max_grad_norm": 1e-3,
    "weight_decay": 0.5,
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "adam_epsilon": 1e-2,
    "reference_update_interval": (1, {"use_separate_reference_adapter": True, "kl_loss_coef": 0.1}),
    "use_separate_reference_adapter": (None, {"reference_update_interval": 0}),
    "task": ("tldr", {"task": "number"}),
    "train_size": 8,
    "eval_size": 2,
    "max_prompt_length": (6, {}),
    "long_prompts": ("truncate", {"max_prompt_length": 6}),
    "max_model_len": 16,
    "lora_alpha": (1.0, LORA),
    "lora_dropout": (0.5, LORA),
    "lora_target_modules": (("q_proj",), LORA),
    "value_head_hidden_dim": (7, {"use_separate_critic": False}),
    "critic_value_head_hidden_dim": (7, CRITIC),
    "mixed_precision": "bf16",
    "skip_special_tokens": None,
    "entropy_coef_end": (0.0, {"entropy_coef": 0.5}),
}
ELSEWHERE = """
    chat_template_kwargs template_date self_play opponents opponent_interval opponent_run eval_against
    save_optimizer save_base save_interval keep_checkpoints output_dir overwrite resume fork pause_at model env dataset
    reward_timeout model_config critic_model_config critic_model_name_or_path attn_implementation trust_remote_code
    static_cache shard gradient_checkpointing torch_compiler lora_config merge_adapters load_checkpoint load_optimizer
    keep_reference fresh_critic merge_lora_configs hf_generate_chunk_size use_vllm vllm_config micro_batch_size
    deterministic dtype calc_position_embeddings track wandb_project_name wandb_entity wandb_run_name wandb_tags
""".split()  # which other tests change, or which are to change nothing


@functools.cache
def train(script, flags, root):
    """The folder of a short run with these flags, JSON."""
    folder = root / f"run_{len(list(root.iterdir()))}"
    flags = json.loads(flags)
    known = SCRIPTS[script].Args.__dataclass_fields__
    args = SCRIPTS[script].Args(
        **{name: value for name, value in flags.items() if name in known}, output_dir=str(folder)
    )
    SCRIPTS[script].main(args, None if args.task else TASK, *small_model())
    return folder


def cases():
    """Each flag in one script, which take turns; in the others with -m slow."""
    of_script = {script: [field.name for field in dataclasses.fields(SCRIPTS[script].Args)] for script in SCRIPTS}
    having = {flag: [script for script in SCRIPTS if flag in of_script[script]] for flag in OTHER}
    for k, (flag, scripts) in enumerate(having.items()):
        for script in scripts:
            marks = [] if script == scripts[k % len(scripts)] else [pytest.mark.slow]
            yield pytest.param(script, flag, marks=marks)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("script, flag", [*cases()])
def test_a_flag_changes_what_a_run_leaves(root, script, flag):
    value, base = OTHER[flag] if isinstance(OTHER[flag], tuple) and flag != "model" else (OTHER[flag], {})
    base = FLAGS[script] | BASE | base
    default = base.get(flag, getattr(SCRIPTS[script].Args(), flag))
    changed = base | {flag: not default if value is None else value}
    assert changed[flag] != default
    one, other = (train(script, json.dumps(flags, sort_keys=True), root) for flags in (base, changed))
    assert not all(compare(one, other).values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_changed_here_or_elsewhere(script):
    flags = {field.name for field in dataclasses.fields(SCRIPTS[script].Args)}
    assert flags - OTHER.keys() - {*ELSEWHERE} == set()
