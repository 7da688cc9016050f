"""What only an extra brings is imported through `lineage.extras`, which names it and its extra
where it is missing."""

import re
import tomllib

from tests.architecture.rooms import ROOT, imported_names, modules

MODULE_OF = {"megatron-core": "megatron", "mkdocs-material": "material"}
"""Libraries that are imported by another name than they are installed by."""
PROGRAMS = {
    "engine/kernels/gpu": {"triton"},  # imported where the registry has found Triton
    "evaluation/conventions/oracle_files/tasks": {"lm_eval"},  # read by lm-evaluation-harness alone
}


def optional_modules() -> set[str]:
    """Modules that only extras bring, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        found = {re.split(r"[^\w-]", each, maxsplit=1)[0] for each in requirements}
        return {MODULE_OF.get(each, each.replace("-", "_")) for each in found} - {"mlm_repro"}

    extras = project["optional-dependencies"].values()
    return set().union(*map(names, extras)) - names(project["dependencies"])


def test_no_optional_library_is_imported_in_the_plain_way() -> None:
    optional = optional_modules()
    assert {"ray", "triton", "lm_eval", "transformers", "tensorboard"} <= optional
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        for line, name in imported_names(path)
        if (top := name.partition(".")[0]) in optional
        and not any(
            (ROOT / place) in (path, path.parent) and top in allowed
            for place, allowed in PROGRAMS.items()
        )
    ]
    assert found == []


def test_every_extra_that_an_error_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    named = {
        name
        for path in modules()
        for name in re.findall(
            r'(?:import_extra\("[\w.]+", |install_command\()["\'](\w+)', path.read_text("utf-8")
        )
    }
    assert {"ray", "eval", "bench"} <= named <= extras.keys()
