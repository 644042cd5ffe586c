"""A reproducible training pipeline: stages are commands, results are folders."""

import os

__version__ = "0.2.0"

# A model's config.json may name a kernel, which transformers would download and run; it reads this
# when it is imported.
os.environ.setdefault("USE_HUB_KERNELS", "NO")

# OpenMP's threads spin for milliseconds while they wait: next to other work a command of a second
# takes a minute. Threads that sleep at once halve the speed of a small model's steps. A twentieth
# of a millisecond costs neither. OpenMP reads this when torch loads it; GNU's takes the count.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
