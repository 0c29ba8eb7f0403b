"""Folders of images: listed, split into training, validation and test, decoded. No torch here."""

import hashlib
import os
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hpc.config.errors import ConfigError
from hpc.system.files import open_regular_file

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

# Pillow raises an error only above twice its limit, and warns below that; `decode_image` rejects both.
warnings.filterwarnings("ignore", "Image size .* exceeds limit")

SUFFIXES = (".jpg", ".jpeg", ".png")
SPLITS = ("train", "val", "test")
MAX_FILES_TO_MEASURE = 20_000  # files whose sizes are read: takes seconds on a parallel file system

Samples = list[tuple[str, int]]  # (file, class number)


def list_images(folder: str | None) -> tuple[list[str], dict[str, Samples], str]:
    """Return class names in order, the samples of each split, and a sentence on what is ignored ("" if nothing is).

    The folder holds `<class>/*.{jpg,jpeg,png}`. A hash of `<class>/<name>` splits them 80/10/10 into "train", "val" and
    "test", so that an image stays in its split when others are added. Or the folder holds
    `{train,val,test}/<class>/*`; without test/, the split "test" has the samples of "val".

    Raises:
        ConfigError: no such folder, no class folders, a class or a split without images, or other classes in a split.
    """
    folder = os.path.expanduser(folder or "")
    if not os.path.isdir(folder):
        rule = "must be a folder" if os.path.exists(folder) else "must be an existing folder"
        raise ConfigError("data.dir", folder, rule, "data.dir=<a folder that holds one folder of images per class>")
    if not _subfolders(os.path.join(folder, "train")):
        classes, samples, ignored = _list_classes(folder)
        splits = {split: [sample for sample in samples if _split_of(sample[0], folder) == split] for split in SPLITS}
    else:
        classes, splits, ignored = _list_splits(folder)
    for split, samples in splits.items():
        if not samples:
            rule = f"The folder must have images for train, val and test; there are none for {split}"
            fix = f"add images, or choose those of a split yourself: {folder}/{split}/<class>/<image>"
            raise ConfigError("data.dir", folder, rule, fix)
    return classes, splits, _describe_ignored(folder, ignored)


