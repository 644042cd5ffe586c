"""Artifact folders: written next to their place, listed with hashes, published by a rename.

A folder counts as complete only once it has its manifest.json. Format version 1:

    {"format": 1, "kind": "cache", "content": {...},
     "files": {"a/b": {"sha256": "...", "bytes": 3}},
     "parents": {"dataset": {"path": "...", "identity": "..."}}, "made_by": {...}}

The *identity* of a folder is a digest of its kind, content and files: folders with the same
identity are interchangeable, whatever made them. A dataset states it in its content, as its samples
are in files. Files under ``records/`` (logs, timings) are
listed and checked but are not part of the identity.

`manifest` reads, `damage` compares files with the manifest, `verdicts` stores hashes, `documents`
reads what others wrote, `links` checks where links of their folders lead, `publication` writes,
links own files and copies others, `whole_file` writes single files, `leftovers` recovers from a
killed writer and keeps folders from being removed while they are read, and `layout` defines where
folders are and names the command that makes one again.
"""

from zerotrain.artifact.damage import MANIFEST, file_sha256
from zerotrain.artifact.documents import check_name, read_shard_names
from zerotrain.artifact.layout import place_in_results
from zerotrain.artifact.leftovers import recover_interrupted_publish, scratch_folder
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
    streamed_digest,
    write_json,
)
from zerotrain.artifact.publication import (
    UnpublishedFolder,
    copy_new,
    is_own,
    link_or_copy,
    publish,
    publish_manifest,
    take_in,
)
from zerotrain.artifact.whole_file import create, replacing, write_whole

__all__ = [
    "MANIFEST",
    "RECORDS",
    "Artifact",
    "UnpublishedFolder",
    "check_name",
    "check_published",
    "copy_new",
    "create",
    "digest",
    "file_sha256",
    "is_described",
    "is_own",
    "is_published",
    "kind_of",
    "link_or_copy",
    "place_in_results",
    "publish",
    "publish_manifest",
    "read",
    "read_around",
    "read_manifest",
    "read_shard_names",
    "recover_interrupted_publish",
    "replacing",
    "scratch_folder",
    "sizes_digest",
    "streamed_digest",
    "take_in",
    "write_json",
    "write_whole",
]
