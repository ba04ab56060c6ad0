"""Which test stands for which rule of the client's caches, lesson of the source's history and field report.

The numbers are those of the project's engineering reference: rules of section 2 by their subsection, lessons
of table 2.6 by the commit that fixed them in the source, field reports by their number (those that concern
slots, caches and memory, the CUDA backend and the qwen models). What is checked here is that each test that
is named exists.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

CACHES, LIFE = "unit/client/test_caches.py", "unit/client/test_caches_life.py"
CACHED, META = "unit/client/test_cached_client.py", "unit/client/test_cache_metadata.py"
LESSONS, EVICTION = "unit/client/test_cache_lessons.py", "unit/client/test_cache_eviction.py"
BOUNDARIES, BUS = "unit/client/test_boundaries.py", "unit/client/test_bus.py"
ENDINGS, HISTORIES = "unit/client/test_client_endings.py", "e2e/test_cache_histories.py"
E2E, DISK, REAL = "e2e/test_client_caches.py", "e2e/test_disk_tier.py", "e2e/test_lessons.py"
MODEL = "property/test_client_caches.py"

RULES = {
    "2.1 callbacks first": f"{BUS}::test_callbacks_run_before_waiters",
    "2.1 first waiter in order": f"{BUS}::test_waiters_are_served_first_come_first_served_one_event_each",
    "2.1 a failing callback": f"{BUS}::test_a_failing_callback_is_logged_and_stops_nothing",
    "2.1 end of output": f"{BUS}::test_the_end_fails_every_waiter_and_everybody_after",
    "2.1 waiter before command": f"{LESSONS}::test_5549c79_a_waiter_is_there_before_its_command_is_written",
    "2.1 removed on every path": f"{BUS}::test_a_waiter_is_removed_on_timeout_and_on_an_exception",
    "2.1 timeouts": f"{LESSONS}::test_cdf4b23_a_cold_start_has_a_timeout_of_its_own",
    "2.2 cut behind the opening": f"{BOUNDARIES}::test_a_cut_lies_just_behind_the_opening_of_a_turn",
    "2.2 separators": f"{BOUNDARIES}::test_the_opening_is_looked_for_within_four_tokens",
    "2.2 no system message": f"{BOUNDARIES}::test_no_system_message_no_cuts_at_turns",
    "2.2 markers of several tokens": f"{BOUNDARIES}::test_markers_of_several_tokens",
    "2.2 llama 3": f"{BOUNDARIES}::test_llama_3_headers",
    "2.2 no markers": f"{BOUNDARIES}::test_without_markers_prefixes_are_cut_at_pages",
    "2.2 target cut": f"{BOUNDARIES}::test_the_target_is_the_second_to_last_cut_or_the_only_one",
    "2.2 key": f"{CACHES}::test_a_key_says_everything_that_decides",
    "2.2 the deepest of all cuts": f"{CACHES}::test_the_deepest_of_all_hits_is_restored",
    "2.2 every hit is touched": f"{CACHES}::test_every_hit_counts_as_used",
    "2.2 nothing twice": f"{CACHES}::test_what_is_cached_is_not_kept_again",
    "2.2 reserve at cap": f"{CACHES}::test_the_victim_is_out_of_sight_until_the_outcome_is_known",
    "2.2 confirm needs the ack": f"{CACHES}::test_an_entry_needs_the_acknowledgement",
    "2.2 one entry for each slot": f"{CACHES}::test_a_confirmed_slot_has_one_entry",
    "2.2 abort drops the victim": f"{CACHES}::test_abort_drops_the_victim",
    "2.2 leaves first": f"{EVICTION}::test_the_oldest_leaf_goes_and_the_shared_head_stays",
    "2.3 key of the raw prompt": f"{LIFE}::test_a_full_hit_sends_the_kept_ids",
    "2.3 slots behind the prefixes'": f"{LIFE}::test_the_two_caches_never_share_a_slot",
    "2.3 clamped": f"{LIFE}::test_slots_are_clamped_to_what_the_daemon_has",
    "2.3 metadata": f"{META}::test_version_2_has_these_fields",
    "2.3 every field": f"{META}::test_every_field_is_checked",
    "2.3 atomic": f"{META}::test_a_failed_write_leaves_the_old_one",
    "2.3 score": f"{EVICTION}::test_the_score_is_hits_and_tokens_for_each_byte",
    "2.3 overtaken entries": f"{EVICTION}::test_an_overtaken_entry_is_worth_less",
    "2.3 lowest, then oldest": f"{EVICTION}::test_the_lowest_score_goes_then_the_oldest",
    "2.3 byte budget": f"{LIFE}::test_files_of_full_entries_keep_to_the_byte_budget",
    "2.3 occupancy": f"{LIFE}::test_a_free_slot_is_found_by_occupancy_not_by_a_counter",
    "2.3 newest, in order of use": f"{META}::test_the_newest_are_kept_in_order_of_use",
    "2.3 rehydrate": f"{CACHED}::test_prefixes_come_back_from_the_daemons_disk",
    "2.3 rehydrate that fails": f"{LIFE}::test_a_load_that_fails_costs_the_slot_only",
    "2.3 the file is gone": f"{LIFE}::test_a_full_entry_without_its_file_is_dropped_and_named_once",
    "2.4 start-up sync": f"{CACHED}::test_the_callback_is_there_before_the_start_up_sync",
    "2.5 both caches and counts": f"{LIFE}::test_all_cleared_drops_prefix_and_full_entries_and_counts_both",
    "2.5 not gated": f"{LIFE}::test_all_cleared_works_with_one_cache_off",
    "2.5 files stay, cold": f"{LIFE}::test_full_entries_with_files_become_cold",
    "2.5 reservations": f"{LIFE}::test_a_reservation_from_before_a_clearing_is_refused",
    "2.5 twice": f"{LIFE}::test_a_clearing_without_an_epoch_clears",
    "2.5 with the daemon": f"{HISTORIES}::test_p7_p9_p10_p13_a_fault_in_a_request_that_starts_from_a_slot",
    "2.5 late confirm, with the daemon": f"{HISTORIES}::test_p9_a_late_confirm_of_an_old_epoch_is_refused",
}

FIXED = {
    "9a64c18 two phases": f"{CACHES}::test_abort_before_sending_keeps_the_victim",
    "1b5e0d1 temporary prompt files": f"{LESSONS}::test_1b5e0d1_a_prompt_needs_no_file",
    "1b5e0d1 temporary files of the cache": f"{MODEL}::test_p12_no_temporary_file_remains",
    "1b5e0d1 restore checks what it gets": f"{DISK}::test_files_of_another_type_arithmetic_or_model",
    "1b5e0d1 waiters after a timeout": f"{BUS}::test_a_waiter_is_removed_on_timeout_and_on_an_exception",
    "1b5e0d1 double init, client": f"{LESSONS}::test_1b5e0d1_a_second_start_forgets_nothing",
    "1b5e0d1 double init, daemon": f"{REAL}::test_1b5e0d1_a_second_hello_forgets_nothing",
    "1b5e0d1 reservations": f"{CACHED}::test_an_abandoned_request_keeps_its_slot_until_it_has_ended",
    "1b5e0d1 all state is reset": "e2e/test_seed_policy.py::"
    "test_s113_to_s118_a_failed_prefill_costs_all_slots_and_one_request",
    "1b5e0d1 thin snapshot past the end": "protocol/test_chains.py::"
    "test_a_span_of_the_answer_and_of_a_named_request",
    "cbdf9c8 on doubt drop": f"{CACHES}::test_abort_drops_the_victim",
    "cdf4b23 cold start": f"{LESSONS}::test_cdf4b23_a_cold_start_has_a_timeout_of_its_own",
    "a86b1cd prompt file deleted": f"{REAL}::test_a86b1cd_a_prompt_file_may_go_while_its_request_waits",
    "b30fa55 confirm needs evidence": f"{CACHED}::test_without_evidence_there_is_no_entry",
    "f8623a1 slots from occupancy": f"{LIFE}::test_a_free_slot_is_found_by_occupancy_not_by_a_counter",
    "11bac3f metadata": f"{META}::test_a_malformed_file_is_passed_over",
    "8d24fe3 budget": "e2e/test_memory_status.py::test_field_report_65_requested_and_effective_are_both_said",
    "2781459 survives": f"{HISTORIES}::test_p7_p10_p13_any_history_with_faults_and_too_little_memory",
    "f092369 ack required": f"{CACHES}::test_an_entry_needs_the_acknowledgement",
    "5549c79 waiter first": f"{LESSONS}::test_5549c79_a_waiter_is_there_before_its_command_is_written",
    "d11b0aa disconnect": f"{ENDINGS}::test_leaving_the_block_early_cancels_and_waits_for_the_end",
    "2b7b93ac one entry for each slot": f"{CACHES}::test_a_confirmed_slot_has_one_entry",
    "2b7b93ac aborts burn no slots": f"{LIFE}::test_aborts_burn_no_slots",
    "2b7b93ac length is compared": f"{CACHES}::test_confirm_compares_slot_length_epoch_and_process",
    "59dfdad8 salt": f"{CACHES}::test_a_key_says_everything_that_decides",
    "3da5621c nothing new": "unit/daemon/test_scheduler_slots.py::"
    "test_a_restore_with_no_new_tokens_computes_no_prompt",
    "26ca0dcb leaves first": f"{EVICTION}::test_the_oldest_leaf_goes_and_the_shared_head_stays",
    "prefix_cache_state.h pure": f"{LIFE}::test_the_state_machine_does_no_input_or_output",
}

REPORTS = {
    1: "e2e/test_seed_policy.py::test_field_report_1_three_requests_and_the_first_one_fails",
    11: f"{E2E}::test_a_new_daemon_starts_with_empty_caches",
    16: f"{E2E}::test_histories_give_the_answers_of_a_fresh_daemon",
    17: f"{E2E}::test_the_slots_alone_keep_a_conversation_going",
    18: f"{E2E}::test_a_restarted_daemon_goes_on_from_disk",
    19: f"{DISK}::test_an_empty_slot_cannot_be_saved",
    21: f"{DISK}::test_a_snapshot_over_the_budget_is_refused_and_the_slot_keeps_what_it_held",
    25: f"{HISTORIES}::test_p7_p9_p10_p13_a_fault_in_a_request_that_starts_from_a_slot",
    28: f"{DISK}::test_fifty_growing_turns_write_little_more_than_the_last_state",
    29: f"{DISK}::test_a_damaged_file_changes_nothing",
    30: f"{E2E}::test_damaged_files_of_either_side_cost_a_hit_only",
    31: f"{E2E}::test_three_identical_sends",
    32: f"{CACHES}::test_the_faster_of_two_entries_not_the_longer",
    33: f"{REAL}::test_field_report_33_the_flags_of_slots_and_memory_change_what_is_seen",
    34: f"{E2E}::test_three_identical_sends",
    35: f"{E2E}::test_one_request_or_four_at_once_say_what_was_done",
    55: "unit/client/test_tokenizer.py::test_unknown_pre_tokenizer_is_refused_with_the_way_out",
    62: "unit/daemon/test_pool_trim.py::test_seed_runs_out_without_and_passes_with_trim",
    65: "e2e/test_memory_status.py::test_field_report_65_requested_and_effective_are_both_said",
    66: f"{REAL}::test_field_report_66_parked_weights_are_given_back_and_slots_survive",
    67: "e2e/test_memory_status.py::test_field_report_67_restore_into_a_nearly_full_pool_then_prefill",
}

GPU, GPU_MODEL = "gpu/test_daemon.py", "gpu/test_model.py"

SCHEDULED, TIERS = "unit/daemon/test_recurrent_scheduler.py", "unit/daemon/test_recurrent_tiers.py"

STORY = "test_field_reports_18_24_25_34"

#: Those on models with recurrent layers. 55 is above: it is about pre-tokenizers, qwen's among them.
RECURRENT_REPORTS = {
    16: "e2e/test_recurrent_client.py::test_field_report_16_slots_do_not_change_an_answer",
    18: f"{TIERS}::test_field_report_18_a_file_comes_back_after_a_restart",
    24: f"{TIERS}::test_out_and_back_bit_exact",
    25: f"{SCHEDULED}::test_field_report_25_a_shorter_shared_prefix_is_computed_again",
    34: f"{SCHEDULED}::test_field_report_34_three_identical_sends",
}

#: 18, 24, 25 and 34 once more, as a client of the daemon sees them.
RECURRENT_STORY = {
    "on the CPU": f"e2e/test_recurrent_daemon.py::{STORY}",
    "on a GPU": f"gpu/test_qwen_sizes.py::{STORY}",
}

GUESSES, GUESSED, STEPS = (
    "property/test_speculation.py",
    "e2e/test_speculation.py",
    "unit/daemon/test_decoding.py",
)
REQUESTS = f"{GUESSED}::test_field_reports_16_23_40_49_every_request_guesses_and_says_the_same"

#: Those on guessing ahead. 45: there are no constraints, and a request for one is refused.
SPECULATION_REPORTS = {
    "16 cache on and off": REQUESTS,
    "23 acceptance does not stick at 0": REQUESTS,
    "24 states in slots": f"{GUESSES}::test_field_report_24_a_slot_of_a_speculated_answer_holds_its_states",
    "37": f"{GUESSES}::test_p30_field_report_37_tokens_are_drawn_by_the_law_of_the_model",
    "39": f"{GUESSES}::test_field_report_39_the_seed_decides_the_text_whatever_guesses",
    "40 with and without": f"{GUESSES}::test_p17_p18_p29_p30_any_draft_gives_the_plain_text",
    "44": f"{GUESSED}::test_field_report_44_a_stop_text_inside_accepted_tokens",
    "45": f"{GUESSED}::test_field_report_45_constraints_are_refused_not_ignored",
    "47": f"{STEPS}::test_field_report_47_a_draft_of_nonsense_is_plain_decoding",
    "49 the second request": REQUESTS,
    "61": f"{GUESSED}::test_field_reports_61_63_a_draft_that_does_not_fit_is_done_without",
    "63": f"{GUESSED}::test_field_reports_61_63_a_draft_that_does_not_fit_is_done_without",
    "74": f"{GUESSED}::test_field_report_74_the_mode_that_is_used_is_said_and_why_not_more",
}

#: 48: greedy decoding with speculation, and what it rests on: a row of a tree is its path, bit by bit.
CUDA_REPORTS = {
    "3 a fault that sticks": f"{GPU}::test_an_illegal_address_costs_the_request_that_ran",
    "3 without a GPU": "e2e/test_engine_process.py::test_a_lost_device_is_reported_by_its_reason",
    "48": "gpu/test_speculation.py::test_field_report_48_any_guess_gives_the_plain_answers",
    "48 trees": f"{GPU_MODEL}::test_a_row_of_a_tree_is_its_path_alone",
    "48 chains": f"{GPU_MODEL}::test_a_row_of_a_chain_is_its_path_alone",
    "48 what was foreseen": f"{GPU_MODEL}::test_foreseen_steps_are_those_that_were_not",
    "62": f"{GPU}::test_field_report_62_cached_blocks_are_released_in_a_long_prompt",
    "66 by command": f"{GPU}::test_park_gives_the_memory_back",
    "66 when idle": f"{GPU}::test_field_report_66_idle_weights_leave_the_device",
    "66 without a GPU": f"{REAL}::"
    "test_field_report_66_weights_go_when_nothing_runs_and_the_next_request_works",
    "67": f"{GPU}::test_field_report_67_restore_into_a_nearly_full_pool_then_prefill",
}


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(
    "name",
    [
        *RULES.values(),
        *FIXED.values(),
        *REPORTS.values(),
        *RECURRENT_REPORTS.values(),
        *RECURRENT_STORY.values(),
        *CUDA_REPORTS.values(),
        *SPECULATION_REPORTS.values(),
    ],
)
def test_the_test_that_is_named_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert function.startswith("test_")
    assert function in functions_of(file), name
