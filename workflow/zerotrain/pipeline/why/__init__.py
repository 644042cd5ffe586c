"""`zerotrain why`: what would run, why, and what it costs; it changes nothing."""
