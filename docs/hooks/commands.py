"""Pages of the commands, made from the commands themselves when the site is built, and tables of
commands and exit codes."""

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
    """Append to `files`, the site's, a generated page `commands/NAME.md` for each command of the
    pyproject.toml beside the site's configuration file, and return `files`. MkDocs calls this."""
    for name, command in read_commands(Path(config.config_file_path).parent).items():
        files.append(
            File.generated(config, f"commands/{name}.md", content=command_page(name, command))
        )
    return files


def read_commands_table(root: Path) -> str:
    """Return a Markdown table with a row for each command of `root`/pyproject.toml: its name with a
    link to its page, and its help."""
    rows = [
        (f"[`{name}`]({name}.md)", cell(command.help))
        for name, command in read_commands(root).items()
    ]
    return table(("command", "what it does"), rows)


def read_commands(root: Path) -> dict[str, Any]:
    """Return a dict of the commands that the scripts of `root`/pyproject.toml name, by name, each
    as a click group. Imports the commands' modules."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        name: get_command(import_module(entry.partition(":")[0]).app)
        for name, entry in project["scripts"].items()
    }


def command_page(name: str, command: Any) -> str:
    """Return the text of the page of the command `name` in Markdown: a section for each verb with
    its `--help`, which has usage, arguments, options and their defaults. `command` is its click
    group; the group's verbs are set to print without frames."""
    parts = [
        f"# {name}",
        f"*For whoever types `{name}`.*",
        cell(command.help),
        "[Exit codes](../exit-codes.md) are common to all commands.",
    ]
    for verb, verb_command in command.commands.items():
        verb_command.rich_markup_mode = None  # text without frames
        context = verb_command.context_class(
            verb_command, info_name=f"{name} {verb}", terminal_width=WIDTH
        )
        parts += [f"## {name} {verb}", f"```text\n{verb_command.get_help(context).strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def exit_codes() -> list[tuple[str, str, str]]:
    """Return a list of rows (code, class, meaning), sorted by exit code: 0, done, and one for each
    subclass of `UserError` in `mlm_repro.lineage.errors`, whose docstring gives the meaning; two
    classes may have one code. The rows are Markdown texts; 0 has no class."""
    classes = {
        error
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.UserError)
    }
    rows = [("0", "", "Done.")]
    for error in sorted(
        classes - {errors.UserError}, key=lambda each: (each.exit_code, each.__name__)
    ):
        meaning = cell(error.__doc__).removesuffix(f": exit code {error.exit_code}.")
        rows.append((str(error.exit_code), f"`{error.__name__}`", f"{meaning}."))
    return rows


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table, as text, with the texts `heads` over its columns and these rows.
    Cells are used as they are; the caller escapes them by `cell`."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str | None) -> str:
    """Return `text` on one line, with `|` and `<` escaped for a cell of a Markdown table, except
    inside backticks. None gives an empty text."""
    escaped = {"|": "\\|", "<": "&lt;"}
    return re.sub(
        "(`[^`]*`)|[|<]",
        lambda match: match[1] or escaped[match[0]],
        " ".join((text or "").split()),
    )
