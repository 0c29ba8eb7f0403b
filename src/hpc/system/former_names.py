"""Former names of packages and modules: `import pytorch_lightning` gives `lightning.pytorch`, with the same classes.

The package pytorch_lightning holds the same code a second time, and its classes are others: a module written for it
would be none to the Trainer here. Configs of earlier runs name modules of this package that have moved.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PRESENT_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
PRESENT_NAMES |= {"hpc.training.predicted_samples": "hpc.logging.predicted_samples"}
PRESENT_NAMES |= {
    "hpc.training.parallel": "hpc.strategies.gradients",
    "hpc.training.compile_cache": "hpc.strategies.compile_cache",
    "hpc.training.deepspeed_strategy": "hpc.strategies.deepspeed",
}
# Classes of one module, hpc.training.strategies, that are in several now.
PRESENT_NAMES |= {
    f"hpc.training.strategies.{name}": f"hpc.strategies.{name.lower()}.{name}" for name in ("Single", "DDP", "FSDP")
}


def present_name(name: str) -> str:
    """Return a dotted name with the present name of its package or module."""
    for former, present in PRESENT_NAMES.items():
        if f"{name}.".startswith(f"{former}."):
            return present + name[len(former) :]
    return name


class FormerNames(MetaPathFinder, Loader):
    """Finds modules under their former names."""

    # Any: an old Python must be able to read this, so that hpc.run.interpreter can say that it is too old.
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if present_name(fullname) == fullname:
            return None
        # Of a package only its first part is looked up: more would import torch.
        name = present_name(fullname) if "." in fullname else "lightning"
        return ModuleSpec(fullname, self) if find_spec(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(present_name(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:  # this one; the module keeps the one that it was imported with
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Find the modules from now on. Those that are imported already stay what they are."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames())
