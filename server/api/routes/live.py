"""GET /live: what the page's live view draws, as JSON."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from jaxllm.server.api.keys import CallerDep
from jaxllm.server.api.server import ServerDep
from jaxllm.server.observability.engine_metrics import kv_cache_usage

if TYPE_CHECKING:
    from jaxllm import AsyncLLM, EngineStats

router = APIRouter(tags=["operation"])


@router.get("/live")
async def live(server: ServerDep, caller: CallerDep) -> dict[str, Any]:
    """The engine as it is now, and latencies and rates of the last minute. `problem` says why requests would not be
    served now; null when they would be.

    Sums count since the engine's start: the difference of two answers is what happened in between.
    """
    llm = server.llm
    return {
        "model": server.model_names[0],
        "state": llm.state,
        "problem": server.watchdog.problem(),
        "is_draining": server.drain.is_draining,
        "engine": _engine(llm),
        "recent": server.metrics.recent(),
        **(_now(llm.stats) if llm.stats is not None else {}),
    }


def _engine(llm: "AsyncLLM") -> Mapping[str, Any]:
    """What does not change while it runs."""
    info = llm.info
    return {
        "platform": info.platform,
        "device": info.device,
        "dtype": info.dtype,
        "kv_cache_dtype": info.kv_cache_dtype,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "page_size": info.page_size,
    }


def _now(stats: "EngineStats") -> Mapping[str, Any]:
    num_device_pages = stats.num_used_pages + stats.num_free_pages
    return {
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "requests": {name: count for name, count in stats.num_requests.items() if not name.startswith("finished")},
        "finished": {
            name.removeprefix("finished_"): count
            for name, count in stats.num_requests.items()
            if name.startswith("finished")
        },
        "queue": {"num_tokens": stats.num_queued_tokens, "age_s": stats.queue_age_s},
        "kv_cache_usage": kv_cache_usage(stats),
        "pages": {
            "device": {"used": stats.num_used_pages, "cached": stats.num_cached_pages, "total": num_device_pages},
            "host": {"cached": stats.num_host_pages},
        },
        "page_moves": {
            "saved": stats.num_saved_pages,
            "loaded": stats.num_loaded_pages,
            "lost": stats.num_lost_pages,
            "failed": stats.num_failed_pages,
            "stalls": stats.num_stalls,
            "stall_s": stats.stall_s,
        },
        "prefix_cache": {"query_tokens": stats.num_prefix_query_tokens, "hit_tokens": stats.num_prefix_hit_tokens},
        "num_preemptions": stats.num_preemptions,
        "steps": {
            "count": stats.num_steps,
            "host_s": stats.host_s,
            "device_wait_s": stats.device_wait_s,
            "output_tokens": stats.num_output_tokens,
            "decode_tokens": stats.all_steps.get("num_decode_tokens", 0),
            "prefill_tokens": stats.all_steps.get("num_prefill_tokens", 0),
            "draft_tokens": stats.all_steps.get("num_draft_tokens", 0),
            "padding_tokens": stats.num_padded_tokens,
            "compilations_after_start": stats.num_compilations_after_start,
        },
    }
