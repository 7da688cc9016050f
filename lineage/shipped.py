"""Location and build of this installation, and its shipped files, found by the names that commands
take."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Any

from mlm_repro.lineage.errors import BadInput, IntegrityFailure, did_you_mean

HOME = Path(__file__).resolve().parent.parent
"""Path of the folder that holds `lineage` and the packages beside it: the root of a clone, or
`mlm_repro` of a wheel."""


class Shipped(StrEnum):
    """Kinds of files that the package ships for its commands; each value is the glob pattern of the
    kind's files below `HOME`."""

    MODEL = "experiments/models/**/*.toml"
    RECIPE = "data_pipeline/recipes/*.toml"
    JOB = "experiments/jobs/*.toml"
    CLUSTER = "experiments/clusters/*.toml"
    SOFTWARE = "experiments/software/*.toml"
    WORKLOAD_FILE = "experiments/published/*-runs.csv"


def find_file(name: str | Path, kind: Shipped) -> Path:
    """Return the path of the file at the path `name`, or else of the shipped file of that name and
    kind, or else of a directory at the path.

    A shipped file is named by its path below the folder of its kind (`8.3b`, `ptd-p/145.6b`), or by
    its path in a clone (`experiments/models/8.3b.toml`). Raises BadInput with the nearest name if
    there is neither, and IntegrityFailure if this installation has no file of the kind.
    """
    if os.path.exists(name) and not os.path.isdir(name):
        return Path(name)
    folder = kind.partition("*")[0]
    suffix = Path(kind).suffix
    files = {path.relative_to(HOME).as_posix(): path for path in sorted(HOME.glob(kind))}
    shipped = {long.removeprefix(folder).removesuffix(suffix): path for long, path in files.items()}
    if not shipped:
        raise IntegrityFailure(
            f"{HOME / folder} is missing from this installation: install mlm-repro again"
        )
    if match := shipped.get(str(name)) or files.get(str(name)):
        return match
    if os.path.exists(name):
        return Path(name)
    near = did_you_mean(str(name).removeprefix(folder).removesuffix(suffix), shipped, "")
    hint = f" ({near})" if near else ""
    what = kind.name.lower().replace("_", " ")
    raise BadInput(
        f"there is no {what} '{name}'{hint}; there are {', '.join(shipped)}, and your own {suffix}"
        " files"
    )


def shipped_at(path: str) -> Path | None:
    """Return the path on this machine of the shipped file that has the path `path` in a clone, such
    as `experiments/models/8.3b.toml`, or None if there is none."""
    return next((HOME / path for kind in Shipped if HOME / path in HOME.glob(kind)), None)


def model_file(name: str) -> Path:
    """Return the path of the shipped configuration of the model `name`,
    `experiments/models/NAME.toml`, whether there is one or not."""
    return HOME / "experiments" / "models" / f"{name}.toml"


def wheel_state() -> dict[str, Any]:
    """Return the build of an installed wheel as a dict: its `commit` is `wheel-` with the first
    34 digits of the SHA-256 of the wheel's list of files, `dirty` is None. Empty if the code runs
    from no wheel, as in a clone."""
    from mlm_repro.lineage.digest import sha256_file

    record = next(HOME.parent.glob("mlm_repro-*.dist-info/RECORD"), None)
    return {"commit": f"wheel-{sha256_file(record)[:34]}", "dirty": None} if record else {}
