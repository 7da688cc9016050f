"""Licences of the pinned packages: `python -m docs.hooks.licences` writes them into NOTICE.

`python -m docs.hooks.licences --bill WHEEL FILE` writes the bill of materials of a wheel instead,
CycloneDX 1.5: every package of constraints*.txt with its version, digests and licence. The licence
is read from the installed package's own metadata.
"""

import json
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from mlm_repro.lineage import VERSION
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.digest import sha256_file

ROOT = Path(__file__).parents[2]
BEGIN = (
    "Packages that `make setup` installs, beside this one and not in its wheel, with the licence"
    " that each states:\n"
)
NOT_HERE = "of the CUDA build or of an extra that is not installed here: its own files state it"
PIN = re.compile(r"^(\S+)==(\S+)(?: ; [^\\\n]+)?((?: \\\n    --hash=\S+)+)", re.MULTILINE)
TITLES = {
    "Apache-2.0": "Apache License",
    "MIT": "MIT License",
    "BSD-3-Clause": "Neither the name of",
}
"""Words, by a licence's short name, by which it is known if a package has only its text."""


class Pin(NamedTuple):
    """Pin of a package: its `name`, its `version`, and in `digests` a tuple of the SHA-256, as
    hexadecimal text, of each of its files."""

    name: str
    version: str
    digests: tuple[str, ...]


def pins() -> list[Pin]:
    """Return a list of the Pin of every package in the repository's files constraints*.txt, sorted
    by the package's name; if two files pin a package, the pin of the file whose name sorts last."""
    pinned = {}
    for path in sorted(ROOT.glob("constraints*.txt")):
        for name, version, rest in PIN.findall(path.read_text(encoding="utf-8")):
            pinned[name] = Pin(name, version, tuple(re.findall(r"sha256:(\w+)", rest)))
    return sorted(pinned.values())


def licence(name: str) -> str:
    """Return in words the licence that the package `name` states in its metadata: an expression,
    classifiers or a word; else the short name of the licence whose known words its text has. If the
    package is not installed or states none, the sentence `NOT_HERE`."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return NOT_HERE
    about = package.metadata
    classes = [
        classifier.rpartition(" :: ")[2]
        for classifier in about.get_all("Classifier") or []
        if classifier.startswith("License")
    ]
    stated = (
        about.get("License-Expression")
        or ", ".join(classes)
        or (about.get("License") or "").partition("\n")[0]
    )
    if stated and stated != "UNKNOWN":
        return stated
    for file in package.files or []:
        if "LICENSE" in file.name.upper():
            text = file.read_text()
            for short, title in TITLES.items():
                if title in text:
                    return short
    return NOT_HERE


def notice() -> str:
    """Return the new text of NOTICE: what the file has before the list of licences, and the list
    made anew from the pinned packages. Nothing is written."""
    own = (ROOT / "NOTICE").read_text(encoding="utf-8").partition(f"\n\n{BEGIN}")[0].rstrip("\n")
    return f"{own}\n\n\n{BEGIN}\n" + "".join(f"{pin.name}: {licence(pin.name)}\n" for pin in pins())


def bill(wheel: Path) -> JSON:
    """Return the bill of materials of the file `wheel` as a dict, CycloneDX's JSON: the wheel with
    its digest, and every package that the repository's files constraints*.txt pin, with version,
    digests and licence. The licence is the one that the package installed here states, else the
    sentence `NOT_HERE`. Nothing is written."""
    component = {
        "type": "application",
        "name": "mlm-repro",
        "version": VERSION,
        "hashes": [{"alg": "SHA-256", "content": sha256_file(wheel)}],
        "licenses": [{"license": {"name": "Apache-2.0 AND MIT"}}],
    }
    parts = [
        {
            "type": "library",
            "name": pin.name,
            "version": pin.version,
            "purl": f"pkg:pypi/{pin.name}@{pin.version}",
            "licenses": [{"license": {"name": licence(pin.name)}}],
            "externalReferences": [
                {
                    "type": "distribution",
                    "url": f"https://pypi.org/project/{pin.name}/{pin.version}/",
                    "hashes": [{"alg": "SHA-256", "content": digest} for digest in pin.digests],
                }
            ],
        }
        for pin in pins()
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component},
        "components": parts,
    }


def main(arguments: list[str]) -> None:
    """Write NOTICE in the repository anew or, if `arguments`, those of the command line, are
    `--bill WHEEL FILE`, write the bill of materials of WHEEL into FILE as JSON."""
    if arguments[:1] == ["--bill"]:
        wheel, file = map(Path, arguments[1:])
        file.write_text(json.dumps(bill(wheel), indent=1) + "\n", encoding="utf-8")
    else:
        (ROOT / "NOTICE").write_text(notice(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
