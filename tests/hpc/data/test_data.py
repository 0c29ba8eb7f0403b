"""Check the data checks on the login node (without torch), and the batches that reach the network."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from data_nodes import built, make_images, node, read_all, rejected, rejected_while_reading
from PIL import Image

from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT
from hpc.data import file_checks, image_files, text_files


def truncate(file):
    file.write_bytes(file.read_bytes()[: -file.stat().st_size // 2])


# Images


def test_checks_need_no_torch():
    code = "import sys, hpc.data.file_checks, hpc.packed.checks; sys.exit('torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(PROJECT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def test_the_check_of_a_good_folder_returns_its_number_of_classes(tmp_path):
    images = node("images", dir=str(make_images(tmp_path / "images")))
    assert file_checks.check_image_folder(images, images) == {"num_classes": 2}
    for images.num_classes in (2, 3):
        assert file_checks.check_image_folder(images, images) is None


def test_a_hash_splits_images_and_each_stays_in_its_split(tmp_path):
    folder = make_images(tmp_path / "images", num=100)
    _, before, _ = image_files.list_images(str(folder))
    listed = [file for samples in before.values() for file, _ in samples]
    assert len(listed) == len(set(listed)) == 200
    shares = {split: len(samples) / len(listed) for split, samples in before.items()}
    assert shares == pytest.approx({"train": 0.8, "val": 0.1, "test": 0.1}, abs=0.05)
    cats = {int(Path(file).stem) for file, label in before["val"] if label == 0}
    assert cats == {30, 33, 34, 40, 56, 58, 81, 95}  # in every process, on every machine
    for i in range(20):
        Image.new("RGB", (4, 4)).save(folder / "cat" / f"0 new {i}.png")
    _, after, _ = image_files.list_images(str(folder))
    assert all(set(before[split]) <= set(after[split]) for split in before)


def test_folders_per_split_are_used_as_they_are(tmp_path):
    for split, num in (("train", 6), ("val", 3)):
        make_images(tmp_path / split, num=num)
    classes, splits, _ = image_files.list_images(str(tmp_path))
    assert classes == ["cat", "dog"]
    assert len(splits["train"]) == 12
    assert splits["val"] == splits["test"]
    assert {os.path.basename(os.path.dirname(file)) for file, label in splits["val"] if label == 1} == {"dog"}
    make_images(tmp_path / "test", classes=("cat", "horse"), num=1)
    with pytest.raises(ConfigError, match="dog, horse"):
        image_files.list_images(str(tmp_path))


def test_files_that_are_ignored_in_a_folder_of_images_are_named(tmp_path, capsys):
    folder = make_images(tmp_path / "images")
    assert image_files.list_images(str(folder))[2] == ""
    (folder / "cat" / "more").mkdir()
    for name in ("cat/1.bmp", "dog/2.BMP", "dog/notes", "cat/.hidden"):
        (folder / name).write_bytes(b"")
    images = node("images", dir=str(folder), global_batch_size=1)
    file_checks.check_image_folder(images, images)
    note = "2 files that end in .bmp, folders in a class's folder, files without a suffix are ignored; images are .jpg,"
    assert note in capsys.readouterr().err
    for split in ("train", "val"):
        make_images(tmp_path / "splits" / split, num=3)
    make_images(tmp_path / "splits" / "testing", num=3)
    assert "the folder testing/" in image_files.list_images(str(tmp_path / "splits"))[2]


def test_folders_that_cannot_be_trained_on_are_rejected(tmp_path):
    def message(**values):
        return rejected(file_checks.check_image_folder, "images", **({"dir": str(tmp_path)} | values))

    assert "must be an existing folder; got" in message(dir=str(tmp_path / "no"))
    assert "one folder of images per class" in message()
    (tmp_path / "cat").mkdir()
    assert f"data.dir={tmp_path / 'cat'}" in message()
    (tmp_path / "cat" / "notes.txt").touch()
    (tmp_path / "cat" / "._0.jpg").touch()
    assert "this one has none" in message()
    assert "must be a folder; got" in message(dir=str(tmp_path / "cat" / "notes.txt"))
    Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "0.png")
    assert "there are none for" in message()
    make_images(tmp_path / "many", classes=("a", "b", "c"))
    too_few = "must be at least the number of classes in the data (3); got 2"
    assert too_few in message(dir=str(tmp_path / "many"), num_classes=2)
    assert "samples; got 999" in message(dir=str(tmp_path / "many"), global_batch_size=999)


@pytest.mark.parametrize("damage", ["truncated png", "truncated jpeg", "empty", "text"])
def test_an_unreadable_image_is_named_by_the_check_and_while_reading(tmp_path, damage):
    folder = make_images(tmp_path / "images")
    bad = folder / "dog" / ("1.png" if damage != "truncated jpeg" else "2.JPG")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(bad)
    if damage in ("empty", "text"):
        bad.write_text(damage if damage == "text" else "")
    else:
        truncate(bad)
    images = node("images", dir=str(folder))
    with pytest.raises(ConfigError) as caught:
        file_checks.check_image_folder(images, images)
    assert (caught.value.key, caught.value.value) == ("data.dir", str(bad))
    for num_workers in (0, 1):
        data = built("images", dir=str(folder), image_size=8, num_workers=num_workers, global_batch_size=1)
        assert rejected_while_reading(data) == ("data.dir", str(bad), caught.value.fix)


def test_links_that_lead_nowhere_are_named(tmp_path):
    folder = make_images(tmp_path / "images")
    (folder / "dog" / "loop.png").symlink_to("loop.png")
    assert str(folder / "dog" / "loop.png") in rejected(file_checks.check_image_folder, "images", dir=str(folder))
    (folder / "dog" / "loop.png").unlink()
    for target, rule in (("itself", "remove this link"), (".", "this one has none")):
        (folder / "itself").symlink_to(target)
        words = rejected(file_checks.check_image_folder, "images", dir=str(folder))
        assert f"data.dir={folder / 'itself'}" in words and rule in words
        (folder / "itself").unlink()


def test_a_file_counts_once_also_through_links(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / os.fsdecode(b"caf\xe9 \xff.txt")).write_text("some text")
    (folder / "текст.txt").write_text("another text")
    (folder / "around").symlink_to(folder)  # a cycle, which a glob with ** follows forty times
    for pattern in (f"{folder}/**/*.txt", str(folder)):
        listed, _ = text_files.list_text_files(pattern)
        assert sorted(map(os.path.basename, listed)) == sorted(name for name in os.listdir(folder) if name != "around")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("text elsewhere")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    assert f"{folder}/linked/a.txt" in text_files.list_text_files(str(folder))[0]
    (folder / "linked").unlink()
    (tmp_path / "link").symlink_to(folder / "текст.txt")
    with pytest.raises(ConfigError, match="validation must not see what is trained on"):
        text_files.list_text_files(str(folder), str(tmp_path / "link"))
    for rejected_files in ([str(folder / "текст.txt")] * 2, str(tmp_path / "more.txt.GZ")):
        (tmp_path / "more.txt.GZ").write_bytes(b"x")
        with pytest.raises(ConfigError, match=r"cannot name a file twice|must be text"):
            text_files.list_text_files(rejected_files)
    (folder / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"levels of symbolic links"):
        text_files.list_text_files(str(folder))


def test_file_names_that_are_not_utf_8_are_split_as_bytes(tmp_path):
    for i in range(40):
        (tmp_path / os.fsdecode(f"{i} ".encode() + b"\xff\xfe")).write_bytes(b"0123456789" * 30)
    data = built("text", files=str(tmp_path), block_size=8)
    splits = [data.dataset(split).files for split in ("train", "val", "test")]
    assert [len(names) for names in splits] == [36, 2, 2]


def test_there_is_one_worker_less_than_cores(tmp_path, monkeypatch):
    from hpc.launch import placement

    for cores, workers in ((8, 7), (2, 1), (1, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert built("images", dir="unused")._num_workers() == workers
        assert built("images", dir="unused", num_workers=3)._num_workers() == 3
        assert built("text", files="unused")._num_workers() == 0
    data = built("images", dir="unused")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    data.trainer = SimpleNamespace(num_devices=4)
    assert data._num_workers() == 7  # all ranks of a node share its cores, ...
    srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert (
        placement.num_usable_cores(4, srun | {"SLURM_CPUS_PER_TASK": "16"}) == 16
    )  # ... unless srun says what each may have
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert placement.num_usable_cores(4, srun | {"SLURM_CPUS_PER_TASK": "16"}) == 4


def test_mixed_images_become_normalised_colour_batches(tmp_path):
    from my_research.data.images import MEAN, STD

    data = built("images", dir=str(make_images(tmp_path / "images")), image_size=16, num_workers=0)
    for inputs, targets in read_all(data):
        assert inputs.shape[1:] == (3, 16, 16)
        pixels = inputs.mean((2, 3)) * inputs.new_tensor(STD) + inputs.new_tensor(MEAN)
        is_real = targets >= 0
        assert (pixels * 255 - (60 + 50 * targets[:, None]))[is_real].abs().max() < 5


def test_the_centre_is_kept_upright_and_16_bit_grey_is_scaled(tmp_path):
    from hpc.data.image_datasets import ImageFiles

    wide, half = np.zeros((10, 30), np.uint8), np.zeros((10, 10), np.uint8)
    wide[:, 10:20] = half[:5] = 200
    deep = np.full((10, 10), 200 << 8, np.uint16)
    for name, pixels in (("wide", wide), ("deep", deep), ("half", half)):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    images = ImageFiles([(str(tmp_path / f"{name}.png"), 3) for name in ("wide", "deep", "half")], 10)
    for image, label in (images[0], images[1]):
        assert label == 3
        assert image.shape == (3, 10, 10)
        assert image.unique().tolist() == [200]
    assert (images[2][0][:, :5] == 200).all()
    assert (images[2][0][:, 5:] == 0).all()


def test_image_augmentation_crops_as_the_draws_say():
    import torch

    data = built("images", dir="unused", smallest_crop=1 / 16)
    image = torch.arange(8.0).expand(1, 3, 8, 8)
    whole = torch.tensor([[1, 0.5, 0.5, 0.5, 0.9]])
    torch.testing.assert_close(data.augment(image, whole), image, atol=1e-4, rtol=0)
    mirrored = torch.tensor([[1, 0.5, 0.5, 0.5, 0.1]])
    torch.testing.assert_close(data.augment(image, mirrored), image.flip(-1), atol=1e-4, rtol=0)
    right_quarter = data.augment(image, torch.tensor([[0, 0.5, 1, 0.5, 0.9]]))
    assert right_quarter[..., :-1].min() > 5.5


@pytest.mark.parametrize("name", ["digits", "images"])
def test_augmentation_belongs_to_the_sample_and_not_to_its_batch(name):
    import torch

    from hpc.state.randomness import uniform_per_sample

    data = built(name, **({"dir": "unused"} if name == "images" else {}))
    images = torch.rand(12, 1 if name == "digits" else 3, 8, 8, generator=torch.Generator().manual_seed(0))
    draws = uniform_per_sample(1, 0, indices=torch.arange(12), num=data.num_draws)
    together = data.augment(images, draws)
    alone = torch.cat([data.augment(images[i : i + 1], draws[i : i + 1]) for i in range(12)])
    assert torch.equal(together, alone)
    assert (together - images).abs().mean() > 0.01


# Random numbers that a dataset draws by itself


class Draws:
    """A dataset that augments in `__getitem__`, as in torch's own examples."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        import torch

        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]), index


