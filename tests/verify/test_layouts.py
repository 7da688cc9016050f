"""`mlm-verify layouts`: a program with a fault on a layout is told from its own serial run, healthy
ones are not."""

import json
import re
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from mlm_repro.verify.causes import LayoutFinding, parameter_of
from mlm_repro.verify.found import LayoutsReport, junit, sarif
from mlm_repro.verify.layouts import Serial, examine, run_serial
from mlm_repro.verify.megatron_core import MegatronCore, core, places_of
from mlm_repro.verify.parity import parse_layout
from mlm_repro.verify.subjects import Asked, subject
from tests.commands import ROOT, Command
from tests.verify import faults
from tests.verify.faults import Fault

OFFSETS = {
    f"decoder.layers.{layer}.self_attention.core_attention.softmax_offset" for layer in (0, 1)
}


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    MegatronCore.prepare()  # once, before ranks are forked


def test_a_learnable_softmax_is_counted_once_where_tensor_ranks_divide_it(
    verify: Command, tmp_path: Path
) -> None:
    file, alone = tmp_path / "found.json", tmp_path / "alone"
    options = (
        "--with",
        "softmax_type=learnable",
        "--json",
        file,
        "--reproduce",
        alone,
        "--out",
        tmp_path / "page",
    )
    done = verify("layouts", "megatron-core", *options)
    assert done.code == 3
    assert done.error.startswith(
        "error: tp2: initial shards: decoder.layers.0.self_attention.core_attention.softmax"
    )
    report = LayoutsReport.model_validate(json.loads(file.read_text()))
    assert {
        (each.layout, each.probe, round(each.value, 6), each.expected) for each in report.findings
    } == {
        (layout, *cause)
        for layout in ("tp2", "tp2-sp")
        for cause in (("planted gradient", 2.0, 4.0), ("initial shards", 0.0, 0.0))
    }
    assert all({each.parameter, *each.alike} == OFFSETS for each in report.findings)
    assert set(report.compared) == {"serial", "tp2", "tp2-sp", "pp2", "dp2", "dp2-zero1"}
    assert set(report.compared.values()) == {2 * 124}
    assert (report.cannot_run, list(report.not_asked)) == ({}, ["dp2-zero1"])
    cases = ElementTree.parse(tmp_path / "page" / "junit.xml").getroot().findall("testcase")
    assert {
        case.get("name"): len(case.findall("failure")) for case in cases if case.findall("failure")
    } == {"tp2": 2, "tp2-sp": 2}
    results = json.loads((tmp_path / "page" / "findings.sarif").read_text())["runs"][0]["results"]
    assert {each["ruleId"] for each in results} == {"planted gradient", "initial shards"}
    (program,) = (path for path in alone.iterdir() if path.name.startswith("tp2-planted"))
    text = program.read_text()
    assert len(text.splitlines()) <= 60
    assert "mlm_repro" not in text
    said = run_alone(program)
    key = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    assert [line for line in said if "of ones" in line] == [
        f"{name}: the squared norm of ones in {key}: {n}.0000"
        for name, n in (("serial", 4), ("tp2", 2))
    ]


def test_code_scanning_can_place_a_finding_and_know_it_again() -> None:
    """GitHub refuses a file with a result that has no file and line, and knows a result again by
    `primaryLocationLineHash` alone."""
    finding = {"layout": "tp2", "probe": "gradient", "parameter": "gradient of up.weight"}

    def report(program: str, **more: float) -> LayoutsReport:
        return LayoutsReport(
            subject=program,
            program=program,
            fields={},
            spec="",
            microbatches=1,
            seed=1,
            compared={"serial": 1, "tp2": 1, "pp2": 0, "dp2": 1},
            findings=[LayoutFinding.model_validate({**finding, "expected": 0.0, **more})],
            cannot_run={"pp2": "no pipeline", "dp2": "rank 1 ended"},
            not_asked={},
            lost={"dp2": "rank 1 ended"},
        )

    marks = set()
    for program, file in (
        ("tests/plan.py:build", "tests/plan.py"),
        ("megatron-core", "megatron-core"),
    ):
        for value in (1.0, 2.0):
            (result,) = json.loads(sarif(report(program, value=value)))["runs"][0]["results"]
            (location,) = result["locations"]
            assert location["physicalLocation"] == {
                "artifactLocation": {"uri": file},
                "region": {"startLine": 1},
            }
            assert location["logicalLocations"] == [{"fullyQualifiedName": "up.weight"}]
            marks.add(result["partialFingerprints"]["primaryLocationLineHash"])
    assert marks == {"tp2 gradient gradient of up.weight"}
    suite = ElementTree.fromstring(junit(report("megatron-core", value=1.0)))
    assert {case.get("name"): [each.tag for each in case] for case in suite} == {
        "serial": [],
        "tp2": ["failure"],
        "pp2": ["skipped"],
        "dp2": ["error"],
    }


