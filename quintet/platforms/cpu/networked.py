"""The ranks of one model on whichever machines: the sums of comm.py, over sockets instead of shared memory.

They are the same kernels, so that a recorded step holds them, and add up in the same order: a sum has the same bits
over either. Every rank sends its whole part to each other, so that a sum costs (ranks - 1) times its bytes, both ways.
"""

import hmac

import torch

from quintet import __version__
from quintet.platforms.cpu.comm import SharedMemory
from quintet.platforms.cpu.native import extension
from quintet.platforms.network.letters import NetworkLetters
from quintet.platforms.network.rendezvous import TCP, Terms, key_of, meet
from quintet.types import Place

__all__ = ["TCP", "Terms", "networked"]


def networked(place: Place, terms: Terms) -> SharedMemory:
    """Blocks until all have come; ValueError says who has not, or what they have not alike."""
    key = key_of(place.endpoint)
    alike = {"quintet": __version__, "torch": str(torch.__version__), "instruction set": extension().isa()}
    met, seconds = meet(place, key, alike, terms), terms.seconds
    mesh, seal = extension().Mesh(met.sockets, place.rank, seconds), hmac.digest(key, b"notes" + met.session, "sha256")
    letters = NetworkLetters(mesh, place, met.wires, seal, seconds, extension().RankLost)
    return SharedMemory(mesh, letters)
