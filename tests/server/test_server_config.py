"""The server's options: each is explained, checked, and used somewhere."""

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import jaxllm.server
from jaxllm import ConfigError
from jaxllm.server.commands.cli import main, make_parser
from jaxllm.server.commands.options import field_docs, options_from
from jaxllm.server.server_config import ServerConfig


def test_every_option_is_explained():
    docs = field_docs(ServerConfig)
    assert all(docs.get(field.name) for field in fields(ServerConfig))


def test_serving_md_has_every_option_and_default():
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    for field in fields(ServerConfig):
        default = f"{field.default:,}" if type(field.default) is int else f"`{field.default}`"
        assert f"| `{field.name}` | {default} |" in text


def test_every_option_is_read_somewhere():
    folder = Path(jaxllm.server.__path__[0])
    sources = [path.read_text() for path in folder.rglob("*.py") if path.name != "server_config.py"]
    for field in fields(ServerConfig):
        if field.name in ("tls_cert", "tls_key"):
            continue
        assert any(re.search(rf"config\.{field.name}\b", source) for source in sources), field.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65536}, "port is 65,536; the largest is 65,535"),
        ({"port": -1}, "port is -1; it must be an integer of at least 0"),
        ({"api_workers": 0}, "api_workers is 0"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens is 0"),
        ({"default_max_tokens": 0}, "default_max_tokens is 0"),
        ({"request_timeout_s": 0}, "request_timeout_s is 0"),
        ({"watchdog_s": float("nan")}, "watchdog_s is nan"),
        ({"header_timeout_s": None}, "header_timeout_s is None"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s is -1"),
        ({"log_format": "xml"}, "log_format is 'xml'; it must be one of text, json"),
        ({"log_level": "loud"}, "log_level is 'loud'"),
        ({"served_model_name": [""]}, "served_model_name is"),
        ({"admin_key": ""}, "admin_key is empty"),
        ({"cors_origins": ["https://chat.example.org/"]}, "cors_origins has 'https://chat.example.org/'"),
        ({"cors_origins": ["*", "chat.example.org"]}, "cors_origins has 'chat.example.org'"),
        ({"metrics_prefix": "my server:"}, "metrics_prefix is 'my server:'"),
        ({"otlp_endpoint": "localhost:4317"}, "otlp_endpoint is 'localhost:4317'"),
        ({"tls_cert": "cert.pem"}, "set both, or neither"),
        ({"tls_cert": "cert.pem", "tls_key": "key.pem"}, "'cert.pem' and tls_key 'key.pem' cannot be used: .*No such"),
        ({"api_keys_file": "keys.json"}, "api_keys_file is 'keys.json', and there is no such file"),
        ({"chat_template": "t.jinja"}, "chat_template is 't.jinja', and there is no such file"),
    ],
)
def test_a_value_that_cannot_be_is_told(options, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**options)


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--port=0", "port", 0),
        ("--request-timeout-s=none", "request_timeout_s", None),
        ("--served-model-name=a", "served_model_name", ["a"]),
        ("--cors-origins=*", "cors_origins", ["*"]),
        ("--no-ui", "ui", False),
        ("--allow-request-chat-template", "allow_request_chat_template", True),
    ],
)
def test_an_argument_reaches_the_option(argument, name, value):
    args = make_parser().parse_args(["serve", "model", argument])
    assert options_from(args, ServerConfig) == {name: value}
    assert getattr(ServerConfig(**options_from(args, ServerConfig)), name) == value


def test_none_on_the_command_line_turns_parsers_off():
    args = make_parser().parse_args(["serve", "model", "--tool-call-parser", "none"])
    assert ServerConfig(**options_from(args, ServerConfig)).tool_call_parser is None


def test_a_mistake_gives_one_line_and_code_2(capsys):
    assert main(["serve", "model", "--port", "70000"]) == 2
    assert capsys.readouterr().err == "error: port is 70,000; the largest is 65,535\n"


def test_the_admin_key_is_also_taken_from_the_environment(monkeypatch):
    import jaxllm.server.commands.serve

    seen = []
    monkeypatch.setattr(jaxllm.server.commands.serve, "serve", lambda engine, config: seen.append(config.admin_key))
    monkeypatch.setenv("JAXLLM_ADMIN_KEY", "from-environment")
    assert main(["serve", "model"]) == 0
    assert main(["serve", "model", "--admin-key", "from-argument"]) == 0
    assert seen == ["from-environment", "from-argument"]


def test_missing_packages_are_told_with_the_extra_that_has_them(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "jaxllm.server.commands.serve", raising=False)
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert main(["serve", "model"]) == 2
    assert capsys.readouterr().err == (
        "error: the package 'uvloop', which the server needs, is not installed: pip install \"jaxllm[serve]\"\n"
    )
