"""The ranks of one model on whichever machines: the sums of comm.py, over sockets instead of shared memory.

They are the same kernels, so that a recorded step holds them, and add up in the same order: a sum has the same bits
over either. Every rank sends its whole part to each other, so that a sum costs (ranks - 1) times its bytes, both ways.
"""

import hmac

import torch

from quintet import __version__
from quintet.distributed.messages import RankMessages
from quintet.distributed.rendezvous import TCP, RendezvousTerms, join, key_of
from quintet.interface.types import RankInfo
from quintet.platforms.cpu.ops.extension import extension
from quintet.platforms.cpu.shared_memory import SharedMemory

__all__ = ["TCP", "RendezvousTerms", "connect_over_network"]


def connect_over_network(rank_info: RankInfo, terms: RendezvousTerms) -> SharedMemory:
    """Blocks until all ranks have come; ValueError names a missing rank, or settings that differ."""
    key = key_of(rank_info.endpoint)
    alike = {"quintet": __version__, "torch": str(torch.__version__), "instruction set": extension().isa()}
    met, seconds = join(rank_info, key, alike, terms), terms.seconds
    mesh, seal = (
        extension().Mesh(met.sockets, rank_info.rank, seconds),
        hmac.digest(key, b"notes" + met.session, "sha256"),
    )
    letters = RankMessages(mesh, rank_info, met.connections, seal, seconds, extension().RankLost)
    return SharedMemory(mesh, letters)
