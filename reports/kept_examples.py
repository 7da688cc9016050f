"""What each model made of each example of a last-word test, as a reproduction keeps it."""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from lineage.files import Example, ExampleHead, one_line
from reports.files import Problem

EXAMPLES = "examples.jsonl"


@dataclass(frozen=True)
class Examples:
    """The examples; without a head where there are none."""

    head: ExampleHead | None
    found: tuple[Example, ...]
    problems: tuple[Problem, ...]


def read_examples(directory: Path) -> Examples:
    """The examples of a reproduction's directory; a sentence for each line that is none."""
    path = directory / EXAMPLES
    if not path.is_file():
        return Examples(None, (), ())
    first, *rest = path.read_bytes().splitlines() or [b""]
    try:
        head = ExampleHead.model_validate(json.loads(first))
    except (ValueError, RecursionError) as error:
        sentence = f"The examples cannot be shown: the first line of {EXAMPLES} is no head ({_reason(error)})."
        return Examples(None, (), (Problem(EXAMPLES, sentence, damaged=True),))
    examples, problems = [], []
    for number, line in enumerate(rest, 2):
        try:
            example = Example.model_validate(json.loads(line))
            if not len(example.correct) == len(example.log_probability) == len(head.models):
                raise ValueError(f"it has not one answer for each of {len(head.models)} models")
            examples.append(example)
        except (ValueError, RecursionError) as error:
            sentence = f"Line {number} of {EXAMPLES} is left out: {_reason(error)}."
            problems.append(Problem(EXAMPLES, sentence, damaged=True))
    if not rest:
        problems.append(Problem(EXAMPLES, f"There are no examples in {EXAMPLES}.", damaged=False))
    return Examples(head, tuple(examples), tuple(problems))


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return one_line(error)
