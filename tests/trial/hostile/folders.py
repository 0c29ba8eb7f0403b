"""Cases: foreign or damaged folders, and the program that reads them."""

import json
import os
import random
from pathlib import Path
from typing import Any

from trial.hostile import training, values
from trial.hostile.case import Case, Ground
from trial.hostile.damage import damage, junk

READERS = ["report.py", "report.py", "folder", "train.py", "submit.py", "plan.py", "load", "export", "board"]


def run_directories(rng: random.Random, ground: Ground) -> Case:
    """Return a case with a run directory whose files are damaged, replaced, linked elsewhere or strangely named."""
    run = ground.copy("run")
    files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
    files = [path for path in files if "code" not in path.parts and "checkpoints" not in path.parts]
    for _ in range(rng.randrange(1, 4)):
        file = rng.choice(files)
        if file.is_file() and not file.is_symlink():
            damage(rng, file, ground.canary, ground.folder / "victim")
    if rng.random() < 0.2:
        _named(rng, ground, run)
    if rng.random() < 0.1:
        (run / "report.html").symlink_to(ground.folder / "victim")
    return _reader(rng, ground, run)


def _reader(rng: random.Random, ground: Ground, run: Path) -> Case:
    program = rng.choice(READERS)
    words = {
        "report.py": [str(run)],
        "folder": [str(run.parent)],
        "load": [str(run)],
        "board": [str(run)],
        "export": [str(run), str(ground.open / "out.safetensors"), *rng.choice([[], ["--best"], ["--step", "2"]])],
    }.get(program, [f"resume={run}", *rng.choice([[], [], ["trainer.max_epochs=30"], ["seed=3"]])])
    if program == "submit.py":
        words.append("--dry-run")
    return Case(
        {"folder": "report.py", "export": "tools/export.py", "board": "tools/board.py"}.get(program, program), words
    )


def _named(rng: random.Random, ground: Ground, run: Path) -> None:
    """Make a file or folder with an unusual name."""
    folder = rng.choice([run, *(path for path in run.iterdir() if path.is_dir() and not path.is_symlink())])
    name = values.text(rng, ground.canary).replace("/", "_")[:200] or "x"
    name = rng.choice(
        [name, f"step-{name}", f"events.out.tfevents.{name}", f"node-{name}", f"job-{name}.log", f"{name}.json"]
    )
    if name in (".", ".."):
        return
    path = folder / os.fsdecode(os.fsencode(name[:80])[:250])
    if not path.exists():
        path.mkdir() if rng.random() < 0.3 else path.write_bytes(junk(rng, ground.canary))


def names(rng: random.Random, ground: Ground) -> Case:
    """Return a case in which a valid run with an unusual directory name and hostname starts, resumes or is read."""
    name = os.fsdecode(os.fsencode(values.text(rng, ground.canary).replace("/", "_"))[:200])
    run = ground.open / (rng.choice(["", "", "-", "--help", "a\n", "'", " "]) + name).strip("\0")
    if run.name in (".", "..") or run == ground.open or run.exists():
        run = ground.open / "a b"
    if rng.random() < 0.4 and "${" not in run.name:
        case = training.sound(ground, run)
    else:
        case = _reader(rng, ground, ground.copy("run").rename(run))
    case.host = rng.choice(["", "n1", values.text(rng, ground.canary)[:64]])
    return case


def checkpoints(rng: random.Random, ground: Ground) -> Case:
    """Return a case with damaged files of a checkpoint: manifest, .metadata, meta.pt, those of ranks, tensors."""
    run = ground.copy("run")
    files = sorted(path for path in (run / "checkpoints").rglob("*") if path.is_file() and not path.is_symlink())
    for _ in range(rng.randrange(1, 3)):
        file = rng.choice(files)
        if file.is_file() and not file.is_symlink():
            damage(rng, file, ground.canary, ground.folder / "victim")
    program = rng.choice(["load", "export", "train.py", "weights", "begin", "begin"])
    words = {
        "load": [str(run)],
        "export": [str(run), str(ground.open / "out.safetensors")],
        "begin": [str(run)],
        "weights": [str(run / "checkpoints/last.ckpt")],
        "train.py": [f"resume={run}"],
    }[program]
    return Case({"export": "tools/export.py"}.get(program, program), words)


OWNERS = ["DataModule", "DataModule", "DataModule", "module ", "module network", "parameter network.stem.0.weight",
          "DataModule/_hparams (AttributeDict)", "module /_hparams (AttributeDict)", "dataset 0", "collate 0",
          "optimizer 0", "trainer"]  # fmt: skip
