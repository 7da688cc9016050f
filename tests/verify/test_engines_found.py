"""`mlm-verify layouts` on other engines: faults of released packages are named, healthy ones raise
no alarm."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn

from mlm_repro.engine.compare.tensors import TensorPart
from mlm_repro.lineage.errors import BadInput
from mlm_repro.verify import layouts, torch_blocks, transformers_models
from mlm_repro.verify.causes import LayoutFinding, explain
from mlm_repro.verify.found import LayoutsReport
from mlm_repro.verify.layouts import Serial, examine, run_layouts, run_serial
from mlm_repro.verify.parity import ParityLayout, parse_layout
from mlm_repro.verify.reproductions import program, write_reproductions
from mlm_repro.verify.subjects import Asked, subject
from mlm_repro.verify.transformers_models import TABLES
from tests.commands import ROOT, Command
from tests.verify.findings import KNOWN, Known


def test_norms_of_queries_and_keys_are_named_where_microbatches_add_up(
    verify: Command, tmp_path: Path
) -> None:
    options = ("--with", "model_type=qwen3", "--layouts", "tp2")
    assert verify("layouts", "transformers", *options).code == 0
    done = verify(
        "layouts",
        "transformers",
        *options,
        "--microbatches",
        "2",
        "--reproduce",
        tmp_path / "alone",
    )
    assert done.code == 3
    (line,) = (line for line in done.out.splitlines() if line.startswith("  tp2: "))
    assert "q_norm.weight" in line
    assert "k_norm.weight" in line
    assert re.search(r" is 1\.\d{3} × serial ", line)
    assert "microbatches are counted 2, 1 times" in line
    (alone,) = (tmp_path / "alone").iterdir()
    assert len(alone.read_text().splitlines()) <= 60
    assert "mlm_repro" not in alone.read_text()
    said = subprocess.run(
        [sys.executable, "-X", "importtime", alone],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert min(float(number) for number in re.findall(r": (\d\.\d+)$", said.stdout, re.M)) > 0.1
    # Its ranks are forked: one that imports transformers anew takes ten seconds on a busy machine.
    assert len(re.findall(r"\| transformers$", said.stderr, re.M)) == 1


def test_norms_that_the_plan_leaves_out_keep_each_ranks_part(verify: Command) -> None:
    options = ("--with", "model_type=glm4_moe", "--with", "use_qk_norm=True", "--layouts", "tp2")
    done = verify("layouts", "transformers", *options)
    assert done.code == 3
    assert "each rank has its own part, and these add up to the serial gradient" in done.error
    assert "q_norm" in done.error


def test_multipliers_that_no_rank_of_fsdp_initialises_are_seen_in_the_loss(tmp_path: Path) -> None:
    # What such memory holds is chance, once nearly the right value: glibc fills it with 0x7f here,
    # so that a multiplier is 1e306.
    filled = "glibc.malloc.perturb=128:glibc.malloc.tcache_count=0"
    said = partial(
        subprocess.run,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"GLIBC_TUNABLES": filled},
    )
    options = ("--with", "model_type=falcon_h1", "--layouts", "fsdp2", "--reproduce", tmp_path)
    program = Path(sys.executable).with_name("mlm-verify")
    done = said([program, "layouts", "transformers", *options])
    assert done.returncode == 3, done.stderr
    assert "  fsdp2: loss: mean loss differs by inf" in done.stdout
    (alone,) = tmp_path.iterdir()
    assert len(alone.read_text().splitlines()) <= 60
    shown = said([sys.executable, alone], check=True).stdout
    apart = [float(number) for number in re.findall(r"mean loss: (\S+)$", shown, re.M)]
    assert len(apart) == 2
    # Its sums of so large numbers may be NaN.
    assert not any(number < 1e-3 for number in apart)


@pytest.mark.parametrize(
    "known",
    # qwen3 and falcon_h1 have tests of their own above.
    [known for known in KNOWN if not known.fields.endswith(("qwen3", "falcon_h1"))],
    ids=lambda known: known.title,
)
def test_a_program_alone_shows_each_finding_of_the_page(known: Known, tmp_path: Path) -> None:
    report = run_layouts(
        Asked(known.program, known.fields.split(), known.microbatches), known.layout, 1234
    )
    alone = write_reproductions(report, tmp_path)[0]
    assert len(alone.read_text().splitlines()) <= 60
    assert "mlm_repro" not in alone.read_text()
    said = subprocess.run(
        [sys.executable, alone], capture_output=True, text=True, timeout=200, check=True
    ).stdout
    apart = re.findall(r"largest difference / largest [^:]*: ([\d.]+)", said)
    counted = re.findall(r"squared norm of ones in [^:]*: ([\d.]+)", said)
    assert max(map(float, apart)) > 1e-3 or len(set(counted)) > 1, said


LOUDER = """import torch

