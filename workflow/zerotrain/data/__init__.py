"""Samples: the sources of images and captions, and the dataset manifest that lists them."""
