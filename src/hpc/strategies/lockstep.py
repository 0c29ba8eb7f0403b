"""What all ranks must do together: they meet before it, or it is said what another rank does in its place."""

import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from hpc.config.errors import ConfigError
from hpc.run import stacks

POLL_SECONDS = 0.05
STORE_SECONDS = 0.5  # between two questions to the store, which all ranks ask
MAX_TURNS = 5  # exchanges, one a second, for which a rank may communicate for another purpose while one waits
QUICK_SECONDS = 1.0  # for which nothing is asked
SPIN_SECONDS = 0.002
MAX_LETTERS = 200


class Absent(Exception):
    """A rank does something else; the message says what."""


class Meeting:
    """The part of one rank. The main thread calls `compare`, the watchdog's thread `exchange`.

    Args:
        store: that all ranks reach.

    Attributes:
        num_steps: that this rank has begun, of training and evaluation.
    """

    def __init__(self, store: Any) -> None:
        self._store = store.clone()  # whoever waits on a connection keeps others waiting
        self.num_steps = self._num_meetings = self._num_turns = 0

    def compare(self, what: str, group: Any, *, is_before_backward: bool = False, is_patient: bool = False) -> None:
        """Wait until all ranks are about to do the same.

        Args:
            what: a verb and its object.
            group: of all ranks, on the host.
            is_before_backward: a rank in the backward of the same step has then gone on; else it may be slow.
            is_patient: a rank has only gone on when it has begun a later step.

        Raises:
            Absent: some of them are about to do another thing.
        """
        self._num_meetings += 1
        checksum = zlib.crc32(f"{self.num_steps} {what}".encode())
        of_ranks = torch.tensor([checksum, -checksum])
        work: Any = dist.all_reduce(of_ranks, dist.ReduceOp.MAX, group=group, async_op=True)
        asked = f"{self.num_steps} {int(is_before_backward)} {int(is_patient)}"
        self._wait_for(work.is_completed, asked)
        work.wait()
        if of_ranks[0] != -of_ranks[1]:
            others: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(others, what, group=group)
            another = next((other for other in others if other != what), "do the same, in another step")
            raise Absent(f"is about to {another[:MAX_LETTERS]}")

    def exchange(self, store: Any) -> None:
        """Answer ranks that wait for this one, if it has gone on without them. Called about once a second."""
        key = f"meeting/{self._num_meetings + 1}"
        if not store.check([f"{key}/asked"]):
            self._num_turns = 0
            return
        their_steps, is_before_backward, is_patient = map(int, store.get(f"{key}/asked").decode().split())
        thread = threading.main_thread().ident or 0
        # A rank that is behind may be slow.
        is_past = is_before_backward and self.num_steps == their_steps and stacks.is_in_backward(thread)
        is_past = is_past or (stacks.is_in_collective(thread) and not is_patient)
        self._num_turns = self._num_turns + 1 if is_past else 0
        if self.num_steps > their_steps or self._num_turns > MAX_TURNS:
            store.set(f"{key}/elsewhere", stacks.describe_main_thread())

    def _wait_for(self, is_over: Callable[[], bool], asked: str) -> None:
        """Wait until a communication is over, which it is in less than a second if all ranks come. Raises `Absent`."""
        begin, key, next_poll = time.monotonic(), f"meeting/{self._num_meetings}", QUICK_SECONDS
        while not is_over():
            waited = time.monotonic() - begin
            time.sleep(0 if waited < SPIN_SECONDS else SPIN_SECONDS if waited < QUICK_SECONDS else POLL_SECONDS)
            if waited < next_poll:
                continue
            if next_poll == QUICK_SECONDS:
                self._store.set(f"{key}/asked", asked)
            if self._store.check([f"{key}/elsewhere"]):
                raise Absent(self._store.get(f"{key}/elsewhere").decode())
            next_poll = waited + STORE_SECONDS


