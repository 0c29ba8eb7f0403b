"""The end of each attempt at a run, and advice on an end that nobody wanted."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from hpc.jobs import job_states
from hpc.monitor.node_usage import Phase
from hpc.report.batch_advice import smaller_micro_batch
from hpc.report.run_statistics import config_value
from hpc.report.run_table import ACTIVE, RunRow
from hpc.run import history
from hpc.run.history import RunRecord

SCHEDULER_OUTCOMES = {word.lower().replace("_", " ") for word in job_states.SLURM_END_STATES}
EXPECTED_OUTCOMES = {"finished", "continue"} | ACTIVE
ROLLBACK = "`faults.nonfinite=rollback`: the run returns to the last checkpoint and skips these samples."
MAX_REASON_LENGTH = 200  # characters in a sentence; the whole text is in errors/ and in the log
GPU_MEMORY = r"OutOfMemoryError|\b(CUDA|HIP)\b.{0,20}out of memory"
NODE_MEMORY = (
    r"(?i)\bout.of.memory\b|\boom(\b|[-_ ]?kill)|\b(_Array)?MemoryError|DefaultCPUAllocator|DataLoader worker.*killed"
)
NO_END_RECORDED = "it recorded no end, as after SIGKILL or when its node is lost"


@dataclass(frozen=True)
class Ending:
    """The end of an attempt. `step` is the last one that is known."""

    attempt: int
    outcome: str  # finished, continue, failed, killed, or a scheduler's word
    reason: str
    step: int | None

    @property
    def is_expected(self) -> bool:
        return self.outcome in EXPECTED_OUTCOMES


def attempt_endings(run: RunRecord, row: RunRow, phases: list[Phase]) -> list[Ending]:
    """Return the ending of each attempt.

    The error that a rank raised counts more than what the scheduler says, and that counts more than nothing.
    """
    endings = []
    for attempt, following in zip_longest(run.attempts, run.attempts[1:]):
        end = attempt.end or {}
        phase_step = max((phase.step for phase in phases if phase.attempt == attempt.number), default=None)
        step = end["step"] if isinstance(end.get("step"), int) else row.step if following is None else phase_step
        outcome, reason = str(end.get("outcome") or ""), str(end.get("why") or "")
        if outcome not in EXPECTED_OUTCOMES and (raised := history.first_cause_of_attempt(run, attempt.number)):
            outcome, reason = "failed", raised
        elif not end:
            # Otherwise the row is about a job that will start the next attempt.
            is_row_of_attempt = following is None and row.job == (attempt.job or "-")
            outcome, reason = _ending_from_state(row) if is_row_of_attempt else ("killed", NO_END_RECORDED)
        endings.append(Ending(attempt.number, outcome, reason, step))
    return endings


def explain_ending(ending: Ending, config: Mapping[str, Any], resume_command: str) -> str:
    """Return how the run ended and what to try, in sentences. Pure.

    Args:
        resume_command: what to type to resume the run.
    """
    step = "" if ending.step is None else f" at step {ending.step}"
    words = ending.reason.rstrip(".")
    if len(words) > MAX_REASON_LENGTH:  # so that the advice after it is seen
        words = f"{words[:MAX_REASON_LENGTH]} [...]"
    reason = f": {words}" if words else ""
    advice = next(_advice(ending, config, resume_command))
    return f"Attempt {ending.attempt} ended{step} ({ending.outcome}){reason}. {advice}"


def has_stopped_unfinished(row: RunRow) -> bool:
    """Return whether the run came to an end that nobody wanted, and nothing will start it again."""
    return row.state.partition(" (")[0] in SCHEDULER_OUTCOMES | {"failed", "died", "given up", "ended"}


def _ending_from_state(row: RunRow) -> tuple[str, str]:
    """Return outcome and reason of the newest attempt, which recorded no end, from the state of the run."""
    if row.state in ACTIVE:
        return row.state, "it has not recorded an end yet"
    if not has_stopped_unfinished(row):  # the state is that of the next start
        return "killed", NO_END_RECORDED
    word, _, reason = row.state.partition(" (")
    outcome = word if word in SCHEDULER_OUTCOMES - {"failed", "completed"} else "killed"
    return outcome, row.note or reason.rstrip(")") or NO_END_RECORDED


def _advice(ending: Ending, config: Mapping[str, Any], resume_command: str) -> Iterator[str]:
    """Yield advice, of which the first one fits best."""
    text, resume = f"{ending.outcome} {ending.reason}", f"`{resume_command}`: the run resumes from the last checkpoint."
    hang_minutes = config_value(config, "faults.hang_minutes")
    if re.search("not finite|NaN or infinite|FloatingPointError", text):
        lr = config_value(config, "model.optimizer.lr")
        if isinstance(lr, int | float):
            yield f"Try `model.optimizer.lr={lr / 10:g}`: it makes smaller steps. Or try {ROLLBACK}"
        yield f"Try {ROLLBACK}"
    yield from _memory_advice(text, config)
    if "Hang" in text and isinstance(hang_minutes, int | float):
        longer = f"If a step may take this long, try `faults.hang_minutes={2 * hang_minutes:g}`."
        yield f"errors/{ending.attempt}/ shows where each rank was. {longer}"
    if "ConfigError" in text:
        yield "Change what this message names, and start the run again."
    if ending.outcome == "failed":
        yield f"errors/{ending.attempt}/ and the log show where. When the cause is fixed, type {resume}"
    yield f"Try {resume}"


def _memory_advice(text: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield advice if the memory of a GPU or of a node was exhausted."""
    if re.search(GPU_MEMORY, text):
        override, effect = smaller_micro_batch(config)
        more = "`python plan.py` with the overrides of this run lists more changes."
        yield f"Try `{override}`: {effect} {more}" if override else f"{effect} {more}".lstrip()
    if re.search(NODE_MEMORY, text):
        num_workers = config_value(config, "data.num_workers")
        if isinstance(num_workers, int) and num_workers > 1:
            yield f"Try `data.num_workers={num_workers // 2}`: fewer processes hold data in the node's memory."
        yield "The run needs more memory on a node: increase cluster.memory_gb."
