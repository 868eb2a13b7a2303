"""Stands in for srun, mpirun and torchrun: starts tasks that know their number from the launcher's variables alone.

Does not import torch, as torchrun does: a job starts and ends seconds earlier.

    python start_tasks.py slurm 2 python train.py
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

SAID = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
}


def main() -> int:
    kind, count, *command = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    *ranks, size = SAID[kind]
    place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", size: count}
    tasks = [
        subprocess.Popen(command, env={**place, **dict.fromkeys(ranks, str(number))}) for number in range(int(count))
    ]
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
