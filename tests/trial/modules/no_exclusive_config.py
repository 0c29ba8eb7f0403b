"""A patch: two submissions write a config into the directory that both have found unused."""

import os
import time
from pathlib import Path
from typing import Any

from hpc.config.freezing import to_frozen_yaml
from hpc.run import frozen_config
from hpc.system.files import write_atomically


def write_after_both_checks(run_dir: Path, cfg: Any, *, words: list[str]) -> None:
    (run_dir.parent / f"checked-{os.getpid()}").touch()
    limit = time.monotonic() + 20
    while len(list(run_dir.parent.glob("checked-*"))) < 2 and time.monotonic() < limit:
        time.sleep(0.01)
    write_atomically(run_dir / "config.yaml", to_frozen_yaml(cfg))


frozen_config.create_exclusively = write_after_both_checks
