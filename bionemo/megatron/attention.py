# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences: full, causal or cross-attention within each sequence.

Shapes: T query tokens, S key tokens, H heads of this rank, d head size, N sequences.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_pg_rank
from torch import Tensor, nn
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.torch_version import TorchVersion

from bionemo.common.autotune import autotune
from bionemo.megatron.cpu_attention import packed_attention
from bionemo.megatron.dropout import CROSS_PROBABILITIES, PROBABILITIES, AttentionDropout, keep_scale, layer_site

GpuKernel = Literal["flash", "triton", "sequences"]  # the last: one call for each sequence
MAX_HEAD_SIZE = 256  # of FlashAttention and of our Triton kernels
_SMALL_HEAD = 16  # channels; half of the 32 to which FlashAttention pads smaller heads
_REPETITIONS = 10  # of a measured forward and backward pass, which take less than a millisecond
_MEASURED = 320  # length of the sequences whose attention is measured: a usual protein
log = logging.getLogger(__name__)


def cast_for_autocast(x: Tensor) -> Tensor:
    """Cast to the dtype that autocast uses for matrix products, if autocast is enabled."""
    device_type = x.device.type
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x


@dataclass(frozen=True)
class PackedSequences:
    """Positions of the sequences in a packed batch and other inputs of attention.

    Megatron's layers pass it on as their `packed_seq_params`.
    """

    lengths: tuple[int, ...]  # [N] tokens of each sequence; the padding after the last one belongs to no sequence
    cu_seqlens: Tensor  # int32 on the device: cumulative lengths of the sequences and of the padding segments
    max_length: int
    rotary: tuple[Tensor, Tensor] | None = None  # cos and sin, each [T, 1, d], in the dtype of queries and keys
    dropout_keys: Tensor | None = None  # [T] int64, random key of each token; None: no dropout
    context: "PackedSequences | None" = None  # key sequences of cross-attention, one per query sequence
    qkv_format: ClassVar[str] = "packed"  # unknown to Megatron, which therefore does not reshape the tensors

    def with_context(self, context: "PackedSequences") -> "PackedSequences":
        """Return a copy for cross-attention to other sequences, without rotary positions."""
        return replace(self, context=context, rotary=None)


