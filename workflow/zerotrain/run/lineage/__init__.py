"""`zerotrain trace`: from weights back to images and texts, and from an image to the weights."""
