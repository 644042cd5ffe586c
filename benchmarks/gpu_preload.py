"""What the process imports, and looks up, of which gpu.py's measurements are forks."""

import gc

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (imports torch's compiler)

gc.freeze()  # or each fork copies all pages as it collects