class PackedAttention(nn.Module):
    """Compute dropout(softmax(q k^T / sqrt(d))) v within each sequence; replaces Megatron's core attention.

    Args:
        config: configuration of the layer.
        layer_number: number of the layer over all pipeline stages, from 1.
        attn_mask_type: full or causal attention.
        attention_type: "self" or "cross".
        softmax_scale: factor of the scores; default 1 / sqrt(d).
        pg_collection: process groups; the tensor rank determines the heads of this process.
        unused: further arguments of Megatron, such as cp_comm_type.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.no_mask,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.causal = attn_mask_type == AttnMaskType.causal
        self.dropout, self.num_heads = config.attention_dropout, config.num_attention_heads
        location = CROSS_PROBABILITIES if attention_type == "cross" else PROBABILITIES
        self.dropout_site = layer_site(layer_number, location)
        self.tensor_rank = get_pg_rank(pg_collection.tp if pg_collection is not None else None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **unused: Any,
    ) -> Tensor:
        """Return the attention output, [T, 1, H * d].

        Args:
            query: [T, 1, H, d], with rotary positions if the model has them.
            key: [S, 1, H, d], likewise.
            value: [S, 1, H, d].
            attention_mask: unused; `packed_seq_params` determines the mask.
            packed_seq_params: sequences of the packed batch.
            unused: further arguments of Megatron: attn_mask_type and attention_bias.
        """
        sequences = packed_seq_params
        q_THd, k_SHd, v_SHd = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        dropout = None
        if self.training and self.dropout > 0:
            assert sequences.dropout_keys is not None, "attention dropout requires dropout keys"
            first_head = self.tensor_rank * q_THd.shape[1]
            dropout = AttentionDropout(
                sequences.dropout_keys, self.dropout_site, first_head, self.num_heads, self.dropout
            )
        out_THd = attend(q_THd, k_SHd, v_SHd, sequences, self.scale, dropout, self.causal)
        return out_THd.reshape(len(out_THd), 1, -1)


def attend(
    q_THd: Tensor,
    k_SHd: Tensor,
    v_SHd: Tensor,
    sequences: PackedSequences,
    scale: float,
    dropout: AttentionDropout | None = None,
    causal: bool = False,
) -> Tensor:
    """Compute attention, [T, H, d], with the fastest implementation that is exact on this device."""
    if q_THd.is_cuda:
        return attend_on_gpu(q_THd, k_SHd, v_SHd, sequences, scale, dropout, causal)
    keys = sequences.context or sequences
    return packed_attention(q_THd, k_SHd, v_SHd, sequences.lengths, scale, dropout, keys.lengths, causal)


def attend_on_gpu(
    q_THd: Tensor,
    k_SHd: Tensor,
    v_SHd: Tensor,
    sequences: PackedSequences,
    scale: float,
    dropout: AttentionDropout | None = None,
    causal: bool = False,
) -> Tensor:
    """Compute attention with FlashAttention, else with our Triton kernels, else one sequence after the other."""
    exact = dropout is not None or torch.are_deterministic_algorithms_enabled()
    kernel = gpu_kernel(v_SHd.shape[-1], v_SHd.dtype in (torch.float16, torch.bfloat16), exact)
    return _attend_with(kernel, q_THd, k_SHd, v_SHd, sequences, scale, dropout, causal)


def _attend_with(
    kernel: GpuKernel,
    q_THd: Tensor,
    k_SHd: Tensor,
    v_SHd: Tensor,
    sequences: PackedSequences,
    scale: float,
    dropout: AttentionDropout | None = None,
    causal: bool = False,
) -> Tensor:
    keys = sequences.context or sequences
    arguments = (q_THd, k_SHd, v_SHd, sequences.cu_seqlens, keys.cu_seqlens, sequences.max_length, keys.max_length)
    if kernel == "flash":
        from torch.nn.attention.varlen import varlen_attn

        window_size = (-1, 0) if causal else (-1, -1)
        return cast(Tensor, varlen_attn(*arguments, scale=scale, window_size=window_size))
    if kernel == "triton":
        from bionemo.megatron.triton_attention import triton_attention

        return triton_attention(*arguments, scale, dropout, causal)
    return attend_per_sequence(q_THd, k_SHd, v_SHd, sequences.lengths, scale, dropout, keys.lengths, causal)


def gpu_kernel(head_size: int, half: bool, exact: bool) -> GpuKernel:
    """Return the implementation of attention on the current GPU, see `select_gpu_kernel`.

    In place of FlashAttention 2, the implementation that `fastest_gpu_attention` measures is used.
    """
    kernel = select_gpu_kernel(head_size, half, exact, gpu_has_flash_attention(), gpu_has_triton())
    if kernel == "flash":
        for size in range(8, MAX_HEAD_SIZE + 1, 8):  # a constant of a compiled graph, in which head_size is symbolic
            if size == head_size:
                return "triton" if fastest_gpu_attention(size) == "triton" else "flash"
    return kernel


def select_gpu_kernel(head_size: int, half: bool, exact: bool, flash: bool, triton: bool) -> GpuKernel:
    """Return the implementation of attention on a GPU.

    FlashAttention 2 supports 16-bit dtypes and head sizes up to 256 that are multiples of 8.

    Args:
        head_size: size of a head.
        half: queries, keys and values have a 16-bit dtype.
        exact: counter-based dropout is applied, or the backward pass must be deterministic: FlashAttention cannot.
        flash: the GPU supports FlashAttention.
        triton: the GPU supports Triton.
    """
    if head_size > MAX_HEAD_SIZE:
        return "sequences"
    if flash and half and head_size % 8 == 0 and not exact:
        return "flash"
    return "triton" if triton else "sequences"


@torch.compiler.assume_constant_result
def gpu_has_flash_attention() -> bool:
    """Return whether the current GPU supports FlashAttention 2."""
    return torch.cuda.get_device_capability() >= (8, 0)


@torch.compiler.assume_constant_result
def gpu_has_triton() -> bool:
    """Return whether Triton is installed and supports the current GPU."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability() >= (8, 0)


@torch.compiler.assume_constant_result  # not of the cached function, whose measurement would be compiled
def fastest_gpu_attention(head_size: int) -> str:
    """Return the fastest implementation of attention in 16-bit dtypes on the current GPU, and activate it.

    The implementations are FlashAttention 2 of torch ("FA2"); FlashAttention 3 and 4 ("FA3" and "FA4"), which torch
    calls once they are activated, if the modules `flash_attn_interface` and `flash_attn.cute` are installed; cuDNN
    ("cuDNN") with torch 2.15 or newer; and for heads of at most 16 channels, which FlashAttention pads to 32, our
    Triton kernels ("triton"). Those that fail or differ from FlashAttention 2 are not used. The time is that of the
    forward and backward pass in bf16. The choice is stored for each GPU and version of torch, see `autotune`.
    """
    return _fastest_gpu_attention(head_size, "cuda")


