"""Mathematics without domain words: intervals, statistics, longest paths."""
