"""`mlm-verify parallel`: equal layouts pass, and of a layout with a fault the first tensor that is
wrong is named."""

import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_repro.engine.compare.tensors import TensorDifference, TensorPart, assemble, compare, merge
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.launch.forked import run_forked
from mlm_repro.engine.launch.threads import RanksFailed, ThreadAxis, current_rank
from mlm_repro.engine.model import transformer
from mlm_repro.engine.optim.gradients import GradientReducer
from mlm_repro.engine.parallel.layers import RowParallelLinear
from mlm_repro.engine.parallel.layout import layout_of, split_layers
from mlm_repro.engine.parallel.mesh import GroupAxis, LoneAxis, ParallelMesh
from mlm_repro.engine.parallel.sharding import ShardedParameter
from mlm_repro.engine.pipeline.executor import PipelineExecutor
from mlm_repro.engine.pipeline.schedule import Compute, compute_orders
from mlm_repro.engine.rng import Dropout, DropoutMask
from mlm_repro.lineage.config import load_config
from mlm_repro.verify.cli import main as verify_main
from mlm_repro.verify.parity import (
    SERIAL,
    TOLERANCE,
    ParityLayout,
    all_layouts,
    choose_layouts,
    misfit,
    parse_layout,
)
from tests.commands import Command, call

CONFIG = """
name = "tiny"
[model]
num_layers = 4
hidden_size = 16
num_heads = 4
seq_length = 8
vocab_size = 29
padded_vocab_size = 32
[train]
iterations = 100
global_batch_size = 4
microbatch_size = 1
learning_rate = 1e-2
warmup_iterations = 1
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return path


Verify = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def verify(config: Path, command: Command) -> Verify:
    """The command in this process, whose forked ranks inherit the test's faults: code, lines, error
    without cost."""

    def verify(layouts: str, *more: str) -> tuple[int, list[str], str]:
        ranks = () if "--processes" in more else ("--threads",)
        more = tuple(word for word in more if word != "--processes")
        done = command(
            verify_main,
            "mlm-verify",
            "parallel",
            config,
            "--layouts",
            layouts,
            *ranks,
            *more,
            traces=True,
        )
        return done.code, done.out.splitlines(), done.but_cost

    return verify


# The command


def test_layouts_that_are_right_pass(config: Path) -> None:
    names = "tp2,pp2-gpipe,dp2-zero1,tp2-sp-recompute,pp2-chunks2-selective,tp2-pp2-sp"
    alone = {"OMP_NUM_THREADS": "1"}
    done = call(
        alone, "mlm-verify", "parallel", config, "--layouts", names, "--iterations", 2, ends=0
    )
    assert done.err == "cost: 7 trainings of 2 iterations in float64, on up to 4 processes\n"
    rows = [line.split() for line in done.out.splitlines()[2:-1]]
    assert [row[0] for row in rows] == names.split(",")
    assert all(row[2] == "ok" and 0 <= float(row[1]) <= TOLERANCE for row in rows)
    assert (
        done.out.splitlines()[-1]
        == "6 layouts compute what the serial run computes, within 1e-10 in float64"
    )


def test_all_lists_what_does_not_fit_with_its_reason(verify: Verify) -> None:
    small = (
        "--set",
        "model.num_layers=3",
        "--set",
        "model.num_heads=1",
        "--set",
        "train.global_batch_size=1",
    )
    code, lines, err = verify("all", "--processes", "--ranks", "2", "--iterations", "1", *small)
    assert (code, err) == (0, "")
    assert sorted(lines[:3]) == [
        (
            "does not fit: pp = 2 × chunks = 2 makes 4 pipeline stages, and the model has only 3"
            " layers: make parallel.pp or parallel.chunks smaller:"
            " pp2-chunks2, pp2-chunks2-recompute"
        ),
        (
            "does not fit: the global batch, 1 times microbatch_size = 1, does not divide"
            " over 2 data-parallel ranks: make microbatch_size smaller, or the number of ranks tp"
            " × pp times one of 1: dp2, dp2-recompute, dp2-zero1, dp2-zero1-recompute"
        ),
        (
            "does not fit: tp = 2 does not divide the 1 attention heads; tp can be 1: "
            "tp2, tp2-recompute, tp2-sp, tp2-sp-recompute"
        ),
    ]
    names = [line.split()[0] for line in lines[5:-1]]
    assert names == ["recompute", "pp2", "pp2-recompute", "pp2-gpipe", "pp2-gpipe-recompute"]


def test_the_dataset_of_the_configuration_is_used(verify: Verify, dataset: Path) -> None:
    code, lines, _ = verify("tp2-dp2", "--set", f"data.dataset={dataset}", "--iterations", "1")
    assert code == 0
    assert lines[2].split()[2] == "ok"


@pytest.mark.parametrize(
    ("layouts", "sentence"),
    [
        (
            "tp3",
            "tp3 does not fit: tp = 3 does not divide the 4 attention heads; tp can be 1, 2, 4",
        ),
        (
            "tp2,pp8",
            (
                "pp8 does not fit: pp = 8 × chunks = 1 makes 8 pipeline stages, and the model has"
                " only 4 layers"
            ),
        ),
        (
            "dp3",
            (
                "dp3 does not fit: the global batch, 4 times microbatch_size = 1, does"
                " not divide over 3 data-parallel"
            ),
        ),
        (
            "pp2-gpipe-chunks2",
            "pp2-gpipe-chunks2: chunks = 2 needs schedule = 'interleaved', not 'gpipe'",
        ),
        ("tp4-dp4", "tp4-dp4 needs 16 ranks and --ranks allows 8"),
        ("tp1", "--layouts names the serial run itself"),
        (
            "tp2-tp4",
            "'tp2-tp4' is not a layout: 'tp4' sets again what a part before it sets: leave one of"
            " the two out",
        ),
        (
            "tp2-zp3",
            (
                "'tp2-zp3' is not a layout: 'zp3' is not a part of a name such as"
                " tp2-pp2-dp2-chunks2-sp-recompute"
            ),
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused(verify: Verify, layouts: str, sentence: str) -> None:
    code, lines, err = verify(layouts, "--ranks", "8")
    assert (code, lines) == (2, [])
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1


def test_more_tensors_than_memory_are_refused(verify: Verify) -> None:
    code, _, err = verify("tp2", "--iterations", "1000000000")
    assert code == 2
    assert "--twin" in err


# Faults: every rank inherits them; none changes the serial run


def forget_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MLP's second product is not added up over the tensor-parallel ranks, in layer 2."""

    def forward(self: RowParallelLinear, x: torch.Tensor, add_bias: bool) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)

    init = transformer.TransformerLayer.__init__

    def planted(
        self: transformer.TransformerLayer, config: Any, mesh: ParallelMesh, layer: int, *more: Any
    ) -> None:
        init(self, config, mesh, layer, *more)
        if layer == 2:
            self.mlp.dense_4h_to_h.forward = forward.__get__(self.mlp.dense_4h_to_h)  # type: ignore[method-assign]

    monkeypatch.setattr(transformer.TransformerLayer, "__init__", planted)


