"""Which rank a launcher made of a process. Standard library only: this is imported in the training process."""

from __future__ import annotations

import os
from collections.abc import Mapping

_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def numbers_of_launcher(environ: Mapping[str, str] = os.environ) -> tuple[int | None, int | None]:
    """Global rank and world size that the launcher gave this process; None where it gave none.

    >>> numbers_of_launcher({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"})
    (3, 8)
    """
    for rank, world in _VARIABLES:
        if environ.get(rank, "").isdecimal():
            size = environ.get(world, "")
            return int(environ[rank]), int(size) if size.isdecimal() else None
    return None, None
