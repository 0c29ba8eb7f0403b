"""Train a ResNet-50 in a fast hand-written loop, in one file: python benchmarks/plain_resnet.py [--options]

It trains on one batch of random images on the device, so loading data costs nothing.
"""

import argparse
import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from turns import wait_for_turn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        straight = stride == 1 and channels == out
        projection = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity() if straight else projection

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet50(classes: int) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    channels = 64
    for stage, (depth, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True)):
        for i in range(depth):
            layers.append(Bottleneck(channels, width, 2 if stage and not i else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    net = resnet50(1000).to(DEVICE, memory_format=torch.channels_last)
    matrices = [weight for weight in net.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in net.parameters() if weight.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 500))

    def forward(images: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(net(images), targets)

    step = torch.compile(forward) if arguments.compile else forward
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=DEVICE)
    images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.randint(0, 1000, (arguments.batch,), device=DEVICE)
    board, number = SummaryWriter(tempfile.mkdtemp()), 0
    for number in tqdm(range(10**9), mininterval=1.0):
        wait_for_turn()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            loss = step(images, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if number % 50 == 49:
            board.add_scalar("loss", loss.item(), number)


if __name__ == "__main__":
    main()
