#!/bin/sh
# Prints the state of a job, by its id, in Snakemake's words: running, success or failed.
state=$(scontrol show job -o "$1" 2>&1 | sed -n 's/.* JobState=\([A-Z_]*\) .*/\1/p')
case $state in
  COMPLETED) echo success ;;
  BOOT_FAIL | CANCELLED | DEADLINE | FAILED | NODE_FAIL | OUT_OF_MEMORY | TIMEOUT) echo failed ;;
  PREEMPTED | REVOKED | SPECIAL_EXIT) echo failed ;; # one that is requeued shows PENDING
  '')
    # Slurm forgets jobs some minutes after their end (MinJobAge); accounting, if on, remembers.
    if scontrol ping >/dev/null 2>&1 && ! squeue -h -j "$1" >/dev/null 2>&1; then
      case $(sacct -n -X -j "$1" -o State 2>/dev/null) in
        *COMPLETED*) echo success ;;
        *) echo failed ;;
      esac
    else
      echo running # the controller does not answer now
    fi
    ;;
  *) echo running ;;
esac
