"""Templates in which every value is escaped."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

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
