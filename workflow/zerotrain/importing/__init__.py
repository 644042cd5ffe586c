"""Launch configurations of other programs, read into ours; nothing is dropped in silence."""
