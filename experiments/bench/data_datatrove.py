"""datatrove's stages on a corpus, run as a program of its own: `python -m experiments.bench.data_datatrove`.

Arguments: corpus (.jsonl), `tokenizer.json`, an empty folder. Prints the processor seconds of each stage as JSON.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(corpus: Path, tokenizer: Path, work: Path) -> None:
    """Clean, sign, bucket, cluster, filter and tokenize with one worker; language needs a model to download."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter
    from datatrove.pipeline.dedup import MinhashDedupSignature as Signature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.formatters import FTFYFormatter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    config = MinhashConfig()
    signatures, buckets, removed = (str(work / name) for name in ("signatures", "buckets", "removed"))
    cleaned, kept = str(work / "cleaned"), str(work / "kept")
    load_word_tokenizer("en").word_tokenize("loaded before the clock starts")
    stages: dict[str, Sequence[Any]] = {
        "clean": [
            JsonlReader(str(corpus.parent), glob_pattern=corpus.name),
            FTFYFormatter(),
            JsonlWriter(cleaned, compression=None),
        ],
        "signatures": [JsonlReader(cleaned), Signature(signatures, config, language="en")],
        "buckets": [MinhashDedupBuckets(signatures, buckets, config=config)],
        "cluster": [MinhashDedupCluster(buckets, removed, config=config)],
        "filter": [JsonlReader(cleaned), MinhashDedupFilter(removed), JsonlWriter(kept, compression=None)],
        "encode": [
            JsonlReader(kept),
            MegatronDocumentTokenizer(str(work / "tokens"), tokenizer_name_or_path=str(tokenizer)),
        ],
    }
    seconds = {}
    for name, pipeline in stages.items():
        tasks = config.num_buckets if name == "buckets" else 1
        start = time.process_time()
        LocalPipelineExecutor(list(pipeline), tasks=tasks, workers=1, logging_dir=str(work / "logs" / name)).run()
        seconds[name] = time.process_time() - start
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
