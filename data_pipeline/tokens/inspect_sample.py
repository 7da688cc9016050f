"""The text of a training sample, with the documents it was packed from."""

from collections.abc import Iterator

from data_pipeline.tokens.samples import PackedSamples
from data_pipeline.tokens.token_file import TokenFile
from data_pipeline.tokens.tokenizer import Tokenizer
from lineage.errors import BadInput


def show_sample(
    token_file: TokenFile, tokenizer: Tokenizer, number: int, seq_length: int = 1024, seed: int = 1234
) -> Iterator[str]:
    """Lines that show the sample which training on this token file sees as its `number`-th, from 0.

    The order is that of a run of at most one epoch; a longer run shuffles all its epochs together. A character cut
    apart at the end of a sample shows as U+FFFD. Raises BadInput if one epoch has no such sample.
    """
    samples = PackedSamples(token_file, 1, seq_length, seed)
    if not 0 <= number < len(samples):
        raise BadInput(f"there is no sample {number:,}: one epoch has {len(samples):,}, counted from 0")
    pieces = list(samples.pieces(number))
    tokens = sum(len(piece.tokens) for piece in pieces)
    yield (
        f"=== sample {number:,} of {len(samples):,} in one epoch with seed {seed}: "
        f"{tokens:,} tokens of {len(pieces):,} documents"
    )
    for document, start, part in pieces:
        end, size = start + len(part), int(token_file.sizes[document])
        yield f"--- document {document:,}, tokens {start:,} to {end - 1:,} of {size:,}"
        yield tokenizer.decode(part)
