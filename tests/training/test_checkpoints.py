"""Going on after an interruption, bit for bit: whatever ended the run, at whatever moment."""

import csv
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
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
from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.training.attention_logger import AttentionLogger
from vitmha.training.callbacks import SaveModelCallback
from vitmha.training.checkpoints import AtomicCheckpointIO, AutosaveCheckpoint, ResumableCSVLogger
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


class Draws(Callback):
    """Draws in every step, as augmentation of a user's own might."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.drawn.append((random.random(), np.random.rand()))


class Ends(Callback):
    """Does something in the given call of a hook."""

    def __init__(self, hook: str, call: int, act: Callable[[], None]) -> None:
        self.calls, self.call, self.act = 0, call, act
        setattr(self, hook, self.count)

    def count(self, trainer: Trainer, *_: Any) -> None:
        self.calls += not trainer.sanity_checking
        if self.calls == self.call and not trainer.sanity_checking:
            self.act()


class Killed(BaseException):
    """Ends a run as suddenly as a callback can."""


def kill() -> None:
    raise Killed


def train(*callbacks: Callback, minutes: float = 0.0, resume: bool = False, **settings: Any) -> Draws:
    """Three epochs of five steps in the folder `run` here, or what is left of them."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7 if resume else 5)
    draws = Draws()
    trainer = Trainer(
        **{"max_epochs": 3, "log_every_n_steps": 1, **settings},
        accelerator="cpu",
        logger=ResumableCSVLogger("run", name="", version=""),
        callbacks=[
            draws,
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
    return draws


def checkpoint(folder: Path | str = ".", file: str = "last") -> dict[str, Any]:
    return torch.load(Path(folder, "run/checkpoints", f"{file}.ckpt"), weights_only=True)


def rows(file: Path, *columns: str) -> list[list[str]]:
    """The lines of a table that hold one of the columns at least, in their order."""
    with file.open() as lines:
        found = [[row.get(column) or "" for column in columns] for row in csv.DictReader(lines)]
    return [row for row in found if any(row)]


def assert_same(ours: Any, theirs: Any, place: str = "") -> None:
    """Equal bit for bit."""
    if isinstance(ours, Tensor):
        assert ours.dtype == theirs.dtype, place
        assert torch.equal(ours, theirs), place
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), place
        for key, value in ours.items():
            assert_same(value, theirs[key], f"{place}/{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), place
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{place}/{i}")
    else:
        assert ours == theirs, place


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run that nothing interrupted, for each choice of settings."""
    done: dict[str, Path] = {}

    def run(**settings: Any) -> Path:
        key = repr(settings)
        if key not in done:
            done[key] = tmp_path_factory.mktemp("whole")
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(done[key])
                train(**settings)
        return done[key]

    return run


def assert_ended_as(whole: Path) -> None:
    """The run here ended as the other did: all that its checkpoint holds, the best one so far, and every logged row."""
    ours, theirs = checkpoint(), checkpoint(whole)
    for each in (ours, theirs):
        [best] = (kept for name, kept in each["callbacks"].items() if name.startswith("ModelCheckpoint"))
        best.pop("current_score")  # of the last epoch, and not restored by Lightning; it decides nothing
    assert_same(ours, theirs)
    assert_same(checkpoint(file="best")["state_dict"], checkpoint(whole, "best")["state_dict"])
    assert Path("run/metrics.csv").read_text() == (whole / "run/metrics.csv").read_text()


ANYWHERE = [
    *(("on_train_batch_start", call) for call in range(2, 16)),
    *(("on_before_zero_grad", call) for call in range(2, 16)),
    *(("on_validation_batch_start", call) for call in range(1, 10)),
    *(("on_validation_start", call) for call in range(1, 4)),
    *(("on_validation_end", call) for call in range(1, 4)),
    *(("on_train_epoch_end", call) for call in range(1, 4)),
]
SOME = [
    *(("on_before_zero_grad", 10), ("on_train_batch_start", 11)),
    *(("on_validation_start", 2), ("on_validation_batch_start", 5), ("on_train_epoch_end", 2)),
]


@pytest.mark.parametrize(
    ("hook", "call"), [case if case in SOME else pytest.param(*case, marks=pytest.mark.slow) for case in ANYWHERE]
)
def test_a_run_killed_anywhere_ends_as_if_it_had_not_been(
    hook: str, call: int, whole: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Killed):
        train(Ends(hook, call, kill))
    train(resume=True)
    assert_ended_as(whole())


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "hook", "call", "accumulate", "step"),
    [
        (signal.SIGTERM, "on_train_batch_start", 7, 1, 7),
        (signal.SIGTERM, "on_train_batch_start", 7, 3, 3),  # behind the third batch of the second epoch
        (signal.SIGINT, "on_validation_batch_start", 4, 3, 4),
    ],
)
def test_a_signal_makes_a_run_save_and_leave(
    number: signal.Signals,
    hook: str,
    call: int,
    accumulate: int,
    step: int,
    whole: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"accumulate_grad_batches": accumulate}
    before = signal.getsignal(number)
    with pytest.raises(SystemExit, match=str(128 + number)):
        train(Ends(hook, call, send(number)), minutes=60.0, **settings)
    assert checkpoint()["global_step"] == step
    assert signal.getsignal(number) == before
    train(resume=True, **settings)
    assert_ended_as(whole(**settings))


def test_a_schedule_of_another_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(minutes=60.0, max_epochs=1)
    before = Path("run/metrics.csv").read_bytes()
    with pytest.raises(
        ValueError, match=r"last\.ckpt is of a schedule of 5 steps, and this call has 10.* --model\.pret"
    ):
        train(resume=True, max_epochs=2)
    train(resume=True, max_epochs=1)
    assert Path("run/metrics.csv").read_bytes() == before


def test_a_run_at_its_end_that_goes_on_keeps_its_averaged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(SaveModelCallback(), minutes=60.0, max_epochs=1)
    before = load_model("run/model").state_dict()
    train(SaveModelCallback(), resume=True, max_epochs=1)
    for name, tensor in load_model("run/model").state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_a_run_limited_by_steps_goes_on(
    whole: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"max_epochs": -1, "max_steps": 13}
    with pytest.raises(Killed):
        train(Ends("on_train_batch_start", 6, kill), minutes=60.0, **settings)
    with pytest.raises(Killed):
        train(Ends("on_train_batch_start", 4, kill), resume=True, **settings)
    train(resume=True, **settings)
    assert_ended_as(whole(**settings))


def test_a_last_epoch_that_goes_on_in_its_middle_is_validated_whatever_the_interval(
    whole: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"check_val_every_n_epoch": 2}
    with pytest.raises(Killed):
        train(Ends("on_train_batch_start", 13, kill), **settings)
    train(resume=True, **settings)
    assert_ended_as(whole(**settings))
    assert len(rows(Path("run/metrics.csv"), "val/accuracy")) == 2


def test_a_schedule_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="The schedule needs an end: give --trainer"):
        train(max_epochs=-1, max_time="00:00:01:00")


@pytest.mark.slow
def test_heads_are_logged_once_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Killed):
        train(AttentionLogger(num_images=1), Ends("on_train_epoch_end", 1, kill), max_epochs=2)
    train(AttentionLogger(num_images=1), resume=True, max_epochs=2)
    assert rows(Path("run/attention/heads.csv"), "step", "head") == [["5", "0"], ["5", "1"], ["10", "0"], ["10", "1"]]


def test_a_write_that_breaks_off_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, file)

    def half(checkpoint: dict[str, Any], opened: Any) -> None:
        opened.write(b"PK")
        kill()

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(Killed):
            AtomicCheckpointIO().save_checkpoint({"step": 2}, file)
    assert torch.load(file) == {"step": 1}
    AtomicCheckpointIO().save_checkpoint({"step": 3}, file)
    assert torch.load(file) == {"step": 3}
    assert list(file.parent.iterdir()) == [file]


PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["vitmha.cli.fit"])  # begins runs without importing everything each time
WORDS = f"""fit --config {ROOT}/configs/quickstart.yaml --config {ROOT}/tests/short.yaml --trainer.max_epochs 3
    --model.vit.depth 2 --model.vit.embed_dim 16 --model.vit.mlp_dim 16 --model.vit.drop_path 0.3 --model.ema_decay 0.9
    --attention.every_n_epochs 0 --trainer.log_every_n_steps 1
    --trainer.enable_progress_bar false --trainer.enable_model_summary false"""


def work(words: str, folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    with Path("printed.txt").open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    main(words.split())


def begin(words: str, folder: Path, **environment: str) -> BaseProcess:
    """A run in a process of its own."""
    process = PROCESSES.Process(target=work, args=(f"{WORDS} {words}", folder, environment))
    process.start()
    return process


def interrupt(process: BaseProcess, file: Path, number: signal.Signals, saves: int = 2, part: float = 0.5) -> None:
    """Sends the signal when the checkpoint has been written so many times, two at least, and the given part of the time
    between the last two has gone by since: no moment of the clock, since on a fast machine the run would have ended."""
    times: list[float] = []
    seen = file.stat().st_mtime_ns if file.exists() else 0
    while process.is_alive() and len(times) < saves:
        time.sleep(0.002)
        if (now := file.stat().st_mtime_ns if file.exists() else 0) != seen:
            seen = now
            times.append(time.monotonic())
    if process.is_alive():
        time.sleep(part * (times[-1] - times[-2]))
    os.kill(process.pid, number)
    process.join()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was left alone."""
    folder = tmp_path_factory.mktemp("finished")
    process = begin("", folder)
    process.join()
    assert process.exitcode == 0, (folder / "printed.txt").read_text()
    return folder / "runs/short/version_0"


def go_on_to_the_end(folder: Path, finished: Path) -> None:
    """Goes on, and ends as the run that was left alone."""
    process = begin("--ckpt_path last", folder)
    process.join()
    printed = (folder / "printed.txt").read_text()
    assert process.exitcode == 0, printed
    assert "Traceback" not in printed
    run = folder / "runs/short/version_0"
    assert (finished / "metrics.csv").read_text() == (run / "metrics.csv").read_text()
    ours, theirs = (torch.load(place / "checkpoints/last.ckpt", weights_only=True) for place in (run, finished))
    for part in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "loops", "run"):
        assert_same(ours[part], theirs[part], part)
    model, expected = (load_model(place / "model").state_dict() for place in (run, finished))
    assert_same(dict(model), dict(expected))


@pytest.mark.slow
def test_a_run_goes_on_after_every_kind_of_interruption(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs/short/version_0"
    file = run / "checkpoints/last.ckpt"
    process = begin("--autosave.every_n_minutes 0", tmp_path)
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        interrupt(process, file, number)
        printed = (tmp_path / "printed.txt").read_text()
        assert process.exitcode == status, printed
        if number != signal.SIGKILL:
            advice = "last.ckpt is saved. To go on, add --ckpt_path last to the same command."
            assert printed.rstrip().endswith(f"runs/short/version_0/checkpoints/{advice}")
            process = begin(f"--autosave.every_n_minutes 0 --ckpt_path {file}", tmp_path)  # as good as `last`
    go_on_to_the_end(tmp_path, finished)
    assert sorted(entry.name for entry in run.iterdir()) == [
        *("checkpoints", "config.yaml", "config_resumed_1.yaml", "config_resumed_2.yaml", "config_resumed_3.yaml"),
        *("metrics.csv", "model"),
    ]


def test_two_processes_leave_and_go_on_together_and_learn_what_one_learns(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    same = "--model.vit.drop_path 0"  # what is dropped at random differs between one process and two
    one = begin(same, alone)
    one.join()
    assert one.exitcode == 0, (alone / "printed.txt").read_text()

    def begin_both(words: str) -> list[BaseProcess]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        words += f" {same} --trainer.accelerator cpu --trainer.devices 2 --data.batch_size 64"
        return [begin(words, together, LOCAL_RANK=str(rank), **address) for rank in (0, 1)]

    run, whole = (folder / "runs/short/version_0" for folder in (together, alone))
    first, second = begin_both("--autosave.every_n_minutes 0")
    interrupt(second, run / "checkpoints/last.ckpt", signal.SIGTERM)
    first.join()
    assert [first.exitcode, second.exitcode] == [143, 143], (together / "printed.txt").read_text()
    for process in begin_both("--ckpt_path last"):
        process.join()
        assert process.exitcode == 0, (together / "printed.txt").read_text()
    for column in ("train/accuracy", "val/loss", "val/accuracy"):
        ours, theirs = ([float(value) for (value,) in rows(place / "metrics.csv", column)] for place in (run, whole))
        assert len(ours) == 3
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert [folder.name for folder in run.parent.iterdir()] == ["version_0"]


@pytest.mark.slow
def test_a_sharded_run_goes_on_under_torchrun(tmp_path: Path) -> None:
    words = f"""{WORDS} --config {ROOT}/configs/overlays/fsdp.yaml --trainer.strategy.data_parallel_size 2
        --trainer.accelerator cpu --trainer.devices 2 --model.ema_decay null
        --trainer.gradient_clip_val 1.0"""

    def begin_both(folder: Path, *more: str) -> subprocess.Popen[str]:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", ROOT / "train.py"]
        command += [*words.split()[1:], *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)

    def end(process: subprocess.Popen[str]) -> tuple[int, str]:
        _, printed = process.communicate()
        return process.returncode, printed

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    status, printed = end(begin_both(whole))
    assert status == 0, printed
    process = begin_both(stopped, "--autosave.every_n_minutes", "0")
    file = "runs/short/version_0/checkpoints/last.ckpt"
    while not (stopped / file).exists():
        time.sleep(0.01)
    process.terminate()
    status, printed = end(process)
    assert status != 0
    assert "To go on, add --ckpt_path last to the same command." in printed
    status, printed = end(begin_both(stopped, "--ckpt_path", "last"))
    assert status == 0, printed
    ours, theirs = (torch.load(folder / file, weights_only=True) for folder in (stopped, whole))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "run"):
        assert_same(ours[part], theirs[part], part)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(20))
def test_a_run_killed_at_a_random_moment_ends_as_if_it_had_not_been(
    moment: int, finished: Path, tmp_path: Path
) -> None:
    # Saved after each of the 30 steps, or after some of them: then the tables are further than the checkpoint.
    minutes, most = (0.001, 5) if moment % 2 else (0, 20)
    process = begin(f"--autosave.every_n_minutes {minutes}", tmp_path)
    file = tmp_path / "runs/short/version_0/checkpoints/last.ckpt"
    draw = random.Random(moment)
    interrupt(process, file, signal.SIGKILL, draw.randint(2, most), draw.random())
    assert process.exitcode == -9
    go_on_to_the_end(tmp_path, finished)
