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
        **_now(llm.stats),
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
    scheduler, tokens = stats.scheduler, stats.scheduler.all_steps
    num_device_pages = scheduler.num_used_pages + scheduler.num_free_pages
    counts = scheduler.num_requests.items()
    return {
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
        "requests": {status.value: count for status, count in counts if not status.is_finished},
        "finished": {status.value.removeprefix("finished_"): count for status, count in counts if status.is_finished},
        "queue": {"num_tokens": scheduler.num_queued_tokens, "age_s": scheduler.queue_age_s},
        "kv_cache_usage": kv_cache_usage(scheduler),
        "pages": {
            "device": {
                "used": scheduler.num_used_pages,
                "cached": scheduler.num_cached_pages,
                "total": num_device_pages,
            },
            "host": {"cached": scheduler.num_host_pages},
        },
        "page_moves": {
            "saved": scheduler.num_saved_pages,
            "loaded": scheduler.num_loaded_pages,
            "lost": scheduler.num_lost_pages,
            "failed": scheduler.num_failed_pages,
            "stalls": scheduler.num_stalls,
            "stall_s": scheduler.stall_s,
        },
        "prefix_cache": {
            "query_tokens": scheduler.num_prefix_query_tokens,
            "hit_tokens": scheduler.num_prefix_hit_tokens,
        },
        "num_preemptions": scheduler.num_preemptions,
        "steps": {
            "count": stats.num_steps,
            "host_s": stats.host_s,
            "device_wait_s": stats.device_wait_s,
            "output_tokens": stats.num_output_tokens,
            "decode_tokens": tokens.num_decode_tokens,
            "prefill_tokens": tokens.num_prefill_tokens,
            "draft_tokens": tokens.num_draft_tokens,
            "padding_tokens": stats.num_padded_tokens,
            "compilations_after_start": stats.num_compilations_after_start,
        },
    }
