"""docs/object_stores.md, as printed there: shards in a bucket, and a run that another machine continues."""

import json
import runpy
from pathlib import Path

import pytest
from commands import Commands, wait_until
from object_stores import create_bucket
from pages import Page, finish

from runner.api.runs import open_run

pytest.importorskip("obstore", reason="needs the extra remote")

PAGE = Page("object_stores.md", "my-bucket")


@pytest.mark.thorough
@pytest.mark.leaves_tmp
@pytest.mark.usefixtures("bucket")  # credentials
def test_the_page_runs(tmp_path: Path, s3_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    create_bucket(s3_port, "my-bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    first, second = (Commands(tmp_path / name) for name in ("first", "second"))  # two machines
    try:
        monkeypatch.setenv("HOME", str(first.folder / "home"))
        script = PAGE.write(first.folder) / "draw_images.py"
        monkeypatch.chdir(first.folder)
        runpy.run_path(str(script))
        *writes, train, resume, listing, evaluate, export, pull = PAGE.commands
        for line in writes:
            done = finish(line, first)
            assert done.returncode == 0, done.stderr
        whole = finish(train.replace("s3://my-bucket/runs", "outputs"), first)
        assert whole.returncode == 0, whole.stderr
        process = first.fork(*train.partition(" -m runner ")[2].replace("'", "").split())
        local = first.folder / "home/.cache/experiment-runner/s3/my-bucket/runs/shapes/first"
        wait_until(lambda: len([*local.glob("checkpoints/step_*/manifest.json")]) >= 2, process)
        process.kill()
        process.communicate()
        wait_until(lambda: not first.living(process))  # the process that uploads has ended

        second.folder.mkdir()
        monkeypatch.setenv("HOME", str(second.folder / "home"))
        done = finish(resume, second)
        assert done.returncode == 0, done.stderr
        assert "resuming after step" in done.stdout
        assert "address: s3://my-bucket/runs/shapes/first\n" in done.stdout
        results = [
            json.loads((path / "result.json").read_text())
            for path in (first.folder / "outputs/shapes/first", second.folder / str(local.relative_to(first.folder)))
        ]
        assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
        assert results[0]["metrics"]["val/accuracy"] > 0.9
        for line, expected in (
            (listing, "shapes/first  finished"),
            (evaluate, "val/accuracy"),
            (export, "shapes.safetensors.json"),
            (pull, "pulled"),
        ):
            done = finish(line, second)
            assert done.returncode == 0, done.stderr
            assert expected in done.stdout
        assert (second.folder / "shapes.safetensors").exists()
        assert [*(second.folder / "pulled/first").glob("events.out.tfevents.*")]
        assert open_run("s3://my-bucket/runs/shapes/first").model().head.out_features == 2
    finally:
        first.close()
        second.close()