class DrawsAtOnce(Draws):
    def __getitems__(self, indices):
        import torch

        samples = [self[index] for index in indices]
        return torch.stack([sample for sample, _ in samples]), torch.tensor(indices)


class DrawsByItself(Draws):
    """A dataset with a generator of its own, which each sample moves on."""

    def __init__(self):
        self.rng = np.random.default_rng(1)

    def __getitem__(self, index):
        import torch

        return torch.from_numpy(self.rng.random(3)), index


def drawn(dataset, epoch=0, start=0, num_workers=0, num_ranks=1, seed=1):
    """Return the three numbers that each sample of an epoch drew, by sample index."""
    from hpc.data.data_module import DataModule

    data = DataModule(global_batch_size=4, seed=seed, num_workers=num_workers)
    data.dataset = lambda split: dataset
    numbers_of = {}
    for rank in range(num_ranks):
        data._data_rank = lambda rank=rank: {"rank": rank, "num_ranks": num_ranks}
        loader = data.train_dataloader()
        loader.sampler.go_to(epoch, start)
        for numbers, _, indices in loader:
            numbers_of |= dict(zip(indices.tolist(), numbers.tolist(), strict=True))
    return numbers_of


def test_random_numbers_of_a_dataset_depend_on_sample_and_epoch():
    first = drawn(Draws())
    assert len(first) == 12 and len({number for numbers in first.values() for number in numbers}) == 36
    assert first == drawn(Draws(), num_workers=2) == drawn(Draws(), num_ranks=2)
    for other in (drawn(Draws(), epoch=1), drawn(Draws(), seed=2)):
        assert not {tuple(numbers) for numbers in first.values()} & {tuple(numbers) for numbers in other.values()}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "dataset", [Draws(), DrawsAtOnce(), DrawsByItself()], ids=["one by one", "at once", "by itself"]
)
def test_a_resumed_run_draws_the_same_numbers(dataset, num_workers):
    whole, rest = drawn(dataset, epoch=3), drawn(dataset, epoch=3, start=1, num_workers=num_workers)
    assert rest == {index: numbers for index, numbers in whole.items() if index in rest} and len(rest) == 8


