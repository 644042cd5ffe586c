"""Training: the engines, the loop, its draws and schedule, and the folder of its progress."""
