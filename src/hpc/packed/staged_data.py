"""Data whose packed files can be copied to each node."""

from typing import Any

from hpc.config.errors import ConfigError
from hpc.data.data_module import DataModule
from hpc.packed import staging
from hpc.packed.packed_file import FileParts


class StagedDataModule(DataModule):
    """Base class for data in packed files. A subclass implements `files_to_stage`, and reads them at `local_path`.

    Args:
        stage: copy the files of `files_to_stage` to `node_local` before training.
        node_local: a folder on the node's own storage; may contain $VARIABLES.
        loading: further arguments of DataModule: global_batch_size, seed, num_workers, ...
    """

    def __init__(self, *, stage: bool = False, node_local: str | None = None, **loading: Any) -> None:
        super().__init__(**loading)
        self.stage, self.node_local = stage, node_local

    def files_to_stage(self) -> list[FileParts]:
        """Return the packed files that can be copied to the node."""
        rule = "Staging copies files that tools/pack.py has packed, and these data have none"
        raise ConfigError("data.stage", True, rule, "data.stage=false, or data=packed")

    def prepare_data(self) -> None:
        """Copy files to this node. Lightning calls this in one process per node; the others wait without a limit."""
        for parts in self.files_to_stage() if self.stage else ():
            staging.require_node_local_key(self.stage, self.node_local)
            staging.stage_file(parts, str(self.node_local))

    def local_path(self, parts: FileParts) -> str:
        """Return the path of the file's copy on this node, or of the file itself if it is not staged."""
        return staging.staged_path(parts, self.node_local) if self.stage and self.node_local else parts.file
