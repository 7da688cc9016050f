"""What every run shares: its directory, its provenance, its errors and how it speaks to the user."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (a checkout on PYTHONPATH, where pip refuses nothing)
    print(f"error: Python 3.11 or newer is needed, this is {'.'.join(map(str, sys.version_info[:3]))}", file=sys.stderr)
    raise SystemExit(2)


def __getattr__(name: str) -> str:
    """`VERSION`, read when it is first asked for: finding it costs more than many a command."""
    if name != "VERSION":
        raise AttributeError(name)
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("mlm-repro")
    except PackageNotFoundError:
        found = "0+unknown"
    globals()[name] = found
    return found
