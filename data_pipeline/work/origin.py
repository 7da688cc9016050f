"""Names the code and the library versions that, besides settings and input, determine a dataset's
bytes."""

import unicodedata
from functools import cache
from itertools import chain

from mlm_repro.lineage.digest import sha256_file, sha256_json
from mlm_repro.lineage.extras import installed
from mlm_repro.lineage.shipped import HOME

LIBRARIES = ("ftfy", "langdetect", "tokenizers", "fastokens", "datasketch", "orjson", "pyarrow")
"""Libraries that a dataset's bytes depend on."""


@cache
def made_by() -> dict[str, str]:
    """Return a dict name → text of facts that decide a dataset's bytes: `code`, the digest of the
    source files of `data_pipeline` and `lineage`; `Unicode`, the version of Python's Unicode data;
    and the version of each library, "absent" if it is not installed."""
    rooms = ("data_pipeline", "lineage")
    files = sorted(chain.from_iterable((HOME / room).rglob("*.py") for room in rooms))
    code = sha256_json({path.relative_to(HOME).as_posix(): sha256_file(path) for path in files})
    libraries = {name: installed(name) or "absent" for name in LIBRARIES}
    return {"code": code, "Unicode": unicodedata.unidata_version, **libraries}