ATTRIBUTES = ["file", "stage", "node_local", "num_workers", "num_ahead", "seed", "global_batch_size", "image_size",
              "_datasets", "_hparams", "__dict__", "__class__", "setup", "prepare_data", "dataset", "network",
              "_modules", "data", "grad", "", "default_root_dir", "gradient_clip_val", "state",
              "defaults", "rng"]  # fmt: skip


def forged_attributes(rng: random.Random, ground: Ground) -> Case:
    """Return a case with a checkpoint that sets what nobody has trained: any attribute, to any value, of any object."""
    forged: dict[str, list[Any]] = {"attributes": [], "settings": []}
    for _ in range(rng.randrange(1, 5)):
        owner, name = rng.choice(OWNERS), rng.choice(ATTRIBUTES)
        form = values.data(rng, ground.canary) if rng.random() < 0.4 else values.text(rng, ground.canary)
        form = rng.choice([form, form, form, [form], {name: form}, {"of kind": "set", "parts": [[form]]}])
        forged["attributes"].append([owner, name, form])
        forged["settings"].append([owner, name, rng.choice([None, form]), form])
    if rng.random() < 0.5:  # the two that once reached a shell
        forged["attributes"] += [["DataModule", "stage", True], ["DataModule", "node_local", f"$(>{ground.canary})"]]
    file = ground.open / "forged.json"
    file.write_text(json.dumps(forged))
    return Case("restore", [str(file), str(ground.base / "packed.npy")])


def searches(rng: random.Random, ground: Ground) -> Case:
    """Return a case with a damaged folder of a search (search.json, journal, submitted.json, members) or of a study."""
    is_study = rng.random() < 0.3
    folder = ground.copy("study" if is_study else "search")
    pattern = "*.json" if is_study and rng.random() < 0.5 else "**/*"
    files = sorted(path for path in folder.glob(pattern) if path.is_file())
    for _ in range(rng.randrange(1, 3)):
        file = rng.choice(files)
        if file.is_file() and not file.is_symlink():
            damage(rng, file, ground.canary, ground.folder / "victim")
    study = ["nodes=1,2", "trainer=ddp", "cluster=slurm", f"out={folder}", "--dry-run"]
    return rng.choice(
        [
            Case("report.py", [str(folder)]),
            Case("report.py", [str(folder)]),
            Case("tools/scale.py", study) if is_study else Case("submit.py", ["--draw", str(folder / "001")]),
        ]
    )


def events(rng: random.Random, ground: Ground) -> Case:
    """Return a case with TensorBoard files that are truncated within the last records, or have a false record."""
    run = ground.copy("run")
    file = rng.choice(sorted(run.rglob("events.out.tfevents.*")))
    size = file.stat().st_size
    if rng.random() < 0.6:
        os.truncate(file, max(0, size - rng.randrange(200)))
    else:
        with file.open("r+b") as stream:
            stream.seek(max(0, size - rng.randrange(400)))
            stream.write(rng.randbytes(rng.randrange(1, 24)))
    return Case("report.py", [str(run)])


def samples(rng: random.Random, ground: Ground) -> Case:
    """Return a case with damaged samples of a node's monitor: values, names, lines."""
    run = ground.copy("run")
    file = rng.choice(sorted((run / "monitor").rglob("*.*")))
    lines = file.read_text(errors="replace").splitlines() or [""]
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(lines))
        cells = lines[at].split(",")
        cells[rng.randrange(len(cells))] = values.text(rng, ground.canary, zero=True)
        lines[at] = ",".join(cells)
    file.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    return Case("report.py", [str(run)])


def data_files(rng: random.Random, ground: Ground) -> Case:
    """Return a case with folders of images or text that contain invalid files and names."""
    kind = rng.choice(["images", "text"])
    folder = ground.copy(kind)
    for _ in range(rng.randrange(1, 4)):
        file = rng.choice(
            sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) or [folder / "x"]
        )
        name = os.fsdecode(os.fsencode(values.text(rng, ground.canary).replace("/", "_")[:60]))
        if rng.random() < 0.4 and name not in ("", ".", ".."):
            file.rename(file.with_name(f"{name}{file.suffix}"))
        elif file.exists():
            damage(rng, file, ground.canary, ground.folder / "victim")
    given = [f"data.dir={folder}"] if kind == "images" else [f"data.files={folder}/*"]
    if rng.random() < 0.2:
        given = [given[0].partition("=")[0] + "=" + values.text(rng, ground.canary)]
    choice = ["model=resnet18", "data.image_size=32"] if kind == "images" else ["model=gpt_tiny", "data.block_size=16"]
    out = ground.open / "out.npy"
    size = ["data.image_size=8"] if kind == "images" else []
    return rng.choice(
        [Case("check", [f"data={kind}", *choice, *given]), Case("tools/pack.py", [f"out={out}", *given, *size])]
    )
