"""The code and the libraries that decide a dataset's bytes beside its settings and input."""

import unicodedata
from functools import cache

from mlm_repro.lineage.digest import sha256_file, sha256_json
from mlm_repro.lineage.extras import installed
from mlm_repro.lineage.shipped import HOME

LIBRARIES = ("ftfy", "langdetect", "tokenizers", "fastokens", "datasketch", "orjson", "pyarrow")
"""Libraries whose answers are in the bytes of a dataset."""


@cache
def made_by() -> dict[str, str]:
    """Digest of the files of this room and of `lineage`, versions of the libraries, and of Unicode
    in this Python."""
    files = sorted(
        path for room in ("data_pipeline", "lineage") for path in (HOME / room).rglob("*.py")
    )
    code = sha256_json({path.relative_to(HOME).as_posix(): sha256_file(path) for path in files})
    libraries = {name: installed(name) or "absent" for name in LIBRARIES}
    return {"code": code, "Unicode": unicodedata.unidata_version, **libraries}
