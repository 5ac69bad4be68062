"""What stands in `jaxllm.LLM`'s place in tests of the commands: it answers in capitals."""

from types import SimpleNamespace
from typing import ClassVar

from jaxllm import EngineConfig
from jaxllm.outputs import CompletionOutput, RequestMetrics, RequestOutput


def make_output(prompt: str, text: str, finish_reason: str = "stop") -> RequestOutput:
    return RequestOutput(
        request_id="0",
        prompt=prompt,
        prompt_token_ids=[1, 2, 3],
        outputs=[CompletionOutput(0, text, list(range(11)), finish_reason)],
        finished=True,
        metrics=RequestMetrics(arrival_time=0.0, first_token_time=0.25, finished_time=0.75, num_output_tokens=11),
    )


class FakeLLM:
    """Answers a prompt in capitals; keeps what it was asked with."""

    made: ClassVar["list[FakeLLM]"] = []

    def __init__(self, model, *, progress=False, **options):
        EngineConfig(model=model, **options)
        self.model, self.options, self.params, self.has_shut_down = model, options, [], False
        self.engine = SimpleNamespace(
            config=SimpleNamespace(max_model_len=64), shutdown=lambda: setattr(self, "has_shut_down", True)
        )
        self.made.append(self)

    def generate(self, prompts, params, *, use_tqdm):
        self.params.append(params)
        return [make_output(prompt, prompt.upper(), "length") for prompt in prompts]

    def stream(self, prompt, params):
        self.params.append(params)
        yield from prompt.upper()
        return make_output(prompt, prompt.upper())
