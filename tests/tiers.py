"""The tiers of tests: `make test` holds what decides whether the product works, `make soak` more of each kind.

`make long` holds the rest of kinds of which these two have some: together they would take longer than CI may.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import pytest

# Of each test the names of cases, as patterns of `fnmatch`; [] is a test without cases.
LONG = {
    "hpc/checkpoint/test_continue.py::test_deepspeed_moves_no_other_states_than_adams": [],
    "hpc/checkpoint/test_continue.py::test_deepspeed_on_fewer_ranks_and_on_more": ["2-ranks0", "3-ranks1"],
    "hpc/checkpoint/test_continue.py::test_the_optimizers_state_would_be_missed": ["deepspeed*"],
    "hpc/checkpoint/test_export.py::test_memory_is_bounded": ["[fz]*"],
    "hpc/checkpoint/test_weights.py::test_deepspeed_gives_fp32_masters": ["2-*"],
    "hpc/checkpoint/test_weights.py::test_every_folder_loads_into_a_module": ["zero[12]*"],
    "hpc/config/test_config.py::test_strategy_nodes_and_precision_go_on_top_of_any_trainer": [
        "deepspeed_zero1-*",
        "zero3_offload-*",
    ],
    "hpc/config/test_types.py::test_drawn_types": ["400"],
    "hpc/data/test_data_changed.py::test_a_changed_learning_rate_takes_effect": ["deepspeed_zero2-2"],
    "hpc/data/test_last_batch.py::test_steps_weights_and_means_are_those_of_one_process": ["layout3"],
    "hpc/jobs/test_pbs.py::test_bash_and_shellcheck_find_nothing": ["array", "staged", "supek"],
    "hpc/logging/test_logged_names.py::test_what_is_reduced_at_once_is_logged_by_all_ranks_or_told": [
        "*-all",
        "*-the last step",
        "*-validation",
        "fsdp-others",
    ],
    "hpc/logging/test_loggers_offline.py::test_every_row_is_logged_in_one_run": ["terminated"],
    "hpc/monitor/test_throughput.py::test_the_slowest_rank_is_found": ["ddp", "healthy"],
    "hpc/packed/test_pack.py::test_a_folder_whose_name_is_not_utf_8_is_packed_and_trained_on": [],
    "hpc/plan/test_memory.py::test_peak_is_what_torchs_tracker_sees": [
        "*-32",
        "gpt-false-32-true-1",
        "gpt-true-*",
        "resnet-false-bf16-mixed-1",
        "resnet-true-*",
    ],
    "hpc/plan/test_memory.py::test_states_are_what_ranks_hold": ["ddp", "deepspeed_zero[12]"],
    "hpc/plan/test_plan.py::test_every_shipped_model_with_every_strategy_on_every_cluster_is_answered": [
        "gpt_1*",
        "gpt_7b",
        "gpt_tiny",
        "resnet18",
        "resnet50",
    ],
    "hpc/plan/test_plan.py::test_more_nodes_or_memory_never_make_it_too_big": ["bf16-*"],
    "hpc/plan/test_plan.py::test_tensor_parallel_ranks_count_what_they_all_keep_once": [],
    "hpc/plan/test_plan.py::test_the_model_alone_is_enough": [],
    "hpc/plan/test_plan.py::test_without_facts_of_the_network_one_node_is_planned": [],
    "hpc/report/test_board.py::test_hyperparameters_and_results_of_a_sweep": [],
    "hpc/report/test_board.py::test_the_curve_of_a_run_that_was_killed_is_one_curve": [],
    "hpc/resume/test_evaluation_stop.py::test_a_stop_is_obeyed_at_the_next_batch_and_the_whole_is_done_again": [
        "a validation between two ranks",
    ],
    "hpc/resume/test_nonfinite.py::test_the_run_does_not_go_back_where_nothing_was_saved": [],
    "hpc/resume/test_nonfinite.py::test_the_update_is_left_out_on_all_ranks": ["ddp"],
    "hpc/resume/test_resume.py::test_a_run_that_is_stopped_ends_as_one_that_is_not": ["deepspeed"],
    "hpc/resume/test_resume.py::test_what_has_a_state_keeps_it": [
        "finetuning, where the optimizer has what is frozen",
        "finetuning",
        "plateau",
    ],
    "hpc/resume/test_resume_exact.py::test_a_run_that_is_stopped_ends_as_one_that_is_not": [
        "a file for each epoch, which a hook counts",
        "a sampler that draws all the time",
        "a loader that iterates in its own way",
        "a part of the data that is drawn as loaders are made",
        "a part of what could be validated",
        "a plateau of an earlier validation",
        "a sampler that counts and draws by itself",
        "a sampler that the module writes into",
        "a value of the Trainer that a hook sets",
        "an optimizer that does more than its learning rate says",
        "another part in each epoch",
        "data of a stage that goes on within the epoch",
        "files that iterators give",
        "loaders of each epoch",
        "more data in each epoch",
        "other micro-batches in each epoch",
        "the same batches in every epoch",
        "two loaders, one of which ends early",
        "two schedules of one optimizer",
        "values that the Trainer shows",
        "what a hook of the data draws as it transfers a batch",
        "what a hook of the module draws as it transfers a batch",
    ],
    "hpc/resume/test_resume_exact.py::test_an_end_that_lies_behind_is_rejected": ["trainer.max_epochs=1-epoch 2"],
    "hpc/resume/test_resume_exact.py::test_what_could_not_go_on_is_rejected_before_the_first_step": [
        "a load_state_dict*",
        "an optimizer around*",
        "parameters that are none*",
        "weights that a hook*",
    ],
    "hpc/resume/test_resume_exact.py::test_what_an_epoch_sums_up_does_not_depend_on_how_many_ranks_do": ["1-2"],
    "hpc/state/test_attributes.py::test_a_run_that_goes_on_has_what_was_kept": [
        "gathers-10",
        "gathers-7",
        "keeps-10",
        "keeps-3",
    ],
    "hpc/submit/test_rejected.py::test_a_rejection_changes_nothing": ["pbs"],
    "hpc/system/test_home.py::test_every_verb_works_for_such_an_account": ["plan.py*", "train.py run_dir=RUN-0"],
    "hpc/system/test_other_systems.py::test_a_run_trains_and_resumes_without_linux": [],
    "hpc/training/test_averaging.py::test_a_run_that_is_stopped_ends_as_one_that_is_not": [
        "moving, at the end of an epoch",
        "stochastic",
        "stochastic, linear",
    ],
    "hpc/training/test_averaging.py::test_one_that_died_after_its_last_step_tests_the_average": ["stochastic*"],
    "hpc/training/test_averaging.py::test_the_average_is_exported_and_tested": ["moving"],
    "hpc/training/test_averaging.py::test_what_was_tested_is_saved": ["stochastic*"],
    "hpc/strategies/test_compiled.py::test_a_second_run_compiles_nothing": [],
    "hpc/strategies/test_compiled.py::test_blocks_are_compiled_under_every_strategy": ["ddp"],
    "hpc/strategies/test_compiled.py::test_one_compilation_serves_all_equal_blocks": ["True"],
    "hpc/training/test_ranks_differ.py::test_a_rank_that_does_something_alone_is_told": ["freezes", "leaves"],
    "hpc/training/test_ranks_differ.py::test_ranks_that_would_train_apart_are_told": [
        "a codebook",
        "a codebook, later",
        "other heads, fsdp",
    ],
    "hpc/strategies/test_released.py::test_ranks_train_together_what_is_released": ["ddp"],
    "hpc/strategies/test_released.py::test_what_any_hook_freezes_and_frees_is_trained_alike": ["", "accumulated"],
    "hpc/strategies/test_strategies.py::test_a_checkpoint_of_any_strategy_is_evaluated_from_one_process": [
        "digits-deepspeed_zero[12]",
        "text-ddp",
        "text-deepspeed_zero3",
        "text-deepspeed_zero[12]",
    ],
    "hpc/strategies/test_strategies.py::test_no_group_gives_up_before_the_watch_does": [
        "deepspeed_zero2",
        "tensor_parallel",
    ],
    "hpc/strategies/test_strategies.py::test_sharded_strategies_really_shard": [
        "digits-deepspeed_zero2",
        "text-deepspeed_zero[23]",
    ],
    "hpc/strategies/test_strategies.py::test_the_gradient_norm_is_that_of_the_whole_network": [
        "digits-deepspeed_zero[12]",
        "text-ddp",
        "text-deepspeed_zero3",
        "text-deepspeed_zero[12]",
    ],
    "hpc/strategies/test_strategies.py::test_two_processes_follow_the_single_one": [
        "digits-deepspeed_zero[12]",
        "text-ddp",
        "text-deepspeed_zero3",
        "text-deepspeed_zero[12]",
    ],
    "hpc/strategies/test_strategies.py::test_weights_move_from_one_strategy_to_another": ["*deepspeed_zero3*"],
    "hpc/verbs/test_train.py::test_fine_tuning_freezes_the_backbone_then_releases_it": [],
    "hpc/verbs/test_train.py::test_runs_repeat_themselves_and_seeds_differ": [],
    "hpc/verbs/test_train.py::test_the_text_experiment_learns": [],
    "ports/test_plain.py::test_port_trains": ["[cdsu]*", "gra*"],
    "test_chaos.py::test_no_run_is_lost_or_other_than_one_that_nothing_happened_to": ["2"],
    "test_drawn_runs.py::test_what_was_found_stays_cured": [
        "a schedule of accumulation, stopped early at an epoch's end",
        "a test after a schedule of accumulation",
        "a test of a run that ended within an epoch",
        "an epoch that `max_steps` cuts, struck as it ends",
        "an extension of what was stopped early within an epoch",
        "an extension, from an epoch's end",
        "datasets that are made anew in each epoch",
        "double precision",
        "gradients that are clipped by value",
        "loaders for two epochs, stopped in the second",
        "points of two optimizers",
        "several validation loaders, and a monitor",
        "stock data whose validation begins later",
    ],
    "test_fork.py::test_the_tests_of_a_fork_pass_and_test_what_was_added": ["all"],
    "test_generated.py::test_its_own_quick_tests_pass": [],
    "test_huggingface.py::test_any_module_and_averaged_weights_are_exported": ["gpt2*"],
    "test_huggingface.py::test_what_is_not_frozen_is_trained_resumes_with_the_same_bits_and_is_exported": [
        "case[01234]"
    ],
    "test_ports.py::test_callbacks_of_lightning_end_with_the_same_bits_after_a_stop": [
        "accumulation",
        "device_stats",
        "early_stopping",
        "ema",
        "learning_rates",
        "rich_progress",
        "summary",
        "unfreezing",
    ],
    "test_ports.py::test_callbacks_of_lightning_work_with_sharded_weights_or_are_rejected": [
        "accumulation",
        "device_stats",
        "ema",
        "learning_rates",
        "rich_progress",
        "summary",
        "unfreezing",
    ],
    "test_ports.py::test_research_of_others_goes_on_after_it_was_killed_on_slurm": ["gan", "graphs"],
    "test_ports.py::test_research_of_others_trains_and_ends_with_the_same_bits_after_a_stop": [
        "contrastive-fsdp on two",
        "diffusion-fsdp on two",
        "gan-fsdp on two",
        "gpt2-fsdp on two",
    ],
    "test_ports.py::test_the_step_of_others_is_traced_or_measured_on_real_samples": [
        "contrastive",
        "diffusion",
        "gpt2",
        "mnist",
        "segmentation",
        "unet",
    ],
    "test_slurm_comm.py::test_a_slow_node_is_named": [],
    "test_slurm_failures.py::test_a_mistake_ends_with_one_message": [
        "F10*",
        "F11d*",
        "F13*",
        "F35*",
        "F37*",
        "F38*",
        "data of one node",
    ],
    "test_slurm_failures.py::test_a_rank_that_is_gone_ends_the_job": ["kill-2"],
    "test_slurm_failures.py::test_debian_names_every_host_loopback": [],
    "test_slurm_failures.py::test_what_trains": ["F15*", "F17*"],
    "test_slurm_scripts.py::test_a_script_of_slurm": ["salloc"],
    "test_slurm_strategies.py::test_a_strategy_on_nodes": [
        "ddp-1-1",
        "ddp_4node-2-1",
        "deepspeed_4node-2-1",
        "fsdp-1-1",
        "fsdp_4node-2-1",
    ],
}


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Move the tests that `LONG` names to `make long`."""
    for item in items:
        test, _, case = item.nodeid.removeprefix("tests/").removesuffix("]").partition("[")
        is_long = test in LONG and (not LONG[test] or any(fnmatchcase(case, pattern) for pattern in LONG[test]))
        if is_long:
            item.add_marker(pytest.mark.soak)
            item.add_marker(pytest.mark.long)


def soak_all_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return parameters of which `make test` takes only those kept, and `make soak` the others.

    Raises:
        ValueError: a case to keep is none of the cases.
    """
    cases = list(cases)
    if missing := [case for case in kept if case not in cases]:
        raise ValueError(f"no such cases: {missing}")
    return [pytest.param(case, marks=() if case in kept else pytest.mark.soak) for case in cases]
