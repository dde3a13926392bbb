"""checkpoints.py: runs resume bit for bit, whatever interrupted them, at any moment."""

import csv
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from vitmha.cli import main
from vitmha.data.in_memory import InMemoryLoader
from vitmha.data.sampling import GlobalBatchSampler
from vitmha.errors import UserError
from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.training.attention_logger import AttentionLogger
from vitmha.training.callbacks import SaveModelCallback
from vitmha.training.checkpoints import AtomicCheckpointIO, AutosaveCheckpoint
from vitmha.training.metrics_csv import ResumableCSVLogger
from vitmha.training.module import LitViT
from vitmha.weights.load import load_model

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

ROOT = Path(__file__).parents[2]
CONFIG = ViTConfig(
    image_size=(4, 6), patch_size=2, in_channels=1, num_classes=3, embed_dim=8, depth=1, num_heads=2, drop_path=0.3
)


def batches(count: int, *, training: bool) -> InMemoryLoader:
    generator = torch.Generator().manual_seed(count)
    return InMemoryLoader(
        torch.randint(256, (count, 1, 4, 6), dtype=torch.uint8, generator=generator),
        torch.arange(count) % 3,
        preprocessing=Preprocessing(image_size=(4, 6), mean=(0.5,), std=(0.5,)),
        batch_sampler=GlobalBatchSampler(count, 4, training=training),
    )


