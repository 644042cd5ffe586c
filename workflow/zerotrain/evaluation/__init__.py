"""Evaluation: what a phase's weights make and how well, and how the training went."""
