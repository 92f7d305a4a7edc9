"""Gradients summed by hand, over ranks that do not all use the same parameters."""

from pathlib import Path
from typing import Any

import torch
from one_machine import on_ranks
from torch import nn

from runner.distributed.world import World
from runner.parallel.parameter_update import sum_gradients

SHAPES = ([3, 2], [], [5])


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]


def test_gradients_are_summed_and_unused_parameters_have_none(tmp_path: Path) -> None:
    def act(world: World) -> list[Any]:
        used_by_all, used_by_one, _ = trained = parameters()
        used_by_all.grad = torch.full_like(used_by_all, 2.0 + world.rank)
        if world.rank == 1:
            used_by_one.grad = torch.zeros_like(used_by_one)  # used, but without an effect
        sum_gradients(trained, world.collectives.sum)
        return [parameter.grad for parameter in trained]

    for of_all, of_one, of_none in on_ranks(tmp_path, 3, act):
        assert torch.equal(of_all, torch.full((3, 2), 9.0))
        assert torch.equal(of_one, torch.zeros(()))
        assert of_none is None


def test_gradients_of_several_dtypes_and_sparse_ones_are_summed(tmp_path: Path) -> None:
    def act(world: World) -> list[Any]:
        single, double = parameters(), parameters(torch.float64)
        embedding = nn.Embedding(4, 2, sparse=True)
        for parameter in (*single, *double):
            parameter.grad = torch.full_like(parameter, 1.0 + world.rank)
        if world.rank == 0:
            embedding(torch.tensor([1, 1, 3])).sum().backward()
        sum_gradients((*single, *double, *embedding.parameters()), world.collectives.sum)
        return [parameter.grad for parameter in (*single, *double, embedding.weight)]

    expected = [
        torch.full_like(parameter, 3.0) for dtype in (torch.float32, torch.float64) for parameter in parameters(dtype)
    ]
    for *dense, of_embedding in on_ranks(tmp_path, 2, act):
        assert all(
            torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(dense, expected, strict=True)
        )
        assert torch.equal(of_embedding, torch.tensor([0.0, 2.0, 0.0, 1.0])[:, None].expand(4, 2))
