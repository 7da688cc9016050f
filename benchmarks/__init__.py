"""Speed beside other programs: each number is a ratio obtained in one run on one machine."""
