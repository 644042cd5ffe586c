"""zerotrain trace: from weights back to the images and texts, and from an image to the weights.

`shelf` reads published folders without touching them, `walk` follows their parents into a `chain`,
`verify` holds files to manifests and `origins` a dataset to what it was made from; `facts` says
what is worth knowing of a folder. `trace` puts them together, `report` shows it, and `image` goes
the other way.
"""
