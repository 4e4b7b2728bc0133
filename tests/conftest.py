"""Which tests are run in which form; what they share is in shared.py."""

import collections
import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side, one thread each, and so do the processes that they start

# Files of the short form: every script's oracles, learning, resume, bad input. Tests of all others are marked `rest`,
# and so are those that make a fault and see that it is found.
SHORT = """
    bad_input cli exact_gradients learn learning play resume single_file tasks
""".split()

# Tests of one thing in many forms, which take long: of these every k-th is in the rest, and the others are slow ones.
EVERY = {
    "test_a_wrong_command_is_one_line": 2,
    "test_a_pickle_that_the_manifest_lists_is_one_line_and_not_read": 4,
    "test_of_500_damages_to_a_checkpoint_each_is_found": 2,
    "test_stopped_runs_are_resumed": 2,
    "test_a_run_that_crashed_while_it_replaced_another_can_be_replaced_again": 4,
    "test_a_signal_ends_a_run_after_the_update_under_way": 3,
    "test_what_was_done_before_the_update_under_way_is_saved_at_once": 2,
    "test_each_seat_follows_the_gradient_of_its_own_return": 5,
    "test_wrong_rewards_are_seen": 2,
    "test_hostile_program_fails_and_leaves_the_others_alone": 5,
    "test_hostile_program_fails_without_some_layers": 3,
    "test_hostile_test_of_a_dataset_fails_and_leaves_the_others_alone": 2,
    "test_an_adapter_is_pefts_own": 3,
    "test_a_flag_changes_what_a_run_leaves": 40,
    "test_what_a_signal_in_an_update_saves_goes_on_to_the_same_bits": 9,
    "test_a_run_that_an_error_ended_in_an_update_goes_on_to_the_same_bits": 6,
    "test_a_fork_that_was_cut_off_at_a_change_of_files_is_whole_or_made_again": 3,
    "test_every_flag_of_a_size_refuses_a_text_and_a_negative_number": 3,
    "test_an_architecture": 39,  # 52 of them, whole and with adapters
    "test_two_processes_learn_and_measure_what_one_does": 9,
    "test_two_sharded_processes_go_on_to_the_same_bits": 4,
    "test_a_run_that_is_killed_again_and_again_gives_the_same_bits": 5,  # five scripts
    "test_a_run_that_is_stopped_while_it_learns_gives_the_same_bits": 5,  # five scripts, two signals
    "test_a_process_that_is_slower_takes_the_folder_that_the_main_one_has_chosen": 2,
    "test_processes_that_sample_for_different_times_go_on_to_the_same_bits": 2,
    "test_every_task_trains_in_every_script": 8,
    "test_memory_that_runs_out_ends_the_run_with_the_flag_that_takes_less": 5,
    "test_the_gradients_of_micro_batches_add_up": 5,
    "test_a_run_on_rows_goes_on_from_python": 5,  # five scripts
    "test_a_run_of_the_page_is_loaded_with_all_that_it_learned": 5,
    "test_any_flags_train_or_are_one_line": 5,
    "test_any_command_line_gives_flags_or_one_line": 2,
    "test_extreme_values_train_or_are_one_line": 6,
    "test_play_and_rewards_are_those_of_the_script": 3,
    "test_two_processes_meet_the_same_opponents_and_learn_as_one": 3,
    "test_a_run_that_crashed_at_a_change_of_files_gives_the_same_bits": 5,
    "test_a_crash_at_any_change_of_files_leaves_the_earlier_checkpoint_or_the_new_one": 4,
    "test_a_full_disk_is_one_line_and_the_checkpoints_are_as_they_were": 3,
    "test_a_large_model_with_a_small_ones_learning_rate_is_said_once": 6,
    "test_a_run_is_that_of_the_folder_and_leaves_ordinary_folders": 3,
    "test_a_checkpoint_gives_agents_back_to_the_bit_and_they_go_on_so": 3,
    "test_scripts_play_it_and_the_same_again": 3,
    "test_a_generation_config_that_transformers_refuses_is_mended_at_the_start": 5,
    "test_small_steps_from_a_model_in_half_precision_are_taken": 5,
    "test_weights_of_bfloat16_learn": 3,
    "test_a_token_that_the_model_does_not_know_is_found_before_training": 5,
    "test_without_an_end_token_answers_have_full_length_and_it_is_said_once": 5,
    "test_a_model_that_masks_tokens_learns_with_an_entropy_bonus": 3,
    "test_a_runs_folder_is_its_agents_as_they_were": 2,
    "test_text_in_files_stays_text": 8,
    "test_a_chat_is_a_prompt_wherever_a_text_is": 3,
    "test_a_folder_that_is_damaged_is_one_line": 4,
    "test_a_policy_is_merged_into_another_configuration": 3,
    "test_a_game_without_a_score_is_played_without": 3,
    "test_every_script_writes_the_score_of_the_weights_that_it_saves": 4,
    "test_two_processes_learn_and_measure_as_one": 6,
    "test_a_task_that_fails_ends_the_run_in_a_line_with_what_was_learned": 3,
    "test_items_with_long_prompts_are_left_out_and_change_nothing_else": 3,
    "test_writers_of_the_page_read_each_others_text": 3,
    "test_a_paused_run_goes_on_to_the_same_bits": 7,
    "test_the_base_is_saved_as_it_is_without_adapters": 3,
    "test_the_other_examples_run_as_printed": 2,
    "test_the_random_players_score_is_the_mean_over_all_that_can_be_said": 3,
    "test_a_gradient_that_is_not_finite_ends_the_run_and_is_in_no_weight": 3,
    "test_a_run_whose_output_nobody_reads_any_more_saves_and_ends": 2,
    "test_a_fork_with_nothing_changed_is_the_run_to_the_bit": 5,  # five scripts
    "test_overwrite_replaces_a_link_and_not_what_it_leads_to": 2,
    "test_rows_are_the_items": 2,
    "test_a_browser_shows_the_page": 2,
    "test_metrics_that_no_run_has_are_one_line": 2,
    "test_a_run_goes_on_from_an_earlier_checkpoint_to_the_same_bits": 2,
}


