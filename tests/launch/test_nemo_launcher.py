# SPDX-License-Identifier: Apache-2.0
"""Command lines of NeMo's launcher render the same job as ours."""

from pathlib import Path

import pytest

from bionemo.common.errors import UserError
from bionemo.launch.nemo_launcher import translate_launcher_arguments
from tests.launch.test_render import rendered
from tests.support.launches import launch

PAIRS = {
    "the benchmark of the AWS test case": (
        ["stages=[training]", "training=gpt3/126m", "cluster=bcm", "training.trainer.num_nodes=2",
         "training.trainer.max_steps=40", "training.trainer.val_check_interval=40",
         "++training.trainer.limit_val_batches=0.0", "training.exp_manager.create_checkpoint_callback=False",
         "training.exp_manager.resume_if_exists=False", "training.model.data.data_impl=mock",
         "training.model.data.data_prefix=[]", "base_results_dir=results", "container=/apps/nemo.sqsh",
         "container_mounts=[/fsx:/fsx]", "env_vars.NCCL_PROTO=simple", "launcher_scripts_path=/opt",
         "data_dir=/fsx/data"],
        ["--config-name=pretrain_gpt3_126m", "cluster=bcm", "trainer.num_nodes=2", "trainer.max_steps=40",
         "trainer.val_check_interval=40", "trainer.limit_val_batches=0.0",
         "exp_manager.create_checkpoint_callback=False", "exp_manager.resume_if_exists=False",
         "model.data.data_impl=mock", "model.data.data_prefix=[]", "exp_manager.exp_dir=results/gpt3_126m",
         "cluster.container_image=/apps/nemo.sqsh", "cluster.container_mounts=[/fsx:/fsx]",
         "cluster.env_vars.NCCL_PROTO=simple"],
    ),
    "names, times and preparation": (
        ["stages=[data_preparation,training]", "training=gpt3/5b", "cluster_type=bcm", "cluster.partition=main",
         "training.run.name=mine", "training.run.time_limit=1-00:00:00", "training.run.dependency=null",
         "training.run.results_dir=out"],
        ["--config-name=pretrain_gpt3_5b", "do_preprocessing=True", "cluster=bcm", "cluster.partition=main",
         "name=mine", "cluster.time=1-00:00:00", "cluster.dependency=null", "exp_manager.exp_dir=out"],
    ),
}  # fmt: skip


def directives(text: str) -> list[str]:
    """Return the options of sbatch, and the environment of the job."""
    return [line for line in text.splitlines() if line.startswith(("#SBATCH", "export ", "# HERE"))]


@pytest.mark.parametrize("case", PAIRS)
def test_both_command_lines_render_the_same_job(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for arguments in PAIRS[case]:
        assert launch(monkeypatch, tmp_path, *arguments, "--dry-run") == 0
        output = capsys.readouterr().out
        texts.append((directives(rendered(output, tmp_path)), output.partition("_hydra.yaml\n")[2]))
    assert texts[0] == texts[1]
    assert len(texts[0][0]) > 8
    assert "trainer:" in texts[0][1]  # the whole configuration is compared


def test_other_command_lines_are_unchanged() -> None:
    arguments = ["--config-name=pretrain_gpt3_126m", "training=gpt3/5b", "trainer.devices=8"]
    assert translate_launcher_arguments(arguments) == arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stages=[training,evaluation]"], r"'evaluation' is not supported, choose from data_preparation, training"),
        (["stages=[training]", "cluster_type=k8s"], r"cluster_type=k8s is not supported: choose from bcm, bcp, inter"),
    ],
)
def test_what_is_not_supported_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        translate_launcher_arguments(arguments)
