"""Check that prefetched batches are the same, in the same order, and that no thread is left running."""

import threading

import pytest
from test_data import built

from hpc.data.data_module import DataModule
from hpc.data.fetching import BatchLoader, IndexedDataset, prefetch


def thread_names():
    return [thread.name for thread in threading.enumerate()]


def test_order_is_kept_and_the_thread_ends():
    assert list(prefetch(range(100), 2)) == list(range(100))
    assert "prefetch batches" not in thread_names()


def test_no_more_batches_are_fetched_than_asked_for():
    fetched, taken = [], threading.Semaphore(0)

    def batches():
        for number in range(10):
            fetched.append(number)
            taken.release()
            yield number

    fetched_ahead = prefetch(batches(), 2)
    assert next(fetched_ahead) == 0
    for _ in range(4):  # one was consumed, two are queued, and one waits for space in the queue
        assert taken.acquire(timeout=10)
    assert not taken.acquire(timeout=0.1) and fetched == [0, 1, 2, 3]
    fetched_ahead.close()  # an epoch that ends early
    assert len(fetched) < 7
    assert "prefetch batches" not in thread_names()


def test_errors_of_fetching_are_raised():
    def batches():
        yield 1
        raise ValueError("in the thread")

    fetched_ahead = prefetch(batches(), 2)
    assert next(fetched_ahead) == 1
    with pytest.raises(ValueError, match="in the thread"):
        next(fetched_ahead)
    assert "prefetch batches" not in thread_names()


def test_a_loader_that_fetches_ahead_gives_the_same_batches_also_from_the_middle(tmp_path):
    (tmp_path / "text").write_bytes(bytes(i * i % 251 for i in range(20_000)))
    data = built("text", files=str(tmp_path / "text"), global_batch_size=16, block_size=64)
    alone = data.train_dataloader()
    loader = data.train_dataloader()
    assert isinstance(loader, BatchLoader) and loader.num_ahead == 0  # no GPU here
    loader.num_ahead = 2
    for start in (0, 5):
        for each in (alone, loader):
            each.sampler.go_to(1, start)
        for expected, batch in zip(alone, loader, strict=True):
            assert all(a.equal(b) for a, b in zip(expected, batch, strict=True))


def test_a_dataset_that_draws_random_numbers_is_not_fetched_by_a_thread(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    class Drawing(DataModule):
        def dataset(self, split):
            return torch.utils.data.Subset([(torch.zeros(1), 0)] * 8, range(8))

    assert IndexedDataset(Drawing(global_batch_size=2).dataset("train"), 1).draws
    assert Drawing(global_batch_size=2).train_dataloader().num_ahead == 0
    assert built("digits").train_dataloader().num_ahead == 2
    assert built("digits", num_ahead=0).train_dataloader().num_ahead == 0
    assert built("digits", num_workers=1).train_dataloader().num_ahead == 0
