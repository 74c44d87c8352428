# SPDX-License-Identifier: Apache-2.0
"""Measure training steps of a model, or of Hugging Face's model of the same size, on tokens that are in memory.

    python steps.py esm2_650M ours --rows 32 --precision bf16-mixed --compile
    python steps.py esm2_650M hf --rows 16 --precision bf16-mixed --compile

Both draw the same sequences, with lengths like those of UniRef90 (proteins), ZINC15 (molecules) or full rows
(text), as many as fill the given rows when they are packed. Ours are packed, the peer's padded: to the longest of a
random batch (`longest`) or of a batch of sequences of similar length (`bucket`), in multiples of 64, or to the maximum
(`full`). A step consists of the forward and backward pass of one micro-batch, clipping and AdamW, without trainer and
data loading. Prints one JSON line; `value` is the number of tokens per second without padding, of encoder and decoder
together.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from proteins import proteins

import bionemo
from bionemo.common.gpus import match_device
from bionemo.config.compose import load
from bionemo.config.schema import ModelConfig
from bionemo.data.dataset import TokenizedBatch, TokenSequences
from bionemo.models.flops import training_flops

EXAMPLES = Path(bionemo.__file__).parents[1] / "examples"
BATCHES = 4
KINDS = (  # of GPU kernels, by a part of their name
    ("attention", ("flash", "fmha", "_forward_kernel", "_gradient_kernel", "attention", "cudnn")),
    ("matrix products", ("gemm", "cutlass", "cublas", "nvjet", "splitk", "aten::mm", "aten::addmm", "aten::bmm")),
    ("optimizer and gradients", ("multi_tensor", "adam", "foreach", "lpnorm")),
    ("copies and casts", ("memcpy", "memset", "copy", "fill", "catarray", "index", "gather", "scatter")),
    ("elementwise and norms", ("elementwise", "triton", "layer_norm", "layernorm", "reduce", "softmax", "vectorized")),
)
Sizes = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Sequences of a step."""

    inputs: Sizes  # [N] tokens of each sequence; of an encoder-decoder: of the decoder
    source: Sizes | None  # [N] tokens of each encoder sequence
    rows: int
    all_targets: bool  # the loss is computed at all tokens, of which each attends only to those before it

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.inputs.sum()) + (0 if self.source is None else int(self.source.sum()))


@dataclass(frozen=True)
class Benchmark:
    """A model: its configuration, the lengths of its sequences and the peer."""

    example: str  # directory below examples/
    config: str
    kind: str  # of data
    peer: Callable[[ModelConfig, int], Any]  # builds Hugging Face's model, given the size of the vocabulary
    overrides: tuple[str, ...] = ()


def lengths_of(kind: str, model: ModelConfig, number: int) -> Sizes:
    """Return lengths of sequences in tokens."""
    random = np.random.default_rng(0)
    if kind == "text":
        return np.full(number, model.seq_length)
    if kind == "molecules":
        return random.normal(43, 8, number).round().clip(2, model.seq_length - 1).astype(np.int64)
    return np.array([min(len(text) + 2, model.seq_length) for text in proteins(None, number)])


