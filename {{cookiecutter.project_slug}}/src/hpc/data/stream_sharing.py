"""A rank's and a worker's part of a stream, in one order that follows from (seed, epoch), with a state to resume from.

A stream that splits itself among workers (`get_worker_info`) is told that the workers of all ranks are workers of one
loader. One that splits itself among ranks is left to do so. Of any other stream each part takes its turn of samples.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hpc.data.sampler import epoch_key
from hpc.state import checksums, randomness

# Names in the code of a class that splits its samples by rank.
RANK_NAMES = {"get_rank", "get_world_size", "global_rank", "world_size", "split_by_node", "RANK", "WORLD_SIZE"}
RANK_NAMES |= {"SLURM_PROCID", "SLURM_NTASKS", "num_replicas"}
END = object()
ITEMS_BEFORE_SEEDS_DIFFER = 1  # after it a stream has chosen its part: then parts need random numbers of their own


class SharedStream(IterableDataset):
    """A stream of which each rank and worker has a part.

    Args:
        stream: an iterable of samples, or of batches.
        splits_ranks: the stream itself gives each rank its own samples.
    """

    def __init__(self, stream: Any, *, rank: int, num_ranks: int, splits_ranks: bool, seed: int) -> None:
        self.stream, self.seed, self.epoch = stream, seed, 0
        self.rank, self.num_ranks = (0, 1) if splits_ranks else (rank, num_ranks)

    def __iter__(self) -> "SharedIterator":
        return SharedIterator(self)

    def part(self) -> tuple[int, int]:
        """Return the number of this process's part, and how many parts there are."""
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        return self.rank * num_workers + worker, self.num_ranks * num_workers


