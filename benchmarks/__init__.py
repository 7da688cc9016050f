"""Speed beside other programs: each number is a ratio that one run on one machine gave."""