def image_identity(folder: str, samples: Samples) -> dict[str, Any]:
    """Return class names, and a checksum of file names, labels and some sizes; a copy of the folder has the same."""
    root, digest = os.path.expanduser(folder), hashlib.sha256()
    for file, label in samples:
        digest.update(b"%d %s\n" % (label, os.fsencode(os.path.relpath(file, root))))
    num = min(len(samples), MAX_FILES_TO_MEASURE)
    sized_files = [samples[i * len(samples) // num][0] for i in range(num)]
    with ThreadPoolExecutor(8) as pool:
        digest.update(repr(list(pool.map(os.path.getsize, sized_files))).encode())
    classes = dict.fromkeys(os.path.basename(os.path.dirname(file)) for file, _ in samples)
    return {"classes": list(classes), "files": digest.hexdigest()[:16]}


def decode_image(file: str, size: int = 1) -> "Image":
    """Return an image as 8-bit RGB. A JPEG may be decoded at a lower resolution, with no side below `size` pixels.

    Raises:
        ConfigError: it cannot be read to its end, or has more pixels than Pillow's limit.
    """
    import numpy as np
    from PIL import Image

    try:
        with open_regular_file(file) as stream, Image.open(stream) as image:
            if Image.MAX_IMAGE_PIXELS and image.width * image.height > Image.MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} x {image.height}")
            image.draft(image.mode, (size, size))
            if image.mode.startswith("I"):  # 16-bit grey: convert() would make it white
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            return image.convert("RGB")
    except Image.DecompressionBombError as error:  # it would fill the memory; some such files are no images at all
        rule = f"The image must not have more than {Image.MAX_IMAGE_PIXELS} pixels, Pillow's limit: {error}"
        raise ConfigError("data.dir", file, rule, "make it smaller, or remove this file") from None
    except Exception as error:  # the errors of decoders on broken input are not documented
        rule = f"The image cannot be decoded: {error}"
        raise ConfigError("data.dir", file, rule, "remove this file, or write it again as JPEG or PNG") from None


def load_cropped(file: str, size: int) -> "np.ndarray":
    """Return an image as training gets it, uint8 (3, size, size): the shorter side resized, the rest cropped.

    Raises:
        ConfigError: see `decode_image`.
    """
    import numpy as np
    from PIL import Image, ImageOps

    image = ImageOps.fit(decode_image(file, size), (size, size), Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def reject_fewer_outputs_than_classes(num_classes: int, num_in_data: int) -> None:
    """Raise `ConfigError` if the network has fewer outputs than the data have classes.

    A class number beyond the outputs would stop the run in the middle; on a GPU, without a clear message.
    """
    if num_classes < num_in_data:
        rule = f"must be at least the number of classes in the data ({num_in_data})"
        raise ConfigError("data.num_classes", num_classes, rule, "data.num_classes=null")


def _list_splits(folder: str) -> tuple[list[str], dict[str, Samples], Counter[str]]:
    """Return classes, the samples of each split, and counts of what is ignored, of a folder with a folder per split."""
    names = [split for split in SPLITS if os.path.isdir(os.path.join(folder, split))]
    listed = {split: _list_classes(os.path.join(folder, split)) for split in names}
    classes = listed["train"][0]
    ignored = Counter(f"the folder {name}/" for name in _subfolders(folder) if name not in SPLITS)
    for split, (split_classes, _, split_ignored) in listed.items():
        ignored.update(split_ignored)
        if differing := sorted(set(split_classes) ^ set(classes)):
            rule = f"train/ and {split}/ must hold the same class folders; only one of them has "
            fix = "add the missing folders, or remove the others"
            raise ConfigError("data.dir", folder, rule + ", ".join(differing[:5]), fix)
    splits = {split: listed[split][1] if split in listed else [] for split in SPLITS}
    return classes, splits if "test" in listed else splits | {"test": splits["val"]}, ignored


def _list_classes(folder: str) -> tuple[list[str], Samples, Counter[str]]:
    """Return classes, samples, and counts of what is ignored, of a folder with a folder per class."""
    classes = _subfolders(folder)
    if not classes:
        rule = "The folder must hold one folder of images per class; it has no folders"
        raise ConfigError("data.dir", folder, rule, "sort the images into one folder per class")
    samples: Samples = []
    ignored: Counter[str] = Counter()
    for label, name in enumerate(classes):
        entries = _entries(os.path.join(folder, name))
        files = sorted(entry.path for entry in entries if entry.name.lower().endswith(SUFFIXES))
        ignored.update(_kind(entry) for entry in entries if not entry.name.lower().endswith(SUFFIXES))
        if not files:
            rule = f"Every class folder must hold images ({', '.join(SUFFIXES)}); this one has none"
            raise ConfigError("data.dir", os.path.join(folder, name), rule, "remove the folder, or add images")
        samples += [(file, label) for file in files]
    return classes, samples, ignored


def _kind(entry: "os.DirEntry[str]") -> str:
    suffix = os.path.splitext(entry.name)[1].lower()
    if os.path.isdir(entry.path):
        return "folders in a class's folder"
    return f"files that end in {suffix}" if suffix else "files without a suffix"


def _describe_ignored(folder: str, ignored: Counter[str]) -> str:
    if not ignored:
        return ""
    kinds = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in ignored.most_common(5))
    return f"{folder}: {kinds} are ignored; images are {', '.join(SUFFIXES)} files in the folder of their class"


def _subfolders(folder: str) -> list[str]:
    names = []
    for entry in _entries(folder) if os.path.isdir(folder) else []:
        try:
            names += [entry.name] if entry.is_dir() else []
        except OSError as error:  # e.g. a link that leads to itself
            rule = f"The link cannot be followed: {error.strerror}"
            raise ConfigError("data.dir", entry.path, rule, "remove this link") from None
    return sorted(names)


def _entries(folder: str) -> list["os.DirEntry[str]"]:
    """Return the entries of a folder that are not hidden."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        rule = f"The folder cannot be listed: {error.strerror}"
        raise ConfigError("data.dir", folder, rule, f"chmod +rx {folder}") from None


def _split_of(file: str, folder: str) -> str:
    digest = hashlib.sha256(os.fsencode(os.path.relpath(file, folder))).digest()  # a name need not be UTF-8
    return {8: "val", 9: "test"}.get(int.from_bytes(digest[:8]) % 10, "train")
