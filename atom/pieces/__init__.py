"""Pieces: the parts of a program that are compiled, each distinct one once, whatever the depth of the model.

    pieces = find_pieces(graph.programs["body"])     # 31 of them, in the order of the calls
    len({piece.text for piece in pieces})            # 3: equal layers are one text
    for text, files in compile_pieces(texts): …      # {"piece.so": …, "piece.json": …}, some seconds each
    run = load_piece(folder)                         # milliseconds, without a compiler
    run(x, *weights)                                 # the results, in the piece's order

A piece's text is a graph's, with weights as inputs and names that depend on nothing else. It is expanded to aten with
one symbol for each dim that may change and goes to Inductor ahead of time; what comes back is a shared object.
"""

from atom.pieces.find import NAME, Piece, find_pieces
from atom.pieces.identity import digest, identity, instruction_set, key_of, libraries, sources_of
from atom.pieces.load import PieceCode, load_piece
from atom.pieces.workers import compile_pieces, has_compiler

__all__ = [
    "NAME", "Piece", "PieceCode", "compile_pieces", "digest", "find_pieces", "has_compiler", "identity",
    "instruction_set", "key_of", "libraries", "load_piece", "sources_of",
]  # fmt: skip
