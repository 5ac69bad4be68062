"""Which page holds the keys and values of which tokens."""

from collections.abc import Callable, Container, Iterable, Sequence
from hashlib import sha256

from jaxllm.scheduler.request import Request
from jaxllm.scheduler.windows import num_left_pages


class PrefixCache:
    """Finds pages by a key of all that their content depends on.

    The key of a page is a hash of the key of the page before it and its own tokens; that of the first page starts
    from the request's adapter and salt. Only full pages have one. A page is known here from the step that computes
    it until it is handed out again. Each group of layers (`SchedulerConfig.windows`) has a page of its own for the
    same tokens, under a key of its own.

    num_queried_tokens, num_hit_tokens: tokens that admitted requests looked for and found, since the start.
    """

    def __init__(self, page_size: int, is_enabled: bool = True, windows: Sequence[int | None] = (None,)) -> None:
        self._page_size = page_size
        self._windows = windows
        self._tags = [b"%d" % group if group else b"" for group in range(len(windows))]
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
        """The cached pages that the request's tokens begin with. At least one token is left to compute.

        They go page by page, and group by group within; 0 for those that the next token does not see.
        """
        if not self.serves(request):
            return []
        return [self._page_of[key] if key else 0 for key in self.longest_prefix(request)]

    def longest_prefix(self, request: Request, others: Container[bytes] = ()) -> list[bytes]:
        """The keys of the pages that the request's tokens begin with, each of which is known here or one of `others`.

        At least one token is left to compute. The keys go page by page, and group by group within, each of its own;
        an empty one stands for a page that the next token does not see.
        """
        most = (request.num_tokens - 1) // self._page_size
        if not most:
            return []
        keys, page_of = self.keys(request)[:most], self._page_of
        if self._windows == (None,):
            num_pages = next((i for i, key in enumerate(keys) if key not in page_of and key not in others), len(keys))
            return keys[:num_pages]

        def is_known(index: int, group: int) -> bool:
            key = keys[index] + self._tags[group]
            return key in page_of or key in others

        num_pages = len(keys)
        for group, window in enumerate(self._windows):
            if window is None:
                num_pages = next((i for i in range(num_pages) if not is_known(i, group)), num_pages)
        is_settled = False
        while not is_settled:
            is_settled = True
            for group, window in enumerate(self._windows):
                if window is not None and (fewer := self._longest(is_known, num_pages, group, window)) < num_pages:
                    num_pages, is_settled = fewer, False
        firsts = [self._first_page(num_pages, window) for window in self._windows]
        return [
            key + self._tags[group] if index >= first else b""
            for index, key in enumerate(keys[:num_pages])
            for group, first in enumerate(firsts)
        ]

    def _longest(self, is_known: Callable[[int, int], bool], num_pages: int, group: int, window: int) -> int:
        """The most pages, up to `num_pages`, of which a group with a window has all that the next token sees."""
        index = num_pages
        while index > self._first_page(num_pages, window):
            index -= 1
            if not is_known(index, group):
                num_pages = index  # with any more pages, the next token sees this one too
        return num_pages

    def _first_page(self, num_pages: int, window: int | None) -> int:
        """The first page that the token after so many pages sees."""
        if window is None:
            return 0
        return max(0, num_left_pages(num_pages * self._page_size, window, self._page_size))

    def page_of(self, key: bytes) -> int | None:
        """The page of a group's own key."""
        return self._page_of.get(key)

    def own_keys(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those under which the groups have their pages for the same tokens."""
        return [key + tag for key in keys for tag in self._tags]

    def register(self, keys: Sequence[bytes], pages: Sequence[int], group: int = 0) -> None:
        """Makes pages of a group known, but for those that are 0. Where a key has a page already, the new one stays
        unknown."""
        page_of, key_of, tag = self._page_of, self._key_of, self._tags[group]
        for key, page in zip(keys, pages, strict=True):
            own_key = key + tag
            if own_key not in page_of and page:
                page_of[own_key] = page
                key_of[page] = own_key

    def restore(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Makes pages known again, under the keys that they had in their groups."""
        for key, page in zip(keys, pages, strict=True):
            if key not in self._page_of:
                self._page_of[key] = page
                self._key_of[page] = key

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
    if not request.adapter_id and not request.options.cache_salt:
        return b""
    adapter, salt = (name.encode(errors="surrogatepass") for name in (request.adapter_id, request.options.cache_salt))
    return sha256(b"%d:%b%d:%b" % (len(adapter), adapter, len(salt), salt)).digest()
