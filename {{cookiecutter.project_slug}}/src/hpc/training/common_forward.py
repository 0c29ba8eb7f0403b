"""Let all ranks run a sharded network together outside of steps, or say that one of them does not."""

from typing import Any

from hpc.config.errors import ConfigError
from hpc.training.meeting import Absent, Meeting


class CommonForward(Meeting):
    """The part of one rank.

    FSDP gathers parameters for a forward. If only some ranks ran one, as for a picture on rank 0, they would wait for
    ever, or their gathering would meet that of another rank's next step.
    """

    def __init__(self, store: Any, num_ranks: int) -> None:
        super().__init__("forward", store)
        self._num_ranks = num_ranks

    def enter(self) -> None:
        """Wait until all ranks are about to run the network.

        Raises:
            ConfigError: one of them does something else.
        """
        try:
            self.wait_for_counted(self._num_ranks)
        except Absent as absent:
            rule = f"With strategy=fsdp all ranks must run the network together; only some do here (another: {absent})"
            fix = "the same call on all ranks, with its result used where self.trainer.is_global_zero"
            raise ConfigError("model", None, rule, fix, only_this_rank=True) from None
