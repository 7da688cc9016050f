"""Two commands that write to one place at once: nothing is mixed, nothing is lost, and one says why it stopped."""

from pathlib import Path

from tests.chaos.faults import Fault, instrument

FOLDERS = {
    "export": "mlm-train export 355m-tiny out/x",
    "shard-hf": "mlm-train shard-hf hf out/x --tp 2",
    "import": "mlm-train import hf out/x",
    "oracle": "mlm-eval oracle --out out/x",
    "clean": "mlm-data clean jsonl:tiny/documents/train.jsonl out/x --workers 1",
    "import-tokens": "mlm-data import tiny/train_text_document out/x --tokenizer tiny/tokenizer",
    "merge": "mlm-data merge tiny tiny out/x",
    "launch": "mlm-experiment launch 8.3b --out out/x",
    "build": "mlm-report build reproduce-355m --out out/x",
    "figure": "mlm-report figure 2021/figure-6 --out out/x --format csv",
    "train": "mlm-train run small.toml --runs out/x",
    "experiment": "mlm-experiment run 2021/figure-6 --runs out/x",
}
FILES = {
    "score": "mlm-eval run cloze few.jsonl --ckpt 355m-tiny --json out/x.json",
    "samples": "mlm-eval run cloze few.jsonl --ckpt 355m-tiny --samples out/x.json",
    "identify": "mlm-eval identify --ckpt 355m-tiny --claimed 20.1 --json out/x.json",
    "generate": "mlm-eval generate --ckpt 355m-tiny --prompt a --tokens 2 --json out/x.json",
    "simulate": "mlm-experiment simulate ptd-p-runs --out out/x.json",
}


def stop_at(number: int, folder: Path) -> None:
    """Let this process stand still at its change of that number below the folder."""
    instrument(folder, Fault("", 0, number, "other", "")).begin("")


if __name__ == "__main__":
    pass
