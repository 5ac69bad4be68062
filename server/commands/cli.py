"""The command line: `jaxllm generate`, `jaxllm chat`, `jaxllm serve` and what else `jaxllm --help` lists.

Arguments are read before the engine is imported, so that `--help` and mistakes cost no waiting for JAX.
"""

import argparse
import difflib
import importlib.metadata
import os
import re
import sys
import textwrap
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from jaxllm import ConfigError, EngineConfig, JaxLLMError, RequestOutput, SamplingParams, __version__
from jaxllm.server.commands.answer import Answer
from jaxllm.server.commands.batch import runner as batch_runner
from jaxllm.server.commands.bench import cli as bench
from jaxllm.server.commands.chat import remote as remote_chat
from jaxllm.server.commands.chat.chat import Chat, answers_of
from jaxllm.server.commands.figures import Figures
from jaxllm.server.commands.options import add_options, options_from, text
from jaxllm.server.commands.terminal import note, print_stream, set_up_streams, show
from jaxllm.server.server_config import ServerConfig

if TYPE_CHECKING:
    from jaxllm import LLM

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130
ADMIN_KEY_VARIABLE = "JAXLLM_ADMIN_KEY"
MAX_QUEUED_REQUESTS = 1024  # of a server, which must not queue without end
PROMPT_WIDTH = 72


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0, 2 after an error, 130 after Ctrl-C."""
    set_up_streams()
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    if args.run is None:
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except JaxLLMError as error:
        if args.debug:
            raise
        note(f"error: {error}")
        return EXIT_ERROR
    except KeyboardInterrupt:
        note("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # The reader of our output has left, as `head` does.
        return EXIT_ERROR


class Parser(argparse.ArgumentParser):
    """Prints errors as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"error: {message} (see {self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Ends the program because of arguments that do not exist, with the closest option that does."""
        option = unknown[0].partition("=")[0]
        if not option.startswith("-"):
            self.error(f"unexpected argument {unknown[0]!r}")
        known = re.findall(r"--[a-z][\w-]+", self.format_help())
        closest = difflib.get_close_matches(option.replace("_", "-"), known, n=1)
        self.error(f"unknown option {option}" + (f"; did you mean {closest[0]}?" if closest else ""))


def make_parser() -> Parser:
    parser = Parser(prog="jaxllm", description="LLM inference on JAX/XLA.", allow_abbrev=False)
    versions = f"jaxllm {__version__}, jax {importlib.metadata.version('jax')}, Python {sys.version.split()[0]}"
    parser.add_argument("--version", action="version", version=versions)
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    about = "Continues prompts. The texts go to stdout, everything else to stderr."
    generate = commands.add_parser("generate", help="continue prompts", description=about, allow_abbrev=False)
    generate.add_argument(
        *("-p", "--prompt"), action="append", default=[], type=text, metavar="TEXT", help="may be given several times"
    )
    generate.add_argument("--prompts-file", metavar="FILE", help="a prompt on each line that is not empty; - is stdin")
    _add_common(generate, max_tokens=128)
    generate.set_defaults(run=_generate, parser=generate)

    about = "A conversation in the terminal."
    chat = commands.add_parser("chat", help="talk to a model", description=about, allow_abbrev=False)
    about = "what the model is told before the conversation"
    chat.add_argument("--system", default="", type=text, metavar="TEXT", help=about)
    remote_chat.add_arguments(chat)
    _add_common(chat, max_tokens=None, nargs="?")
    chat.set_defaults(run=_chat, parser=chat)

    about = "An OpenAI-compatible HTTP server. SIGTERM or Ctrl-C ends it when the requests in progress have finished."
    serve = commands.add_parser("serve", help="serve a model over HTTP", description=about, allow_abbrev=False)
    _add_model(serve)
    add_options(serve, ServerConfig, title="server options")
    _add_engine_options(serve, defaults={"max_queued_requests": MAX_QUEUED_REQUESTS})
    serve.set_defaults(run=_serve, parser=serve)

    batch_runner.add_parser(commands)
    bench.add_parser(commands)
    return parser


def _add_common(parser: Parser, *, max_tokens: int | None, nargs: str | None = None) -> None:
    _add_model(parser, nargs=nargs)
    add_options(parser, SamplingParams, title="sampling options", defaults={"max_tokens": max_tokens})
    _add_engine_options(parser, leave_out=("seed",))


