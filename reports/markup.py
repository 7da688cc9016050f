"""Templates in which every value is escaped, and lists that fold away."""

from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from reports.numbers import printable, show


@cache
def template_environment() -> Environment:
    """What renders the templates: a name that is not given is an error."""
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": printable, "show": show}
    return environment


def folded(title: str, lines: Sequence[str]) -> Markup:
    """A list that opens at a click; nothing without lines."""
    if not lines:
        return Markup("")
    items = Markup("").join(Markup("<li>{}</li>").format(printable(line)) for line in lines)
    return Markup('<details class="numbers"><summary>{}</summary><ul>{}</ul></details>').format(title, items)
