"""Weights out of any training, in the forms that other programs open; samples."""
