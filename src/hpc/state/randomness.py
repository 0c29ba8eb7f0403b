"""The state of every random number generator of a process, as plain data, and numbers that follow from a place."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_numpy_apart = np.random.MT19937(0)  # to make one takes longer than a small training step


@contextmanager
def drawn_apart(*key: object) -> Iterator[None]:
    """Draw random numbers that are a function of the key alone, and leave all generators as they were.

    numpy's generator is replaced meanwhile, as its state takes long to copy.
    """
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest())
    numpy_random: Any = np.random  # whose types lack these two functions
    of_torch, of_numpy, of_python = torch.get_rng_state(), numpy_random.get_bit_generator(), random.getstate()
    of_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    numpy_random.set_bit_generator(_numpy_apart)
    seed_host(seed)
    if of_device is not None:
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        numpy_random.set_bit_generator(of_numpy)
        random.setstate(of_python)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device)


def plain_state() -> dict[str, Any]:
    """Return the states of torch on the host and on this process's device, of numpy and of Python, as plain data."""
    numpy_state: Any = np.random.get_state()  # whose types say that it may be a dict
    name, keys, position, has_gauss, gauss = numpy_state
    version, numbers, python_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(numbers), python_gauss],
    }


def seed_host(seed: int) -> None:
    """Seed the generators of the host. Those of devices stay as they are."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def restore(state: dict[str, Any]) -> None:
    """Set the generators to the result of `plain_state`, of this process or of another."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, python_gauss = state["python"]
    random.setstate((version, tuple(numbers), python_gauss))


@contextmanager
def kept(generators: Sequence[Any]) -> Iterator[None]:
    """Restore, after the block, the states of generators that somebody has made."""
    states = [get_state(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_state(generator, state)


def seed_generators(generators: Sequence[Any], seed: int) -> None:
    """Seed each of these generators, with numbers below 2**32 that differ."""
    for number, generator in enumerate(generators):
        own = (seed + number * 0x9E3779B1) % (1 << 32)
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(own).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        else:
            generator.seed(own)


def get_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Set the result of `get_state`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def uniform_per_sample(seed: int, epoch: int, *, indices: Tensor, num: int) -> Tensor:
    """Return random numbers in [0, 1) that are a function of (seed, epoch, sample index) alone.

    Args:
        seed: the run's seed.
        epoch: the epoch in which the samples are drawn.
        indices: of the samples, int64, shape (batch,), on any device.
        num: numbers per sample.

    Returns:
        float32, shape (batch, num), on the device of `indices`; the same on every device and in every batch layout.
    """
    columns = torch.arange(1, num + 1, device=indices.device)
    counter = indices[:, None] * (num + 1) + columns + epoch_key(seed, epoch)
    bits = _mix(counter) >> 11 & (1 << 24) - 1
    return bits.to(torch.float32) / (1 << 24)


def sample_seeds(seed: int, epoch: int, *, places: Sequence[int]) -> list[int]:
    """Return a number below 2**32 for each place in an order, a function of (seed, epoch, place) alone."""
    return (_mix(torch.tensor(places) + epoch_key(seed, epoch)) >> 16 & (1 << 32) - 1).tolist()


def epoch_key(seed: int, epoch: int) -> int:
    """Return a number below 2**62 that is a function of (seed, epoch) alone."""
    return int(_mix(torch.tensor(seed * 1_000_003 + epoch))) & (1 << 62) - 1


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) to int64, which wraps around like uint64."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687  # 0xbf58476d1ce4e5b9
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685  # 0x94d049bb133111eb
    return x ^ (x >> 31 & (1 << 33) - 1)