# Files of runs that are forked from a process that has imported everything. They stand first, so that one worker has
# them all: it takes ten seconds to start that process, and pytest-xdist takes tests from the end of a worker's queue.
FILES_WITH_FORKS = "crashes eval_against kills opponents ppo_processes processes".split()


def pytest_configure(config):
    """Import what tests share where tests are run: takes seconds, and the main process of pytest-xdist runs none."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        config.pluginmanager.import_plugin("shared")


def pytest_ignore_collect(collection_path, config):
    """Leave unread what has nothing of the short form, where that is asked for: to import it all takes seconds."""
    is_short_form = all(f"not {mark}" in config.getoption("markexpr") for mark in ("rest", "slow", "vllm"))
    if is_short_form and not any(".py" in argument for argument in config.args):
        name = collection_path.stem
        return name.startswith("test_") and name.removeprefix("test_") not in SHORT or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the tests that the short form leaves out, unless files were asked for."""
    if any(".py" in argument for argument in config.args):
        return
    seen = collections.Counter()
    for item in items:
        name = item.originalname
        if name in EVERY and not item.get_closest_marker("slow"):
            seen[name] += 1
            if (seen[name] - 1) % EVERY[name]:
                item.own_markers = [mark for mark in item.own_markers if mark.name != "rest"]
                item.add_marker("slow")
        has_another_form = item.get_closest_marker("slow") or item.get_closest_marker("vllm")
        is_short = item.path.stem.removeprefix("test_") in SHORT and not item.originalname.endswith("_seen")
        if not is_short and not has_another_form:
            item.add_marker("rest")
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in FILES_WITH_FORKS)
