"""Which page holds the keys and values of which tokens."""

from collections.abc import Iterable, Sequence
from hashlib import sha256

from jaxllm.scheduler.request import Request


class PrefixCache:
    """Finds pages by a key of all that their content depends on.

    The key of a page is a hash of the key of the page before it and its own tokens; that of the first page starts
    from the request's adapter and salt. Only full pages have one. A page is known here from the step that computes
    it until it is handed out again.

    num_queried_tokens, num_hit_tokens: tokens that admitted requests looked for and found, since the start.
    """

    def __init__(self, page_size: int, is_enabled: bool = True) -> None:
        self._page_size = page_size
        self.is_enabled = is_enabled
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    @property
    def pages(self) -> list[int]:
        return list(self._key_of)

    def key_of(self, page: int) -> bytes:
        """The key of a page that is known."""
        return self._key_of[page]

    def serves(self, request: Request) -> bool:
        """Whether the request shares pages with others."""
        return self.is_enabled and request.use_prefix_cache

    def keys(self, request: Request) -> list[bytes]:
        """The keys of all full pages of the request's known tokens. The request keeps them."""
        keys, page_size = request.page_keys, self._page_size
        first, num_pages = len(keys), request.num_tokens // page_size
        if first < num_pages:
            tokens = request.token_ids[first * page_size : num_pages * page_size].tobytes()
            key, num_bytes = keys[-1] if keys else _root_key(request), 4 * page_size
            for start in range(0, len(tokens), num_bytes):
                key = sha256(key + tokens[start : start + num_bytes]).digest()
                keys.append(key)
        return keys

    def match(self, request: Request) -> list[int]:
        """The cached pages that the request's tokens begin with. At least one token is left to compute."""
        if not self.serves(request):
            return []
        pages: list[int] = []
        most = (request.num_tokens - 1) // self._page_size
        for key in self.keys(request):
            if len(pages) == most or (page := self._page_of.get(key)) is None:
                break
            pages.append(page)
        return pages

    def register(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Makes pages known. Where a key has a page already, the new one stays unknown."""
        page_of, key_of = self._page_of, self._key_of
        for key, page in zip(keys, pages, strict=True):
            if key not in page_of:
                page_of[key] = page
                key_of[page] = key

    def forget(self, pages: Iterable[int]) -> None:
        """Of pages that are not known nothing is to be forgotten."""
        for page in pages:
            if (key := self._key_of.pop(page, None)) is not None:
                del self._page_of[key]

    def count(self, num_tokens: int, num_pages: int) -> None:
        """Notes the admission of a request of so many tokens that shares so many pages."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_pages * self._page_size

    def check_integrity(self) -> None:
        """Asserts that keys and pages agree."""
        assert self._page_of == {key: page for page, key in self._key_of.items()}


def _root_key(request: Request) -> bytes:
    """Lengths are part of it, so that no salt reads like another's with an adapter."""
    if not request.adapter_id and not request.cache_salt:
        return b""
    adapter, salt = (name.encode(errors="surrogatepass") for name in (request.adapter_id, request.cache_salt))
    return sha256(b"%d:%b%d:%b" % (len(adapter), adapter, len(salt), salt)).digest()
