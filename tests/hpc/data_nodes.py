"""Data nodes of the project's configs, built or rejected, and the files that they name."""

import numpy as np
import pytest
import typed_fixes
from omegaconf import OmegaConf
from PIL import Image

from hpc.config.build import build
from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT


def node(name, **values):
    """Return a data node as shipped, with a few values of this test."""
    shipped = OmegaConf.load(PROJECT / "configs" / "data" / f"{name}.yaml")
    resolved = {"seed": 1, "node_local": None}  # what refers to other sections
    used = {key: value for key, value in resolved.items() if key in shipped}
    return OmegaConf.merge(shipped, {"global_batch_size": 2, **used, **values})


def rejected(check, name, **values):
    """Return the message with which a check rejects a data node, and type what it says."""

    def check_typed(words):
        keys = [word.removeprefix("data.").replace("cluster.node_local", "node_local") for word in words]
        typed = OmegaConf.from_dotlist(keys)
        data = OmegaConf.merge(node(name, **values), typed)
        check(data, data)

    with pytest.raises(ConfigError) as caught:
        check_typed([])
    typed_fixes.follow(check_typed, [], caught.value)
    return str(caught.value)


def built(name, **values):
    return build(node(name, **values))


def read_all(data):
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    return [data.on_after_batch_transfer(batch, 0) for loader in loaders for batch in loader]


def rejected_while_reading(data):
    """Return parts of the error, and not the exception: it would keep the workers alive."""
    try:
        read_all(data)
    except ConfigError as error:
        return error.key, error.value, error.fix


def make_images(folder, classes=("cat", "dog"), num=40, size=(20, 30)):
    """Write PNG and JPEG files, in colour and grey, of several sizes; return their folder."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(num):
            pixels = np.full((size[0] + i % 3, size[1] - i % 5, 3), 60 + 50 * label, np.uint8)
            image = Image.fromarray(pixels)
            image = image.convert("L") if i % 4 == 0 else image
            image.save(folder / name / f"{i}.{'png' if i % 2 else 'JPG'}", format="png" if i % 2 else "jpeg")
    return folder
