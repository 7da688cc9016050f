"""Bytes that a transformer layer keeps for its backward pass, as autograd saves them, and
recomputed products.

The layer is the 2022 paper's (arXiv:2205.05198, Sections 3 to 5) in plain torch: every score is
kept, in 16 bits, and a byte for each element of a dropout mask. Its divided products are the
engine's. Shapes: s sequence, b microbatch, h hidden, a heads, t tensor-parallel ranks.
"""

import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mlm_repro.engine.checkpoint.checkpoint import TrainingState, save_checkpoint
from mlm_repro.engine.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.launch.forked import run_forked
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.model.microbatch import PipelineInput
from mlm_repro.engine.model.transformer import TransformerLayer
from mlm_repro.engine.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import ParallelMesh, serial_mesh
from mlm_repro.engine.rng import Dropout
from mlm_repro.engine.step import build_step
from mlm_repro.experiments.measured.traffic import MODEL
from mlm_repro.experiments.sealed import Line, lines
from mlm_repro.lineage.progress import announce

TENSOR_RANKS = 8
"""Tensor-parallel ranks of all the paper's runs (Section 6)."""
SHAPES = {"GPT-3": (2048, 96, 12288, 12), "MT-NLG": (2048, 128, 20480, 3)}
"""s, a, h and layers of a rank as published (Section 5, Table 3), by model."""
SMALL = {"GPT-3": (256, 32, 512), "MT-NLG": (256, 32, 640)}
"""s, a and h, by model, with the same as/h as published, which is all that bytes per sbh depend
on."""
FORMS = ("none", "selective", "full")
"""Names of the parts of a layer that are recomputed in backward: nothing, the scores, or the
layer."""
PROBABILITY = 0.1
CONFIGURATIONS = {
    "no parallelism": ("none", 1, False),
    "tensor parallel": ("none", TENSOR_RANKS, False),
    "tensor and sequence parallel": ("none", TENSOR_RANKS, True),
    "tensor parallel, selective recomputation": ("selective", TENSOR_RANKS, False),
    "tensor and sequence parallel, selective recomputation": ("selective", TENSOR_RANKS, True),
    "full recomputation": ("full", 1, False),
}
"""Rows of Table 2 by name: recomputed part, number of ranks, and true if the sequence is
divided."""


