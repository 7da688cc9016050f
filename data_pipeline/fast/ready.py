"""Makes the tables of cleaning and language detection once, in the process that workers are forked
from."""

from mlm_repro.data_pipeline.fast.exact_ftfy import fix_text
from mlm_repro.data_pipeline.fast.language import detect

fix_text("NFC")
detect("")
