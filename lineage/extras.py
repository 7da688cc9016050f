"""Libraries that only some work needs: imported when asked for, and named with their extra where they are missing."""

from importlib import import_module
from types import ModuleType

from lineage.errors import BadInput


def install_command(extra: str) -> str:
    """What installs the libraries of an extra."""
    return f"pip install 'mlm-repro[{extra}]'"


def import_extra(module: str, extra: str) -> ModuleType:
    """The module of that dotted name, which the extra brings.

    Raises BadInput that says so where it, or a library that it imports, is missing.
    """
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise BadInput(f"this needs {library}: {install_command(extra)} ({error})") from error