def test_draws_of_a_dataset_leave_the_generators_of_the_run_alone():
    import torch

    from hpc.data.fetching import IndexedDataset
    from hpc.data.sample_order import EpochIndex

    def next_numbers():
        return random.random(), np.random.rand(), torch.rand(()).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = next_numbers()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    IndexedDataset(Draws(), seed=1)[EpochIndex(np.array([3, 4]), 0, 0)]
    assert next_numbers() == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_draws_no_random_number_of_the_run(workers):
    """Check that a new iterator leaves the random state alone.

    A resumed run creates iterators at other times than an uninterrupted run.
    """
    import torch

    from my_research.data.digits import Digits

    loader = Digits(global_batch_size=64, num_workers=workers).train_dataloader()
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


# Digits


def test_digits_are_those_of_scikit_learn():
    from my_research.data.digits import read_digits

    pixels, digits = read_digits()
    assert (pixels.shape, pixels.dtype, digits.shape, digits.dtype) == ((1797, 64), float, (1797,), int)
    # The checksum is that of scikit-learn's digits.csv.gz, as integers of one byte: a row has the pixels and the digit.
    rows = np.column_stack([pixels, digits]).astype(np.uint8)
    assert (
        hashlib.sha256(rows.tobytes()).hexdigest() == "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"
    )


