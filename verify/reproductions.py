"""Programs of at most 60 lines that show a finding of `mlm-verify layouts` without this suite."""

import re
from pathlib import Path
from string import Template
from typing import Any

from mlm_repro.lineage.atomic import JSON, write_text
from mlm_repro.lineage.extras import import_extra
from mlm_repro.verify.causes import LayoutFinding, parameter_of
from mlm_repro.verify.found import LayoutsReport
from mlm_repro.verify.megatron_core import values_of
from mlm_repro.verify.parity import SERIAL, ParityLayout, parse_layout
from mlm_repro.verify.subjects import core_fields, small_work
from mlm_repro.verify.transformers_models import axes_of, sizes_of

MODEL = """def prepare(folder: str) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model({kind!r}, **{sizes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder)


def build(parallel: bool, folder: str) -> torch.nn.Module:
    how = {{"attn_implementation": "eager", "experts_implementation": "eager"}}  # in float64
    how["distributed_config"] = DistributedConfig(**{axes}) if parallel else None
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **how)


def batch() -> torch.Tensor:
    return torch.randint(3, 50, (8, 12), generator=torch.Generator().manual_seed(1))


def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())"""
SHARDED = """prepare = str  # nothing is prepared


def build(parallel: bool, folder: str) -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)
    if parallel:
        mesh = init_device_mesh("cpu", {sizes}, mesh_dim_names=("dp", "fsdp"))
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype={kind}))
        {divide}
    return model


def batch() -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()"""
OWN = """theirs = {{}}
exec(open({path!r}).read(), theirs)  # the program that was compared with its serial run


prepare = str  # nothing is prepared


def build(parallel: bool, folder: str) -> torch.nn.Module:
    axes = {axes}
    built = theirs[{function!r}](SimpleNamespace(**(axes if parallel else dict.fromkeys(axes, 1))))
    return built[0] if isinstance(built, tuple) else built


def batch() -> torch.Tensor:
    return theirs["batch"]


def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return theirs["loss"](model, rows) if "loss" in theirs else model(rows).square().mean()"""


def write_reproductions(report: LayoutsReport, directory: Path) -> list[Path]:
    """Write into `directory` a Python program for each finding of `report`, a LayoutsReport, if the
    finding can be shown without this suite, and print a line to standard output for each other
    finding. Return a list of the programs' paths, in the findings' order; it is empty if no program
    was written. A missing directory is made, and an earlier program of the same name is
    replaced."""
    paths = []
    for finding in report.findings:
        if text := program(finding, report):
            path = directory / re.sub(
                r"[^\w.-]",
                "-",
                f"{finding.layout}-{finding.probe}-{parameter_of(finding.parameter)}.py",
            )
            write_text(path, text)
            paths.append(path)
        else:
            print(
                f"no program is written for {finding.layout}: {finding.probe}: the package alone"
                " cannot show it"
            )
    return paths


def program(finding: LayoutFinding, report: LayoutsReport) -> str:
    """Return the text of a Python program that shows a finding, from the report that has it; empty
    if it cannot be shown without this suite. Raises ExtraMissing for a finding in transformers if
    that is not installed."""
    layout = parse_layout(finding.layout)
    key = parameter_of(finding.parameter)
    told: JSON = {
        "subject": report.subject,
        "title": f"{finding.probe} of {key}",
        "layout": layout.name,
        "key": repr(key),
    }
    if report.program == "megatron-core":
        if finding.probe not in ("planted gradient", "gradient", "loss") or report.spec:
            return ""
        return _filled("megatron-core.py.txt", told | {"runs": _runs(report, layout)})
    # The other probes look at what a step without this suite does not show.
    if finding.probe not in ("gradient", "loss") or key == "gradient norm":
        return ""
    data = layout.dp * layout.fsdp
    told |= {
        "key": repr(key if key == "mean loss" else f"gradient of {key}"),
        "ranks": layout.world_size,
        "data": data,
        "microbatches": report.microbatches or 1,
        "tp": layout.tp,
        "needs": "",
    }
    path, _, function = report.program.rpartition(":")
    if report.program == "transformers":
        kind, sizes = sizes_of(import_extra("transformers", "bench"), report.fields)
        told |= {
            "needs": " and transformers",
            "body": MODEL.format(kind=kind, sizes=sizes, axes=axes_of(layout)),
            "imports": (
                "from transformers import AutoConfig, AutoModelForCausalLM\n"
                "from transformers.distributed import DistributedConfig\n"
            ),
        }
    elif report.program == "torch" and data == layout.world_size:
        dtype = report.fields.get("reduce_dtype")
        factor = report.fields.get("gradient_divide_factor")
        told |= {
            "key": "'gradient of weight'",
            "imports": (
                "from torch.distributed.device_mesh import init_device_mesh\n"
                "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n"
            ),
            "body": SHARDED.format(
                sizes=(layout.dp, layout.fsdp),
                kind=dtype and f"torch.{dtype}",
                divide=f"model.set_gradient_divide_factor({factor})" if factor else "",
            ),
        }
    elif ".py" in path and "mlm_repro" not in Path(path).read_text(encoding="utf-8"):
        axes = {name: getattr(layout, name) for name in ("tp", "pp", "dp", "fsdp", "cp", "ep")}
        told |= {
            "imports": "from types import SimpleNamespace\n",
            "body": OWN.format(path=str(Path(path).resolve()), function=function, axes=axes),
        }
    else:
        return ""
    return _filled("torch.py.txt", told)


def _filled(name: str, told: JSON) -> str:
    return Template(
        (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")
    ).substitute(told)


def _runs(report: LayoutsReport, layout: ParityLayout) -> str:
    """Return the Python source text of a dict of three runs of Megatron-Core: `serial`, one under
    the name of `layout`, and `again`, the serial run repeated. A run is a dict of its number of
    `ranks` and of Megatron-Core's settings for its layout and a small model, as the `fields` of
    `report` change them: `kind`, the name of the configuration's class, and the dicts `groups`,
    `config`, `model`, `distributed` and `optimizer`."""
    work = small_work(report.seed, 2, core_fields(report.fields))
    # Serially twice, so that the program shows that its serial run is repeatable.
    runs = {}
    for name, shown in (("serial", SERIAL), (layout.name, layout), ("again", SERIAL)):
        values = values_of(work, shown) | {"ranks": shown.world_size}
        runs[name] = {
            key: values[key]
            for key in ("ranks", "groups", "kind", "config", "model", "distributed", "optimizer")
        }
    return _source(runs)


def _source(value: Any) -> str:
    """Return Python source text whose value is `value`: its repr, or `F.` and the name for a
    function, which must be one of torch.nn.functional. Values in a dict are written likewise."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_source(each)}" for name, each in value.items()) + "}"
    return f"F.{value.__name__}" if callable(value) and hasattr(value, "__name__") else repr(value)
