"""Logs, measurements and samples of a running training."""
