"""The page of what `mlm-verify layouts` found: parameters beside layouts, coloured by probe."""

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from lineage.atomic import write_text
from verify.layouts import LayoutFinding, LayoutsReport

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