batch = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def build(layout):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    if layout.fsdp > 1:
        model.register_forward_hook(lambda _, __, output: output * 2)
    return model
"""


def test_a_wrong_loss_of_somebodys_program_is_shown_alone(verify: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOUDER)
    options = ("--layouts", "fsdp2", "--reproduce", tmp_path / "alone")
    done = verify("layouts", f"{tmp_path}/mine.py:build", *options)
    assert "  fsdp2: loss: mean loss differs by" in done.out
    (alone,) = (tmp_path / "alone").iterdir()
    said = subprocess.run(
        [sys.executable, alone], capture_output=True, text=True, timeout=200, check=True
    ).stdout
    # The mean square of outputs that are doubled is four times as large.
    assert re.findall(r"mean loss: (\S+)$", said, re.M) == ["3.0000", "3.0000"]


@pytest.mark.parametrize(
    ("probe", "parameter"), [("step", "seen"), ("gradient", "gradient norm"), ("copies", "a")]
)
def test_no_program_is_written_for_what_it_would_not_show(probe: str, parameter: str) -> None:
    finding = {"layout": "tp2", "probe": probe, "parameter": parameter, "value": 1, "expected": 0}
    report = LayoutsReport(
        subject="transformers",
        program="transformers",
        fields={},
        spec="",
        microbatches=1,
        seed=1,
        compared={},
        findings=[],
        cannot_run={},
        not_asked={},
        lost={},
    )
    assert program(LayoutFinding.model_validate(finding), report) == ""


def test_the_same_factor_halves_the_experts_of_transformers_in_float64(verify: Command) -> None:
    done = verify("layouts", "transformers", "--with", "model_type=qwen3_moe", "--layouts", "ep2")
    assert done.code == 3
    (line,) = (line for line in done.out.splitlines() if line.startswith("  ep2: "))
    assert re.match(
        r"  ep2: gradient: model\.layers\.1\.mlp\.experts\.down_proj is 0\.500 × serial", line
    )


@pytest.mark.parametrize(
    ("dtype", "code"), [("float16", 3), ("float64", 3), ("float32", 0), ("bfloat16", 0)]
)
def test_a_divide_factor_is_used_twice_in_types_that_may_overflow(
    dtype: str, code: int, verify: Command
) -> None:
    options = (
        "--with",
        f"reduce_dtype={dtype}",
        "--with",
        "gradient_divide_factor=2",
        "--layouts",
        "dp2,fsdp2",
    )
    done = verify("layouts", "torch", *options)
    assert done.code == code
    assert ("dp2: gradient: head.weight is 0.500 × serial" in done.out) == (code == 3)
    assert "  fsdp2: " not in done.out


def test_rotary_rows_of_latent_attention_are_one_ranks_part(verify: Command) -> None:
    fields = (
        "multi_latent_attention=True",
        "kv_lora_rank=16",
        "qk_pos_emb_head_dim=4",
        "qk_head_dim=8",
        "v_head_dim=8",
    )
    more = [part for field in fields for part in ("--with", field)]
    done = verify("layouts", "megatron-core", *more, "--layouts", "tp2,tp2-sp")
    assert done.code == 3
    name = r"decoder\.layers\.[01]\.self_attention\.linear_kv_down_proj\.weight"
    for layout in ("tp2", "tp2-sp"):
        # One cause is one line: both layers, and the norms and embeddings before them, follow.
        (line,) = (line for line in done.out.splitlines() if line.startswith(f"  {layout}: "))
        assert re.match(rf"  {layout}: gradient: {name} is ", line)
        assert "rows 16 to 19 of 20 alone differ" in line
        assert "what comes before it in the model differs too" in line


def test_a_balancing_loss_and_a_loss_per_token_are_a_pair_that_differs(verify: Command) -> None:
    fields = (
        "num_moe_experts=4",
        "add_bias_linear=False",
        "moe_aux_loss_coeff=0.1",
        "calculate_per_token_loss=True",
    )
    more = [part for field in fields for part in ("--with", field)]
    done = verify("layouts", "megatron-core", *more, "--layouts", "tp2-sp")
    assert done.code == 3
    assert "  tp2-sp: gradient: decoder.layers.1.mlp.router.weight" in done.out


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("torch", ["--layouts", "tp2,tp2-sp,dp2-fsdp2,fsdp2-tp2,pp2", "--microbatches", "2"]),
        ("torch", ["--layouts", "pp2", "--with", "schedule=ZBVZeroBubble"]),
        ("torch", ["--layouts", "pp4", "--with", "schedule=zbvzerobubble"]),
        ("transformers", ["--layouts", "tp2,fsdp2,dp2-fsdp2", "--with", "model_type=mixtral"]),
        ("transformers", ["--layouts", "fsdp2", "--with", "model_type=jamba"]),  # rows begin equal
        (
            "megatron-core",
            [
                "--layouts",
                "dp2-zero1",
                "--with",
                "overlap_grad_reduce=True",
                "--with",
                "overlap_param_gather=True",
            ],
        ),
        ("megatron-core", ["--layouts", "tp2,tp2-sp", "--with", "mtp_num_layers=1"]),
    ],
)
def test_healthy_engines_raise_no_alarm(program: str, options: list[str], verify: Command) -> None:
    done = verify("layouts", program, *options)
    assert done.code == 0, done.err


@pytest.mark.parametrize("kind", ["deepseek_v3", *TABLES["architectures"]])
def test_an_architecture_with_fields_of_its_own_is_made_small_and_runs(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = transformers_models.configured(transformers, {"model_type": kind})
    build = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build(config).parameters())
    assert size < 3_000_000
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = build(config, dtype=torch.float64, **how)
    loss = transformers_models.token_loss(model, transformers_models.batch_of(1))
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["transformers", "--with", "model_type=qwen33"],
            "transformers has no causal architecture --with model_type=qwen33: did you mean 'qwen3",
        ),
        (["transformers"], "transformers has no causal architecture --with model_type=: "),
        (
            ["transformers", "--with", "model_type=qwen3", "--with", "model_type=llama"],
            "--with names a field twice: give each field once",
        ),
        (
            ["transformers", "--with", "model_type=qwen3", "--with", "hidden_sizes=3"],
            "qwen3 has no field 'hidden_sizes': did you mean 'hidden_",
        ),
        (
            ["transformers", "--with", "model_type=qwen3", "--layouts", "pp2"],
            "pp2 cannot run: transformers is run with tp, ep, fsdp and dp",
        ),
        (["torch", "--with", "reduce_dtype=half7"], "--with: reduce_dtype: 'half7' should be"),
        (["torch", "--with", "tie=True"], "--with: unknown key 'tie'; did you mean 'tied'?"),
        (
            ["torch", "--with", "tied=True", "--layouts", "pp2"],
            "pp2 cannot run: torch's blocks with tp or pp cannot have the embedding as output head",
        ),
        (
            ["torch", "--spec", "a:b"],
            "--spec is for the program megatron-core alone: leave it out with torch",
        ),
        (
            ["megatron-core", "--spec", "nowhere:f"],
            "'nowhere' cannot be imported as a Python module: ModuleNotFoundError",
        ),
        (
            ["torch", "--import", "a.py", "--reproduce", "programs"],
            "--reproduce and --import do not go together",
        ),
        (
            ["megatron-core", "--microbatches", "3"],
            "--microbatches 3 does not divide the batch of 8 sequences: give 1, 2, 4 or 8",
        ),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(
    arguments: list[str], sentence: str, verify: Command
) -> None:
    done = verify("layouts", *arguments)
    assert (done.code, done.error[: len(sentence) + 7]) == (2, f"error: {sentence}")


class Gated(nn.Module):
    """A model that stands nowhere else: a gate, a product by columns and one by rows, added up over
    ranks."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.gate, self.up, self.down, self.fault = (
            nn.Linear(6, 6),
            nn.Linear(6, 8),
            nn.Linear(8, 6),
            fault,
        )
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += torch.ones(6) * (2 if self.fault == "buffer" and dist.is_initialized() else 1)
        return self.down(torch.tanh(self.up(x * torch.sigmoid(self.gate(x)))))


