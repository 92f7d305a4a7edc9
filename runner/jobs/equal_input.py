"""Comparison of what the ranks of a world compute with: code, packages and configuration."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from runner.config.diagnostics.import_target import locate
from runner.config.schema import Config
from runner.distributed.membership import Refused
from runner.distributed.world import World
from runner.records.custom_code import imported_code, shipped_hash, targets
from runner.records.provenance import versions
from runner.records.settings import dotted

# Keys that a machine may have for itself, besides paths: where it computes, reads and writes, and what it shows.
_OF_MACHINES = ("launcher", "logger", "threads", "keep_samples", "loader", "profile", "name", "outputs", "remote")


def check_equal(config: Config, world: World) -> list[str]:
    """Return how this rank differs from rank 0 in what determines results, one message each. All ranks must call it.

    Code and packages are compared only between machines: the ranks of one machine share them. Values that are paths may
    differ. In a later world of an elastic job, nothing is compared, because `check_joining` has done so.
    """
    membership = world.membership
    if membership is not None and membership.number:
        return []
    if membership is not None:
        membership.facts = _all_facts(config)
    if world.world_size == 1:
        return []
    has_others = len(world.local_ranks.hosts()) > 1
    own = _facts(config, has_others)
    first = world.consensus.broadcast("input", lambda: own)
    return [*_differences(own, first, f"rank {world.rank} on {socket.gethostname()}")]


def check_joining(config: Config, first: dict[str, dict[str, Any]]) -> None:
    """Raise Refused if this process differs from the ranks that it joins. first: the facts of their first rank 0.

    Code and packages are compared also on one machine, because files may have changed since the run was started.
    """
    if messages := [*_differences(_all_facts(config), first, socket.gethostname())]:
        raise Refused(*messages)


def _all_facts(config: Config) -> dict[str, dict[str, Any]]:
    for target in targets(asdict(config)):  # so that processes that have just started know the same modules
        with suppress(ValueError):  # reported later
            locate(target)
    return _facts(config, with_code=True)


def _facts(config: Config, with_code: bool) -> dict[str, dict[str, Any]]:
    values = asdict(config)
    compared = dotted({key: value for key, value in values.items() if key not in _OF_MACHINES})
    facts: dict[str, dict[str, Any]] = {"config": {key: _text(value) for key, value in compared.items()}}
    if with_code:
        facts |= {"versions": versions(), "code": {"runner": shipped_hash(), **imported_code(values).hashes}}
    return facts


def _text(value: Any) -> str | None:
    """Return the value as text, or None for a path: a machine may keep its files elsewhere."""
    return None if isinstance(value, str) and os.sep in value else repr(value)


def _differences(own: dict[str, dict[str, Any]], first: dict[str, dict[str, Any]], where: str) -> Iterator[str]:
    for package, version in own.get("versions", {}).items():
        if version != first["versions"].get(package):
            yield f"{where} has {package} {version}, and rank 0 has {first['versions'].get(package)}; install the same"
    code = own.get("code", {})
    changed = [name for name in {**first.get("code", {}), **code} if code.get(name) != first["code"].get(name)]
    if changed:
        yield f"{where} has other code than rank 0 ({', '.join(changed)}); copy the same code to all machines"
    for key in {**first["config"], **own["config"]}:
        values = [facts["config"].get(key) for facts in (own, first)]
        if values[0] != values[1]:
            mine, other = (str(value).strip("'\"") for value in values)
            yield f"{key}={mine} on {where}, but {other} on rank 0; start all ranks with the same arguments"
