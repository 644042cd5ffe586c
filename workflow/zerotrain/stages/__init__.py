"""The stages, one module and one command each. Stages import artifacts, never each other."""
