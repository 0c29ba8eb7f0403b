"""Start the ranks of a program on this machine, where there is no scheduler."""

import os
import sys
from collections.abc import Sequence

from omegaconf import DictConfig

from hpc.config import preflight
from hpc.config.errors import ConfigError


def start_ranks(cfg: DictConfig, words: Sequence[str], *, program: str) -> None:
    """Start a rank per device as children of torchrun. When one dies, torchrun ends the others and this program fails.

    Args:
        words: the words of the program's command line.
        program: the file that each rank runs.

    Raises:
        ConfigError: the config breaks a rule, or asks for other nodes.
    """
    num_nodes = cfg.trainer.num_nodes
    if num_nodes > 1:
        rule = f"must be 1, as cluster={cfg.cluster.name} has no scheduler that could start ranks on other nodes"
        raise ConfigError("trainer.num_nodes", num_nodes, rule, "cluster=<one of --help>, or trainer.num_nodes=1")
    preflight.check_config(cfg)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(["--standalone", f"--nproc-per-node={cfg.trainer.devices}", "--max-restarts=0", program, *words])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} ended with exit code {failure.exitcode}: see its messages above, and errors/ of the run")
