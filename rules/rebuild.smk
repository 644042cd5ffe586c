"""This part of the workflow plans folders again whose files are missing or damaged.

OUTPUTS: none
"""

from zerotrain.rebuild import Rebuilding

REBUILDING = Rebuilding(workflow)
