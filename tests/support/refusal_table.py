"""The options that each mode refuses, as the table of docs/parallel.md.

python tests/support/refusal_table.py prints the table.
"""

import yaml

from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.type_hints import show
from runner.paths import CONF


def refusal_table() -> str:
    options: dict[str, dict[str, None]] = {}
    for path in sorted((CONF / "parallel").glob("*.yaml")):
        for refusal in locate(yaml.safe_load(path.read_text())["_target_"]).refusals:
            mode = f"{path.stem} with `{refusal.given}`" if refusal.given else path.stem
            values = [f"`{refusal.key}={show(value)}`" for value in refusal.values] or [f"`{refusal.key}`"]
            options.setdefault(mode, {}).update(dict.fromkeys(values))
    rows = [f"| {mode} | {', '.join(refused)} |\n" for mode, refused in options.items()]
    return "| mode | refused options |\n|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    print(refusal_table(), end="")
