"""The ground floor that every run shares: directory, provenance, errors and the command line."""


def __getattr__(name: str) -> str:
    """Return, for the name `VERSION`, this package's version as text, found at its first use
    because finding it takes longer than many commands; `0+unknown` if the package is not installed.
    Raises AttributeError for any other name."""
    if name != "VERSION":
        raise AttributeError(name)
    from mlm_repro.lineage.extras import installed

    globals()[name] = number = installed("mlm-repro") or "0+unknown"
    return number
