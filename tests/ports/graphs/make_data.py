"""Write train-*.tar and val-*.tar: random graphs whose target is a sum over nodes and over edges."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np


def draw_graph(rng):
    nodes = int(rng.integers(4, 20))
    kinds = rng.integers(0, 5, nodes)
    src = rng.integers(0, nodes, 2 * nodes)
    dst = rng.integers(0, nodes, 2 * nodes)
    edge_index = np.stack([np.concatenate([src, dst]), np.concatenate([dst, src])])
    length = rng.uniform(0, 1, 2 * nodes)
    y = 0.1 * kinds.sum() + 0.2 * (length * (kinds[src] == kinds[dst])).sum()
    return {
        "x.npy": np.eye(5, dtype=np.float32)[kinds],
        "edge_index.npy": edge_index.astype(np.int64),
        "edge_attr.npy": np.concatenate([length, length])[:, None].astype(np.float32),
        "json": {"y": float(y)},
    }


def write_shard(path, graphs, first_key):
    with tarfile.open(path, "w") as tar:
        for number, graph in enumerate(graphs, first_key):
            for ext, value in graph.items():
                stream = io.BytesIO()
                if ext == "json":
                    stream.write(json.dumps(value).encode())
                else:
                    np.save(stream, value)
                member = tarfile.TarInfo(f"{number:06d}.{ext}")
                member.size = stream.tell()
                stream.seek(0)
                tar.addfile(member, stream)


def make_data(folder: Path) -> None:
    rng = np.random.default_rng(4)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(4):
        write_shard(folder / f"train-{shard:06d}.tar", [draw_graph(rng) for _ in range(75)], 75 * shard)
    write_shard(folder / "val-000000.tar", [draw_graph(rng) for _ in range(60)], 0)


if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
