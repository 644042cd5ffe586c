"""The machine: hardware, memory, disks, ports, jobs and child processes.

No module imports torch on import; detect does so in a separate process, and device,
memory_watch and software import it when training calls them.
"""
