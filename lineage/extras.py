"""Optional libraries: imported when they are needed; an error names the extra of a missing one."""

from importlib import import_module
from types import ModuleType

from lineage.errors import BadInput


def install_command(extra: str) -> str:
    """The command that installs the libraries of an extra."""
    return f"pip install 'mlm-repro[{extra}]'"


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module that an extra provides.

    Raises BadInput, which names the extra, if the module or a library that it imports is missing.
    """
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise BadInput(f"this needs {library}: {install_command(extra)} ({error})") from error
