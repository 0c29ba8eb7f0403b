"""Graphs in tar shards, and their batches."""

import io
import json
import random
import tarfile
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


@dataclass
class Graph:
    x: torch.Tensor
    edge_index: torch.Tensor
    edge_attr: torch.Tensor
    y: float


class Batch:
    """Many graphs as one big graph without edges between them."""

    def __init__(self, x, edge_index, edge_attr, batch, y):
        self.x = x
        self.edge_index = edge_index
        self.edge_attr = edge_attr
        self.batch = batch
        self.y = y

    @property
    def num_graphs(self):
        return self.y.size(0)

    def to(self, device):
        return Batch(
            self.x.to(device),
            self.edge_index.to(device),
            self.edge_attr.to(device),
            self.batch.to(device),
            self.y.to(device),
        )


def collate_graphs(graphs):
    sizes = torch.tensor([g.x.size(0) for g in graphs])
    offsets = torch.cumsum(sizes, 0) - sizes
    return Batch(
        x=torch.cat([g.x for g in graphs]),
        edge_index=torch.cat([g.edge_index + o for g, o in zip(graphs, offsets, strict=True)], dim=1),
        edge_attr=torch.cat([g.edge_attr for g in graphs]),
        batch=torch.repeat_interleave(torch.arange(len(graphs)), sizes),
        y=torch.tensor([g.y for g in graphs]),
    )


def read_tar(path):
    """Yield the graphs of one shard. Members with the same stem belong together: 000012.x.npy, 000012.json, ..."""
    sample, key = {}, None
    with tarfile.open(path) as tar:
        for member in tar:
            stem, ext = member.name.split(".", 1)
            if key is not None and stem != key:
                yield decode(sample)
                sample = {}
            key = stem
            sample[ext] = tar.extractfile(member).read()
    if sample:
        yield decode(sample)


def decode(sample):
    return Graph(
        x=torch.from_numpy(np.load(io.BytesIO(sample["x.npy"]))),
        edge_index=torch.from_numpy(np.load(io.BytesIO(sample["edge_index.npy"]))),
        edge_attr=torch.from_numpy(np.load(io.BytesIO(sample["edge_attr.npy"]))),
        y=json.loads(sample["json"])["y"],
    )


class ShardDataset(IterableDataset):
    def __init__(self, shards, shuffle_buffer=64):
        self.shards = shards
        self.shuffle_buffer = shuffle_buffer

    def __iter__(self):
        shards = list(self.shards)
        worker_info = get_worker_info()
        if worker_info is not None:
            shards = shards[worker_info.id :: worker_info.num_workers]
        random.shuffle(shards)
        buffer = []
        for shard in shards:
            for graph in read_tar(shard):
                buffer.append(graph)
                if len(buffer) >= self.shuffle_buffer:
                    yield buffer.pop(random.randrange(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


class GraphList(Dataset):
    def __init__(self, graphs):
        self.graphs = graphs

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, i):
        return self.graphs[i]


class GraphDataModule(pl.LightningDataModule):
    def __init__(self, root, batch_size=32, num_workers=2, shuffle_buffer=64):
        super().__init__()
        self.root = Path(root)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.shuffle_buffer = shuffle_buffer

    def setup(self, stage):
        self.train_set = ShardDataset(sorted(glob(str(self.root / "train-*.tar"))), self.shuffle_buffer)
        self.val_set = GraphList([g for path in sorted(self.root.glob("val-*.tar")) for g in read_tar(path)])

    def train_dataloader(self):
        return DataLoader(
            self.train_set,
            batch_size=self.batch_size,
            collate_fn=collate_graphs,
            num_workers=self.num_workers,
        )

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size, collate_fn=collate_graphs)
