"""Artifact folders: written beside their place, listed with hashes, published by a rename.

A folder counts as written only when its manifest.json lies in it. Format version 1:

    {"format": 1, "kind": "cache", "content": {...},
     "files": {"a/b": {"sha256": "...", "bytes": 3}},
     "parents": {"dataset": {"path": "...", "identity": "..."}}, "made_by": {...}}

The *identity* of a folder is a digest of its kind, content and files: two folders with one identity
can stand for each other, whoever made them. Files under ``records/`` (logs, timings) are listed and
checked but are no part of the identity.

`manifest` reads, `damage` compares files with what a manifest lists, `verdicts` remembers hashes,
`rebuilding` names the command that makes a folder again, `untrusted` checks names and links of
folders from others, `publication` writes, `whole_file` writes single files, `leftovers` mends what
a killed writer left, and `in_use` keeps what is read from being removed.
"""

from zerotrain.artifact.damage import MANIFEST, file_sha256
from zerotrain.artifact.leftovers import mend
from zerotrain.artifact.manifest import (
    RECORDS,
    Artifact,
    check_published,
    digest,
    is_described,
    is_published,
    kind_of,
    read,
    read_around,
    read_manifest,
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
    "check_published",
    "copy_new",
    "create",
    "digest",
    "file_sha256",
    "is_described",
    "is_published",
    "kind_of",
    "link_or_copy",
    "mend",
    "publish",
    "publish_manifest",
    "read",
    "read_around",
    "read_manifest",
    "read_shard_names",
    "replacing",
    "sizes_digest",
    "write_json",
    "write_whole",
]
