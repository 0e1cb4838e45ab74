"""Pieces: compiled parts of a program, each distinct one compiled once.

    pieces = find_pieces(graph.programs["body"])     # 30 of them, in the order of the calls
    len({piece.text for piece in pieces})            # 2: equal layers are one text
    for text, files in compile_pieces(texts): …      # {"piece.so": …, "piece.json": …}, some seconds each
    run = find_piece_compiler("cpu").load(folder)    # milliseconds, without a compiler
    run(x, *weights)                                 # the results, in the piece's order

A piece's text is a graph's, with weights as inputs and names that depend on nothing else. What is made of it is the
work of the device's backends (`Backend.piece_compiler`).
"""

from atom.kernels import PieceCode
from atom.pieces.compile_workers import PieceError, compile_pieces
from atom.pieces.key import digest, identity, key_of, sources_of
from atom.pieces.piece import NAME, Piece, find_pieces

__all__ = [
    "NAME", "Piece", "PieceCode", "PieceError", "compile_pieces", "digest", "find_pieces", "identity", "key_of",
    "sources_of",
]  # fmt: skip
