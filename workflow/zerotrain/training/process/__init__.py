"""The processes of a training: start, lock, heartbeat, stop and end."""
