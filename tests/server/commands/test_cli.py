import itertools
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from jaxllm import EngineConfig, SamplingParams, __version__
from jaxllm.errors import ConfigError
from jaxllm.server.commands.cli import main, make_parser
from jaxllm.server.commands.options import field_docs, options_from


def exit_code_of(*argv: str) -> int:
    """Of a command line that the parser refuses."""
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    return exit_.value.code


def test_every_field_of_the_dataclasses_is_explained():
    for cls in (EngineConfig, SamplingParams):
        docs = field_docs(cls)
        assert all(docs.get(field.name) for field in fields(cls))


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--temperature=0.5", "temperature", 0.5),
        ("--max-tokens=7", "max_tokens", 7),
        ("--max-tokens=none", "max_tokens", None),
        ("--stop=a", "stop", ["a"]),
        ("--stop-token-ids=5", "stop_token_ids", [5]),
        ("--no-skip-special-tokens", "skip_special_tokens", False),
        ("--ignore-eos", "ignore_eos", True),
        ("--seed=3", "seed", 3),
    ],
)
def test_a_sampling_option_reaches_sampling_params(argument, name, value):
    args = make_parser().parse_args(["generate", "model", argument])
    options = options_from(args, SamplingParams)
    assert options == {"max_tokens": 128} | {name: value}
    assert getattr(SamplingParams(**options), name) == (tuple(value) if isinstance(value, list) else value)


def test_options_that_are_not_given_are_left_to_the_dataclasses():
    args = make_parser().parse_args(["generate", "model"])
    assert options_from(args, SamplingParams) == {"max_tokens": 128}
    assert options_from(args, EngineConfig) == {}


def test_help_needs_no_jax_and_shows_the_options():
    program = (
        "import sys; from jaxllm.server.commands.cli import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: print(*{'jax', 'transformers', 'flax'} & set(sys.modules), sep='', end='!')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("\n!")
    assert "--top-p" in result.stdout
    assert "--max-num-seqs" in result.stdout


def test_version(capsys):
    assert exit_code_of("--version") == 0
    assert f"jaxllm {__version__}" in capsys.readouterr().out


def test_one_prompt_is_streamed_and_figures_go_to_stderr(fake_llm, capsys):
    assert main(["generate", "model", "-p", "hello", "--temperature", "0", "--page-size", "8"]) == 0
    out, err = capsys.readouterr()
    assert out == "HELLO\n"
    assert "start-up" in err
    assert "TTFT 250.0 ms · TPOT 50.0 ms · 11 tokens in" in err
    (llm,) = fake_llm.made
    assert llm.options == {"page_size": 8}
    assert llm.params[0].temperature == 0
    assert llm.has_shut_down


def test_several_prompts_come_from_options_and_a_file(fake_llm, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("two\n\n  \nthree\n")
    assert main(["generate", "model", "-p", "one", "--prompts-file", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out == "--- 1 of 3: one\nONE\n\n--- 2 of 3: two\nTWO\n\n--- 3 of 3: three\nTHREE\n\n"
    assert "cut off by --max-tokens or --max-model-len: 3 of 3" in err
    assert "33 tokens in" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "m", "--temprature", "1"], "unknown option --temprature; did you mean --temperature?"),
        (["generate", "m", "--max_tokens=1"], "unknown option --max_tokens; did you mean --max-tokens?"),
        (["generate", "m", "--temp", "1"], "unknown option --temp"),
        (["generate", "m", "Hello"], "unexpected argument 'Hello'"),
        (["--verson"], "unknown option --verson; did you mean --version?"),
        (["generate", "m", "--max-tokens", "many"], "invalid int value: 'many'"),
        (["generate", "m"], "no prompt: give -p TEXT or --prompts-file FILE"),
        (["generate", "m", "--prompts-file", "missing.txt"], "missing.txt cannot be read"),
        (["generate"], "required: MODEL"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
    ],
)
def test_a_mistaken_command_line_gives_one_line_and_code_2(argv, message, capsys):
    assert exit_code_of(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature=-1"], "error: temperature is -1.0"),
        (["--page-size=0"], "error: page_size is 0"),
    ],
)
def test_our_errors_give_one_line_and_code_2(fake_llm, options, message, capsys):
    assert main(["generate", "model", "-p", "x", *options]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_debug_shows_where_an_error_comes_from(fake_llm):
    with pytest.raises(ConfigError):
        main(["generate", "model", "-p", "x", "--page-size=0", "--debug"])


def test_ctrl_c_ends_generate_with_code_130(fake_llm, monkeypatch, capsys):
    def stream(self, prompt, params):
        for number in itertools.count():
            if number == 3:
                os.kill(os.getpid(), 2)
            yield f"{number} "

    monkeypatch.setattr(fake_llm, "stream", stream)
    assert main(["generate", "model", "-p", "x"]) == 130
    out, err = capsys.readouterr()
    assert out.startswith("0 1 2 ")
    assert err == "interrupted\n"
    assert fake_llm.made[0].has_shut_down


@pytest.mark.nightly
def test_the_command_continues_a_prompt_with_the_demo_model():
    command = Path(sys.executable).with_name("jaxllm")
    options = "--temperature=0 --max-tokens=8 --max-num-seqs=4 --max-num-batched-tokens=8 --max-model-len=64"
    prompt = ["-p", "The capital of France is"]
    result = subprocess.run(
        [command, "generate", "smollm2-135m", *prompt, *options.split(), "--compilation-cache-dir="],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "8 tokens in" in result.stderr
    assert "PyTorch" not in result.stderr
