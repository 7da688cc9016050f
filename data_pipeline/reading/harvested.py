"""Sources whose documents are taken out of many files on this machine: sampled, harvested, put in order."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import orjson

from data_pipeline.document import Document, size_bytes
from data_pipeline.reading.config import SourcesConfig
from data_pipeline.reading.extract import Place, extract
from data_pipeline.reading.pieces import Piece, cut_lines
from data_pipeline.reading.readers import Limit, Limits
from data_pipeline.work.tasks import MARKER, Counts, Input, Settings
from data_pipeline.work.workspace import Workspace
from lineage.atomic import read_json
from lineage.digest import sha256_json

HARVESTED = "documents.jsonl"
GROUP_FILES = 64


class HarvestedSource(ABC):
    """Documents from the files of `places`, in their order.

    With a limit, files are read in the order of a hash of the seed and their name until it is reached: a uniform
    sample of files, whose documents come in the same order as all would.
    """

    name: str
    typical_bytes: int

    def __init__(self, config: SourcesConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._sample = ""

    @cached_property
    @abstractmethod
    def places(self) -> list[Place]:
        """The files."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Of the files."""

    @abstractmethod
    def describe(self) -> str:
        """What they are, for people."""

    @property
    def total_bytes(self) -> int:
        return self._config.max_bytes or self.typical_bytes

    def pieces(self, workspace: Workspace, shard_bytes: int) -> Iterator[Piece]:
        places, config = self.places, self._config
        order = list(range(len(places)))
        if config.max_documents or config.max_bytes:
            order.sort(key=lambda number: hashlib.sha256(f"{self._seed}:{places[number][:2]}".encode()).digest())
        groups = [order[start : start + GROUP_FILES] for start in range(0, len(order), GROUP_FILES)]
        fixed = {"limits": asdict(config.limits)}
        jobs = (({**fixed, "places": [[*places[n][:2], str(places[n][2])] for n in group]}, ()) for group in groups)
        limit = Limit(config.max_documents, config.max_bytes)
        takes: list[tuple[int, int, int]] = []
        read: list[str] = []

        def harvested_sizes() -> Iterator[list[int | None]]:
            for done in workspace.each(f"harvest-{self.name}", harvest, jobs, self.name, len(groups)):
                read.append(done.digest)
                yield from done.counts["sizes"]

        for place, (number, sizes) in enumerate(zip(order, harvested_sizes(), strict=False)):
            takes.append((number, place, _within(limit, sizes)))
            if limit.reached:
                break
        used = [take for take in takes if take[2]]
        if len(takes) < len(places):
            self._sample = f", a sample of {len(used):,} of {len(places):,} files"
        harvested = Input(workspace.path / f"harvest-{self.name}", sha256_json(read))
        arranged = workspace.one(
            f"arrange-{self.name}", arrange, {"takes": sorted(takes), "groups": len(read)}, harvested
        )
        path = arranged.path / "00000" / HARVESTED
        whole = Piece("harvest", self.name, str(path), arranged.digest, path.stat().st_size)
        yield from cut_lines(whole, shard_bytes)


def _within(limit: Limit, sizes: list[int | None]) -> int:
    """How many of a file's items come before one that is not within the limit; None is no document."""
    for number, size in enumerate(sizes):
        if size is not None and not limit.admits(size):
            return number
    return len(sizes)


def harvest(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Extract a group of files; counts the bytes of each file's documents."""
    sizes, limits = [], Limits(**settings["limits"])
    with (directory / HARVESTED).open("wb") as file:
        for owner, inside, path in settings["places"]:
            items = extract((owner, inside, Path(path)), limits)
            file.writelines(orjson.dumps(asdict(item)) + b"\n" for item in items)
            sizes.append([size_bytes(item.text) if isinstance(item, Document) else None for item in items])
    return {"sizes": sizes}


def arrange(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Put what was taken of each harvested file into the order of the files' names."""
    files: list[list[bytes]] = []
    for group in range(settings["groups"]):
        folder = inputs[0] / f"{group:05d}"
        sizes = read_json(folder / MARKER)["counts"]["sizes"]
        with (folder / HARVESTED).open("rb") as file:
            files += ([file.readline() for _ in items] for items in sizes)
    with (directory / HARVESTED).open("wb") as file:
        for _, place, take in settings["takes"]:
            file.writelines(files[place][:take])
    return {}
