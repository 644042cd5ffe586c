"""Samples: where images and captions come from, and the dataset manifest that lists them."""
