"""zerotrain trace: from weights back to the images and texts, and from an image to the weights.

`shelf` reads published folders without touching them, `walk` follows their parents, `verify` holds
files to manifests and `origins` a dataset to what it was made from; `facts` says what is worth
knowing of a folder. `report` and `mermaid` show a walk, `image` goes the other way.
"""
