"""API keys, and what each is good for."""

import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from jaxllm import ConfigError, TenantConfig
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.server import server_of

logger = logging.getLogger("jaxllm.server")

_SHORT_KEY_LEN = 8  # Shorter ones can be guessed.
_KEY_FIELDS = {"key", "name", "tenant", "priority"}
_FILE_FIELDS = {"keys", "tenants", "default_tenant"}
_TENANT_FIELDS = {field.name for field in fields(TenantConfig)}


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who sends a request.

    tenant: on whose account its requests run; "" where no keys are configured.
    priority: of its requests; lower runs first.
    is_admin: whether it came with the admin key.
    key_name: of its key, for logs; "" where it brought none.
    """

    tenant: str = ""
    priority: int = 0
    is_admin: bool = False
    key_name: str = ""


@dataclass(frozen=True, kw_only=True)
class ApiKeys:
    """The keys that a server knows. A key itself is never kept, only its digest under a secret of this process: a
    look-up takes as long for a nearly right key as for any other.

    tenants, default_tenant: the quotas, for the engine.
    """

    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    default_tenant: TenantConfig = field(default_factory=TenantConfig)
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _callers: dict[bytes, Caller] = field(default_factory=dict, repr=False)
    _are_required: bool = False

    @classmethod
    def load(cls, path: str | None, admin_key: str | None = None) -> "ApiKeys":
        """Reads the keys file:

            {"keys": [{"key": "sk-…", "name": "alice", "tenant": "research", "priority": 0}],
             "tenants": {"research": {"max_running": 8, "max_queued": 100, "max_tokens_per_minute": 60000}},
             "default_tenant": {"max_queued": 20}}

        A key needs `key` and `name`; its tenant is called as the key unless told otherwise. Short keys are warned
        of. Raises ConfigError; no key appears in it, nor in a warning.
        """
        content = _read_json(path) if path is not None else {}
        keys = cls(
            tenants={name: _tenant(f"tenants.{name}", tenant) for name, tenant in content.get("tenants", {}).items()},
            default_tenant=_tenant("default_tenant", content.get("default_tenant", {})),
            _are_required=path is not None,
        )
        for number, entry in enumerate(content.get("keys", [])):
            key, caller = _key(f"keys[{number}]", entry)
            keys._add(f"{path}: keys[{number}] ({caller.key_name})", key, caller)
        if admin_key is not None:
            keys._add("admin_key", admin_key, Caller(is_admin=True, key_name="admin"))
        return keys

    def caller(self, key: str | None) -> Caller:
        """Who sends this key. Raises ApiError 401."""
        found = None
        if key is not None:
            digest = self._digest(key)
            found = self._callers.get(digest)
        if found is not None:
            return found
        if not self._are_required:
            return Caller()
        headers = {"www-authenticate": "Bearer"}
        if key is None:
            message = 'no API key: send the header "Authorization: Bearer KEY"'
            raise ApiError(401, message, code="missing_api_key", headers=headers)
        raise ApiError(401, "this API key is not known here", code="invalid_api_key", headers=headers)

    @property
    def have_admin(self) -> bool:
        return any(caller.is_admin for caller in self._callers.values())

    def _add(self, where: str, key: str, caller: Caller) -> None:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{where}: a key must be printable ASCII without spaces, at least one character")
        if len(key) < _SHORT_KEY_LEN:
            logger.warning(
                "%s: this key has fewer than %d characters, so it can be guessed; use a longer one where strangers can "
                "reach the server",
                where,
                _SHORT_KEY_LEN,
            )
        digest = self._digest(key)
        if digest in self._callers:
            raise ConfigError(f"{where}: the same key is given to {self._callers[digest].key_name!r}")
        self._callers[digest] = caller

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogateescape"), hashlib.sha256)


def caller_of(request: HTTPConnection) -> Caller:
    """The caller of a request, by `Authorization: Bearer KEY` or `X-Api-Key: KEY`. Raises ApiError 401."""
    headers = request.headers
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        key = headers.get("x-api-key", "")
    return server_of(request).keys.caller(key.strip() or None)


async def authenticate(request: Request) -> Caller:  # A plain function would run in a thread.
    """`caller_of`, as a dependency of routes."""
    return caller_of(request)


CallerDep = Annotated[Caller, Depends(authenticate)]
"""`caller: CallerDep`, a parameter of a route."""


async def authenticate_admin(request: Request) -> Caller:
    """The caller of an admin route, as a dependency. Raises ApiError 401 or 403."""
    caller = caller_of(request)
    if caller.is_admin:
        return caller
    if not server_of(request).keys.have_admin:
        message = "the admin routes are closed: the server was started without --admin-key or JAXLLM_ADMIN_KEY"
        raise ApiError(403, message, code="admin_disabled")
    raise ApiError(403, "this route needs the admin key", code="admin_key_required")


def _read_json(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"api_keys_file {path!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        where = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"api_keys_file {path!r} is not JSON{where}") from None  # The message might show a key.
    _check_fields(path, content, _FILE_FIELDS)
    for name, kind, words in (("keys", list, "a list"), ("tenants", dict, "an object")):
        if not isinstance(content.get(name, kind()), kind):
            raise ConfigError(f"{path}: {name} must be {words}")
    if not content.get("keys"):
        raise ConfigError(f"{path}: there are no keys, so nobody could use the server; add one under keys")
    return content


def _key(where: str, entry: Any) -> tuple[str, Caller]:
    _check_fields(where, entry, _KEY_FIELDS)
    for name in ("key", "name", "tenant"):
        if not (isinstance(entry.get(name, "-"), str) and entry.get(name, "-")):
            raise ConfigError(f"{where}: {name} must be a text that is not empty")
    if missing := {"key", "name"} - entry.keys():
        raise ConfigError(f"{where}: {' and '.join(sorted(missing))} missing")
    priority = entry.get("priority", 0)
    if type(priority) is not int or abs(priority) > 2**31 - 1:
        raise ConfigError(f"{where}: priority is {priority!r}; it must be an integer of 32 bits")
    return entry["key"], Caller(tenant=entry.get("tenant", entry["name"]), priority=priority, key_name=entry["name"])


def _tenant(where: str, entry: Any) -> TenantConfig:
    _check_fields(where, entry, _TENANT_FIELDS)
    try:
        return TenantConfig(**entry)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_fields(where: str, entry: Any, known: set[str]) -> None:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be a JSON object")
    for name in entry:
        if name not in known:
            raise ConfigError(f"{where}: there is no field {name!r}; the fields are {', '.join(sorted(known))}")
