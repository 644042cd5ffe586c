# The environment of a job. /bin/sh sources this on the job's node, in the project's folder, before
# Snakemake starts there (`precommand` in config.yaml); what it exports reaches every process, on all
# nodes of a job. A job begins with the variables of the shell that called `snakemake`.

# One way to the libraries is active. `module` and `conda` are functions that /bin/sh must source first.
# 1. The project's environment, made by `make setup`.
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi

# 2. The same over a Python or compiler of environment modules (Lmod: /etc/profile.d/lmod.sh).
# . /etc/profile.d/modules.sh && module load python/3.11 gcc/12 && . .venv/bin/activate

# 3. conda, made as envs/zerotrain.yaml says.
# . "$HOME/miniforge3/etc/profile.d/conda.sh" && conda activate zerotrain

# What `zerotrain fetch` has put into this folder; with it jobs use no network.
if [ -f fetched/env.sh ]; then . fetched/env.sh; fi
