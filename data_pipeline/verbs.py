"""The verbs of the stages, read from their source: a list of commands needs nothing that settings
are made of."""

import ast
import re
from pathlib import Path


def stage_verbs() -> dict[str, str]:
    """The first sentence on each stage by its verb, in order of the files' names."""
    verbs: dict[str, str] = {}
    for path in sorted((Path(__file__).parent / "stages").glob("[a-z]*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (verb := _constants(node).get("verb")):
                text = " ".join((ast.get_docstring(node) or "").split())
                verbs[verb] = re.split(r"(?<=\.) ", text)[0]
    return verbs


def _constants(node: ast.ClassDef) -> dict[str, str]:
    """The class's names for texts; one for something else stands for an empty text."""
    return {
        ast.unparse(target): str(each.value.value) if isinstance(each.value, ast.Constant) else ""
        for each in node.body
        if isinstance(each, ast.Assign)
        for target in each.targets
    }
