"""Artifact folders: written beside their place, listed with hashes, published by a rename.

A folder counts as written only when its manifest.json lies in it. Format version 1:

    {"format": 1, "kind": "cache", "content": {...},
     "files": {"a/b": {"sha256": "...", "bytes": 3}},
     "parents": {"dataset": {"path": "...", "identity": "..."}}, "made_by": {...}}

The *identity* of a folder is a digest of its kind, content and files: two folders with one identity
can stand for each other, whoever made them. Files under ``records/`` (logs, timings) are listed and
checked but are no part of the identity.

`manifest` reads, `publication` writes, `whole_file` writes single files, `leftovers` mends what a
killed writer left, `in_use` keeps what is read from being removed, and `untrusted` checks names and
links of folders from others.
"""

from zerotrain.artifact.leftovers import mend
from zerotrain.artifact.manifest import (
    MANIFEST,
    RECORDS,
    Artifact,
    digest,
    file_sha256,
    is_published,
    read,
    sizes_digest,
    write_json,
)
from zerotrain.artifact.publication import (
    Draft,
    copy_new,
    link_or_copy,
    publish,
    publish_manifest,
)
from zerotrain.artifact.untrusted import check_name, read_shard_names
from zerotrain.artifact.whole_file import create, replacing, write_whole

__all__ = [
    "MANIFEST",
    "RECORDS",
    "Artifact",
    "Draft",
    "check_name",
    "copy_new",
    "create",
    "digest",
    "file_sha256",
    "is_published",
    "link_or_copy",
    "mend",
    "publish",
    "publish_manifest",
    "read",
    "read_shard_names",
    "replacing",
    "sizes_digest",
    "write_json",
    "write_whole",
]
