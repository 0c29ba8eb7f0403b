"""The state of every random number generator of a process, as plain data."""

import random
from typing import Any

import numpy as np
import torch


def now() -> tuple[Any, Any, Any, Any]:
    """Of torch on the host and on this process's device, numpy and Python, as they give it: quickly."""
    of_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), of_device, np.random.get_state(), random.getstate()


def state(before: tuple[Any, Any, Any, Any] | None = None) -> dict[str, Any]:
    """The state as plain data: as it is, or as `now` returned it before."""
    of_torch, of_device, of_numpy, of_python = before or now()
    name, keys, position, has_gauss, gauss = of_numpy
    version, numbers, python_gauss = of_python
    return {
        "torch": of_torch,
        "cuda": of_device,
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(numbers), python_gauss],
    }


def begin(seed: int) -> None:
    """Let the generators of the host begin at a seed below 2**32. Those of devices stay as they are."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def restore(state: dict[str, Any]) -> None:
    """Go on with what `state` returned, in this process or another."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, python_gauss = state["python"]
    random.setstate((version, tuple(numbers), python_gauss))
