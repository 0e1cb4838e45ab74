"""Pieces: compiled parts of a program, each distinct one compiled once.

    pieces = find_pieces(graph.programs["body"])     # 30 of them, in the order of the calls
    len({piece.text for piece in pieces})            # 2: equal layers are one text
    for text, files in compile_pieces(texts): …      # {"piece.so": …, "piece.json": …}, some seconds each
    run = find_piece_compiler("cpu").load(folder)    # milliseconds, without a compiler
    run(x, *weights)                                 # the results, in the piece's order

A piece's text is that of a graph, with weights as inputs and names that depend on nothing else, so equal layers of any
depth are one piece. The device's backends compile it (`Backend.piece_compiler`).
"""

from atom.kernels import PieceCode
from atom.pieces.compile_workers import PieceError, compile_pieces
from atom.pieces.key import identity, sources_of
from atom.pieces.piece import NAME, Piece, find_pieces

__all__ = [
    "NAME", "Piece", "PieceCode", "PieceError", "compile_pieces", "find_pieces", "identity", "sources_of",
]  # fmt: skip
