"""What every run shares: its directory, its provenance, its errors and how it speaks to the user."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (a checkout on PYTHONPATH, where pip refuses nothing)
    print(f"error: Python 3.11 or newer is needed, this is {'.'.join(map(str, sys.version_info[:3]))}", file=sys.stderr)
    raise SystemExit(2)

from importlib.metadata import PackageNotFoundError, version  # newer than 3.7

try:
    VERSION = version("mlm-repro")
except PackageNotFoundError:
    VERSION = "0+unknown"