class MeetsOtherRanks:
    """Mixin for a strategy of several ranks, for what only all of them together can do.

    Attributes:
        meeting: of all ranks; None where they have no store.
    """

    lightning_module: Any
    meeting: Meeting | None = None
    _meeting_group: Any = None  # one of its own: what ranks do elsewhere must not be taken for coming here

    def __init__(self, **options: Any) -> None:
        # Lightning read torch's default when it was imported, and would pass on that one.
        super().__init__(**{"timeout": distributed_c10d.default_pg_timeout} | options)

    def process_dataloader(self, dataloader: object) -> object:
        self.meet_after_steps()
        return super().process_dataloader(dataloader)  # type: ignore[misc]

    def on_validation_start(self) -> None:
        self.meet_after_steps()
        super().on_validation_start()  # type: ignore[misc]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        if self.lightning_module.trainer.evaluating and group in (None, dist.group.WORLD):
            self._meet_to_gather()
        return super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]

    def _meet_to_gather(self) -> None:
        """Meet in an evaluation. Raises `ConfigError` if another rank has no batch left: it calls no hook of one."""
        rule = "All ranks must gather together, but hooks of a batch are called on the ranks that have one"
        fix = "self.all_gather in the step itself, or in on_validation_epoch_end"
        self._meet("gather", key="self.all_gather", rule=rule, fix=fix)

    def meet_after_steps(self) -> None:
        """Meet before an evaluation and at the end of an epoch. Raises `ConfigError` if another rank goes on."""
        trainer = self.lightning_module.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        if self.meeting and trainer.training:  # a batch that on_train_batch_start left out is not begun
            self.meeting.num_steps -= progress.ready - progress.started
        rule = "All ranks must end training, or an epoch, after the same step"
        fix = "trainer.should_stop = trainer.strategy.reduce_boolean_decision(...) on all ranks, and -1 from "
        fix += "on_train_batch_start by what all ranks know"
        where = f"end or evaluate after step {trainer.global_step}, in {trainer.state.stage}"
        self._meet(where, key="trainer.should_stop", value=trainer.should_stop, rule=rule, fix=fix, is_patient=True)

    def meet_to_wrap(self) -> None:
        """Meet before DDP is made anew. Raises `ConfigError` if some rank goes on, or has frozen other parameters."""
        frozen = [name for name, parameter in self.lightning_module.named_parameters() if not parameter.requires_grad]
        rule = "With strategy=ddp all ranks must freeze and release the same parameters before the same step"
        fix = "requires_grad_ by what all ranks know, such as self.trainer.global_step"
        self._meet(
            f"freeze {len(frozen)} parameters {', '.join(frozen)}",
            key="model",
            rule=rule,
            fix=fix,
            is_before_backward=True,
        )

    def meet_to_read(self) -> None:
        """Meet before a number of a sharded tensor is read. Raises `ConfigError` if another rank reads none."""
        rule = (
            "With strategy=fsdp each rank holds a shard of a parameter and of its gradient, so all ranks must read a "
        )
        rule += "number of it together"
        fix = "item(), float(...) or a comparison on all ranks, with the result used where self.trainer.is_global_zero"
        self._meet("read a number of a sharded tensor", key="model", rule=rule, fix=fix)

    def meet_to_run(self) -> None:
        """Meet before a sharded network is run outside of a step. Raises `ConfigError` if another rank does not.

        If only some ranks ran one, as for a picture on rank 0, they would wait for ever, or their gathering would meet
        that of another rank's next step.
        """
        rule = "With strategy=fsdp all ranks must run the network together; only some do here"
        fix = "the same call on all ranks, with its result used where self.trainer.is_global_zero"
        self._meet("run the network", key="model", rule=rule, fix=fix)

    def meet_to_log(self, name: str, hook: str) -> None:
        """Meet before a value is reduced as it is logged. Raises `ConfigError` if another rank logs something else.

        A reduction of different values would mix them, or meet the reduction of gradients.
        """
        rule = "With sync_dist=True and on_step=True, which is the default in training_step, all ranks must log a name "
        rule += "in the same step"
        fix = "on_step=False, on_epoch=True, for which ranks without the name count nothing, or sync_dist=False"
        # A module that optimizes by itself may log after its backward, in which another rank is still.
        is_before_backward = hook == "training_step" and self.lightning_module.automatic_optimization
        key = f"self.log({name!r})"
        self._meet(f"log {name!r} in {hook}", key=key, rule=rule, fix=fix, is_before_backward=is_before_backward)

    def _meet(self, what: str, *, key: str, rule: str, fix: str, value: Any = None, **options: bool) -> None:
        if not self.meeting:
            return
        self._meeting_group = self._meeting_group or dist.new_group(backend="gloo")
        try:
            self.meeting.compare(what, self._meeting_group, **options)
        except Absent as absent:
            raise ConfigError(key, value, f"{rule} (another rank: {absent})", fix, only_this_rank=True) from None
