"""NOTICE names every package that is pinned, with the licence that it states; so does the bill of a
wheel."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from docs.hooks.licences import BEGIN, NOT_HERE, ROOT, bill, licence, main, notice, pins
from mlm_repro.lineage.atomic import read_json
from mlm_repro.lineage.digest import sha256_file


def stated() -> dict[str, str]:
    text = (ROOT / "NOTICE").read_text(encoding="utf-8").partition(BEGIN)[2]
    return dict(line.split(": ", 1) for line in text.strip().splitlines())


def is_here(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def test_each_pin_has_its_licence_and_nothing_else_has() -> None:
    named = stated()
    assert [*named] == [pin.name for pin in pins()]
    here = [name for name in named if is_here(name)]
    assert len(here) > 150
    assert {name: named[name] for name in here} == {name: licence(name) for name in here}
    assert NOT_HERE not in {named[name] for name in here}


def test_a_package_without_a_word_in_its_metadata_is_known_by_its_text() -> None:
    assert licence("fastokens") == "Apache-2.0"
    assert licence("no-such-package") == NOT_HERE


def test_the_list_is_replaced_and_the_rest_of_the_file_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert notice().partition(BEGIN)[0] == before.partition(BEGIN)[0]
    monkeypatch.setattr("docs.hooks.licences.pins", lambda: [])
    assert notice().endswith(f"{BEGIN}\n")


def test_the_bill_of_a_wheel_has_every_pin_with_its_digests(tmp_path: Path) -> None:
    wheel = tmp_path / "mlm_repro-0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    main(["--bill", str(wheel), str(tmp_path / "bill.json")])
    made = read_json(tmp_path / "bill.json")
    assert made == bill(wheel)
    assert made["metadata"]["component"]["hashes"][0]["content"] == sha256_file(wheel)
    assert len(made["components"]) == len(pins()) > 150
    for part in made["components"]:
        hashes = part["externalReferences"][0]["hashes"]
        assert hashes
        assert all(len(each["content"]) == 64 for each in hashes)
        assert part["licenses"][0]["license"]["name"]
