"""Steps on several ranks: each sample of a batch counts once, and each rank draws random numbers of its own."""

import os
from contextlib import ExitStack
from typing import Any, TypedDict

from torch import Tensor
from torchmetrics import Metric

from hpc.data.sample_order import SampleOrder, order_of
from hpc.data.without_trace import logged_without_weight, without_trace
from hpc.state import randomness
from hpc.state.batch_effects import OF_ALL, BatchEffects, has_transfer_hooks


class DataRank(TypedDict):
    """A process among those that get different samples. Ranks of a tensor-parallel group are one."""

    rank: int
    num_ranks: int


def data_rank_and_size(strategy: Any) -> DataRank:
    """Return which of them this process is."""
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None)
    return {"rank": kwargs["rank"], "num_ranks": kwargs["num_replicas"]} if kwargs else {"rank": 0, "num_ranks": 1}


def run_seed() -> int:
    """Return the run's seed, which `lightning.seed_everything` has written into the environment."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


class RankSteps:
    """A mixin for strategies, for the steps of a module and the transfer of its batches.

    The mean over ranks counts a rank by its share of the samples: its loss in backward, and what it logs with
    `sync_dist` at a step. A rank without a sample computes along with the share 0.

    Within a step and a transfer, random numbers are a function of seed, place and data-parallel rank. Elsewhere, as in
    a hook that makes weights anew, all ranks draw the same ones. A single process draws as in plain Lightning, except
    in a transfer.

    Attributes:
        batch_effects: names what a transfer changes.
        share: samples of this rank in the present batch of training, relative to the mean of all ranks.
    """

    lightning_module: Any
    batch_effects: BatchEffects | None = None
    share = 1.0
    _is_in_training_step = False
    _has_transfer_hooks = False

    def on_train_start(self) -> None:
        super().on_train_start()  # type: ignore[misc]
        owners = self.lightning_module, getattr(self.lightning_module.trainer, "datamodule", None)
        self._has_transfer_hooks = any(map(has_transfer_hooks, owners))
        self._note_unweighted_samples()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loop = self.lightning_module.trainer.fit_loop.epoch_loop
        self.share, self._is_in_training_step = self._share(loop.batch_idx), True
        try:
            with ExitStack() as stack:
                self._draw_noise(stack, "step", loop.batch_idx)
                if not self.share:  # metrics count no sample; a step that the module counts is one on every rank
                    metrics = (part for part in self.lightning_module.modules() if isinstance(part, Metric))
                    stack.enter_context(without_trace(*metrics))
                    stack.enter_context(logged_without_weight(self.lightning_module))
                return super().training_step(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._is_in_training_step = False

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss = closure_loss if self.share == 1 else closure_loss * self.share
        return super().backward(loss, *args, **kwargs)  # type: ignore[misc]

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = self.lightning_module.trainer
        with ExitStack() as stack:
            if trainer.training and self._has_transfer_hooks:
                self._draw_noise(stack, "transfer", trainer.fit_loop.epoch_loop.batch_idx, also_alone=True)
                if self.batch_effects is not None:
                    stack.enter_context(self.batch_effects.watch(OF_ALL))
            return super().batch_to_device(batch, *args, **kwargs)  # type: ignore[misc]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does, but without truncating the mean of integers, such as counts of samples."""
        if reduce_op in ("mean", "avg") and isinstance(tensor, Tensor):
            tensor = tensor if tensor.is_floating_point() else tensor.double()
            if self._is_in_training_step and self.share != 1:
                tensor = tensor * self.share
        return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]

    def _draw_noise(self, stack: ExitStack, *place: object, also_alone: bool = False) -> None:
        """Let random numbers within the stack be those of this place in the run and of this rank.

        Args:
            also_alone: on a single process, too.
        """
        ranks, trainer = data_rank_and_size(self), self.lightning_module.trainer
        if ranks["num_ranks"] > 1 or also_alone:
            key = run_seed(), trainer.current_epoch, trainer.global_step, ranks["rank"]
            stack.enter_context(randomness.drawn_apart(*place, *key))

    def _share(self, batch_idx: int) -> float:
        samplers = self._training_samplers()
        shares = {sampler.share(batch_idx) if sampler else 1.0 for sampler in samplers}
        return shares.pop() if len(shares) == 1 else 1.0  # several loaders have one loss

    def _training_samplers(self) -> list[SampleOrder | None]:
        """Return of each training loader the sampler that shares its batches out; None for other loaders."""
        loaders = self.lightning_module.trainer.fit_loop._combined_loader.flattened
        return [order_of(loader) for loader in loaders]

    def _note_unweighted_samples(self) -> None:
        """Print where the samples of a last batch may not count alike."""
        trainer, samplers = self.lightning_module.trainer, self._training_samplers()
        uneven = [each for each in samplers if each and each.last_size and len(each) <= trainer.num_training_batches]
        if not uneven or not trainer.is_global_zero:
            return
        how = "self.manual_backward counts each of them once; loss.backward() does not"
        if len(samplers) > 1:
            how = "Their means are averaged as if all ranks had equally many, as several loaders have one loss. "
            how += "Try: drop_last=True"
        elif self.lightning_module.automatic_optimization:
            return
        size, num_ranks = uneven[0].last_size, uneven[0].num_ranks
        rest = f"{size} sample{'s' * (size > 1)} for {num_ranks} ranks"  # type: ignore[operator]
        print(f"train: the last batch of an epoch has {rest}. {how}", flush=True)
