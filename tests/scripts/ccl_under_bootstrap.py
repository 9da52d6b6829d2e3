"""A rank as rank.py would start it: `bootstrap.py SCRIPT ARGUMENT...` with the variables of a rank and the backend ccl."""

import os
import sys

os.environ.update(
    RANK=os.environ["PMI_RANK"],
    WORLD_SIZE=os.environ["PMI_SIZE"],
    LOCAL_RANK=os.environ["MPI_LOCALRANKID"],
    LOCAL_WORLD_SIZE=os.environ["MPI_LOCALNRANKS"],
    CLUSTER_TRAIN_BOOTSTRAP='{"backend": "ccl"}',
)
del os.environ["PYTHONPATH"]  # as on a node: the script finds nothing of ours
os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])
