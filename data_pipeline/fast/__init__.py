"""Fast code that replaces a library's and gives the same bytes and bits.

`exact.py` compares each with its library on built-in texts when a process first uses it. If they
differ, or the library has another version, the library itself is used. `lineage/loops.py` compiles
loops. The replacements:

    exact_ftfy.py                       ftfy.fix_text
    exact_langdetect.py                 langdetect's detection, which language.py makes repeatable
    minhash.py, shingles.py             datasketch.MinHash over SHA-1

Workers are forked from a process that has imported `ready.py`, so that its tables are built once
for all of them.
"""
