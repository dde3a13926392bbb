"""The bundled models: a model directory each."""

from pathlib import Path

SHIPPED = Path(__file__).parent


def list_models() -> list[str]:
    """The names of the bundled models, which `vitmha.load_model` and `--model` take.

    A model directory of the same name in the working directory takes precedence.

    Example:
        >>> list_models()
        ['cifar10', 'fashion-mnist']
    """
    return sorted(config.parent.name for config in SHIPPED.glob("*/config.json"))
