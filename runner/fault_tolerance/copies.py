"""Whether ranks that are to have the same weights still do: what one machine has lost spreads to no checkpoint."""

from collections.abc import Mapping

from runner.errors import JobFailed


class Copies:
    """Fingerprints of what several ranks have alike, beginning with those of rank 0."""

    def __init__(self, alike: Mapping[str, int]):
        self._first = {name: (0, value) for name, value in alike.items()}

    def compare(self, rank: int, alike: Mapping[str, int]) -> None:
        """Raises JobFailed where another rank has another fingerprint of the same name; the first such name is told."""
        for name, value in alike.items():
            first, expected = self._first.setdefault(name, (rank, value))
            if value != expected:
                raise JobFailed(
                    f"rank {rank} has other values of {name} than rank {first}: copies that are updated alike have "
                    "drifted apart\nno checkpoint is taken of them; resume from the last one, and on other machines if "
                    "it happens again"
                )
