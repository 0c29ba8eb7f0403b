"""Let all ranks run a sharded network together outside of steps, or say that one of them does not."""

import threading
import time
from typing import Any

from hpc.config.errors import ConfigError
from hpc.run import stacks

POLL_SECONDS = 0.05
MAX_TURNS = 5  # exchanges, one a second, for which a rank may communicate for another purpose while one waits


class CommonForward:
    """The part of one rank. The main thread calls `enter`, the watchdog's thread `exchange`.

    FSDP gathers parameters for a forward. If only some ranks ran one, as for a picture on rank 0, they would wait for
    ever, or their gathering would meet that of another rank's next step.

    Args:
        store: that all ranks reach.

    Attributes:
        num_steps: that this rank has begun, of training and evaluation.
    """

    def __init__(self, store: Any, num_ranks: int) -> None:
        self._store, self._num_ranks = store.clone(), num_ranks  # whoever waits on a connection keeps others waiting
        self.num_steps = self._num_forwards = self._num_turns = 0

    def enter(self) -> None:
        """Wait until all ranks are about to run the network.

        Raises:
            ConfigError: one of them does something else.
        """
        self._num_forwards += 1
        key = f"forward/{self._num_forwards}"
        self._store.set(f"{key}/steps", str(self.num_steps))
        self._store.add(f"{key}/ranks", 1)
        while self._store.add(f"{key}/ranks", 0) < self._num_ranks:
            if self._store.check([f"{key}/elsewhere"]):
                where = self._store.get(f"{key}/elsewhere").decode()
                rule = f"With strategy=fsdp all ranks must run the network together; only some do here, another {where}"
                fix = "the same call on all ranks, with its result used where self.trainer.is_global_zero"
                raise ConfigError("model", None, rule, fix, only_this_rank=True)
            time.sleep(POLL_SECONDS)

    def exchange(self, store: Any) -> None:
        """Answer ranks that wait for this one, if it has gone on without them. Called about once a second."""
        key = f"forward/{self._num_forwards + 1}"
        if not store.check([f"{key}/steps"]):
            self._num_turns = 0
            return
        is_communicating = stacks.is_in_collective(threading.main_thread().ident or 0)
        self._num_turns = self._num_turns + 1 if is_communicating else 0
        if self.num_steps > int(store.get(f"{key}/steps")) or self._num_turns > MAX_TURNS:
            store.set(f"{key}/elsewhere", stacks.describe_main_thread())
