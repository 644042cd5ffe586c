"""The training state between phases, and the checkpoints of all engines and programs."""
