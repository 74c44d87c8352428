"""Secrets are redacted by the name of their key or variable and in URLs; harmless text is unchanged."""

import logging

import pytest

from bionemo.common.redaction import (
    LogFilter,
    environment_secrets,
    is_secret_name,
    redact_arguments,
    redact_text,
    redact_tree,
    register_secrets,
    split_arguments,
)
from tests.support.canaries import ENVIRONMENT, NAMES, URLS

HARMLESS_NAMES = (
    "tokenizer mask_token_id num_tokens key_padding max_tokens author authors keyboard keyword monkey compass bypass "
    "path patience pattern signal design assignment attention authority secretary accession tokens_per_batch "
    "mask_special_tokens num_sentinel_tokens embedding_token_dropout json_key sort_key public_key query_key_value "
    "apply_query_key_layer_scaling share_token_embeddings bos_token pad_token_id consumed_tokens session_id sasa "
    "tokens secrets image_pull_secrets longest_tokens word_token num_keys config_exclude_keys "
    "rank_termination_signal passes PWD SSH_AUTH_SOCK secret_name password_file token_type"
)
HARMLESS = [
    "esm2-8M: 7,510,000 parameters, 32 on 1 x cpu, 4 sequences a step, from the beginning",
    "tokens: 2,048", "tokens=1.5M", "mask_token=<mask>", "step 3  loss 2.0  eta 1:22:33", "hf_transformers_model_a",
    "git@github.com:org/repo", "https://host.example:8080/a@b/c?page=2&sort=key", "token.csv: No such file",
    "/data/secret: Permission denied", "exp_manager.api_key: environment variable X is not set", "sk-learn",
    "a7c9b1d0e2f3a4b5c6d7e8f9a0b1c2d3e4f5a6b7", "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVK",
    "CC(=O)OC1=CC=CC=C1C(=O)O", "bionemo.models.esm2nv.ESM2nv", "rank 1: token: that is no letter", "100 % of 3",
    "auth=true", "unrecognized arguments: --tokens=abc: see --help", "--tokens abc",
    "secrets: [wandb:api-key:WANDB_API_KEY]", "image_pull_secrets:\n- registry\nsecrets:\n- wandb:key:WANDB_API_KEY\n",
    "cluster.secrets is 'x', expected a list of str", "model.data.target_tokens=abc",
    "model.data.mock.num_sequences=300", "x[000..049]", "key=value", "",
]  # fmt: skip


def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", [*ENVIRONMENT, *NAMES, "SLURM_JWT"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert is_secret_name(f"exp_manager.settings.{name}")


@pytest.mark.parametrize("name", HARMLESS_NAMES.split())
def test_harmless_names(name: str) -> None:
    assert not is_secret_name(name)
    assert redact_arguments([f"model.{name}=something"]) == [f"model.{name}=something"]


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_texts(text: str) -> None:
    assert redact_text(text) == text
    assert redact_tree({"key": [text]}) == {"key": [text]}


@pytest.mark.parametrize("url", URLS.values())
def test_passwords_in_urls(url: str) -> None:
    before, _, after = url.partition("Qx")
    hidden = f"{before}***{after[after.index('@') :]}"
    assert redact_text(f"cannot read {url}: check it") == f"cannot read {hidden}: check it"
    assert redact_tree({"notes": [{"a": url}]}) == {"notes": [{"a": hidden}]}
    assert redact_arguments([f"notes={url}", url]) == [f"notes={hidden}", hidden]


@pytest.mark.parametrize(("name", "value"), NAMES.items())
def test_values_under_secret_names(name: str, value: str) -> None:
    assert redact_tree({name: value, "a": {name: {"b": [value]}}}) == {name: "***", "a": {name: {"b": ["***"]}}}
    assert redact_arguments([f"++a.{name}={value}", f"--{name}={value}"]) == [f"++a.{name}=***", f"--{name}=***"]
    for arguments in ([f"++a.{name}={value}"], [f"--{name}={value}"], [f"--{name}", value]):
        register_secrets(split_arguments(arguments))
        assert redact_text(f"cannot use {value}") == "cannot use ***"


@pytest.mark.parametrize("value", ENVIRONMENT.values())
def test_values_of_the_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch)
    assert redact_text(f"run {value} failed") == "run *** failed"
    assert redact_tree({"a": {value: [f"x{value}y"]}}) == {"a": {"***": ["x***y"]}}


def test_an_empty_command_line() -> None:
    assert split_arguments([]) == {}


def test_flags_class_paths_and_token_counts_are_not_redacted() -> None:
    tree = {
        "auth": True,
        "token": None,
        "password": "",
        "tokens": 2048,
        "_target_": "bionemo.x.Y",
        "a": [1, 2.5, None],
    }
    assert redact_tree(tree) == tree
    assert redact_tree({"password": 123456, "secret": ["ab", "cd"]}) == {"password": "***", "secret": ["***", "***"]}


def test_which_environment_variables_are_secrets() -> None:
    variables = {"PWD": "/home/me", "API_TOKEN": "short", "SOME_AUTH": "disabled", "SSL_KEY": "/dev/null",
                 "HTTPS_PROXY": "http://me:correct-horse@proxy:80", "HF_TOKEN": "hunter22"}  # fmt: skip
    assert environment_secrets(variables) == {"HTTPS_PROXY": "correct-horse", "HF_TOKEN": "hunter22"}


def test_messages_and_tracebacks_in_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch)
    secret = ENVIRONMENT["WANDB_API_KEY"]
    try:
        raise ValueError(secret)
    except ValueError as error:
        raised = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("a", logging.INFO, "b", 1, "cannot log in with %s", (secret,), raised)
    assert LogFilter().filter(record)
    assert secret not in logging.Formatter().format(record)
    assert record.getMessage() == "cannot log in with ***"