def keep_layernorm_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer norm's gradient is that of this rank's part of the sequence."""
    finish = GradientReducer.finish

    def planted(self: GradientReducer, divisor: float) -> None:
        name = "layers.1.post_attention_layernorm.weight"
        kept = [
            (p.local.grad, p.local.grad.clone())
            for g in self.groups
            for p in g.parameters
            if p.name == name
        ]
        finish(self, divisor)
        for gradient, mine in kept:
            gradient.copy_(mine / divisor if self.mesh.sequence_parallel else gradient)

    monkeypatch.setattr(GradientReducer, "finish", planted)


def forget_tied_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two stages that share the word embedding do not add its gradients."""
    finish = GradientReducer.finish

    def planted(self: GradientReducer, divisor: float) -> None:
        mesh = self.mesh
        object.__setattr__(
            self,
            "mesh",
            ParallelMesh(
                mesh.layout,
                mesh.tp,
                mesh.pp,
                mesh.dp,
                LoneAxis(),
                mesh.device,
                mesh.sequence_parallel,
            ),
        )
        finish(self, divisor)

    monkeypatch.setattr(GradientReducer, "finish", planted)


def key_mask_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropout mask depends on the rank that draws it."""
    mask = Dropout.mask

    def planted(self: Dropout, site: str, first_row: int = 0) -> DropoutMask:
        if site == "layers.2.mlp_output":
            here = current_rank()
            site += str(here.rank) if here else ""
        return mask(self, site, first_row)

    monkeypatch.setattr(Dropout, "mask", planted)


def scale_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage's input is scaled on its way."""
    take = PipelineExecutor._take

    def planted(self: PipelineExecutor, compute: Compute) -> torch.Tensor | None:
        payload = take(self, compute)
        return None if payload is None else payload * (1 + 1e-6)

    monkeypatch.setattr(PipelineExecutor, "_take", planted)


