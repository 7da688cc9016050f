"""Findings of `mlm-verify layouts` as JUnit and SARIF. Imports no torch."""

import json
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from pydantic import Field

from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.config import Config
from mlm_repro.verify.causes import LayoutFinding, parameter_of

PROBES = {
    "initial copies": "every copy of a parameter begins with the same bits",
    "initial shards": (
        "two parts of a parameter that is drawn at random do not begin with the same bits"
    ),
    "copies": (
        "after a step, every copy of a parameter, its gradient and its moments has the same bits"
    ),
    "loss": (
        "the loss of every microbatch and token, and every output that the program shows, is the"
        " serial one"
    ),
    "gradient": "the gradient of every parameter, and its norm, are the serial ones",
    "step": (
        "clipped steps with weight decay leave the serial weights and moments, at the serial rate"
    ),
    "planted gradient": (
        "of a gradient that is 1 in one parameter, the squared norm counts its elements"
    ),
    "dropout": (
        "tensor-parallel ranks drop the same elements of a copy, and others of their own parts"
    ),
    "checkpoint": (
        "a serial checkpoint goes on at this layout, and its own goes on serially, as without a"
        " stop"
    ),
}
"""Name of a probe → the statement that it proves if it finds nothing."""


class LayoutsReport(Config):
    """Results of all probes on every layout, as `mlm-verify layouts --json` writes them. `subject`
    is the program's name, with its release if it is a package. `findings` has the LayoutFindings of
    all layouts. By layout, `compared` has the number of compared tensors, for every layout that was
    tried, `cannot_run` the reason that it cannot run, `not_asked` the reason that its checkpoints
    were not compared, and `lost` how a rank was lost; a layout without such a reason is missing in
    these three. The other fields repeat what was asked for."""

    subject: str
    program: str
    fields: dict[str, str]
    spec: str
    microbatches: int
    seed: int
    compared: dict[str, int]
    """Number of compared tensors by layout."""
    findings: list[LayoutFinding]
    cannot_run: dict[str, str]
    """Layout → reason that it cannot run, in the program's own words."""
    not_asked: dict[str, str]
    """Layout → reason that its checkpoints were not compared."""
    lost: dict[str, str] = Field(default_factory=dict)
    """Layout → how a rank was lost; the layout is in `cannot_run` or `not_asked` too."""


def write_files(report: LayoutsReport, directory: Path) -> list[Path]:
    """Write a LayoutsReport into `directory`, which is made if it is missing, twice, as `junit.xml`
    and as `findings.sarif`, in place of earlier ones; return a list of these two paths in this
    order."""
    paths = [directory / "junit.xml", directory / "findings.sarif"]
    write_text(paths[0], junit(report))
    write_text(paths[1], sarif(report))
    return paths


def junit(report: LayoutsReport) -> str:
    """Return the report as a text of JUnit XML: each layout is a test, a finding a failure, a lost
    rank an error; a layout that cannot run is skipped. A layout whose checkpoints could not be
    compared, in `not_asked`, counts as passed if nothing was found and no rank lost."""
    suite = Element("testsuite", name=report.subject, tests=str(len(report.compared)))
    for layout in report.compared:
        case = SubElement(suite, "testcase", classname=report.program, name=layout)
        if layout in report.lost:
            SubElement(case, "error", type="lost rank", message=report.lost[layout])
        elif layout in report.cannot_run:
            SubElement(case, "skipped", message=report.cannot_run[layout])
        for finding in report.findings:
            if finding.layout == layout:
                SubElement(case, "failure", type=finding.probe, message=str(finding))
    return tostring(suite, encoding="unicode") + "\n"


def sarif(report: LayoutsReport) -> str:
    """Return the findings as a text of SARIF 2.1.0, which is JSON. The text has neither layouts
    that could not run nor ranks that were lost. Fingerprints stay the same as long as layout, probe
    and parameter do."""
    # GitHub refuses results without a file and a line, and knows no other name of a fingerprint.
    physical = {
        "artifactLocation": {"uri": report.program.partition(":")[0]},
        "region": {"startLine": 1},
    }
    results = [
        {
            "ruleId": finding.probe,
            "level": "error",
            "message": {"text": str(finding)},
            "partialFingerprints": {
                "primaryLocationLineHash": f"{finding.layout} {finding.probe} {finding.parameter}"
            },
            "locations": [
                {
                    "physicalLocation": physical,
                    "logicalLocations": [{"fullyQualifiedName": parameter_of(finding.parameter)}],
                }
            ],
        }
        for finding in report.findings
    ]
    driver = {
        "name": "mlm-verify layouts",
        "rules": [
            {"id": probe, "shortDescription": {"text": text}} for probe, text in PROBES.items()
        ],
    }
    log = {
        "version": "2.1.0",
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(log, indent=1) + "\n"
