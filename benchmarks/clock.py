"""Prints the validation accuracy over training time: `--trainer.callbacks+=benchmarks.clock.Clock`."""

import time

from lightning import Callback, Trainer


class Clock(Callback):
    """Prints the seconds since the start of training with each validation accuracy, and when a target was reached.

    Args:
        target: Accuracy, in [0, 1].
    """

    def __init__(self, target: float = 0.94) -> None:
        self.target, self.is_reached = target, False

    def on_train_start(self, *_: object) -> None:
        self.start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        seconds, accuracy = time.perf_counter() - self.start, float(trainer.callback_metrics["val/accuracy"])
        print(f"epoch {trainer.current_epoch + 1:>4} {seconds:>7.0f} s {accuracy:.2%}", flush=True)
        if accuracy >= self.target and not self.is_reached:
            self.is_reached = True
            print(f"{self.target:.0%} reached after {seconds:.0f} s", flush=True)
