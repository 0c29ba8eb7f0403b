"""A rank's and a worker's part of a stream, in one order that follows from (seed, epoch), with a state to resume from.

Who splits a home-made stream is said, never guessed: by `data.stream_splits`, or an attribute `stream_splits` of the
stream. `ranks`: the stream gives each rank, and each of its workers, samples of its own. `workers`: it splits its
samples by `get_worker_info`, which counts the workers of all ranks. `nothing`: each part takes its turn of all samples.
"""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hpc.config.errors import ConfigError
from hpc.config.sections import STREAM_SPLITS
from hpc.state import checksums, randomness
from hpc.state.randomness import epoch_key

RANKS, WORKERS, NOTHING = STREAM_SPLITS
END = object()
ITEMS_BEFORE_SEEDS_DIFFER = 1  # after it a stream has chosen its part: then parts need random numbers of their own


class SharedStream(IterableDataset):
    """A stream of which each rank and worker has a part.

    Args:
        stream: an iterable of samples, or of batches.
        splits: who splits it; see above.
    """

    def __init__(self, stream: Any, *, rank: int, num_ranks: int, splits: str, seed: int) -> None:
        self.stream, self.splits, self.seed, self.epoch = stream, splits, seed, 0
        self.rank, self.num_ranks = rank, num_ranks
        self.was_asked = False  # whether the stream, or its worker_init_fn, has read get_worker_info

    def __iter__(self) -> "SharedIterator":
        return SharedIterator(self)

    def part(self) -> tuple[int, int]:
        """Return the number of this process's part, and how many parts there are."""
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        return self.rank * num_workers + worker, self.num_ranks * num_workers

    @contextmanager
    def as_worker(self) -> Iterator[int]:
        """Let `get_worker_info` show the worker that the stream is to split by, and note whether it is asked."""
        real = torch_worker._worker_info  # what the function returns; there is no other way to set it
        worker: Any = (real.id, real.num_workers) if real else None
        if self.splits == WORKERS:
            worker = self.part() if real or self.num_ranks > 1 else None
        elif self.splits == NOTHING:
            worker = worker and (0, 1)
        shown = _ShownWorker(self, *worker) if worker else None
        torch_worker._worker_info = shown  # type: ignore[assignment]
        try:
            yield worker[0] if worker else 0
        finally:
            torch_worker._worker_info = real


class _ShownWorker:
    """What `get_worker_info` returns, which notes that it was read."""

    def __init__(self, shared: SharedStream, number: int, num_workers: int) -> None:
        self._shared, self._worker = shared, (number, num_workers)
        self.dataset, self.seed = shared.stream, epoch_key(shared.seed, shared.epoch) % (1 << 32) + number

    @property
    def id(self) -> int:
        self._shared.was_asked = True
        return self._worker[0]

    @property
    def num_workers(self) -> int:
        self._shared.was_asked = True
        return self._worker[1]


