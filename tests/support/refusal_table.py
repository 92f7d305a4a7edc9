"""The options that each mode refuses, as a page of the docs.

python tests/support/refusal_table.py > docs/refused_options.md
"""

import yaml

from runner.config.diagnostics.import_target import locate
from runner.paths import CONF

PAGE = """# Options that a mode refuses

Written by `python tests/support/refusal_table.py > docs/refused_options.md` from the code of the modes. A run with such
an option ends with status 2 and the message before its model is built. `python -m runner --help parallel=ps` lists the
messages of one mode. Refusals that depend on the model or on the number of ranks are described in
[parallel.md](parallel.md).

| mode | option | message |
|---|---|---|
"""


def refusal_page() -> str:
    rows = []
    for path in sorted((CONF / "parallel").glob("*.yaml")):
        for refusal in locate(yaml.safe_load(path.read_text())["_target_"]).refusals:
            mode = f"{path.stem}, `{refusal.given}`" if refusal.given else path.stem
            rows.append(f"| {mode} | `{refusal.key}` | {refusal.describe()} |\n")
    return PAGE + "".join(rows)


if __name__ == "__main__":
    print(refusal_page(), end="")
