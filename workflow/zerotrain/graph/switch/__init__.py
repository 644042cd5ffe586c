"""`zerotrain switch`: the configuration of a phase that continues under another launch."""