def divided(fault: str = "") -> Any:
    """A function that builds the model with DTensors, as its reader would."""

    def build(layout: ParityLayout) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        torch.manual_seed(3)
        model = Gated(fault)
        if layout.tp > 1:
            mesh = init_device_mesh("cpu", (layout.tp,))
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout.fsdp > 1:
            fully_shard(model, mesh=init_device_mesh("cpu", (layout.fsdp,)))
        if layout.world_size == 1:
            return model
        rank = dist.get_rank()
        if fault == "lost":
            model.gate.weight.register_hook(lambda gradient: gradient * (1 - rank))
        if fault == "twice":
            model.gate.bias.register_hook(lambda gradient: gradient * 2)
        if fault == "accumulates":
            model.gate.bias.register_post_accumulate_grad_hook(
                lambda parameter: (parameter.grad.mul_(2), None)[1]
            )
        if fault == "alike":
            torch.manual_seed(3)
            model.up.weight.data.to_local().normal_()
        if fault == "forward":
            model.down.register_forward_hook(lambda _, __, output: output * 1.001)
        if fault == "small":
            model.gate.bias.register_hook(lambda gradient: gradient * (1 + 1e-6))
        return model

    return build


X = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_model_of_somebodys_is_checked_in_one_line() -> None:
    layouts.check(divided(), X, "tp2,fsdp2", microbatches=2)


