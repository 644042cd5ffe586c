"""Looking at runs: RunView reads one from its manifests, progress folders, logs and records."""
