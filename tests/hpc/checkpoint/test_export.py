"""Check the export of any checkpoint to one plain file of weights, with one tensor in memory at a time."""

import json
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fork import PROJECT
from safetensors.torch import load_file
from test_weights import assert_same, deepspeed_by_hand
from torch import Tensor

from hpc.checkpoint import load_hooks, on_disk, weights
from hpc.config.errors import ConfigError
from hpc.programs import export

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

COUNT, MEGABYTES = 48, 8  # far more than the export's buffers, whose size does not depend on the number of tensors


def weights_of(step: int) -> dict[str, Tensor]:
    """Return weights of every dtype, not in the order in which the file stores them."""
    torch.manual_seed(step)
    shared = torch.randn(3, 5)
    state = {"flag": torch.tensor([True, False, True]), "embed": shared, "head": shared, "count": torch.tensor(step)}
    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8)
    state |= {str(kind): torch.arange(7).to(kind) for kind in kinds}
    return state | {"turned": torch.randn(4, 3).t(), "empty": torch.zeros(0, 2), "scalar": torch.randn(())}


def sharded(folder: Path, state: dict[str, Tensor]) -> None:
    dcp.save({"state_dict": state, "optimizer_0": {"lr": 0.1}}, checkpoint_id=folder, no_dist=True)


def publish(run: Path, step: int) -> Path:
    """Write a complete checkpoint as a run does."""
    final = on_disk.checkpoint_path(run, step, 1)
    part = on_disk.make_part_folder(final)
    sharded(part, weights_of(step))
    note = {"step": step, "attempt": 1, "strategy": "FSDP", "world_size": 1, "seconds": 0.1}
    on_disk.publish(part, final, files=on_disk.checksums(part, on_disk.file_names(part)), details=note)
    return final


def done(*words: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["export.py", *map(str, words)])
        export.main()


def rejected(*words: object) -> str:
    with pytest.raises(ConfigError) as found:
        done(*words)
    return str(found.value)