class SharedIterator(Iterator[Any]):
    """The samples of one part. Its state is that of the stream or, if that has none, how far to read it again."""

    def __init__(self, shared: SharedStream) -> None:
        self.shared, self.stream = shared, shared.stream
        self.part, self.num_parts = shared.part()
        self.takes_turns = shared.splits == NOTHING
        self.key = epoch_key(shared.seed, shared.epoch) % (1 << 32)
        self.num_read = 0  # samples of the stream, of all parts if they take turns
        self.first: int | None = None  # a checksum of the first one
        self.last: Any = None
        self._samples: Iterator[Any] | None = None

    def __next__(self) -> Any:
        for _ in range((self.part - self.num_read) % self.num_parts if self.takes_turns else 0):
            self._read()
        self.last = self._read()
        return self.last

    def state_dict(self) -> dict[str, Any]:
        has_own = has_state(self.stream)
        return {
            "read": self.num_read,
            "asked": self.shared.was_asked,
            "first": self.first,
            "own": self.stream.state_dict() if has_own else None,
            "last": None if has_own else _checksum(self.last),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["own"] is not None:
            self.stream.load_state_dict(state["own"])
            self._begin()
            self.num_read, self.first = state["read"], state.get("first")
            self.shared.was_asked |= state.get("asked", True)
            return
        for _ in range(state["read"]):
            self.last = self._read()
        if state["read"] and state["last"] != _checksum(self.last):
            print(f"warning: {type(self.stream).__name__} gives other samples when it is read again, so some may come "
                  "twice in this epoch; a seed of its own or state_dict() and load_state_dict() would prevent it",
                  flush=True)  # fmt: skip

    def _begin(self) -> None:
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(self.shared.epoch)
        with self._random_numbers(), self.shared.as_worker():
            self._samples = iter(self.stream)

    def _read(self) -> Any:
        if self._samples is None:
            self._begin()
        with self._random_numbers(), self.shared.as_worker():
            sample = next(self._samples, END)  # type: ignore[arg-type]  # no error: `isolate_rng` would restore nothing
        if sample is END:
            raise StopIteration
        if self.num_read == 0:
            self.first = zlib.crc32(repr(_checksum(sample)).encode())
        self.num_read += 1
        return sample

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Seed by the number of the sample, so that no state of random numbers must be kept."""
        number = self.num_read
        if not self.takes_turns and number >= ITEMS_BEFORE_SEEDS_DIFFER:
            number = number * self.num_parts + self.part
        with nullcontext() if get_worker_info() else isolate_rng(include_cuda=False):
            randomness.seed_host(epoch_key(self.key, number) % (1 << 32))
            yield


def _checksum(sample: Any) -> list[int] | None:
    """Return a checksum of a sample, as plain data; None if it cannot be compared."""
    checksum = checksums.fingerprint(_content(sample))
    return None if checksum == checksums.UNREADABLE else list(checksum)


def _content(sample: Any) -> Any:
    """Return what a sample holds, without its classes, whose fingerprints differ between processes."""
    if isinstance(sample, Mapping):
        return {str(name): _content(value) for name, value in sample.items()}
    if isinstance(sample, list | tuple):
        return list(map(_content, sample))
    is_object = hasattr(sample, "__dict__") and not isinstance(sample, Tensor)
    return _content(vars(sample)) if is_object else sample


def has_state(stream: Any) -> bool:
    """Return whether a stream can be resumed from a state of its own, of which nothing else must be known."""
    try:
        signature(stream.state_dict).bind()
        signature(stream.load_state_dict).bind({})
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def prepare_stream(stream: Any, *, splits: str | None, rank: int, num_ranks: int, split: str) -> tuple[Any, str]:
    """Return a stream, and who splits its samples.

    Streams of Hugging Face datasets and of webdataset are split by their own means.

    Args:
        splits: `data.stream_splits`, which an attribute `stream_splits` of the stream overrides.
        split: of the data, as messages name it.

    Raises:
        ConfigError: several ranks read it, and nothing says who splits it.
    """
    library = type(stream).__module__.partition(".")[0]
    if library == "datasets":
        if num_ranks > 1 and stream._distributed is None:  # not split yet; there is no public way to ask
            from datasets.distributed import split_dataset_by_node

            stream = split_dataset_by_node(stream, rank=rank, world_size=num_ranks)
        return stream, RANKS
    own = getattr(stream, "stream_splits", None)
    splits = own or splits
    if library == "webdataset":
        splits = _splits_of_webdataset(stream) or splits
    if splits in STREAM_SPLITS or num_ranks == 1:
        return stream, splits or RANKS
    name = type(stream).__name__
    key = f"{name}.stream_splits" if own else "data.stream_splits"
    rule = f"must say who splits the samples of {name} ({split}) among {num_ranks} ranks"
    fix = f"{key}={RANKS} if {name} itself gives each rank samples of its own, {WORKERS} if it splits "
    fix += f"them by torch.utils.data.get_worker_info, or {NOTHING} if each rank would read all of them"
    raise ConfigError(key, splits, rule, fix)


def _splits_of_webdataset(stream: Any) -> str | None:
    """Return who splits a pipeline of webdataset; None if its stages do not say it."""
    from webdataset import shardlists

    stages = stream.pipeline
    if any(stage is shardlists.split_by_node for stage in stages):
        return RANKS
    # By default, webdataset rejects several nodes. Here its workers are those of all ranks, and it splits by them.
    stages[:] = [stage for stage in stages if stage is not shardlists.single_node_only]
    return WORKERS if any(stage is shardlists.split_by_worker for stage in stages) else None
