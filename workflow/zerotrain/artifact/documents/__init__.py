"""Documents of others: opened as regular files, parsed within limits, into values of known types.

Every YAML, JSON, JSON Lines, TOML and safetensors header that a person or another program may have
written is read here: a run's records, manifests, configurations, models, adapters. What a parser
raises, whatever it is, becomes a sentence (DocumentError). `make lint` refuses other parsers.

A number is finite and has at most 128 bits, and a text is valid Unicode, so that whoever computes
with it or writes it again needs no check of its own.
"""

from zerotrain.artifact.documents.json_text import (
    check_object,
    check_type,
    describe_kind,
    parse_json,
    read_json,
    read_json_lines,
    read_object,
    read_record,
)
from zerotrain.artifact.documents.limits import DocumentError, read_bytes, read_lines, read_text
from zerotrain.artifact.documents.names import (
    LeftOut,
    Names,
    check_name,
    read_shard_names,
    read_weight_map,
)
from zerotrain.artifact.documents.tensor_header import (
    TensorEntry,
    TensorHeader,
    read_entries,
    read_header,
)
from zerotrain.artifact.documents.yaml_text import compose_yaml, parse_toml, parse_yaml, read_yaml
from zerotrain.machine.regular_file import FileError, MissingFileError

__all__ = [
    "DocumentError",
    "FileError",
    "LeftOut",
    "MissingFileError",
    "Names",
    "TensorEntry",
    "TensorHeader",
    "check_name",
    "check_object",
    "check_type",
    "compose_yaml",
    "describe_kind",
    "parse_json",
    "parse_toml",
    "parse_yaml",
    "read_bytes",
    "read_entries",
    "read_header",
    "read_json",
    "read_json_lines",
    "read_lines",
    "read_object",
    "read_record",
    "read_shard_names",
    "read_text",
    "read_weight_map",
    "read_yaml",
]
