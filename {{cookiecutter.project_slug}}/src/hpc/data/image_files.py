"""Folders of images: listed, split into training, validation and test, decoded. Imports no torch."""

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

# Pillow only warns of an image beyond its limit, up to twice of it; `decode` rejects it.
warnings.filterwarnings("ignore", "Image size .* exceeds limit")

SUFFIXES = (".jpg", ".jpeg", ".png")
SPLITS = ("train", "val", "test")
SIZED = 20_000  # files whose sizes are asked for: seconds on a parallel file system

Samples = list[tuple[str, int]]  # (file, class number)


def list_images(folder: str | None) -> tuple[list[str], dict[str, Samples], str]:
    """Class names in order, the samples of "train", "val" and "test", and what to tell of what is left out, if any.

    The folder holds `<class>/*.{jpg,jpeg,png}`: a hash of `<class>/<name>` deals them out 80/10/10, so that an image
    stays where it is when others are added. Or `{train,val,test}/<class>/*`, where "test" is "val" when it is missing.

    Raises:
        ConfigError: no such folder, no class folders, a class or a split without images, or other classes in a split.
    """
    folder = os.path.expanduser(folder or "")
    if not os.path.isdir(folder):
        rule = "is a folder" if os.path.exists(folder) else "is a folder; there is none of this name"
        raise ConfigError("data.dir", folder, rule, "data.dir=<a folder that holds one folder of images per class>")
    if not _subfolders(os.path.join(folder, "train")):
        classes, samples, others = _list_classes(folder)
        splits = {split: [one for one in samples if _dealt(one[0], folder) == split] for split in SPLITS}
    else:
        classes, splits, others = _list_splits(folder)
    for split, samples in splits.items():
        if not samples:
            rule = f"has images for train, val and test; there are none for {split}"
            raise ConfigError("data.dir", folder, rule, f"more images, or say which: {folder}/{split}/<class>/<image>")
    return classes, splits, _told(folder, others)


