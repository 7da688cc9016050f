"""Earlier builds of a recipe: what a new one takes over from them and what it makes anew, and what killed ones left.

Tasks are found again by their digests wherever they lie. So the unfinished work of an earlier build becomes the new
one's, or the shelf, where the last complete build of a name leaves the stages that take long.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from mlm_repro.data_pipeline.config import BY_NAME, WITHOUT, DataConfig
from mlm_repro.data_pipeline.reading.config import HUB, HUB_NAMES, INSTALLED_DOCS
from mlm_repro.data_pipeline.stages import TEXT_FILTERS, TOKEN_FILTERS, own_code
from mlm_repro.data_pipeline.stages.stage import SOURCE
from mlm_repro.data_pipeline.work.meeting import MEETINGS, is_alive
from mlm_repro.data_pipeline.work.origin import INPUT, LIBRARIES, differences, made_by
from mlm_repro.data_pipeline.work.workspace import FOLDER
from mlm_repro.lineage.config import flatten, parse_config
from mlm_repro.lineage.digest import bytes_below, is_sealed
from mlm_repro.lineage.errors import BadInput, UserError
from mlm_repro.lineage.files import Manifest, read_document
from mlm_repro.lineage.lock import LOCK, locked
from mlm_repro.lineage.progress import format_bytes
from mlm_repro.lineage.run import MANIFEST

SHELF, RECIPE, DEAR = ".stages", "recipe.json", ("harvest", "prepare", "tokenizer", "measure")
"""Folder beside the runs with the shelf of each name; the manifest of the build that made it; what lies there."""


def recipe_made_by(config: DataConfig, sources: tuple[str, ...]) -> dict[str, str]:
    """Digests of the code and the libraries that a build of a recipe runs to read these sources and do its stages."""
    is_of_hub = any(name in HUB_NAMES or name.startswith(HUB) for name in sources)
    read = [part for part, is_read in ((INSTALLED_DOCS, INSTALLED_DOCS in sources), ("hub", is_of_hub)) if is_read]
    texts = [name for name in config.stages if name in TEXT_FILTERS]
    others = [name for name in config.stages if name not in TEXT_FILTERS]
    parts = [SOURCE, *read, *texts, *["tokenizer"] * config.needs_tokenizer, "measure", *others]
    facts = made_by([*parts, "select", "gather", "publish"], {name.partition(":")[0] for name in sources})
    stated = {key: value for name in sorted(config.stages) for key, value in BY_NAME[name].made_with().items()}
    return (
        facts
        | own_code(config.stages)
        | {f"publish: {key}": str(value) for key, value in stated.items() if key not in LIBRARIES}
    )


class Level(NamedTuple):
    """Stages that are found again together: their tasks depend on the same code, libraries and settings."""

    stages: list[str]
    parts: set[str]
    """Parts of a build whose code and libraries they depend on, as `made_by` names them."""
    sections: set[str]
    """Sections of the recipe that they depend on, beside those that the levels before depend on."""


def levels(config: DataConfig) -> list[Level]:
    """The stages of a recipe in their order, as far as each depends on those before it."""
    texts = {*TEXT_FILTERS, *(name for name in config.stages if name in TEXT_FILTERS)}
    after = {*TOKEN_FILTERS, *(name for name in config.stages if name in TOKEN_FILTERS), "deduplicate", "decontaminate"}
    groups = [
        Level([SOURCE], {SOURCE, INSTALLED_DOCS, "hub", *texts}, {"sources", "seed", *texts}),
        Level([], {"tokenizer", "measure", *after}, {"tokenizer", *after}),
        Level([], {"select"}, set()),
        Level([], {"gather", "split", "tokenize"}, {"split"}),
    ]
    for name in config.stages:
        number = 0 if name in texts else 1 if name in TOKEN_FILTERS else 2 if name in after else 3
        groups[number].stages.append(name)
    return groups


@dataclass(frozen=True)
class Build:
    """An earlier build of a dataset, complete or not."""

    path: Path
    config: dict[str, Any]
    """Plain values of its recipe."""
    parents: dict[str, str]

    @classmethod
    def read(cls, path: Path, manifest: Manifest) -> Self:
        """The build of a manifest in its directory; a key that its recipe did not have has the default."""
        values = manifest.config
        with suppress(BadInput):  # it is of another version
            values = parse_config(values, DataConfig, str(path)).model_dump(mode="json")
        return cls(path, values, manifest.parents)

    def is_of(self, config: DataConfig) -> bool:
        """True if it was of the same settings, as far as both have them."""
        old, new = flatten(self.config), flatten(config.model_dump(mode="json", exclude=WITHOUT))
        return all(old.get(key, value) == value for key, value in new.items())

    def has(self, config: DataConfig, made_of: Mapping[str, str], most: int) -> list[str]:
        """Stages of the first `most` levels that it made of the same code, libraries and settings."""
        facts = {key for key in {*self.parents, *made_of} if self.parents.get(key) != made_of.get(key)}
        changed = {key.rpartition(": ")[0] for key in facts if not INPUT.match(key)}
        new, same = config.model_dump(mode="json"), list[str]()
        for level in levels(config)[:most]:
            before = [name for name in self.config.get("stages", ()) if name in level.sections]
            is_same = before == [name for name in config.stages if name in level.sections]
            if level.parts & changed or not is_same or any(self.config.get(n) != new.get(n) for n in level.sections):
                break
            same += level.stages
        return same


def builds(root: Path, name: str = "") -> list[Build]:
    """Builds of datasets of a name below a folder, the oldest first; without a name all, and what verbs wrote too."""
    dated = []
    for path in root.glob(f"{name}*/{MANIFEST}"):
        with suppress(UserError, OSError):
            manifest = read_document(path, Manifest)
            is_meant = (manifest.kind, manifest.name) == ("data", name) if name else manifest.kind.startswith("data")
            if is_meant and not path.parent.is_symlink():
                dated.append((manifest.created, Build.read(path.parent, manifest)))
    return [build for _, build in sorted(dated, key=lambda each: each[0])]


class Offer(NamedTuple):
    """Finished tasks that a new build can use."""

    stages: list[str]
    place: Path
    holder: Path
    """The run, or the shelf itself."""


@dataclass(frozen=True)
class Earlier:
    """Builds below a folder before that of a recipe which is made of `parents`; `own` is the new one's directory."""

    root: Path
    config: DataConfig
    parents: Mapping[str, str]
    own: str = ""

    def alike(self) -> list[Build]:
        """Other builds of the same name and settings, the oldest first."""
        others = (build for build in builds(self.root, self.config.name) if build.path.name != self.own)
        return [build for build in others if build.is_of(self.config)]

    def offers(self, is_alone: bool = True) -> list[Offer]:
        """All that is of use, the most stages first; if this build `is_alone`, no array of the name may be at work."""
        shelf, places = self.root / SHELF / self.config.name, list[tuple[Build, Path, int]]()
        if not (is_alone and is_alive(self.root / MEETINGS / self.config.name)):
            unfinished = (build for build in reversed(self.alike()) if not is_sealed(build.path))
            places += [(build, build.path / FOLDER, 4) for build in unfinished]
        with suppress(UserError, OSError):
            places.append((Build.read(shelf, read_document(shelf / RECIPE, Manifest)), shelf, 2))
        offers = []
        for build, place, most in places:
            harvests = {path.name for path in place.glob("harvest-*")} - {f"harvest-{INSTALLED_DOCS}"}
            stages = [*["downloads"] * bool(harvests), *build.has(self.config, self.parents, most)]
            if stages and place.is_dir():
                offers.append(Offer(stages, place, build.path))
        return sorted(offers, key=lambda offer: -len(offer.stages))

    def take_over(self, work: Path, is_alone: bool) -> None:
        """Move the best offer to `work`, if nothing is there and no process holds it; print that, and leftovers."""
        alike, taken = self.alike(), None
        is_begun = work.exists()
        for offer in [] if is_begun else self.offers(is_alone):
            is_run = offer.holder != offer.place
            with suppress(BadInput, FileNotFoundError), locked(offer.holder) if is_run else nullcontext():
                os.rename(offer.place, work)
                taken = offer
                if is_run:
                    shutil.copyfile(offer.holder / MANIFEST, work / RECIPE)  # to the shelf, if this build is refused
                    if {path.name for path in offer.holder.iterdir()} <= {MANIFEST, LOCK}:
                        shutil.rmtree(offer.holder)
                break
        if not is_begun:
            self.say(alike, taken)
        for left in leftovers(self.root, self.config.name):
            if self.own not in left.path.parts:
                print(f"note: {left.sentence}; `mlm-data leftovers` can remove it", file=sys.stderr)

    def say(self, alike: list[Build], taken: Offer | None) -> None:
        """Print which build of the same settings is there, how this one differs, and what is not made anew."""
        stages = taken.stages if taken else []
        if alike:
            is_read = any(map(INPUT.match, self.parents))

            def apart(build: Build) -> list[str]:
                old = {key: value for key, value in build.parents.items() if is_read or not INPUT.match(key)}
                return differences(old, self.parents)

            nearest = min(reversed(alike), key=lambda build: len(apart(build)))
            state = "complete" if is_sealed(nearest.path) else "unfinished"
            said = f"the earlier build {nearest.path} ({state}) has the same settings and differs in"
            print(f"note: {said} {'; '.join(apart(nearest))}", file=sys.stderr)
        if alike or stages:
            anew = [name for level in levels(self.config) for name in level.stages if name not in stages]
            source = f"taken from {taken.holder}: {', '.join(stages)}; " if taken and stages else ""
            print(f"note: {source}made anew: {', '.join(anew) or 'nothing'}", file=sys.stderr)


