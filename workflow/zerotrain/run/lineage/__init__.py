"""zerotrain trace: from weights back to the images and texts, and from an image to the weights.

`index` reads published folders without changing them, `verify` compares files with manifests and
`compare_source` a dataset with its source. `walk` follows parents into a `chain`, which has facts
about its folders, `trace` starts it from weights, `report` formats it, and `image` traces in the
other direction.
"""
