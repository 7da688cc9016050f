"""The rooms of the house and how to read their source."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "mlm_repro"
ROOMS = ("lineage", "data_pipeline", "engine", "evaluation", "experiments", "verify", "reports")


def modules(*rooms: str) -> list[Path]:
    """Python files of the rooms, by default of all. A room may be a file."""
    folders = map(ROOT.joinpath, rooms or ROOMS)
    return sorted(
        path for room in folders for path in ([room] if room.is_file() else room.rglob("*.py"))
    )


def module_name(path: Path) -> str:
    """The name under which a file is imported: behind `mlm_repro.` if it stands in a room."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    inner = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join((PACKAGE, *inner) if parts[0] in ROOMS else inner)


def parse(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, wherever in the file; `from a import b`
    gives `a.b`."""
    package = (
        module_name(path).split(".")
        if path.name == "__init__.py"
        else module_name(path).split(".")[:-1]
    )
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def names_in_strings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text, up to a colon, of every string that may name a module, in a file that calls
    `import_module`.

    Of a string with a placeholder, what stands before it: `engine.families.`.
    """
    if not re.search("import_module|__import__", path.read_text(encoding="utf-8")):
        return
    nodes = list(ast.walk(parse(path)))
    called = {
        ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)
    }
    if called & {"import_module", "__import__"}:
        for node in nodes:
            first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
            if (
                isinstance(first, ast.Constant)
                and isinstance(first.value, str)
                and "." in first.value
            ):
                yield first.lineno, first.value.partition(":")[0]


def source_files() -> list[Path]:
    """Files that git tracks or would track; without git, everything that is not built or hidden."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return [
            ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()
        ]
    built = {"runs", "build", "__pycache__"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(p.startswith(".") or p in built for p in path.relative_to(ROOT).parts)
    ]


def command_names() -> dict[str, str]:
    """Command and entry point of each, from pyproject.toml."""
    import tomllib

    return dict(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    )
