"""The machine: hardware, memory, disks, ports, jobs and child processes.

No module imports torch on import; torch_probe imports it in a separate process, and device,
memory_watch and software import it when training calls them.
"""
