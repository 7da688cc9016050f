"""What every run shares: its directory, its provenance, its errors and how it speaks to the user."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("mlm-repro")
except PackageNotFoundError:
    VERSION = "0+unknown"
