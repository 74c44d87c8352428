# SPDX-License-Identifier: Apache-2.0
"""Measure useful tokens per second of our training command, including trainer and data, as logged by the run."""

import argparse
import json
import tempfile
from pathlib import Path

from proteins import proteins

from bionemo.config.compose import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fasta")
    parser.add_argument("--config", default="pretrain_esm2_8M")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--steps", type=int, default=10, help="measured, after 3 that are not")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows of 1,024 tokens")
    parser.add_argument("--override", action="append", default=[])
    options = parser.parse_args()

    from bionemo.cli.pretrain import pretrain
    from bionemo.training.module import TrainingModule

    readings: list[float] = []
    report = TrainingModule._log_training

    def note(module: TrainingModule, *figures: object) -> None:
        report(module, *figures)  # type: ignore[arg-type]
        readings.append(module.logged_metrics["tokens_per_second"])

    TrainingModule._log_training = note  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory:
        fasta = Path(directory) / "train.fasta"
        fasta.write_text("".join(f">{i}\n{s}\n" for i, s in enumerate(proteins(options.fasta, 8000))))
        steps = options.steps
        overrides = [
            "data@model.data=fasta", f"model.data.dataset_path={directory}",
            f"model.data.dataset.train={fasta}", f"model.data.dataset.val={fasta}",
            f"model.micro_batch_size={options.micro_batch}", f"trainer.precision={options.precision}",
            f"trainer.max_steps={3 + steps}", "trainer.limit_val_batches=1", f"trainer.val_check_interval={10**6}",
            "trainer.num_sanity_val_steps=0", f"trainer.log_every_n_steps={steps + 3}", "model.data.num_workers=0",
            f"exp_manager.exp_dir={directory}/run", "exp_manager.create_checkpoint_callback=False",
            "exp_manager.create_tensorboard_logger=False", *options.override,
        ]  # fmt: skip
        cfg = load(options.config, overrides)
        start = TrainingModule.training_step

        def step(module: TrainingModule, batch: object) -> None:
            if module.trainer.global_step == 3:
                module.throughput.start(module._data.position.consumed_tokens)
            start(module, batch)  # type: ignore[arg-type]

        TrainingModule.training_step = step  # type: ignore[method-assign]
        pretrain(cfg)
    print(json.dumps({"value": readings[-1], "unit": "tokens/s"}))


if __name__ == "__main__":
    main()