class PlainLayer(nn.Module):
    """Causal transformer layer, x + dropout(attention(LN(x))), then x + dropout(MLP(LN(x))): [s, b,
    h] → [s, b, h], or [s/t, b, h] → [s/t, b, h] where the sequence is divided. Backward recomputes
    nothing if `form` is "none", the attention's scores if "selective", the layer if "full". All
    tensor-parallel ranks call it."""

    def __init__(self, h: int, heads: int, mesh: ParallelMesh, form: str = "none") -> None:
        super().__init__()
        self.heads = heads // mesh.tp.size
        self.form = form
        self.qkv = ColumnParallelLinear(h, 3 * h, mesh)
        self.out = RowParallelLinear(h, h, mesh)
        self.up = ColumnParallelLinear(h, 4 * h, mesh)
        self.down = RowParallelLinear(4 * h, h, mesh)
        self.norms = nn.ModuleList([nn.LayerNorm(h), nn.LayerNorm(h)])

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "full":
            return checkpoint(self.layer, x, use_reentrant=True)
        return self.layer(x)

    def layer(self, x: Tensor) -> Tensor:
        """Return the output of the whole layer for its input `x`: attention and MLP, each with its
        norm, its dropout and its residual sum. Input and output are [s, b, h], or [s/t, b, h] where
        the sequence is divided. With the form "selective", backward computes the scores a second
        time, by the method `attend`, if gradients are enabled. With "full", this method recomputes
        nothing: the method `forward` calls it through torch's `checkpoint`, so that backward calls
        it a second time. Every tensor-parallel rank calls this method."""
        qkv = self.qkv(self.norms[0](x))
        is_again = self.form == "selective" and torch.is_grad_enabled()
        scores = partial(checkpoint, self.attend, use_reentrant=True) if is_again else self.attend
        x = x + _dropped(self.out(scores(qkv)))
        return x + _dropped(self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh")))

    def attend(self, qkv: Tensor) -> Tensor:
        """Return the heads' outputs [s, b, h/t] of causal attention with dropout. `qkv`
        [s, b, 3h/t] has, head after head, the head's query, key and value."""
        s, b, columns = qkv.shape
        # Each [b·a/t, s, d].
        query, key, value = qkv.view(s, b * self.heads, 3, -1).permute(2, 1, 0, 3).unbind(0)
        hidden = torch.full((s, s), float("-inf"), dtype=qkv.dtype, device=qkv.device).triu(1)
        scores = torch.baddbmm(hidden, query, key.transpose(1, 2), alpha=query.size(2) ** -0.5)
        return (
            torch.bmm(_dropped(torch.softmax(scores, dim=-1)), value)
            .transpose(0, 1)
            .reshape(s, b, columns // 3)
        )


def _dropped(x: Tensor) -> Tensor:
    return torch.native_dropout(x, PROBABILITY, True)[0]


class Held:
    """A tensor that autograd saved; `SavedBytes` counts it until autograd lets it go."""

    def __init__(self, tensor: Tensor, memory: "SavedBytes") -> None:
        self.tensor = tensor
        self.memory = memory
        memory.change(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self.memory.change(self.tensor.untyped_storage(), -1)


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Context manager, made with a module, that counts the bytes of the tensors that autograd saves
    on this rank while it is entered, each storage once and the module's parameters never: `now` are
    the bytes that are held, `peak` is the most that were held at once."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = {
            parameter.untyped_storage().data_ptr() for parameter in module.parameters()
        }
        self.holders = Counter[int]()
        self.now = 0
        self.peak = 0
        super().__init__(lambda tensor: Held(tensor, self), lambda held: held.tensor)

    def change(self, storage: torch.UntypedStorage, by: int) -> None:
        """Count one holder of a storage more (`by` = 1) or less (`by` = -1), and bring the
        attributes `now` and `peak`, in bytes, up to date: a storage's bytes count once, while it
        has a holder; a parameter's bytes never count."""
        address = storage.data_ptr()
        before = self.holders[address]
        self.holders[address] += by
        if address not in self.parameters and 0 in (before, before + by):
            self.now += by * storage.nbytes()
            self.peak = max(self.peak, self.now)


def kept_bytes(layer: nn.Module, *inputs: Any) -> int:
    """Call the module `layer` with the arguments `inputs` and return the number of bytes in the
    storages that autograd then holds for backward, without the module's parameters; each storage
    counts once."""
    memory = SavedBytes(layer)
    with memory:
        output = layer(*inputs)
    total = memory.now
    del output
    return total


def bytes_per_sbh(shape: str, sequence_parallel: bool) -> list[float]:
    """Run four layers forward in bf16, divided over all ranks, with `sequence_parallel` also over
    the sequence: a PlainLayer of each of `FORMS` ("none", "selective", "full") and the engine's
    layer. Return a list of the bytes, for each in this order, that this rank keeps for backward per
    element of the undivided [s, b, h]. `shape` is a key of `SMALL`. Every rank calls this; without
    a process group it runs on one rank, where `sequence_parallel` has no effect."""
    s, heads, h = SMALL[shape]
    tp = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    mesh = build_mesh(Layout(tp=tp), sequence_parallel)
    rows = s // tp if mesh.sequence_parallel else s
    x = torch.zeros(rows, 1, h, dtype=torch.bfloat16, requires_grad=True)
    counts = [kept_bytes(PlainLayer(h, heads, mesh, form).bfloat16(), x) for form in FORMS]
    config = ModelConfig(num_layers=1, hidden_size=h, num_heads=heads, seq_length=s)
    ours = TransformerLayer(config, mesh, 0).bfloat16()
    counts.append(kept_bytes(ours, x, Dropout(PROBABILITY, 1, 0, (0,))))
    return [count / (s * h) for count in counts]


def measure_activations() -> list[Line]:
    """Return a list of lines, dicts with a record's fields. For each of the two models in `SHAPES`
    these are the bytes that a layer keeps for backward for each element of [s, b, h] (2022 paper,
    Table 2), measured in small layers on 1 and on 8 ranks, and numbers that follow from them, such
    as ratios and the layers for each checkpoint; and the FLOPs of an iteration and of a layer as
    the papers' coefficients, with the percentage that selective recomputation adds, counted
    without computing. The last line has the terabytes of a checkpoint of a model of a trillion
    parameters. Starts processes."""
    announce(f"a layer on 1 and {TENSOR_RANKS} processes, and models without their values")
    numbers = []
    for shape in SHAPES:
        numbers += _kept(shape)
        numbers += _flops(shape)
    return numbers + _checkpoint()


def _kept(shape: str) -> list[Line]:
    # one rank comes first, in this process: the forked ranks inherit its compiled loops
    measured = {(1, False): bytes_per_sbh(shape, False)}
    for divided in (False, True):
        of_ranks = run_forked(bytes_per_sbh, TENSOR_RANKS, shape, divided)
        measured[TENSOR_RANKS, divided] = of_ranks[0]
    rows = {
        name: measured[tp, divided][FORMS.index(form)]
        for name, (form, tp, divided) in CONFIGURATIONS.items()
    }
    s, heads, h = SMALL[shape]
    note = f"autograd's saved tensors in bf16; s {s}, {heads} heads, h {h}: as/h as published"
    rows |= {
        f"this engine's layer, t = {tp}{', sequence parallel' if divided else ''}": ours
        for (tp, divided), (*_, ours) in measured.items()
    }
    unreduced = rows["no parallelism"]
    tensor = rows["tensor parallel"]
    both = rows["tensor and sequence parallel, selective recomputation"]
    scores = unreduced - measured[1, False][FORMS.index("selective")]
    full = rows["full recomputation"]
    stage = SHAPES[shape][3]
    numbers = {
        "score_bytes_per_element": scores,
        "selective_activation_saving_percent": 100 * scores / unreduced,
        "memory_reduction": tensor / both,
        "memory_percent_of_baseline": 100 * both / tensor,
        "full_recomputation_percent_of_baseline": 100 * full / tensor,
        "memory_over_full_recomputation": both / full,
        "layers_per_checkpoint": min(
            range(1, stage + 1), key=lambda n: stage / n * full + n * unreduced
        ),
    }
    curve = []
    for name, value in rows.items():
        curve += lines(f"{shape}, {name}", {"kept_bytes_per_element": value}, note=note)
    return curve + lines(shape, numbers, note=note)


def _flops(shape: str) -> list[Line]:
    """Return a list of lines, dicts with a record's fields: the FLOPs of an iteration that
    recomputes nothing and of a layer with full recomputation, as coefficients that the papers state
    as 72 and 96 (2022 paper, Equation 7; 2021 paper, Equation 3), the percentage of FLOPs that
    selective recomputation adds to a layer, and the second coefficient in this engine's model of
    four layers. They come from products that torch counts without computing. `shape` is a key of
    `SHAPES`."""
    s, heads, h, _ = SHAPES[shape]
    layers = 4
    config = ModelConfig(
        num_layers=layers, hidden_size=h, num_heads=heads, seq_length=s, dropout=0.0
    )
    v = config.padded_vocab_size
    with torch.device("meta"):
        x = torch.zeros(s, 1, h, dtype=torch.bfloat16, requires_grad=True)
        none, selective, full = (
            _counted(PlainLayer(h, heads, serial_mesh(), form).bfloat16(), x) for form in FORMS
        )
        tokens = torch.zeros(1, s, dtype=torch.long)
        batch = PipelineInput(tokens, tokens)
        plain, again = (
            _counted(
                lambda model: model.batch_loss(model(tokens), batch),
                GPT2(config, serial_mesh("meta"), parallel=parallel).bfloat16(),
            )
            for parallel in (ParallelConfig(), ParallelConfig(recompute="full"))
        )
    scores = 1 + s / (6 * h)
    form = layers * s * h**2
    logits = v / (h * layers)
    values = {
        "model_flops_coefficient": plain / form / (scores + logits / 12),
        "recomputed_flops_coefficient": full / (s * h**2) / scores,
        "selective_flops_overhead_percent": 100 * (selective / none - 1),
    }
    ours = {"recomputed_flops_coefficient": again / form / (scores + logits / 16)}
    note = "products counted in layers of the published shape, on no device"
    return lines(shape, values, note=note) + lines(f"{shape}, this engine's model", ours, note=note)


def _counted(run: Callable[..., Tensor], *inputs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run(*inputs).sum().backward()
    return int(counter.get_total_flops())


def _checkpoint() -> list[Line]:
    """Return a list of one line, a dict with a record's fields: the terabytes (10¹² bytes) of a
    checkpoint of the model of a trillion parameters, from the bytes per parameter of a small
    model's checkpoint in a training in fp16, which is written to a temporary folder."""
    train = TrainConfig(precision="fp16")
    mesh = serial_mesh()
    model = MODEL.model_copy(update={"hidden_size": 256})
    partitioned, step = build_step(model, train, ParallelConfig(), mesh)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer").mkdir()
        config = RunConfig(name="size", model=model, train=train)
        save_checkpoint(
            Path(folder),
            config,
            TrainingState(0, 0),
            partitioned.parameters,
            step.optimizer,
            mesh,
            Path(folder) / "tokenizer",
        )
        written = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
    trillion = ModelConfig(num_layers=128, hidden_size=25600, num_heads=160, seq_length=2048)
    per_parameter = written / parameter_count(model)
    note = f"{per_parameter:.2f} bytes a parameter in one of {parameter_count(model):,} parameters"
    return lines(
        "1T", {"checkpoint_terabytes": per_parameter * parameter_count(trillion) / 1e12}, note=note
    )
