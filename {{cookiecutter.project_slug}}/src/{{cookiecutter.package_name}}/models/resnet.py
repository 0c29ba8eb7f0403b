"""ResNet (He et al., 2015), for 8x8 digits as well as for 224x224 photographs."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResNet(nn.Module):
    """Map images (batch, in_channels, image_size, image_size) to logits (batch, num_classes).

    Args:
        depths: number of residual blocks per stage; each stage after the first halves the resolution.
        widths: channels of the 3x3 convolutions per stage.
        image_size: pixels; only `example_input` needs it.
        bottleneck: use blocks of three convolutions with four times as many output channels (ResNet-50 and deeper).
        norm: "group" normalizes each sample by itself, so results do not depend on the number of devices; "batch" is
            the original, whose results do.
        large_images: use a 7x7 stem with stride 2 and pooling, for images of about 100 pixels and more.
    """

    def __init__(
        self,
        depths: list[int],
        widths: list[int],
        num_classes: int,
        *,
        in_channels: int = 3,
        image_size: int = 224,
        bottleneck: bool = False,
        norm: str = "group",
        large_images: bool = True,
    ) -> None:
        super().__init__()
        self.in_channels, self.image_size = in_channels, image_size
        make_norm = {"group": group_norm, "batch": nn.BatchNorm2d}[norm]
        make_block = partial(Bottleneck if bottleneck else BasicBlock, make_norm=make_norm)
        kernel, stride = (7, 2) if large_images else (3, 1)
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, widths[0], kernel, stride, kernel // 2, bias=False),
            make_norm(widths[0]),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1) if large_images else nn.Identity(),
        )
        self.blocks = nn.ModuleList()  # hpc finds parts by name: it shards, compiles, recomputes `blocks`
        channels = widths[0]
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for i in range(depth):
                block = make_block(channels, width, stride=2 if stage > 0 and i == 0 else 1)
                self.blocks.append(block)
                channels = block.out_channels
        self.head = nn.Linear(channels, num_classes)  # fine-tuning trains only `head` at first
        self.apply(init_weights)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))

    def example_input(self, batch_size: int) -> Tensor:
        """Return blank images: for plan.py and for tests."""
        return torch.zeros(batch_size, self.in_channels, self.image_size, self.image_size)


class BasicBlock(nn.Module):
    """A residual block of two 3x3 convolutions (ResNet-18 and -34)."""

    def __init__(self, channels: int, width: int, stride: int, make_norm: type[nn.Module]) -> None:
        super().__init__()
        self.out_channels = width
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1 = make_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = make_norm(width)
        self.shortcut = make_shortcut(channels, width, stride, make_norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """A residual block of 1x1, 3x3 and 1x1 convolutions, with the stride in the 3x3 ("v1.5"; ResNet-50 and deeper)."""

    def __init__(self, channels: int, width: int, stride: int, make_norm: type[nn.Module]) -> None:
        super().__init__()
        self.out_channels = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = make_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = make_norm(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = make_norm(4 * width)
        self.shortcut = make_shortcut(channels, 4 * width, stride, make_norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + self.shortcut(x))


def make_shortcut(channels: int, out_channels: int, stride: int, make_norm: type[nn.Module]) -> nn.Module:
    """Return the identity if a block keeps the shape, else a 1x1 convolution."""
    if stride == 1 and channels == out_channels:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, out_channels, 1, stride, bias=False), make_norm(out_channels))


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a group norm with groups of at least 8 channels, and at most 32 groups (Wu and He, 2018)."""
    # check_resnet in checks.py repeats this formula.
    return nn.GroupNorm(min(32, max(1, channels // 8)), channels)


def init_weights(module: nn.Module) -> None:
    """Initialize convolutions as He et al. (2015), and the last norm of each block to zero (Goyal et al., 2017)."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, BasicBlock | Bottleneck):
        last = module.norm2 if isinstance(module, BasicBlock) else module.norm3
        nn.init.zeros_(last.get_parameter("weight"))
