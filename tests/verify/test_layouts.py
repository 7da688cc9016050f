"""`mlm-verify layouts`: a program with a fault on a layout is told from its own serial run, healthy ones are not."""

import json
from pathlib import Path

import pytest

from tests.commands import Command
from verify.layouts import LayoutsReport
from verify.megatron_core import MegatronCore

OFFSETS = {f"decoder.layers.{layer}.self_attention.core_attention.softmax_offset" for layer in (0, 1)}


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    MegatronCore.prepare()  # once, before ranks are forked


def test_a_learnable_softmax_is_counted_once_where_tensor_parallel_ranks_divide_it(
    verify: Command, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    done = verify("layouts", "megatron-core", "--with", "softmax_type=learnable", "--json", file)
    assert done.code == 3
    assert done.error.startswith("error: tp2: planted gradient: decoder.layers.0.self_attention.core_attention.softmax")
    report = LayoutsReport.model_validate(json.loads(file.read_text()))
    assert {(each.layout, each.probe, round(each.value, 6), each.expected) for each in report.findings} == {
        (layout, "planted gradient", 2.0, 4.0) for layout in ("tp2", "tp2-sp")
    }
    assert {each.parameter for each in report.findings} == OFFSETS
    assert report.compared == {"serial": 122, "tp2": 122, "tp2-sp": 122, "pp2": 122, "dp2": 122, "dp2-zero1": 32}
    assert report.cannot_run == {}


@pytest.mark.parametrize("subject", ["megatron-core", "here"])
def test_a_healthy_program_raises_no_alarm(subject: str, verify: Command) -> None:
    done = verify("layouts", subject)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "nothing found: 6 layouts compute what the serial run computes"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--with", "softmax_tipe=a"], "Megatron-Core has no field 'softmax_tipe'; the nearest is softmax_type"),
        (["--with", "num_layers=many"], "num_layers=many: the field is a int, not 'many'"),
        (["--with", "activation_func=silo"], "activation_func=silo: torch.nn.functional has no such function"),
        (["--with", "num_layers"], "--with num_layers has no value: write FIELD=VALUE"),
        (["--with", "sequence_parallel=True"], "sequence_parallel is set by --layouts"),
        (["--with", "softmax_type=soft"], "softmax_type=soft: the field is a Literal["),
        (["--layouts", "tp3"], "tp3 cannot run: ValueError: num_attention_heads (4) must be a multiple"),
        (["--layouts", "cp2"], "cp2 cannot run: AssertionError: Context parallelism is only supported by TEDotProduct"),
        (["--layouts", "xp2"], "'xp2' is not a layout"),
        (["--with", "transformer_impl=5"], "transformer_impl=5: the field is a Literal["),
        (["--with", "moe_router_topk=1", "--with", "num_moe_experts=2"],
         "the serial run cannot run here: ValueError: Please use --moe-router-pre-softmax when topk is 1."),
    ],
)  # fmt: skip
def test_what_cannot_run_is_said_in_a_sentence(arguments: list[str], sentence: str, verify: Command) -> None:
    done = verify("layouts", "megatron-core", *arguments)
    assert (done.code, done.error[: len(sentence) + 7]) == (2, f"error: {sentence}")
