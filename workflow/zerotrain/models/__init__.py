"""Trained models: bases, their families, and the parameters that change."""
