"""Runs of a family whose encoders are arithmetic."""

from tests.builders.caching import family, run  # noqa: F401  (fixtures)
