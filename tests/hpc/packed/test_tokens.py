"""Check the windows into text and tokens, and their checks on the login node."""

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from data_nodes import built, node, read_all, rejected

from hpc.config.errors import ConfigError
from hpc.packed import checks, datasets, token_files


def test_windows_follow_one_another_across_files(tmp_path):
    for name, content in (("a", b"abcde"), ("b", b"f"), ("c", b""), ("d", b"ghijklmnop")):
        (tmp_path / f"{name}.txt").write_bytes(content)
    (tmp_path / "val").write_bytes(b"0123456789")
    data = built("text", files=f"{tmp_path}/*.txt", val_files=str(tmp_path / "val"), block_size=4)
    train = data.dataset("train")
    inputs, targets = train.__getitems__(np.array([2, 0, 1]))
    assert [bytes(row) for row in inputs.tolist()] == [b"ijkl", b"abcd", b"efgh"]
    assert [bytes(row) for row in targets.tolist()] == [b"jklm", b"bcde", b"fghi"]
    assert str(inputs.dtype) == "torch.int64"
    assert len(train) == 3
    assert bytes(train[2][0].tolist()) == b"ijkl"
    assert bytes(data.dataset("test")[1][1].tolist()) == b"5678"


@pytest.mark.parametrize("in_memory", [0, 1000], ids=["mapped", "in memory"])
@pytest.mark.parametrize("dtypes", [["uint16"], ["uint8", "uint64", "int64"]], ids=["one dtype", "several"])
def test_a_batch_has_the_same_windows_as_single_samples(tmp_path, monkeypatch, dtypes, in_memory):
    monkeypatch.setattr(datasets, "MAX_TOKENS_IN_MEMORY", in_memory)
    random = np.random.default_rng(0)
    lengths = [1, 40, 3, 2, 100, 7, 1, 1, 60]
    arrays = [random.integers(0, 200, n).astype(dtypes[i % len(dtypes)]) for i, n in enumerate(lengths)]
    for i, array in enumerate(arrays):
        np.save(tmp_path / f"{i}.npy", array)
    whole = np.concatenate([array.astype(np.int64) for array in arrays])
    files = [str(tmp_path / f"{i}.npy") for i in range(len(arrays))]
    every = range(0, (len(whole) - 1) // 5)
    for windows in (every, every[3:-2], every[::3], every[4:5]):
        data = datasets.TokenWindows(files, windows, block_size=5, vocab_size=200)
        chosen = random.permutation(len(windows))
        inputs, targets = data.__getitems__(chosen)
        starts = [windows[i] * 5 for i in chosen]
        assert inputs.tolist() == [whole[start : start + 5].tolist() for start in starts]
        assert targets.tolist() == [whole[start + 1 : start + 6].tolist() for start in starts]
        assert inputs.is_contiguous() and str(inputs.dtype) == str(targets.dtype) == "torch.int64"
    array = arrays[4]
    array[-1] = 199
    np.save(files[4], array)
    token_files.map_file.cache_clear(), datasets.all_windows_of_file.cache_clear()
    for chosen, num in ((files, len(every)), (files[4:5], 19)):
        with pytest.raises(ConfigError, match="holds 199"):
            data = datasets.TokenWindows(chosen, range(num), block_size=5, vocab_size=199)
            data.__getitems__(np.arange(num))


def test_few_files_keep_their_last_windows_for_evaluation(tmp_path):
    (tmp_path / "text").write_bytes(bytes(i % 251 for i in range(1001)))
    windows = {
        s: token_files.windows_of_split(s, [str(tmp_path / "text")], val_files=[], block_size=10)[1]
        for s in ("train", "val", "test")
    }
    assert windows == {"train": range(90), "val": range(90, 95), "test": range(95, 100)}
    _, thinned = token_files.windows_of_split(
        "val", [str(tmp_path / "text")], val_files=[], block_size=10, max_eval_windows=3
    )
    assert list(thinned) == [90, 92, 94]


def test_many_files_are_held_out_whole():
    data = built("stdlib")
    sources, _ = data.list_files()
    assert not {"test", "site-packages", "dist-packages"} & {part for file in sources for part in file.split(os.sep)}
    assert os.path.join(sysconfig.get_paths()["stdlib"], "argparse.py") in sources
    train, val, test = (data.dataset(split) for split in ("train", "val", "test"))
    assert sorted(train.files + val.files + test.files) == sorted(sources)
    assert len({*train.files, *val.files, *test.files}) == len(sources)
    assert 0.8 < sum(map(os.path.getsize, train.files)) / sum(map(os.path.getsize, sources)) < 0.97
    assert 300 < len(val) <= 800
    assert 300 < len(test) <= 800
    assert len(sources) > 300
    assert bytes(val[0][0].tolist()) == Path(val.files[0]).read_bytes()[:128]


def write_tokens(folder):
    tokens = np.arange(3000) % 1000
    np.save(folder / "train.npy", tokens.astype(np.uint32))
    tokens[::-1].astype("<u2").tofile(folder / "val.bin")
    return {"files": str(folder / "train.npy"), "val_files": str(folder / "val.bin"), "block_size": 8}


def test_token_files_are_mapped_and_not_loaded(tmp_path):
    paths = write_tokens(tmp_path)
    assert isinstance(token_files.map_file(paths["files"]), np.memmap)
    assert isinstance(token_files.map_file(paths["val_files"]), np.memmap)
    data = built("text", vocab_size=1000, **paths)
    assert data.dataset("train")[125][0].tolist() == list(range(8))
    assert data.dataset("val")[0][1].tolist() == list(range(998, 990, -1))


def test_a_vocabulary_is_larger_than_every_token(tmp_path):
    paths = write_tokens(tmp_path)
    assert "data.vocab_size=50304" in rejected(checks.check_text_files, "text", **paths)
    assert "holds 999" in rejected(checks.check_text_files, "text", vocab_size=999, **paths)
    text = node("text", vocab_size=1000, **paths)
    assert checks.check_text_files(text, text) == {"vocab_size": None, "bytes_per_token": None}
    with pytest.raises(ConfigError, match=r"data\.vocab_size=50304"):
        read_all(built("text", vocab_size=999, **paths))
    np.append(np.zeros(30_000), 1000).astype("<u2").tofile(tmp_path / "late.bin")
    late = {"files": str(tmp_path / "late.bin"), "block_size": 8}
    assert "late.bin holds 1000" in rejected(checks.check_text_files, "text", vocab_size=1000, **late)
    np.save(tmp_path / "train.npy", -np.arange(3000))
    token_files.map_file.cache_clear()
    assert "cannot be negative" in rejected(checks.check_text_files, "text", vocab_size=1000, **paths)


def test_text_that_cannot_be_trained_on_is_rejected(tmp_path):
    (tmp_path / "text").write_text("some text " * 50)
    (tmp_path / "empty").touch()
    (tmp_path / "broken.npy").write_text("this is no array")
    np.save(tmp_path / "table.npy", np.zeros((3, 4), np.int64))

    def message(file, **values):
        return rejected(checks.check_text_files, "text", **{"files": str(tmp_path / file), "block_size": 4} | values)

    text = node("text", files=str(tmp_path / "text"), block_size=4)
    assert checks.check_text_files(text, text) == {"vocab_size": 256, "bytes_per_token": 1.0}
    assert f"data.files={tmp_path}/no" in message("no*")
    assert "There are no such files with content" in message("empty")
    assert "There are no such files with content" in message("text", files=[])
    assert "block_size + 1 = 1025" in message("text", block_size=1024)
    assert "data.vocab_size=256" in message("text", vocab_size=128)
    assert "cannot be larger" in message("text", global_batch_size=10_000)
    assert "differs from this one" in message("", files=[str(tmp_path / "text"), str(tmp_path / "table.npy")])
    assert "(3, 4)" in message("table.npy")
    assert "write the file again" in message("broken.npy")
    assert "validation must not see what is trained on" in message("text", val_files=str(tmp_path / "t*t"))
