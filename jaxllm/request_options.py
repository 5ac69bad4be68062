"""What a request may ask for beside its text and how that is sampled."""

from jaxllm.errors import InvalidRequestError
from jaxllm.options import checked_options
from jaxllm.scheduler import request_options


@checked_options(InvalidRequestError)
class RequestOptions(request_options.RequestOptions):
    __doc__ = (request_options.RequestOptions.__doc__ or "").replace("RequestRefusedError", "InvalidRequestError")


DEFAULT_OPTIONS = RequestOptions()
