"""`zerotrain doctor`: a report on this machine, this installation and a run, ready to paste.

Each module examines one area and returns facts and problems; a problem would stop a training. No
module imports torch: the report must also work where torch cannot be imported.
"""
