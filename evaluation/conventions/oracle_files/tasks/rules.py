"""Functions of lm-evaluation-harness's own task `wikitext`, imported for the task of this
folder."""

from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

__all__ = ["process_results", "wikitext_detokenizer"]
