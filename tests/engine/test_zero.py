"""A sharded optimizer holds its share of the state, and its checkpoints are anybody's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import mlm_repro.lineage.digest as digests
from mlm_repro.engine.checkpoint import shards, statistics
from mlm_repro.engine.checkpoint.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from mlm_repro.engine.compare.recorder import whole_state
from mlm_repro.engine.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from mlm_repro.engine.costs import written_bytes
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import RanksFailed
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.optim.adam import FlatAdamW
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.sharding import ShardedParameter, sharded_parameters
from mlm_repro.lineage.chain import resolve_checkpoint
from mlm_repro.lineage.digest import check_seal, sha256_file
from tests.engine.like_serial import whole
from tests.ranks import run_ranks

State = dict[str, np.ndarray]  # type: ignore[type-arg]


LARGE = ModelConfig(
    num_layers=12, hidden_size=256, num_heads=4, seq_length=8, vocab_size=500, padded_vocab_size=512
)
CONFIG = RunConfig(
    name="large",
    model=LARGE,
    train=TrainConfig(precision="bf16", iterations=9, warmup_iterations=1),
)


def build_large(layout: Layout, shard: bool) -> tuple[list[ShardedParameter], FlatAdamW]:
    """Weights and an optimizer whose state depends on the place in the whole model alone."""
    mesh = build_mesh(layout)
    model = GPT2(LARGE, mesh).to(torch.bfloat16)
    model.initialize(3)
    parameters = sharded_parameters(model, mesh)
    return parameters, FlatAdamW(parameters, CONFIG.train, mesh, shard)


def save_on_a_rank(run: Path, tokenizer: Path) -> tuple[float, int, list[str]]:
    """Bytes a parameter that this rank holds more while it writes, its parameters, and what rank 0
    read to hash."""
    parameters, optimizer = build_large(Layout(dp=4), True)
    generator = torch.Generator().manual_seed(optimizer.mesh.dp.rank)
    for group in optimizer.groups:
        group.exp_avg.normal_(generator=generator)
        group.exp_avg_sq.uniform_(generator=generator)
    held, most, measure, hashed, digest = (
        anonymous(),
        0,
        statistics.measure,
        [],
        digests.sha256_file,
    )

    def watched(*tensors: Any) -> Any:
        nonlocal most
        most = max(most, anonymous())
        return measure(*tensors)

    statistics.measure = watched
    digests.sha256_file = lambda path: (hashed.append(path.name), digest(path))[1]
    save_checkpoint(
        run, CONFIG, TrainingState(2, 2), parameters, optimizer, optimizer.mesh, tokenizer
    )
    count = sum(p.local.numel() for p in parameters)
    return (most - held) / count, count, hashed


def anonymous() -> int:
    """Bytes of this process's memory that belong to no file."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


def load_on_a_rank(layout: Layout, shard: bool, path: Path) -> tuple[float, State]:
    """What this rank reads of the files over what it needs, and its whole state."""
    parameters, optimizer = build_large(layout, shard)
    read, digest, copy = 0, digests.sha256_file, shards._copy

    def count(size: int) -> None:
        nonlocal read
        read += size

    digests.sha256_file = lambda path: (count(path.stat().st_size), digest(path))[1]
    shards._copy = lambda place, name, target, source: (
        count(source.nbytes),
        copy(place, name, target, source),
    )[1]
    load_checkpoint(path, parameters, optimizer)
    needed = sum(p.local.nbytes for p in parameters)
    needed += sum(part.nbytes for group in optimizer.groups for part in group.state.values())
    state = {f"{what}.{p.name}": whole(p, tensor) for p, what, tensor in whole_state(optimizer)}
    return read / needed, state


def test_a_checkpoint_takes_little_memory_and_is_read_in_part(tmp_path: Path) -> None:
    """Each rank writes and hashes its own part, and at another layout reads and checks its part
    alone."""
    (tmp_path / "tokenizer").mkdir()
    saved = run_ranks(save_on_a_rank, 4, tmp_path / "run", tmp_path / "tokenizer")
    planned = written_bytes(LARGE, "bf16", ParallelConfig(), 4)
    # The copy from which it is written, and little more.
    assert max(more - planned / count for more, count, _ in saved) <= 2.0
    assert not [name for *_, hashed in saved for name in hashed if name.endswith(".safetensors")]
    path = resolve_checkpoint(tmp_path / "run")
    check_seal(path)
    sizes = [path.stat().st_size for path in path.glob("optimizer-tp00-pp000-dp*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * 12 * saved[0][1] / 4
    models = [path.stat().st_size for path in path.glob("model-*.safetensors")]
    assert sum(models) + max(sizes) == pytest.approx(planned, rel=0.05)
    [(_, expected)] = run_ranks(load_on_a_rank, 1, Layout(), False, path)
    for layout, shard in ((Layout(dp=2), True), (Layout(tp=2), False), (Layout(tp=2, dp=2), True)):
        for read, state in run_ranks(load_on_a_rank, layout.world_size, layout, shard, path):
            assert read <= 1.2
            assert all(np.array_equal(state[name], tensor) for name, tensor in expected.items())
    file = next(path.glob("optimizer-*-dp002.safetensors"))
    content = bytearray(file.read_bytes())
    content[-4] ^= 1  # the last bit of a number
    file.write_bytes(content)
    for layout, shard in ((Layout(dp=2), True), (Layout(tp=2), False)):
        with pytest.raises(RanksFailed, match=r"IntegrityFailure: .*is not what was saved"):
            run_ranks(load_on_a_rank, 2, layout, shard, path)


def test_a_file_of_tensors_is_that_of_the_library(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7), "b-bias": torch.zeros(0), "b.weight": torch.randn(3, 5)}
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    assert shards.write_shard(tmp_path / "ours", shapes, tensors.values()) == sha256_file(
        tmp_path / "ours"
    )
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with Path("/dev/full").open("wb"), pytest.raises(OSError, match="No space left"):
        shards.write_shard(Path("/dev/full"), shapes, tensors.values())