class DrawRandomNumbers(Callback):
    """Draws random numbers in every step, as a user's own augmentation might."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.drawn.append((random.random(), np.random.rand()))


class InHook(Callback):
    """Calls a function in the n-th call of a hook."""

    def __init__(self, hook: str, call: int, function: Callable[[], None]) -> None:
        self.calls, self.call, self.function = 0, call, function
        setattr(self, hook, self.on_hook)

    def on_hook(self, trainer: Trainer, *_: Any) -> None:
        self.calls += not trainer.sanity_checking
        if self.calls == self.call and not trainer.sanity_checking:
            self.function()


class Killed(BaseException):
    """Ends a run as suddenly as a callback can."""


def kill() -> None:
    raise Killed


def train(*callbacks: Callback, minutes: float = 0.0, resume: bool = False, **settings: Any) -> None:
    """Three epochs of five steps in the working directory's `run`, or those that remain."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7 if resume else 5)
    trainer = Trainer(
        **{"max_epochs": 3, "log_every_n_steps": 1, **settings},
        accelerator="cpu",
        logger=ResumableCSVLogger("run", name="", version=""),
        callbacks=[
            DrawRandomNumbers(),
            *callbacks,
            ModelCheckpoint(monitor="val/accuracy", mode="max", filename="best", enable_version_counter=False),
            AutosaveCheckpoint(minutes),
        ],
        plugins=[AtomicCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = LitViT(CONFIG, optimizer="muon", learning_rate=0.1, muon_learning_rate=0.1, ema_decay=0.7)
    loaders = batches(23, training=True), batches(10, training=False)
    trainer.fit(module, *loaders, ckpt_path="run/checkpoints/last.ckpt" if resume else None)


def load_checkpoint(directory: Path | str = ".", name: str = "last") -> dict[str, Any]:
    return torch.load(Path(directory, "run/checkpoints", f"{name}.ckpt"), weights_only=True)


def read_rows(path: Path, *columns: str) -> list[list[str]]:
    """The values of the columns in each row that has at least one of them."""
    with path.open() as file:
        rows = [[row.get(column) or "" for column in columns] for row in csv.DictReader(file)]
    return [row for row in rows if any(row)]


def assert_equal(found: Any, expected: Any, key: str = "") -> None:
    """Bit for bit, through dictionaries and lists."""
    if isinstance(found, Tensor):
        assert found.dtype == expected.dtype, key
        assert torch.equal(found, expected), key
    elif isinstance(found, dict):
        assert found.keys() == expected.keys(), key
        for name, value in found.items():
            assert_equal(value, expected[name], f"{key}/{name}")
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected), key
        for i, values in enumerate(zip(found, expected, strict=True)):
            assert_equal(*values, f"{key}/{i}")
    else:
        assert found == expected, key


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains without interruption, once for the same settings, and returns the directory."""
    directories: dict[str, Path] = {}

    def run(**settings: Any) -> Path:
        key = repr(settings)
        if key not in directories:
            directories[key] = tmp_path_factory.mktemp("uninterrupted")
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(directories[key])
                train(**settings)
        return directories[key]

    return run


def assert_same_end(reference: Path) -> None:
    """The run here has the reference's last checkpoint, best checkpoint, and logged rows."""
    found, expected = load_checkpoint(), load_checkpoint(reference)
    for checkpoint in (found, expected):
        [best] = (state for name, state in checkpoint["callbacks"].items() if name.startswith("ModelCheckpoint"))
        best.pop("current_score")  # of the last epoch; Lightning does not restore it, and nothing depends on it
    assert_equal(found, expected)
    assert_equal(load_checkpoint(name="best")["state_dict"], load_checkpoint(reference, "best")["state_dict"])
    assert Path("run/metrics.csv").read_text() == (reference / "run/metrics.csv").read_text()


MOMENTS = [
    *(("on_train_batch_start", call) for call in range(2, 16)),
    *(("on_before_zero_grad", call) for call in range(2, 16)),
    *(("on_validation_batch_start", call) for call in range(1, 10)),
    *(("on_validation_start", call) for call in range(1, 4)),
    *(("on_validation_end", call) for call in range(1, 4)),
    *(("on_train_epoch_end", call) for call in range(1, 4)),
]
DEFAULT_MOMENTS = [
    *(("on_before_zero_grad", 10), ("on_train_batch_start", 11)),
    *(("on_validation_start", 2), ("on_validation_batch_start", 5), ("on_train_epoch_end", 2)),
]


@pytest.mark.parametrize(
    ("hook", "call"),
    [moment if moment in DEFAULT_MOMENTS else pytest.param(*moment, marks=pytest.mark.slow) for moment in MOMENTS],
)
def test_a_run_killed_anywhere_ends_as_if_it_had_not_been(
    hook: str, call: int, uninterrupted: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Killed):
        train(InHook(hook, call, kill))
    train(resume=True)
    assert_same_end(uninterrupted())


def send(number: signal.Signals) -> Callable[[], None]:
    """Sends a signal; SIGTERM twice, as a run under torchrun receives one that is sent to all processes."""

    def kill() -> None:
        for _ in range(2 if number == signal.SIGTERM else 1):
            os.kill(os.getpid(), number)

    return kill


@pytest.mark.parametrize(
    ("number", "hook", "call", "accumulate", "step"),
    [
        (signal.SIGTERM, "on_train_batch_start", 7, 1, 7),
        (signal.SIGTERM, "on_train_batch_start", 7, 3, 3),  # after the third batch of the second epoch
        (signal.SIGINT, "on_validation_batch_start", 4, 3, 4),
    ],
)
def test_after_a_signal_a_run_saves_and_exits(
    number: signal.Signals,
    hook: str,
    call: int,
    accumulate: int,
    step: int,
    uninterrupted: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"accumulate_grad_batches": accumulate}
    before = signal.getsignal(number)
    with pytest.raises(SystemExit, match=str(128 + number)):
        train(InHook(hook, call, send(number)), minutes=60.0, **settings)
    assert load_checkpoint()["global_step"] == step
    assert signal.getsignal(number) == before
    train(resume=True, **settings)
    assert_same_end(uninterrupted(**settings))


@pytest.mark.parametrize("interval", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("on_validation_end", 2),
        ("on_train_batch_start", 4),
        ("on_validation_batch_start", 5),
        ("on_before_backward", 10),
    ],
)
@pytest.mark.parametrize("minutes", [0.0, 60.0])
def test_a_run_validated_within_an_optimizer_step_resumes_bit_for_bit(
    interval: int,
    hook: str,
    call: int,
    minutes: float,
    uninterrupted: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"accumulate_grad_batches": 3, "val_check_interval": interval}
    with pytest.raises(Killed):
        train(InHook(hook, call, kill), minutes=minutes, **settings)
    train(resume=Path("run/checkpoints/last.ckpt").exists(), minutes=minutes, **settings)
    assert_same_end(uninterrupted(**settings))