def header(file: Path) -> dict:
    with file.open("rb") as stream:
        return json.loads(stream.read(int.from_bytes(stream.read(8), "little")))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with three checkpoints, the first of which is the best."""
    run = tmp_path_factory.mktemp("runs") / "moons"
    steps = [publish(run, step) for step in (5, 9, 12)]
    on_disk.set_link(run / "checkpoints" / "best.ckpt", steps[0])
    return run


@pytest.mark.parametrize(("words", "step"), [([], 12), (["--step", 9], 9), (["--best"], 5)])
def test_the_file_holds_the_weights(run: Path, words: list, step: int, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    done(run, out, *words)
    assert_same(load_file(out), weights_of(step))
    assert header(out)["__metadata__"] == {
        "format": "pt", "run": "moons", "step": str(step), "checkpoint": f"step-{step:09d}-001"
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_the_best_one_of_a_copied_run(run: Path, tmp_path: Path) -> None:
    """Check a run copied by `scp -r`, which makes a folder of the link."""
    shutil.copytree(run, tmp_path / "moons")
    done(tmp_path / "moons", tmp_path / "w.safetensors", "--best")
    assert_same(load_file(tmp_path / "w.safetensors"), weights_of(5))


def test_tensors_begin_at_multiples_of_their_size(run: Path, tmp_path: Path) -> None:
    done(run, tmp_path / "w.safetensors")
    start = 8 + int.from_bytes((tmp_path / "w.safetensors").read_bytes()[:8], "little")
    for name, entry in header(tmp_path / "w.safetensors").items():
        if name != "__metadata__":
            assert (start + entry["data_offsets"][0]) % weights_of(1)[name].dtype.itemsize == 0, name


def test_a_checkpoint_alone(run: Path, tmp_path: Path) -> None:
    done(run / "checkpoints" / "best.ckpt", tmp_path / "a.safetensors")
    assert_same(load_file(tmp_path / "a.safetensors"), weights_of(5))
    torch.save({"state_dict": weights_of(3)}, tmp_path / "it.ckpt")
    done(tmp_path / "it.ckpt", tmp_path / "b.safetensors")
    assert_same(load_file(tmp_path / "b.safetensors"), weights_of(3))
    folder = deepspeed_by_hand(tmp_path)
    done(folder, tmp_path / "c.safetensors")
    assert_same(load_file(tmp_path / "c.safetensors"), weights.read(folder))
    assert "if --step or --best is given" in rejected(folder, tmp_path / "d.safetensors", "--step", 3)


def test_damaged_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    newest = [publish(tmp_path / "run", step) for step in (1, 2)][1]
    file = newest / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    done(tmp_path / "run", tmp_path / "w.safetensors")
    assert "step-000000002-001 is damaged" in capsys.readouterr().err
    assert_same(load_file(tmp_path / "w.safetensors"), weights_of(1))
    assert "has changed since it was written" in rejected(tmp_path / "run", tmp_path / "v.safetensors", "--step", 2)
    assert "has changed since it was written" in rejected(newest, tmp_path / "v.safetensors")
    (newest / "manifest.json").unlink()
    assert "--step must be the step of a checkpoint" in rejected(
        tmp_path / "run", tmp_path / "v.safetensors", "--step", 2
    )
    assert "must hold a best checkpoint" in rejected(tmp_path / "run", tmp_path / "v.safetensors", "--best")
    assert not (tmp_path / "v.safetensors").exists()


def test_what_is_there_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_text("mine")
    assert "--force" in rejected(run, tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").read_text() == "mine"
    done(run, tmp_path / "w.safetensors", "--force")
    assert_same(load_file(tmp_path / "w.safetensors"), weights_of(12))


def test_mistakes(run: Path, tmp_path: Path) -> None:
    assert "must be an existing" in rejected(tmp_path / "absent", tmp_path / "w.safetensors")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "must hold a whole checkpoint" in rejected(tmp_path / "run", tmp_path / "w.safetensors")
    assert "No such file" in rejected(run, tmp_path / "absent" / "w.safetensors")
    torch.save({"z": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "complex")
    assert "complex64" in rejected(tmp_path / "complex", tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()


@pytest.mark.slow
def test_the_command(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, PROJECT / "tools" / "export.py", run, tmp_path / "w.safetensors"]
    assert (
        "step-000000012-001" in subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout
    )
    again = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr.startswith("ConfigError: OUT must be a new file")


def test_help_is_quick() -> None:
    code = "import sys, runpy; sys.argv = ['export.py', '--help']\ntry: runpy.run_path(%r, run_name='__main__')\n"
    code += "finally: assert 'torch' not in sys.modules"
    script = str(PROJECT / "tools" / "export.py")
    subprocess.run([sys.executable, "-c", code % script], check=True, timeout=60, capture_output=True)


def large(form: str, folder: Path) -> Path:
    """Write a checkpoint of COUNT tensors of MEGABYTES each."""
    state = {f"layer.{i}": torch.full((MEGABYTES, 2**18), float(i)) for i in range(COUNT)}
    if form == "sharded":
        sharded(folder / "it", state)
        return folder / "it"
    if form == "file":
        torch.save({"state_dict": state}, folder / "it")
        return folder / "it"
    path = folder / "it" / "checkpoint"
    path.mkdir(parents=True)
    shapes = {name: value.shape for name, value in state.items()}
    model = {"module": {name: value.bfloat16() for name, value in state.items()}, "param_shapes": [shapes]}
    torch.save(model | {"shared_params": {}}, path / "mp_rank_00_model_states.pt")
    for rank, half in enumerate(torch.cat([value.flatten() for value in state.values()]).chunk(2)):
        optimizer = {"partition_count": [2], "single_partition_of_fp32_groups": [half.clone()]}
        torch.save({"optimizer_state_dict": optimizer}, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder / "it"


def own_memory(*words: object) -> int:
    """Return the peak anonymous memory of an export in MiB.

    Mapped files do not count, as the kernel can drop their pages.
    """
    command = [sys.executable, PROJECT / "tools" / "export.py", *map(str, words)]
    most, ends = 0, time.monotonic() + 120
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and time.monotonic() < ends:
            status = Path(f"/proc/{process.pid}/status").read_text()
            most = max([most, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))])
            time.sleep(0.002)
        process.kill()
    assert process.returncode == 0
    return most // 1024


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    folder = tmp_path_factory.mktemp("little")
    torch.save({"w": torch.zeros(1)}, folder / "it")
    return own_memory(folder / "it", folder / "out.safetensors")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("form", ["sharded", "file", "zero"])
def test_memory_is_bounded(form: str, least: int, tmp_path: Path) -> None:
    most = own_memory(large(form, tmp_path), tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").stat().st_size > COUNT * MEGABYTES * 2**20
    assert most - least < COUNT * MEGABYTES / 4
    found = load_file(tmp_path / "b.safetensors")
    assert all(bool((found[f"layer.{i}"] == i).all()) for i in range(COUNT))


NET = """
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import RandomDataset


