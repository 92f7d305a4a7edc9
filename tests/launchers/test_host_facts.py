"""The facts of a machine that is to run ranks: its GPUs, and answers that are none."""

from pathlib import Path

import pytest

from runner.launchers.host_facts import find_facts, read_facts

NVIDIA_SMI = """\
#!/bin/sh
printf '0, 4, 81559\\n1, 61000, 81559\\n2, [N/A], [N/A]\\n'
"""
USED = "GPU 1 (61,000 of 81,559 MiB)"


@pytest.mark.parametrize(
    ("visible", "used"),
    [
        (None, ["", USED, ""]),
        ("2, 1", ["", USED]),
        ("1,7,0", [USED]),
        ("-1", []),
        ("", []),
        ("GPU-8f6a,1", ["", USED]),
    ],
)
def test_gpus_that_processes_see_and_others_use(
    visible: str | None, used: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, shared = tmp_path / "nvidia-smi", tmp_path / "shared"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    shared.write_text("{}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    facts = find_facts(shared)
    assert facts.used_gpus == used and facts.num_gpus == len(used) and facts.problems == []


def test_an_answer_that_is_not_of_this_version_is_explained() -> None:
    assert read_facts(0, 'welcome\n{"cores": [0]}\n', "") == "another version of the runner than here"
    assert read_facts(0, "welcome\n", "") == "unexpected answer: welcome"
    assert read_facts(0, "\n", "") == "unexpected answer: no response"
    assert read_facts(1, "", "sh: no python\n") == "sh: no python"
