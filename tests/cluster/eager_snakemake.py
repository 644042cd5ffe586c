"""Snakemake that looks every second whether a job has ended.

The executors of clusters look after 10, 21, 32 ... seconds, to spare the controller of a real one.
"""

import sys

from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

RemoteExecutor.next_seconds_between_status_checks = property(  # type: ignore[assignment]
    lambda self: 1, lambda self, seconds: None
)
sys.argv[0] = "snakemake"
main()