class Net(LightningModule):
    def __init__(self, width: int, norm: str = "none") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(32, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def test_step(self, batch, batch_idx):
        self.log("test/sum", self.layer(batch).sum())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def on_save_checkpoint(self, checkpoint):
        checkpoint["vocabulary"] = ["a", "b"]

    def on_load_checkpoint(self, checkpoint):
        self.vocabulary = checkpoint["vocabulary"]


def loader():
    torch.manual_seed(1)
    return torch.utils.data.DataLoader(RandomDataset(32, 4), batch_size=2)
"""
# What a colleague types who has Lightning, the module and the file. -I and -S with one folder: nothing of the project.
PLAIN = """
import sys
sys.path[:0] = [FOLDER, PACKAGES]
sys.modules["hpc"] = None  # an import of it fails, whatever is installed
import lightning as L, torch, net
module = net.Net.load_from_checkpoint("out.ckpt")
assert (module.hparams.width, module.hparams.norm, module.vocabulary) == (3, "batch", ["a", "b"])
options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = L.Trainer(accelerator="cpu", **options)
fresh = net.Net(3)
(metrics,) = trainer.test(fresh, net.loader(), ckpt_path="out.ckpt", verbose=False)
other = net.Net(3)
other.load_state_dict(torch.load("out.pt"))
assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True))
print(metrics["test/sum"])
"""


@pytest.mark.slow
def test_a_plain_trainer_reads_it_without_this_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning as L

    (tmp_path / "net.py").write_text(NET)
    net = runpy.run_path(str(tmp_path / "net.py"))
    module = net["Net"](3, norm="batch")
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", max_steps=2, **options)  # type: ignore[arg-type]
    trainer.fit(module, net["loader"]())
    checkpoint = trainer._checkpoint_connector.dump_checkpoint() | {"position": {"epoch": 0}, "attempt": 1}
    final = on_disk.checkpoint_path(tmp_path / "run", 2, 1)
    part = on_disk.make_part_folder(final)
    sharded(part, checkpoint.pop("state_dict"))
    torch.save(checkpoint, part / load_hooks.REST_FILE)
    note = {"step": 2, "attempt": 1, "strategy": "Single", "world_size": 1, "seconds": 0.1}
    on_disk.publish(part, final, files=on_disk.checksums(part, on_disk.file_names(part)), details=note)
    for name in ("out.ckpt", "out.pt"):
        done(tmp_path / "run", tmp_path / name)
    written = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert not written.keys() & {"position", "attempt", "loops", "callbacks", "optimizer_states"}
    assert written["global_step"] == 2
    packages = Path(L.__file__).parents[1]
    script = PLAIN.replace("FOLDER", repr(str(tmp_path))).replace("PACKAGES", repr(str(packages)))
    plain = subprocess.run([sys.executable, "-I", "-S", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    (metrics,) = trainer.test(module, net["loader"](), verbose=False)
    assert float(plain.stdout.split()[-1]) == pytest.approx(metrics["test/sum"])


def test_another_ending_is_a_sentence(run: Path, tmp_path: Path) -> None:
    for name in ("w", "w.bin", "w.pth"):
        assert "must end in .safetensors, .pt or .ckpt" in rejected(run, tmp_path / name)
    assert not list(tmp_path.iterdir())
    assert "must be a file that can be written" in rejected(run, tmp_path / "absent" / "w.ckpt")