def batches_of(kind: str, model: ModelConfig, rows: int) -> list[Batch]:
    """Return batches that fill `rows` rows; rows of molecules have one sequence."""
    number = BATCHES * rows * (1 if kind != "proteins" else 2 + model.seq_length // 100)
    lengths, batches = lengths_of(kind, model, number), []
    decoder = None
    if kind == "spans":
        lengths = lengths_of("proteins", model, number * (2 + model.seq_length // 100))
        decoder = 2 * np.maximum((0.15 * lengths).round().astype(np.int64), 1) + 1
    elif kind == "molecules":
        decoder = lengths + 1
    position = 0
    for _ in range(BATCHES):
        if kind == "molecules":
            end = position + rows
        else:
            filled = np.cumsum(lengths[position:])
            end = position + int(np.searchsorted(filled, rows * model.seq_length, side="right"))
            if decoder is not None:
                limit = rows * model.data.seq_length_dec  # type: ignore[attr-defined]
                end = min(end, position + int(np.searchsorted(np.cumsum(decoder[position:]), limit, side="right")))
        own = slice(position, end)
        batches.append(
            Batch(lengths[own], None, rows, kind == "text")
            if decoder is None
            else Batch(decoder[own], lengths[own], rows, True)
        )
        position = end
    return batches


def esm(model: ModelConfig, vocabulary: int) -> Any:
    from transformers import EsmConfig, EsmForMaskedLM

    return EsmForMaskedLM(EsmConfig(
        vocab_size=vocabulary, hidden_size=model.hidden_size, num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads, intermediate_size=model.ffn_hidden_size,
        max_position_embeddings=model.seq_length + 2, position_embedding_type="rotary", token_dropout=True,
        mask_token_id=32, pad_token_id=1, layer_norm_eps=1e-5, hidden_dropout_prob=model.hidden_dropout,
        attention_probs_dropout_prob=model.attention_dropout, attn_implementation="sdpa",
    ))  # fmt: skip


def bert(model: ModelConfig, vocabulary: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        vocab_size=vocabulary, hidden_size=model.hidden_size, num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads, intermediate_size=model.ffn_hidden_size,
        max_position_embeddings=model.seq_length, hidden_dropout_prob=model.hidden_dropout,
        attention_probs_dropout_prob=model.attention_dropout, attn_implementation="sdpa",
    ))  # fmt: skip


def t5(model: ModelConfig, vocabulary: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(
        vocab_size=vocabulary, d_model=model.hidden_size, d_ff=model.ffn_hidden_size, num_layers=model.num_layers,
        d_kv=model.hidden_size // model.num_attention_heads, num_heads=model.num_attention_heads,
        dropout_rate=model.hidden_dropout, feed_forward_proj="gelu", decoder_start_token_id=0,
    ))  # fmt: skip


def bart(model: ModelConfig, vocabulary: int) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(BartConfig(
        vocab_size=vocabulary, d_model=model.hidden_size, encoder_layers=model.num_layers,
        decoder_layers=model.num_layers, encoder_attention_heads=model.num_attention_heads,
        decoder_attention_heads=model.num_attention_heads, encoder_ffn_dim=model.ffn_hidden_size,
        decoder_ffn_dim=model.ffn_hidden_size, max_position_embeddings=2 * model.seq_length,
        dropout=model.hidden_dropout, attention_dropout=model.attention_dropout, attn_implementation="sdpa",
    ))  # fmt: skip


def gpt2(model: ModelConfig, vocabulary: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=vocabulary, n_embd=model.hidden_size, n_layer=model.num_layers, n_head=model.num_attention_heads,
        n_positions=model.seq_length, embd_pdrop=model.hidden_dropout, resid_pdrop=model.hidden_dropout,
        attn_pdrop=model.attention_dropout, attn_implementation="sdpa",
    ))  # fmt: skip


MODELS = {
    **{
        f"esm2_{size}": Benchmark("protein/esm2nv", f"pretrain_esm2_{size}", "proteins", esm)
        for size in ("8M", "35M", "150M", "650M", "3B")
    },
    "esm1nv": Benchmark("protein/esm1nv", "pretrain_small", "proteins", bert),
    "prott5nv": Benchmark("protein/prott5nv", "pretrain_small", "spans", t5),
    "megamolbart": Benchmark("molecule/megamolbart", "pretrain_small_span_aug", "molecules", bart),
    "gpt3": Benchmark("gpt3", "pretrain_gpt3_126m", "text", gpt2, ("data@model.data=mock_text",)),
}
TINY = ("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.seq_length=128",
        "model.make_vocab_size_divisible_by=8")  # fmt: skip


class Ours:
    """A training step of ours."""

    def __init__(self, benchmark: Benchmark, cfg: Any, batches: list[Batch], options: argparse.Namespace) -> None:
        from bionemo.megatron import groups
        from bionemo.megatron.precision import resolve_precision
        from bionemo.megatron.sharding import materialize
        from bionemo.megatron.train_step import ParallelModel
        from bionemo.models.language_model import load_model_class
        from bionemo.tokenizers import load_tokenizer
        from bionemo.training.compilation import compile_layers, shared_graphs
        from bionemo.training.optimizers import build_optimizer

        device = torch.device(options.device)
        if not dist.is_initialized():
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
            groups.initialize(1, 1)
        self.context = shared_graphs() if options.compile else nullcontext()
        model_class = load_model_class(cfg.model._target_)
        self.vocabulary = load_tokenizer(model_class.tokenizer, cfg.model.tokenizer)
        cfg.model.compile = options.compile
        with torch.device("meta"):
            model = model_class(cfg.model, self.vocabulary)
        materialize(model, device)
        randomize(model)
        if options.compile:
            compile_layers(model.train())
        precision = resolve_precision(options.precision, device.type == "cuda")
        self.parallel = ParallelModel(model.train(), lambda: precision.autocast(device))
        self.optimizer = build_optimizer(cfg.model.optim, self.parallel.optimizer_shards, model.learning_rate_factor)
        self.batches = [self._packed(cfg.model, batch).to(device) for batch in batches]
        self.table_rows = self.vocabulary.padded_vocab_size(cfg.model.make_vocab_size_divisible_by)

    def _packed(self, model: ModelConfig, batch: Batch) -> Any:
        decoder_row = getattr(model.data, "seq_length_dec", None)
        inputs = self._tokens(batch.inputs, batch, model.seq_length if batch.source is None else decoder_row)
        source = None
        if batch.source is not None:
            source = self._tokens(batch.source, batch, decoder_row and model.seq_length)
        number = int(batch.inputs.sum())
        positions = np.arange(number)
        if not batch.all_targets:
            positions = np.sort(np.random.default_rng(1).permutation(number)[: round(0.15 * number)])
        return TokenizedBatch(inputs, positions, random_ids(len(positions)), source=source).unpack()

    def _tokens(self, lengths: Sizes, batch: Batch, row: int | None) -> TokenSequences:
        """Return tokens of rows of this length; None: padded to a multiple of 64."""
        number = int(lengths.sum())
        ids = np.full(batch.rows * row if row else -(-number // 64) * 64, self.vocabulary.pad_id)
        ids[:number] = random_ids(number)
        keys = np.random.default_rng(2).integers(0, 2**63, len(lengths)).astype(np.uint64)
        return TokenSequences(ids, lengths, row or 128, keys)

    def __call__(self, number: int) -> None:
        """Make one update."""
        self.parallel.forward_backward([self.batches[number % BATCHES]])
        scale = self.parallel.gradient_scale(self.parallel.gradient_norm(), 1.0)
        self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        self.optimizer.step()
        self.parallel.finish_update()


class Peer:
    """A training step of Hugging Face's model."""

    def __init__(self, benchmark: Benchmark, cfg: Any, batches: list[Batch], options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.context = nullcontext()
        size = {"text": 50304, "molecules": 640}.get(benchmark.kind, 128 if benchmark.kind == "spans" else 33)
        with self.device:
            model = benchmark.peer(cfg.model, size)
        self.model = model.train()
        self.network = torch.compile(self.model, dynamic=True) if options.compile else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.half = options.precision == "bf16-mixed"
        self.width = cfg.model.seq_length if options.padding == "full" else 0
        self.batches = [self._padded(batch, benchmark.kind) for batch in batches]
        self.table_rows = size

    def _padded(self, batch: Batch, kind: str) -> dict[str, Any]:
        ids, mask = self._rows(batch.inputs if batch.source is None else batch.source)
        if kind == "text":
            return {"input_ids": ids, "labels": ids}
        if batch.source is None:
            chosen = (torch.rand(ids.shape, device=self.device) < 0.15) & mask.bool()
            return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(chosen, ids, -100)}
        labels, inside = self._rows(batch.inputs)
        labels = torch.where(inside.bool(), labels, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def _rows(self, lengths: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.width or -(-int(lengths.max()) // 64) * 64
        mask = torch.arange(width) < torch.from_numpy(lengths)[:, None]
        ids = torch.from_numpy(random_ids(mask.numel())).view(mask.shape) * mask + ~mask
        return ids.to(self.device), mask.long().to(self.device)

    def __call__(self, number: int) -> None:
        """Make one update."""
        with torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext():
            loss = self.network(**self.batches[number % BATCHES]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def by_length(batches: list[Batch]) -> list[Batch]:
    """Return the sequences of all batches, sorted by length, as batches with about as many tokens each."""
    lengths = np.sort(np.concatenate([batch.inputs for batch in batches]))
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, BATCHES) / BATCHES)
    first = batches[0]
    return [Batch(each, None, first.rows, first.all_targets) for each in np.split(lengths, cuts)]


def random_ids(number: int) -> Sizes:
    """Return tokens that every vocabulary contains as ordinary tokens."""
    return np.random.default_rng(3).integers(5, 25, number)


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Set weights whose values do not matter; the project's initialization draws them on the CPU."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.fill_(float(name.endswith("weight")))


def useful_flops(model: ModelConfig, batch: Batch, table_rows: int) -> float:
    """Return the FLOPs of a step; the output layer is counted at the target tokens."""
    tokens = int(batch.inputs.sum())
    targets = tokens if batch.all_targets else round(0.15 * tokens)
    source = None if batch.source is None else batch.source.tolist()
    return training_flops(
        model, batch.inputs.tolist(), targets, table_rows, causal=batch.all_targets, source_lengths=source
    )


def kernel_times(step: Callable[[int], None], synchronize: Callable[[], None], file: str | None) -> dict[str, float]:
    """Return the fraction of the time of three steps that each kind of kernel takes; write all kernels to a file."""
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as recorded:
        for number in range(3):
            step(number)
        synchronize()
    events, times = recorded.key_averages(), Counter[str]()
    for event in events:
        name = event.key.lower()
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if spent > 0 and (not cuda or event.device_type == torch.autograd.DeviceType.CUDA):
            times[next((kind for kind, parts in KINDS if any(part in name for part in parts)), "other")] += spent
    if file:
        order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        Path(file).write_text(events.table(sort_by=order, row_limit=60, max_name_column_width=90))
    return {kind: spent / times.total() for kind, spent in times.most_common()}


def measure(
    step: Ours | Peer, model: ModelConfig, batches: list[Batch], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the speed of a step and, on a GPU, its memory."""
    cuda = torch.device(options.device).type == "cuda"
    synchronize: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    result: dict[str, Any] = {"unit": "tokens/s"}
    with step.context:
        begin = time.perf_counter()
        for number in range(BATCHES if cuda or options.compile else 1):  # kernels are chosen for each shape
            step(number)
        synchronize()
        result["warm_up_s"] = time.perf_counter() - begin
        host, begin = 0.0, time.perf_counter()
        for number in range(options.steps):
            before = time.perf_counter()
            step(number)
            host += time.perf_counter() - before
        synchronize()
        seconds = time.perf_counter() - begin
        measured = [batches[number % BATCHES] for number in range(options.steps)]
        flops = sum(useful_flops(model, batch, step.table_rows) for batch in measured) / seconds
        result["value"] = sum(batch.tokens for batch in measured) / seconds
        result |= {"ms_per_step": 1e3 * seconds / options.steps, "host_ms": 1e3 * host / options.steps}
        result["tflops"] = flops / 1e12
        if cuda:
            gpu = torch.cuda.get_device_properties(0)
            known = match_device(gpu.name, gpu.total_memory >> 20)  # of dense bf16 products
            result |= {"device": gpu.name, "mfu": flops / (1e12 * known.half) if known else None}
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if options.profile or options.profile_file:
            result["kernels"] = kernel_times(step, synchronize, options.profile_file)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("implementation", choices=["ours", "hf"])
    parser.add_argument("--rows", type=int, default=4, help="rows of seq_length tokens; sequences of molecules")
    parser.add_argument("--precision", choices=["32", "bf16-mixed"], default="32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--padding", choices=["longest", "bucket", "full"], default="longest", help="of the peer")
    parser.add_argument("--steps", type=int, default=6, help="measured, after the first steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="two small layers, to test this program")
    parser.add_argument("--profile", action="store_true", help="also measure the kinds of kernels")
    parser.add_argument("--profile-file", help="file for a table of all kernels")
    parser.add_argument("--override", action="append", default=[], help="KEY=VALUE of the model's configuration")
    options = parser.parse_args()

    benchmark = MODELS[options.model]
    overrides = [*benchmark.overrides, *(TINY if options.tiny else ())]
    if benchmark.kind != "text":
        overrides.append("model.data.dataset_path=none")
    if benchmark.kind == "spans" and options.tiny:
        overrides.append("model.data.seq_length_dec=64")
    cfg: Any = load(benchmark.config, [*overrides, *options.override], EXAMPLES / benchmark.example / "conf")
    batches = batches_of(benchmark.kind, cfg.model, options.rows)
    if options.padding == "bucket":
        batches = by_length(batches)
    kind: type[Ours | Peer] = Ours if options.implementation == "ours" else Peer
    step = kind(benchmark, cfg, batches, options)
    print(json.dumps(measure(step, cfg.model, batches, options)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
