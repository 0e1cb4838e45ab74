"""Pieces: the parts of a program that are compiled, each distinct one once, whatever the depth of the model.

    pieces = find_pieces(graph.programs["body"])     # 30 of them, in the order of the calls
    len({piece.text for piece in pieces})            # 2: equal layers are one text
    for text, files in compile_pieces(texts): …      # {"piece.so": …, "piece.json": …}, some seconds each
    run = load_piece(folder)                         # milliseconds, without a compiler
    run(x, *weights)                                 # the results, in the piece's order

A piece's text is a graph's, with weights as inputs and names that depend on nothing else. For a CPU it is expanded to
aten with one symbol for each dim that may change and goes to Inductor ahead of time: a shared object. For a GPU it is
written as a Triton kernel, which takes each row by itself.
"""

from atom.pieces.compile_workers import PieceError, compile_pieces, has_compiler
from atom.pieces.key import digest, identity, instruction_set, key_of, libraries, machine, sources_of
from atom.pieces.load import PieceCode, load_piece
from atom.pieces.piece import NAME, Piece, find_pieces

__all__ = [
    "NAME", "Piece", "PieceCode", "PieceError", "compile_pieces", "digest", "find_pieces", "has_compiler", "identity",
    "instruction_set", "key_of", "libraries", "load_piece", "machine", "sources_of",
]  # fmt: skip
