"""Each stage as a command: one after another they give what `run` gives, and each starts
anywhere."""

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from mlm_repro.data_pipeline.reading.file_sources import _cut_table
from mlm_repro.data_pipeline.reading.pieces import Piece
from mlm_repro.data_pipeline.reading.readers import check_damaged, read_sound
from mlm_repro.data_pipeline.stages.clean import Clean
from mlm_repro.lineage.digest import check_seal, sha256_file
from mlm_repro.lineage.errors import BadInput
from tests.commands import Command, Program, call
from tests.data_pipeline.builds import PASSAGE, files_of, mixed_texts, write_mixed
from tests.data_pipeline.conftest import leftovers, sentences, write_jsonl
from tests.data_pipeline.test_token_file import read_by_description

ANY_LOSS = ("--set", "sources.max_bad_fraction=1")
TEST_SET = "decontaminate.test_sets=['lambada']"


def texts_in(directory: Path) -> list[str]:
    return [
        json.loads(line)["text"]
        for file in sorted(directory.rglob("shard-*.jsonl"))
        for line in file.open("rb")
    ]


def ledger_in(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "ledger.json").read_text(encoding="utf-8")))


def test_verbs_in_a_row_are_a_run(
    cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_mixed(tmp_path, 80)
    monkeypatch.setenv("MLM_DATA_DIR", str(tmp_path / "data"))
    Path("r.toml").write_text(
        f'name = "small"\nworkers = 1\n[sources]\nnames = ["jsonl:{source}"]\nmax_bad_fraction ='
        ' 1.0\n[tokenizer]\nkind = "train"\nvocab_size = 300\n[decontaminate]\ntest_sets ='
        ' ["lambada"]\nfrequent = 1000\n'
    )
    assert cli("run", "r.toml").code == 0
    trained = ("--set", "tokenizer.kind=train", "--set", "tokenizer.vocab_size=300")
    steps = [
        ("clean", ANY_LOSS),
        ("language", ()),
        ("length", trained),
        ("dedup", ()),
        ("decontaminate", ("--set", TEST_SET, "--set", "decontaminate.frequent=1000")),
        ("split", ()),
    ]
    place: object = f"jsonl:{source}"
    for verb, options in steps:
        cli(verb, place, f"out-{verb}", "--workers", 1, *options, ends=0)
        place = f"out-{verb}"
        check_seal(Path(place))
        assert cli("stats", place).code == 0
    assert ledger_in(Path("out-clean"))["malformed_lines"] == 3
    assert ledger_in(Path("out-clean"))["blank_lines"] == 1
    assert ledger_in(Path("out-clean"))["stages"][0]["tokens_in"] is None
    for split in ("train", "valid"):
        lines = Path(f"runs/small/documents/{split}.jsonl").read_bytes().splitlines()
        made = [json.loads(line)["text"] for line in lines]
        assert texts_in(Path("out-split", split)) == made
    assert not any(PASSAGE[20:60] in text for text in texts_in(Path("out-decontaminate")))

    cli("tokenize", "out-split", "out-tokens", *trained, ends=0)
    described = json.loads(Path("out-tokens/dataset.json").read_text())
    assert set(described["splits"]) == {"train", "valid"}
    documents, _, _ = read_by_description(Path("out-tokens/valid_text_document"))
    assert len(documents) == len(texts_in(Path("out-split/valid")))


def test_output_is_kept_reused_and_never_overwritten(cli: Command) -> None:
    write_jsonl(Path("a.jsonl"), [sentences(5, n) for n in range(20)])
    assert cli("clean", "jsonl:a.jsonl", "out", "--workers", 1).code == 0
    before = files_of(Path("out"))
    assert "already complete" in cli("clean", "jsonl:a.jsonl", "out", "--workers", 2).err
    for arguments in (
        ["language", "jsonl:a.jsonl"],
        ["clean", "jsonl:a.jsonl", "--set", "clean.normalization=NFKC"],
    ):
        outcome = cli(arguments[0], arguments[1], "out", *arguments[2:], ends=2)
        assert "out holds the result of other work" in outcome.err
    write_jsonl(Path("a.jsonl"), ["changed"])
    assert cli("clean", "jsonl:a.jsonl", "out").code == 2
    assert files_of(Path("out")) == before
    Path("mine").mkdir()
    Path("mine/precious.txt").write_text("keep")
    assert (
        "is a file, or a directory with files but no manifest.json"
        in cli("clean", "jsonl:a.jsonl", "mine").err
    )
    assert leftovers(Path("mine")) == ["precious.txt"]


def test_mistakes_leave_nothing(cli: Command) -> None:
    write_jsonl(Path("a.jsonl"), [sentences(5, n) for n in range(5)])
    for arguments, code, sentence in (
        (["clean", "documents:nowhere", "out"], 2, "no such directory"),
        (["clean", ".", "out"], 2, "no shard-"),
        (["language", "jsonl:a.jsonl", "out", "--set", "language.keep=fr"], 2, "nothing is left"),
        (["tokenize", "jsonl:a.jsonl", "out"], 5, "MLM_DATA_DIR"),
        (["overlap", "jsonl:a.jsonl", "out"], 5, "MLM_DATA_DIR"),
    ):
        outcome = cli(*arguments)
        assert (outcome.code, "Traceback" in outcome.err) == (code, False), outcome.err
        assert sentence in outcome.err
        assert not Path("out").exists()
    Path("out").mkdir()
    cli("language", "jsonl:a.jsonl", "out", "--set", "language.keep=fr", ends=2)
    assert leftovers(Path("out")) == []


def test_an_incomplete_or_changed_directory_is_not_read(cli: Command) -> None:
    write_jsonl(Path("a.jsonl"), [sentences(5, n) for n in range(5)])
    assert cli("clean", "jsonl:a.jsonl", "out", "--workers", 1).code == 0
    shard = Path("out/shard-00000.jsonl")
    shard.write_text(shard.read_text() + '{"id": "x", "text": "added"}\n')
    assert cli("language", "out", "next").code == 6
    Path("out/COMPLETE").unlink()
    outcome = cli("language", "out", "next", ends=6)
    assert "not complete" in outcome.err


def test_compressed_inputs_are_the_same_documents(cli: Command) -> None:
    """Compression is told by content, also behind the links of a Hugging Face cache."""
    import zstandard

    texts = mixed_texts(40)
    content = write_jsonl(Path("a.jsonl"), texts).read_bytes()
    parquet.write_table(pyarrow.table({"text": [*texts, None]}), "a.parquet", row_group_size=7)
    packed = {
        "a.jsonl.gz": gzip.compress(content),
        "b.JSONL.BZ2": bz2.compress(content),
        "c.jsonl.xz": lzma.compress(content),
        "d.jsonl.zst": b"".join(map(zstandard.compress, (content[:1000], content[1000:]))),
    }
    for folder in ("cache/blobs", "cache/snapshots/abc", "alone"):
        Path(folder).mkdir(parents=True)
    for number, (name, compressed) in enumerate(packed.items()):
        Path("alone", name).write_bytes(compressed)
        Path("cache/blobs", str(number)).write_bytes(compressed)
        Path("cache/snapshots/abc", name).symlink_to(Path("../../blobs", str(number)))
    Path("cache/snapshots/abc/README.md").write_text("not read")
    sources = ["jsonl:a.jsonl", "parquet:a.parquet", *(f"jsonl:alone/{name}" for name in packed)]
    for number, source in enumerate([*sources, "jsonl:cache/snapshots/abc"]):
        made = cli(
            "clean",
            source,
            f"out-{number}",
            "--workers",
            1,
            *ANY_LOSS,
            "--set",
            "shard_bytes=65536",
            ends=0,
        )
        expected = texts_in(Path("out-0")) * (len(packed) if "cache" in source else 1)
        assert texts_in(Path(f"out-{number}")) == expected
    assert (
        "warning: jsonl:cache/snapshots/abc leaves 1 other files out, such as README.md" in made.err
    )


def test_the_text_has_any_key_and_type(cli: Command) -> None:
    texts = [sentences(5, n) for n in range(9)]
    rows = [{"id": n, "body": {"text": text}} for n, text in enumerate(texts)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("b.jsonl").write_text("".join(json.dumps({"body.text": text}) + "\n" for text in texts))
    parquet.write_table(
        pyarrow.table({"body": [row["body"] for row in rows], "n": [*range(9)]}), "a.parquet"
    )
    for number, kind in enumerate(
        (pyarrow.large_string(), pyarrow.binary(), pyarrow.dictionary("int8", "string"))
    ):
        column = pyarrow.array([text.encode() if number == 1 else text for text in texts], kind)
        parquet.write_table(pyarrow.table({"body.text": column}), f"{number}.parquet")
    key = ("--workers", 1, "--set", "sources.text_key=body.text")
    for source in (
        "jsonl:a.jsonl",
        "jsonl:b.jsonl",
        *(f"parquet:{name}.parquet" for name in "a012"),
    ):
        assert (
            "9 documents of 9, " in cli("clean", source, source.replace(":", "-"), *key, ends=0).out
        )
        assert texts_in(Path(source.replace(":", "-"))) == texts
    told = "its columns: body (struct<text: string>), n (int64)"
    for wrong, said in (
        ("text", "no column named text"),
        ("body", "struct<text: string> in its column body"),
        ("n", "int64"),
    ):
        outcome = cli(
            "clean", "parquet:a.parquet", "out", "--set", f"sources.text_key={wrong}", ends=2
        )
        assert said in outcome.error
        assert told in outcome.error


def test_ids_are_unique_or_own_and_keys_stay(cli: Command, tmp_path: Path) -> None:
    texts = [sentences(60, n) for n in range(4)]
    for folder, two in (("x", texts[:2]), ("y", [texts[1], texts[2]])):
        Path(folder).mkdir()
        rows = [
            {"text": text, "n": {"id": number}, "when": {"y": 2020}}
            for number, text in enumerate(two)
        ]
        Path(folder, "part.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rest = ("--workers", 1, "--set", "sources.metadata=['when.y']")
    both = "sources.names=['jsonl:x/part.jsonl','jsonl:y']"
    for number, (source, *more) in enumerate(
        (
            ("jsonl:[xy]/*.jsonl",),
            ("jsonl:x", "--set", both),
            ("jsonl:[xy]/*.jsonl", "--set", "sources.id_key=n.id"),
        )
    ):
        cli("dedup", source, f"out-{number}", *rest, *more, ends=0)
        kept = [
            json.loads(line)
            for line in Path(f"out-{number}/shard-00000.jsonl").read_bytes().splitlines()
        ]
        (gone,) = map(json.loads, Path(f"out-{number}/duplicates.jsonl").read_bytes().splitlines())
        places = ["x/part.jsonl:1", "x/part.jsonl:2", "y/part.jsonl:2"]
        assert [row["source" if number == 2 else "id"] for row in kept] == places
        assert all(row["metadata"] == {"when.y": 2020} for row in kept)
        assert gone["id"] != gone["survivor"]
    assert [row["id"] for row in kept] == ["0", "1", "1"]
    assert (gone["id"], gone["survivor"]) == ("0", "1")
    assert (
        "named twice"
        in cli(
            "clean", "jsonl:x", "out", "--set", "sources.names=['jsonl:x','jsonl:x']", ends=2
        ).err
    )
    assert "did you mean 'jsonl:x/part.jsonl'" in cli("clean", "x/part.jsonl", "out", ends=2).err


def test_long_windows_arrow_folders_pipes_and_damaged_files(tmp_path: Path) -> None:
    import zstandard
    from datasets import Dataset

    texts = [sentences(30, n) for n in range(40)]
    content = write_jsonl(tmp_path / "a.jsonl", texts).read_bytes()
    long = zstandard.ZstdCompressionParameters.from_level(3, window_log=30, enable_ldm=True)
    frame = zstandard.ZstdCompressor(compression_params=long).compressobj()
    packed = frame.compress(content) + frame.flush()
    (tmp_path / "long.jsonl.zst").write_bytes(packed)
    Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"))
    with pyarrow.ipc.new_file(
        tmp_path / "one.arrow", pyarrow.schema({"text": pyarrow.string()})
    ) as table:
        table.write_table(pyarrow.table({"text": texts}), 7)
    for source in ("jsonl:long.jsonl.zst", "arrow:saved", "arrow:one.arrow", "jsonl:-"):
        out = source.replace(":", "-")
        if source == "jsonl:-":
            program = [
                Path(sys.executable).with_name("mlm-data"),
                "clean",
                source,
                out,
                "--workers",
                "1",
            ]
            subprocess.run(program, cwd=tmp_path, input=content, check=True)
        else:
            call({}, "mlm-data", "clean", source, out, "--workers", 1, folder=tmp_path, ends=0)
        assert texts_in(tmp_path / out) == texts
    (tmp_path / "in").mkdir()
    for name, data in (("0.jsonl.zst", packed[:-20]), ("1.jsonl.gz", gzip.compress(content))):
        (tmp_path / "in" / name).write_bytes(data)
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "in" / "2.jsonl")
    (tmp_path / "in" / "2.jsonl").unlink()
    command = ("mlm-data", "clean", "jsonl:in", "out", "--workers", 1)
    assert "0.jsonl.zst cannot be read" in call({}, *command, folder=tmp_path, ends=2).err
    more = ("--set", "sources.max_bad_files=1")
    assert (
        "warning: 1 of the files are damaged"
        in call({}, *command, *more, folder=tmp_path, ends=0).err
    )
    assert texts_in(tmp_path / "out")[-40:] == texts


def test_a_cut_file_an_empty_one_and_a_dead_link_are_called_what_they_are(cli: Command) -> None:
    folder = Path("in")
    folder.mkdir()
    texts = [sentences(30, n) for n in range(30)]
    packed = gzip.compress(write_jsonl(Path("a.jsonl"), texts).read_bytes())
    (folder / "0.jsonl.gz").write_bytes(packed[:-20])
    (folder / "1.jsonl.zst").touch()
    refused = cli("clean", "jsonl:in", "out", ends=2).error
    assert "0.jsonl.gz cannot be read" in refused
    assert "sources.max_bad_files" in refused
    # The damage of a file is no malformed line: one of 30 would be more than a hundredth.
    ran = cli("clean", "jsonl:in", "out", "--set", "sources.max_bad_files=1", ends=0)
    assert "warning: 1 of the files are damaged" in ran.err
    kept = texts_in(Path("out"))
    assert 20 < len(kept) <= 30
    assert kept == texts[: len(kept)]
    (row,) = map(json.loads, Path("out/quarantine.jsonl").read_text().splitlines())
    assert (row["source"], row["line"]) == ("0.jsonl.gz", 0)
    assert json.loads(Path("out/ledger.json").read_text())["malformed_lines"] == 0
    (folder / "2.jsonl").symlink_to("gone.jsonl")
    refused = cli("clean", "jsonl:in", "new", ends=2).error
    assert "in/2.jsonl is a link to gone.jsonl, which is not there" in refused


def test_a_damaged_file_is_left_where_verbs_or_limits_read_it_too(cli: Command) -> None:
    """`overlap` reads no documents into a dataset, and a limit counts them before they are read."""
    Path("in").mkdir()
    texts = [sentences(30, n) for n in range(30)]
    packed = gzip.compress(write_jsonl(Path("a.jsonl"), texts).read_bytes())
    Path("in/0.jsonl.gz").write_bytes(packed[:-20])
    write_jsonl(Path("in/1.jsonl"), [PASSAGE])
    write_jsonl(Path("t.jsonl"), [PASSAGE])
    exam = ("--set", "overlap.test_sets=['jsonl:t.jsonl', 'jsonl:a.jsonl']")
    may = ("--set", "sources.max_bad_files=1")
    assert "0.jsonl.gz cannot be read" in cli("overlap", "jsonl:in", "out", *exam, ends=2).error
    ran = cli("overlap", "jsonl:in", "out", *exam, *may, ends=0)
    assert ran.err.count("warning: 1 of the files are damaged") == 1
    found = json.loads(Path("out/overlap.json").read_text())["test_sets"]
    assert found["jsonl:t.jsonl"]["percent"] == 100
    assert found["jsonl:t.jsonl"]["texts"] > 20
    Path("in/2.jsonl.gz").write_bytes(packed[:-20])
    refused = cli("overlap", "jsonl:in", "new", *exam, *may, ends=2).error
    assert "2 of the files are damaged" in refused
    assert "sources.max_bad_files = 1 allows fewer" in refused
    Path("in/2.jsonl.gz").unlink()
    few = ("--set", "sources.max_documents=31")
    assert "0.jsonl.gz cannot be read" in cli("clean", "jsonl:in", "few", *few, ends=2).error
    ran = cli("clean", "jsonl:in", "few", *few, *may, ends=0)
    assert ran.err.count("warning: 1 of the files are damaged") == 1
    kept = texts_in(Path("few"))
    assert kept[-1] == PASSAGE
    assert kept[:-1] == texts[: len(kept) - 1]
    assert len(kept) > 20


def test_a_verb_goes_on_after_its_input_changed(cli: Command) -> None:
    """Its OUT is for the file as it was, which its message says before the next command does."""
    write_jsonl(Path("a.jsonl"), [sentences(30, 1)])
    apply = Clean.apply

    def meanwhile(stage: Clean, text: str) -> object:
        write_jsonl(Path("a.jsonl"), [sentences(30, 2)])
        return apply(stage, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clean, "apply", meanwhile)
        told = cli("clean", "jsonl:a.jsonl", "out", "--workers", 1, ends=7).error
    assert "was changed while it was read" in told
    assert "with a verb name another OUT" in told
    refused = cli("clean", "jsonl:a.jsonl", "out", "--workers", 1, ends=2).error
    assert "name another place" in refused
    cli("clean", "jsonl:a.jsonl", "other", "--workers", 1, ends=0)
    assert texts_in(Path("other")) == [sentences(30, 2)]


def test_test_text_that_stays_is_listed(cli: Command) -> None:
    """Megatron's rule leaves what stands in many documents; soft hyphens, tags and links hide
    nothing."""
    marked = [
        PASSAGE.replace("gentle", mark)
        for mark in ("gen\u00adtle", "<a href='x'>gentle</a>", "[gentle](http://x)")
    ]
    plain = f"{sentences(20, 0)} {PASSAGE}. {sentences(20, 1)}"
    write_jsonl(
        Path("a.jsonl"),
        [
            plain,
            *(f"{sentences(20, n)} {each}. {sentences(20, n)}" for n, each in enumerate(marked)),
        ],
    )
    write_jsonl(Path("t.jsonl"), [PASSAGE])
    for frequent, listed in (("4", 4), ("never", 0)):
        settings = (
            "--set",
            "decontaminate.test_sets=['jsonl:t.jsonl']",
            "--set",
            f"decontaminate.frequent={frequent}",
        )
        cli("decontaminate", "jsonl:a.jsonl", f"out-{frequent}", "--workers", 1, *settings, ends=0)
        rows = Path(f"out-{frequent}/left_in.jsonl")
        left = [json.loads(line) for line in rows.open("rb")] if rows.exists() else []
        assert [row["id"] for row in left] == [f"a.jsonl:{n}" for n in range(1, listed + 1)]
        assert all(0.01 < row["share"] < 0.2 for row in left)
        assert any("accordion" in text for text in texts_in(Path(f"out-{frequent}"))) == bool(
            listed
        )
    assert "4 documents hold such n-grams still" in cli("stats", "out-4", ends=0).out


def test_stages_have_switches(cli: Command) -> None:
    german = (
        "Der Hund lief schnell über die Straße, weil das Wetter am Abend schlechter wurde. " * 3
    )
    write_jsonl(
        Path("a.jsonl"),
        [sentences(20, 1), german, "こんにちは、世界。日本語の文章です。", "１２３"],
    )
    sure = ["language.keep=de", "language.min_probability=1.0"]
    cases = ((["language.keep=['de','en']"], 2), (sure, 0), (["language.keep=ja"], 1))
    for number, (settings, kept) in enumerate(cases):
        options = [part for each in settings for part in ("--set", each)]
        made = cli("language", "jsonl:a.jsonl", f"out-{number}", "--workers", 1, *options)
        assert (len(texts_in(Path(f"out-{number}"))) if made.code == 0 else 0) == kept, made.err
    unknown = cli("language", "jsonl:a.jsonl", "out", "--set", "language.keep=german", ends=2)
    assert (
        "`language.keep` has 'german', which langdetect does not know, but af, ar," in unknown.err
    )
    cli(
        "clean",
        "jsonl:a.jsonl",
        "out",
        "--workers",
        1,
        "--set",
        "clean.fix_character_width=false",
        ends=0,
    )
    assert texts_in(Path("out"))[3] == "１２３"
    refused = cli(
        "dedup",
        "jsonl:a.jsonl",
        "no",
        "--set",
        "deduplicate.bands=25",
        "--set",
        "deduplicate.rows=9",
        ends=2,
    )
    assert (
        "25 bands of 9 rows are expected to find 64.3% of the pairs at threshold = 0.7"
        in refused.err
    )


def test_no_line_is_lost_in_silence(cli: Command) -> None:
    lines = [json.dumps({"text": sentences(5, n)}) for n in range(30)]
    lines[3:6] = ["nonsense", '{"content": "x", "url": "y"}', "{}"]
    Path("a.jsonl").write_text("\n".join(lines) + "\n")
    error = cli("clean", "jsonl:a.jsonl", "out", "--workers", 1, ends=2).error
    assert (
        "3 of 30 lines are not documents, more than sources.max_bad_fraction = 0.01 allows" in error
    )
    assert "a.jsonl, line 4: not JSON: " in error
    assert "a.jsonl, line 5: no text, the key of the text, but content, url; " in error
    assert not Path("out").exists()
    assert len(Path("out.quarantine.jsonl").read_text().splitlines()) == 3
    made = cli(
        "clean",
        "jsonl:a.jsonl",
        "out",
        "--workers",
        1,
        "--set",
        "sources.max_bad_fraction=0.1",
        ends=0,
    )
    assert made.out.startswith("clean out: 27 documents of 30, ")
    assert made.out.endswith("; warning: 3 of 30 lines are not documents, see quarantine.jsonl\n")


def test_overlap_is_measured(cli: Command) -> None:
    planted = sentences(4, 7).split(" ")
    write_jsonl(Path("t.jsonl"), [" ".join(planted), sentences(3, 8)])
    write_jsonl(Path("a.jsonl"), [sentences(8, 1), " ".join(planted[:20])])
    outcome = cli(
        "overlap", "jsonl:a.jsonl", "out", "--set", "overlap.test_sets=['jsonl:t.jsonl']", ends=0
    )
    found = json.loads(Path("out/overlap.json").read_text())["test_sets"]["jsonl:t.jsonl"]
    assert found["texts"] == 2
    assert found["occurrences"]["found"] == 13
    assert f"{found['percent']:.2f} % found" in outcome.out


def test_wikitext_is_held_against_its_own_training_text(cli: Command) -> None:
    """Runs stop at unknown words of the test text; the training text is one file, as it is
    published."""
    words = [f"word{place}" for place in range(24)]
    Path("wiki.test.tokens").write_text(
        f" \n = A title = \n \n {' '.join([*words[:12], '<unk>', *words[12:]])} \n"
    )
    Path("wiki.train.tokens").write_text(
        f" \n = Another = \n \n {' '.join([*words[:10], '<unk>', *words[10:]])} . \n"
    )
    cli(
        "overlap",
        "text:wiki.train.tokens",
        "out",
        "--set",
        "overlap.test_sets=['text:wiki.test.tokens']",
        ends=0,
    )
    found = json.loads(Path("out/overlap.json").read_text())["test_sets"]["text:wiki.test.tokens"]
    assert found["occurrences"] == {"ngrams": 10, "found": 3 + 5}


def test_nothing_is_written_outside_the_output(cli: Command, tmp_path: Path) -> None:
    """Hostile ids and links in the input stay text."""
    Path("in").mkdir()
    lines = [
        {"id": "../../escape", "text": sentences(5, 1)},
        {"id": "/etc/passwd\x00", "text": sentences(5, 2)},
    ]
    Path("in/shard-00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (tmp_path / "in" / "link.txt").symlink_to(secret)
    before = {path: sha256_file(path) for path in tmp_path.rglob("*") if path.is_file()}
    assert cli("clean", "jsonl:in", "out", "--workers", 1).code == 0
    after = {
        path: sha256_file(path)
        for path in tmp_path.rglob("*")
        if path.is_file() and "out" not in path.parts
    }
    assert after == before
    assert (
        subprocess.run(["find", "out", "-type", "l"], capture_output=True, check=True).stdout == b""
    )


@pytest.mark.parametrize("verb", ["split", "dedup"])
def test_a_corpus_of_empty_texts_is_no_fault(verb: str, cli: Command) -> None:
    write_jsonl(Path("corpus.jsonl"), [""] * 3)
    assert cli(verb, "jsonl:corpus.jsonl", "out", "--workers", 1).code in (0, 2)


def test_text_made_to_be_slow_is_in_quarantine(cli: Command) -> None:
    slow = ["a" + "\u0301\u0323" * 400_000, "&" + "amp;" * 400_000]
    write_jsonl(Path("corpus.jsonl"), [sentences(20, 1), *slow, sentences(20, 2)])
    cli("clean", "jsonl:corpus.jsonl", "out", "--workers", 1, *ANY_LOSS, ends=0)
    quarantined = [
        json.loads(line)
        for line in Path("out/quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [each["source"] for each in quarantined] == ["corpus.jsonl:2", "corpus.jsonl:3"]
    assert quarantined[0]["reason"].startswith("more than 1,000 accents or other marks")
    assert quarantined[1]["reason"].startswith("a line is not repaired after 64 passes")
    stages = ledger_in(Path("out"))["stages"]
    assert [(stage["documents_in"], stage["documents_out"]) for stage in stages] == [(2, 2), (2, 2)]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_ctrl_c_is_heard_in_text_made_to_be_slow(tmp_path: Path) -> None:
    """The command ends long before its forty texts are read."""
    slow = "&" + "amp;" * 400_000
    write_jsonl(tmp_path / "corpus.jsonl", [slow] * 40)
    command = Program(
        "mlm-data", "clean", "jsonl:corpus.jsonl", "out", "--workers", 1, folder=tmp_path
    )
    code, cpu_seconds = command.interrupt_at(1, timeout=60)
    assert code == 7
    assert cpu_seconds < 5


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_ctrl_c_is_heard_while_one_word_is_cut_into_tokens(tmp_path: Path) -> None:
    """A vocabulary is trained on a word of 16 million letters, and cuts it."""
    write_jsonl(tmp_path / "corpus.jsonl", ["a" * (16 << 20)])
    settings = ("--set", "tokenizer.kind=train", "--set", "tokenizer.vocab_size=270")
    command = Program(
        "mlm-data",
        "tokenize",
        "jsonl:corpus.jsonl",
        "out",
        "--workers",
        1,
        *settings,
        folder=tmp_path,
    )
    code, cpu_seconds = command.interrupt_at(4, timeout=60)
    assert code == 7
    assert cpu_seconds < 5


def test_a_file_of_two_damaged_pieces_is_one_damaged_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table is cut into its row groups, and two damaged ones counted as two files."""
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [sentences(30, n) for n in range(200)]})
    parquet.write_table(table, path, row_group_size=50, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    for group in (1, 2):
        column = parquet.read_metadata(path).row_group(group).column(0)
        middle = column.data_page_offset + column.total_compressed_size // 2
        content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    pieces = list(_cut_table(Piece("parquet", "a", str(path), "", len(content)), 1))
    damaged: list[str] = []
    assert len(pieces) == 4
    assert len(list(read_sound(pieces, 1 << 20, True, damaged))) > 100
    assert len(damaged) == 2
    check_damaged(damaged, 1)
    assert "warning: 1 of the files are damaged" in capsys.readouterr().err
    other = damaged[0].replace("a.parquet", "b.parquet")
    with pytest.raises(BadInput, match="2 of the files are damaged"):
        check_damaged([*damaged, other], 1)