@cache
@torch.inference_mode(False)
def _fastest_gpu_attention(head_size: int, device: str) -> str:
    generator = torch.Generator(device).manual_seed(0)
    shape = (_MEASURED * 64, 20, head_size)
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(4))
    starts = torch.arange(0, len(q) + 1, _MEASURED, dtype=torch.int32, device=device)
    sequences = PackedSequences((_MEASURED,) * 64, starts, _MEASURED)

    def run(name: str, causal: bool = False) -> tuple[Tensor, ...]:
        kernel: GpuKernel = "triton" if name == "triton" else "flash"
        a, b, c = (x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            out = _attend_with(kernel, a, b, c, sequences, head_size**-0.5, causal=causal)
            return out.detach(), *torch.autograd.grad(out, (a, b, c), dout)

    def repeat(name: str) -> None:
        _activate(name)
        for _ in range(_REPETITIONS):
            run(name)
        torch.cuda.synchronize()

    _activate("FA2")
    expected = *run("FA2"), *run("FA2", causal=True)
    candidates = {"FA2": partial(repeat, "FA2")}
    for name in _list_alternatives(head_size):
        try:
            _activate(name)
            pairs = zip(expected, (*run(name), *run(name, causal=True)), strict=True)
            exact = all(torch.allclose(a, b, rtol=2e-2, atol=2e-2) for a, b in pairs)
        except ModuleNotFoundError:  # it is not installed
            continue
        except Exception as error:  # of any class: the kernels of other packages raise their own
            log.warning("attention does not use %s, which fails: %s", name, str(error).partition("\n")[0])
            continue
        if exact:
            candidates[name] = partial(repeat, name)
        else:
            log.warning("attention does not use %s, which differs from FlashAttention 2 on this GPU", name)
    modules = (torch, *map(sys.modules.get, ("flash_attn_interface", "flash_attn.cute")))
    versions = [torch.cuda.get_device_name(), torch.backends.cudnn.version()]
    versions += [getattr(module, "__version__", None) for module in modules]
    version = " ".join(map(str, versions))
    choice = autotune(f"gpu-attention-of-head-size-{head_size}", version, candidates) if len(candidates) > 1 else "FA2"
    _activate(choice)
    return choice


def _list_alternatives(head_size: int) -> Iterator[str]:
    yield from ("FA3", "FA4")
    if TorchVersion(torch.__version__) >= "2.15":
        yield "cuDNN"
    if head_size <= _SMALL_HEAD and gpu_has_triton():
        yield "triton"


def _activate(name: str) -> None:
    """Let torch's `varlen_attn` use FlashAttention 3 or 4 or cuDNN, otherwise its own FlashAttention 2."""
    torch.backends.cuda.enable_cudnn_sdp(name == "cuDNN")
    if name in ("FA3", "FA4"):
        activate_flash_attention_impl(name)
    elif current_flash_attention_impl():
        restore_flash_attention_impl()


@torch.compiler.disable  # as packed_attention
def attend_per_sequence(
    q_THd: Tensor,
    k_SHd: Tensor,
    v_SHd: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    dropout: AttentionDropout | None,
    key_lengths: tuple[int, ...] | None = None,
    causal: bool = False,
) -> Tensor:
    """Compute attention one sequence after the other, on any device; the output of padding tokens is 0."""
    ends, key_lengths = list(accumulate(lengths, initial=0)), lengths if key_lengths is None else key_lengths
    queries = q_THd[: ends[-1]].split(lengths)
    keys, values = (x[: sum(key_lengths)].split(key_lengths) for x in (k_SHd, v_SHd))
    outputs = []
    for tokens, *qkv in zip(map(slice, ends, ends[1:]), queries, keys, values, strict=True):
        q_Hnd, k_Hmd, v_Hmd = (x.transpose(0, 1) for x in qkv)
        if dropout is None:
            out_Hnd = F.scaled_dot_product_attention(
                q_Hnd[None], k_Hmd[None], v_Hmd[None], scale=scale, is_causal=causal
            )[0]
        else:
            s_Hnm = (q_Hnd @ k_Hmd.mT).float() * scale
            if causal:
                s_Hnm = s_Hnm.masked_fill(s_Hnm.new_ones(s_Hnm.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
            mask_Hnm = dropout.keep_mask(slice(0, len(q_Hnd)), tokens, k_Hmd.shape[1]).bool()  # saved, 1 byte each
            p_Hnm = s_Hnm.softmax(-1) * mask_Hnm * keep_scale(dropout.probability)
            out_Hnd = p_Hnm.to(v_Hmd.dtype) @ v_Hmd
        outputs.append(out_Hnd.transpose(0, 1))
    return torch.cat([*outputs, torch.zeros_like(q_THd[ends[-1] :])])


def rotary_cos_sin(
    positions_T: Tensor, head_size: int, frequencies: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles of each position, each [T, 1, d]; the d/2 angles are repeated.

    They are computed in fp32 and returned in the dtype of queries and keys. All layers share them.

    Args:
        positions_T: positions, counted from 0.
        head_size: d.
        frequencies: d/2 angles per position; None: 1 / 10000^(2i/d).
    """
    if frequencies is None:
        exponents = torch.arange(0, head_size, 2, device=positions_T.device, dtype=torch.float32) / head_size
        inverse = 1.0 / 10000.0**exponents
    else:
        inverse = torch.tensor(frequencies, device=positions_T.device, dtype=torch.float32)
    angles = torch.outer(positions_T.float(), inverse)
    angles_T1d = torch.cat((angles, angles), dim=-1)[:, None, :]
    return cast_for_autocast(angles_T1d.cos()), cast_for_autocast(angles_T1d.sin())
