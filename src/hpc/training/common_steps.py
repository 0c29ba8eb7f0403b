"""What all ranks must do in the same step, or it is said that one of them does something else."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from hpc.config.errors import ConfigError
from hpc.training.meeting import Absent, Meeting


class MeetsOtherRanks:
    """Mixin for a strategy of several ranks, for what only all of them together can do.

    Attributes:
        meeting: of all ranks; None where they have no store.
    """

    lightning_module: Any
    meeting: Meeting | None = None
    _meeting_group: Any = None  # one of its own: what ranks do elsewhere must not be taken for coming here

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
