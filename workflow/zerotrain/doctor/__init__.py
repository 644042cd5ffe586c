"""`zerotrain doctor`: what this machine, this installation and a run look like, ready to paste.

Each module looks at one thing and gives facts and problems; a problem is what would stop a
training. No module imports torch: the report must come also where torch cannot be imported.
"""
