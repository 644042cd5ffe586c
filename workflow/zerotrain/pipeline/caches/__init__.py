"""The commands of caches: what they take, what may go, and whether they are whole."""
