"""Names of the files with which a training reports, in its progress folder."""

LOG = "metrics.jsonl"
RESOURCES = "resources.json"
PENDING = "pending.json"
