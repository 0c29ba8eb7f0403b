"""The tiers of tests: `make test` holds what decides whether the product works, `make soak` more of each kind.

`make long` holds the rest of kinds of which `make soak` has some: together they would take longer than CI may.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import pytest

# Patterns of `fnmatch`, in which [[] is a bracket.
LONG = [
    "hpc/checkpoint/test_continue.py::test_deepspeed_on_fewer_ranks_and_on_more[[]3-ranks1]",
    "hpc/checkpoint/test_export.py::test_memory_is_bounded[[][fz]*",
    "hpc/config/test_types.py::test_drawn_types[[]400]",
    "hpc/plan/test_memory.py::test_peak_is_what_torchs_tracker_sees[[]*-32]",
    "hpc/plan/test_memory.py::test_peak_is_what_torchs_tracker_sees[[]gpt-true-*]",
    "hpc/plan/test_memory.py::test_peak_is_what_torchs_tracker_sees[[]resnet-true-*]",
    "hpc/plan/test_plan.py::test_every_shipped_model_with_every_strategy_on_every_cluster_is_answered[[]gpt_1*]",
    "hpc/plan/test_plan.py::test_every_shipped_model_with_every_strategy_on_every_cluster_is_answered[[]gpt_7b]",
    "hpc/plan/test_plan.py::test_every_shipped_model_with_every_strategy_on_every_cluster_is_answered[[]gpt_tiny]",
    "hpc/plan/test_plan.py::test_every_shipped_model_with_every_strategy_on_every_cluster_is_answered[[]resnet18]",
    "hpc/resume/test_resume.py::test_what_has_a_state_keeps_it[[]finetuning, where the optimizer has what is frozen]",
    "hpc/strategies/test_compiled.py::test_a_second_run_compiles_nothing",
    "hpc/strategies/test_compiled.py::test_blocks_are_compiled_under_every_strategy[[]ddp]",
    "hpc/verbs/test_train.py::test_the_text_experiment_learns",
    "test_fork.py::test_the_tests_of_a_fork_pass_and_test_what_was_added*",
    "test_huggingface.py::test_what_is_not_frozen_is_trained_resumes_with_the_same_bits_and_is_exported[[]case[01234]]",
    "test_ports.py::test_callbacks_of_lightning_end_with_the_same_bits_after_a_stop[[]device_stats]",
    "test_ports.py::test_callbacks_of_lightning_end_with_the_same_bits_after_a_stop[[]early_stopping]",
    "test_ports.py::test_callbacks_of_lightning_end_with_the_same_bits_after_a_stop[[]learning_rates]",
    "test_ports.py::test_callbacks_of_lightning_end_with_the_same_bits_after_a_stop[[]rich_progress]",
    "test_ports.py::test_callbacks_of_lightning_end_with_the_same_bits_after_a_stop[[]summary]",
    "test_ports.py::test_callbacks_of_lightning_work_with_sharded_weights_or_are_rejected[[]device_stats]",
    "test_ports.py::test_callbacks_of_lightning_work_with_sharded_weights_or_are_rejected[[]learning_rates]",
    "test_ports.py::test_callbacks_of_lightning_work_with_sharded_weights_or_are_rejected[[]rich_progress]",
    "test_ports.py::test_callbacks_of_lightning_work_with_sharded_weights_or_are_rejected[[]summary]",
    "test_ports.py::test_research_of_others_goes_on_after_it_was_killed_on_slurm[[]gan]",
    "test_ports.py::test_research_of_others_goes_on_after_it_was_killed_on_slurm[[]graphs]",
    "test_ports.py::test_research_of_others_trains_and_ends_with_the_same_bits_after_a_stop[[]contrastive-fsdp on two]",
    "test_ports.py::test_research_of_others_trains_and_ends_with_the_same_bits_after_a_stop[[]gpt2-fsdp on two]",
    "test_ports.py::test_the_step_of_others_is_traced_or_measured_on_real_samples[[]contrastive]",
    "test_ports.py::test_the_step_of_others_is_traced_or_measured_on_real_samples[[]diffusion]",
    "test_ports.py::test_the_step_of_others_is_traced_or_measured_on_real_samples[[]mnist]",
    "test_ports.py::test_the_step_of_others_is_traced_or_measured_on_real_samples[[]unet]",
    "test_slurm_failures.py::test_a_rank_that_is_gone_ends_the_job[[]kill-2]",
    "test_slurm_scripts.py::test_a_script_of_slurm[[]salloc]",
    "test_slurm_strategies.py::test_a_strategy_on_nodes[[]ddp-1-1]",
    "test_slurm_strategies.py::test_a_strategy_on_nodes[[]ddp_4node-2-1]",
    "test_slurm_strategies.py::test_a_strategy_on_nodes[[]deepspeed_4node-2-1]",
    "test_slurm_strategies.py::test_a_strategy_on_nodes[[]fsdp-1-1]",
]


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Move the tests that `LONG` names from `make soak` to `make long`; `make test` keeps what it has."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if item.get_closest_marker("soak") and any(fnmatchcase(name, pattern) for pattern in LONG):
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