def count_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient norm counts what every tensor-parallel rank holds once per rank."""
    monkeypatch.setattr(ShardedParameter, "is_counted", property(lambda self: not self.is_copy))


def sum_over_dp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data-parallel gradients are added up and not averaged, from the second iteration."""
    finish = GradientReducer.finish

    def planted(self: GradientReducer, divisor: float) -> None:
        calls[id(self)] += 1
        finish(self, divisor / self.mesh.dp.size if calls[id(self)] > 1 else divisor)

    calls = Counter[int]()
    monkeypatch.setattr(GradientReducer, "finish", planted)


@pytest.mark.parametrize(
    ("fault", "layout", "tensor", "iteration"),
    [
        (forget_all_reduce, "tp2", "output of layers.2.mlp.dense_4h_to_h", 1),
        (
            keep_layernorm_gradient,
            "tp2-sp",
            "gradient of layers.1.post_attention_layernorm.weight",
            1,
        ),
        (forget_tied_embedding, "pp2", "gradient of embedding.word_embeddings.weight", 1),
        (key_mask_by_rank, "dp2", "output of layers.2", 1),
        (scale_messages, "pp2", "output of layers.2.input_layernorm", 1),
        (count_copies, "tp2", "gradient norm", 1),
        (sum_over_dp, "dp2-zero1", "gradient of final_layernorm.bias", 2),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_a_fault_is_found_and_its_first_tensor_named(
    verify: Verify,
    monkeypatch: pytest.MonkeyPatch,
    fault: Any,
    layout: str,
    tensor: str,
    iteration: int,
) -> None:
    fault(monkeypatch)
    code, lines, err = verify(layout, "--iterations", str(iteration))
    assert code == 3
    assert err.startswith(
        f"error: layout {layout}: {tensor} in iteration {iteration} differs from the serial run by "
    )
    assert err.count("\n") == 1
    assert lines[2].split()[0] == layout
    assert lines[2].split()[2] == "DIFFERS"


def test_only_the_layout_with_the_fault_differs(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_tied_embedding(monkeypatch)
    code, lines, err = verify("tp2,pp2,dp2,pp4", "--iterations", "1")
    assert code == 3
    rows = [line.split() for line in lines[2:] if not line.startswith(" ")]
    assert [(row[0], row[2]) for row in rows] == [
        ("tp2", "ok"),
        ("pp2", "DIFFERS"),
        ("dp2", "ok"),
        ("pp4", "DIFFERS"),
    ]
    assert err.startswith("error: layout pp2: ")
    assert "1 more of 4 layouts differ" in err


@pytest.mark.parametrize("processes", [True, False])
def test_a_rank_that_fails_is_named_with_its_error(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, processes: bool
) -> None:
    def planted(self: GroupAxis | ThreadAxis, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if self.rank == 1:
            raise ValueError("no gather")
        return torch.cat([tensor] * self.size, dim)

    monkeypatch.setattr(GroupAxis if processes else ThreadAxis, "all_gather", planted)
    code, lines, err = verify(
        "tp2-sp,dp2", "--iterations", "1", *(["--processes"] if processes else [])
    )
    assert code == 3
    failure = "rank 1 failed" if processes else "on rank 1 of 2"
    assert err.endswith(f"error: layout tp2-sp: {failure}: ValueError: no gather\n")
    assert err.count("Traceback") == (0 if processes else 1)
    assert [line.split()[2] for line in lines[2:] if not line.startswith(" ")] == ["DIFFERS", "ok"]


# Which layouts there are


@settings(max_examples=25)
@given(st.integers(1, 8))
def test_the_layouts_of_all_are_different_and_small_enough(ranks: int) -> None:
    layouts = list(all_layouts(ranks))
    assert len(layouts) == len(set(layouts)) == len({layout.name for layout in layouts})
    assert SERIAL not in layouts
    assert {parse_layout(layout.name) for layout in layouts} == set(layouts)
    assert all(layout.world_size <= ranks for layout in layouts)
    triples = {(layout.tp, layout.pp, layout.dp) for layout in layouts}
    assert triples == {
        (tp, pp, dp)
        for tp in range(1, 9)
        for pp in range(1, 9)
        for dp in range(1, 9)
        if tp * pp * dp <= ranks
    }


@settings(max_examples=60)
@given(
    st.integers(1, 8),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([1, 2, 4, 8, 12]),
    st.sampled_from([1, 2]),
    st.sampled_from([6, 8, 9]),
)
def test_every_layout_is_either_run_or_said_not_to_fit(
    ranks: int, num_layers: int, num_heads: int, batch: int, micro: int, seq_length: int
) -> None:
    model = {
        "num_layers": num_layers,
        "hidden_size": 12 * num_heads,
        "num_heads": num_heads,
        "seq_length": seq_length,
    }
    train = {"global_batch_size": batch * micro, "microbatch_size": micro}
    config = RunConfig.model_validate({"name": "any", "model": model, "train": train})
    fitting, others = choose_layouts("all", ranks, config)
    listed = [*fitting, *(layout for layouts in others.values() for layout in layouts)]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(all_layouts(ranks))
    for layout in fitting:
        run = layout.configure(config)
        assert layout_of(run, layout.world_size).dp == layout.dp
        split_layers(num_layers, layout.pp, layout.chunks)
        compute_orders(layout.schedule, layout.pp, layout.chunks, batch // layout.dp)
        assert num_heads % layout.tp == 0
        assert not layout.sequence_parallel or seq_length % layout.tp == 0
    for reason, layouts in others.items():
        assert all(misfit(layout, config) == reason for layout in layouts)


def test_what_a_layout_does_not_decide_stays_as_configured(config: Path) -> None:
    resolved = load_config(
        config, RunConfig, ["parallel.scatter_gather=false", "parallel.recompute_layers=2"]
    )
    parallel = ParityLayout(tp=2, pp=2, recompute="full").configure(resolved).parallel
    assert (parallel.scatter_gather, parallel.recompute_layers) == (False, 2)
    assert (parallel.tp, parallel.pp, parallel.recompute) == (2, 2, "full")


# Comparing


def test_the_place_of_a_difference_is_that_in_the_whole_tensor() -> None:
    whole = np.zeros((4, 6))
    value = np.zeros((2, 3))
    value[1, 2] = -0.5
    found = compare(TensorPart(0, "loss", (2, 3), value), whole, "tp 1", 1e-10)
    assert found == TensorDifference(0.5, 0, "loss", "at [3, 5] on tp 1", 6, 1e-10)
    value[0, 0] = np.nan
    assert compare(TensorPart(0, "loss", (2, 3), value), whole, "tp 1", 1.0).largest == np.inf
    assert not compare(TensorPart(0, "loss", (3, 4), value), whole, "tp 1", 1.0).is_within
    assert not compare(TensorPart(0, "loss", (2,), value[0]), whole, "tp 1", 1.0).is_within
    assert compare(TensorPart(0, "loss", (2, 3), np.zeros((2, 3))), whole, "tp 1", 0.0).is_within


def test_a_tensor_no_rank_computed_is_a_difference() -> None:
    reference = assemble([TensorPart(0, "loss", (i,), np.ones(1)) for i in range(4)])
    assert reference[0, "loss"].tolist() == [1.0] * 4
    seen = [
        compare(TensorPart(0, "loss", (i,), np.ones(1)), reference[0, "loss"], "rank", 0.0)
        for i in range(3)
    ]
    (missing,) = merge(seen, reference)
    assert (
        missing.sentence("the serial run")
        == "loss in iteration 1 differs from the serial run by inf as ranks computed only 3 of its"
        " 4 elements"
    )
    (whole,) = merge([*seen, seen[0]], reference)
    assert whole.is_within


# Forked ranks


def meet_on_rank_1() -> int:
    if os.environ["RANK"] == "1":
        torch.distributed.barrier()
    return 7


def hang_on_rank_1() -> int:
    if os.environ["RANK"] == "1":
        time.sleep(600)
    return 7


def test_forked_ranks_answer_in_order() -> None:
    assert run_forked(lambda: int(os.environ["RANK"]), 3) == [0, 1, 2]


def test_no_forked_rank_starts_before_all_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect_late(*args: object, **named: object) -> None:
        connect(*args, **named)
        if os.environ["RANK"] == "2":
            time.sleep(0.5)
            connected.value = time.monotonic()

    connect, connected = torch.distributed.init_process_group, multiprocessing.Value("d", math.inf)
    monkeypatch.setattr(torch.distributed, "init_process_group", connect_late)
    assert min(run_forked(time.monotonic, 3)) >= connected.value


def test_a_rank_that_hangs_or_dies_ends_the_call(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1 failed: "):
        run_forked(meet_on_rank_1, 2)  # the other has left
    with pytest.raises(RanksFailed, match="rank 1 was not done after 20 s"):
        run_forked(hang_on_rank_1, 2, timeout_seconds=20)  # in which both ranks meet

    def die_before_the_other() -> None:
        if os.environ["RANK"] == "0":
            os._exit(9)
        time.sleep(3)
        (tmp_path / "late").touch()

    with pytest.raises(RanksFailed, match="rank 0 ended with exit code 9"):
        run_forked(die_before_the_other, 2)
    assert not (tmp_path / "late").exists()
