"""The machine: what it is, what may run on it, and whether its disks and ports serve.

Nothing here imports torch but torch_probe, which runs in a process of its own, and device, which
training asks.
"""
