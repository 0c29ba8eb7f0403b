"""Exit codes of a training process and of its job script."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of this project's programs."""

    DONE = 0
    FAILED = 1
    REJECTED = 2  # the config or the command line is wrong
    CONTINUE = 85  # saved, to be continued by another job, where the scheduler has no requeue (PBS)
    ANOTHER_RANK_FAILED = 86  # the watchdog has ended this rank
