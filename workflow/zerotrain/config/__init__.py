"""The run's configuration: typed, validated, with messages that name file, key, value and fix."""
