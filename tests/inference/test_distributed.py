"""Several processes and the workers of a cluster write the same records as one process."""

import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from builders import CLASSIFY, ENVIRONMENT, assert_same_records, classify, files_in, read_records

from vitmha.inference.distributed import RayWorker, map_on_ray
from vitmha.inference.records import make_records


def test_a_ray_worker_reads_paths_relative_to_the_directory_of_the_call(
    model_dir: Path, image_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model_dir, tmp_path / "m")
    shutil.copy(image_dir / "03.png", tmp_path / "a.png")
    monkeypatch.chdir(image_dir)  # where a worker may start; restored after the test
    worker = RayWorker(make_records, {"model": "m", "device": "cpu"}, str(tmp_path))
    [result] = worker({"image": [pickle.dumps((0, "a.png"))]})["result"]
    name, record = pickle.loads(result)
    assert (name, record["path"], len(record["labels"])) == ("a.png", "a.png", 5)


def test_a_cluster_without_the_requested_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Mock(cluster_resources=lambda: {"CPU": 2.0})
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", ray.data)
    with pytest.raises(ValueError, match="device cuda: no worker of the Ray cluster has a GPU"):
        next(map_on_ray(make_records, iter([(0, "a.png")]), {"batch_size": 2}, device_type="cuda"))
    ray.shutdown.assert_called_once()


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("number", [2, 3])
def test_processes_share_the_files(
    model_dir: Path, image_dir: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, number: int
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(image_dir, "x")
    args = [str(image_dir), "-", str(tmp_path / "a.tar"), "--model", str(model_dir), "--batch-size", "4", "--output"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    call = [*torchrun, "--no-python", *CLASSIFY, *args, str(tmp_path / "many.jsonl")]
    listed = "\n".join([*files_in(image_dir), str(image_dir)])
    ended = subprocess.run(call, env=ENVIRONMENT, input=listed, text=True, capture_output=True, check=False)
    assert ended.returncode == 1, ended.stderr
    with (tmp_path / "list").open("w+") as stdin, pytest.MonkeyPatch.context() as patch:
        stdin.write(listed)
        stdin.seek(0)
        patch.setattr(sys, "stdin", stdin)
        classify([*args, str(tmp_path / "one.jsonl")], capfdbinary, expected=1)
    many, one = (read_records((tmp_path / f"{name}.jsonl").read_bytes()) for name in ("many", "one"))
    assert len(one) == 100
    assert_same_records(many, one)
    lines = (tmp_path / "many.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "many.jsonl").write_bytes(b"".join(lines[: 6 * number + 1]) + b"{")  # interrupted
    call.append("--resume")
    ended = subprocess.run(call, env=ENVIRONMENT, input=listed, text=True, capture_output=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert_same_records(read_records((tmp_path / "many.jsonl").read_bytes()), one)


@pytest.mark.slow
@pytest.mark.ci
def test_a_ray_cluster_of_two_workers_writes_the_same_records(
    model_dir: Path, image_dir: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    shutil.copy(image_dir / "03.png", tmp_path / os.fsdecode(b"\xff.png"))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(image_dir, "x")
    args = [str(image_dir), str(tmp_path), str(image_dir), "--model", str(model_dir), "--batch-size", "5", "--output"]
    code = "import ray; given = ray.init; ray.init = lambda **options: given(num_cpus=2, **options)\n"
    code += "import vitmha.inference.distributed as d; d.RAY_BLOCK = 40\n"
    call = [
        sys.executable,
        "-c",
        code + CLASSIFY[2],
        "classify",
        *args,
        str(tmp_path / "ray.jsonl"),
        "--cluster",
        "ray",
    ]
    ended = subprocess.run(call, env=ENVIRONMENT, text=True, capture_output=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    (tmp_path / "ray.jsonl").rename(tmp_path.parent / "ray.jsonl")
    classify([*args, str(tmp_path / "one.jsonl")], capfdbinary, expected=1)
    one, many = (read_records(file.read_bytes()) for file in (tmp_path / "one.jsonl", tmp_path.parent / "ray.jsonl"))
    assert len(one) == 76
    assert_same_records(many, one)
