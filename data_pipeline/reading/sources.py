"""Opens the sources of a recipe, and joins their descriptions, fingerprints and documents."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from mlm_repro.data_pipeline.reading.config import HUB, HUB_NAMES, INSTALLED_DOCS, SourcesConfig
from mlm_repro.data_pipeline.reading.file_sources import FileSource
from mlm_repro.data_pipeline.reading.hub import WITHDRAWN, HubSource, hub_is_reachable
from mlm_repro.data_pipeline.reading.installed_docs import InstalledDocs
from mlm_repro.data_pipeline.reading.pieces import Piece, pack
from mlm_repro.data_pipeline.reading.readers import Limit, pieces_within
from mlm_repro.data_pipeline.work.workspace import Workspace
from mlm_repro.lineage.errors import DataMissing

TYPICAL_DOCUMENT_BYTES = 10_000

Source = FileSource | HubSource | InstalledDocs


@dataclass
class OpenedSources:
    """The opened `sources` of one build, in order, each read up to the limits in `config`, and in
    `compared` the datasets that the build compares with. The method `shards` gives the pieces to
    read. When the object is made, the local or remote files of each FileSource in `sources`, except
    of the kind `documents`, are looked up, which raises BadInput for a source without files, among
    other errors; a corpus on the hub is not looked up."""

    sources: tuple[Source, ...]
    config: SourcesConfig
    compared: tuple[FileSource, ...] = ()
    """Datasets that are only compared with: their documents count as earlier ones and are not
    written."""
    stand_in: str = ""
    """Sentence on the fallback source and the sources that it replaces; empty without a
    fallback."""
    _cuts: dict[str, str] = field(default_factory=dict)
    """Dict name of a source → words on how much of it was read; only sources that a limit cut off
    have an entry."""

    def __post_init__(self) -> None:
        """Look up the files of every source of files but `documents`, which copies standard input
        or a pipe to a temporary file, and set `is_named` of each: True if it has a file name in
        common with another of them, so that the source's path is put before its files' names.
        Raises the errors of `FileSource.files`, such as BadInput for a source without files."""
        files = [
            source
            for source in self.sources
            if isinstance(source, FileSource) and source.kind != "documents"
        ]
        names = Counter(name for name, _ in chain.from_iterable(source.files for source in files))
        for source in files:
            source.is_named = any(names[name] > 1 for name, _ in source.files)

    @property
    def names(self) -> tuple[str, ...]:
        """A tuple of the names of the sources, in order: as in the recipe or, if the fallback
        replaces its sources on the hub, the fallback and then the recipe's other sources."""
        return tuple(source.name for source in self.sources)

    @property
    def packages(self) -> dict[str, str]:
        """Dict name → version of each installed package whose documentation is read, Python among
        them; empty if `installed-docs` is no source."""
        versions = dict[str, str]()
        for source in self.sources:
            if isinstance(source, InstalledDocs):
                versions |= source.versions
        return versions

    def fingerprints(self) -> dict[str, str]:
        """Return a dict `source NUMBER NAME` → digest of each source and of each dataset that the
        build compares with; numbers count from 0. Local and remote files are read for it, and a
        corpus `hub:OWNER/NAME` is looked up on the hub. Raises the errors of each source's
        `fingerprint`, such as BadInput for a file that cannot be read."""
        numbered = enumerate((*self.sources, *self.compared))
        return {
            f"source {number} {source.name}": source.fingerprint() for number, source in numbered
        }

    def describe(self) -> str:
        """Return a description for people, one line: the descriptions of all sources, with the
        number of documents read from a source if a limit cut it off, and the sentence on the
        fallback if there is one. That number, and the size of a sample of installed documentation,
        are known only after `shards` was called."""
        described = "; ".join(
            source.describe() + self._cuts.get(source.name, "") for source in self.sources
        )
        return f"{described} -- {self.stand_in}" if self.stand_in else described

    @property
    def total_bytes(self) -> int:
        """Approximate number of bytes of text to read from all sources together. The recipe's
        limits count for each source on its own; the datasets to compare with are not counted."""
        config = self.config
        total = 0
        for size in (source.total_bytes for source in self.sources):
            total += min(
                size,
                config.max_bytes or size,
                (config.max_documents or size) * TYPICAL_DOCUMENT_BYTES,
            )
        return total

    @property
    def documents(self) -> int:
        """Approximate number of documents to read, at least 1, within the limits, by the mean size
        of the first documents of each source of files, or a typical size for other sources. Files
        of the sources are read for it at each access. Raises the errors of
        `FileSource.document_bytes`."""
        of_source = [
            source.document_bytes if isinstance(source, FileSource) else TYPICAL_DOCUMENT_BYTES
            for source in self.sources
        ]
        total = sum(source.total_bytes for source in self.sources)
        count = sum(
            source.total_bytes / size for source, size in zip(self.sources, of_source, strict=True)
        )
        return max(1, round(count * self.total_bytes / max(1, total)))

    def shards(
        self, workspace: Workspace, shard_bytes: int, compared: bool = False
    ) -> list[list[Piece]]:
        """Return the pieces of all sources in order, each source up to the recipe's limits, as a
        list of shards. A shard is a list of Pieces of one split, with `shard_bytes` bytes at most
        or a single piece; `shard_bytes` is a multiple of GRAIN_BYTES. With `compared` the pieces
        are those of the datasets that the build compares with, which have no limits. Files are read
        for their digests, and corpora of the hub are downloaded into `workspace`. Raises the errors
        of the sources' `pieces` and, where a limit counts, of `pieces_within`."""
        sources = self.compared if compared else self.sources
        pieces = (
            self._within_limits(source, source.pieces(workspace, shard_bytes)) for source in sources
        )
        return pack(chain.from_iterable(pieces), shard_bytes)

    def _within_limits(self, source: Source, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield `pieces`, the Pieces of `source`, up to the recipe's limits, which count for each
        source by itself. If the source was cut off, remember for the description how many documents
        were read. Datasets to compare with have no limits, and the source of installed
        documentation applies the limits itself. With a limit the pieces are read here once more,
        which raises the errors of `pieces_within`."""
        config = self.config
        if (
            source in self.compared
            or source.name == INSTALLED_DOCS
            or not (config.max_documents or config.max_bytes)
        ):
            yield from pieces
            return
        limit = Limit(config.max_documents, config.max_bytes)
        yield from pieces_within(limit, pieces, config.max_line_bytes, config.max_bad_files > 0)
        if limit.reached:
            self._cuts[source.name] = f", the first {limit.documents:,} documents"


def open_sources(config: SourcesConfig, seed: int) -> OpenedSources:
    """Return an OpenedSources of the sources that a recipe names, without datasets to compare with;
    `seed` chooses the sample of installed documentation. If a source is on the hub and the hub
    cannot be reached, the recipe's fallback, read first, stands in for all sources on the hub; this
    is announced on standard error.

    Raises DataMissing for a corpus that is withdrawn, or if the hub cannot be reached and there is
    no fallback; BadInput for a source without files, except `documents`, and the other errors of
    `FileSource.files`.
    """
    if gone := [name for name in config.names if name in WITHDRAWN]:
        raise DataMissing(
            f"{' and '.join(gone)} can no longer be downloaded from the original hosts: get a copy"
            " from someone who has it and name it as jsonl:PATH in its place, or leave it out"
        )
    wanted = [name for name in config.names if name in HUB_NAMES or name.startswith(HUB)]
    names = config.names
    stand_in = ""
    if wanted and not hub_is_reachable():
        if config.offline_fallback is None:
            raise DataMissing(
                f"the Hugging Face hub cannot be reached for {' and '.join(wanted)}: connect, name"
                f" local files as jsonl:PATH, or set sources.offline_fallback={INSTALLED_DOCS}"
            )
        why = f"used in place of {' and '.join(wanted)}: the Hugging Face hub cannot be reached"
        stand_in = f"{config.offline_fallback} {why}"
        print(f"warning: {stand_in}", file=sys.stderr)
        names = (
            config.offline_fallback,
            *(name for name in names if name not in (*wanted, config.offline_fallback)),
        )

    def opened(name: str) -> Source:
        if name == INSTALLED_DOCS:
            return InstalledDocs(config, seed)
        return HubSource(name, config) if name in wanted else FileSource(name, config)

    return OpenedSources(tuple(map(opened, names)), config, stand_in=stand_in)
