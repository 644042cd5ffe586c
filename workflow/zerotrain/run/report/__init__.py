"""The report of a run on one page: `samples`, `health`, `costs`, `forecast` and `origin` make what
the page shows of a RunView, `figures` draws, and `page` puts them together.
"""
