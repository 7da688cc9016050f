"""The verbs of the stages, read from their source code, so that a list of commands imports neither
pydantic nor the stages."""

import ast
import re
from pathlib import Path


def stage_verbs() -> dict[str, str]:
    """Return a dict from the verb of each stage to the first sentence of the stage's docstring, in
    order of the file names. The files are parsed and not imported."""
    verbs = {}
    for path in sorted((Path(__file__).parent / "stages").glob("[a-z]*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (verb := _constants(node).get("verb")):
                text = " ".join((ast.get_docstring(node) or "").split())
                verbs[verb] = re.split(r"(?<=\.) ", text)[0]
    return verbs


def _constants(node: ast.ClassDef) -> dict[str, str]:
    """Return a dict name → text of the value that the class in the syntax tree `node` assigns to
    the name. A string stands as it is, without quotes; a value that is no constant gives an empty
    text. Assignments with an annotation, such as `verb: str = ...`, are left out."""
    constants = {}
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            value = statement.value
            text = str(value.value) if isinstance(value, ast.Constant) else ""
            for target in statement.targets:
                constants[ast.unparse(target)] = text
    return constants
