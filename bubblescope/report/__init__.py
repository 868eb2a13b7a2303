"""The report: one value that every view reads. It computes no cause and draws nothing."""
