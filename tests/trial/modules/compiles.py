"""A patch: handle the compile cache as a run does, but without a compiler, and exit.

FOLDER and IS_KILLED are assigned before.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from torch import device, nn

from hpc.training.compile_cache import CompileCache

folder = Path(FOLDER)  # noqa: F821
cache = CompileCache(str(folder / "shared"), enabled=True, node_local=str(folder / "node"))
strategy = SimpleNamespace(root_device=device("cpu"))
trainer = SimpleNamespace(strategy=strategy, precision="32-true", default_root_dir=str(folder), is_global_zero=True)
cache.setup(trainer, nn.Sequential(nn.Linear(2, 2)), "fit")
for number in range(8):
    aside = cache.cache_dir / f"tmp-{os.getpid()}-{number}"
    aside.mkdir(parents=True)
    (aside / "kernel.so").write_text("code" * 500)
    if IS_KILLED and number == 4:  # noqa: F821
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        aside.rename(cache.cache_dir / f"kernel-{number}")
    except OSError:
        (aside / "kernel.so").unlink()
        aside.rmdir()
    cache.on_save_checkpoint(trainer, None, {})
    time.sleep(random.random() / 100)
cache.on_train_end(trainer, None)
whole = [path for path in cache.cache_dir.glob("kernel-*/kernel.so") if path.read_text() == "code" * 500]
assert len(whole) == 8, sorted(cache.cache_dir.rglob("*"))
print("kernels", len(whole))
sys.exit(0)
