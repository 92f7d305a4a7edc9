"""A user's own folder, written for a test."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

# A run that takes its time after its first steps, until the file is there: it is not over before a test has acted.
SLOW = {
    "mine/slow.py": """\
        import time
        from pathlib import Path

        from runner.training.callback import Callback


        class Slow(Callback):
            def after_step(self, now):
                if now.step > 24 and not Path("has-acted").exists():
                    time.sleep(0.3)
        """,
}
SLOWLY = ("--config-dir=mine", "+callbacks.slow._target_=slow.Slow")


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Each text under its path; one that is indented, to stand in a table, begins at the margin."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
