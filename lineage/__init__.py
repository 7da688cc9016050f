"""The ground floor that every run shares: directory, provenance, errors and the command line."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (a checkout on PYTHONPATH, where pip refuses nothing)
    print(f"error: Python 3.11 or newer is needed, this is {'.'.join(map(str, sys.version_info[:3]))}", file=sys.stderr)
    raise SystemExit(2)


def __getattr__(name: str) -> str:
    """Find `VERSION` at its first use, because finding it takes longer than many commands."""
    if name != "VERSION":
        raise AttributeError(name)
    from lineage.extras import installed

    globals()[name] = number = installed("mlm-repro") or "0+unknown"
    return number
