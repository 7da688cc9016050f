"""Writes a page on a dataset for people, and a README in the form of the Hugging Face hub."""

from collections import Counter
from itertools import chain, islice
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from mlm_repro.data_pipeline.document import written_documents
from mlm_repro.data_pipeline.fast.language import probability
from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard, Ledger
from mlm_repro.data_pipeline.publish import DUPLICATES
from mlm_repro.data_pipeline.tokens.token_file import TokenFile, split_prefixes, texts_of
from mlm_repro.lineage.atomic import new_directory, parse_json
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import read_document

SCORED = 1000
"""Number of a dataset's documents, from the first on, whose language is scored for its page, if its
recipe has the stage `language`."""
FILES = "page.html", "README.md"


def write_page(dataset: Path, out: Path) -> None:
    """Write `page.html` and `README.md` about the complete dataset in the directory `dataset` into
    a new folder `out`.

    Raises BadInput if `out` is there already, or if `dataset` has no data card, as after a verb
    that writes no token files; IntegrityFailure if its card, ledger or a token file is damaged.
    """
    if out.exists():
        raise BadInput(f"{out} is there already: give --page a new folder")
    if not (dataset / DATASET).is_file():
        raise BadInput(
            f"{dataset} has no {DATASET}, and --page describes only a dataset with token files,"
            " which `mlm-data run`, `import` and `tokenize` write"
        )
    ledger = read_document(dataset / LEDGER, Ledger)
    card = read_document(dataset / DATASET, DataCard)
    prefixes = {name: split_prefixes(dataset, name) for name in card.splits}
    parts = list(chain(*prefixes.values()))
    sizes = chain.from_iterable(TokenFile(part).sizes.tolist() for part in parts)
    texts = chain.from_iterable(written_documents(texts_of(part)) for part in parts)
    scored = islice(texts, SCORED if "language" in card.settings else 0)
    duplicates = dataset / DUPLICATES
    survivors = Counter[str]()
    if duplicates.is_file():
        with duplicates.open("rb") as lines:
            survivors.update(parse_json(line)["survivor"] for line in lines)
    environment = Environment(
        loader=PackageLoader("mlm_repro.data_pipeline"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    context = {
        "card": card,
        "ledger": ledger,
        "files": {name: texts_of(first).name for name, (first, *_) in prefixes.items()},
        "sizes": Counter(map(int.bit_length, sizes)),
        "scores": Counter(int(20 * probability(each.text)) for each in scored),
        "clusters": Counter(map(int.bit_length, survivors.values())),
    }
    with new_directory(out) as directory:
        for name in FILES:
            text = environment.get_template(name).render(context)
            (directory / name).write_text(text, encoding="utf-8", errors="replace")
