"""What `vitmha --version --verbose` prints: the versions, devices and directories that a bug report needs."""

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import vitmha
from vitmha.cli.configs import shipped_configs

REQUIRED = (
    *("torchvision", "timm", "lightning", "torchmetrics", "jsonargparse", "einops", "jaxtyping", "safetensors"),
    *("huggingface-hub", "numpy", "pillow", "rich", "matplotlib", "wandb"),
)
OPTIONAL = (
    *("transformers", "onnx", "onnxruntime", "onnxscript", "openvino", "nncf", "ray", "litdata", "litserve"),
    *("python-multipart", "imageio", "av", "tensorboard"),
)
# Instructions of the CPU that bfloat16 and 8-bit models are fast with.
CPU_FEATURES = ("avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")


def describe_environment() -> str:
    """Describes the environment in one line per fact; a package that is missing or broken is a fact too."""
    facts = dict(_facts())
    width = max(map(len, facts))
    return "\n".join(f"{name:{width}}  {value}" for name, value in facts.items())


def _facts() -> Iterator[tuple[str, str]]:
    yield "vitmha", f"{vitmha.__version__} ({Path(vitmha.__file__).parent})"
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "operating system", platform.platform()
    yield "CPU cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    yield from _torch_facts()
    for name in REQUIRED:
        yield name, _version(name)
    for name in OPTIONAL:
        if (found := _version(name)) != "not installed":
            yield name, found
    yield "shipped configs", str(next(iter(shipped_configs().values()), Path("not found")).parent)
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    yield "HF_HOME", str(Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser())
    yield "TORCH_HOME", str(Path(os.environ.get("TORCH_HOME", f"{cache}/torch")).expanduser())


def _version(name: str) -> str:
    """The installed version of a package, without importing it."""
    try:
        return str(version(name))
    except PackageNotFoundError:
        return "not installed"
    except Exception as error:  # the metadata of an interrupted installation make it raise any
        return _problem(error)


def _torch_facts() -> Iterator[tuple[str, str]]:
    """What PyTorch says about itself and its devices."""
    try:
        import torch
    except Exception as error:  # OSError for a missing CUDA library, ImportError, RuntimeError
        found = _version("torch")
        yield "torch", found if found == "not installed" else f"{found}, cannot be imported: {_problem(error)}"
        return
    cuda, rocm = torch.version.cuda, torch.version.hip
    build = f"built for CUDA {cuda}" if cuda else f"built for ROCm {rocm}" if rocm else "built without CUDA"
    yield "torch", f"{torch.__version__} ({build})"
    for index, device in enumerate(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]):
        name = ", ".join(_cpu_features(torch)) if index == 0 else _cuda_device(torch, index - 1)
        yield f"device {device}", name
        yield f"SDPA on {device}", ", ".join(_sdpa_backends(torch, device))
    if torch.backends.mps.is_available():
        yield "device mps", "available"


def _cpu_features(torch: Any) -> list[str]:
    """The capability that PyTorch's kernels are chosen by, and instruction sets that it finds."""
    found = [str(torch.backends.cpu.get_cpu_capability())]
    if hasattr(torch.cpu, "get_capabilities"):  # not in all supported versions
        capabilities = torch.cpu.get_capabilities()
        found += [name for name in CPU_FEATURES if capabilities.get(name)]
    return found


def _cuda_device(torch: Any, index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    bf16 = "bfloat16" if properties.major >= 8 else "no bfloat16"
    return f"{properties.name}, {memory}, compute capability {properties.major}.{properties.minor}, {bf16}"


def _sdpa_backends(torch: Any, device: str) -> list[str]:
    """The kernels that run on a device, each tried on a small tensor in half precision, or else in float32."""
    from vitmha.attention.functional import KERNELS, fused_attention

    def runs(name: str, dtype: Any) -> bool:
        try:
            q = torch.zeros(1, 1, 8, 64, device=device, dtype=dtype)
            fused_attention(q, q, q, None, False, 0.0, name)  # type: ignore[arg-type]
        except Exception:  # a device that is in use or too new raises others than that of a missing kernel
            return False
        return True

    return [name for name in KERNELS if runs(name, torch.bfloat16) or runs(name, torch.float32)] or ["none"]


def _problem(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