class Leftover(NamedTuple):
    """A directory that a killed build left."""

    path: Path
    holder: Path | None
    """The run that it is of."""
    what: str

    @property
    def sentence(self) -> str:
        """Place, kind and size."""
        return f"{self.path} is {self.what} ({format_bytes(bytes_below(self.path))})"

    def remove(self) -> None:
        """Remove it. Raises BadInput if a process is at work there."""
        with locked(self.holder) if self.holder else nullcontext():
            shutil.rmtree(self.path)


def leftovers(root: Path, name: str = "") -> Iterator[Leftover]:
    """Directories that killed builds of a name, or of all, left below a folder; none where a process is at work."""
    for build in builds(root, name):
        work, is_whole = build.path / FOLDER, is_sealed(build.path)
        if (is_whole and not work.exists()) or _is_at_work(root, build):
            continue
        what = "the work of a complete build" if is_whole else "an unfinished build"
        yield Leftover(work if is_whole else build.path, build.path, what)
    for folder in sorted((root / MEETINGS).glob(name or "*")):
        if not is_alive(folder):
            yield Leftover(folder, None, "the meeting place of an array that ended")


def _is_at_work(root: Path, build: Build) -> bool:
    """True if a process holds the build, or may do a part of it."""
    try:
        with locked(build.path) if (build.path / LOCK).exists() else nullcontext():
            return is_alive(root / MEETINGS / str(build.config.get("name")))
    except BadInput:
        return True
