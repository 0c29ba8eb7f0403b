"""Start train.py as real ranks, again and again: forked from a process that has imported the libraries once.

Reads starts, a JSON line each: {"log": file, "words": [...], "ranks": n, "stop_at": steps or null, "patch": code}.
Answers each with the exit codes of its ranks. With `stop_at` the last rank gets SIGUSR1 when so many steps are done.
Ranks agree at every step, not once a second, so a run stops where it is told to. conftest.py has the fixture `start`.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).absolute().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "src")]
LIMIT = 180  # seconds for one start
LIBRARIES = ["lightning.pytorch.callbacks", "torch.distributed.checkpoint", "torch.utils.tensorboard", "torchmetrics"]
LIBRARIES += ["hydra.core.override_parser.overrides_parser", "torchdata.stateful_dataloader"]
PARTS = ["hpc.training.attempt", "hpc.resume.trainer", "hpc.data.data_module"]  # as slow to import


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    for library in [*LIBRARIES, *PARTS]:
        importlib.import_module(library)
    for line in sys.stdin:
        start = json.loads(line)
        if any("deepspeed" in word for word in start["words"]):
            importlib.import_module("deepspeed")
        if "experiment=finetune_hf" in start["words"]:
            importlib.import_module("datasets")
            importlib.import_module("peft")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        print(json.dumps(wait([fork(rank, port, **start) for rank in range(start["ranks"])])), flush=True)


def fork(
    rank: int, port: int, *, log: str, words: list[str], ranks: int, stop_at: int | None = None, patch: str = ""
) -> int:
    """Fork one rank with the environment that MPICH's mpiexec sets; return its process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        # Line buffering: otherwise the lines of two ranks would mix.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        place = {"PMI_RANK": rank, "PMI_SIZE": ranks, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": ranks}
        os.environ |= {name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()}
        os.chdir(PROJECT)
        sys.argv = ["train.py", *words]
        always_agree()
        if rank == ranks - 1 and stop_at is not None:
            tell(stop_at)
        exec(patch, {"__name__": "patch"})  # the module of its classes
        runpy.run_path(str(PROJECT / "train.py"), run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def always_agree() -> None:
    from hpc.resume import agreement

    agreement.INTERVAL_SECONDS = 0


def tell(steps: int) -> None:
    """Send this process the warning signal after this many steps: within the next step, if gradients accumulate."""
    from hpc.resume.resume import Resume

    before = Resume.on_train_batch_end

    def on_train_batch_end(self: Resume, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before(self, trainer, module, outputs, batch, batch_idx)
        accumulate = trainer.accumulate_grad_batches
        if trainer.global_step == steps and (accumulate == 1 or (batch_idx + 1) % accumulate):
            os.kill(os.getpid(), signal.SIGUSR1)

    Resume.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]


def wait(pids: list[int]) -> list[int]:
    """Return the exit codes; kill processes that do not end."""
    codes: dict[int, int] = {}
    limit = time.monotonic() + LIMIT
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            if time.monotonic() > limit:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main()
