"""Options that nobody ignores: an unknown name is an error, with the closest known one."""

import difflib
import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from jaxllm.errors import InvalidRequestError, JaxLLMError
from jaxllm.scheduler.errors import RequestRefusedError, SchedulerConfigError


def checked_options[C: type](error: type[JaxLLMError]) -> Callable[[C], C]:
    """Makes a keyword-only dataclass raise `error` for an option that it does not have, and one of our errors where a
    base class that belongs to the scheduler, which knows none of them, refuses a value."""

    def decorate(cls: C) -> C:
        initialize = cls.__init__  # type: ignore[misc]
        known = [field.name for field in fields(cls)]

        @functools.wraps(initialize)
        def checked(self: Any, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in known:
                    closest = difflib.get_close_matches(name, known, n=1)
                    hint = f" Did you mean {closest[0]}?" if closest else ""
                    raise error(f"{cls.__name__} has no option {name!r}.{hint} The options are {', '.join(known)}.")
            try:
                initialize(self, *args, **options)
            except SchedulerConfigError as refusal:
                raise error(str(refusal)) from refusal
            except RequestRefusedError as refusal:
                raise InvalidRequestError(str(refusal), param=refusal.param) from refusal

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate
