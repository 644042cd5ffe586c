"""A reproducible training pipeline: stages are commands, results are folders."""

import os

__version__ = "0.1.0"

# A model's config.json may name a kernel, which transformers would download and run; it reads this
# when it is imported.
os.environ.setdefault("USE_HUB_KERNELS", "NO")

# OpenMP's threads spin while they wait: next to other work a command of a second takes a minute.
# OpenMP reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