def test_a_clone_of_the_package_is_named_by_its_own_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core("package_info"), "__version__", "0.99.0+mine")
    with subject(Asked("megatron-core"), 1) as (_, _, title, _):
        assert title == "megatron-core 0.99.0+mine"


def run_alone(program: Path) -> list[str]:
    """What a program prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, program],
        cwd=program.parent,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_healthy_program_raises_no_alarm(verify: Command) -> None:
    done = verify("layouts", "megatron-core")
    assert done.code == 0, done.err
    assert (
        done.out.splitlines()[-1] == "nothing found: 6 layouts compute what the serial run computes"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--with", "softmax_tipe=a"],
            "Megatron-Core has no field 'softmax_tipe': did you mean 'softmax_type'?",
        ),
        (
            ["--with", "num_layers=many"],
            "num_layers=many in --with: the field must be int, not 'many'",
        ),
        (
            ["--with", "num_layers={[]: 1}"],
            "num_layers={[]: 1} in --with: the field must be int, not '{[]: 1}'",
        ),
        (
            ["--with", "activation_func=silo"],
            "activation_func=silo in --with: torch.nn.functional has no such function; name one",
        ),
        (["--with", "num_layers"], "--with num_layers has no value: write FIELD=VALUE"),
        (
            ["--with", "sequence_parallel=True"],
            "sequence_parallel is set by the names of --layouts: leave it out of --with",
        ),
        (
            ["--with", "softmax_type=soft"],
            "softmax_type=soft in --with: the field must be Literal[",
        ),
        (["--layouts", "xp2"], "'xp2' is not a layout"),
        (
            ["--with", "transformer_impl=5"],
            "transformer_impl=5 in --with: the field must be Literal[",
        ),
        (
            ["--with", "moe_router_topk=1", "--with", "num_moe_experts=2"],
            (
                "the serial run, the program on one rank, cannot run here; correct the program or"
                " its fields: ValueError: Please use --moe-router-pre-softmax when topk is 1."
            ),
        ),
    ],
)
def test_what_cannot_run_is_said_in_a_sentence(
    arguments: list[str], sentence: str, verify: Command
) -> None:
    done = verify("layouts", "megatron-core", *arguments)
    assert (done.code, done.error[: len(sentence) + 7]) == (2, f"error: {sentence}")


def test_layouts_that_cannot_run_are_said_in_the_words_of_the_program(verify: Command) -> None:
    done = verify("layouts", "megatron-core", "--layouts", "tp3,mb1", ends=2)
    tp3, mb1 = done.error.split("; mb1 ")
    assert tp3.startswith(
        "error: tp3 cannot run: ValueError: num_attention_heads (4) must be a multiple"
    )
    assert (
        mb1 == "cannot run: a layout with mb needs --with calculate_per_token_loss=True:"
        " otherwise the loss is a mean over microbatches and depends on their size"
    )


@cache
def healthy(*fields: str) -> Serial:
    """The serial run of Megatron-Core as it is."""
    with subject(Asked("megatron-core", fields), 7) as (kind, work, _, _):
        return run_serial(kind, work)


WORDS, NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
EXPERTS, LAYER = ["num_moe_experts=4", "add_bias_linear=False"], "decoder.layers.0."
PLANTED: list[tuple[Fault, list[str], str, str, str, str]] = [
    (faults.forget_layernorm_gradients, [], "tp2-sp", "gradient", NORM, "dp2"),
    (
        faults.forget_layernorm_gradients,
        ["qk_layernorm=True"],
        "tp2",
        "gradient",
        LAYER + "self_attention.q_layernorm.weight",
        "dp2",
    ),
    (faults.sum_layernorm_gradients_twice, [], "tp2-sp", "gradient", NORM, "tp2"),
    (faults.forget_tied_embedding, [], "pp2", "gradient", WORDS, "tp2"),
    (faults.sum_tied_embedding_twice, [], "pp2", "gradient", WORDS, "tp2"),
    (faults.count_tied_embedding_twice, [], "pp2", "planted gradient", WORDS, "tp2"),
    (faults.sum_over_data_parallel_ranks, [], "dp2", "gradient", NORM, "tp2"),
    (faults.forget_data_parallel_ranks, [], "dp2", "gradient", NORM, "tp2"),
    (faults.shift_words, [], "tp2", "loss", "loss of tokens", "dp2"),
    (faults.add_bias_on_every_rank, [], "tp2", "loss", "loss of tokens", ""),
    (
        faults.clip_by_local_norm,
        [],
        "tp2",
        "planted gradient",
        LAYER + "mlp.linear_fc1.weight",
        "dp2",
    ),
    (faults.clip_by_local_norm, [], "pp2", "planted gradient", NORM, "dp2"),
    (faults.take_stale_microbatch, [], "pp2", "loss", "loss of tokens", "dp2"),
    (
        faults.forget_backward_all_reduce,
        [],
        "tp2",
        "gradient",
        "decoder.final_layernorm.bias",
        "dp2",
    ),
    (faults.count_copies, [], "tp2", "planted gradient", NORM, "pp2"),
    (
        faults.forget_router_gradient,
        EXPERTS,
        "tp2-sp",
        "gradient",
        LAYER + "mlp.router.weight",
        "ep2",
    ),
    (faults.begin_routers_apart, EXPERTS, "dp2", "initial copies", LAYER + "mlp.router.weight", ""),
    (
        faults.forget_scale_of_experts,
        EXPERTS,
        "ep2",
        "gradient",
        LAYER + "mlp.experts.experts.linear_fc1.weight",
        "",
    ),
    (faults.keep_updated_weights, [], "dp2-zero1", "copies", f"updated {WORDS}", "dp2"),
    (
        faults.double_gradient_between_stages,
        [],
        "pp2",
        "gradient",
        LAYER + "mlp.linear_fc2.bias",
        "tp2",
    ),
    (faults.lose_final_layernorm, [], "pp2", "gradient", NORM, "tp2"),
    (
        faults.decay_biases_on_one_rank,
        [],
        "dp2",
        "copies",
        f"updated {LAYER}self_attention.linear_qkv.layer_norm_weight",
        "",
    ),
    (faults.raise_rate_of_one_rank, [], "dp2", "copies", "learning rate", ""),
    (faults.mask_words, [], "dp2", "loss", "loss of tokens", ""),
    (
        faults.seed_alike,
        [],
        "tp2",
        "dropout",
        LAYER + "self_attention.core_attention.attention_dropout",
        "dp2",
    ),
    (faults.seed_apart, [], "tp2", "dropout", LAYER.removesuffix("."), "pp2"),
    (faults.lose_moments, [], "tp2", "checkpoint", "exp_avg of " + WORDS, "dp2"),
    (faults.restart_schedule, [], "pp2", "checkpoint", "learning rate", "tp2"),
]
"""Faults, fields, and the layout, probe and tensor that show them; last a layout where there is
nothing to show."""


@pytest.mark.parametrize(
    ("fault", "fields", "layout", "probe", "parameter", "silent"),
    PLANTED,
    ids=[f"{fault.__name__}-{layout}" for fault, _, layout, *_ in PLANTED],
)
def test_a_planted_fault_is_found_where_it_is_and_nowhere_else(
    fault: Fault,
    fields: list[str],
    layout: str,
    probe: str,
    parameter: str,
    silent: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    serial = healthy(*fields)
    fault(monkeypatch)
    if fault in (faults.mask_words, faults.clip_by_local_norm):  # which change the serial run too
        serial = healthy.__wrapped__(*fields)
    layouts = [parse_layout(name) for name in (layout, silent) if name]
    wrong = {
        each.outcome.layout.name: (each.findings, each.cannot_run)
        for each in examine(serial, layouts)
    }
    assert wrong["serial"] == ([], "")
    assert wrong.get(silent, ([], "")) == ([], "")
    named = {
        (each.probe, parameter_of(name))
        for each in wrong[layout][0]
        for name in (each.parameter, *each.alike)
    }
    assert (probe, parameter_of(parameter)) in named, wrong[layout]
    if fault is faults.add_bias_on_every_rank:
        bias = LAYER + "self_attention.linear_proj.bias"
        assert f"whose output has 1.000 × {bias} more" in wrong[layout][0][0].kind


TOKENS, EXCHANGE = "calculate_per_token_loss=True", "moe_token_dispatcher_type=alltoall"


@pytest.mark.parametrize(
    ("fields", "layouts"),
    [
        ([], "cp2 tp2-cp2-sp"),
        ([TOKENS, "position_embedding_type=rope"], "cp2-dp2 mb1 mb4"),
        ([*EXPERTS, EXCHANGE, "expert_tensor_parallel_size=1"], "tp2-ep2-sp"),
    ],
)
def test_axes_of_a_healthy_program_show_nothing(fields: list[str], layouts: str) -> None:
    torch.set_num_threads(1)
    for each in examine(healthy(*fields), [parse_layout(name) for name in layouts.split()]):
        assert (each.findings, each.cannot_run) == ([], ""), each.outcome.layout.name


def test_the_gradient_of_keys_on_other_context_ranks_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    serial, mappings = healthy(), core("tensor_parallel.mappings")
    gather = partial(
        mappings.gather_from_sequence_parallel_region, tensor_parallel_output_grad=False
    )
    monkeypatch.setattr(mappings, "gather_from_sequence_parallel_region", gather)
    _, cp2 = examine(serial, [parse_layout("cp2")])
    assert any("linear_qkv" in str(each) for each in cp2.findings)


def test_a_loss_of_sequences_that_depends_on_the_microbatch_is_found() -> (
    None
):  # mended in 0.20 by upstream's #5798
    torch.set_num_threads(1)
    fields = [
        *EXPERTS,
        TOKENS,
        "moe_router_load_balancing_type=seq_aux_loss",
        "moe_aux_loss_coeff=0.1",
    ]
    _, mb1 = examine(healthy(*fields), [parse_layout("mb1")])
    assert any(
        each.probe == "gradient" and "router.weight" in each.parameter for each in mb1.findings
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_context_ranks_have_a_chunk_of_each_end_and_all_of_it_together(ranks: int) -> None:
    own = [places_of(12, ranks, rank) for rank in range(ranks)]
    assert torch.cat(own).sort().values.tolist() == list(range(12))
    pairs = {sum(int(query) + 1 for query in each) for each in own}
    assert len(pairs) == 1  # of a causal mask each has as many pairs of query and key


def on_the_page(word: str) -> str:
    """The program of the page that has the word."""
    page = (ROOT / "docs" / "other-engines.md").read_text(encoding="utf-8")
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.S) if word in each)
    return str(code)


def test_a_program_of_the_readers_is_examined_as_the_page_says(
    verify: Command, tmp_path: Path
) -> None:
    code = on_the_page("def add_up")
    wrong = 'add_up(model["down"](torch.relu(model["up"](x))))'
    right = 'add_up(torch.relu(model["up"](x)) @ model["down"].weight.T) + model["down"].bias'
    assert len(code.splitlines()) <= 40
    assert wrong in code
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "mended.py").write_text(code.replace(wrong, f"({right})"))
    done = verify("layouts", f"{tmp_path}/mine.py:build", "--layouts", "tp2")
    assert done.code == 3
    assert "  tp2: loss: mean loss differs by " in done.out
    # Each rank's output is a part of a sum, to which every rank adds the bias.
    assert "first in down, whose output has 1.000 × down.bias more" in done.out
    assert verify("layouts", f"{tmp_path}/mended.py:build", "--layouts", "tp2").code == 0
    assert verify("layouts", f"{tmp_path}/absent.py:build").code == 2


def test_a_model_of_dtensors_on_the_page_is_healthy_with_its_checkpoint(
    verify: Command, tmp_path: Path
) -> None:
    (tmp_path / "theirs.py").write_text(on_the_page("clip_grad_norm_"))
    done = verify("layouts", f"{tmp_path}/theirs.py:build", "--layouts", "tp2")
    assert (done.code, "the program gives no functions `save` and `restore`" in done.out) == (
        0,
        True,
    ), done.err


def test_layers_and_a_patch_of_the_readers_run_as_the_page_says(
    verify: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = on_the_page("class ScaleNorm")
    mark = "        self.weight.sequence_parallel = config.sequence_parallel\n"
    assert mark in layers
    (tmp_path / "mine.py").write_text(layers)
    (tmp_path / "unmarked.py").write_text(layers.replace(mark, ""))
    (tmp_path / "patch.py").write_text(on_the_page("RowParallelLinear.forward = forward"))
    own = ("layouts", "megatron-core", "--layouts", "tp2-sp", "--spec")
    done = verify(*own, f"{tmp_path}/mine.py:layers")
    assert done.code == 0, done.err
    done = verify(*own, f"{tmp_path}/unmarked.py:layers")
    assert done.code == 3
    assert "gradient: decoder.layers.1.mlp.linear_fc1.layer_norm_weight is" in done.error
    assert "not reduced: each rank has its own part" in done.error, done.error
    forgetful = layers.replace(
        "    def forward(self, x):",
        "    sharded_state_dict = lambda self, *args, **kwargs: {}\n\n    def forward(self, x):",
    )
    assert forgetful != layers
    (tmp_path / "forgetful.py").write_text(forgetful)
    done = verify(*own, f"{tmp_path}/forgetful.py:layers")
    assert done.code == 2
    assert "`sharded_state_dict` has no entry for decoder.layers.0.input_layernorm" in done.error
    row = core("tensor_parallel.layers").RowParallelLinear
    monkeypatch.setattr(row, "forward", row.forward)  # put back what the patch replaces
    patched = ("--import", tmp_path / "patch.py")
    done = verify(*own, f"{tmp_path}/mine.py:layers", *patched)
    assert done.code == 3
    assert "the forward pass differs" in done.error, done.error


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        (
            "if layout.tp > 1 and rank: os._exit(1)",
            7,
            "tp2 lost a rank: rank 1 ended with exit code 1 before it answered",
        ),
        (
            "if layout.tp > 1 and rank: os.kill(os.getpid(), 9)",
            7,
            "tp2 lost a rank: rank 1 ended with exit code -9 before it answered",
        ),
        (
            "if layout.tp > 1 and rank: raise ValueError('mine')",
            2,
            "tp2 cannot run: ValueError: mine",
        ),
        (
            "x = torch.randn(16, 8, generator=torch.Generator().manual_seed(os.getpid()))",
            2,
            "the serial run is not deterministic: ",
        ),
    ],
)
def test_ranks_that_die_and_chance_are_said(
    change: str, code: int, sentence: str, verify: Command, tmp_path: Path
) -> None:
    lines = on_the_page("def add_up").replace(
        "    model = nn.ModuleDict", f"    {change}\n    model = nn.ModuleDict"
    )
    (tmp_path / "mine.py").write_text("import os\n" + lines)
    done = verify(
        "layouts", f"{tmp_path}/mine.py:build", "--layouts", "tp2" if code == 2 else "all"
    )
    assert done.code == code
    assert done.error.startswith(f"error: {sentence}")


@pytest.mark.parametrize(
    "name",
    [
        *("serial", "tp2-sp", "pp2-gpipe", "tp2-pp2-dp2-chunks2-sp-recompute", "tp2-ep2"),
        *("tp2-ep2-dp1", "dp4-ep2", "fsdp2-ep2", "dp2-fsdp2-ep2", "fsdp2-dp2", "cp2-dp2-mb4"),
    ],
)
def test_a_layout_s_name_is_read_as_the_layout(name: str) -> None:
    layout = parse_layout(name)
    assert parse_layout(layout.name) == layout
    assert sorted(layout.name.split("-")) == sorted(name.split("-"))
