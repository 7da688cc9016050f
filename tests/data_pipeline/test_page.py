"""The page and the README on a dataset: their numbers, recomputed from its files, and what the
library of the hub reads by them."""

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml
from datasets import load_dataset

from mlm_repro.data_pipeline.fast.language import probability
from mlm_repro.data_pipeline.stages.gopher import PAGE
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from tests.commands import Command
from tests.data_pipeline.conftest import write_jsonl

RECIPE = """
name = "shown"
workers = 1
stages = ["language", "length", "deduplicate", "split", "tokenize"]
sources.names = ["jsonl:a.jsonl"]
tokenizer = {kind = "train", vocab_size = 300}
length.min_tokens = 60
"""
SHORT = "It is <script>late</script> & over."


def label(bits: int) -> str:
    return str(bits) if bits < 2 else f"{2 ** (bits - 1):,} to {2**bits - 1:,}"


def table(readme: str, title: str) -> dict[str, int]:
    part = readme.split(f"## {title}")[1].split("##")[0]
    rows = re.findall(r"^\| (.+) \| ([\d,]+) \|$", part, re.MULTILINE)
    return {name: int(count.replace(",", "")) for name, count in rows if count != "0"}


@pytest.mark.parametrize("shards", [0, 2])
def test_numbers_are_those_of_the_files(cli: Command, shards: int) -> None:
    rng = random.Random(0)
    pages = [
        " ".join(rng.choices(PAGE.split(), k=rng.randrange(30, 400))) + f" {number}"
        for number in range(60)
    ]
    write_jsonl(
        Path("a.jsonl"), [*pages, pages[3] + "!", *(pages[5] + "." * n for n in (1, 2, 3)), SHORT]
    )
    Path("r.toml").write_text((f"shards = {shards}" if shards else "") + RECIPE)
    cli("run", "r.toml", ends=0)
    ran = cli("stats", "runs/shown", "--page", "about", ends=0)
    assert "written: about/page.html and about/README.md" in ran.out
    assert "about is there" in cli("stats", "runs/shown", "--page", "about", ends=2).error
    readme = Path("about/README.md").read_text(encoding="utf-8")
    card = json.loads(Path("runs/shown/dataset.json").read_text())
    ledger = json.loads(Path("runs/shown/ledger.json").read_text())

    front = yaml.safe_load(readme.split("---\n")[1])
    assert (front["license"], front["language"]) == ("unknown", ["en"])
    assert front["size_categories"] == ["n<1K"]
    shutil.copytree("runs/shown/documents", "hub/documents")
    shutil.copy("about/README.md", "hub")
    loaded = load_dataset("hub", cache_dir="cache")
    texts = [row["text"] for split in loaded.values() for row in split]
    assert {name: len(rows) for name, rows in loaded.items()} == {
        name: split["documents"] for name, split in card["splits"].items()
    }

    tokenizer = Tokenizer.load(Path("runs/shown/tokenizer"))
    lengths = Counter(label((len(tokenizer.encode_ids(text)) + 1).bit_length()) for text in texts)
    assert table(readme, "Tokens of a document") == lengths
    assert len(lengths) > 1
    scores = Counter(f"from {int(20 * probability(text)) / 20:.2f}" for text in texts)
    assert table(readme, "Probability of the language of a document") == scores
    duplicates = table(readme, "Duplicates that one document stands for")
    assert duplicates == {label(1): 1, label(2): 1}

    page = Path("about/page.html").read_text(encoding="utf-8")
    # A count of 0 has no bar, which would be as wide as that of a small count.
    figures = re.findall(r'<td class="number">(\d+)</td><td class="figure">(<span)?', page)
    assert {bool(bar) for count, bar in figures if count != "0"} == {True}
    assert {bool(bar) for count, bar in figures if count == "0"} <= {False}
    assert "<script" not in page
    assert "It is &lt;script&gt;" in page
    first = ledger["stages"][0]["documents_out"]
    for stage in ledger["stages"]:
        kept = f'{100 * stage["documents_out"] / first:.2f}%"></span></td></tr>'
        assert re.search(rf"<td>{stage['name']}</td><td.*{re.escape(kept)}", page)
        for reason, amount in stage["dropped"].items():
            assert f'<td>{reason}</td><td class="number">−{amount["documents"]}</td>' in page
            assert f"<h3>{reason} (stage {stage['name']})</h3>" in page


def test_what_a_verb_wrote_has_no_page(cli: Command) -> None:
    write_jsonl(Path("a.jsonl"), [PAGE])
    cli("gopher", "jsonl:a.jsonl", "out", "--workers", 1, ends=0)
    assert (
        "--page describes only a dataset with token files"
        in cli("stats", "out", "--page", "about", ends=2).error
    )
    assert not Path("about").exists()
