"""What the modules of a package import of each other, and circles among its files and among its
folders."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.architecture.rooms import imported_names, module_name, modules, names_in_strings

Graph = dict[str, set[str]]
"""For each name the names that it imports."""


def import_graph(*packages: str, doors: Collection[str] = ()) -> Graph:
    """The modules of the packages that each of their modules imports, wherever in its file.

    Where a file calls `import_module`, its strings count: one that is the name of a module, up to a
    colon, and one with a placeholder for every module that it may become. A door, which loads by
    name what is made for it, is exempt.
    """
    paths = {module_name(path): path for path in modules(*packages)}
    graph: Graph = {}
    for name, path in paths.items():
        imported = [dotted for _, dotted in imported_names(path)]
        targets = {each if each in paths else each.rpartition(".")[0] for each in imported}
        strings = set() if name in doors else set(_named_in_strings(path, set(paths)))
        graph[name] = ((targets & paths.keys()) | strings) - {name}
    return graph


def folder_graphs(graph: Graph) -> dict[str, Graph]:
    """For each package, what the files and folders in it import of each other; `__init__.py` has
    the package's name."""
    levels: dict[str, Graph] = defaultdict(lambda: defaultdict(set))
    for name, targets in graph.items():
        for target in targets:
            source, aim = name.split("."), target.split(".")
            depth = next(
                (n for n, (a, b) in enumerate(zip(source, aim, strict=False)) if a != b), None
            )
            depth = min(len(source), len(aim)) if depth is None else depth
            left, right = (".".join(parts[: depth + 1]) for parts in (source, aim))
            levels[".".join(source[:depth])][left].add(right)
    return levels


def circle(graph: Graph) -> list[str]:
    """The names of a circle, each imported by the next, the first again at the end; empty if there
    is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def circles(*packages: str, doors: Collection[str] = ()) -> list[list[str]]:
    """A circle of files if there is one, and for each package a circle of what is in it if there is
    one."""
    graph = import_graph(*packages, doors=doors)
    return [found for each in (graph, *folder_graphs(graph).values()) if (found := circle(each))]


def _named_in_strings(path: Path, names: set[str]) -> Iterator[str]:
    for _, text in names_in_strings(path):
        yield from {text} & names
        yield from (name for name in names if text.endswith(".") and name.startswith(text))
