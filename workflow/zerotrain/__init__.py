"""A reproducible training pipeline: stages are commands, results are folders."""

import os

__version__ = "0.1.0"

# A model's config.json may name a kernel, which transformers would download and run; it reads this
# when it is imported.
os.environ.setdefault("USE_HUB_KERNELS", "NO")
