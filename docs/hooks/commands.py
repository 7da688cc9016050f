"""Pages of the commands, made from the commands themselves when the site is built, and tables of
both."""

import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

from mlm_repro.lineage import errors

WIDTH = 100


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """A page for each command."""
    for name, command in read_commands(Path(config.config_file_path).parent).items():
        files.append(
            File.generated(config, f"commands/{name}.md", content=command_page(name, command))
        )
    return files


def read_commands_table(root: Path) -> str:
    """A row for each command, with a link to its page."""
    rows = [
        (f"[`{name}`]({name}.md)", cell(command.help))
        for name, command in read_commands(root).items()
    ]
    return table(("command", "what it does"), rows)


def read_commands(root: Path) -> dict[str, Any]:
    """Each command of pyproject.toml as click sees it."""
    scripts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "scripts"
    ]
    return {
        name: get_command(import_module(entry.partition(":")[0]).app)
        for name, entry in scripts.items()
    }


def command_page(name: str, command: Any) -> str:
    """A section for each verb, with its `--help`: usage, arguments, options and their defaults."""
    parts = [
        f"# {name}",
        f"*For whoever types `{name}`.*",
        cell(command.help),
        "[Exit codes](../exit-codes.md) are common to all commands.",
    ]
    for verb, one in command.commands.items():
        one.rich_markup_mode = None  # text without frames
        context = one.context_class(one, info_name=f"{name} {verb}", terminal_width=WIDTH)
        parts += [f"## {name} {verb}", f"```text\n{one.get_help(context).strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def exit_codes() -> list[tuple[str, str, str]]:
    """Code, class and meaning, from the docstrings of `mlm_repro.lineage.errors`; 0 is done."""
    found = {
        one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.UserError)
    }
    rows = [("0", "", "Done.")]
    for one in sorted(found - {errors.UserError}, key=lambda each: (each.exit_code, each.__name__)):
        meaning = " ".join((one.__doc__ or "").split()).removesuffix(
            f": exit code {one.exit_code}."
        )
        rows.append((str(one.exit_code), f"`{one.__name__}`", f"{cell(meaning)}."))
    return rows


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str | None) -> str:
    """Text on one line; outside code, what Markdown would take for markup is escaped."""
    escaped = {"|": "\\|", "<": "&lt;"}
    return re.sub(
        "(`[^`]*`)|[|<]",
        lambda found: found[1] or escaped[found[0]],
        " ".join((text or "").split()),
    )