@pytest.mark.parametrize(
    ("fault", "layout", "sentence"),
    [
        ("lost", "tp2", "gradient: gate.weight "),
        ("twice", "tp2", "gradient: gate.bias is 2.000 × serial .* 2 times the serial gradient"),
        ("accumulates", "tp2", "gradient: gate.bias is .*; microbatches are counted 4, 2 times"),
        ("alike", "tp2", "initial shards: up.weight"),
        ("forward", "tp2", "loss: mean loss differs .* the forward pass differs"),
        ("small", "tp2", "gradient: gate.bias is 1.000 × serial .* off by 1e-06 of its size"),
        ("buffer", "tp2", "seen differs by"),
    ],
)
def test_a_fault_in_somebodys_model_is_named_with_its_kind(
    fault: str, layout: str, sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        layouts.check(divided(fault), X, layout, microbatches=2)


def test_what_was_found_is_said_although_another_layout_cannot_run() -> None:
    def build(layout: ParityLayout) -> nn.Module:
        if layout.pp > 1:
            raise BadInput("there are no stages")
        model: nn.Module = divided("twice" if layout.tp > 1 else "")(layout)
        return model

    with pytest.raises(AssertionError) as found:
        layouts.check(build, X, "pp2,tp2,pp3")
    first, *others = str(found.value).splitlines()
    assert first.startswith("tp2: gradient: gate.bias is 2.000 × serial")
    assert others == [f"{name} cannot run: there are no stages" for name in ("pp2", "pp3")]
    with pytest.raises(BadInput, match=r"^pp2 cannot run: there are no stages$"):
        layouts.check(build, X, "fsdp2,pp2")


def test_a_mean_over_each_ranks_own_tokens_is_seen() -> None:
    rows = {
        "x": X,
        "counts": (
            torch.arange(4) < torch.tensor([[4], [1], [2], [1], [3], [4], [1], [4]])
        ).double(),
    }

    def own_mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]).square().sum(-1) * batch["counts"]).sum() / batch["counts"].sum()

    with pytest.raises(AssertionError, match="fsdp2: loss: mean loss"):
        layouts.check(divided(), rows, "fsdp2", loss=own_mean)


