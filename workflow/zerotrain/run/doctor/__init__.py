"""`zerotrain doctor`: a report on this machine, this installation and a run, ready to paste.

No module imports torch: the report must also work where torch cannot be imported.
"""
