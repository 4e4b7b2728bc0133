"""docs/differences.md has every item of the pages that the scripts are built from; what it names is there."""

import re
from pathlib import Path

import pytest

import iac_llm
import ippo_llm
import ppo_llm

PAGE = (Path(__file__).resolve().parent.parent / "docs/differences.md").read_text()
CONFIG = """output_dir actor_learning_rate critic_learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon
max_grad_norm rollout_buffer_size mini_batch_size {epochs} value_clip_range value_loss_coef entropy_coef
advantage_normalization max_new_tokens temperature top_p top_k do_sample num_train_epochs per_device_train_batch_size
use_separate_critic critic_model_name_or_path critic_value_head_hidden_dim value_head_hidden_dim num_agents num_turns
reward_norm_eps"""
TRAINER = """model tokenizer reward_func reward_processor formatters args train_dataset eval_dataset model_config
wandb_config metrics_callback"""
LLMPPO = """finetune_llm_reasoning finetune_llm_multiturn ReasoningGym train_dataset test_dataset reward_fn
conversation_template data_batch_size_per_gpu pop max_steps evaluation_interval env_factory TokenObservationWrapper
max_turns save_llm_checkpoint pad_token_id pad_token model_name actor_network model_config hp_config index batch_size
beta vf_coef clip_coef gamma gae_lambda lr_actor lr_critic max_grad_norm update_epochs temperature repetition_penalty
top_p top_k min_p use_separate_reference_adapter calc_position_embeddings micro_batch_size_per_gpu max_output_tokens
min_output_tokens max_model_len hf_generate_chunk_size lora_config cosine_lr_schedule_config accelerator device wrap
clone use_vllm use_memory_efficient_params vllm_config seed turn_level_clip action_granularity turn_value_reduction
adv_whitening gradient_checkpointing torch_compiler copy_attributes evolvable_attributes get_action get_action_dim
get_policy get_state_dim inspect_attributes learn load load_checkpoint load_optimizer overwrite_reference_adapter
overwrite_critic_adapter merge_lora_configs population preprocess_observation recompile register_mutation_hook
register_network_group reinit_optimizers save_checkpoint lora_only save_optimizer select_adapter set_reference_policy
set_training_mode test loop to_device update_lr use_adapter"""
SECTIONS = {
    "CoMLRL's Multi-Agent PPO and Multi-Agent Actor-Critic": (ippo_llm, iac_llm),
    "AgileRL's LLMPPO": (ppo_llm,),
}


def rows(title):
    """The rows of a table: on the page, here, how; each a string."""
    section = PAGE.split(f"## Item by item: {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| (.*?) \| (.*?) ?\| (.*) \|$", section, flags=re.M)[1:]


def items(title):
    """What a page names, in the order of the table."""
    return [name for page, _, _ in rows(title) for name in re.findall(r"`(\w+)`", page)]


@pytest.mark.parametrize("epochs", ["ppo_epochs", "ac_epochs"])
def test_every_item_of_comlrls_pages_is_there_in_order(epochs):
    names = CONFIG.format(epochs=epochs).split() + TRAINER.split()
    page_items = items("CoMLRL's Multi-Agent PPO and Multi-Agent Actor-Critic")
    assert [name for name in page_items if name in names] == names


def test_every_item_of_agilerls_page_is_there():
    assert not set(LLMPPO.split()) - set(items("AgileRL's LLMPPO"))


@pytest.mark.parametrize("title", SECTIONS)
def test_every_item_has_an_answer(title):
    for page, here, answer in rows(title):
        assert answer.startswith(("the same", "differs: ", "not here: ", "each cell is in ")), page
        assert bool(here) != answer.startswith("not here: ") or here.startswith("one run each")


@pytest.mark.parametrize("title", SECTIONS)
def test_the_flags_that_it_names_are_there(title):
    flags = {"--" + name.replace("_", "-") for script in SECTIONS[title] for name in vars(script.Args())}
    for _, here, answer in rows(title):
        assert not set(re.findall(r"`(--[a-z0-9-]+)`", here + answer)) - flags