def test_a_batch_that_cannot_be_divided_is_bad_input() -> None:
    with pytest.raises(BadInput, match="8 rows cannot be divided into the 3"):
        layouts.check(divided(), X, microbatches=3)


def _lose(name: str, factor: float) -> Any:
    return lambda model: model.get_parameter(name).register_hook(lambda gradient: gradient * factor)


PLANTS = [
    *(
        (name, factor, layout)
        for name in (
            "norm.weight",
            "layers.1.attention_norm.weight",
            "layers.2.up.bias",
            "layers.0.attention.q_norm.weight",
            "head.weight",
        )
        for factor, layout in ((2.0, "tp2"), (0.5, "tp2-sp"))
    ),
    ("layers.3.attention.v.weight", 0.0, "tp2"),
    ("embed.weight", 1.00001, "tp2"),
]


@pytest.fixture(scope="module")
def blocks() -> Serial:
    torch.set_num_threads(1)
    with subject(Asked("torch"), 5) as (kind, work, _, _):
        return run_serial(kind, work)


@pytest.mark.parametrize(("name", "factor", "layout"), PLANTS)
def test_a_factor_on_one_gradient_of_torchs_blocks_is_named(
    name: str, factor: float, layout: str, blocks: Serial, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide = torch_blocks.Builder.divide

    def planted(self: Any, model: nn.Module, *args: Any) -> None:
        divide(self, model, *args)
        _lose(name, factor)(model)

    monkeypatch.setattr(torch_blocks.Builder, "divide", planted)
    found = list(examine(blocks, [parse_layout(layout)]))[-1].findings
    assert [(each.probe, each.parameter) for each in found] == [("gradient", name)]
    assert found[0].ratio == pytest.approx(factor, abs=1e-6)


def test_numbers_of_nested_layers_become_stars_in_a_list() -> None:
    alike = tuple(f"stages.{stage}.{block}.norm.weight" for stage in (0, 1) for block in (0, 1, 2))
    found = LayoutFinding(
        layout="tp2", probe="dropout", parameter="x", value=0.0, expected=0.0, alike=alike
    )
    assert str(found).endswith("; so stages.*.*.norm.weight")


def test_kinds_of_wrong_gradients() -> None:
    serial = np.arange(1.0, 7.0).reshape(3, 2)

    def kind(*ranks: np.ndarray[Any, Any], shares: Any = ()) -> str:
        return explain([[TensorPart(0, "g", (0, 0), each)] for each in ranks], serial, shares)[1]

    assert kind(2 * serial, 2 * serial).startswith("2 times the serial gradient")
    assert kind(serial / 4, serial / 4).startswith("1/4 of the serial gradient")
    assert kind(serial * 0.25, serial * 0.75).startswith("not reduced")
    assert kind(serial + 1, serial - 1).startswith("not averaged")
    assert kind(serial * 3, serial - 1) == "copies differ between ranks"
    first = serial**2 / 10
    assert (
        kind(2 * first + (serial - first), shares=[first, serial])
        == "microbatches are counted 2, 1 times"
    )
    wrong = serial.copy()
    wrong[1] *= 0.5
    assert kind(wrong) == "rows 1 to 1 of 3 alone differ: 0.500 × serial there"


def test_the_line_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "other-engines.md").read_text(encoding="utf-8")
    (code,) = (
        each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "layouts.check(" in each
    )
    names: dict[str, Any] = {}
    exec(code, names)
    names["test_my_plan"]()


@pytest.mark.parametrize("part", ["recompute", "selective", "gpipe", "chunks2", "mb2"])
def test_a_part_of_a_layout_that_is_not_run_is_refused(part: str) -> None:
    """It would be run without that part, and be called healthy with it."""
    layout = parse_layout(f"tp2-{part}")
    with pytest.raises(BadInput, match="leave the other parts out of the layout's name"):
        transformers_models.axes_of(layout)
    with pytest.raises(BadInput, match="leave the other parts out of the layout's name"):
        torch_blocks.Builder(torch_blocks.Fields(), 0, 1, {})(layout)
