#!/bin/sh
# Prints Grid Engine's state of a job in cluster-generic's words: running, success or failed.
if qstat -j "$1" >/dev/null 2>&1; then
    # Eqw: it could not be started, and waits for a person.
    qstat 2>/dev/null | awk -v id="$1" '$1 == id && $5 ~ /E/ { found = 1 } END { exit !found }' \
        && echo failed || echo running
    exit
fi
# qacct knows a job some seconds after qstat no longer lists it.
for _ in 1 2 3 4 5 6 7 8 9 10; do
    if ended=$(qacct -j "$1" 2>/dev/null); then
        echo "$ended" | awk '/^(failed|exit_status) / && $2 != 0 { bad = 1 }
            END { print bad ? "failed" : "success" }'
        exit
    fi
    sleep 3
done
echo failed