def describe(folder: str, samples: Samples) -> dict[str, Any]:
    """By what images are known again, in a copy of the folder, too: names of classes and files, and sizes of some."""
    root, digest = os.path.expanduser(folder), hashlib.sha256()
    for file, label in samples:
        digest.update(b"%d %s\n" % (label, os.fsencode(os.path.relpath(file, root))))
    num = min(len(samples), SIZED)
    some = [samples[i * len(samples) // num][0] for i in range(num)]
    with ThreadPoolExecutor(8) as pool:
        digest.update(repr(list(pool.map(os.path.getsize, some))).encode())
    classes = dict.fromkeys(os.path.basename(os.path.dirname(file)) for file, _ in samples)
    return {"classes": list(classes), "files": digest.hexdigest()[:16]}


def decode(file: str, size: int = 1) -> "Image":
    """An image as 8-bit RGB. A JPEG may come out smaller than it is stored, though no side below `size` pixels.

    Raises:
        ConfigError: it cannot be read whole, or has more pixels than Pillow's limit.
    """
    import numpy as np
    from PIL import Image

    try:
        with open_regular_file(file) as stream, Image.open(stream) as image:
            if Image.MAX_IMAGE_PIXELS and image.width * image.height > Image.MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} x {image.height}")
            image.draft(image.mode, (size, size))
            if image.mode.startswith("I"):  # 16-bit grey, of which convert() would make white
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            return image.convert("RGB")
    except Image.DecompressionBombError as error:  # it would fill the memory, and some that claim so are no images
        rule = f"an image has up to {Image.MAX_IMAGE_PIXELS} pixels; this one claims more: {error}"
        raise ConfigError("data.dir", file, rule, "make it smaller, or remove this file") from None
    except Exception as error:  # what decoders raise on broken input is not documented
        rule = f"every image can be decoded; this one cannot: {error}"
        raise ConfigError("data.dir", file, rule, "remove this file, or write it again as JPEG or PNG") from None


def fitted(file: str, size: int) -> "np.ndarray":
    """An image as training sees it, uint8 (3, size, size): the shorter side resized, the rest cropped.

    Raises:
        ConfigError: as `decode`.
    """
    import numpy as np
    from PIL import Image, ImageOps

    image = ImageOps.fit(decode(file, size), (size, size), Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def reject_few_classes(num_classes: int, found: int) -> None:
    """A class number beyond the network's outputs would stop the run in the middle, on a GPU without a message."""
    if num_classes < found:
        raise ConfigError("data.num_classes", num_classes, f"data.dir holds {found} classes", "data.num_classes=null")


def _list_splits(folder: str) -> tuple[list[str], dict[str, Samples], Counter[str]]:
    found = [split for split in SPLITS if os.path.isdir(os.path.join(folder, split))]
    listed = {split: _list_classes(os.path.join(folder, split)) for split in found}
    classes = listed["train"][0]
    others = Counter(f"the folder {name}/" for name in _subfolders(folder) if name not in SPLITS)
    for split, (its_classes, _, more) in listed.items():
        others.update(more)
        if odd := sorted(set(its_classes) ^ set(classes)):
            rule = f"train/ and {split}/ hold the same class folders; only one of them has {', '.join(odd[:5])}"
            raise ConfigError("data.dir", folder, rule, "add the missing folders, or remove the others")
    splits = {split: listed[split][1] if split in listed else [] for split in SPLITS}
    return classes, splits if "test" in listed else splits | {"test": splits["val"]}, others


def _list_classes(folder: str) -> tuple[list[str], Samples, Counter[str]]:
    """Classes, samples, and how much there is of what else."""
    classes = _subfolders(folder)
    if not classes:
        fix = "sort the images into one folder per class"
        raise ConfigError("data.dir", folder, "holds one folder per class; it has no folders", fix)
    samples: Samples = []
    others: Counter[str] = Counter()
    for label, name in enumerate(classes):
        below = _entries(os.path.join(folder, name))
        files = sorted(entry.path for entry in below if entry.name.lower().endswith(SUFFIXES))
        others.update(_kind(entry) for entry in below if not entry.name.lower().endswith(SUFFIXES))
        if not files:
            rule = f"every class folder holds images ({', '.join(SUFFIXES)}); this one has none"
            raise ConfigError("data.dir", os.path.join(folder, name), rule, "remove the folder, or add images")
        samples += [(file, label) for file in files]
    return classes, samples, others


def _kind(entry: "os.DirEntry[str]") -> str:
    suffix = os.path.splitext(entry.name)[1].lower()
    if os.path.isdir(entry.path):
        return "folders in a class's folder"
    return f"files of {suffix or 'no suffix'}"


def _told(folder: str, others: Counter[str]) -> str:
    if not others:
        return ""
    what = ", ".join(f"{number} {kind}" if number > 1 else kind for kind, number in others.most_common(5))
    return f"{folder}: left out are {what}; an image is {', '.join(SUFFIXES)}, in the folder of its class"


def _subfolders(folder: str) -> list[str]:
    found = []
    for entry in _entries(folder) if os.path.isdir(folder) else []:
        try:
            found += [entry.name] if entry.is_dir() else []
        except OSError as error:  # a link that leads to itself, say
            raise ConfigError(
                "data.dir", entry.path, f"leads somewhere; {error.strerror}", "remove this link"
            ) from None
    return sorted(found)


def _entries(folder: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise ConfigError("data.dir", folder, f"can be listed; {error.strerror}", f"chmod +rx {folder}") from None


def _dealt(file: str, folder: str) -> str:
    digest = hashlib.sha256(os.fsencode(os.path.relpath(file, folder))).digest()  # a name need not be UTF-8
    return {8: "val", 9: "test"}.get(int.from_bytes(digest[:8]) % 10, "train")
