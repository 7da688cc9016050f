"""The splits of a data set, told from the names of its files by the rules of Hugging Face's
`datasets`.

A folder that `DatasetDict.save_to_disk` wrote and a folder of its cache list their splits.
Everywhere else, the hub included, names tell them (`datasets/data_files.py`, version 5.2):
`data/NAME-00000-of-00002.parquet`, or one of its words.
"""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from mlm_repro.lineage.atomic import read_json
from mlm_repro.lineage.errors import BadInput

TRAIN = "train"
WORDS = {
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
    TRAIN: {"train", "training"},
}
"""Dict from each split to the words in a file's path that tell it. Splits are tried in this order:
if the folders, or else the name, have words of two splits, the held-out one counts."""
SEPARATORS = re.compile(r"[-._ 0-9]+")
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
SHARDED = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
SAVED = "dataset_dict.json"
CACHED = "dataset_info.json"


def tell_splits(root: Path | None, names: Sequence[str]) -> list[str]:
    """Return a list with the name of the split of each file in `names`, which are paths below the
    folder `root`; "" for a file whose split nothing tells. If `root` has a `dataset_dict.json` with
    splits, the first folder of the path is the split if it is listed there, else "" is returned for
    the file. Without these splits, a file whose name ends with a split that the `dataset_info.json`
    beside it lists has that split, and any other file the one that its path tells, such as
    `validation` for `dev`. Raises BadInput if a list is unreadable.

    If `root` is None, as for remote files, the paths alone tell the split.
    """
    if root is None:
        return [*map(_named, names)]
    if listed := _listed(root / SAVED):
        return [first if (first := name.partition("/")[0]) in listed else "" for name in names]
    folders = {str(PurePosixPath(name).parent) for name in names}
    listed_in = {folder: _listed(root / folder / CACHED) for folder in folders}
    return [_cached(name, listed_in) or _named(name) for name in names]


def _listed(path: Path) -> list[str]:
    """Return a list of the names of the splits that the JSON file `path` of the library `datasets`
    has under `splits`; an empty list if it has none or the file does not exist. Raises BadInput if
    it cannot be read, is not JSON or has another form."""
    try:
        return [*map(str, read_json(path).get("splits") or ())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BadInput(
            f"{path} does not list the splits of its data set under `splits` in JSON: {error};"
            " restore it, or remove it, and the names of the files tell the splits"
        ) from error


def _cached(name: str, listed_in: dict[str, list[str]]) -> str:
    path = PurePosixPath(name)
    stem = SHARD.sub("", path.stem)
    return next((split for split in listed_in[str(path.parent)] if stem.endswith(f"-{split}")), "")


def _named(name: str) -> str:
    """Return the split that a file's path tells, or "": NAME of `data/NAME-00000-of-00002.parquet`
    and the like, else the key of WORDS that has a word of the path's folders, else a word of the
    file's name before the ending, such as `validation` for `dev`."""
    if sharded := SHARDED.fullmatch(name):
        return sharded[1]
    *folders, file = name.lower().split("/")
    for words in (
        {*SEPARATORS.split(" ".join(folders))},
        {*SEPARATORS.split(file)[:-1]},
    ):
        if split := next((split for split, known in WORDS.items() if words & known), ""):
            return split
    return ""


def choose_splits(
    source: str, told: Sequence[str], wanted: Sequence[str], is_whole: bool
) -> list[str]:
    """Return the splits to read, in order: the ones in `wanted`, or without them the only split, or
    `train` alone of several. `told` has the split of each file of the source, "" for a file whose
    name tells none.

    A file that tells none counts as `train`; if no file tells one, `train` is returned, whatever is
    `wanted`, so that all are read. With `is_whole` the source names a data set, and one that has
    only held-out text is refused unless its split is wanted. Raises BadInput, which calls the
    source `source`, for a split that the files do not have.
    """
    splits = list(dict.fromkeys(split or TRAIN for split in told))
    if not any(told) or (
        len(splits) == 1 and not wanted and not (is_whole and splits[0] in {*WORDS} - {TRAIN})
    ):
        return splits
    chosen = [*wanted] or [TRAIN]
    if missing := [split for split in chosen if split not in splits]:
        raise BadInput(
            f"source {source} has no split {missing[0]}, but {', '.join(splits)}: name the splits"
            " to read in sources.split"
        )
    return chosen
