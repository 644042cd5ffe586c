"""`zerotrain compare`: runs and phases next to one another.

`sides` finds them by their names, `facts` reads each, `differences` keeps the values that differ,
`rows` makes the table, `command` prints it, and `page` draws the curves and writes what the
report's styles and macros show.
"""
