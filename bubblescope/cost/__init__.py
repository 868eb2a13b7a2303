"""What lost time costs."""
