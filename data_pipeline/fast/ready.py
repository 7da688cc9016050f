"""Imported by the process that workers are forked from: the tables of cleaning and of language detection, made once."""

from data_pipeline.fast.exact_ftfy import fix_text
from data_pipeline.fast.language import detect

fix_text("NFC")
detect("")
