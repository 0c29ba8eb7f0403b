"""The same work in a hand-written loop: python benchmarks/plain_tiny.py"""

import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from turns import wait_for_turn


def main() -> None:
    torch.set_num_threads(1)
    inputs, targets = torch.randn(8000, 32), torch.randint(0, 32, (8000,))
    network = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    writer, step = SummaryWriter(tempfile.mkdtemp()), 0
    while True:
        order = torch.randperm(8000).view(-1, 8)
        for batch in tqdm(order, mininterval=1.0):
            wait_for_turn()
            loss = F.cross_entropy(network(inputs[batch]), targets[batch])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % 50 == 0:
                writer.add_scalar("train/loss", loss.item(), step)
                writer.add_scalar("lr", schedule.get_last_lr()[0], step)


if __name__ == "__main__":
    main()
