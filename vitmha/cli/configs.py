"""configs: lists the shipped configs, or prints one; `--config NAME` finds them by the same names."""

import re
from collections.abc import Sequence
from pathlib import Path

import vitmha
from vitmha.cli.arguments import CommandParser, refuse


def main(args: Sequence[str]) -> None:
    """Lists the shipped configs, or prints one."""
    parser = CommandParser(
        prog="vitmha configs", description="List the shipped configs, or print one; --config NAME uses one."
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this config, for example cifar10")
    name = parser.parse_args(args).name
    if name is not None:
        print(find_config(name, "").read_text(), end="")
        return
    configs = shipped_configs()
    width = max(map(len, configs))
    for name, path in configs.items():
        print(f"{name:{width}}  {_first_sentence(path)}")


def shipped_configs() -> dict[str, Path]:
    """The shipped configs by name, such as cifar10 and overlays/ddp; overlays come last."""
    installed = Path(vitmha.__file__).parent / "configs"
    root = installed if installed.is_dir() else Path(vitmha.__file__).parents[1] / "configs"  # a checkout
    paths = [*sorted(root.glob("*.yaml")), *sorted(root.glob("overlays/*.yaml"))]
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in paths}


def find_config(name: str, flag: str = "--config ") -> Path:
    """The file of a config: a path, or the name of a shipped one with or without `overlays/`.

    Ends the process with a message, which starts with the flag, if there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    configs = shipped_configs()
    path = configs.get(name) or configs.get(f"overlays/{name}")
    if path is None:
        refuse(f"{flag}{name}: no such file, and no shipped config of that name ({', '.join(configs)})")
    return path


def _first_sentence(path: Path) -> str:
    """The first sentence of the comment at the head of a config."""
    lines = [line.removeprefix("#").strip() for line in path.read_text().splitlines()]
    paragraph = " ".join(lines[: lines.index("")])
    return re.split(r"(?<=[.:]) (?=[A-Z])", paragraph)[0]
