"""What `doctor` prints to be pasted holds no key."""

from __future__ import annotations

import json

import pytest

from zerotrain.run.doctor.report import Report, redact

LONG = "Ab3dEf6hIj9lMn2pQr5tUv8x"
COMMIT = "462165984030d82259a11f4367a4eed129e94a7b"
SECRET = [
    f"hf_{LONG}", f"sk-proj-{LONG}-{LONG}", f"sk-ant-api03-{LONG}", f"ghs_{LONG}", f"ghp_{LONG}",
    f"github_pat_{LONG}_{LONG}", f"glpat-{LONG}", f"xoxb-12345-{LONG}", "AKIAIOSFODNN7EXAMPLE",
    f"AIzaSy{LONG}abcdefgh", f"npm_{LONG}", f"eyJhbGciOi{LONG}.{LONG}.{LONG}",
    "0123456789abcdef0123456789abcdef01234567", f"pypi-{LONG}", f"sk_live_{LONG}",
    f"SG.{LONG}.{LONG}", f"123456789:{LONG}-{LONG}", f"r8_{LONG}", f"dop_v1_{LONG}",
]  # fmt: skip
"""Keys by their form, wherever they stand."""
IN_PLACE = [
    ("curl -H 'Authorization: Bearer {}'", "qwertyuiop"),
    ("Bearer {} was refused", "qwerty.uiop"),
    ("https://{}@hub.org/a", "qwertyuiop"),
    ("https://jane:{}@hub.org/a", "qwerty"),
    ("https://a.blob.core.windows.net/b?sv=1&sig={}&x=2", "abc%2Fdef%3D"),
    ("https://s3.org/a?X-Amz-Signature={}", "abcdef0123"),
    ("https://discord.com/api/webhooks/12345/{}", "AbC-dEf_gh"),
    ("https://hooks.slack.com/services/{}", "T0001/B0001/Xx1"),
    ("AccountName=a;AccountKey={};EndpointSuffix=b", "abcdefghij=="),
    ("webhook_url: {}", "https://a.org/b"),
    ("connection_string = '{}'", "BlobEndpoint=a"),
    ("WANDB_API_KEY={} make train", "very-secret"),
    ("aws_secret_access_key = {}", "wJalrXUtnFEMI/K7MDENG"),
    ("password: {}", "hunter2"),
    ('"api_key": "{}"', "two words"),
    ("COMET_API_KEY: '{}'", "value"),
    ("HF_TOKEN={}", "short"),
    ("MY_SECRET_KEY={}", "short"),
    ("PRIVATE_KEY={}", "short"),
    ("DB_PASS={}", "short"),
    ("zerotrain publish --hub_token {} cats", "hunter2"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\n{}", "b3BlbnNzaC1rZXktdjEAAAAA"),
]
"""Keys by what stands around them."""
KEPT = [
    "sha256 " + "0f" * 32,
    "torch 2.13.0+cpu, commit dfca7e2a1b3c",
    "tokenizer_2, max_length: 77, tokens: 512 a second",
    "https://hub.org/a?download=true, /data/sk-images, 3 skipped",
    "OMP_NUM_THREADS: 3, CUDA_VISIBLE_DEVICES: 0,1",
    f"revision: {COMMIT}, snapshots/{COMMIT}/unet, commit {COMMIT}",
    "global-batch-size: 4, glass-paintings-2024, gloss-pictures",
    "sk-paintings-v2, xoxo-pictures1, --max_new_tokens 12",
    "Basic training of LoRA with a bearer certificate. Basic training. Done",
    "eos_token: </s>, tokenizer.pad_token: <pad>, trigger_token: sks",
]
"""What a reader of the report needs."""


@pytest.mark.parametrize("secret", SECRET)
def test_keys_are_found_by_their_form(secret: str) -> None:
    """In a sentence, in quotes, and at the end of a path."""
    for text in (f"token {secret}, and more", f"'{secret}'", f"a={secret}"):
        assert secret not in redact(text)
        assert "***" in redact(text)


@pytest.mark.parametrize(("text", "secret"), IN_PLACE)
def test_keys_are_found_by_their_place(text: str, secret: str) -> None:
    """After a name, in an address, in a header."""
    found = redact(text.format(secret))
    assert secret not in found
    assert "***" in found


@pytest.mark.parametrize("text", KEPT)
def test_figures_stay(text: str) -> None:
    """Hashes, versions, numbers of tokens."""
    assert redact(text) == text


def test_facts_with_the_name_of_a_secret_are_hidden() -> None:
    """However their value looks, in the text and as JSON; other facts stay."""
    facts = {"run": {"hub": {"wandb_api_key": "plain", "HF_TOKEN": "", "tokens": 3, "list": [1]}}}
    report = Report(facts, ["config/a.yaml: api_key: plain"])
    assert "plain" not in report.text() + report.json()
    hub = json.loads(report.json())["run"]["hub"]
    assert hub == {"wandb_api_key": "***", "HF_TOKEN": "", "tokens": 3, "list": [1]}
