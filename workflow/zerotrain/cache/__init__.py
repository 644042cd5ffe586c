"""The cache: VAE latents and text embeddings of a dataset at one resolution, addressed by content.

A folder contains index.json, index.arrow with a row for each sample, and two series of safetensors
shards. A key is a digest of the user's choices that decide its numbers, and of the kind of device
(`sample_keys`). Code, versions and switches are recorded in records/encoding.json (`record`); if
they differ from the present process, `reuse` compares eight items of each series, and encodes a
series again if they differ by more than rounding.
Shard i of n holds the keys of the i-th of n equal ranges; equal captions are stored once, and the
empty caption always. `layout` is the format, `encoding` makes keys and tensors, `writer` writes and
reuses, `reader` reads. Training imports only the reader. A text dataset has one series, tokens,
which `tokenising` arranges in rows; its folder is named after the maximum row length.

The manifest records what describes a training's data: `parents` has the identities of dataset and
base; `content` has resolution and dtype, or for text max_length and packing; `made_by` has
max_sequence_length, long_captions, text_dtype (in which the text encoders computed) and device (its
kind). The cache's identity covers its tensors, so it can change without a change in any of these.
"""
