"""Words and sub-words of WikiText-103's test file, which the 2019 paper normalises its perplexity by."""

from data_pipeline.contamination.testsets import find_gpt2_vocabulary, find_test_set
from data_pipeline.tokens.tokenizer import Tokenizer
from evaluation.detokenize import detokenize_wikitext
from evaluation.documents import count_original_tokens
from evaluation.official import read_official
from evaluation.wikitext103 import TEST_FILE_SHA256
from experiments.sealed import Line, lines


def measure_words() -> list[Line]:
    """T_o, T and their ratio (2019 paper, Section 5.3). Raises DataMissing where the files are nowhere."""
    text = read_official(find_test_set("wikitext103"), TEST_FILE_SHA256, "the WikiText-103 test file wiki.test.tokens")
    tokenizer = Tokenizer.from_gpt2_files(*find_gpt2_vocabulary())
    words = count_original_tokens(text)
    predicted = len(tokenizer.encode(detokenize_wikitext(text))) - 1  # nothing comes before the first
    values = {"wikitext103_original_tokens": words, "wikitext103_bpe_tokens": predicted,
              "tokens_per_word": predicted / words}  # fmt: skip
    return lines("WikiText-103 test", values, note="counted in the published test file")
