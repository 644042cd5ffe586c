"""Evaluation: samples or answers of a phase's weights, their metrics, and training curves."""