class SharedIterator(Iterator[Any]):
    """The samples of one part. Its state is that of the stream or, if that has none, how far to read it again."""

    def __init__(self, shared: SharedStream) -> None:
        self.shared, self.stream = shared, shared.stream
        self.part, self.num_parts = shared.part()
        self.key = epoch_key(shared.seed, shared.epoch) % (1 << 32)
        self.num_read = 0  # samples of the stream, of all parts if it does not split itself
        self.splits_itself = False
        self.last: Any = None
        self._samples: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._samples is None:
            self._begin()
        if self.num_parts > 1 and self.num_read == 0:
            sample = self._read()  # only now it is known whether the stream splits itself
            if self.splits_itself or self.part == 0:
                return self._keep(sample)
        skipped = 0
        if self.num_parts > 1 and not self.splits_itself:
            skipped = (self.part - self.num_read) % self.num_parts
        for _ in range(skipped):
            self._read()
        return self._keep(self._read())

    def state_dict(self) -> dict[str, Any]:
        return {
            "read": self.num_read,
            "splits": self.splits_itself,
            "own": self.stream.state_dict() if has_state(self.stream) else None,
            "last": None if has_state(self.stream) else self._checksum_of_last(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["own"] is not None:
            self.stream.load_state_dict(state["own"])
            self._begin()
            self.num_read, self.splits_itself = state["read"], state["splits"]
            return
        for _ in range(state["read"]):
            self.last = self._read()
        if state["read"] and state["last"] != self._checksum_of_last():
            print(f"warning: {type(self.stream).__name__} gives other samples when it is read again, so some may come "
                  "twice in this epoch; a seed of its own or state_dict() and load_state_dict() would prevent it",
                  flush=True)  # fmt: skip

    def _checksum_of_last(self) -> list[int] | None:
        """Return a checksum of the last sample, as plain data; None if it cannot be compared."""
        checksum = checksums.fingerprint(_content(self.last))
        return None if checksum == checksums.UNREADABLE else list(checksum)

    def _begin(self) -> None:
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(self.shared.epoch)
        with self._random_numbers(), self._as_worker():
            self._samples = iter(self.stream)

    def _read(self) -> Any:
        if self._samples is None:
            self._begin()
        with self._random_numbers(), self._as_worker():
            sample = next(self._samples, END)  # type: ignore[arg-type]  # no error: `isolate_rng` would restore nothing
        if sample is END:
            raise StopIteration
        self.num_read += 1
        return sample

    def _keep(self, sample: Any) -> Any:
        self.last = sample
        return sample

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Seed by the number of the sample, so that no state of random numbers must be kept."""
        with nullcontext() if get_worker_info() else isolate_rng(include_cuda=False):
            own_part = self.part if self.splits_itself and self.num_read >= ITEMS_BEFORE_SEEDS_DIFFER else 0
            randomness.seed_host(epoch_key(self.key, self.num_read * self.num_parts + own_part) % (1 << 32))
            yield

    @contextmanager
    def _as_worker(self) -> Iterator[None]:
        """Let `get_worker_info` count the parts of all ranks, and note whether the stream asks for it."""
        if self.num_parts == 1:
            yield
            return
        real = torch_worker._worker_info  # what the function returns; there is no other way to set it
        counted = _CountedWorker(self.part, self.num_parts, dataset=self.stream, seed=self.key)
        torch_worker._worker_info = counted  # type: ignore[assignment]
        try:
            yield
        finally:
            torch_worker._worker_info = real
            self.splits_itself |= counted.was_asked


class _CountedWorker:
    """What `get_worker_info` returns, which notes that it was read."""

    def __init__(self, part: int, num_parts: int, *, dataset: Any, seed: int) -> None:
        self._part, self._num_parts, self.dataset, self.seed = part, num_parts, dataset, seed
        self.was_asked = False

    @property
    def id(self) -> int:
        self.was_asked = True
        return self._part

    @property
    def num_workers(self) -> int:
        self.was_asked = True
        return self._num_parts


def _content(sample: Any) -> Any:
    """Return what a sample holds, without its classes, whose fingerprints differ between processes."""
    if isinstance(sample, Mapping):
        return {str(name): _content(value) for name, value in sample.items()}
    if isinstance(sample, list | tuple):
        return list(map(_content, sample))
    is_object = hasattr(sample, "__dict__") and not isinstance(sample, Tensor)
    return _content(vars(sample)) if is_object else sample


def has_state(stream: Any) -> bool:
    """Return whether a stream can be resumed from a state of its own."""
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


def prepare_stream(stream: Any, *, rank: int, num_ranks: int) -> tuple[Any, bool]:
    """Return a stream, and whether it gives each rank its own samples.

    Streams of Hugging Face datasets and of webdataset are split by their own means.
    """
    library = type(stream).__module__.partition(".")[0]
    if library == "datasets" and num_ranks > 1:
        if stream._distributed is None:  # not split yet; there is no public way to ask
            from datasets.distributed import split_dataset_by_node

            stream = split_dataset_by_node(stream, rank=rank, world_size=num_ranks)
        return stream, True
    if library == "webdataset":
        from webdataset import shardlists
        from webdataset.shardlists import split_by_node

        stages = stream.pipeline
        # By default, webdataset rejects several nodes. Here its workers are those of all ranks, and it splits by them.
        stages[:] = [stage for stage in stages if stage is not shardlists.single_node_only]
        return stream, any(stage is split_by_node for stage in stages)
    return stream, num_ranks > 1 and _names_ranks(stream)


def _names_ranks(stream: Any) -> bool:
    """Return whether the code of a stream's class, or the stream, names the rank of a process."""
    if hasattr(stream, "rank") and RANK_NAMES & vars(stream).keys():
        return True
    functions = [value for kind in type(stream).__mro__ for value in vars(kind).values()]
    codes = [value.__code__ for value in functions if isinstance(value, FunctionType)]
    return any(RANK_NAMES & names for names in map(_names_in, codes))


def _names_in(code: CodeType) -> set[Any]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    return {*code.co_names, *texts}.union(*map(_names_in, inner))
