"""Reads config files and refuses, with the file's name, what the full parser would read wrongly or without end."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from vitmha.cli.arguments import refuse

MAX_NODES = 100_000  # values and keys of a config, with each alias counted as what it stands for
# Options that are sections too: their keys are options, with the name of the section as a prefix.
SECTIONS = ("model.vit", "model.decoder", "model.distillation")


def read_config(file: str) -> Mapping[str, Any]:
    """Returns the content of a config file; ends the process with one line if it is not a YAML mapping.

    An alias stands for a copy of its anchor. A file of a few hundred bytes can stand for billions of values, so they
    are counted before any is built.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_nodes(node)
        content = yaml.safe_load(text)
    except OSError as error:
        refuse(f"--config {file}: {error.strerror}")
    except UnicodeDecodeError:
        refuse(f"--config {file}: expected a text file in UTF-8")
    except RecursionError:
        refuse(f"--config {file}: its values are nested too deeply")
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as the date 2020-99-99
        refuse(f"--config {file}: {_one_line(error)}")
    if not isinstance(content, dict):
        refuse(f"--config {file}: expected a YAML mapping such as `trainer: {{max_epochs: 3}}`, got {_short(content)}")
    _check_sections(file, content)
    return content


def options_of(content: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a config as names of options, such as model.vit.depth, with their values."""
    for name, value in content.items():
        key = f"{section}.{name}" if section else name
        if isinstance(value, dict) and name in ("init_args", "dict_kwargs"):
            yield from options_of(value, section)
        elif isinstance(value, dict) and (not section or key in SECTIONS):
            yield from options_of(value, key)
        else:
            yield key, value


def _check_nodes(root: Any) -> None:
    """Raises a YAML error for too many values, a value that contains itself, and a key that is there twice."""
    sizes: dict[int, int] = {}  # 0 while a node is being counted

    def size(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0
            children = node.value if isinstance(node, yaml.CollectionNode) else ()
            if isinstance(node, yaml.MappingNode):
                _check_keys(node)
                children = [part for pair in children for part in pair]
            sizes[id(node)] = 1 + sum(map(size, children))
        elif sizes[id(node)] == 0:
            raise _error("an alias stands for what it is a part of", node)
        return sizes[id(node)]

    if root is not None and size(root) > MAX_NODES:
        raise _error(f"the aliases stand for more than {MAX_NODES:,} values", root)


def _check_keys(mapping: Any) -> None:
    """Raises a YAML error for a key that is there twice: only the last of its values would count."""
    names = [(key.value, key) for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)]
    for index, (name, key) in enumerate(names):
        if name in dict(names[:index]):
            raise _error(f"the key {name} is there twice", key)


def _error(problem: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _check_sections(file: str, content: Mapping[Any, Any]) -> None:
    for key in content:
        if not isinstance(key, str):
            refuse(f"--config {file}: expected names of options as keys, got {_short(key)}")
    for name in ("trainer", "checkpoint", "attention", "autosave", "model", "data"):
        value = content.get(name)
        if value is not None and not isinstance(value, dict | str):
            refuse(f"--config {file}: {name} must be a mapping of its options, got {_short(value)}")
    data = content.get("data")
    class_path = data.get("class_path") if isinstance(data, dict) else None
    if class_path is not None and not isinstance(class_path, str):
        refuse(f"--config {file}: data.class_path must be the name of a class, got {_short(class_path)}")


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return where + " ".join(problem.split())


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
