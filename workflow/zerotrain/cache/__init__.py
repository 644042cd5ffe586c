"""The cache: VAE latents and text embeddings of a dataset at one resolution, addressed by content.

A folder holds index.json and two series of safetensors shards. A key is a digest of all that its
numbers depend on (`keys`). Shard i of n holds the keys of the i-th of n equal ranges; equal
captions are stored once, and the empty caption always. `layout` is the format, `encoding` makes
keys and tensors, `writer` writes and reuses, `reader` reads. Training imports the reader alone.

A dataset of text has one series, tokens, of which `token_layout` makes rows and which `tokenising`
fills; its folder is named by the longest row.
"""

from zerotrain.cache.layout import Entry
from zerotrain.cache.reader import Cache, TokenCache, read_cache, stacked
from zerotrain.cache.token_layout import Row

__all__ = ["Cache", "Entry", "Row", "TokenCache", "read_cache", "stacked"]
