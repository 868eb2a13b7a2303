"""Units of time."""

NS = 1e-9
"""Seconds in a nanosecond: times are kept in whole nanoseconds and told in seconds."""
