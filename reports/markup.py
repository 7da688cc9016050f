"""Templates in which every value is escaped, and lists that fold away."""

from collections.abc import Sequence
from typing import Any, ClassVar

from jinja2 import BytecodeCache, Environment, PackageLoader, StrictUndefined
from jinja2.bccache import Bucket
from markupsafe import Markup

from reports.numbers import printable, show


class _CompiledOnce(BytecodeCache):
    """What the templates were compiled to, kept in this process: each page has its own environment and globals."""

    codes: ClassVar[dict[str, Any]] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self.codes.get(bucket.key)

    def dump_bytecode(self, bucket: Bucket) -> None:
        self.codes[bucket.key] = bucket.code


def template_environment() -> Environment:
    """What renders the templates: a name that is not given is an error."""
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        bytecode_cache=_CompiledOnce(),
    )
    environment.filters |= {"printable": printable, "show": show}
    return environment


def folded(title: str, lines: Sequence[str]) -> Markup:
    """A list that opens at a click; nothing without lines."""
    if not lines:
        return Markup("")
    items = Markup("").join(Markup("<li>{}</li>").format(printable(line)) for line in lines)
    return Markup('<details class="numbers"><summary>{}</summary><ul>{}</ul></details>').format(title, items)
