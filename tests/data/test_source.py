"""What the Snakefile imports is light."""

from __future__ import annotations

import subprocess
import sys


def test_listing_rule_inputs_imports_nothing_heavy(images):
    folder = images(a="text")
    program = (
        "import sys\n"
        "from zerotrain.config.data import DataConfig\n"
        "from zerotrain.data.open import source_files\n"
        f"files = source_files(DataConfig(images={str(folder)!r}))\n"
        "source_files(DataConfig(source='digits'))\n"
        "heavy = {'PIL', 'numpy', 'sklearn', 'torch'} & set(sys.modules)\n"
        "print(len(files), sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "2 []\n", done.stderr
