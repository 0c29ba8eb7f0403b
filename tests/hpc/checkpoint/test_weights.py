"""Check that every strategy's checkpoint returns the saved weights, and that nothing in it is executed."""

import importlib.util
import io
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from hpc.checkpoint import safe_unpickle, weights
from hpc.config.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RANKS = 2
DEEPSPEED_RUNS = [(1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


class Network(nn.Module):
    """A network with tied, frozen and uneven parameters (no size is divisible by the ranks), and persistent buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.1, 0.2, 0.7]))
        self.register_buffer("count", torch.tensor(300))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.frozen(self.norm(hidden)))


class Module(nn.Module):
    """A stand-in for the LightningModule whose state every strategy saves."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.network = Network()

    def optimizer(self) -> torch.optim.Optimizer:
        trained = [value for value in self.parameters() if value.requires_grad]
        matrices = [value for value in trained if value.ndim > 1]
        vectors = [value for value in trained if value.ndim == 1]
        return torch.optim.AdamW([dict(params=matrices), dict(params=vectors, weight_decay=0.0)], lr=0.01)


def lightning_state() -> dict[str, object]:
    """Return the entries that Lightning saves beside the weights."""
    callback = dict(best_model_score=torch.tensor(0.5), best_k_models={}, dirpath="checkpoints", wait_count=0)
    return dict(
        epoch=1,
        global_step=2,
        loops=dict(fit_loop=dict(state_dict={}, current=dict(ready=1))),
        callbacks=dict(ModelCheckpoint=callback),
        lr_schedulers=[dict(base_lrs=[0.1], last_epoch=2)],
        hyper_parameters=dict(lr=0.1, sizes=(1, 2), name=None),
    )


def make_checkpoints(rank: int, folder: Path) -> None:
    """Write a sample checkpoint and its expected weights for each strategy, as one of two ranks."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    make_sharded(folder / "sharded")
    if importlib.util.find_spec("deepspeed"):
        for stage, precision in DEEPSPEED_RUNS:
            make_deepspeed(folder / f"zero{stage}-{precision}", stage, precision)
    dist.destroy_process_group()


def make_sharded(folder: Path) -> None:
    """Save as ModelParallelStrategy does."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    module = Module()
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for part in (*module.network.blocks, module.network):
        fully_shard(part, mesh=mesh)
    optimizer = module.optimizer()
    module.network(torch.arange(7)).sum().backward()
    optimizer.step()
    states = dict(state_dict=get_model_state_dict(module), optimizer_0=get_optimizer_state_dict(module, optimizer))
    dcp.save(states, checkpoint_id=folder)
    full = {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in module.state_dict().items()
    }
    if dist.get_rank() == 0:
        torch.save(lightning_state(), folder / "meta.pt")
        torch.save(full, folder / "expected")


def make_deepspeed(folder: Path, stage: int, precision: str) -> None:
    """Save as DeepSpeedStrategy does."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    module = Module()
    expected = {key: value.clone() for key, value in module.state_dict().items()}
    config = dict(
        train_micro_batch_size_per_gpu=1, zero_allow_untested_optimizer=True, zero_optimization=dict(stage=stage)
    )
    config |= dict(bf16=dict(enabled=True)) if precision == "bf16" else {}
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=module.optimizer(), config=config, dist_init_required=False
    )
    engine.backward(module.network(torch.arange(7)).sum())
    engine.step()
    for name, value in module.named_parameters():
        if value.requires_grad:
            expected[name] = safe_get_full_fp32_param(value).clone()
        elif precision == "bf16":
            expected[name] = expected[name].bfloat16()
    expected["network.head.weight"] = expected["network.embed.weight"]
    engine.save_checkpoint(str(folder), client_state=lightning_state(), tag="checkpoint")
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sample checkpoints of all distributed strategies, written by one pair of processes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.multiprocessing.spawn(make_checkpoints, (folder,), nprocs=RANKS)
    return folder


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
        assert not found[key].requires_grad


@pytest.mark.soak
@pytest.mark.slow
def test_sharded_folder_of_two_processes(checkpoints: Path) -> None:
    expected = torch.load(checkpoints / "sharded" / "expected")
    assert not torch.equal(expected["network.blocks.0.weight"], Module().network.blocks[0].weight)
    assert_same(weights.read(checkpoints / "sharded"), expected)


@pytest.mark.soak
@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(("stage", "precision"), DEEPSPEED_RUNS)
def test_deepspeed_gives_fp32_masters(
    checkpoints: Path, stage: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints / f"zero{stage}-{precision}"
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # any import of it fails
    assert_same(weights.read(folder), torch.load(folder / "expected"))


@pytest.mark.soak
@pytest.mark.slow
@needs_deepspeed
def test_deepspeed_with_a_rank_missing_is_rejected(checkpoints: Path) -> None:
    shard = checkpoints / "zero3-bf16" / "checkpoint" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shard.rename(shard.with_suffix(".away"))
    try:
        with pytest.raises(ConfigError, match=shard.name):
            weights.read(checkpoints / "zero3-bf16")
    finally:
        shard.with_suffix(".away").rename(shard)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    "run", ["sharded", *(pytest.param(f"zero{s}-{p}", marks=needs_deepspeed) for s, p in DEEPSPEED_RUNS)]
)
def test_cut_files_are_rejected(checkpoints: Path, run: str, tmp_path: Path) -> None:
    """Truncate each file that is read. In a `.distcp` file the weights come first, then the optimizer states."""
    needed = ("*.distcp", ".metadata", "*_model_states.pt" if "3" in run else "mp_rank*", "*_optim_states.pt")
    needed = needed[:3] if run == "zero2-fp32" else needed  # the module file holds all weights exactly
    names = [file.relative_to(checkpoints / run) for pattern in needed for file in (checkpoints / run).rglob(pattern)]
    assert names
    for name in names:
        copy = tmp_path / name.name
        shutil.copytree(checkpoints / run, copy)
        os.truncate(copy / name, (copy / name).stat().st_size // 8)
        with pytest.raises(ConfigError, match="damaged"):
            weights.read(copy)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    "run", ["sharded", *(pytest.param(f"zero{s}-{p}", marks=needs_deepspeed) for s, p in DEEPSPEED_RUNS)]
)
def test_every_folder_loads_into_a_module(checkpoints: Path, run: str) -> None:
    module = Module(seed=1)
    weights.load(module, checkpoints / run)
    expected = torch.load(checkpoints / run / "expected")
    assert all(torch.equal(value, expected[key].to(value.dtype)) for key, value in module.state_dict().items())
    assert module.network.head.weight is module.network.embed.weight


def sharded_by_one(folder: Path, lr: object = 0.1) -> Path:
    """Write a sharded checkpoint without a process group."""
    dcp.save(dict(state_dict=Module().state_dict(), optimizer_0=dict(lr=lr)), checkpoint_id=folder, no_dist=True)
    torch.save(lightning_state(), folder / "meta.pt")
    return folder


def deepspeed_by_hand(folder: Path) -> Path:
    """Write a minimal ZeRO-2 bf16 checkpoint of one rank, padded after a parameter and after the group."""
    folder = folder / "run"
    (folder / "checkpoint").mkdir(parents=True)
    model = dict(module=dict(a=torch.zeros(3).bfloat16(), b=torch.zeros(2, 2).bfloat16(), frozen=torch.ones(1)))
    model |= dict(param_shapes=[dict(a=torch.Size([3]), b=torch.Size([2, 2]))], shared_params=dict(tied="b"))
    torch.save(model, folder / "checkpoint" / "mp_rank_00_model_states.pt")
    optimizer = dict(partition_count=[1], single_partition_of_fp32_groups=[torch.arange(9.0)])
    optimizer |= dict(param_alignment_paddings=[[1, 0]])
    torch.save(
        dict(optimizer_state_dict=optimizer), folder / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    return folder


def test_single_file(tmp_path: Path) -> None:
    state = Module().state_dict()
    torch.save(
        lightning_state() | dict(state_dict=state, optimizer_states=[Module().optimizer().state_dict()]),
        tmp_path / "a.ckpt",
    )
    torch.save(state, tmp_path / "plain.pt")
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    for name in ("a.ckpt", "plain.pt", "legacy.pt"):
        assert_same(weights.read(tmp_path / name), dict(state))


def test_sharded_folder_of_one_process(tmp_path: Path) -> None:
    assert_same(weights.read(sharded_by_one(tmp_path)), dict(Module().state_dict()))


def test_masters_paddings_and_ties(tmp_path: Path) -> None:
    found = weights.read(deepspeed_by_hand(tmp_path))
    b = torch.tensor([[4.0, 5.0], [6.0, 7.0]])
    assert_same(found, dict(a=torch.arange(3.0), b=b, frozen=torch.ones(1), tied=b))


def test_load_converts_dtypes(tmp_path: Path) -> None:
    torch.save(Module().state_dict(), tmp_path / "w.pt")
    module = Module(seed=1).bfloat16()
    weights.load(module, tmp_path / "w.pt")
    assert module.network.frozen.weight.dtype == torch.bfloat16
    assert torch.equal(module.network.frozen.weight, Module().network.frozen.weight.bfloat16())


@pytest.mark.parametrize("name", ["network.embed.weight", "network.head.weight"])
def test_either_name_of_tied_parameters_will_do(tmp_path: Path, name: str) -> None:
    state = Module().state_dict()
    del state[name]
    torch.save(state, tmp_path / "w.pt")
    module = Module(seed=1)
    weights.load(module, tmp_path / "w.pt")
    assert torch.equal(module.network.head.weight, Module().network.head.weight)


def test_misfits_are_named_and_nothing_is_copied(tmp_path: Path) -> None:
    state = Module().state_dict()
    del state["network.embed.weight"], state["network.head.weight"]
    state |= {f"other.{index}": torch.zeros(1) for index in range(7)}
    state["network.frozen.bias"] = torch.zeros(9)
    torch.save(state, tmp_path / "w.pt")
    module = Module(seed=1)
    with pytest.raises(ConfigError) as rejected:
        weights.load(module, tmp_path / "w.pt")
    assert "2 missing: network.embed.weight, network.head.weight;" in rejected.value.rule
    assert "7 unexpected: 'other.0'" in rejected.value.rule and "other.4" in rejected.value.rule
    assert "other.5" not in rejected.value.rule
    assert "1 wrongly shaped: network.frozen.bias (9,) instead of (5,)" in rejected.value.rule
    assert_same(dict(module.state_dict()), dict(Module(seed=1).state_dict()))


def test_module_without_memory(tmp_path: Path) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="meta"):
        weights.load(nn.Linear(2, 2), tmp_path)


class Bomb:
    """An object that calls `function(*args)` when it is unpickled."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


@pytest.fixture(params=["posix", "builtins", "torch"])
def bomb(request: pytest.FixtureRequest, tmp_path: Path) -> Bomb:
    """Return an object that creates `canary` when it is unpickled.

    Its module is one that no reader, or only some readers, allow by name.
    """
    canary = str(tmp_path / "canary")
    calls = dict(posix=(os.mkdir, canary), builtins=(exec, f"open({canary!r}, 'w')"), torch=(torch.save, 1, canary))
    return Bomb(*calls[request.param])


def test_the_bomb_goes_off(bomb: Bomb, tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(bomb))
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("form", ["ckpt", "legacy", "pickle", "metadata", "distcp", "model", "optimizer"])
def test_nothing_is_executed(form: str, bomb: Bomb, tmp_path: Path) -> None:
    path = tmp_path / "it"
    if form in ("ckpt", "legacy"):
        torch.save(dict(state_dict=dict(a=bomb)), path, _use_new_zipfile_serialization=form == "ckpt")
    elif form == "pickle":
        path.write_bytes(pickle.dumps(dict(a=bomb), protocol=2))
    elif form in ("metadata", "distcp"):
        sharded_by_one(path)
        if form == "metadata":
            (path / ".metadata").write_bytes(pickle.dumps(bomb))
        else:
            torch.save(bomb, path / "__0_0.distcp")
            metadata = pickle.loads((path / ".metadata").read_bytes())
            for place in metadata.storage_data.values():
                place.offset, place.length = 0, (path / "__0_0.distcp").stat().st_size
            (path / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        path = deepspeed_by_hand(path)
        name = "zero_pp_rank_0_mp_rank_00_optim_states.pt" if form == "optimizer" else "mp_rank_00_model_states.pt"
        torch.save(dict(module=bomb, optimizer_state_dict=bomb), path / "checkpoint" / name)
    with pytest.raises(ConfigError) as rejected:
        weights.read(path)
    assert not (tmp_path / "canary").exists()
    assert "nothing in it is executed" in rejected.value.rule


def test_what_lies_beside_the_weights_is_not_read(bomb: Bomb, tmp_path: Path) -> None:
    """Check that `meta.pt` and pickled objects among the optimizer states are not read."""
    torch.save(bomb, sharded_by_one(tmp_path / "it", lr=bomb) / "meta.pt")
    assert_same(weights.read(tmp_path / "it"), dict(Module().state_dict()))
    assert not (tmp_path / "canary").exists()


def test_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing").touch()
    (tmp_path / "text").write_text("hello")
    torch.save(dict(epoch=1), tmp_path / "weightless")
    torch.save(torch.zeros(2), tmp_path / "tensor")
    rules = dict(
        absent="must be an existing",
        empty="must be a .ckpt file or",
        nothing="damaged",
        text="damaged",
        weightless="holds none",
    )
    for name, rule in (rules | dict(tensor="damaged")).items():
        with pytest.raises(ConfigError, match=rule) as rejected:
            weights.read(tmp_path / name)
        assert rejected.value.key == "ckpt" and rejected.value.value == tmp_path / name


def test_cut_files_of_one_process_are_rejected(tmp_path: Path) -> None:
    sharded_by_one(tmp_path / "sharded")
    torch.save(dict(state_dict=Module().state_dict()), tmp_path / "a.ckpt")
    for file in (tmp_path / "a.ckpt", tmp_path / "sharded" / "__0_0.distcp", tmp_path / "sharded" / ".metadata"):
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(ConfigError, match="damaged"):
            weights.read(tmp_path / file.relative_to(tmp_path).parts[0])


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    file = sharded_by_one(tmp_path) / "__0_0.distcp"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="damaged"):
        weights.read(tmp_path)


def test_a_tensor_with_a_chunk_missing_is_rejected(tmp_path: Path) -> None:
    metadata = pickle.loads((sharded_by_one(tmp_path) / ".metadata").read_bytes())
    metadata.state_dict_metadata["state_dict.network.frozen.weight"].chunks.clear()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match="damaged"):
        weights.read(tmp_path)


def test_partitions_that_do_not_add_up_are_rejected(tmp_path: Path) -> None:
    folder = deepspeed_by_hand(tmp_path)
    file = folder / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(file)
    for count in (7, 11):
        state["optimizer_state_dict"]["single_partition_of_fp32_groups"] = [torch.zeros(count)]
        torch.save(state, file)
        with pytest.raises(ConfigError, match="damaged"):
            weights.read(folder)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    found = weights.saved_tensors(sharded_by_one(tmp_path))
    (tmp_path / "__0_0.distcp").rename(tmp_path / "away")
    assert found["network.count"].shape == () and found["network.count"].dtype == torch.int64
    with pytest.raises(ConfigError, match=r"__0_0\.distcp"):
        found["network.count"].read()
    (tmp_path / "away").rename(tmp_path / "__0_0.distcp")
    assert found["network.count"].read() == 300


def test_double_precision(tmp_path: Path) -> None:
    state = {key: value.double() for key, value in Module().state_dict().items()}
    dcp.save({"state_dict": state}, checkpoint_id=tmp_path, no_dist=True)
    assert_same(weights.read(tmp_path), state)


def test_files_of_two_runs_in_one_folder_are_rejected(tmp_path: Path) -> None:
    folder = deepspeed_by_hand(tmp_path)
    for name in ("zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        stale = folder / "checkpoint" / name
        stale.touch()
        with pytest.raises(ConfigError, match=r"one run, but .* come from two"):
            weights.read(folder)
        stale.unlink()


class OldMember:
    """An enumeration member pickled as by Python before 3.11.4: as a call of getattr."""

    def __init__(self, enumeration: type, name: str) -> None:
        self.call = getattr, (enumeration, name)

    def __reduce__(self) -> tuple:
        return self.call


def test_enumerations_of_older_pythons_are_read(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    pickled = pickle.dumps([OldMember(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"), "plain"])
    assert safe_unpickle._MetadataUnpickler(io.BytesIO(pickled)).load()[1] == "plain"


@needs_deepspeed
@pytest.mark.slow
def test_enumerations_of_older_pythons_are_read_from_deepspeed_files(tmp_path: Path) -> None:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    torch.save({"stage": OldMember(ZeroStageEnum, "weights"), "a": torch.ones(1)}, tmp_path / "old")
    assert safe_unpickle.load_plain(tmp_path / "old")["a"] == 1
