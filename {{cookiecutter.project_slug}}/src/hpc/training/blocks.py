"""The repeated blocks of a module: what strategies shard, recompute and compile one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from hpc.config.errors import ConfigError, closest_word

LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Blocks:
    """Blocks in the order in which a module holds them.

    Attributes:
        paths: of the lists that hold them, as `get_submodule` takes them.
        owner: the part of the module that holds the first list.
    """

    paths: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    owner: nn.Module

    def __str__(self) -> str:
        kinds = " and ".join(dict.fromkeys(type(block).__name__ for block in self.modules))
        return f"{' and '.join(self.paths)} ({len(self.modules)} {kinds})"


def find_blocks(module: nn.Module, paths: str | Sequence[str] | None = None) -> Blocks | None:
    """Return the blocks of a module; None if it has none.

    They are what `paths` names; or else the attribute `blocks` of the module or of a part; or else the longest list of
    equal parts, of which the first counts if several are as long.

    Args:
        paths: of one or several lists of blocks, as `strategy.blocks` gives them.

    Raises:
        ConfigError: a path does not lead to a list of modules.
    """
    if paths:
        paths = (paths,) if isinstance(paths, str) else tuple(paths)
        modules = tuple(block for path in paths for block in _list_at(module, path))
        return Blocks(paths, modules, module.get_submodule(paths[0].rpartition(".")[0]))
    for name, part in module.named_modules():
        if isinstance(part, LISTS) and name.rpartition(".")[2] == "blocks" and len(part):
            return _blocks(module, name, part)
    lists = list(_lists_of_equal_parts(module))
    if not lists:
        return None
    return _blocks(module, *max(lists, key=lambda entry: len(entry[1])))


def _blocks(module: nn.Module, path: str, parts: nn.ModuleList | nn.Sequential) -> Blocks:
    return Blocks((path,), tuple(parts), module.get_submodule(path.rpartition(".")[0]))


def _lists_of_equal_parts(module: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """Yield each list, with its path, whose parts have one class and parameters of the same shapes."""
    for name, part in module.named_modules():
        if not isinstance(part, LISTS) or len(part) < 2:
            continue
        kinds = {(type(block), tuple(parameter.shape for parameter in block.parameters())) for block in part}
        if len(kinds) == 1 and next(iter(kinds))[1]:
            yield name, part


def _list_at(module: nn.Module, path: str) -> nn.ModuleList | nn.Sequential:
    parts = dict(module.named_modules())
    if isinstance(parts.get(path), LISTS) and len(parts[path]):  # type: ignore[arg-type]
        return parts[path]  # type: ignore[return-value]
    lists = [name for name, part in parts.items() if isinstance(part, LISTS) and len(part)]
    shown = ", ".join(lists[:10]) or "none"
    rule = f"must name a list of blocks (torch.nn.ModuleList or Sequential) of {type(module).__name__}; it has {shown}"
    fix = f"strategy.blocks={closest_word(path, lists, 'null')}"
    raise ConfigError("strategy.blocks", path, rule, fix)
