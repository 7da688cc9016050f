"""Opens the sources of a configuration: description, fingerprint and documents of each."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from data_pipeline.reading.config import HUB, HUB_NAMES, INSTALLED_DOCS, SourcesConfig
from data_pipeline.reading.file_sources import FileSource
from data_pipeline.reading.hub import HubSource, hub_is_reachable, refuse_withdrawn
from data_pipeline.reading.installed_docs import InstalledDocs
from data_pipeline.reading.pieces import Piece, pack
from data_pipeline.reading.readers import Limit, pieces_within
from data_pipeline.work.workspace import Workspace
from lineage.errors import DataMissing

TYPICAL_DOCUMENT_BYTES = 10_000


class Source(Protocol):
    """A source of documents."""

    @property
    def name(self) -> str:
        """Name in the configuration."""

    def fingerprint(self) -> str:
        """A digest that changes whenever the documents may."""

    def describe(self) -> str:
        """Description for people; complete once the source has been read."""

    @property
    def total_bytes(self) -> int:
        """Approximate bytes to read."""

    def pieces(self, workspace: Workspace, shard_bytes: int) -> Iterator[Piece]:
        """Files of the source, in order, cut to at most `shard_bytes` where possible."""


@dataclass
class OpenedSources:
    """The sources of one run, in order, each cut off where the recipe says so."""

    sources: tuple[Source, ...]
    config: SourcesConfig
    compared: tuple[FileSource, ...] = ()
    """Datasets whose documents count as earlier ones and are not written."""
    stand_in: str = ""
    """A sentence about a source that stands in for others; empty if none does."""
    _cuts: dict[str, str] = field(default_factory=dict)
    """Words that say where a source was cut off, by its name."""

    def __post_init__(self) -> None:
        self._tell_apart()

    def fingerprints(self) -> dict[str, str]:
        """Digest of each source."""
        every = enumerate((*self.sources, *self.compared))
        return {f"source {number} {source.name}": source.fingerprint() for number, source in every}

    def describe(self) -> str:
        """Description for people; complete once the sources have been read."""
        described = "; ".join(source.describe() + self._cuts.get(source.name, "") for source in self.sources)
        return f"{described} -- {self.stand_in}" if self.stand_in else described

    @property
    def total_bytes(self) -> int:
        """Approximate bytes to read."""
        config, total = self.config, 0
        for whole in (source.total_bytes for source in self.sources):
            total += min(whole, config.max_bytes or whole, (config.max_documents or whole) * TYPICAL_DOCUMENT_BYTES)
        return total

    def shards(self, workspace: Workspace, shard_bytes: int) -> list[list[Piece]]:
        """All pieces of all sources in order, gathered into shards."""
        pieces = (self._within_limits(source, source.pieces(workspace, shard_bytes)) for source in self.sources)
        return pack(chain.from_iterable(pieces), shard_bytes)

    def compared_shards(self, workspace: Workspace, shard_bytes: int) -> list[list[Piece]]:
        """The pieces of the datasets that are compared with."""
        pieces = (source.pieces(workspace, shard_bytes) for source in self.compared)
        return pack(chain.from_iterable(pieces), shard_bytes)

    def _tell_apart(self) -> None:
        """Give files of one name below two sources names that begin with the path of their source."""
        files = [source for source in self.sources if isinstance(source, FileSource) and source.kind != "documents"]
        names = Counter(name for source in files for name, _ in source.files)
        for source in files:
            source.is_named = any(names[name] > 1 for name, _ in source.files)

    def _within_limits(self, source: Source, pieces: Iterator[Piece]) -> Iterator[Piece]:
        config = self.config
        if source.name == INSTALLED_DOCS or (config.max_documents is None and config.max_bytes is None):
            yield from pieces
            return
        limit = Limit(config.max_documents, config.max_bytes)
        yield from pieces_within(limit, pieces, config.max_line_bytes)
        if limit.reached:
            self._cuts[source.name] = f", the first {limit.documents:,} documents"


def open_sources(config: SourcesConfig, seed: int) -> OpenedSources:
    """The sources to read; a source standing in for the hub is announced on standard error.

    Raises DataMissing for a corpus that is withdrawn, or for the hub out of reach without a fallback.
    """
    refuse_withdrawn(config.names)
    wanted = [name for name in config.names if name in HUB_NAMES or name.startswith(HUB)]
    if not wanted or hub_is_reachable():
        return OpenedSources(tuple(_open(name, config, seed) for name in config.names), config)
    if config.offline_fallback is None:
        raise DataMissing(
            f"the Hugging Face hub cannot be reached for {' and '.join(wanted)}: connect, name local files as "
            f"jsonl:PATH, or set sources.offline_fallback={INSTALLED_DOCS}"
        )
    replaced = " and ".join(wanted)
    stand_in = f"{config.offline_fallback} used in place of {replaced}: the Hugging Face hub cannot be reached"
    print(f"WARNING: {stand_in}", file=sys.stderr)
    others = [name for name in config.names if name not in (*wanted, config.offline_fallback)]
    names = (config.offline_fallback, *others)
    return OpenedSources(tuple(_open(name, config, seed) for name in names), config, stand_in=stand_in)


def _open(name: str, config: SourcesConfig, seed: int) -> Source:
    if name == INSTALLED_DOCS:
        return InstalledDocs(config, seed)
    is_on_hub = name in HUB_NAMES or name.startswith(HUB)
    return HubSource(name, config) if is_on_hub else FileSource(name, config)
