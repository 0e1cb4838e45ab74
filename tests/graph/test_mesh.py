from __future__ import annotations

import itertools

import pytest

from atom.graph import Mesh

MESHES = [
    Mesh(),
    Mesh(4),
    Mesh(4, experts=2),
    Mesh(2, experts=4, data=2),
    Mesh(2, experts=3, data=3),
    Mesh(data=4),
    Mesh(2, experts=4, data=2, pipeline=3),
]


def test_where_ranks_are():
    mesh = Mesh(tensor=2, experts=2, data=2)
    assert [tuple(mesh.coordinates(rank).values()) for rank in range(4)] == [
        (0, 0, 0, 0, 0),
        (0, 1, 0, 0, 1),
        (0, 0, 1, 1, 0),
        (0, 1, 1, 1, 1),
    ]
    assert [*mesh.leaders] == [0, 2]
    assert [mesh.peers(rank, "tensor") for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [mesh.peers(rank, "data") for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_where_stages_are():
    mesh = Mesh(tensor=2, data=2, pipeline=2)
    assert [mesh.stage(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1] and [*mesh.leaders] == [0, 2]
    assert mesh.peers(5, "tensor") == (4, 5) and mesh.peers(5, "data") == (5, 7) and mesh.peers(5, "pipeline") == (1, 5)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_axes_name_each_rank_once(mesh: Mesh):
    ranks = range(mesh.num_ranks)
    for axes in (("pipeline", "data", "tensor"), ("pipeline", "experts", "width")):
        places = [tuple(mesh.coordinates(rank)[axis] for axis in axes) for rank in ranks]
        assert sorted(places) == [*itertools.product(*(range(mesh.size(axis)) for axis in axes))]
    for rank, axis in itertools.product(ranks, ("tensor", "data", "pipeline")):
        peers = mesh.peers(rank, axis)
        assert len(peers) == mesh.size(axis) and peers[mesh.coordinates(rank)[axis]] == rank
        assert all(mesh.peers(peer, axis) == peers for peer in peers)
