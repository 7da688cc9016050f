"""The protocols by name, and what sets them apart. Imports nothing slow."""

import difflib

from lineage.errors import BadInput

TASKS = {
    "wikitext103": (
        "Megatron-LM's recipe, the published one: 24 detokenizer rules, stride 32, per space-separated token"
    ),
    "wikitext103-stride512": "the same in windows that overlap by half",
    "wikitext103-stride1024": "the same in disjoint windows",
    "wikitext103-raw": "stride 32 without a detokenizer",
    "wikitext103-correct": "stride 32 with a detokenizer that can be undone",
    "wikitext103-lm-eval": "as lm-evaluation-harness's wikitext: 62 documents, disjoint windows, its word count",
    "wikitext103-memory": "Transformer-XL's: no detokenizer, disjoint segments, each with the memory of those before",
    "wikitext103-huggingface": (
        "transformers' strided recipe: rows joined by blank lines, overlap by half, per sub-word"
    ),
    "lambada": "Megatron's --strict-lambada, the published one: OpenAI's text, every sub-word of the last word",
    "lambada-lm-eval": "as lm-evaluation-harness's lambada_openai: what follows the last space",
    "lambada-last-token": "Megatron without --strict-lambada: the last sub-word only",
    "lambada-stopword-filter": "the strict rule where no stop word counts as an answer",
    "lambada-standard": "the strict rule on the original lower-cased plain text",
}
"""`evaluation.builders` makes them."""


def check_task_name(name: str) -> None:
    """Raise BadInput, with the nearest known name, for a protocol that does not exist."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {close[0]!r}?" if close else "`mlm-eval list` names them"
        raise BadInput(f"unknown protocol {name!r}; {hint}")
