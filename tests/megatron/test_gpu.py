# SPDX-License-Identifier: Apache-2.0
"""Whether a run uses the GPU, and one line for each reason why it cannot."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bionemo.common.errors import HostError
from bionemo.megatron import gpu
from bionemo.megatron.gpu import use_gpu


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Simulate torch with CUDA on a host without GPU; return the directory of its device files."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu, "_DEVICE_FILE", tmp_path / "nvidia0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield tmp_path
    torch.backends.cuda.enable_cudnn_sdp(True)


def add_gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int], built: list[str]) -> None:
    """Simulate a GPU that torch, built for the architectures `built`, can find."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    patch.setattr(torch.cuda, "get_arch_list", lambda: built)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")


def error(accelerator: str) -> str:
    with pytest.raises(HostError) as caught:
        use_gpu(accelerator)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_cpu_is_used_without_looking_at_the_gpu(monkeypatch: pytest.MonkeyPatch, host: Path) -> None:
    (host / "nvidia0").touch()
    assert not use_gpu("cpu")
    add_gpu(monkeypatch, (3, 5), ["sm_75"])
    assert not use_gpu("cpu")


def test_a_host_without_gpu() -> None:
    assert not use_gpu("auto")
    for accelerator in ("gpu", "cuda"):
        assert error(accelerator) == f"trainer.accelerator={accelerator}: this machine has no GPU; use auto or cpu"


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "cuda"])
def test_a_driver_that_is_too_old(host: Path, accelerator: str) -> None:
    (host / "nvidia0").touch()
    assert error(accelerator) == (
        f"torch {torch.__version__} (CUDA 13.0) cannot use the GPU with the installed driver: update the "
        "driver, install torch for an older CUDA version, or use the CPU with trainer.accelerator=cpu"
    )


@pytest.mark.parametrize("visible", ["7", "GPU-0123abcd", "MIG-0123abcd"])
def test_a_variable_that_may_select_a_missing_gpu(monkeypatch: pytest.MonkeyPatch, host: Path, visible: str) -> None:
    (host / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert f"cannot use the GPU with the installed driver and CUDA_VISIBLE_DEVICES={visible}: " in error("auto")


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_a_hidden_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch, host: Path, visible: str) -> None:
    (host / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert not use_gpu("auto")
    assert "has no GPU" in error("gpu")


def test_torch_without_cuda_uses_the_cpu(monkeypatch: pytest.MonkeyPatch, host: Path) -> None:
    (host / "nvidia0").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not use_gpu("auto")
    assert error("gpu") == (
        f"trainer.accelerator=gpu: torch {torch.__version__} was built without CUDA; use auto or cpu"
    )


@pytest.mark.parametrize(
    ("capability", "built", "needed"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_120"], "7.5"),
        ((6, 1), ["sm_70"], "7.0"),
        ((9, 0), ["sm_120", "sm_100a"], "10.0"),
        ((5, 2), ["compute_60", "sm_70"], "6.0"),
    ],
)
def test_a_gpu_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: list[str], needed: str
) -> None:
    add_gpu(monkeypatch, capability, built)
    for accelerator in ("auto", "gpu", "cuda"):
        assert error(accelerator) == (
            f"Some GPU has compute capability {capability[0]}.{capability[1]}, but torch {torch.__version__} needs "
            f"{needed} or higher: use a newer GPU, install torch for an older CUDA version, or use the CPU with "
            "trainer.accelerator=cpu"
        )


@pytest.mark.parametrize(
    ("capability", "built"),
    [
        ((7, 5), ["sm_75", "sm_80"]),
        ((8, 6), ["sm_80", "sm_90"]),  # runs code for 8.0
        ((10, 0), ["sm_90a", "compute_90"]),
        ((12, 0), ["sm_75", "sm_120"]),
        ((9, 0), []),  # torch does not tell
    ],
)
def test_supported_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: list[str]) -> None:
    add_gpu(monkeypatch, capability, built)
    assert all(map(use_gpu, ("auto", "gpu", "cuda")))


def test_torch_does_not_replace_flash_attention_by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 does so in varlen_attn on GPUs like this one unless cuDNN is disabled."""
    assert torch.backends.cuda.cudnn_sdp_enabled()
    add_gpu(monkeypatch, (9, 0), [])
    use_gpu("auto")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
