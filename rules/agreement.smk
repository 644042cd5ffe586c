"""This part of the workflow keeps Snakemake's records and DVC's in agreement, where DVC is in use.

OUTPUTS: none
"""

from zerotrain.dvc.agreement import Agreement

AGREEMENT = Agreement(workflow, Path(CONFIG))
