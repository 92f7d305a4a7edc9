"""A custom directory, written for a test."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

# A callback that slows a run down after its first steps until a file exists, so that the test can act before the end.
SLOW = {
    "mine/slow.py": """\
        import time
        from pathlib import Path

        from runner import Callback


        class Slow(Callback):
            def after_step(self, now):
                if now.step > 24 and not Path("has-acted").exists():
                    time.sleep(0.3)
        """,
}
SLOWLY = ("--config-dir=mine", "+callbacks.slow._target_=slow.Slow")


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write each text to its path in the directory, without its common indentation."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
