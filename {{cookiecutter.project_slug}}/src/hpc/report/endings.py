"""How each attempt at a run ended and why, and what to do about an end that nobody wanted."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from hpc.jobs import job_states
from hpc.monitor.node_usage import Phase
from hpc.report.numbers import value
from hpc.report.run_table import ACTIVE, Row
from hpc.run import history
from hpc.run.history import RunRecord

BY_SCHEDULER = {word.lower().replace("_", " ") for word in job_states.ENDED}
WELL = {"finished", "continue"} | ACTIVE
BACK = "`faults.nonfinite=rollback`: back to the last checkpoint, past these samples."
SILENT = "it left no word, as after SIGKILL or when its node is gone"


@dataclass(frozen=True)
class Ending:
    """Of an attempt; `step`: the last that is known of it."""

    attempt: int
    outcome: str  # finished, continue, failed, killed, or a scheduler's word
    why: str
    step: int | None

    @property
    def well(self) -> bool:
        return self.outcome in WELL


def endings(run: RunRecord, row: Row, phases: list[Phase]) -> list[Ending]:
    """One for each attempt. What a rank has raised says more than the scheduler, and that more than nothing."""
    found = []
    for attempt, following in zip_longest(run.attempts, run.attempts[1:]):
        end = attempt.end or {}
        reached = max((phase.step for phase in phases if phase.attempt == attempt.number), default=None)
        step = end["step"] if isinstance(end.get("step"), int) else row.step if following is None else reached
        outcome, why = str(end.get("outcome") or ""), str(end.get("why") or "")
        if outcome not in WELL and (raised := history.first_cause_of_attempt(run, attempt.number)):
            outcome, why = "failed", raised
        elif not end:
            newest = following is None and row.job == (attempt.job or "-")  # else a job is meant that begins the next
            outcome, why = _without_a_word(row) if newest else ("killed", SILENT)
        found.append(Ending(attempt.number, outcome, why, step))
    return found


def advice(ended: Ending, config: Mapping[str, Any], again: str) -> str:
    """What ended the run, and what to try. Pure.

    Args:
        again: what is typed to go on.
    """
    step = "" if ended.step is None else f" at step {ended.step}"
    why = f": {ended.why.rstrip('.')}" if ended.why else ""
    return f"Attempt {ended.attempt} ended{step} ({ended.outcome}){why}. {next(_ways(ended, config, again))}"


def _without_a_word(row: Row) -> tuple[str, str]:
    if row.state in ACTIVE:
        return row.state, "it has left no end yet"
    if not over(row):  # what its state tells is of the next start
        return "killed", SILENT
    word, _, why = row.state.partition(" (")
    return word if word in BY_SCHEDULER - {"failed", "completed"} else "killed", row.note or why.rstrip(")") or SILENT


def over(row: Row) -> bool:
    """Did the run come to an end that nobody wanted, and nothing starts it again?"""
    return row.state.partition(" (")[0] in BY_SCHEDULER | {"failed", "died", "given up", "ended"}


def _ways(ended: Ending, config: Mapping[str, Any], again: str) -> Iterator[str]:
    """The first one is meant."""
    said, goes_on = f"{ended.outcome} {ended.why}", f"`{again}`: it goes on from the last checkpoint."
    lr, workers = value(config, "model.optimizer.lr"), value(config, "data.num_workers")
    accumulate, minutes = value(config, "trainer.accumulate_grad_batches"), value(config, "faults.hang_minutes")
    if re.search("not finite|FloatingPointError", said):
        if isinstance(lr, int | float):
            yield f"Try `model.optimizer.lr={lr / 10:g}`: smaller steps. Or {BACK}"
        yield f"Try {BACK}"
    if re.search("OutOfMemoryError|CUDA out of memory", said) and isinstance(accumulate, int):
        then = "the same batch in half as large pieces. `python plan.py` with the words of this run names more ways."
        yield f"Try `trainer.accumulate_grad_batches={2 * accumulate}`: {then}"
    if re.search(r"(?i)out.of.memory|oom|MemoryError|DataLoader worker.*killed", said):
        if isinstance(workers, int) and workers > 1:
            yield f"Try `data.num_workers={workers // 2}`: fewer processes hold data in the node's memory."
        yield "A node has too little memory for it: more of cluster.memory_gb, or fewer ranks on a node."
    if "Hang" in said and isinstance(minutes, int | float):
        yield f"errors/{ended.attempt}/ tells where each rank was. If a step may take so long, {_longer(minutes)}"
    if "ConfigError" in said:
        yield "Change what its rule names, and start again."
    if ended.outcome == "failed":
        yield f"errors/{ended.attempt}/ and the log tell where. Once that is mended, {goes_on}"
    yield f"Try {goes_on}"


def _longer(minutes: float) -> str:
    return f"try `faults.hang_minutes={2 * minutes:g}`."
