"""Collectives over peer memory: ranks push into each other's GPUs, in Triton.

    communicator = connect(rendezvous, large)       # on all ranks, at about the same time
    total = communicator.all_reduce(x, axis="tensor")

Small tensors take the kernels of `collectives.py` and larger sums that of `tiles.py`, which CUDA graphs can capture.
Everything else, sends between stages too, takes `large`, NCCL's communicator. NVLink's multicast is never used.
"""

from __future__ import annotations

from atom.kernels.backend import Communicator, Rendezvous


def connect(rendezvous: Rendezvous, large: Communicator) -> Communicator:
    """Open the memory of the other ranks. UnsupportedError, on all of them, if one cannot."""
    from atom.kernels.peers.communicator import PeerCommunicator  # which imports triton

    return PeerCommunicator(rendezvous, large)
