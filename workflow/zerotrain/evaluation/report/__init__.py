"""The report of a run on one page: `facts` reads them, `samples`, `health`, `costs`, `forecast` and
`origin` make what the page shows, `figures` draws, and `page` puts them together.
"""
