"""This part of the workflow keeps Snakemake's records and DVC's in agreement, where DVC is in use.

OUTPUTS: none
"""

from zerotrain.dvc import agreement

agreement.keep(workflow, Path(CONFIG))


onstart:
    agreement.note_running()
