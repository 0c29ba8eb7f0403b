"""Data: what is refused on the login node (without torch), and what reaches the network."""

import io
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

from {{ cookiecutter.package_name }}.data import files, image_files, text_files
from {{ cookiecutter.package_name }}.hpc.config import PACKAGE, PROJECT, Refused


def node(name, **values):
    """A data node as shipped, with a few values of this test."""
    shipped = OmegaConf.load(PROJECT / "configs" / "data" / f"{name}.yaml")
    return OmegaConf.merge(shipped, {"seed": 1, "global_batch_size": 2, **values})


def built(name, **values):
    from {{ cookiecutter.package_name }}.hpc.config import build

    return build(node(name, **values))


def make_images(folder, classes=("cat", "dog"), num=40, size=(20, 30)):
    """PNG and JPEG, colour and grey, of several sizes."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(num):
            pixels = np.full((size[0] + i % 3, size[1] - i % 5, 3), 60 + 100 * label, np.uint8)
            image = Image.fromarray(pixels)
            image = image.convert("L") if i % 4 == 0 else image
            image.save(folder / name / f"{i}.{'png' if i % 2 else 'JPG'}", format="png" if i % 2 else "jpeg")
    return folder


def truncate(file):
    file.write_bytes(file.read_bytes()[: -file.stat().st_size // 2])


# Images


def test_checks_need_no_torch():
    code = f"import sys, {PACKAGE}.data.files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(PROJECT / "src")}).returncode == 0


def test_a_good_folder_tells_its_number_of_classes(tmp_path):
    images = node("images", dir=str(make_images(tmp_path / "images")))
    assert files.image_folder(images, images) == {"num_classes": 2}
    images.num_classes = 3
    assert files.image_folder(images, images) is None


def test_a_hash_splits_and_an_image_stays_where_it_is(tmp_path):
    folder = make_images(tmp_path / "images", num=100)
    _, before = image_files.list_images(str(folder))
    listed = [file for samples in before.values() for file, _ in samples]
    assert len(listed) == len(set(listed)) == 200
    assert {split: round(len(samples), -1) // 20 for split, samples in before.items()} == {"train": 8, "val": 1, "test": 1}
    make_images(folder / "more", num=10)
    for name in ("cat", "dog"):
        for file in (folder / "more" / name).iterdir():
            file.rename(folder / name / f"new{file.name}")
        (folder / "more" / name).rmdir()
    (folder / "more").rmdir()
    _, after = image_files.list_images(str(folder))
    assert all(set(before[split]) < set(after[split]) or split != "train" for split in before)
    assert all(set(before[split]) <= set(after[split]) for split in before)


def test_folders_of_splits_are_taken_as_they_are(tmp_path):
    for split, num in (("train", 6), ("val", 3)):
        make_images(tmp_path / split, num=num)
    classes, splits = image_files.list_images(str(tmp_path))
    assert classes == ["cat", "dog"]
    assert len(splits["train"]) == 12
    assert splits["val"] == splits["test"]
    assert {os.path.basename(os.path.dirname(file)) for file, label in splits["val"] if label == 1} == {"dog"}
    make_images(tmp_path / "test", classes=("cat", "horse"), num=1)
    with pytest.raises(Refused, match="dog, horse"):
        image_files.list_images(str(tmp_path))


def test_folders_that_cannot_be_meant_are_refused(tmp_path):
    def refused(**values):
        images = node("images", **({"dir": str(tmp_path)} | values))
        with pytest.raises(Refused) as caught:
            files.image_folder(images, images)
        return str(caught.value)

    assert "none of this name" in refused(dir=str(tmp_path / "no"))
    assert "one folder per class" in refused()
    (tmp_path / "cat").mkdir()
    assert f"data.dir={tmp_path / 'cat'}" in refused()
    (tmp_path / "cat" / "notes.txt").touch()
    (tmp_path / "cat" / "._0.jpg").touch()
    assert "this one has none" in refused()
    assert "is a folder" in refused(dir=str(tmp_path / "cat" / "notes.txt"))
    Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "0.png")
    assert "there are none for" in refused()
    make_images(tmp_path / "many", classes=("a", "b", "c"))
    assert "data.num_classes=2" in refused(dir=str(tmp_path / "many"), num_classes=2)
    assert "data.global_batch_size=999" in refused(dir=str(tmp_path / "many"), global_batch_size=999)


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
    with pytest.raises(Refused) as caught:
        files.image_folder(images, images)
    assert (caught.value.key, caught.value.value) == ("data.dir", str(bad))
    for num_workers in (0, 1):
        with pytest.raises(Refused) as again:
            read_all(built("images", dir=str(folder), image_size=8, num_workers=num_workers, global_batch_size=1))
        assert (again.value.key, again.value.value, again.value.fix) == ("data.dir", str(bad), caught.value.fix)


def read_all(data):
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    return [data.on_after_batch_transfer(batch, 0) for loader in loaders for batch in loader]


def test_mixed_images_become_normalised_colour_batches(tmp_path):
    for inputs, targets in read_all(built("images", dir=str(make_images(tmp_path / "images")), image_size=16, num_workers=0)):
        assert inputs.shape[1:] == (3, 16, 16)
        grey = inputs.new_tensor([60 + 100 * int(target) for target in targets.clamp(min=0)]) / 255
        known = targets >= 0
        pixels = inputs.mean((2, 3)) * inputs.new_tensor([0.229, 0.224, 0.225]) + inputs.new_tensor([0.485, 0.456, 0.406])
        assert (pixels - grey[:, None])[known].abs().max() < 0.02


def test_the_centre_is_kept_and_16_bit_grey_is_scaled(tmp_path):
    from {{ cookiecutter.package_name }}.data.images import ImageFiles

    wide = np.zeros((10, 30), np.uint8)
    wide[:, 10:20] = 200
    Image.fromarray(wide).save(tmp_path / "wide.png")
    Image.fromarray(np.full((10, 10), 200 << 8, np.uint16)).save(tmp_path / "deep.png")
    for image, label in ImageFiles([(str(tmp_path / "wide.png"), 3), (str(tmp_path / "deep.png"), 3)], 10):
        assert label == 3
        assert image.shape == (3, 10, 10)
        assert image.unique().tolist() == [200]