def test_digits_are_in_one_split_each_and_evenly():
    from my_research.data.digits import read_digits, split_indices

    _, digits = read_digits()
    splits = [split_indices(split, digits) for split in ("train", "val", "test")]
    assert sorted(np.concatenate(splits)) == list(range(len(digits)))
    for indices, tenths in zip(splits, (7, 1, 2), strict=True):
        counts = np.bincount(digits[indices], minlength=10)
        assert abs(counts - np.bincount(digits) * tenths / 10).max() < 3


def test_digits_arrive_at_unit_scale_and_light_augmentation_keeps_them_alike():
    import torch

    data = built("digits", global_batch_size=1257)
    inputs, targets, indices = next(iter(data.train_dataloader()))
    prepared = data.prepare_inputs(inputs)
    assert prepared.shape == (1257, 1, 8, 8)
    assert prepared.mean().abs() < 0.02
    assert abs(prepared.std() - 1) < 0.02
    still = torch.full((1257, data.num_draws), 0.5)
    torch.testing.assert_close(data.augment(inputs, still), inputs, atol=1e-5, rtol=0)
    moved = data.augment(inputs, torch.rand(1257, data.num_draws, generator=torch.Generator().manual_seed(0)))
    assert torch.nn.functional.cosine_similarity(moved.flatten(1), inputs.flatten(1)).mean() > 0.85
    assert len(targets) == len(indices.unique())


def test_training_augments_in_the_precision_of_the_run_and_evaluation_pads_nothing():
    import torch
    from lightning.pytorch.plugins.precision import HalfPrecision, Precision

    data = built("digits", global_batch_size=64)
    evaluated = [data.on_after_batch_transfer(batch, 0) for batch in data.val_dataloader()]
    batch = next(iter(data.val_dataloader()))
    data.trainer = SimpleNamespace(training=False, current_epoch=0, precision_plugin=Precision())
    assert torch.equal(data.on_after_batch_transfer(batch, 0)[0], evaluated[0][0])  # not augmented
    data.trainer = None
    targets = torch.cat([targets for _, targets in evaluated])
    assert torch.equal(targets, data.dataset("val").tensors[1])
    batch = next(iter(data.train_dataloader()))
    data.trainer = SimpleNamespace(training=True, current_epoch=0, precision_plugin=HalfPrecision("bf16-true"))
    first, _ = data.on_after_batch_transfer(batch, 0)
    data.trainer.current_epoch = 1
    second, _ = data.on_after_batch_transfer(batch, 0)
    assert first.dtype == torch.bfloat16
    assert not torch.equal(first, second)
