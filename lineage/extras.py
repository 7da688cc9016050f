"""Libraries that only some work needs: imported when asked for, and named with their extra where they are missing."""

from importlib import import_module
from types import ModuleType

from lineage.errors import BadInput


def import_extra(module: str, extra: str) -> ModuleType:
    """The module of that dotted name, which `pip install 'mlm-repro[EXTRA]'` brings.

    Raises BadInput that says so where it, or a library that it imports, is missing.
    """
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise BadInput(f"this needs {library}: pip install 'mlm-repro[{extra}]' ({error})") from error
