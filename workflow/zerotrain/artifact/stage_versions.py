"""The version of each stage: a whole number, raised by whoever changes what the stage makes.

Raise a stage's number when it makes something else from equal inputs, and add a line to
CHANGELOG.md; tests/stages/test_stage_versions.py fails while a result moved and the number did not.
A change that leaves the result as it was raises nothing. A raised number reruns the stage, except
for `train_phase` and `export_weights`: theirs is reported and never acted on, since nothing but a
user's own edit trains again.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSIONS: Mapping[str, int] = {
    "prepare_dataset": 1,
    "build_base": 1,
    "cache_latents": 1,
    "render_launch": 1,
    "import_checkpoint": 1,
    "train_phase": 1,
    "export_weights": 1,
    "evaluate": 2,
    "report": 1,
}
