"""The page of what `mlm-verify layouts` found, and for each finding a program that needs Megatron-Core alone."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lineage.atomic import write_text
from verify.layouts import LayoutFinding, LayoutsReport
from verify.megatron_core import values_of
from verify.parity import SERIAL, ParityLayout, parse_layout
from verify.subjects import core_fields, small_work

COLOURS = ("#cc79a7", "#d55e00", "#e69f00", "#f0e442", "#2fb48a", "#56b4e9", "#b0b0b0", "#7fa3e0")
"""Colours of the probes, in their order; a probe has its number too."""


def write_page(report: LayoutsReport, directory: Path) -> Path:
    """Write `findings.json` and `index.html`; return the page's path."""
    numbers = {probe: number for number, probe in enumerate(report.probes, 1)}
    cells: dict[tuple[str, str], dict[int, LayoutFinding]] = {}
    for finding in report.findings:
        cell = cells.setdefault((parameter_of(finding), finding.layout), {})
        cell.setdefault(numbers[finding.probe], finding)
    template = Environment(loader=PackageLoader("verify"), autoescape=True, undefined=StrictUndefined)
    page = template.get_template("findings.html").render(
        report=report, cells=cells, colours=COLOURS,
        rows=dict.fromkeys([*report.parameters, *(row for row, _ in cells)]),
        fields=", ".join(f"{name}={value}" for name, value in report.fields.items()),
    )  # fmt: skip
    write_text(directory / "findings.json", report.model_dump_json(indent=1) + "\n")
    write_text(path := directory / "index.html", page)
    return path


def parameter_of(finding: LayoutFinding) -> str:
    """The parameter that a finding is about."""
    return re.sub(r"^(updated|gradient of|exp_avg of|exp_avg_sq of) ", "", finding.parameter)


def write_reproductions(report: LayoutsReport, directory: Path) -> list[Path]:
    """Write a program for each finding; return their paths."""
    paths = []
    for finding in report.findings:
        name = re.sub(r"[^\w.-]", "-", f"{finding.layout}-{finding.probe}-{finding.parameter}")
        paths.append(directory / f"{name}.py")
        write_text(paths[-1], _program(finding, report))
    return paths


def _program(finding: LayoutFinding, report: LayoutsReport) -> str:
    work = small_work(report.seed, core_fields([f"{name}={value}" for name, value in report.fields.items()]))
    saves = finding.probe == "checkpoint"
    layout = parse_layout(finding.layout)

    def run(layout: ParityLayout, restores: str = "", saves: bool = saves) -> dict[str, Any]:
        train = work.config.train
        batch = (train.global_batch_size, train.microbatch_size, work.config.model.seq_length)
        return values_of(work, layout) | {
            "ranks": layout.world_size, "batch": batch, "restores": restores, "saves": saves
        }  # fmt: skip

    runs = {"serial": run(SERIAL), layout.name: run(layout, "serial" * saves)}
    if saves:
        runs["serial again"] = run(SERIAL, layout.name, False)
    key = parameter_of(finding)
    text = Path(str(import_module("verify.alone").__file__)).read_text(encoding="utf-8")
    text = re.sub(r"(?m)^RUNS: .*$", lambda _: f"RUNS: dict[str, Any] = {_source(runs)}", text)
    text = re.sub(r'(?m)^KEY = ""$', lambda _: f"KEY = {key!r}", text)
    return f'"""{report.subject}: {finding}"""\n\n' + text.partition('"""\n\n')[2]


def _source(value: Any) -> str:
    """Python text of a value; functions are those of torch.nn.functional."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_source(each)}" for name, each in value.items()) + "}"
    return f"F.{value.__name__}" if callable(value) else repr(value)