def _add_model(parser: Parser, *, nargs: str | None = None) -> None:
    about = 'hub id, folder, .gguf file, or the demo model "smollm2-135m"'
    parser.add_argument("model", metavar="MODEL", nargs=nargs, help=about)
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")


def _add_engine_options(
    parser: Parser, *, defaults: dict[str, Any] | None = None, leave_out: Collection[str] = ()
) -> None:
    """Without those that other places tell: MODEL, and the tenants, which are in the file of API keys."""
    leave_out = ("model", "tenants", "default_tenant", *leave_out)
    add_options(parser, EngineConfig, title="engine options", defaults=defaults, leave_out=leave_out)


def _generate(args: argparse.Namespace) -> int:
    parser: Parser = args.parser
    params = SamplingParams(**options_from(args, SamplingParams))
    prompts = args.prompt + (_read_prompts(args.prompts_file, parser) if args.prompts_file else [])
    if not prompts:
        parser.error("no prompt: give -p TEXT or --prompts-file FILE")
    with _engine(args) as (llm, figures):
        start = time.perf_counter()
        if len(prompts) == 1:
            output = print_stream(llm.stream(prompts[0], params))
            show("\n")
            if output is None:
                raise KeyboardInterrupt
            outputs = [output]
        else:
            outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
            _print_answers(outputs)
        figures.add(map(Answer.of, outputs), time.perf_counter() - start)
        if num_cut := sum(answer.finish_reason == "length" for answer in figures.answers):
            note(f"[cut off by --max-tokens or --max-model-len: {num_cut} of {len(prompts)}]")
        errors = [error for output in outputs for completion in output.outputs if (error := completion.error)]
        for error in dict.fromkeys(errors):
            note(f"error: {error} [{errors.count(error)} of {len(prompts)}]")
        note(str(figures))
    return EXIT_ERROR if errors else 0


def _chat(args: argparse.Namespace) -> int:
    if args.url:
        return remote_chat.run(args)
    if args.model is None:
        args.parser.error("no model: name MODEL, or a server by --url URL")
    for name in ("api_key", "model_name"):
        if getattr(args, name):
            args.parser.error(f"--{name.replace('_', '-')} belongs to --url")
    params = SamplingParams(**options_from(args, SamplingParams))
    with _engine(args) as (llm, figures):
        max_model_len = llm.engine.config.max_model_len
        answer_to = answers_of(llm, params)
        Chat(answer_to, figures, max_tokens=params.max_tokens, max_model_len=max_model_len, system=args.system).run()
        note(str(figures))
    return 0


def _serve(args: argparse.Namespace) -> int:
    options = options_from(args, ServerConfig)
    if "admin_key" not in options and (admin_key := os.environ.get(ADMIN_KEY_VARIABLE)):
        options["admin_key"] = admin_key
    config = ServerConfig(**options)
    engine_config = EngineConfig(model=args.model, **options_from(args, EngineConfig))
    try:
        from jaxllm.server.commands.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'the package {error.name!r}, which the server needs, is not installed: pip install "jaxllm[serve]"'
        ) from error
    serve(engine_config, config)
    return 0


@contextmanager
def _engine(args: argparse.Namespace) -> "Iterator[tuple[LLM, Figures]]":
    start = time.perf_counter()
    from jaxllm import LLM

    llm = LLM(args.model, progress=sys.stderr.isatty(), **options_from(args, EngineConfig))
    try:
        yield llm, Figures(start_up_s=time.perf_counter() - start)
    finally:
        llm.engine.shutdown()


def _read_prompts(name: str, parser: Parser) -> list[str]:
    try:
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            content = file.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--prompts-file {name} cannot be read: {error}")
    return [line for line in content.replace("\r\n", "\n").split("\n") if line.strip()]


def _print_answers(outputs: Sequence[RequestOutput]) -> None:
    for number, output in enumerate(outputs, 1):
        prompt = textwrap.shorten(output.prompt or "", PROMPT_WIDTH, placeholder=" …")
        show(f"--- {number} of {len(outputs)}: {prompt}\n{output.outputs[0].text}\n\n")


if __name__ == "__main__":
    sys.exit(main())