def test_a_checkpoint_without_its_accumulated_gradients_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"accumulate_grad_batches": 3, "val_check_interval": 2}
    with pytest.raises(Killed):
        train(InHook("on_validation_start", 4, kill), **settings)
    Path("run/checkpoints/best.ckpt").replace("run/checkpoints/last.ckpt")
    with pytest.raises(UserError, match=r"saved between the batches of one optimizer step .*: resume from last\.ckpt"):
        train(resume=True, **settings)


def test_a_schedule_of_another_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(minutes=60.0, max_epochs=1)
    before = Path("run/metrics.csv").read_bytes()
    message = r"last\.ckpt cannot be resumed: total_steps .* is 10, the checkpoint's is 5\."
    with pytest.raises(UserError, match=message):
        train(resume=True, max_epochs=2)
    train(resume=True, max_epochs=1)
    assert Path("run/metrics.csv").read_bytes() == before


def test_a_complete_run_that_is_resumed_keeps_its_averaged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(SaveModelCallback(), minutes=60.0, max_epochs=1)
    before = load_model("run/model").state_dict()
    train(SaveModelCallback(), resume=True, max_epochs=1)
    for name, tensor in load_model("run/model").state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_a_run_limited_by_steps_is_resumed(
    uninterrupted: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"max_epochs": -1, "max_steps": 13}
    with pytest.raises(Killed):
        train(InHook("on_train_batch_start", 6, kill), minutes=60.0, **settings)
    with pytest.raises(Killed):
        train(InHook("on_train_batch_start", 4, kill), resume=True, **settings)
    train(resume=True, **settings)
    assert_same_end(uninterrupted(**settings))


def test_a_last_epoch_resumed_in_its_middle_is_validated_whatever_the_interval(
    uninterrupted: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"check_val_every_n_epoch": 2}
    with pytest.raises(Killed):
        train(InHook("on_train_batch_start", 13, kill), **settings)
    train(resume=True, **settings)
    assert_same_end(uninterrupted(**settings))
    assert len(read_rows(Path("run/metrics.csv"), "val/accuracy")) == 2


@pytest.mark.parametrize(("hook", "call"), [("on_train_epoch_end", 1), ("on_train_batch_start", 6)])
def test_a_run_killed_at_the_end_of_an_epoch_without_validation_has_its_row_once(
    hook: str,
    call: int,
    uninterrupted: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"check_val_every_n_epoch": 2}
    with pytest.raises(Killed):
        train(InHook(hook, call, kill), **settings)
    train(resume=True, **settings)
    assert_same_end(uninterrupted(**settings))
    assert read_rows(Path("run/metrics.csv"), "epoch", "step") == [["0", "4"], ["1", "9"], ["2", "14"]]


def test_a_schedule_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^max_epochs or max_steps must be set"):
        train(max_epochs=-1, max_time="00:00:01:00")


@pytest.mark.slow
@pytest.mark.ci
def test_a_killed_and_resumed_run_logs_the_heads_of_each_epoch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Killed):
        train(AttentionLogger(num_images=1), InHook("on_train_epoch_end", 1, kill), max_epochs=2)
    train(AttentionLogger(num_images=1), resume=True, max_epochs=2)
    rows = read_rows(Path("run/attention/heads.csv"), "step", "head")
    assert rows == [["5", "0"], ["5", "1"], ["10", "0"], ["10", "1"]]


def test_an_interrupted_write_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, file)

    def save_a_part(checkpoint: dict[str, Any], stream: Any) -> None:
        stream.write(b"PK")
        kill()

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save_a_part)
        with pytest.raises(Killed):
            AtomicCheckpointIO().save_checkpoint({"step": 2}, file)
    assert torch.load(file) == {"step": 1}
    AtomicCheckpointIO().save_checkpoint({"step": 3}, file)
    assert torch.load(file) == {"step": 3}
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"text", b"words", b"h\x01", b"G\x00", b"PK\x03\x04 half a zip"])
def test_a_corrupt_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.raises(UserError, match=r"last\.ckpt is corrupt or not a checkpoint: \w+"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize("content", [{"state_dict": {}}, 3])
def test_a_checkpoint_of_another_package_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"last\.ckpt is not a vitmha checkpoint; .*, use pretrained\."):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")


PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["vitmha.cli.fit"])  # starts runs without importing everything each time
CONFIGS = ["--config", str(ROOT / "configs/quickstart.yaml"), "--config", str(ROOT / "tests/short.yaml")]
OPTIONS = [
    *("--trainer.max_epochs=3", "--trainer.log_every_n_steps=1", "--attention.every_n_epochs=0"),
    *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
    *("--model.vit.depth=2", "--model.vit.embed_dim=16", "--model.vit.mlp_dim=16", "--model.vit.drop_path=0.3"),
    "--model.ema_decay=0.9",
]


def fit(args: Sequence[str], directory: Path, environment: dict[str, str]) -> None:
    os.chdir(directory)
    os.environ.update(environment)
    with Path("printed.txt").open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    main(["fit", *CONFIGS, *OPTIONS, *args])


def start(args: Sequence[str], directory: Path, **environment: str) -> BaseProcess:
    """Starts a run in its own process."""
    process = PROCESSES.Process(target=fit, args=(args, directory, environment))
    process.start()
    return process


def interrupt(process: BaseProcess, path: Path, number: signal.Signals, saves: int = 2, fraction: float = 0.5) -> None:
    """Sends the signal after the checkpoint has been written `saves` times (at least 2) and then the given fraction of
    the time between the last two has passed. A fixed time would be too late on a fast machine."""
    times: list[float] = []
    modified = path.stat().st_mtime_ns if path.exists() else 0
    while process.is_alive() and len(times) < saves:
        time.sleep(0.002)
        if (now := path.stat().st_mtime_ns if path.exists() else 0) != modified:
            modified = now
            times.append(time.monotonic())
    if process.is_alive():
        time.sleep(fraction * (times[-1] - times[-2]))
    os.kill(process.pid, number)
    process.join()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was not interrupted."""
    directory = tmp_path_factory.mktemp("finished")
    process = start([], directory)
    process.join()
    assert process.exitcode == 0, (directory / "printed.txt").read_text()
    return directory / "runs/short/version_0"


def resume_to_the_end(directory: Path, finished: Path) -> None:
    """Resumes, and ends as the run that was not interrupted."""
    process = start(["--ckpt_path", "last"], directory)
    process.join()
    printed = (directory / "printed.txt").read_text()
    assert process.exitcode == 0, printed
    assert "Traceback" not in printed
    run = directory / "runs/short/version_0"
    assert (finished / "metrics.csv").read_text() == (run / "metrics.csv").read_text()
    found, expected = (torch.load(path / "checkpoints/last.ckpt", weights_only=True) for path in (run, finished))
    for key in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "loops", "resume"):
        assert_equal(found[key], expected[key], key)
    model, expected = (load_model(path / "model").state_dict() for path in (run, finished))
    assert_equal(dict(model), dict(expected))


AUTOSAVE = ["--autosave.every_n_minutes", "0"]


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_resumes_after_every_kind_of_interruption(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs/short/version_0"
    path = run / "checkpoints/last.ckpt"
    process = start(AUTOSAVE, tmp_path)
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        interrupt(process, path, number)
        printed = (tmp_path / "printed.txt").read_text()
        assert process.exitcode == status, printed
        if number != signal.SIGKILL:
            advice = "last.ckpt. To resume, add --ckpt_path last to the same command."
            assert printed.rstrip().endswith(f"runs/short/version_0/checkpoints/{advice}")
            process = start([*AUTOSAVE, "--ckpt_path", str(path)], tmp_path)  # the same as `last`
    resume_to_the_end(tmp_path, finished)
    assert sorted(entry.name for entry in run.iterdir()) == [
        *("checkpoints", "config.yaml", "config_resumed_1.yaml", "config_resumed_2.yaml", "config_resumed_3.yaml"),
        *("metrics.csv", "model"),
    ]


def test_two_processes_exit_and_resume_together_and_learn_what_one_process_learns(tmp_path: Path) -> None:
    single, parallel = tmp_path / "single", tmp_path / "parallel"
    for directory in (single, parallel):
        directory.mkdir()
    deterministic = ["--model.vit.drop_path", "0"]  # random numbers differ between one process and two
    process = start(deterministic, single)
    process.join()
    assert process.exitcode == 0, (single / "printed.txt").read_text()

    def start_both(*args: str) -> list[BaseProcess]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        args = (*args, *deterministic, "--trainer.accelerator=cpu", "--trainer.devices=2", "--data.batch_size=64")
        return [start(args, parallel, LOCAL_RANK=str(rank), **address) for rank in (0, 1)]

    run, reference = (directory / "runs/short/version_0" for directory in (parallel, single))
    first, second = start_both(*AUTOSAVE)
    interrupt(second, run / "checkpoints/last.ckpt", signal.SIGTERM)
    first.join()
    assert [first.exitcode, second.exitcode] == [143, 143], (parallel / "printed.txt").read_text()
    for process in start_both("--ckpt_path", "last"):
        process.join()
        assert process.exitcode == 0, (parallel / "printed.txt").read_text()
    for column in ("train/accuracy", "val/loss", "val/accuracy"):
        found, expected = (
            [float(value) for (value,) in read_rows(path / "metrics.csv", column)] for path in (run, reference)
        )
        assert len(found) == 3
        assert found == pytest.approx(expected, abs=1e-4)
    assert [directory.name for directory in run.parent.iterdir()] == ["version_0"]


@pytest.mark.slow
@pytest.mark.ci
def test_a_sharded_run_resumes_under_torchrun(tmp_path: Path) -> None:
    overlay = ["--config", str(ROOT / "configs/overlays/fsdp.yaml")]
    options = [
        *("--trainer.strategy.data_parallel_size=2", "--trainer.accelerator=cpu", "--trainer.devices=2"),
        *("--model.ema_decay=null", "--trainer.gradient_clip_val=1.0"),
    ]

    def start_both(directory: Path, *args: str) -> subprocess.Popen[str]:
        directory.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", ROOT / "train.py"]
        command += [*CONFIGS, *OPTIONS, *overlay, *options, *args]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, cwd=directory, env=environment, stderr=subprocess.PIPE, text=True)

    def wait(process: subprocess.Popen[str]) -> tuple[int, str]:
        _, printed = process.communicate()
        return process.returncode, printed

    reference, stopped = tmp_path / "reference", tmp_path / "stopped"
    status, printed = wait(start_both(reference))
    assert status == 0, printed
    process = start_both(stopped, *AUTOSAVE)
    path = "runs/short/version_0/checkpoints/last.ckpt"
    while not (stopped / path).exists():
        time.sleep(0.01)
    process.terminate()
    status, printed = wait(process)
    assert status != 0
    assert "To resume, add --ckpt_path last to the same command." in printed
    status, printed = wait(start_both(stopped, "--ckpt_path", "last"))
    assert status == 0, printed
    found, expected = (torch.load(directory / path, weights_only=True) for directory in (stopped, reference))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "resume"):
        assert_equal(found[key], expected[key], key)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [pytest.param(0, marks=pytest.mark.ci), *range(1, 20)])
def test_a_run_killed_at_a_random_moment_ends_as_if_it_had_not_been(
    moment: int, finished: Path, tmp_path: Path
) -> None:
    # Saved after each of the 30 steps, or only after some: then metrics.csv has rows after the checkpoint.
    minutes, max_saves = ("0.001", 5) if moment % 2 else ("0", 20)
    process = start(["--autosave.every_n_minutes", minutes], tmp_path)
    path = tmp_path / "runs/short/version_0/checkpoints/last.ckpt"
    rng = random.Random(moment)
    interrupt(process, path, signal.SIGKILL, rng.randint(2, max_saves), rng.random())
    assert process.exitcode == -9
    resume_to_the_end(tmp_path, finished)
