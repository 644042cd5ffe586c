"""The cache: VAE latents and text embeddings of a dataset at one resolution, addressed by content.

A folder holds index.json and two series of safetensors shards. A key is a digest of all that its
numbers depend on (`keys`). Shard i of n holds the keys of the i-th of n equal ranges; equal
captions are stored once, and the empty caption always. `layout` is the format, `encoding` makes
keys and tensors, `writer` writes and reuses, `reader` reads. Training imports the reader alone.
"""

from zerotrain.cache.layout import Entry
from zerotrain.cache.reader import Cache, read_cache, stacked

__all__ = ["Cache", "Entry", "read_cache", "stacked"]
