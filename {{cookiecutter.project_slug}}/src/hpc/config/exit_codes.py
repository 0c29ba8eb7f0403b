"""Exit codes of a training process and of its job script."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What an exit code of ours means."""

    DONE = 0
    FAILED = 1
    REJECTED = 2  # the config, or what was typed
    CONTINUE = 85  # saved, and to be continued: where the scheduler has no requeue (PBS)
    ANOTHER_RANK_FAILED = 86  # the watchdog has ended this rank
